"""Qwen3.5 MoE: three gated-delta-rule layers to one of full attention, mixtures of experts throughout."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hybridkv.entries import CacheEntry
from hybridkv_models._facts import Config, Facts
from hybridkv_models._stores import delta_and_full

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

NOTE = "Text only: all three axes of the multimodal rotary positions are the token's place in the text."


def entries(config: Config, dtype: str | None = None, state_dtype: str = "float32") -> tuple[CacheEntry, ...]:
    """K and V of a token, (kv_heads, head_dim) each; conv (2 key_heads x key_dim + value_heads x value_dim, kernel - 1)
    and recurrent (value_heads, key_dim, value_dim)."""
    facts = Facts(config, "qwen3_5_moe_text", dtype)
    return delta_and_full(facts, state_dtype, kv_heads=2, head_dim=256)


def tiny_config() -> PreTrainedConfig:
    """Four layers: three of the gated delta rule, then gated full attention; two of four experts a token."""
    from transformers import Qwen3_5MoeTextConfig

    return Qwen3_5MoeTextConfig(
        vocab_size=128,
        hidden_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        linear_conv_kernel_dim=4,
        linear_key_head_dim=16,
        linear_value_head_dim=8,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
        max_position_embeddings=4096,
        initializer_range=0.2,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
    )
