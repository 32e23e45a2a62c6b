"""Failed passes, interrupts, bad numbers, a closed engine: what is lost, and that nothing leaks."""

from __future__ import annotations

import random

import pytest

from hybridkv.engine.engine import Engine
from hybridkv.engine.params import SamplingParams
from hybridkv.errors import ConfigError, EngineClosed, HybridKVError, OutOfPages, PoolTooSmall
from hybridkv.manager import GroupManager
from tests.engine_cases import check, make, prompt_of
from tests.engine_fakes import FakeRunner, attention_groups, expected_tokens, hybrid_groups


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
