"""The multimodal class of Qwen3.5, whose text part is served; its text class is a family like any other."""

from __future__ import annotations

import numpy as np
import torch
from transformers import PreTrainedModel, Qwen3_5Config, Qwen3_5ForConditionalGeneration

from hybridkv.engine.params import SamplingParams
from hybridkv.engine.wrap import wrap
from hybridkv_models import family
from tests.test_parity_generation import full_pass


def check_greedy(model: PreTrainedModel) -> None:
    """Ragged prompts in small chunks give the tokens that full passes give."""
    random = np.random.default_rng(3)
    prompts = [random.integers(1, 100, count).tolist() for count in (2, 71, 38)]
    with wrap(model, memory="4MiB", max_batch_tokens=48, poison=True) as engine:
        outs = engine.generate(prompts, SamplingParams(max_tokens=12, ignore_eos=True))
    for prompt, out in zip(prompts, outs, strict=True):
        expected = full_pass(model, prompt + out.token_ids[:-1]).argmax(-1)
        assert out.token_ids == expected[len(prompt) - 1 :].tolist()


def test_the_multimodal_class_is_served_as_a_text_model() -> None:
    text = family("qwen3_5")
    assert text is not None
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}
    config = Qwen3_5Config(text_config=text.tiny_config().to_dict(), vision_config=vision)
    torch.manual_seed(0)
    check_greedy(Qwen3_5ForConditionalGeneration(config).eval())
