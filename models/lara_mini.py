"""Lara Mini: the gated delta rule, sliding and full attention in a pattern of five, mixtures of experts throughout."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hybridkv.entries import CacheEntry
from hybridkv_models._facts import Config, Facts
from hybridkv_models._stores import cache_entries, full, gated_delta_rule, sliding

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_PATTERN = ("linear_attention", "sliding_attention", "linear_attention", "full_attention", "sliding_attention")


def entries(config: Config, dtype: str | None = None, state_dtype: str = "float32") -> tuple[CacheEntry, ...]:
    """K and V of a token, (kv_heads, head_dim) each; conv (2 key_heads x key_dim + value_heads x value_dim, kernel - 1)
    and recurrent (value_heads, key_dim, value_dim)."""
    facts = Facts(config, "lara_mini", dtype)
    kv_heads, head_dim = facts.size("num_key_value_heads", 4), facts.size("head_dim", 128)
    return cache_entries(
        facts,
        facts.layer_kinds("layer_types", lambda i: _PATTERN[i % len(_PATTERN)]),
        {
            "full_attention": full(kv_heads, head_dim, facts.dtype),
            "sliding_attention": sliding(kv_heads, head_dim, facts.dtype, facts.size("sliding_window", 512)),
            "linear_attention": gated_delta_rule(facts, state_dtype, key_heads=8, value_heads=16),
        },
    )


def tiny_config() -> PreTrainedConfig:
    """Five layers: delta rule, a window of 24 tokens, delta rule, full attention, window; two of four experts."""
    from transformers import LaraMiniConfig

    return LaraMiniConfig(
        vocab_size=128,
        hidden_size=64,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        sliding_window=24,
        linear_conv_kernel_dim=4,
        linear_key_head_dim=16,
        linear_value_head_dim=8,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
        max_position_embeddings=4096,
        initializer_range=0.2,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
    )
