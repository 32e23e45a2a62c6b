"""Cohere 2 (Command A, Command R7B): three sliding layers with rotary positions to one of full attention without."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hybridkv.entries import CacheEntry
from hybridkv_models._facts import Config, Facts
from hybridkv_models._stores import full_and_sliding, full_every

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def entries(config: Config, dtype: str | None = None, state_dtype: str = "float32") -> tuple[CacheEntry, ...]:
    """K and V of a token, (kv_heads, head_dim) each. There is no state: `state_dtype` is unused."""
    facts = Facts(config, "cohere2", dtype)
    return full_and_sliding(
        facts,
        full_every(facts, 4),
        kv_heads=facts.size("num_attention_heads", 64),
        head_dim=facts.head_dim(hidden_size=8192, heads=64),
        window=4096,
    )


def tiny_config() -> PreTrainedConfig:
    """Four layers: three with a window of 24 tokens, then full attention without positions."""
    from transformers import Cohere2Config

    return Cohere2Config(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        sliding_window=24,
        logit_scale=1.0,
        max_position_embeddings=4096,
        initializer_range=0.1,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
    )
