"""The attention function the model calls during a packed pass, and switching it on for just that long.

It is registered once under the name "hybridkv", without a mask function, so transformers builds no masks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedConfig

from hybridkv.errors import UnsupportedModel, UsageError
from hybridkv.hf.step import PackedStep, active_step
from hybridkv.ops.attention import Scoring, packed_attention
from hybridkv.ops.gathered import gathered_attention

NAME = "hybridkv"


def hybridkv_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **ignored: Any,
) -> tuple[Tensor, None]:
    """Attend span by span over the pages that `PackedCache.update` has just written.

    Windows and causality come from the layer's group; masks and dropout have no place in a packed pass.

    Args:
        query: [1, heads, tokens, dim], packed order.
        key: [1, kv heads, tokens, dim]; of a layer that expands latents, those of all tokens its cache returned.
        value: [1, kv heads, tokens, value dim].
        scaling: of the dot products; dim ** -0.5 by default.
        softcap: soft cap of the scores.
        s_aux: attention sinks [heads].

    Returns:
        [1, tokens, heads, value dim], and None for the weights.

    Raises:
        UsageError: no packed pass is under way.
        UnsupportedModel: the layer adds a bias by position, or brings a mask of its own.
    """
    step = active_step.get()
    if step is None:
        raise UsageError("the attention function 'hybridkv' works only inside ModelRunner.forward()")
    if position_bias is not None:
        raise UnsupportedModel("attention with a position bias cannot run over pages; use the model's own forward pass")
    if attention_mask is not None:
        raise UnsupportedModel(
            f"layer {step.layer} attends through a mask it makes itself, which says nothing about other requests' "
            "tokens; use the model's own forward pass"
        )
    layer = step.attend(key)
    plan, entry = step.tokens_of(layer)
    scoring = Scoring(query.shape[-1] ** -0.5 if scaling is None else scaling, softcap, s_aux)
    gathering = step.gathering_of(layer)
    if gathering is not None:
        return gathered_attention(query[0], key[0], value[0], plan, gathering, scoring)[None], None
    return packed_attention(query[0], key[0], value[0], plan, entry, scoring)[None], None


def attention_configs(model: nn.Module) -> list[PreTrainedConfig]:
    """Every config object that names an attention implementation for some part of the model, each once."""
    found: dict[int, PreTrainedConfig] = {}
    for module in model.modules():
        config = getattr(module, "config", None)
        if isinstance(config, PreTrainedConfig):
            found[id(config)] = config
    return list(found.values())


@contextmanager
def packed_pass(configs: list[PreTrainedConfig], step: PackedStep) -> Iterator[None]:
    """Make `step` the active one and "hybridkv" the attention; both are as before afterwards."""
    AttentionInterface.register(NAME, hybridkv_attention)
    # The property of that name would also rewrite nested configs; each one is in the list by itself.
    before = [config._attn_implementation_internal for config in configs]
    token = active_step.set(step)
    try:
        for config in configs:
            config._attn_implementation_internal = NAME
        yield
    finally:
        for config, implementation in zip(configs, before, strict=True):
            config._attn_implementation_internal = implementation
        active_step.reset(token)
