"""GLM with DSA: latent attention to tokens an index chooses, for one layer or several, and mixtures of experts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hybridkv.entries import CacheEntry
from hybridkv_models._facts import Config, Facts
from hybridkv_models._indexed import NOTE, indexed_entries, listed_choosers, tiny_sizes

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

__all__ = ["MODE", "NOTE", "entries", "tiny_config"]

MODE = "single"

_LETTERS = {"F": "full", "S": "shared"}


def entries(config: Config, dtype: str | None = None, state_dtype: str = "float32") -> tuple[CacheEntry, ...]:
    """latent (1, kv_lora_rank), rope (1, qk_rope_head_dim) and index (index_head_dim) of a token; layers
    that share another's choice have no index. There is no state: `state_dtype` is unused."""
    facts = Facts(config, "glm_moe_dsa", dtype)
    listed, pattern = facts.get("indexer_types"), facts.get("index_topk_pattern")
    if listed is None and pattern is not None:
        listed = [_LETTERS.get(letter, letter) for letter in pattern]
    every, offset = max(facts.size("index_topk_freq", 1, least=0), 1), facts.size("index_skip_topk_offset", 2, least=0)
    chooses = listed_choosers(facts, listed, lambda layer: max(layer - offset + 1, 0) % every == 0)
    return indexed_entries(facts, chooses=chooses)


def tiny_config() -> PreTrainedConfig:
    """Four layers, of which the third takes the choice of the second; the last two with two of four experts a token."""
    from transformers import GlmMoeDsaConfig

    return GlmMoeDsaConfig(
        **tiny_sizes(),
        n_routed_experts=4,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=2,
        indexer_types=["full", "full", "shared", "full"],
    )
