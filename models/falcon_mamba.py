"""Falcon Mamba: Mamba-1 layers only, which normalise dt, B and C before the scan."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hybridkv.entries import CacheEntry
from hybridkv_models._facts import Config, Facts
from hybridkv_models._stores import cache_entries, state

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def entries(config: Config, dtype: str | None = None, state_dtype: str = "float32") -> tuple[CacheEntry, ...]:
    """conv (d_inner, conv_kernel - 1) and recurrent (d_inner, state_size) of every layer."""
    facts = Facts(config, "falcon_mamba", dtype)
    inner = facts.size("expand", 2) * facts.size("hidden_size")
    stores = state(
        inner,
        facts.size("conv_kernel", 4),
        (inner, facts.size("state_size", 16)),
        dtype=facts.dtype,
        state_dtype=state_dtype,
    )
    kinds = ("linear_attention",) * facts.layers()
    return cache_entries(facts, kinds, {"linear_attention": stores})


def tiny_config() -> PreTrainedConfig:
    """Four layers."""
    from transformers import FalconMambaConfig

    return FalconMambaConfig(
        vocab_size=128,
        hidden_size=48,
        state_size=8,
        num_hidden_layers=4,
        expand=2,
        conv_kernel=4,
        time_step_rank=8,
        initializer_range=0.3,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
    )
