"""LFM 3: short convolutions in every second layer, between them sliding and full attention in turn."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hybridkv.entries import CacheEntry
from hybridkv_models._facts import Config, Facts
from hybridkv_models._stores import cache_entries, full, short_conv, sliding

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def entries(config: Config, dtype: str | None = None, state_dtype: str = "float32") -> tuple[CacheEntry, ...]:
    """K and V of a token, (kv_heads, head_dim) each; conv (hidden, conv_L_cache - 1) and no recurrent state:
    `state_dtype` is unused."""
    facts = Facts(config, "lfm3", dtype)
    kv_heads, head_dim = facts.size("num_key_value_heads", 4), facts.size("head_dim", 128)
    return cache_entries(
        facts,
        facts.layer_kinds("layer_types", _kind),
        {
            "full_attention": full(kv_heads, head_dim, facts.dtype),
            "sliding_attention": sliding(kv_heads, head_dim, facts.dtype, facts.size("sliding_window", 256)),
            "conv": short_conv(facts.size("hidden_size"), facts.size("conv_L_cache", 7), facts.dtype),
        },
    )


def _kind(layer: int) -> str:
    if layer % 4 == 2:
        return "full_attention"
    return "sliding_attention" if layer and layer % 4 == 0 else "conv"


def tiny_config() -> PreTrainedConfig:
    """Six layers: two convolutions, full attention, convolution, a window of 24 tokens, convolution."""
    from transformers import Lfm3Config

    return Lfm3Config(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        sliding_window=24,
        max_position_embeddings=4096,
        initializer_range=0.2,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
    )
