"""Kimi Linear: Kimi delta attention (KDA), and multi-head latent attention (MLA) in every fourth layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hybridkv.entries import CacheEntry
from hybridkv.errors import MalformedConfig
from hybridkv_models._facts import Config, Facts
from hybridkv_models._stores import cache_entries, kimi_delta, latent

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

NOTE = "Full attention stores latents, not keys and values: see what a page holds, below."


def entries(config: Config, dtype: str | None = None, state_dtype: str = "float32") -> tuple[CacheEntry, ...]:
    """latent (1, kv_lora_rank) and rope (1, qk_rope_head_dim) of a token; conv (3 heads x head_dim, kernel - 1) and
    recurrent (heads, head_dim, head_dim)."""
    facts = Facts(config, "kimi_linear", dtype)
    nested = Facts(facts.get("linear_attn_config") or {}, "kimi_linear")
    heads = facts.size("linear_num_heads", nested.size("num_heads", 32))
    head_dim = facts.size("linear_head_dim", nested.size("head_dim", 128))
    kernel = facts.size("linear_conv_kernel_dim", nested.size("short_conv_kernel_size", 4))
    return cache_entries(
        facts,
        _kinds(facts, nested),
        {
            "full_attention": latent(facts),
            "linear_attention": kimi_delta(heads, head_dim, kernel, dtype=facts.dtype, state_dtype=state_dtype),
        },
    )


def _kinds(facts: Facts, nested: Facts) -> tuple[str, ...]:
    """Listed in `layer_types`, or by number, from 1 on, in the checkpoints' `linear_attn_config`."""
    attends, recurs = nested.get("full_attn_layers"), nested.get("kda_layers")
    if attends is None or recurs is None:
        return facts.layer_kinds("layer_types", lambda i: "full_attention" if i and i % 4 == 0 else "linear_attention")

    def kind(layer: int) -> str:
        if layer + 1 in attends:
            return "full_attention"
        if layer + 1 in recurs:
            return "linear_attention"
        raise MalformedConfig(
            f"layer {layer + 1} is neither in 'full_attn_layers' nor in 'kda_layers' of field 'linear_attn_config'"
        )

    return facts.layer_kinds("layer_types", kind)


def tiny_config() -> PreTrainedConfig:
    """Five layers: four of KDA, then MLA; all but the first with two of four experts a token."""
    from transformers import KimiLinearConfig

    return KimiLinearConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        moe_intermediate_size=32,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=4,
        kv_lora_rank=24,
        qk_rope_head_dim=8,
        qk_nope_head_dim=16,
        v_head_dim=12,
        linear_num_heads=4,
        linear_head_dim=16,
        num_local_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=4096,
        initializer_range=0.2,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
    )
