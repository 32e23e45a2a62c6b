"""DeepSeek V3.2: latent attention to the tokens an index chooses, in every layer, and mixtures of experts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hybridkv.entries import CacheEntry
from hybridkv_models._facts import Config, Facts
from hybridkv_models._indexed import NOTE, indexed_entries, tiny_sizes

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

__all__ = ["MODE", "NOTE", "entries", "tiny_config"]

MODE = "single"


def entries(config: Config, dtype: str | None = None, state_dtype: str = "float32") -> tuple[CacheEntry, ...]:
    """latent (1, kv_lora_rank), rope (1, qk_rope_head_dim) and index (index_head_dim) of a token. There
    is no state: `state_dtype` is unused."""
    facts = Facts(config, "deepseek_v32", dtype)
    return indexed_entries(facts)


def tiny_config() -> PreTrainedConfig:
    """Four layers, the last two with two of four experts a token."""
    from transformers import DeepseekV32Config

    return DeepseekV32Config(**tiny_sizes(), n_routed_experts=4, n_group=1, topk_group=1, first_k_dense_replace=2)
