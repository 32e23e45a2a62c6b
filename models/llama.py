"""Llama: full attention in every layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hybridkv.entries import CacheEntry
from hybridkv_models._facts import Config, Facts
from hybridkv_models._stores import cache_entries, full

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def entries(config: Config, dtype: str | None = None, state_dtype: str = "float32") -> tuple[CacheEntry, ...]:
    """K and V of every token in every layer, (kv_heads, head_dim) each. There is no state: `state_dtype` is unused."""
    facts = Facts(config, "llama", dtype)
    kv_heads = facts.size("num_key_value_heads", facts.size("num_attention_heads"))
    kinds = ("full_attention",) * facts.layers()
    return cache_entries(facts, kinds, {"full_attention": full(kv_heads, facts.head_dim(), facts.dtype)})


def tiny_config() -> PreTrainedConfig:
    """Four layers, four query heads on two KV heads."""
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        initializer_range=0.1,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
    )
