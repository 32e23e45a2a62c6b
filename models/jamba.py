"""Jamba: Mamba-1 layers with one layer of full attention in every eight, and mixtures of experts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hybridkv.entries import CacheEntry
from hybridkv_models._facts import Config, Facts
from hybridkv_models._stores import cache_entries, full, state

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def entries(config: Config, dtype: str | None = None, state_dtype: str = "float32") -> tuple[CacheEntry, ...]:
    """K and V of a token, (kv_heads, head_dim) each; conv (d_inner, d_conv - 1) and recurrent (d_inner, d_state)."""
    facts = Facts(config, "jamba", dtype)
    period, offset = facts.size("attn_layer_period", 8), facts.size("attn_layer_offset", 4, least=0)
    kinds = facts.layer_kinds("layer_types", lambda i: "full_attention" if i % period == offset else "linear_attention")
    inner = facts.size("mamba_expand", 2) * facts.size("hidden_size")
    return cache_entries(
        facts,
        kinds,
        {
            "full_attention": full(facts.size("num_key_value_heads", 8), facts.head_dim(), facts.dtype),
            "linear_attention": state(
                inner,
                facts.size("mamba_d_conv", 4),
                (inner, facts.size("mamba_d_state", 16)),
                dtype=facts.dtype,
                state_dtype=state_dtype,
            ),
        },
    )


def tiny_config() -> PreTrainedConfig:
    """Four layers: Mamba-1, full attention, Mamba-1, Mamba-1; two of four experts a token in every other layer."""
    from transformers import JambaConfig

    return JambaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        attn_layer_period=4,
        attn_layer_offset=1,
        expert_layer_period=2,
        expert_layer_offset=1,
        num_experts=4,
        num_experts_per_tok=2,
        mamba_d_state=8,
        mamba_d_conv=4,
        mamba_expand=2,
        mamba_dt_rank=8,
        max_position_embeddings=4096,
        initializer_range=0.3,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
    )
