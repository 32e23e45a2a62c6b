"""Zamba 2: Mamba-2 layers, some of which also run a shared layer of full attention."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hybridkv.entries import CacheEntry
from hybridkv.errors import MalformedConfig
from hybridkv_models._facts import Config, Facts
from hybridkv_models._stores import cache_entries, full, mamba2

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

NOTE = (
    "transformers' one-token decode leaves out the lower time-step limit (`time_step_min`) that its pass over many "
    "tokens applies. The engine always applies it, so its logits are those of one full pass and can differ from "
    "`model.generate`; `paged_cache` follows the model's own decode."
)

_DEFAULT_LAYERS, _DEFAULT_HYBRID = 54, frozenset({6, 12, 18, 24, 30, 36, 42, 47, 51})


def entries(config: Config, dtype: str | None = None, state_dtype: str = "float32") -> tuple[CacheEntry, ...]:
    """conv (d_inner + 2 groups x d_state, d_conv - 1) and recurrent (mamba_heads, mamba_head_dim, d_state) of every
    layer; hybrid layers also K and V of a token, (kv_heads, 2 hidden / heads) each. The attention's weights are shared
    between layers, what it stores is not."""
    facts = Facts(config, "zamba2", dtype)
    if facts.get("layers_block_type") is None and facts.layers() != _DEFAULT_LAYERS:
        raise MalformedConfig(
            f"model type 'zamba2' with {facts.layers()} layers needs the field 'layers_block_type'; only the layout of "
            f"{_DEFAULT_LAYERS} layers has a default"
        )
    kinds = facts.layer_kinds("layers_block_type", lambda i: "hybrid" if i in _DEFAULT_HYBRID else "linear_attention")
    hidden, heads = facts.size("hidden_size"), facts.size("num_attention_heads", 32)
    mamba_heads = facts.size("n_mamba_heads", 8)
    recurrent = mamba2(
        facts,
        heads=mamba_heads,
        head_dim=facts.size("mamba_expand", 2) * hidden // mamba_heads,
        groups=facts.size("mamba_ngroups", 1),
        size=facts.size("mamba_d_state", 64),
        kernel=facts.size("mamba_d_conv", 4),
        state_dtype=state_dtype,
    )
    attention = full(facts.size("num_key_value_heads", heads), 2 * hidden // heads, facts.dtype)
    return cache_entries(facts, kinds, {"linear_attention": recurrent, "hybrid": attention + recurrent})


def tiny_config() -> PreTrainedConfig:
    """Five layers, the second, the fourth and the last with attention, which two blocks take turns at."""
    from transformers import Zamba2Config

    return Zamba2Config(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=5,
        layers_block_type=["linear_attention", "hybrid", "linear_attention", "hybrid", "hybrid"],
        num_attention_heads=4,
        num_key_value_heads=2,
        num_mem_blocks=2,
        use_shared_attention_adapter=False,
        adapter_rank=8,
        use_mem_rope=True,
        n_mamba_heads=8,
        mamba_ngroups=2,
        mamba_d_state=16,
        mamba_d_conv=4,
        mamba_expand=2,
        chunk_size=16,
        max_position_embeddings=4096,
        initializer_range=0.2,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
    )
