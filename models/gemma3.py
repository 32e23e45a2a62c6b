"""Gemma 3: five sliding layers to one of full attention. Serves `gemma3_text` and the text part of `gemma3`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hybridkv.entries import CacheEntry
from hybridkv_models._facts import Config, Facts
from hybridkv_models._stores import full_and_sliding, full_every, refuse_bidirectional

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def entries(config: Config, dtype: str | None = None, state_dtype: str = "float32") -> tuple[CacheEntry, ...]:
    """K and V of a token, (kv_heads, head_dim) each. There is no state: `state_dtype` is unused."""
    facts = Facts(config, "gemma3_text", dtype)
    refuse_bidirectional(facts)
    return full_and_sliding(facts, full_every(facts, 6), kv_heads=4, head_dim=256, window=4096)


def tiny_config() -> PreTrainedConfig:
    """Six layers, the third and the last of full attention, the others with a window of 28 tokens."""
    from transformers import Gemma3TextConfig

    return Gemma3TextConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        query_pre_attn_scalar=16,
        sliding_window=28,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
        max_position_embeddings=4096,
        initializer_range=0.1,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
    )
