"""Cohere 2 with mixtures of experts: three sliding layers to one of full attention; dense layers may come before."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hybridkv.entries import CacheEntry
from hybridkv_models._facts import Config, Facts
from hybridkv_models._stores import full_and_sliding, full_every

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def entries(config: Config, dtype: str | None = None, state_dtype: str = "float32") -> tuple[CacheEntry, ...]:
    """K and V of a token, (kv_heads, head_dim) each. There is no state: `state_dtype` is unused."""
    facts = Facts(config, "cohere2_moe", dtype)
    dense = facts.size("first_k_dense_replace", 0, least=0)
    first, rest = full_every(facts, 1, "prefix_dense_sliding_window_pattern"), full_every(facts, 4)
    return full_and_sliding(
        facts,
        lambda layer: first(layer) if layer < dense else rest(layer - dense),
        kv_heads=facts.size("num_attention_heads", 64),
        head_dim=128,
        window=4096,
    )


def tiny_config() -> PreTrainedConfig:
    """Five layers: a dense one of full attention, then experts with a window of 24 tokens in three layers and full."""
    from transformers import Cohere2MoeConfig

    return Cohere2MoeConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        sliding_window=24,
        logit_scale=1.0,
        num_experts=4,
        num_experts_per_tok=2,
        num_shared_experts=1,
        layer_types=["full_attention", *["sliding_attention"] * 3, "full_attention"],
        mlp_layer_types=["dense", *["sparse"] * 4],
        max_position_embeddings=4096,
        initializer_range=0.1,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
    )
