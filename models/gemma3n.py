"""Gemma 3n: four sliding layers to one of full attention; the last layers share the keys and values of earlier ones.

Serves `gemma3n_text` and the text part of `gemma3n`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hybridkv.entries import CacheEntry
from hybridkv_models._facts import Config, Facts
from hybridkv_models._stores import NOTHING, SHARED, cache_entries, full, share_last, sliding, window_of

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def entries(config: Config, dtype: str | None = None, state_dtype: str = "float32") -> tuple[CacheEntry, ...]:
    """K and V of a token, (kv_heads, head_dim) each. There is no state: `state_dtype` is unused."""
    facts = Facts(config, "gemma3n_text", dtype)
    kv_heads, head_dim = facts.size("num_key_value_heads", 2), facts.size("head_dim", 256)
    kinds = facts.layer_kinds("layer_types", lambda i: "sliding_attention" if (i + 1) % 5 else "full_attention")
    stores = {
        "full_attention": full(kv_heads, head_dim, facts.dtype),
        "sliding_attention": sliding(kv_heads, head_dim, facts.dtype, window_of(facts, kinds, 512)),
        SHARED: NOTHING,
    }
    return cache_entries(facts, share_last(facts, kinds, 15), stores)


def tiny_config() -> PreTrainedConfig:
    """Seven layers: sliding (window 28), sliding, full, sliding, and three that share the last keys of their kind."""
    from transformers import Gemma3nTextConfig

    return Gemma3nTextConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=7,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        sliding_window=28,
        layer_types=[*["sliding_attention", "sliding_attention", "full_attention"] * 2, "sliding_attention"],
        num_kv_shared_layers=3,
        activation_sparsity_pattern=[0.9, 0.9, *[0.0] * 5],
        vocab_size_per_layer_input=120,
        hidden_size_per_layer_input=8,
        altup_num_inputs=3,
        laurel_rank=8,
        max_position_embeddings=4096,
        initializer_range=0.1,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
    )
