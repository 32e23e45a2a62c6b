"""Tiny models with random weights, prompts for them, and what transformers makes of these."""

from __future__ import annotations

import random
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from hybridkv import errors
from hybridkv.entries import CacheEntry
from hybridkv.hf.runner import build_manager
from hybridkv_models import family

VOCAB = 128


def entries_of(model_type: str, config: Any, **options: Any) -> tuple[CacheEntry, ...]:
    known = family(model_type)
    assert known is not None
    return known.entries(config, **options)


def tiny_config(model_type: str) -> Any:
    known = family(model_type)
    assert known is not None
    return known.tiny_config()


def tiny_model(name: str) -> Any:
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(tiny_config(name)).float().eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def prompt_of(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1, VOCAB) for _ in range(length)]


def stock(model: Any, prompt: list[int], count: int, **options: Any) -> list[int]:
    """What transformers generates, one request at a time."""
    ids = torch.tensor([prompt])
    # Without a mask generate() takes a pad token inside the prompt for padding.
    options["attention_mask"] = torch.ones_like(ids)
    out = model.generate(ids, max_new_tokens=count, do_sample=False, **options)
    tokens: list[int] = out[0, len(prompt) :].tolist()
    return tokens


def memory_for_two(model: Any, tokens: int) -> int:
    """The smallest pool, within a few percent, in which two requests of this many tokens can run, in small chunks."""
    memory = 8192
    while True:
        memory += memory // 32
        try:
            manager = build_manager(model, memory)
            for start in (1, 2):
                seq = manager.open([start] * tokens)
                for _ in range(0, tokens, 16):
                    manager.reserve(seq, 16)
                    manager.commit(seq, 16)
        except (errors.PoolTooSmall, errors.OutOfPages):
            continue
        return memory
