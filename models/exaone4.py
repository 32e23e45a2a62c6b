"""EXAONE 4: three sliding layers to one of full attention without positions; small models have full attention only."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hybridkv.entries import CacheEntry
from hybridkv_models._facts import Config, Facts
from hybridkv_models._stores import full_and_sliding, full_every

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def entries(config: Config, dtype: str | None = None, state_dtype: str = "float32") -> tuple[CacheEntry, ...]:
    """K and V of a token, (kv_heads, head_dim) each. There is no state: `state_dtype` is unused."""
    facts = Facts(config, "exaone4", dtype)
    return full_and_sliding(
        facts,
        full_every(facts, 4),
        kv_heads=32,
        head_dim=facts.head_dim(hidden_size=4096, heads=32),
        window=4096,
    )


def tiny_config() -> PreTrainedConfig:
    """Five layers: three with a window of 28 tokens, full attention without positions, and one more window."""
    from transformers import Exaone4Config

    return Exaone4Config(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        sliding_window=28,
        max_position_embeddings=4096,
        initializer_range=0.1,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
    )
