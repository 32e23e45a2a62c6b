"""gpt-oss: sliding and full attention alternate, every head has a learned sink, every MLP is a mixture of experts.

The sink is a logit each head learns, not a cached token, so a sliding layer keeps its window and nothing else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hybridkv.entries import CacheEntry
from hybridkv_models._facts import Config, Facts
from hybridkv_models._stores import cache_entries, full, sliding

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def entries(config: Config, dtype: str | None = None, state_dtype: str = "float32") -> tuple[CacheEntry, ...]:
    """K and V of a token, (kv_heads, head_dim) each. There is no state: `state_dtype` is unused."""
    facts = Facts(config, "gpt_oss", dtype)
    kinds = facts.layer_kinds("layer_types", lambda i: "full_attention" if i % 2 else "sliding_attention")
    kv_heads, head_dim = facts.size("num_key_value_heads", 8), facts.size("head_dim", 64)
    window = facts.size("sliding_window", 128)
    return cache_entries(
        facts,
        kinds,
        {
            "full_attention": full(kv_heads, head_dim, facts.dtype),
            "sliding_attention": sliding(kv_heads, head_dim, facts.dtype, window),
        },
    )


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
