"""Which loaded models can be served: what is looked at before a runner touches one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

import hybridkv_models as models
from hybridkv.catalog import model_entries, out_of_reach
from hybridkv.entries import CacheEntry, LayerGroup
from hybridkv.errors import ConfigError, UnsupportedModel
from hybridkv.hf.adapters import base_model
from hybridkv.hf.probe import probe_entries

# Rotary angles that change with the longest position of a batch: a token's key would depend on its neighbours.
_ROPE_BY_LENGTH = ("dynamic", "longrope")


def check_model(model: nn.Module) -> tuple[CacheEntry, ...]:
    """The cache entries of a model that can be served; of a PeftModel, those of the model inside.

    Raises:
        UnsupportedModel: it cannot, with the reason and what to do.
    """
    outer, model = model, base_model(model)
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
    _check_whole(model, kind)
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) != 1:
        raise UnsupportedModel(
            f"{kind} is spread over {', '.join(sorted(map(str, devices)))}, but the pool is one tensor on one device; "
            "load the model onto one device"
        )
    if next(iter(devices)).type == "meta":
        raise UnsupportedModel(f"{kind} has no weights yet (device 'meta'); load them first")
    if outer.training or model.training:
        raise UnsupportedModel(f"{type(outer).__name__} is in training mode; call model.eval() first")
    for rope in _rope_types(config):
        if rope in _ROPE_BY_LENGTH:
            raise UnsupportedModel(
                f"{kind} has full_attention layers with rotary type {rope!r}, whose angles depend on the longest "
                "sequence of a batch, so cached keys cannot be reused; load it with the default rotary type"
            )
    if is_described(model) or out_of_reach(str(config.model_type)):
        return model_entries(config, dtype_name(model))
    return probe_entries(model)


def is_described(model: nn.Module) -> bool:
    """Whether hybridkv_models has a family for a model's type; what others store is read from the model itself."""
    config: Any = model.config
    return models.family(str(config.model_type)) is not None


def is_single(model: nn.Module) -> bool:
    """Whether each request of a model needs a forward pass of its own."""
    return models.mode(str(getattr(getattr(model, "config", None), "model_type", ""))) == "single"


def _check_whole(model: nn.Module, kind: str) -> None:
    """Refuse weights that are not simply there: quantised ones, and those fetched from elsewhere layer by layer.

    Raises:
        UnsupportedModel: with what to do instead.
    """
    config: Any = model.config
    quantised = getattr(config, "quantization_config", None) or getattr(model, "hf_quantizer", None)
    if quantised or getattr(model, "is_quantized", False):
        raise UnsupportedModel(
            f"{kind} is quantised ({_quantisation(config, model)}), and hybridkv was never shown to give the logits of "
            "quantised weights; load it in float32, bfloat16 or float16, without quantization_config. The memory of "
            "keys and values is not affected by quantising weights"
        )
    placed: Any = getattr(model, "hf_device_map", None) or {}
    away = sorted({str(place) for place in placed.values() if str(place) in ("cpu", "disk", "meta")})
    devices = {str(place) for place in placed.values()}
    if "disk" in devices or (away and len(devices) > 1):
        raise UnsupportedModel(
            f"{kind} has layers offloaded to {', '.join(away)} (hf_device_map), fetched anew for every forward pass; "
            "load it onto one device, without device_map and offload_folder"
        )
    for name, module in model.named_modules():
        hook: Any = getattr(module, "_hf_hook", None)
        if any(getattr(each, "offload", False) for each in (hook, *getattr(hook, "hooks", ()))):
            raise UnsupportedModel(
                f"{kind} has an offloading hook of accelerate on {name or 'the model'!r}, which fetches its weights "
                "anew for every forward pass; load it onto one device, or call "
                "accelerate.hooks.remove_hook_from_submodules(model)"
            )


def _quantisation(config: Any, model: nn.Module) -> str:
    method: Any = getattr(config, "quantization_config", None) or getattr(model, "quantization_method", None)
    found = method.get("quant_method") if isinstance(method, Mapping) else getattr(method, "quant_method", method)
    return str(getattr(found, "value", found) or type(getattr(model, "hf_quantizer", None)).__name__)


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
