"""Nemotron-H: Mamba-2, full attention and MLP (or mixture-of-experts) layers, each a layer of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hybridkv.entries import CacheEntry
from hybridkv.errors import MalformedConfig
from hybridkv_models._facts import Config, Facts
from hybridkv_models._stores import NOTHING, cache_entries, full, mamba2

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

NOTE = (
    "transformers' one-token decode leaves out the lower time-step limit (`time_step_min`) that its pass over many "
    "tokens applies. The engine always applies it, so its logits are those of one full pass and can differ from "
    "`model.generate`; `paged_cache` follows the model's own decode."
)

_PATTERN = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}


def entries(config: Config, dtype: str | None = None, state_dtype: str = "float32") -> tuple[CacheEntry, ...]:
    """K and V of a token, (kv_heads, head_dim) each; conv (d_inner + 2 groups x d_state, conv_kernel - 1) and
    recurrent (heads, mamba_head_dim, d_state). MLP and expert layers store nothing."""
    facts = Facts(config, "nemotron_h", dtype)
    return cache_entries(
        facts,
        _kinds(facts),
        {
            "full_attention": full(facts.size("num_key_value_heads", 8), facts.size("head_dim", 128), facts.dtype),
            "linear_attention": mamba2(
                facts,
                heads=facts.size("mamba_num_heads", 128),
                head_dim=facts.size("mamba_head_dim", 64),
                groups=facts.size("n_groups", facts.size("mamba_n_groups", 8)),
                size=facts.size("ssm_state_size", 128),
                kernel=facts.size("conv_kernel", facts.size("mamba_d_conv", 4)),
                state_dtype=state_dtype,
            ),
            "mlp": NOTHING,
            "moe": NOTHING,
        },
    )


def _kinds(facts: Facts) -> tuple[str, ...]:
    if facts.get("layers_block_type") is not None:
        return facts.layer_kinds("layers_block_type", str)
    pattern = facts.get("hybrid_override_pattern")
    if not isinstance(pattern, str) or not pattern:
        raise MalformedConfig(
            "model type 'nemotron_h' needs the field 'layers_block_type' or 'hybrid_override_pattern' to say what its "
            "layers are; both are missing"
        )
    unknown = sorted(set(pattern) - set(_PATTERN))
    if unknown:
        raise MalformedConfig(
            f"field 'hybrid_override_pattern' has the letters {', '.join(unknown)}; known are {', '.join(_PATTERN)}"
        )
    layers = facts.size("num_hidden_layers", len(pattern))
    if layers != len(pattern):
        raise MalformedConfig(
            f"field 'hybrid_override_pattern' names {len(pattern)} layers, but 'num_hidden_layers' is {layers}"
        )
    return tuple(_PATTERN[letter] for letter in pattern)


def tiny_config() -> PreTrainedConfig:
    """Six layers: Mamba-2, MLP, full attention, mixture of experts, Mamba-2, MLP."""
    from transformers import NemotronHConfig

    return NemotronHConfig(
        vocab_size=128,
        hidden_size=64,
        layers_block_type=["linear_attention", "mlp", "full_attention", "moe", "linear_attention", "mlp"],
        intermediate_size=96,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        ssm_state_size=16,
        mamba_num_heads=8,
        mamba_head_dim=16,
        n_groups=2,
        conv_kernel=4,
        expand=2,
        chunk_size=16,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        moe_shared_expert_intermediate_size=32,
        max_position_embeddings=4096,
        initializer_range=0.3,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
    )
