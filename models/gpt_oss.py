"""gpt-oss: sliding and full attention alternate, every head has a learned sink, every MLP is a mixture of experts.

The sink is a logit each head learns, not a cached token, so a sliding layer keeps its window and nothing else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hybridkv.entries import CacheEntry
from hybridkv_models._facts import Config, Facts
from hybridkv_models._stores import alternating, full_and_sliding

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def entries(config: Config, dtype: str | None = None, state_dtype: str = "float32") -> tuple[CacheEntry, ...]:
    """K and V of a token, (kv_heads, head_dim) each. There is no state: `state_dtype` is unused."""
    facts = Facts(config, "gpt_oss", dtype)
    return full_and_sliding(facts, alternating, kv_heads=8, head_dim=64, window=128)


def tiny_config() -> PreTrainedConfig:
    """Four layers: sliding (window 24), full, sliding, full; sinks in all, two of four experts a token."""
    from transformers import GptOssConfig

    return GptOssConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        sliding_window=24,
        num_local_experts=4,
        num_experts_per_tok=2,
        initializer_range=0.1,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
    )
