"""Scheduling against the real group manager: order, budget, preemption, prefix sharing, failures."""

from __future__ import annotations

import random
from typing import Any

import pytest

from hybridkv.engine.engine import Engine
from hybridkv.engine.outputs import RequestOutput
from hybridkv.engine.params import SamplingParams
from hybridkv.errors import ConfigError, EngineClosed, HybridKVError, OutOfPages, PoolTooSmall, PromptTooLong
from hybridkv.manager import GroupManager
from tests.engine_fakes import VOCAB, FakeRunner, attention_groups, expected_tokens, hybrid_groups


def make(groups: Any = None, pool_bytes: int = 1 << 20, **options: Any) -> tuple[Engine, FakeRunner]:
    manager = GroupManager(groups or hybrid_groups(), pool_bytes, decode_checkpoint_interval=16)
    runner = FakeRunner(manager)
    return Engine(runner, manager, **options), runner  # type: ignore[arg-type]


def prompt_of(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(length)]


def check(engine: Engine, prompts: list[list[int]], outs: list[RequestOutput], count: int) -> None:
    for prompt, out in zip(prompts, outs, strict=True):
        assert out.token_ids == expected_tokens(engine.manager.groups, prompt, count)
        assert out.finish_reason == "length"
        assert out.prompt_tokens == len(prompt)
    engine.manager.check()
    assert engine.usage().live_bytes == 0
    assert engine.manager.running == ()


@pytest.mark.parametrize("budget", [1, 3, 16, 17, 100, 4096])
def test_ragged_prompts_and_any_budget(budget: int) -> None:
    engine, runner = make(max_batch_tokens=budget)
    prompts = [prompt_of(length, length) for length in (1, 2, 15, 16, 17, 33, 150)]
    outs = engine.generate(prompts, SamplingParams(max_tokens=20))
    check(engine, prompts, outs, 20)
    assert max(sum(sizes) for sizes in runner.passes) <= budget
    assert [out.cached_tokens for out in outs] == [0] * len(prompts)


