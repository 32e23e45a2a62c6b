"""Several outputs of one prompt: computed once, shared until written to, each with its own end and random stream."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from hybridkv.engine.engine import Engine
from hybridkv.engine.outputs import Completion, RequestOutput, best
from hybridkv.engine.params import SamplingParams
from hybridkv.engine.wrap import wrap
from hybridkv.errors import HybridKVError, InvalidSampling
from hybridkv.hf.runner import Span
from hybridkv.manager import GroupManager
from tests.engine_cases import make, prompt_of
from tests.engine_fakes import VOCAB, FakeRunner, attention_groups, expected_tokens, hybrid_groups
from tests.model_cases import prompt_of as model_prompt
from tests.model_cases import tiny_model

GROUPS = pytest.mark.parametrize("groups", [hybrid_groups, attention_groups])


def run(engine: Engine, prompts: Sequence[Sequence[int]], params: Any) -> list[RequestOutput]:
    outs = engine.generate(prompts, params)
    engine.manager.check()
    assert engine.usage().live_bytes == 0
    assert engine.manager.running == ()
    return outs


def tokens_of(out: RequestOutput) -> list[list[int]]:
    return [one.token_ids for one in out.completions]


@GROUPS
@pytest.mark.parametrize("length", [1, 16, 37, 64])
@pytest.mark.parametrize("cache", [True, False])
def test_greedy_outputs_are_equal_and_the_prompt_is_computed_once(groups: Any, length: int, cache: bool) -> None:
    engine, runner = make(groups())
    prompt = prompt_of(length)
    (out,) = engine.generate(prompt, SamplingParams(max_tokens=20, n=5), cache=cache)
    assert tokens_of(out) == [expected_tokens(engine.manager.groups, prompt, 20)] * 5
    assert (out.token_ids, out.text, out.finish_reason) == out.completions[0][:3]
    assert runner.computed == length + 5 * 19
    assert runner.passes[1] == [1] * 5
    engine.manager.check()
    assert engine.usage().live_bytes == 0


@pytest.mark.parametrize(
    ("lengths", "outputs", "options"),
    [((2,), (2,), {"prompt_logprobs": 0}), ((7,), (7,), {"prompt_logprobs": 0}), ((300, 20), (1, 2), {})],
)
def test_as_many_outputs_as_a_pass_has_rows_begin_with_the_row_of_their_prompt(
    lengths: tuple[int, ...], outputs: tuple[int, ...], options: dict[str, Any]
) -> None:
    engine, _ = make(max_batch_tokens=256)
    prompts = [prompt_of(length, length) for length in lengths]
    outs = run(engine, prompts, [SamplingParams(6, n=n, **options) for n in outputs])
    for prompt, n, out in zip(prompts, outputs, outs, strict=True):
        assert tokens_of(out) == [expected_tokens(engine.manager.groups, prompt, 6)] * n


def test_one_output_is_as_before() -> None:
    engine, _ = make()
    (out,) = run(engine, [prompt_of(20)], SamplingParams(max_tokens=4))
    assert out.others == ()
    assert out.completions == (Completion(out.token_ids, "", "length"),)


@GROUPS
def test_eight_outputs_of_a_long_prompt_hold_little_more_than_one(groups: Any) -> None:
    def most_live(n: int) -> int:
        engine, _ = make(groups())
        live = [
            engine.usage().live_bytes
            for _ in engine.stream(prompt_of(600), SamplingParams(max_tokens=10, n=n, ignore_eos=True))
        ]
        engine.manager.check()
        return max(live)

    assert most_live(8) < 1.5 * most_live(1)


@GROUPS
@pytest.mark.parametrize("running", [1, 2, 3, 64])
def test_no_more_run_than_may_and_the_others_wait(groups: Any, running: int) -> None:
    engine, runner = make(groups(), max_running=running)
    prompts = [prompt_of(50), prompt_of(33, 1)]
    outs = run(engine, prompts, SamplingParams(max_tokens=12, n=5))
    for prompt, out in zip(prompts, outs, strict=True):
        assert tokens_of(out) == [expected_tokens(engine.manager.groups, prompt, 12)] * 5
        assert (out.cached_tokens, out.preemptions) == (0, 0)
    assert max(map(len, runner.passes)) <= running


@GROUPS
def test_forks_are_preempted_and_resumed_each_by_itself(groups: Any) -> None:
    layout = GroupManager(groups(), 1 << 20).layout
    engine, _ = make(groups(), layout.slab_bytes * (len(groups()) * 2 + 8), max_batch_tokens=64)
    fit = engine.manager.tokens_that_fit()
    prompt = prompt_of(fit // 3)
    count = fit // 2
    (out,) = run(engine, [prompt], SamplingParams(max_tokens=count, n=6))
    assert tokens_of(out) == [expected_tokens(engine.manager.groups, prompt, count)] * 6
    assert out.preemptions > 0


class Shuffled(FakeRunner):
    """The fake model's choice is only somewhat more likely than other tokens, so that draws differ."""

    def forward(self, spans: Sequence[Span]) -> Any:
        noise = torch.randn(VOCAB, generator=torch.Generator().manual_seed(0))
        return super().forward(spans) * 3 + noise


