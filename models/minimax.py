"""MiniMax: full attention and lightning attention, whose state is a matrix a head, take turns."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hybridkv.entries import CacheEntry, Part
from hybridkv_models._facts import Config, Facts
from hybridkv_models._stores import Store, cache_entries, full

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

MODE = "single"

NOTE = (
    "One request a forward pass: the model accepts no cache but its own class. After its first pass a request's "
    "lightning attention runs token by token, as in transformers."
)


def entries(config: Config, dtype: str | None = None, state_dtype: str = "float32") -> tuple[CacheEntry, ...]:
    """K and V of a token, (kv_heads, head_dim) each; recurrent (heads, head_dim, head_dim) in the model's dtype, which
    transformers keeps it in: `state_dtype` is unused. A window in the config masks, but keeps no fewer tokens."""
    facts = Facts(config, "minimax", dtype)
    kinds = facts.layer_kinds("layer_types", lambda i: "linear_attention" if i % 2 else "full_attention")
    heads, head_dim = facts.size("num_attention_heads", 32), facts.head_dim()
    return cache_entries(
        facts,
        kinds,
        {
            "full_attention": full(facts.size("num_key_value_heads", 8), head_dim, facts.dtype),
            "linear_attention": (
                Store("linear_attention", (Part("recurrent", (heads, head_dim, head_dim), facts.dtype),)),
            ),
        },
    )


def tiny_config() -> PreTrainedConfig:
    """Four layers, the first of lightning attention, in blocks of 20 tokens; two of four experts a token."""
    from transformers import MiniMaxConfig

    return MiniMaxConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        layer_types=["linear_attention", "full_attention"] * 2,
        block_size=20,
        max_position_embeddings=4096,
        initializer_range=0.1,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
    )
