"""Which loaded models can be served: what is looked at before a runner touches one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from hybridkv.catalog import model_entries
from hybridkv.entries import CacheEntry, LayerGroup
from hybridkv.errors import ConfigError, UnsupportedModel

# Rotary angles that change with the longest position of a batch: a token's key would depend on its neighbours.
_ROPE_BY_LENGTH = ("dynamic", "longrope")


def check_model(model: nn.Module) -> tuple[CacheEntry, ...]:
    """The cache entries of a model that can be served.

    Raises:
        UnsupportedModel: it cannot, with the reason and what to do.
    """
    config: Any = getattr(model, "config", None)
    if not isinstance(model, nn.Module) or config is None:
        raise UnsupportedModel(
            f"expected a transformers causal language model, got {type(model).__name__}; "
            "load one with AutoModelForCausalLM.from_pretrained()"
        )
    kind = f"model type {getattr(config, 'model_type', '?')!r}"
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModel(
            f"{kind} is an encoder-decoder; its cross-attention layers have no prefix to share. Use its own generate()"
        )
    head = getattr(model, "get_output_embeddings", None)
    if head is None or head() is None:
        raise UnsupportedModel(
            f"{type(model).__name__} has no language-model head; load the model with AutoModelForCausalLM"
        )
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) != 1:
        raise UnsupportedModel(
            f"{kind} is spread over {', '.join(sorted(map(str, devices)))}, but the pool is one tensor on one device; "
            "load the model onto one device"
        )
    if next(iter(devices)).type == "meta":
        raise UnsupportedModel(f"{kind} has no weights yet (device 'meta'); load them first")
    entries = model_entries(config, dtype_name(model))
    if model.training:
        raise UnsupportedModel(f"{type(model).__name__} is in training mode; call model.eval() first")
    for rope in _rope_types(config):
        if rope in _ROPE_BY_LENGTH:
            raise UnsupportedModel(
                f"{kind} has full_attention layers with rotary type {rope!r}, whose angles depend on the longest "
                "sequence of a batch, so cached keys cannot be reused; load it with the default rotary type"
            )
    return entries


def model_dtype(model: nn.Module) -> torch.dtype:
    """The dtype keys, values and conv states have: that of the model's floating-point weights."""
    dtype = getattr(model, "dtype", None)
    return dtype if isinstance(dtype, torch.dtype) else next(model.parameters()).dtype


def dtype_name(model: nn.Module) -> str:
    """`model_dtype` by name: "bfloat16"."""
    return str(model_dtype(model)).removeprefix("torch.")


def _rope_types(config: Any) -> set[str]:
    rope = getattr(config.get_text_config(decoder=True), "rope_parameters", None)
    if not isinstance(rope, Mapping):
        return set()
    settings = [rope, *(value for value in rope.values() if isinstance(value, Mapping))]
    return {str(setting["rope_type"]) for setting in settings if "rope_type" in setting}


def check_groups(entries: Sequence[CacheEntry], groups: Sequence[LayerGroup]) -> None:
    """Refuse a manager of other layers than the model has.

    Raises:
        ConfigError: its groups do not hold exactly `entries`.
    """
    wanted = {(entry.layer, entry.index, entry.kind, entry.parts, entry.params) for entry in entries}
    given = {
        (ref.layer, ref.number, group.kind, group.parts, group.params) for group in groups for ref in group.entries
    }
    if wanted != given:
        layer, _, kind, parts, _ = sorted(wanted ^ given, key=lambda item: item[:3])[0]
        raise ConfigError(
            f"the manager's groups are not this model's: they differ at layer {layer} ({kind}, "
            f"{', '.join(f'{part.name} {part.shape} {part.dtype}' for part in parts)}); "
            "make the manager with hybridkv.hf.runner.build_manager(model, memory)"
        )
