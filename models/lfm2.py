"""LFM 2: short convolutions with a few layers of full attention at listed positions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hybridkv.entries import CacheEntry
from hybridkv.errors import MalformedConfig
from hybridkv_models._facts import Config, Facts
from hybridkv_models._stores import cache_entries, full, short_conv

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def entries(config: Config, dtype: str | None = None, state_dtype: str = "float32") -> tuple[CacheEntry, ...]:
    """K and V of a token, (kv_heads, head_dim) each; conv (hidden, conv_L_cache - 1) and no recurrent state:
    `state_dtype` is unused. A config that lists no layers has full attention in all of them."""
    facts = Facts(config, "lfm2", dtype)
    attention = facts.get("full_attn_idxs")
    if not isinstance(attention, list | tuple | None):
        raise MalformedConfig(f"field 'full_attn_idxs' must be a list of layers, got {attention!r}")
    kinds = facts.layer_kinds(
        "layer_types", lambda i: "full_attention" if attention is None or i in attention else "conv"
    )
    return cache_entries(
        facts,
        kinds,
        {
            "full_attention": full(facts.size("num_key_value_heads", 8), facts.head_dim(), facts.dtype),
            "conv": short_conv(facts.size("hidden_size"), facts.size("conv_L_cache", 3), facts.dtype),
        },
    )


def tiny_config() -> PreTrainedConfig:
    """Five layers: two convolutions, full attention, convolution, full attention."""
    from transformers import Lfm2Config

    return Lfm2Config(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        block_multiple_of=32,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        full_attn_idxs=[2, 4],
        conv_L_cache=4,
        conv_bias=True,
        max_position_embeddings=4096,
        initializer_range=0.2,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
    )
