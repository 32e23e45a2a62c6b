"""What one request may ask for: its priority, and that nothing of it is cached."""

from __future__ import annotations

from typing import Any

import pytest

from hybridkv.engine.params import SamplingParams
from hybridkv.errors import RequestError
from hybridkv.manager import GroupManager
from tests.engine_cases import check, make, prompt_of
from tests.engine_fakes import attention_groups, expected_tokens, hybrid_groups

ONE = SamplingParams(max_tokens=1)


@pytest.mark.parametrize("groups", [hybrid_groups, attention_groups])
def test_nothing_of_a_request_without_cache_is_looked_up_or_kept(groups: Any) -> None:
    engine, _ = make(groups())
    prompt = prompt_of(100)
    engine.generate(prompt, SamplingParams(max_tokens=70))
    before, points = engine.usage(), engine.manager.resume_points()
    turns = [[*prompt, *prompt_of(40, 1)], prompt_of(90, 2)]
    outs = engine.generate(turns, SamplingParams(max_tokens=70), cache=False)
    check(engine, turns, outs, 70)
    assert [out.cached_tokens for out in outs] == [0, 0]
    assert (engine.usage(), engine.manager.resume_points()) == (before, points)
    assert engine.generate(turns[0], ONE)[0].cached_tokens >= 96, "what others cached is still there"
    assert engine.generate(turns[1], ONE)[0].cached_tokens == 0


def test_a_stream_without_cache_leaves_nothing_also_when_it_is_abandoned() -> None:
    engine, _ = make()
    stream = engine.stream(prompt_of(100), SamplingParams(max_tokens=50), cache=False)
    for _ in range(20):
        next(stream)
    assert engine.usage().live_bytes > 0
    stream.close()  # type: ignore[attr-defined]
    usage = engine.usage()
    assert (usage.live_bytes, usage.cached_bytes, usage.resume_points) == (0, 0, 0)


def test_the_cache_can_be_left_out_for_some_prompts_of_a_call() -> None:
    engine, runner = make(max_batch_tokens=64)
    prompt = prompt_of(100)
    outs = engine.generate([prompt] * 3, ONE, cache=[False, True, True])
    assert [out.cached_tokens for out in outs] == [0, 0, 96]
    assert runner.computed == 100 + 100 + 4, "nobody waits for a prefix that will not be published"


def test_a_preempted_request_without_cache_is_computed_again() -> None:
    layout = GroupManager(hybrid_groups(), 1 << 20).layout
    engine, _ = make(hybrid_groups(), layout.slab_bytes * 12)
    count = engine.manager.tokens_that_fit() // 2
    prompts = [prompt_of(count // 4, i) for i in range(4)]
    outs = engine.generate(prompts, SamplingParams(max_tokens=count), cache=False)
    check(engine, prompts, outs, count)
    assert sum(out.preemptions for out in outs) > 0
    assert engine.usage().cached_bytes == 0


def finished_in_order(priorities: list[int], **options: Any) -> list[int]:
    """Which of equal requests ends first, second and so on."""
    engine, _ = make(**options)
    prompts = [prompt_of(20, i) for i in range(len(priorities))]
    requests = engine._intake.requests(prompts, SamplingParams(max_tokens=3), None, None, True, priorities)
    for request in requests:
        engine._core.submit(request)
    ended: list[int] = []
    while len(ended) < len(requests):
        engine._core.step()
        ended += [i for i, request in enumerate(requests) if request.done and i not in ended]
    assert [request.output.token_ids for request in requests if request.output] == [
        expected_tokens(engine.manager.groups, prompt, 3) for prompt in prompts
    ]
    return ended


def test_the_lowest_priority_number_is_served_first_and_ties_by_arrival() -> None:
    assert finished_in_order([0, 0, 0], max_running=1) == [0, 1, 2]
    assert finished_in_order([5, 0, -3, 0, 5], max_running=1) == [2, 1, 3, 0, 4]


def test_an_urgent_prompt_is_computed_before_one_under_way() -> None:
    engine, runner = make(max_batch_tokens=32)
    slow = engine._intake.requests(prompt_of(320, 1), SamplingParams(max_tokens=2), None, None)[0]
    engine._core.submit(slow)
    engine._core.step()
    urgent = engine._intake.requests(prompt_of(64, 2), SamplingParams(max_tokens=2), None, None, True, -1)[0]
    engine._core.submit(urgent)
    start = len(runner.passes)
    while not urgent.events:
        engine._core.step()
    assert len(runner.passes) - start == 2


def test_preemption_takes_the_least_urgent_request() -> None:
    layout = GroupManager(attention_groups(), 1 << 20).layout
    engine, _ = make(attention_groups(), layout.slab_bytes * 12)
    count = engine.manager.tokens_that_fit() // 2
    prompts = [prompt_of(count // 2, i) for i in range(4)]
    outs = engine.generate(prompts, SamplingParams(max_tokens=count), priority=[9, 0, 0, 0])
    check(engine, prompts, outs, count)
    assert outs[1].preemptions == 0, "the first of the urgent ones is never preempted"
    assert sum(out.preemptions for out in outs) > 0


@pytest.mark.parametrize("priority", ["high", 1.5, True, None, [1, 2], [0, 1, "x"], {}])
def test_a_priority_of_a_wrong_type_is_refused(priority: Any) -> None:
    engine, runner = make()
    with pytest.raises(RequestError, match="priority"):
        engine.generate([[1], [2], [3]], ONE, priority=priority)
    with pytest.raises(RequestError, match="priority"):
        engine.stream([1], ONE, priority=priority)
    assert not runner.passes


@pytest.mark.parametrize("cache", ["no", 0, 1, None, [True], [True, False, 0]])
def test_cache_that_is_no_bool_is_refused(cache: Any) -> None:
    engine, runner = make()
    with pytest.raises(RequestError, match="cache"):
        engine.generate([[1], [2], [3]], ONE, cache=cache)
    if cache != [True]:
        with pytest.raises(RequestError, match="cache"):
            engine.stream([1], ONE, cache=cache)
    assert not runner.passes
