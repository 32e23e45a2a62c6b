"""VaultGemma: sliding and full attention alternate, as in Gemma 2, and scores are soft-capped."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hybridkv.entries import CacheEntry
from hybridkv_models._facts import Config, Facts
from hybridkv_models._stores import alternating, full_and_sliding

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def entries(config: Config, dtype: str | None = None, state_dtype: str = "float32") -> tuple[CacheEntry, ...]:
    """K and V of a token, (kv_heads, head_dim) each. There is no state: `state_dtype` is unused."""
    facts = Facts(config, "vaultgemma", dtype)
    return full_and_sliding(facts, alternating, kv_heads=4, head_dim=256, window=4096)


def tiny_config() -> PreTrainedConfig:
    """Four layers: sliding (window 24), full, sliding, full; both soft caps on."""
    from transformers import VaultGemmaConfig

    return VaultGemmaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        query_pre_attn_scalar=16,
        sliding_window=24,
        attn_logit_softcapping=5.0,
        final_logit_softcapping=20.0,
        max_position_embeddings=4096,
        initializer_range=0.1,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
    )
