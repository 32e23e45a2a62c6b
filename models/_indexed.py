"""What the families have in common whose attention chooses its tokens by an index of small keys (DeepSeek's DSA)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hybridkv.entries import CacheEntry, Part, latent_parts
from hybridkv.errors import MalformedConfig, UnsupportedModel
from hybridkv_models._facts import Facts

NOTE = (
    "One request a forward pass: each token attends to the past tokens its index scores highest, which takes the "
    "model's own masks. Where two scores tie but for rounding, transformers itself may choose another token in a chunk "
    "than in one pass, and so may the engine; with few index heads exact ties are common."
)


def indexed_entries(
    facts: Facts, *, rank: int = 512, rope_dim: int = 64, chooses: Callable[[int], bool] = lambda layer: True
) -> tuple[CacheEntry, ...]:
    """Latent attention with an index in every layer.

    Args:
        facts: the config.
        rank, rope_dim: defaults of `kv_lora_rank` and `qk_rope_head_dim`.
        chooses: whether layer i has an index of its own; the others take the choice of the last layer that has.

    Raises:
        UnsupportedModel: a layer of another kind.
    """
    parts = latent_parts(facts.size("kv_lora_rank", rank), facts.size("qk_rope_head_dim", rope_dim), facts.dtype)
    index = Part("index", (facts.size("index_head_dim", 128),), facts.dtype)
    entries = []
    for layer, kind in enumerate(facts.layer_kinds("layer_types", lambda i: "indexed_attention")):
        if kind != "indexed_attention":
            raise UnsupportedModel(
                f"layer {layer} of this {facts.model_type!r} model is of kind {kind!r}; hybridkv knows only "
                "indexed_attention in it"
            )
        entries.append(CacheEntry(layer, kind, (*parts, index) if chooses(layer) else parts))
    return tuple(entries)


def listed_choosers(facts: Facts, listed: Any, otherwise: Callable[[int], bool]) -> Callable[[int], bool]:
    """Which layers have an index of their own: those that a list calls "full", or those of a rule without a list.

    Raises:
        MalformedConfig: a list that is none, or does not name every layer.
    """
    if listed is None:
        return otherwise
    if not isinstance(listed, list | tuple) or len(listed) != facts.layers() or set(listed) - {"full", "shared"}:
        raise MalformedConfig(
            f"field 'indexer_types' must say 'full' or 'shared' for each of {facts.layers()} layers, got {listed!r}"
        )
    return lambda layer: listed[layer] == "full"


def tiny_sizes() -> dict[str, Any]:
    """Fields of a small model: four layers, 47 tokens chosen by 64 index heads.

    With 47, no two scores on either side of the choice come as close as rounding in the documents of the parity tests;
    where they do, transformers itself chooses differently in a chunk than in one pass.
    """
    return {
        "vocab_size": 128,
        "hidden_size": 64,
        "intermediate_size": 96,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "kv_lora_rank": 24,
        "q_lora_rank": 32,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 12,
        "num_experts_per_tok": 2,
        "index_topk": 47,
        "index_head_dim": 16,
        "index_n_heads": 64,
        "max_position_embeddings": 4096,
        "initializer_range": 0.1,
        "pad_token_id": 0,
        "bos_token_id": None,
        "eos_token_id": None,
    }
