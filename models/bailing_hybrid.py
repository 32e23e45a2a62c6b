"""Bailing hybrid (Ling 3): Kimi delta attention, and gated latent attention (MLA) in every sixth layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hybridkv.entries import CacheEntry
from hybridkv_models._facts import Config, Facts
from hybridkv_models._stores import cache_entries, kimi_delta, latent

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

NOTE = (
    "Full attention stores latents, not keys and values: see what a page holds, below. Layers for multi-token "
    "prediction are not run."
)


def entries(config: Config, dtype: str | None = None, state_dtype: str = "float32") -> tuple[CacheEntry, ...]:
    """latent (1, kv_lora_rank) and rope (1, qk_rope_head_dim) of a token; conv (3 heads x head_dim, kernel - 1) and
    recurrent (heads, head_dim, head_dim)."""
    facts = Facts(config, "bailing_hybrid", dtype)
    period = facts.size("layer_group_size", 6)
    kinds = facts.layer_kinds("layer_types", lambda i: "linear_attention" if (i + 1) % period else "full_attention")
    # A config object overwrites `head_dim` with that of the rotary part, and keeps the given one under another name.
    head_dim = facts.size("linear_head_dim", facts.size("head_dim", 128))
    heads = facts.size("linear_num_heads", facts.size("num_attention_heads", 32))
    kernel = facts.size("linear_conv_kernel_dim", facts.size("short_conv_kernel_size", 4))
    return cache_entries(
        facts,
        kinds,
        {
            "full_attention": latent(facts),
            "linear_attention": kimi_delta(heads, head_dim, kernel, dtype=facts.dtype, state_dtype=state_dtype),
        },
    )


def tiny_config() -> PreTrainedConfig:
    """Six layers: two of KDA, then MLA, twice; from the third on with two of four experts a token."""
    from transformers import BailingHybridConfig

    return BailingHybridConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        moe_intermediate_size=32,
        num_hidden_layers=6,
        layer_group_size=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=16,
        kv_lora_rank=24,
        q_lora_rank=32,
        qk_rope_head_dim=8,
        qk_nope_head_dim=16,
        v_head_dim=12,
        num_local_experts=4,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        max_position_embeddings=4096,
        initializer_range=0.2,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
    )