def sampling(groups: Any = None, pool_bytes: int = 1 << 20, **options: Any) -> Engine:
    manager = GroupManager(groups or hybrid_groups(), pool_bytes)
    return Engine(Shuffled(manager), manager, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("options", [{}, {"max_batch_tokens": 7}, {"max_running": 2}, {"max_batch_tokens": 1}])
def test_output_i_draws_with_seed_plus_i_whatever_runs_beside_it(options: dict[str, int]) -> None:
    prompt = prompt_of(40)
    params = SamplingParams(max_tokens=15, temperature=1.0, seed=7, n=4)
    alone = [
        run(sampling(), [prompt], SamplingParams(max_tokens=15, temperature=1.0, seed=7 + i))[0].token_ids
        for i in range(4)
    ]
    assert len(set(map(tuple, alone))) == 4
    assert tokens_of(run(sampling(**options), [prompt], params)[0]) == alone
    crowd = run(sampling(**options), [prompt_of(9, 1), prompt, prompt_of(60, 2)], [SamplingParams(), params, params])
    assert tokens_of(crowd[1]) == alone


@GROUPS
def test_a_preempted_output_goes_on_drawing_where_it_stopped(groups: Any) -> None:
    slab_bytes = GroupManager(groups(), 1 << 20).layout.slab_bytes
    engine = sampling(groups(), slab_bytes * (len(groups()) * 2 + 8), max_batch_tokens=64)
    prompt, count = prompt_of(engine.manager.tokens_that_fit() // 3), engine.manager.tokens_that_fit() // 2
    (out,) = run(engine, [prompt], SamplingParams(max_tokens=count, temperature=1.0, seed=3, n=6))
    assert out.preemptions > 0
    (roomy,) = run(sampling(groups()), [prompt], SamplingParams(max_tokens=count, temperature=1.0, seed=3, n=6))
    assert roomy.preemptions == 0
    assert tokens_of(out) == tokens_of(roomy)


def test_without_a_seed_outputs_differ() -> None:
    (out,) = run(sampling(), [prompt_of(10)], SamplingParams(max_tokens=8, temperature=1.0, n=5))
    assert len(set(map(tuple, tokens_of(out)))) == 5


def test_outputs_end_by_themselves_and_events_say_whose_they_are() -> None:
    prompt = prompt_of(30)
    params = SamplingParams(max_tokens=40, temperature=1.0, seed=3, n=6, stop_token_ids=tuple(range(25)))
    (out,) = run(sampling(), [prompt], params)
    lengths = {len(tokens) for tokens in tokens_of(out)}
    assert len(lengths) > 2
    engine = sampling()
    events = list(engine.stream(prompt, params))
    for i, one in enumerate(out.completions):
        mine = [event for event in events if event.index == i]
        assert [token for event in mine for token in event.token_ids] == one.token_ids
        assert [event.finish_reason for event in mine] == [None] * (len(mine) - 1) + [one.finish_reason]
    assert [event.output is not None for event in events] == [False] * (len(events) - 1) + [True]
    assert events[-1].output is not None
    assert tokens_of(events[-1].output) == tokens_of(out)
    assert engine.usage().live_bytes == 0


@pytest.mark.parametrize("first", [1, 2])
def test_the_first_token_may_be_the_last(first: int) -> None:
    params = SamplingParams(max_tokens=first, temperature=1.0, seed=5, n=4, stop_token_ids=tuple(range(125)))
    (out,) = run(sampling(), [prompt_of(30)], params)
    assert [len(tokens) == first or tokens[-1] < 125 for tokens in tokens_of(out)] == [True] * 4


@pytest.mark.parametrize("steps", [0, 1, 3, 6, 9])
def test_a_dropped_stream_gives_everything_back(steps: int) -> None:
    engine, _ = make(max_batch_tokens=8, max_running=3)
    stream = engine.stream(prompt_of(20), SamplingParams(max_tokens=20, n=5))
    for _ in range(steps):
        next(stream)
    stream.close()  # type: ignore[attr-defined]
    engine.manager.check()
    assert engine.usage().live_bytes == 0
    assert engine._core.step().empty


@pytest.mark.parametrize("fail_at", [0, 1, 2, 5])
def test_a_failed_pass_ends_every_output(fail_at: int) -> None:
    engine, runner = make(max_batch_tokens=16, max_running=3)
    runner.fail_at = fail_at
    with pytest.raises(RuntimeError, match="the device fell off"):
        engine.generate(prompt_of(30), SamplingParams(max_tokens=9, n=5))
    engine.manager.check()
    assert engine.usage().live_bytes == 0
    runner.fail_at = None
    (out,) = run(engine, [prompt_of(30)], SamplingParams(max_tokens=9, n=5))
    assert tokens_of(out) == [expected_tokens(engine.manager.groups, prompt_of(30), 9)] * 5


@pytest.mark.parametrize("after", [0, 3])
def test_not_a_number_ends_every_output_of_the_prompt_and_nobody_elses(after: int) -> None:
    engine, runner = make(max_batch_tokens=64, max_running=4)
    prompt = prompt_of(30)
    runner.nan_at = [*prompt, *expected_tokens(engine.manager.groups, prompt, 9)][29 + after]
    other = engine.stream([1, 2, 3], SamplingParams(max_tokens=30))
    next(other)
    with pytest.raises(HybridKVError, match="not a number"):
        engine.generate(prompt, SamplingParams(max_tokens=9, n=5))
    assert len(engine.manager.running) == 1
    assert len([event for event in other if event.token_ids]) > 0
    engine.manager.check()
    assert engine.usage().live_bytes == 0


def test_a_pass_that_fails_for_others_ends_a_prompt_whose_copies_have_not_begun() -> None:
    engine, runner = make(max_batch_tokens=16)
    (request,) = engine._intake.requests(prompt_of(40), SamplingParams(n=3), None, None)
    engine._core.submit(request)
    engine._core.step()
    runner.fail_at = 1
    with pytest.raises(RuntimeError):
        engine._core.step()
    assert request.done
    assert request.output is None


def test_one_output_that_is_not_a_number_ends_those_that_are() -> None:
    prompt = prompt_of(30)
    params = SamplingParams(max_tokens=15, temperature=1.0, seed=7, n=6)
    outputs = tokens_of(run(sampling(), [prompt], params)[0])
    others = {token for tokens in outputs[:5] for token in tokens}
    engine = sampling()
    engine._runner.nan_at = next(  # type: ignore[attr-defined]
        token for token in outputs[5][:14] if token not in others and token not in prompt
    )
    with pytest.raises(HybridKVError, match="not a number"):
        engine.generate(prompt, params)
    engine.manager.check()
    assert engine.usage().live_bytes == 0
    assert engine.usage().cached_bytes == 0, "nothing of theirs is kept"


def test_the_best_have_the_highest_mean_log_probability() -> None:
    params = SamplingParams(max_tokens=25, temperature=1.3, seed=11, n=8, logprobs=0, stop_token_ids=tuple(range(9)))
    prompt = prompt_of(20)
    (every,) = run(sampling(), [prompt], params)

    def mean(one: Completion) -> float:
        assert one.logprobs is not None
        assert one.cumulative_logprob == pytest.approx(sum(token.logprob for token in one.logprobs))
        return sum(token.logprob for token in one.logprobs) / len(one.token_ids)

    ranked = sorted(every.completions, key=mean, reverse=True)
    assert len({mean(one) for one in ranked}) == 8
    options = {"max_tokens": 25, "temperature": 1.3, "seed": 11, "stop_token_ids": tuple(range(9))}
    (out,) = run(sampling(), [prompt], SamplingParams(n=3, best_of=8, **options))  # type: ignore[arg-type]
    assert tokens_of(out) == [one.token_ids for one in ranked[:3]]
    assert out.logprobs is None
    assert out.cumulative_logprob == pytest.approx(ranked[0].cumulative_logprob)
    (one,) = run(sampling(), [prompt], SamplingParams(best_of=8, **options))  # type: ignore[arg-type]
    assert tokens_of(one) == tokens_of(out)[:1]
    assert best(every.completions, 8) == every.completions
    with pytest.raises(InvalidSampling, match=r"best 1 of 8.*generate\(\)"):
        sampling().stream(prompt, SamplingParams(best_of=8))


@pytest.mark.parametrize("name", ["jamba", "gemma3"])
def test_outputs_of_real_models(name: str) -> None:
    model = tiny_model(name)
    prompt = model_prompt(45, 3)

    def options(seed: int) -> dict[str, Any]:
        return {"max_tokens": 14, "temperature": 0.9, "seed": seed, "logprobs": 2, "repetition_penalty": 1.2}

    with wrap(model, memory="4MiB", max_batch_tokens=16, max_running=3, poison=True) as engine:
        alone = [engine.generate(prompt, SamplingParams(**options(5 + i)))[0] for i in range(4)]
        engine.clear_cache()
        out, other = run(engine, [prompt, model_prompt(30, 1)], SamplingParams(n=4, prompt_logprobs=1, **options(5)))
        assert tokens_of(out) == [one.token_ids for one in alone]
        for one, completion in zip(alone, out.completions, strict=True):
            assert completion.cumulative_logprob == pytest.approx(one.cumulative_logprob, abs=1e-3)
        assert len(out.prompt_logprobs or ()) == 44
        assert len(other.completions) == 4
