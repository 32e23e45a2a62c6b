"""Gemma 4: five sliding layers to one of full attention, whose heads are wider and may be fewer.

Serves `gemma4_text` and the text part of `gemma4`. In small models the last layers share the keys and values of
earlier ones; in large ones every MLP may be a mixture of experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hybridkv.entries import CacheEntry
from hybridkv_models._facts import Config, Facts
from hybridkv_models._stores import (
    NOTHING,
    SHARED,
    Store,
    cache_entries,
    full,
    refuse_bidirectional,
    share_last,
    sliding,
    window_of,
)

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

NOTE = 'use_bidirectional_attention="all" (embedding models) is refused; with "vision" text is served, as it is causal.'


def entries(config: Config, dtype: str | None = None, state_dtype: str = "float32") -> tuple[CacheEntry, ...]:
    """K and V of a token, (kv_heads, head_dim) each, of that layer. There is no state: `state_dtype` is unused."""
    facts = Facts(config, "gemma4_text", dtype, by_layer=True)
    # "vision" lets only the tokens of one image see each other; text stays causal.
    if facts.get("use_bidirectional_attention") != "vision":
        refuse_bidirectional(facts)
    kinds = facts.layer_kinds("layer_types", lambda i: "sliding_attention" if (i + 1) % 6 else "full_attention")
    # transformers makes it so, whatever the config lists.
    kinds = (*kinds[:-1], "full_attention")
    window, wide = window_of(facts, kinds, 512), _overrides(facts)

    def stores(layer: int) -> Mapping[str, tuple[Store, ...]]:
        own = facts.of_layer(layer, wide if kinds[layer] == "full_attention" else {})
        kv_heads, head_dim = own.size("num_key_value_heads", 4), own.size("head_dim", 256)
        return {
            "full_attention": full(kv_heads, head_dim, facts.dtype),
            "sliding_attention": sliding(kv_heads, head_dim, facts.dtype, window),
            SHARED: NOTHING,
        }

    return cache_entries(facts, share_last(facts, kinds, 0), stores)


def _overrides(facts: Facts) -> dict[str, Any]:
    """What full attention overrides in a config.json without `per_layer_config`."""
    wide = {"head_dim": facts.size("global_head_dim", 512)}
    if facts.get("attention_k_eq_v") and facts.get("num_global_key_value_heads") is not None:
        wide["num_key_value_heads"] = facts.size("num_global_key_value_heads")
    return wide


def tiny_config() -> PreTrainedConfig:
    """Seven layers: sliding (window 28), sliding, full, sliding, and three that share the last keys of their kind.

    Full layers have one KV head of 32, sliding ones two of 16. Every layer has a mixture of experts.
    """
    from transformers import Gemma4TextConfig

    wide: dict[str, Any] = {"global_head_dim": 32, "num_global_key_value_heads": 1}
    return Gemma4TextConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=7,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        attention_k_eq_v=True,
        sliding_window=28,
        layer_types=["sliding_attention", *["sliding_attention", "full_attention"] * 3],
        num_kv_shared_layers=3,
        enable_moe_block=True,
        num_experts=4,
        top_k_experts=2,
        moe_intermediate_size=32,
        vocab_size_per_layer_input=128,
        hidden_size_per_layer_input=8,
        max_position_embeddings=4096,
        initializer_range=0.1,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
        **wide,
    )
