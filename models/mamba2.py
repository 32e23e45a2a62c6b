"""Mamba 2: Mamba-2 layers only."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hybridkv.entries import CacheEntry
from hybridkv_models._facts import Config, Facts
from hybridkv_models._stores import cache_entries, mamba2

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def entries(config: Config, dtype: str | None = None, state_dtype: str = "float32") -> tuple[CacheEntry, ...]:
    """conv (d_inner + 2 groups x state_size, conv_kernel - 1) and recurrent (heads, head_dim, state_size)."""
    facts = Facts(config, "mamba2", dtype)
    stores = mamba2(
        facts,
        heads=facts.size("num_heads", 128),
        head_dim=facts.size("head_dim", 64),
        groups=facts.size("n_groups", 8),
        size=facts.size("state_size", 128),
        kernel=facts.size("conv_kernel", 4),
        state_dtype=state_dtype,
    )
    kinds = ("linear_attention",) * facts.layers()
    return cache_entries(facts, kinds, {"linear_attention": stores})


def tiny_config() -> PreTrainedConfig:
    """Four layers of eight heads in two groups, scanned in chunks of 16."""
    from transformers import Mamba2Config

    return Mamba2Config(
        vocab_size=128,
        hidden_size=64,
        num_heads=8,
        head_dim=16,
        state_size=16,
        num_hidden_layers=4,
        expand=2,
        n_groups=2,
        conv_kernel=4,
        chunk_size=16,
        initializer_range=0.3,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
    )
