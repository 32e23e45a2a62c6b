"""Tiny models with LoRA adapters, and what PEFT itself generates with them."""

from __future__ import annotations

from typing import Any

import torch
from peft import LoraConfig, PeftConfig, get_peft_model

from tests.model_cases import tiny_model

MAMBA = ["in_proj", "x_proj", "out_proj"]
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]


def lora(targets: list[str] | str, **options: Any) -> LoraConfig:
    """Weights that change what comes out, unlike those training starts from."""
    options = {"r": 4, "lora_alpha": 16, "init_lora_weights": False} | options
    return LoraConfig(target_modules=targets, task_type="CAUSAL_LM", **options)


def peft_model(model_type: str, **configs: PeftConfig) -> Any:
    """A PeftModel with these adapters, in eval mode."""
    (first, config), *others = configs.items()
    model = get_peft_model(tiny_model(model_type), config, adapter_name=first)
    for name, other in others:
        model.add_adapter(name, other)
    return model.eval()


def own(model: Any, adapter: str | None, prompt: list[int], count: int) -> list[int]:
    """What the PeftModel generates by itself with one adapter, or without any."""
    ids = torch.tensor([prompt])
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": count, "do_sample": False}
    if adapter is None:
        with model.disable_adapter():
            out = model.generate(input_ids=ids, **options)
    else:
        model.set_adapter(adapter)
        out = model.generate(input_ids=ids, **options)
    tokens: list[int] = out[0, len(prompt) :].tolist()
    return tokens
