"""LFM 2 with mixtures of experts: short convolutions with a few layers of full attention at listed positions."""

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
    `state_dtype` is unused. The config has to list its layers."""
    facts = Facts(config, "lfm2_moe", dtype)
    if facts.get("layer_types") is None:
        raise MalformedConfig("model type 'lfm2_moe' needs the field 'layer_types', which is missing")
    return cache_entries(
        facts,
        facts.layer_kinds("layer_types", str),
        {
            "full_attention": full(facts.size("num_key_value_heads", 8), facts.head_dim(), facts.dtype),
            "conv": short_conv(facts.size("hidden_size"), facts.size("conv_L_cache", 3), facts.dtype),
        },
    )


def tiny_config() -> PreTrainedConfig:
    """Five layers: two convolutions, full attention, convolution, full attention; from the second on two of four
    experts a token."""
    from transformers import Lfm2MoeConfig

    return Lfm2MoeConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        moe_intermediate_size=32,
        num_hidden_layers=5,
        layer_types=["conv", "conv", "full_attention", "conv", "full_attention"],
        num_attention_heads=4,
        num_key_value_heads=2,
        num_dense_layers=1,
        num_experts=4,
        num_experts_per_tok=2,
        conv_L_cache=3,
        max_position_embeddings=4096,
        initializer_range=0.2,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
    )
