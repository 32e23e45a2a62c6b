"""Granite 4 hybrid: Mamba-2 layers with a few layers of full attention, with or without mixtures of experts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hybridkv.entries import CacheEntry
from hybridkv_models._facts import Config, Facts
from hybridkv_models._stores import cache_entries, full, mamba2_fields

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def entries(config: Config, dtype: str | None = None, state_dtype: str = "float32") -> tuple[CacheEntry, ...]:
    """K and V of a token, (kv_heads, head_dim) each; conv (d_inner + 2 groups x d_state, d_conv - 1) and recurrent
    (heads, mamba_head_dim, d_state). A config that lists no layers has Mamba-2 ones only."""
    facts = Facts(config, "granitemoehybrid", dtype)
    named = "layer_types" if facts.get("layer_types") is not None else "layers_block_type"
    kinds = facts.layer_kinds(named, lambda i: "linear_attention")
    inner = facts.size("mamba_expand", 2) * facts.size("hidden_size")
    stores = {"linear_attention": mamba2_fields(facts, inner, state_dtype)}
    if "full_attention" in kinds:
        kv_heads = facts.size("num_key_value_heads", facts.size("num_attention_heads", 32))
        stores["full_attention"] = full(kv_heads, facts.head_dim(), facts.dtype)
    return cache_entries(facts, kinds, stores)


def tiny_config() -> PreTrainedConfig:
    """Four layers: Mamba-2, full attention, Mamba-2, Mamba-2; two of four experts a token."""
    from transformers import GraniteMoeHybridConfig

    return GraniteMoeHybridConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        shared_intermediate_size=64,
        num_hidden_layers=4,
        layer_types=["linear_attention", "full_attention", "linear_attention", "linear_attention"],
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        position_embedding_type="rope",
        embedding_multiplier=6.0,
        residual_multiplier=0.5,
        attention_multiplier=0.1,
        logits_scaling=4.0,
        mamba_n_heads=8,
        mamba_d_head=16,
        mamba_n_groups=2,
        mamba_d_state=16,
        mamba_d_conv=4,
        mamba_expand=2,
        mamba_chunk_size=16,
        max_position_embeddings=4096,
        initializer_range=0.2,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
    )
