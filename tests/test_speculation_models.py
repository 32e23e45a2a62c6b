"""Speculation on real models of every kind: the output of plain decoding, token for token, drawn ones too."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from hybridkv.engine.engine import Engine
from hybridkv.engine.params import SamplingParams
from hybridkv.engine.wrap import wrap
from hybridkv_models import family
from tests.drafters import Oracle
from tests.engine_fakes import byte_level_tokenizer

TINY_JAMBA = Path(__file__).parents[1] / "models" / "tiny_jamba"
KINDS = ("gemma3", "jamba", "qwen3_next", "gpt_oss", "mamba2")


def tiny_model(name: str) -> Any:
    torch.manual_seed(7)
    module = family(name)
    assert module is not None
    model = AutoModelForCausalLM.from_config(module.tiny_config()).float().eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def prompt_of(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1, 128) for _ in range(length)]


def speculating(model: Any, texts: list[list[int]], wrong: float, **options: Any) -> Engine:
    options = {"memory": "4MiB", "max_batch_tokens": 48, "poison": True, "decode_checkpoint_interval": 16, **options}
    engine = wrap(model, speculate=6, **options)
    engine._intake._drafter = lambda: Oracle(texts, wrong, 3, 128)
    return engine


@pytest.mark.parametrize("name", KINDS)
def test_greedy_output_whatever_is_guessed(name: str) -> None:
    model = tiny_model(name)
    prompts = [prompt_of(length, length) for length in (3, 17, 50)]
    texts = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        out = model.generate(ids, max_new_tokens=34, do_sample=False, attention_mask=torch.ones_like(ids))
        texts.append(out[0].tolist())
    for wrong in (0.0, 0.3, 1.0):
        with speculating(model, texts, wrong) as engine:
            outs = engine.generate(prompts, SamplingParams(max_tokens=34))
            assert [[*prompt, *out.token_ids] for prompt, out in zip(prompts, outs, strict=True)] == texts
            assert (sum(out.accepted for out in outs) > 0) == (wrong < 1)
            turns = [[*text, 1, 2] for text in texts]
            again = engine.generate(turns, SamplingParams(max_tokens=1))
            assert all(out.cached_tokens >= 16 for out in again)
            engine.manager.check()
            assert engine.usage().live_bytes == 0


@pytest.fixture(scope="module")
def jamba() -> Any:
    return tiny_model("jamba")


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(max_tokens=30, temperature=0.7, seed=5),
        SamplingParams(max_tokens=30, temperature=1.0, top_k=20, top_p=0.9, min_p=0.01, seed=6),
        SamplingParams(max_tokens=30, repetition_penalty=1.7, presence_penalty=0.5, frequency_penalty=0.5),
        SamplingParams(max_tokens=30, temperature=0.5, repetition_penalty=1.2, seed=8),
        SamplingParams(max_tokens=30, logit_bias={5: 3.0, 7: -100.0}, logprobs=2),
    ],
    ids=["drawn", "warped", "penalties", "drawn-penalties", "bias-logprobs"],
)
def test_draws_penalties_and_log_probabilities_are_those_of_plain_decoding(jamba: Any, params: SamplingParams) -> None:
    prompt = prompt_of(20, 2)
    with wrap(jamba, memory="4MiB") as engine:
        plain = engine.generate(prompt, params)[0]
    for wrong in (0.0, 0.4):
        with speculating(jamba, [[*prompt, *plain.token_ids]], wrong) as engine:
            out = engine.generate(prompt, params)[0]
        assert out.token_ids == plain.token_ids
        assert out.accepted > 0
        if plain.logprobs is not None and out.logprobs is not None:
            assert [one.token_id for one in out.logprobs] == [one.token_id for one in plain.logprobs]
            for one, other in zip(out.logprobs, plain.logprobs, strict=True):
                assert one.logprob == pytest.approx(other.logprob, abs=1e-4)


def test_a_stop_string_inside_right_guesses_cuts_where_plain_decoding_cuts(jamba: Any) -> None:
    tokenizer = byte_level_tokenizer(128)
    prompt = prompt_of(20, 11)
    with wrap(jamba, tokenizer, memory="4MiB") as engine:
        full = engine.generate([prompt], SamplingParams(max_tokens=30))[0]
        for start in range(3, 16, 3):
            params = SamplingParams(max_tokens=30, stop=(full.text[start : start + 2],))
            plain = engine.generate([prompt], params)[0]
            with speculating(jamba, [[*prompt, *full.token_ids]], 0.0, tokenizer=tokenizer) as guessing:
                out = guessing.generate([prompt], params)[0]
                assert (out.token_ids, out.text, out.finish_reason) == (
                    plain.token_ids,
                    plain.text,
                    plain.finish_reason,
                )
                events = list(guessing.stream(prompt, params))
                assert "".join(event.text for event in events) == plain.text
                assert guessing.usage().live_bytes == 0


def test_a_text_that_repeats_itself_takes_fewer_passes() -> None:
    """Not the oracle but the real thing, on a model that was trained."""
    model = AutoModelForCausalLM.from_pretrained(TINY_JAMBA, dtype=torch.float32).eval()
    prompt = list(b"for name in names:\n    print(name)\n" * 4)
    outs, passes = [], []
    for speculate in (0, 8):
        with wrap(model, memory="8MiB", speculate=speculate) as engine:
            outs.append(engine.generate(prompt, SamplingParams(max_tokens=100, ignore_eos=True))[0])
            passes.append(100 - outs[-1].accepted)
    assert outs[0].token_ids == outs[1].token_ids
    assert passes[0] == 100
    assert passes[1] < 60


def test_models_that_run_one_request_at_a_time_speculate_too() -> None:
    model = tiny_model("minimax")
    prompts = [prompt_of(9, 1), prompt_of(20, 2)]
    with wrap(model, memory="4MiB") as engine:
        outs = engine.generate(prompts, SamplingParams(max_tokens=20))
    texts = [[*prompt, *out.token_ids] for prompt, out in zip(prompts, outs, strict=True)]
    for wrong in (0.0, 0.4):
        with speculating(model, texts, wrong) as engine:
            again = engine.generate(prompts, SamplingParams(max_tokens=20))
        assert [out.token_ids for out in again] == [out.token_ids for out in outs]
        assert sum(out.accepted for out in again) > 0
