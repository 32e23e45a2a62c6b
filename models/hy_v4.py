"""Hunyuan V4: latent attention to the tokens an index chooses for four layers at a time, and mixtures of experts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hybridkv.entries import CacheEntry
from hybridkv_models._facts import Config, Facts
from hybridkv_models._indexed import NOTE, indexed_entries, listed_choosers, tiny_sizes

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

__all__ = ["MODE", "NOTE", "entries", "tiny_config"]

MODE = "single"


def entries(config: Config, dtype: str | None = None, state_dtype: str = "float32") -> tuple[CacheEntry, ...]:
    """latent (1, kv_lora_rank), rope (1, qk_rope_head_dim) and index (index_head_dim) of a token; layers
    that share another's choice have no index. There is no state: `state_dtype` is unused."""
    facts = Facts(config, "hy_v4", dtype)
    return indexed_entries(
        facts, chooses=listed_choosers(facts, facts.get("indexer_types"), lambda i: i == 0 or (i - 1) % 4 == 0)
    )


def tiny_config() -> PreTrainedConfig:
    """Four layers, the last two take the choice of the second; all but the first with two of four experts a token."""
    from transformers import HYV4Config

    return HYV4Config(**tiny_sizes(), n_routed_experts=4, n_group=1, topk_group=1)
