"""Granite with sliding windows: one layer of full attention to three sliding ones, a learned sink for every head."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hybridkv.entries import CacheEntry
from hybridkv_models._facts import Config, Facts
from hybridkv_models._stores import full_and_sliding

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def entries(config: Config, dtype: str | None = None, state_dtype: str = "float32") -> tuple[CacheEntry, ...]:
    """K and V of a token, (kv_heads, head_dim) each. There is no state: `state_dtype` is unused."""
    facts = Facts(config, "granite_swa", dtype)
    heads = facts.size("num_attention_heads", 20)
    return full_and_sliding(
        facts,
        lambda layer: "sliding_attention" if layer % 4 else "full_attention",
        kv_heads=heads if facts.get("num_key_value_heads", 4) is None else 4,
        head_dim=facts.head_dim(hidden_size=2560, heads=20),
        window=128,
    )


def tiny_config() -> PreTrainedConfig:
    """Five layers: full attention, three with a window of 24 tokens, full attention without positions."""
    from transformers import GraniteSWAConfig

    return GraniteSWAConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        sliding_window=24,
        attention_multiplier=0.25,
        layer_rope_theta=[10000.0, 10000.0, 10000.0, 10000.0, 0],
        max_position_embeddings=4096,
        initializer_range=0.1,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
    )
