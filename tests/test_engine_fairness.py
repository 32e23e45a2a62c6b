"""Prompts of any length side by side: nobody waits for a long one, and the long one is read to its end."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from hybridkv.engine.core import EngineCore
from hybridkv.engine.engine import Engine
from hybridkv.engine.request import Request
from hybridkv.engine.turns import owed
from tests.engine_cases import make, prompt_of, submit
from tests.engine_fakes import attention_groups
from tests.strategies import examples

BUDGET = 32
LONG = 1200


def engine_with_room(**options: int) -> Engine:
    return make(attention_groups(), 4 << 20, max_batch_tokens=BUDGET, **options)[0]


def steps_until_first_token(engine: Engine, request: Request) -> int:
    steps = 0
    while not request.events and steps < 1000:
        engine._core.step()
        steps += 1
    return steps


@settings(max_examples=examples(0.2))
@given(length=st.integers(1, 200), begun=st.integers(0, 12), longs=st.integers(1, 5))
def test_a_short_prompt_behind_long_ones_has_its_first_token_after_its_own_chunks_and_one(
    length: int, begun: int, longs: int
) -> None:
    engine = engine_with_room()
    for i in range(longs):
        submit(engine, prompt_of(LONG, i), 1)
    for _ in range(begun):
        engine._core.step()
    short = submit(engine, prompt_of(length, 99), 1)
    share = BUDGET - owed(BUDGET)
    assert steps_until_first_token(engine, short) <= -(-length // share) + 1


def test_a_long_prompt_is_read_to_its_end_under_an_endless_stream_of_short_ones() -> None:
    engine = engine_with_room()
    long = submit(engine, prompt_of(LONG), 1)
    steps = 0
    while not long.done and steps < LONG:
        for i in range(2):
            submit(engine, prompt_of(BUDGET, 1000 + 2 * steps + i), 1)
        engine._core.step()
        steps += 1
    assert steps <= LONG / owed(BUDGET) + 2
    assert engine._core._scheduler._admission.waiting, "there was more to do than could be done"


@settings(max_examples=examples(0.3))
@given(
    arrivals=st.lists(
        st.tuples(st.integers(0, 3), st.integers(1, 150), st.sampled_from([0, 0, 0, -1, 2])), min_size=2, max_size=12
    ),
    budget=st.sampled_from([1, 4, 17, 32, 64]),
    max_running=st.sampled_from([1, 2, 5, 64]),
)
def test_every_step_serves_whose_turn_it_is(
    arrivals: list[tuple[int, int, int]], budget: int, max_running: int
) -> None:
    """The first by priority and arrival gets its due of every step: by induction everybody's turn comes."""
    engine, _ = make(attention_groups(), 4 << 20, max_batch_tokens=budget, max_running=max_running)
    core: EngineCore = engine._core
    requests: list[Request] = []
    pending = list(enumerate(arrivals))
    while pending or not all(request.done for request in requests):
        if pending and (pending[0][1][0] == 0 or len(requests) == 0):
            i, (_, length, priority) = pending.pop(0)
            requests.append(submit(engine, prompt_of(length, i), 3, priority=priority))
            continue
        pending = [(i, (max(wait - 1, 0), *rest)) for i, (wait, *rest) in pending]  # type: ignore[misc]
        decoding = sum(request.decoding for request in requests)
        running = [request for request in requests if request.seq is not None]
        prompts = [
            r for r in requests if not r.done and not r.decoding and (r in running or len(running) < max_running)
        ]
        left = {request: len(request.tokens) - request.computed for request in prompts}
        plan = core.step()
        planned = {chunk.request: chunk.size for chunk in plan.chunks}
        assert len(plan.decodes) == decoding, "nobody who has begun to answer sits a step out"
        assert sum(planned.values()) + decoding <= budget
        if prompts and budget > decoding:
            first = min(prompts, key=lambda request: (request.priority, request.arrival))
            assert planned.get(first, 0) >= min(owed(budget - decoding), left[first])


def test_equal_prompts_are_served_one_after_the_other() -> None:
    """Sharing out evenly would let all of them end late."""
    engine = engine_with_room()
    requests = [submit(engine, prompt_of(3 * BUDGET, i), 1) for i in range(4)]
    ends: list[int] = []
    while not all(request.done for request in requests):
        engine._core.step()
        ends.append(sum(request.done for request in requests))
    assert len(ends) == 12
    assert [ends.index(count) + 1 for count in (1, 2, 3, 4)] == [3, 6, 9, 12]


def test_what_is_cached_counts_as_done() -> None:
    """A follow-up to a long conversation is a short prompt."""
    engine = engine_with_room()
    talk = prompt_of(600, 1)
    engine.generate(talk)
    submit(engine, prompt_of(500, 2), 1)
    engine._core.step()
    turn = submit(engine, [*talk, *prompt_of(40, 3)], 1)
    assert steps_until_first_token(engine, turn) <= 4
    assert turn.cached_tokens == 592


def test_a_prompt_that_somebody_waits_for_is_as_urgent_as_they_are() -> None:
    engine = engine_with_room()
    shared = prompt_of(320, 1)
    submit(engine, [*shared, *prompt_of(LONG, 2)], 1)
    engine._core.step()
    submit(engine, prompt_of(LONG, 3), 1)
    question = submit(engine, [*shared, 5, 6, 7], 1)
    assert steps_until_first_token(engine, question) <= (320 - BUDGET) // (BUDGET - owed(BUDGET)) + 2
    assert question.cached_tokens == 320


def test_an_urgent_prompt_has_every_step_to_itself_however_short_another_is() -> None:
    engine = engine_with_room()
    urgent = submit(engine, prompt_of(LONG, 1), 1, priority=-1)
    submit(engine, prompt_of(BUDGET, 2), 1)
    assert steps_until_first_token(engine, urgent) == -(-LONG // BUDGET)
