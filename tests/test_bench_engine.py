"""The engine benchmark measures both sides on the same work."""

from __future__ import annotations

import itertools
import json

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from benchmarks import bench_engine
from benchmarks.sides import Arrival, Ours, Stock
from benchmarks.toys import TOYS, build
from hybridkv_models import family


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    described = family("gemma3_text")
    assert described is not None
    torch.manual_seed(0)
    made: PreTrainedModel = AutoModelForCausalLM.from_config(described.tiny_config(), dtype=torch.float32).eval()
    return made


def ticks() -> float:
    """A clock that only counts how often it was asked."""
    return float(next(_COUNT))


_COUNT = itertools.count()


def test_requests_are_served_from_their_arrival_on(model: PreTrainedModel) -> None:
    requests = [Arrival(at, [1 + i, 2, 3, 4], 3 + i) for i, at in enumerate((0.0, 1.0, 500.0))]
    ours = Ours(model, ticks, "1MiB")
    for served in (ours.arrivals(requests), Stock(model, ticks).arrivals(requests, batch=2)):
        assert served.makespan_s > 500.0
        assert 0 < served.latency_s < 100.0
    ours.close()


def test_a_chat_grows_by_what_was_generated(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = Ours(model, ticks, "1MiB")
    prompts: list[list[int]] = []
    generate = ours.engine.generate

    def recorded(prompt: list[int], params: object) -> object:
        prompts.append(list(prompt))
        return generate(prompt, params)  # type: ignore[arg-type]

    monkeypatch.setattr(ours.engine, "generate", recorded)
    ours.chat([[5, 6], [7, 8, 9]], 4)
    assert [len(prompt) for prompt in prompts] == [2, 9]
    assert prompts[1][:2] == [5, 6]
    assert prompts[1][6:] == [7, 8, 9]
    ours.close()


def test_a_hit_is_measured_with_the_prompt_cached(model: PreTrainedModel) -> None:
    ours = Ours(model, ticks, "1MiB")
    prompt = list(range(1, 60))
    ours.first_token(prompt)
    assert ours.engine.usage().cached_bytes > 0
    ours.first_token(prompt, warm=True)
    ours.first_token(prompt[:20])
    assert ours.engine.manager.open(prompt).hit_tokens == 16, "emptied before a cold run"
    ours.close()


@pytest.mark.parametrize("name", TOYS)
def test_toys_are_small(name: str) -> None:
    assert 5e6 < sum(parameter.numel() for parameter in build(name).parameters()) < 15e6


def test_the_last_line_is_json(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_engine.Bench, "decode", lambda bench, *args: bench._slower("decode", 1.3, 2.0, 3.0))
    assert bench_engine.main(["--models", "llama", "--only", "decode"]) == 0
    (row,) = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert (row["ratio"], row["aim"], row["model"]) == (1.5, 1.3, "llama")
