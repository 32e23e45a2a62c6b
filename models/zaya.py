"""Zaya: attention over all or a window of the past, whose keys, queries and values first pass short convolutions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hybridkv.entries import CacheEntry, Part
from hybridkv.errors import MalformedConfig
from hybridkv_models._facts import Config, Facts
from hybridkv_models._stores import Store, cache_entries, full, sliding

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

MODE = "single"

NOTE = "One request a forward pass: the convolutions are the model's own code, which knows no requests side by side."


def entries(config: Config, dtype: str | None = None, state_dtype: str = "float32") -> tuple[CacheEntry, ...]:
    """K and V of a token, (kv_heads, head_dim) each; conv ((heads + kv_heads) x head_dim, columns), columns being what
    two convolutions one after the other look back; recurrent (kv_heads x head_dim / 2), the half of the last token's
    values that the next one takes. All have the model's dtype: `state_dtype` is unused."""
    facts = Facts(config, "zaya", dtype)
    kv_heads, head_dim = facts.size("num_key_value_heads", 2), facts.size("head_dim", 128)
    columns = facts.size("cca_time0", 2) + facts.size("cca_time1", 2) - 2
    if columns < 1:
        raise MalformedConfig("fields 'cca_time0' and 'cca_time1' leave the convolutions nothing to look back at")
    channels = (facts.size("num_attention_heads", 8) + kv_heads) * head_dim
    parts = (
        Part("conv", (channels, columns), facts.dtype),
        Part("recurrent", (kv_heads * head_dim // 2,), facts.dtype),
    )
    states = (Store("linear_attention", parts),)
    stores = {"hybrid": states + full(kv_heads, head_dim, facts.dtype)}
    kinds = facts.layer_kinds("layer_types", lambda i: "hybrid")
    if "hybrid_sliding" in kinds:
        stores["hybrid_sliding"] = states + sliding(kv_heads, head_dim, facts.dtype, facts.size("sliding_window"))
    return cache_entries(facts, kinds, stores)


def tiny_config() -> PreTrainedConfig:
    """Four layers, every second with a window of 24 tokens; one of four experts a token."""
    from transformers import ZayaConfig

    return ZayaConfig(
        vocab_size=128,
        hidden_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        layer_types=["hybrid", "hybrid_sliding"] * 2,
        sliding_window=24,
        cca_time0=3,
        num_experts=4,
        moe_intermediate_size=32,
        router_hidden_size=16,
        max_position_embeddings=4096,
        initializer_range=0.1,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
    )
