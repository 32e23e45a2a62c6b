"""Llama 4: three layers of chunked attention to one of full attention without positions, mixtures of experts.

Serves `llama4_text` and the text part of `llama4`. A token of a chunked layer sees the tokens of its own chunk only, so
that at the start of a chunk the layer needs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hybridkv.entries import CacheEntry
from hybridkv.errors import MalformedConfig
from hybridkv_models._facts import Config, Facts
from hybridkv_models._stores import cache_entries, chunked, full, window_of

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

NOTE = "paged_cache refuses its chunked layers, because left padding moves the chunks of a row; wrap serves them."


def entries(config: Config, dtype: str | None = None, state_dtype: str = "float32") -> tuple[CacheEntry, ...]:
    """K and V of a token, (kv_heads, head_dim) each. There is no state: `state_dtype` is unused."""
    facts = Facts(config, "llama4_text", dtype)
    kinds = facts.layer_kinds("layer_types", lambda layer: _kind(facts, layer))
    kv_heads, head_dim = facts.size("num_key_value_heads", 8), facts.size("head_dim", 128)
    chunk = window_of(facts, kinds, 8192, "attention_chunk_size", "chunked_attention")
    stores = {
        "full_attention": full(kv_heads, head_dim, facts.dtype),
        "chunked_attention": chunked(kv_heads, head_dim, facts.dtype, chunk),
    }
    return cache_entries(facts, kinds, stores)


def _kind(facts: Facts, layer: int) -> str:
    rotary = facts.get("no_rope_layers") or [
        (i + 1) % facts.size("no_rope_layer_interval", 4) for i in range(facts.layers())
    ]
    if not isinstance(rotary, Sequence) or len(rotary) != facts.layers():
        raise MalformedConfig(f"field 'no_rope_layers' must have a number for each layer, got {rotary!r}")
    return "chunked_attention" if rotary[layer] and facts.get("attention_chunk_size", 8192) else "full_attention"


def tiny_config() -> PreTrainedConfig:
    """Five layers: three of chunks of 40 tokens, full attention with growing temperature, another of chunks."""
    from transformers import Llama4TextConfig

    return Llama4TextConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        attention_chunk_size=40,
        intermediate_size_mlp=96,
        num_local_experts=4,
        num_experts_per_tok=2,
        interleave_moe_layer_step=2,
        floor_scale=16,
        attn_scale=0.5,
        max_position_embeddings=4096,
        initializer_range=0.1,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
    )
