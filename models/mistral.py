"""Mistral: one sliding window over every layer, or full attention where the config turns the window off."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hybridkv.entries import CacheEntry
from hybridkv_models._facts import Config, Facts
from hybridkv_models._stores import cache_entries, full, sliding

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def entries(config: Config, dtype: str | None = None, state_dtype: str = "float32") -> tuple[CacheEntry, ...]:
    """K and V of a token, (kv_heads, head_dim) each. There is no state: `state_dtype` is unused.

    `sliding_window: null` means full attention; a config without the field has the default window of 4096.
    """
    facts = Facts(config, "mistral", dtype)
    kv_heads, head_dim = facts.size("num_key_value_heads", 8), facts.head_dim()
    windowed = facts.get("sliding_window", 4096) is not None
    kind = "sliding_attention" if windowed else "full_attention"
    store = (
        sliding(kv_heads, head_dim, facts.dtype, facts.size("sliding_window", 4096))
        if windowed
        else full(kv_heads, head_dim, facts.dtype)
    )
    return cache_entries(facts, (kind,) * facts.layers(), {kind: store})


def tiny_config() -> PreTrainedConfig:
    """Four layers with a window of 24 tokens."""
    from transformers import MistralConfig

    return MistralConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        sliding_window=24,
        max_position_embeddings=4096,
        initializer_range=0.1,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
    )
