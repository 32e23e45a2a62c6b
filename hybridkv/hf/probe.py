"""What a loaded model stores between tokens, read from its own cache: for model types nobody has described.

The model runs on two tokens and then on one more. Its `DynamicCache` afterwards has one object a layer, whose class
says what kind of layer it is and whose tensors say what it keeps.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.cache_utils import (
    DummyLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
    get_layer_types_and_kwargs,
)

from hybridkv.entries import CacheEntry, Part, attention_parts, latent_parts
from hybridkv.errors import UnsupportedModel

_FULL = (DynamicLayer, LinearAttentionAndFullAttentionLayer)
_SLIDING = (DynamicSlidingWindowLayer, LinearAttentionAndSlidingWindowAttentionLayer)
_STATES = (
    LinearAttentionLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
)


def probe_entries(model: nn.Module) -> tuple[CacheEntry, ...]:
    """The cache entries of a loaded model, as a family in hybridkv_models would declare them.

    K and V are (heads, size) each, as the layer hands them to the cache. Of a convolution of width K transformers keeps
    K columns, of which the last K - 1 matter: conv is (channels, K - 1). Recurrent states are as stored.

    Args:
        model: a transformers causal language model with its weights, in eval mode; it runs twice.

    Raises:
        UnsupportedModel: it cannot run on a cache of transformers, or has a layer of a kind nobody knows.
    """
    config: Any = model.config
    label = f"model type {getattr(config, 'model_type', '?')!r}"
    kinds = _layer_kinds(config, label)
    cache = _filled_cache(model, config, label)
    entries: list[CacheEntry] = []
    for layer, (stored, kind) in enumerate(zip(cache.layers, kinds, strict=True)):
        if type(stored) not in (*_FULL, *_SLIDING, *_STATES, DummyLayer):
            raise UnsupportedModel(
                f"{label} cannot be served: layer {layer} is of kind {kind!r} ({type(stored).__name__} in its own "
                "cache), which hybridkv cannot serve. Run its own generate()"
            )
        entries += _tokens(layer, kind, stored, config.get_text_config(decoder=True)) + _states(layer, stored)
    if not entries:
        raise UnsupportedModel(f"{label} stores nothing in a cache of transformers, so there is nothing to reuse")
    return tuple(entries)


def _layer_kinds(config: Any, label: str) -> list[str]:
    try:
        kinds, _ = get_layer_types_and_kwargs(config.get_text_config(decoder=True))
    except Exception as error:
        raise UnsupportedModel(f"{label} has a config that does not say what its layers are: {error}") from error
    return list(kinds)


def _filled_cache(model: nn.Module, config: Any, label: str) -> DynamicCache:
    device = next(model.parameters()).device
    try:
        cache = DynamicCache(config=config)
        with torch.no_grad():
            for tokens in ([[0, 1]], [[1]]):
                model(input_ids=torch.tensor(tokens, device=device), cache=cache, use_cache=True)
    except Exception as error:
        raise UnsupportedModel(
            f"{label} has no description in hybridkv_models, and a trial on two tokens with a cache of transformers "
            f"failed: {type(error).__name__}: {error}. Run its own generate(), or describe it (docs/models.md)"
        ) from error
    return cache


def _tokens(layer: int, kind: str, stored: Any, config: Any) -> list[CacheEntry]:
    """The entry of a layer's keys and values, or of what it expands into them (latent attention).

    None where it stores none, e.g. because it reads another layer's.
    """
    keys, values = getattr(stored, "keys", None), getattr(stored, "values", None)
    if keys is None or values is None:
        return []
    if (keys.shape[1], keys.shape[3]) == (1, getattr(config, "kv_lora_rank", None)):
        parts = latent_parts(keys.shape[3], values.shape[3], _dtype(keys))
    else:
        parts = attention_parts(keys.shape[1], keys.shape[3], _dtype(keys), values.shape[3])
    if type(stored) not in _SLIDING:
        return [CacheEntry(layer, "full_attention", parts)]
    if kind == "chunked_attention":
        return [CacheEntry(layer, kind, parts, (("chunk", int(stored.sliding_window)),))]
    return [CacheEntry(layer, "sliding_attention", parts, (("window", int(stored.sliding_window)),))]


def _states(layer: int, stored: Any) -> list[CacheEntry]:
    """The entry of a layer's states; none where it has none."""
    if type(stored) not in _STATES:
        return []
    convs = [state for state in stored.conv_states.values() if state is not None]
    recurrent = [state for state in stored.recurrent_states.values() if state is not None]
    parts = [
        Part(name, (*state.shape[1:-1], state.shape[-1] - 1), _dtype(state))
        for name, state in zip(_names("conv", len(convs)), convs, strict=True)
    ]
    parts += [
        Part(name, tuple(state.shape[1:]), _dtype(state))
        for name, state in zip(_names("recurrent", len(recurrent)), recurrent, strict=True)
    ]
    return [CacheEntry(layer, "linear_attention", tuple(parts))] if parts else []


def _names(name: str, count: int) -> list[str]:
    return [name] if count == 1 else [f"{name}{i}" for i in range(count)]


def _dtype(state: Tensor) -> str:
    return str(state.dtype).removeprefix("torch.")
