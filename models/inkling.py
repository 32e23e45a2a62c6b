"""Inkling: sliding and full attention with a bias by distance, and four short convolutions in every layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hybridkv.entries import CacheEntry, Part
from hybridkv.errors import MalformedConfig
from hybridkv_models._facts import Config, Facts, dtype_name
from hybridkv_models._stores import Store, cache_entries, full, sliding

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

MODE = "single"

NOTE = "One request a forward pass: attention adds a bias by distance, which the packed attention does not know."


def entries(config: Config, dtype: str | None = None, state_dtype: str = "float32") -> tuple[CacheEntry, ...]:
    """K and V of a token, (kv_heads, head_dim) each, with sizes of their own in sliding layers; conv0 and conv1, of the
    keys and of the values (kv_heads x head_dim, K), conv2 and conv3, behind attention and MLP (hidden_size, K), all of
    `state_dtype`, because the model convolves in float32."""
    facts = Facts(config, "inkling_text", dtype)
    kv_heads, head_dim = facts.size("num_key_value_heads", 8), facts.size("head_dim", 128)
    swa_heads, swa_dim = facts.size("swa_num_key_value_heads", 16), facts.size("swa_head_dim", 128)
    window = facts.size("sliding_window_size", facts.size("sliding_window", 512))
    stores = {
        "hybrid": (_convolutions(facts, kv_heads * head_dim, state_dtype), *full(kv_heads, head_dim, facts.dtype)),
        "hybrid_sliding": (
            _convolutions(facts, swa_heads * swa_dim, state_dtype),
            *sliding(swa_heads, swa_dim, facts.dtype, window),
        ),
    }
    return cache_entries(facts, _kinds(facts), stores)


def _convolutions(facts: Facts, channels: int, state_dtype: str) -> Store:
    hidden = facts.size("hidden_size", 6144)
    kernel = facts.size("conv_kernel_size", facts.size("sconv_kernel_size", 4))
    sizes, dtype = (channels, channels, hidden, hidden), dtype_name(state_dtype)
    return Store("linear_attention", tuple(Part(f"conv{i}", (size, kernel), dtype) for i, size in enumerate(sizes)))


def _kinds(facts: Facts) -> tuple[str, ...]:
    local = facts.get("local_layer_ids")
    if local is not None and not isinstance(local, list | tuple):
        raise MalformedConfig(f"field 'local_layer_ids' must be a list of layers, got {local!r}")

    def kind(layer: int) -> str:
        slides = (layer + 1) % 6 if local is None else layer in local
        return "hybrid_sliding" if slides else "hybrid"

    return facts.layer_kinds("layer_types", kind)


def tiny_config() -> PreTrainedConfig:
    """Four layers, every second with full attention, the others with a window of 24 tokens and smaller heads."""
    from transformers.models.inkling import InklingTextConfig

    return InklingTextConfig(
        vocab_size=128,
        hidden_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        swa_num_attention_heads=4,
        swa_num_key_value_heads=2,
        swa_head_dim=8,
        sliding_window_size=24,
        layer_types=["hybrid_sliding", "hybrid"] * 2,
        mlp_layer_types=["dense", "sparse", "sparse", "sparse"],
        d_rel=4,
        rel_extent=40,
        intermediate_size=96,
        moe_intermediate_size=32,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_shared_experts=1,
        logits_mup_width_multiplier=1.0,
        max_position_embeddings=4096,
        initializer_range=0.1,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
    )
