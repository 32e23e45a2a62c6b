"""MiMo V2 Flash: five sliding layers to one of full attention; sliding ones have twice the KV heads, and sinks.

Keys and values have different sizes. The first layer has full attention too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from hybridkv.entries import CacheEntry
from hybridkv_models._facts import Config, Facts
from hybridkv_models._stores import cache_entries, full, sliding, window_of

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def entries(config: Config, dtype: str | None = None, state_dtype: str = "float32") -> tuple[CacheEntry, ...]:
    """K (kv_heads, head_dim) and V (kv_heads, v_head_dim) of a token, twice as many heads in sliding layers.

    There is no state: `state_dtype` is unused.
    """
    facts = Facts(config, "mimo_v2_flash", dtype)
    kinds = facts.layer_kinds(
        "layer_types", lambda layer: "sliding_attention" if layer and (layer + 1) % 6 else "full_attention"
    )
    kv_heads, head_dim = facts.size("num_key_value_heads", 4), facts.size("head_dim", 192)
    value_dim = facts.size("v_head_dim", 128)
    window = window_of(facts, kinds, 129)
    # The model's first configs say how many tokens before its own a token sees.
    if isinstance(config, Mapping) and facts.get("sliding_window_size") is not None:
        window = facts.size("sliding_window_size") + 1
    stores = {
        "full_attention": full(kv_heads, head_dim, facts.dtype, value_dim),
        "sliding_attention": sliding(2 * kv_heads, head_dim, facts.dtype, window, value_dim),
    }
    return cache_entries(facts, kinds, stores)


def tiny_config() -> PreTrainedConfig:
    """Five layers: full attention, three with a window of 28 tokens, full attention; experts in all but the first."""
    from transformers import MiMoV2FlashConfig

    return MiMoV2FlashConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=24,
        v_head_dim=16,
        sliding_window=28,
        layer_types=["full_attention", *["sliding_attention"] * 3, "full_attention"],
        moe_intermediate_size=32,
        n_routed_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=4096,
        initializer_range=0.1,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
    )
