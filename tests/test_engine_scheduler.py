"""Scheduling against the real group manager: budget, preemption, limits."""

from __future__ import annotations

import random
from typing import Any

import pytest

from hybridkv.engine.params import SamplingParams
from hybridkv.errors import PromptTooLong
from hybridkv.manager import GroupManager
from tests.engine_cases import check, make, prompt_of
from tests.engine_fakes import attention_groups, hybrid_groups


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


def test_max_running_is_a_limit() -> None:
    engine, runner = make(max_running=2)
    prompts = [prompt_of(10, i) for i in range(5)]
    check(engine, prompts, engine.generate(prompts, SamplingParams(max_tokens=6)), 6)
    assert max(len(sizes) for sizes in runner.passes) == 2
