"""OLMo Hybrid: three gated-delta-rule layers to one of full attention."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hybridkv.entries import CacheEntry
from hybridkv_models._facts import Config, Facts
from hybridkv_models._stores import cache_entries, full, state

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def entries(config: Config, dtype: str | None = None, state_dtype: str = "float32") -> tuple[CacheEntry, ...]:
    """K and V of a token, (kv_heads, head_dim) each; conv (2 key_heads x key_dim + value_heads x value_dim, kernel - 1)
    and recurrent (value_heads, key_dim, value_dim)."""
    facts = Facts(config, "olmo_hybrid", dtype)
    hidden, heads = facts.size("hidden_size", 3840), facts.size("num_attention_heads", 30)
    key_heads, value_heads = facts.size("linear_num_key_heads", heads), facts.size("linear_num_value_heads", heads)
    key_dim = facts.size("linear_key_head_dim", int(0.75 * hidden / key_heads))
    value_dim = facts.size("linear_value_head_dim", 2 * key_dim)
    head_dim = facts.size("head_dim", hidden // heads)
    return cache_entries(
        facts,
        _kinds(facts),
        {
            "full_attention": full(facts.size("num_key_value_heads", heads), head_dim, facts.dtype),
            "linear_attention": state(
                2 * key_heads * key_dim + value_heads * value_dim,
                facts.size("linear_conv_kernel_dim", 4),
                (value_heads, key_dim, value_dim),
                dtype=facts.dtype,
                state_dtype=state_dtype,
            ),
        },
    )


def _kinds(facts: Facts) -> tuple[str, ...]:
    """Every fourth layer attends; of fewer than four, the last."""
    last = facts.size("num_hidden_layers", 32) - 1
    attends = range(3, last + 1, 4) if last >= 3 else (last,)
    return facts.layer_kinds("layer_types", lambda i: "full_attention" if i in attends else "linear_attention")


def tiny_config() -> PreTrainedConfig:
    """Four layers: three of the gated delta rule, whose states may change sign, then full attention."""
    from transformers import OlmoHybridConfig

    return OlmoHybridConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=8,
        max_position_embeddings=4096,
        initializer_range=0.1,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
    )
