"""Code World Model: one layer of full attention to three sliding ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hybridkv.entries import CacheEntry
from hybridkv_models._facts import Config, Facts
from hybridkv_models._stores import full_and_sliding

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def entries(config: Config, dtype: str | None = None, state_dtype: str = "float32") -> tuple[CacheEntry, ...]:
    """K and V of a token, (kv_heads, head_dim) each. There is no state: `state_dtype` is unused."""
    facts = Facts(config, "cwm", dtype)
    return full_and_sliding(
        facts,
        lambda layer: "sliding_attention" if layer % 4 else "full_attention",
        kv_heads=8,
        head_dim=128,
        window=8192,
    )


def tiny_config() -> PreTrainedConfig:
    """Four layers: full attention, then three with a window of 24 tokens."""
    from transformers import CwmConfig

    return CwmConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        sliding_window=24,
        max_position_embeddings=16384,
        initializer_range=0.1,
        pad_token_id=0,
        bos_token_id=1,
    )
