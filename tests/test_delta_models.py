"""Types with delta-rule layers, end to end: what the engine generates is what full forward passes say."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel, Qwen3_5Config, Qwen3_5ForConditionalGeneration

from hybridkv.engine.params import SamplingParams
from hybridkv.engine.wrap import wrap
from hybridkv_models import family
from tests.test_hf_runner import tiny

TYPES = ("bailing_hybrid", "kimi_linear", "olmo_hybrid", "qwen3_5", "qwen3_5_moe", "qwen3_next")
NEW_TOKENS = 12


def ragged_prompts() -> list[list[int]]:
    random = np.random.default_rng(3)
    return [random.integers(1, 100, count).tolist() for count in (2, 71, 38)]


def greedy_by_full_passes(model: PreTrainedModel, prompt: list[int]) -> list[int]:
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(NEW_TOKENS):
            ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def check_greedy(model: PreTrainedModel) -> None:
    prompts = ragged_prompts()
    with wrap(model, memory="4MiB", max_batch_tokens=48, poison=True) as engine:
        outs = engine.generate(prompts, SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True))
    assert [out.token_ids for out in outs] == [greedy_by_full_passes(model, prompt) for prompt in prompts]


@pytest.mark.parametrize("model_type", TYPES)
def test_ragged_prompts_decode_as_full_passes_do(model_type: str) -> None:
    check_greedy(tiny(model_type))


def test_the_multimodal_class_of_qwen3_5_is_served_as_a_text_model() -> None:
    text = family("qwen3_5")
    assert text is not None
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}
    config = Qwen3_5Config(text_config=text.tiny_config().to_dict(), vision_config=vision)
    torch.manual_seed(0)
    check_greedy(Qwen3_5ForConditionalGeneration(config).eval())
