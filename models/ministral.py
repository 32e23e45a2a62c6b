"""Ministral: a sliding window in the layers the config lists; without a list in all of them, if it has one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hybridkv.entries import CacheEntry
from hybridkv_models._facts import Config, Facts
from hybridkv_models._stores import full_and_sliding

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def entries(config: Config, dtype: str | None = None, state_dtype: str = "float32") -> tuple[CacheEntry, ...]:
    """K and V of a token, (kv_heads, head_dim) each. There is no state: `state_dtype` is unused."""
    facts = Facts(config, "ministral", dtype)
    every = "full_attention" if facts.get("sliding_window", 4096) is None else "sliding_attention"
    return full_and_sliding(
        facts,
        lambda layer: every,
        kv_heads=8,
        head_dim=facts.head_dim(hidden_size=4096, heads=32),
        window=4096,
    )


def tiny_config() -> PreTrainedConfig:
    """Four layers: full attention, then three with a window of 24 tokens."""
    from transformers import MinistralConfig

    return MinistralConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        sliding_window=24,
        layer_types=["full_attention", *["sliding_attention"] * 3],
        max_position_embeddings=4096,
        initializer_range=0.1,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
    )
