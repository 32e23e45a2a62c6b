"""Bamba: Mamba-2 layers with a few layers of full attention at listed positions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hybridkv.entries import CacheEntry
from hybridkv.errors import MalformedConfig
from hybridkv_models._facts import Config, Facts
from hybridkv_models._stores import cache_entries, full, mamba2_fields

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def entries(config: Config, dtype: str | None = None, state_dtype: str = "float32") -> tuple[CacheEntry, ...]:
    """K and V of a token, (kv_heads, head_dim) each; conv (d_inner + 2 groups x d_state, d_conv - 1) and recurrent
    (heads, mamba_head_dim, d_state)."""
    facts = Facts(config, "bamba", dtype)
    attention = facts.get("attn_layer_indices") or ()
    if not isinstance(attention, list | tuple):
        raise MalformedConfig(f"field 'attn_layer_indices' must be a list of layers, got {attention!r}")
    kinds = facts.layer_kinds("layer_types", lambda i: "full_attention" if i in attention else "linear_attention")
    inner = facts.size("mamba_expand", 2) * facts.size("hidden_size")
    return cache_entries(
        facts,
        kinds,
        {
            "full_attention": full(facts.size("num_key_value_heads", 8), facts.head_dim(), facts.dtype),
            "linear_attention": mamba2_fields(facts, inner, state_dtype),
        },
    )


def tiny_config() -> PreTrainedConfig:
    """Four layers: Mamba-2, full attention, Mamba-2, Mamba-2."""
    from transformers import BambaConfig

    return BambaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        attn_layer_indices=[1],
        mamba_n_heads=8,
        mamba_d_head=16,
        mamba_n_groups=2,
        mamba_d_state=16,
        mamba_d_conv=4,
        mamba_expand=2,
        mamba_chunk_size=16,
        max_position_embeddings=4096,
        initializer_range=0.3,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
    )
