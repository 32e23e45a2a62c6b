"""Models with random weights, small enough to time on a CPU and shaped like the real ones.

Each has the layer pattern, the head sizes and the windows of its family; only width and depth are small.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from transformers import (
    AutoModelForCausalLM,
    BambaConfig,
    Gemma3TextConfig,
    JambaConfig,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3NextConfig,
)

POSITIONS = 1 << 17
VOCAB = 4096


def gemma3() -> PreTrainedConfig:
    """12 layers, every sixth of full attention, the others with a window of 512 tokens; 8 M parameters."""
    return Gemma3TextConfig(
        vocab_size=VOCAB,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=12,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=64,
        sliding_window=512,
        max_position_embeddings=POSITIONS,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
    )


def jamba() -> PreTrainedConfig:
    """8 layers, one of full attention, the others Mamba-1, every second with four experts; 14 M parameters."""
    return JambaConfig(
        vocab_size=VOCAB,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=2,
        num_experts=4,
        num_experts_per_tok=2,
        attn_layer_period=8,
        attn_layer_offset=4,
        mamba_d_state=16,
        use_mamba_kernels=False,
        max_position_embeddings=POSITIONS,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
    )


def bamba() -> PreTrainedConfig:
    """10 layers, two of full attention, the others Mamba-2."""
    return BambaConfig(
        vocab_size=VOCAB,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=10,
        num_attention_heads=4,
        num_key_value_heads=1,
        attn_layer_indices=[3, 8],
        mamba_n_heads=16,
        mamba_d_head=32,
        mamba_d_state=64,
        max_position_embeddings=POSITIONS,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
    )


def qwen3_next() -> PreTrainedConfig:
    """8 layers, every fourth of full attention, the others gated delta rule, with eight experts."""
    return Qwen3NextConfig(
        vocab_size=VOCAB,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=64,
        linear_num_key_heads=4,
        linear_num_value_heads=8,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=128,
        shared_expert_intermediate_size=128,
        max_position_embeddings=POSITIONS,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
    )


def llama() -> PreTrainedConfig:
    """8 layers of full attention."""
    return LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=1,
        max_position_embeddings=POSITIONS,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
    )


TOYS: Mapping[str, Callable[[], PreTrainedConfig]] = {
    "gemma3": gemma3,
    "jamba": jamba,
    "bamba": bamba,
    "qwen3_next": qwen3_next,
    "llama": llama,
}


def build(name: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A toy with seeded random weights."""
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(TOYS[name](), dtype=dtype)
    return model.eval()