def test_a_long_prompt_never_holds_up_a_decode() -> None:
    engine, runner = make(max_batch_tokens=16)
    stream = engine.stream(prompt_of(5, 1), SamplingParams(max_tokens=40))
    next(stream)
    start = len(runner.passes)
    long = engine.stream(prompt_of(320, 2), SamplingParams(max_tokens=2))
    next(long)
    taken = runner.passes[start:]
    assert all(sizes[0] == 1 for sizes in taken)
    assert len(taken) == -(-320 // 15)
    assert len([event for event in stream if event.token_ids]) == 39
    list(long)
    assert engine.usage().live_bytes == 0


def test_a_resend_hits_all_but_the_last_unit() -> None:
    engine, runner = make()
    prompt = prompt_of(100)
    engine.generate(prompt, SamplingParams(max_tokens=1))
    before = runner.computed
    out = engine.generate(prompt, SamplingParams(max_tokens=5))[0]
    assert out.cached_tokens == 96
    assert runner.computed - before == 4 + 4
    assert out.token_ids == expected_tokens(engine.manager.groups, prompt, 5)
    assert engine.clear_cache() > 0
    assert engine.usage().cached_bytes == 0
    assert engine.generate(prompt, SamplingParams(max_tokens=5))[0].cached_tokens == 0


def test_the_output_of_one_request_is_a_prefix_for_the_next() -> None:
    engine, _ = make()
    prompt = prompt_of(40)
    first = engine.generate(prompt, SamplingParams(max_tokens=60))[0]
    turn = [*prompt, *first.token_ids, 7, 8, 9]
    out = engine.generate(turn, SamplingParams(max_tokens=5))[0]
    assert out.cached_tokens >= 80
    assert out.token_ids == expected_tokens(engine.manager.groups, turn, 5)


def test_salts_do_not_share() -> None:
    engine, _ = make()
    prompt = prompt_of(64)
    for salt in ("a", "b", None):
        assert engine.generate(prompt, SamplingParams(max_tokens=1), salt=salt)[0].cached_tokens == 0
    assert engine.generate(prompt, SamplingParams(max_tokens=1), salt="b")[0].cached_tokens == 48


@pytest.mark.parametrize("groups", [hybrid_groups, attention_groups])
def test_prompts_submitted_together_compute_a_shared_prefix_once(groups: Any) -> None:
    engine, runner = make(groups(), max_batch_tokens=64)
    shared = prompt_of(160)
    prompts = [[*shared, *prompt_of(5 + i, 100 + i)] for i in range(8)]
    outs = engine.generate(prompts, SamplingParams(max_tokens=3))
    check(engine, prompts, outs, 3)
    assert outs[0].cached_tokens == 0
    assert [out.cached_tokens for out in outs[1:]] == [160] * 7
    assert runner.computed < 160 + 8 * (16 + 3)


def test_identical_prompts_submitted_together() -> None:
    engine, _ = make()
    prompts = [prompt_of(100)] * 5
    outs = engine.generate(prompts, SamplingParams(max_tokens=3))
    check(engine, prompts, outs, 3)
    assert [out.cached_tokens for out in outs] == [0, 96, 96, 96, 96]


def test_a_request_that_comes_later_waits_for_a_prefix_and_hits_it() -> None:
    engine, _ = make(pool_bytes=4 << 20, max_batch_tokens=32)
    first = prompt_of(600, 1)
    later = [*first[:400], *prompt_of(40, 2)]
    early = engine._requests(first, SamplingParams(max_tokens=4), None, None)[0]
    engine._core.submit(early)
    for _ in range(5):
        engine._core.step()
    late = engine._requests(later, SamplingParams(max_tokens=4), None, None)[0]
    engine._core.submit(late)
    while not late.done:
        engine._core.step()
    assert late.cached_tokens == 400


def test_a_prefix_in_flight_of_another_salt_is_not_waited_for() -> None:
    engine, runner = make(max_batch_tokens=128)
    prompt = prompt_of(64)
    first = engine.stream(prompt, SamplingParams(max_tokens=2), salt="a")
    next(first)
    engine.generate(prompt, SamplingParams(max_tokens=1), salt="b")
    assert runner.passes[1] == [1, 64]


def test_breakpoints_give_the_first_sibling_a_hit() -> None:
    engine, _ = make(max_batch_tokens=50)
    shared = prompt_of(80)
    first = engine.generate([*shared, *prompt_of(40, 1)], SamplingParams(max_tokens=1), breakpoints=[80, 10**6])
    second = engine.generate([*shared, *prompt_of(40, 2)], SamplingParams(max_tokens=1))
    assert (first[0].cached_tokens, second[0].cached_tokens) == (0, 80)


@pytest.mark.parametrize("groups", [hybrid_groups, attention_groups])
@pytest.mark.parametrize("seed", range(4))
def test_a_pool_of_two_requests_serves_twelve(groups: Any, seed: int) -> None:
    rng = random.Random(seed)
    layout = GroupManager(groups(), 1 << 20).layout
    engine, _ = make(groups(), layout.slab_bytes * (len(groups()) * 2 + 8), max_batch_tokens=rng.choice([8, 32, 512]))
    fit = engine.manager.tokens_that_fit()
    count = 40
    prompts = [prompt_of(rng.randrange(1, min(fit - count, 120)), 10 * seed + i) for i in range(12)]
    outs = engine.generate(prompts, SamplingParams(max_tokens=count))
    check(engine, prompts, outs, count)


def test_preemption_happens_and_changes_nothing() -> None:
    layout = GroupManager(attention_groups(), 1 << 20).layout
    engine, _ = make(attention_groups(), layout.slab_bytes * 12)
    fit = engine.manager.tokens_that_fit()
    count = fit // 2
    prompts = [prompt_of(fit // 4, i) for i in range(4)]
    outs = engine.generate(prompts, SamplingParams(max_tokens=count))
    check(engine, prompts, outs, count)
    assert outs[0].preemptions == 0
    assert sum(out.preemptions for out in outs) > 0
    assert [out.cached_tokens for out in outs] == [0, 0, 0, 0]


def test_a_request_of_exactly_what_fits_is_served_and_one_more_is_refused() -> None:
    for groups in (hybrid_groups(), attention_groups()):
        layout = GroupManager(groups, 1 << 20).layout
        engine, _ = make(groups, layout.slab_bytes * 9)
        fit = engine.manager.tokens_that_fit()
        for length in (fit - 3, 1):
            prompt = prompt_of(length)
            outs = engine.generate([prompt], SamplingParams(max_tokens=fit + 1 - length))
            check(engine, [prompt], outs, fit + 1 - length)
        with pytest.raises(PromptTooLong, match=rf"{fit + 2} in all.*at most {fit + 1}"):
            engine.generate(prompt_of(fit), SamplingParams(max_tokens=2))
        assert engine.usage().live_bytes == 0


def test_a_failed_pass_leaks_nothing_and_caches_nothing_of_it() -> None:
    engine, runner = make(max_batch_tokens=32)
    prompts = [prompt_of(length, length) for length in (10, 50, 70)]
    runner.fail_at = 3
    with pytest.raises(RuntimeError, match="the device fell off"):
        engine.generate(prompts, SamplingParams(max_tokens=30))
    assert engine.usage().live_bytes == 0
    engine.manager.check()
    runner.fail_at = None
    check(engine, prompts, engine.generate(prompts, SamplingParams(max_tokens=30)), 30)


def test_an_interrupt_leaves_an_empty_pool() -> None:
    engine, runner = make()
    prompt = prompt_of(50)
    engine.generate(prompt)
    runner.fail_at, runner.failure = len(runner.passes) + 2, KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        engine.generate([prompt, prompt_of(20, 1)])
    engine.manager.check()
    assert engine.usage().live_bytes == engine.usage().cached_bytes == 0
    runner.fail_at = None
    check(engine, [prompt], engine.generate([prompt], SamplingParams(max_tokens=9)), 9)


def moving_engine() -> tuple[Engine, FakeRunner, list[list[int]]]:
    """An engine over a pool of a few slabs, and prompts that make it move pages."""
    engine, runner = make(hybrid_groups(), 1 << 14, max_batch_tokens=32)
    return engine, runner, [prompt_of(20 + 12 * i, i) for i in range(4)]


@pytest.mark.parametrize("failure", [RuntimeError("out of memory"), KeyboardInterrupt()])
def test_a_failure_while_pages_are_copied_loses_the_cache_and_nothing_else(failure: BaseException) -> None:
    engine, runner, prompts = moving_engine()
    rng = random.Random(0)
    failures = 0
    for i in range(60):
        some = [[*rng.choice(prompts), *prompt_of(rng.randrange(5), i)] for _ in range(rng.randrange(1, 4))]
        runner.fail_copies, runner.failure = i % 4 == 3, failure
        try:
            outs = engine.generate(some, SamplingParams(max_tokens=8))
        except type(failure):
            failures += 1
            assert engine.usage().live_bytes == engine.usage().cached_bytes == 0
            engine.manager.check()
        else:
            check(engine, some, outs, 8)
    assert failures > 5


def test_a_failing_model_keeps_the_cache() -> None:
    engine, runner = make()
    prompt = prompt_of(64)
    engine.generate(prompt)
    runner.fail_at = len(runner.passes)
    with pytest.raises(RuntimeError, match="fell off"):
        engine.generate(prompt)
    runner.fail_at = None
    assert engine.generate(prompt)[0].cached_tokens == 48


def test_copies_that_somebody_else_lost_empty_the_cache_before_the_next_step() -> None:
    engine, runner = make()
    prompt = prompt_of(64)
    engine.generate(prompt)
    stream = engine.stream(prompt_of(5), SamplingParams(max_tokens=9))
    next(stream)
    runner.losses += 1
    assert engine.generate([1, 2, *prompt], SamplingParams(max_tokens=1))[0].cached_tokens == 0
    with pytest.raises(HybridKVError, match="dropped"):
        next(stream)
    assert engine.generate(prompt, SamplingParams(max_tokens=1))[0].cached_tokens == 0


def test_logits_that_are_not_numbers_end_one_request_and_cache_nothing_of_the_step() -> None:
    engine, runner = make(max_batch_tokens=64)
    good, bad = prompt_of(40, 1), [*prompt_of(90, 2), 7]
    runner.nan_at = 7
    good = [token for token in good if token != 7]
    expected = expected_tokens(engine.manager.groups, good, 6)
    assert 7 not in expected
    stream = engine.stream(good, SamplingParams(max_tokens=6))
    tokens = list(next(stream).token_ids)
    with pytest.raises(HybridKVError, match=r"prompt 0: .*not a number"):
        engine.generate([bad, bad], SamplingParams(max_tokens=2))
    other = engine.stream(bad, SamplingParams(max_tokens=2))
    with pytest.raises(HybridKVError, match="not a number"):
        next(other)
    tokens += [token for event in stream for token in event.token_ids]
    assert tokens == expected, "the stream beside it goes on"
    assert engine.usage().live_bytes == 0
    engine.manager.check()
    runner.nan_at = None
    (out,) = engine.generate([bad], SamplingParams(max_tokens=2))
    assert out.token_ids == expected_tokens(engine.manager.groups, bad, 2)
    assert out.cached_tokens < 80, "nothing of the step that failed is a hit"


def test_a_failed_pass_ends_other_streams_clearly() -> None:
    engine, runner = make()
    stream = engine.stream(prompt_of(5), SamplingParams(max_tokens=9))
    next(stream)
    runner.fail_at = 1
    with pytest.raises(RuntimeError, match="fell off"):
        engine.generate([[1]])
    with pytest.raises(HybridKVError, match="dropped"):
        next(stream)
    runner.fail_at = None
    assert len(engine.generate([[1]])[0].token_ids) == 64


def test_an_abandoned_stream_gives_its_pages_back() -> None:
    engine, _ = make()
    stream = engine.stream(prompt_of(50), SamplingParams(max_tokens=100))
    next(stream)
    assert engine.usage().live_bytes > 0
    stream.close()  # type: ignore[attr-defined]
    assert engine.usage().live_bytes == 0
    never_started = engine.stream(prompt_of(50))
    del never_started
    assert engine.usage().live_bytes == 0


def test_a_stream_abandoned_in_the_middle_of_a_step_waits_for_its_end() -> None:
    engine, runner = make()
    stream = engine.stream(prompt_of(30, 1), SamplingParams(max_tokens=100))
    next(stream)
    forward = runner.forward

    def collected_meanwhile(spans: Any) -> Any:
        stream.close()  # type: ignore[attr-defined]
        return forward(spans)

    runner.forward = collected_meanwhile  # type: ignore[method-assign]
    prompt = prompt_of(40, 2)
    check(engine, [prompt], engine.generate(prompt, SamplingParams(max_tokens=5)), 5)


def test_streams_interleave() -> None:
    engine, _ = make()
    prompts = [prompt_of(30, 1), prompt_of(20, 2)]
    streams = [engine.stream(prompt, SamplingParams(max_tokens=10)) for prompt in prompts]
    tokens: list[list[int]] = [[], []]
    for _ in range(10):
        for got, stream in zip(tokens, streams, strict=True):
            got += next(stream).token_ids
    assert tokens == [expected_tokens(engine.manager.groups, prompt, 10) for prompt in prompts]
    outputs = [list(stream) for stream in streams]
    assert outputs == [[], []]


def test_the_last_event_carries_the_output() -> None:
    engine, _ = make()
    events = list(engine.stream([1, 2, 3], SamplingParams(max_tokens=4)))
    assert [event.finish_reason for event in events] == [None, None, None, "length"]
    output = events[-1].output
    assert output is not None
    assert output.token_ids == [token for event in events for token in event.token_ids]
    assert 0 < output.ttft_s <= output.total_s
    assert output.decode_tokens_per_s > 0


def test_stop_tokens_and_end_of_sequence() -> None:
    prompt = prompt_of(20)
    tokens = expected_tokens(hybrid_groups(), prompt, 30)
    stop = tokens[5]
    end = tokens.index(stop) + 1
    engine, _ = make()
    out = engine.generate(prompt, SamplingParams(max_tokens=30, stop_token_ids=[stop]))[0]  # type: ignore[arg-type]
    assert (out.token_ids, out.finish_reason) == (tokens[:end], "stop")
    engine, _ = make(eos_token_ids=frozenset([stop]))
    out = engine.generate(prompt, SamplingParams(max_tokens=30))[0]
    assert (out.token_ids, out.finish_reason) == (tokens[:end], "stop")
    out = engine.generate(prompt, SamplingParams(max_tokens=30, ignore_eos=True))[0]
    assert (out.token_ids, out.finish_reason) == (tokens, "length")
    out = engine.generate(prompt, SamplingParams(max_tokens=end))[0]
    assert out.finish_reason == "stop"


def test_max_running_is_a_limit() -> None:
    engine, runner = make(max_running=2)
    prompts = [prompt_of(10, i) for i in range(5)]
    check(engine, prompts, engine.generate(prompts, SamplingParams(max_tokens=6)), 6)
    assert max(len(sizes) for sizes in runner.passes) == 2


def test_outputs_of_finished_requests_survive_a_request_that_cannot_go_on() -> None:
    engine, _ = make(attention_groups(), GroupManager(attention_groups(), 1 << 20).layout.slab_bytes * 6)
    manager = engine.manager
    other = manager.open([1] * 16)
    manager.reserve(other, 16)
    fit = manager.tokens_that_fit()
    with pytest.raises(OutOfPages):
        engine.generate(prompt_of(fit - 4), SamplingParams(max_tokens=4))
    manager.close(other, cache=False)
    assert engine.usage().live_bytes == 0
    engine.generate(prompt_of(fit - 4), SamplingParams(max_tokens=4))


def test_bad_limits_and_pools() -> None:
    for options in ({"max_batch_tokens": 0}, {"max_running": 0}, {"max_running": 1.5}, {"max_batch_tokens": True}):
        with pytest.raises(ConfigError, match=next(iter(options))):
            make(**options)
    with pytest.raises(PoolTooSmall):
        make(pool_bytes=100)


def test_a_closed_engine_refuses_and_closes_twice() -> None:
    engine, runner = make()
    stream = engine.stream([1, 2])
    next(stream)
    with engine:
        pass
    assert runner.closed
    assert engine.usage().live_bytes == 0
    with pytest.raises(HybridKVError):
        next(stream)
    for call in (lambda: engine.generate([1]), lambda: engine.stream([1])):
        with pytest.raises(EngineClosed):
            call()
    engine.close()
