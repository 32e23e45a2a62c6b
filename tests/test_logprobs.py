"""Log-probabilities are those of a full forward pass of the model, wherever chunks and pages end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from hybridkv.engine.engine import Engine
from hybridkv.engine.logprobs import token_logprobs
from hybridkv.engine.outputs import Likely, TokenLogprob
from hybridkv.engine.params import SamplingParams
from hybridkv.engine.wrap import wrap
from tests.model_cases import VOCAB, prompt_of, tiny_model


@pytest.fixture(scope="module", params=("gemma3", "jamba"))
def model(request: pytest.FixtureRequest) -> Any:
    return tiny_model(request.param)


@pytest.fixture
def engine(model: Any) -> Iterator[Engine]:
    with wrap(model, memory="4MiB", max_batch_tokens=64, poison=True) as engine:
        yield engine
        engine.manager.check()
        assert engine.usage().live_bytes == 0


def full_forward(model: Any, tokens: Sequence[int]) -> torch.Tensor:
    """[tokens - 1, vocab]: row i is about token i + 1."""
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0, :-1].float().log_softmax(-1)  # type: ignore[no-any-return]


def check(got: Sequence[TokenLogprob] | None, expected: torch.Tensor, tokens: Sequence[int], k: int) -> None:
    assert got is not None
    assert [one.token_id for one in got] == list(tokens)
    assert len(expected) == len(tokens)
    for one, row in zip(got, expected, strict=True):
        assert one.logprob == pytest.approx(float(row[one.token_id]), abs=1e-3)
        assert [likely.logprob for likely in one.likeliest] == pytest.approx(row.topk(k).values.tolist(), abs=1e-3)
        assert all(likely.logprob == pytest.approx(float(row[likely.token_id]), abs=1e-3) for likely in one.likeliest)


def test_generated_tokens(model: Any, engine: Engine) -> None:
    prompts = [prompt_of(length, length) for length in (3, 40, 17, 90)]
    params = [
        SamplingParams(max_tokens=9, logprobs=5),
        SamplingParams(max_tokens=9, logprobs=0, repetition_penalty=1.9, logit_bias={5: 3.0}, temperature=0.7, seed=3),
        SamplingParams(max_tokens=9),
        SamplingParams(max_tokens=9, logprobs=2, temperature=1.5, top_k=20, frequency_penalty=2.0, seed=4),
    ]
    outs = engine.generate(prompts, params)
    for prompt, one, out in zip(prompts, params, outs, strict=True):
        if one.logprobs is None:
            assert out.logprobs is None
            assert out.cumulative_logprob is None
            continue
        expected = full_forward(model, [*prompt, *out.token_ids])[len(prompt) - 1 :]
        check(out.logprobs, expected, out.token_ids, one.logprobs)
        chosen = expected.gather(1, torch.tensor(out.token_ids)[:, None]).sum()
        assert out.cumulative_logprob == pytest.approx(float(chosen), abs=1e-3)
        assert out.prompt_logprobs is None
    assert outs[0].logprobs is not None
    assert [one.likeliest[0].token_id for one in outs[0].logprobs] == outs[0].token_ids, "greedy"
    plain = engine.generate(prompts, [SamplingParams(max_tokens=9), *params[1:]])
    assert [out.token_ids for out in plain] == [out.token_ids for out in outs]


def test_events_carry_the_log_probabilities_of_their_tokens(engine: Engine) -> None:
    events = list(engine.stream(prompt_of(20, 1), SamplingParams(max_tokens=6, logprobs=3)))
    assert events[-1].output is not None
    assert tuple(one for event in events for one in event.logprobs or ()) == events[-1].output.logprobs
    assert all(len(event.logprobs or ()) == len(event.token_ids) for event in events)
    assert all(event.logprobs is None for event in engine.stream([1, 2], SamplingParams(max_tokens=2)))


@pytest.mark.parametrize(("budget", "rows"), [(64, 1000), (17, 1000), (64, 7), (3, 1), (512, 100)])
def test_prompts_across_chunks(model: Any, budget: int, rows: int) -> None:
    prompts = [prompt_of(length, length) for length in (1, 2, 33, 70)]
    params = [SamplingParams(max_tokens=3, prompt_logprobs=k, logprobs=1) for k in (4, 0, 2, 130)]
    with wrap(model, memory="4MiB", max_batch_tokens=budget, logits_memory=rows * VOCAB * 4, poison=True) as engine:
        counts: list[int] = []
        engine._runner.model.register_forward_hook(lambda *call: counts.append(call[2].logits.shape[1]))
        outs = engine.generate([*prompts, prompt_of(30, 7)], [*params, SamplingParams(max_tokens=3)])
        engine.manager.check()
    assert max(counts) <= min(budget, rows) + len(prompts) + 1
    for prompt, one, out in zip(prompts, params, outs, strict=False):
        expected = full_forward(model, [*prompt, *out.token_ids])
        check(out.prompt_logprobs, expected[: len(prompt) - 1], prompt[1:], min(one.prompt_logprobs or 0, VOCAB))
        check(out.logprobs, expected[len(prompt) - 1 :], out.token_ids, 1)
    assert outs[-1].prompt_logprobs is None


def test_a_cached_prompt_is_computed_again_for_them_and_serves_others_as_a_prefix(model: Any, engine: Engine) -> None:
    prompt = prompt_of(80, 5)
    expected = full_forward(model, prompt)
    for _ in range(2):
        (out,) = engine.generate(prompt, SamplingParams(max_tokens=1, prompt_logprobs=1))
        assert out.cached_tokens == 0
        check(out.prompt_logprobs, expected, prompt[1:], 1)
        engine.manager.check()
    assert engine.generate(prompt, SamplingParams(max_tokens=1))[0].cached_tokens > 0
    both = engine.generate([prompt] * 2, [SamplingParams(max_tokens=1, prompt_logprobs=0), SamplingParams()])
    assert both[0].cached_tokens == 0
    assert both[1].cached_tokens > 0


@pytest.mark.parametrize("evicted", [False, True])
def test_a_preempted_prompt_goes_on_where_its_log_probabilities_end(model: Any, evicted: bool) -> None:
    long = prompt_of(90, 6)
    with wrap(model, memory="4MiB", max_batch_tokens=16, checkpoint_interval=16, poison=True) as engine:
        (request,) = engine._intake.requests(long, SamplingParams(max_tokens=2, prompt_logprobs=1), None, None)
        engine._core.submit(request)
        for _ in range(3):
            engine._core.step()
        engine._core._scheduler.running.remove(request)
        engine._core._scheduler._close(request, cache=True)
        if evicted:
            engine.clear_cache()
        engine._core._scheduler.submit(request)
        sizes = []
        while not request.done:
            plan = engine._core.step()
            sizes += [chunk.size for chunk in plan.chunks]
        assert sum(sizes) == (90 if evicted else 90 - 48), "what was scored is a hit"
        assert request.output is not None
        check(request.output.prompt_logprobs, full_forward(model, long), long[1:], 1)
        engine.manager.check()


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_scored_prompt_waits_for_no_prefix_it_could_not_hit(model: Any, ahead: int) -> None:
    prompt = prompt_of(64, 5)
    with wrap(model, memory="4MiB", max_batch_tokens=40) as engine:
        plain, scored = engine._intake.requests(
            [prompt, [*prompt[:60], 1]],
            [SamplingParams(max_tokens=1), SamplingParams(max_tokens=1, prompt_logprobs=0)],
            None,
            None,
        )
        engine._core.submit(plain)
        for _ in range(ahead):
            engine._core.step()
        engine._core.submit(scored)
        computed = plain.computed if ahead else 0
        assert scored.shared_tokens(plain, 16) == 48 > computed
        assert {chunk.request for chunk in engine._core.step().chunks} == {plain, scored}


def test_the_definition() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0], [-1e4, 0.0, 1e4]])
    expected = logits.double().log_softmax(-1).tolist()
    first, second = token_logprobs(logits, [2, 2], [2, 0])
    assert first.logprob == pytest.approx(expected[0][2])
    assert [likely.token_id for likely in first.likeliest] == [1, 2]
    assert isinstance(first.likeliest[0], Likely)
    assert first.likeliest[1].logprob == first.logprob
    assert second == TokenLogprob(2, 0.0, ())
