"""Falcon-H1: full attention and Mamba-2 side by side in every layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hybridkv.entries import CacheEntry
from hybridkv_models._facts import Config, Facts
from hybridkv_models._stores import cache_entries, full, mamba2_fields

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def entries(config: Config, dtype: str | None = None, state_dtype: str = "float32") -> tuple[CacheEntry, ...]:
    """Every layer has two: K and V of a token, (kv_heads, head_dim) each; conv (d_ssm + 2 groups x d_state, d_conv - 1)
    and recurrent (heads, mamba_head_dim, d_state). `mamba_d_ssm: null` means mamba_expand x hidden_size."""
    facts = Facts(config, "falcon_h1", dtype)
    # Where one of these two fields is absent it has a size of its own; where it is null it follows others.
    inner = 1024 if facts.get("mamba_d_ssm", 1024) else facts.size("mamba_expand", 2) * facts.size("hidden_size")
    kv_heads = 8 if facts.get("num_key_value_heads", 8) else facts.size("num_attention_heads", 32)
    attention = full(facts.size("num_key_value_heads", kv_heads), facts.head_dim(), facts.dtype)
    states = mamba2_fields(facts, facts.size("mamba_d_ssm", inner), state_dtype)
    kinds = ("hybrid",) * facts.layers()
    return cache_entries(facts, kinds, {"hybrid": attention + states})


def tiny_config() -> PreTrainedConfig:
    """Four layers, all with both; every multiplier away from 1."""
    from transformers import FalconH1Config

    return FalconH1Config(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        mamba_d_ssm=96,
        mamba_n_heads=6,
        mamba_d_head=16,
        mamba_n_groups=2,
        mamba_d_state=16,
        mamba_d_conv=4,
        mamba_chunk_size=16,
        embedding_multiplier=2.0,
        lm_head_multiplier=0.5,
        key_multiplier=1.5,
        attention_in_multiplier=0.8,
        attention_out_multiplier=1.2,
        ssm_in_multiplier=1.3,
        ssm_out_multiplier=0.7,
        ssm_multipliers=[0.9, 1.1, 0.8, 1.2, 0.7],
        mlp_multipliers=[0.8, 1.2],
        max_position_embeddings=4096,
        initializer_range=0.2,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
    )
