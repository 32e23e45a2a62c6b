"""Zamba: Mamba-1 layers of several heads; every sixth also runs one shared layer of full attention."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hybridkv.entries import CacheEntry
from hybridkv_models._facts import Config, Facts
from hybridkv_models._stores import cache_entries, full, state

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def entries(config: Config, dtype: str | None = None, state_dtype: str = "float32") -> tuple[CacheEntry, ...]:
    """conv (d_inner, d_conv - 1) and recurrent (mamba_heads, d_inner / mamba_heads, d_state) of every layer; hybrid
    layers also K and V of a token, (kv_heads, attention_head_dim) each. The attention's weights are shared between
    layers, what it stores is not."""
    facts = Facts(config, "zamba", dtype)
    period, offset = facts.size("attn_layer_period", 6), facts.size("attn_layer_offset", 4, least=0)

    def kind(layer: int) -> str:
        hybrid = layer == 2 if layer < 3 else (layer - 3) % period == offset
        return "hybrid" if hybrid else "linear_attention"

    kinds = facts.layer_kinds("layers_block_type", kind)
    hidden, heads = facts.size("hidden_size"), facts.size("n_mamba_heads", 2)
    inner = facts.size("mamba_expand", 2) * hidden
    head_dim = facts.size("attention_head_dim", 2 * hidden // facts.size("num_attention_heads", 16))
    recurrent = state(
        inner,
        facts.size("mamba_d_conv", 4),
        (heads, inner // heads, facts.size("mamba_d_state", 16)),
        dtype=facts.dtype,
        state_dtype=state_dtype,
    )
    attention = full(facts.size("num_key_value_heads", 16), head_dim, facts.dtype)
    return cache_entries(facts, kinds, {"linear_attention": recurrent, "hybrid": attention + recurrent})


def tiny_config() -> PreTrainedConfig:
    """Five layers, the second and the fourth with attention; two Mamba heads."""
    from transformers import ZambaConfig

    return ZambaConfig(
        vocab_size=128,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=5,
        layers_block_type=["linear_attention", "hybrid", "linear_attention", "hybrid", "linear_attention"],
        num_attention_heads=4,
        num_key_value_heads=2,
        n_mamba_heads=2,
        mamba_d_state=8,
        mamba_d_conv=4,
        mamba_expand=2,
        mamba_dt_rank=8,
        max_position_embeddings=4096,
        initializer_range=0.2,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
    )
