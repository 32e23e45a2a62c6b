"""Admission by whole sequences, and what a preempted request still has when it returns."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from hybridkv.engine.engine import Engine
from hybridkv.engine.params import SamplingParams
from hybridkv.engine.request import Request
from hybridkv.entries import CacheEntry, LayerGroup, Part, attention_parts, group_entries
from hybridkv.errors import PoolTooSmall, PromptTooLong
from hybridkv.manager import GroupManager
from tests.engine_cases import check, prompt_of, submit
from tests.engine_fakes import WINDOW, FakeRunner, attention_groups, expected_tokens, hybrid_groups
from tests.strategies import examples

INTERVAL = 16
UNIT = 16


def engine_of_slabs(groups: tuple[LayerGroup, ...], slabs: int, **options: Any) -> Engine:
    layout = GroupManager(groups, 1 << 20).layout
    manager = GroupManager(groups, layout.slab_bytes * slabs, decode_checkpoint_interval=INTERVAL)
    return Engine(FakeRunner(manager), manager, **options)  # type: ignore[arg-type]


@st.composite
def layouts(draw: st.DrawFn) -> tuple[LayerGroup, ...]:
    """Full attention, and with it any of windows and states, with pages and widths of their own."""
    pages = {kind: draw(st.sampled_from([16, 32])) for kind in ("full_attention", "sliding_attention")}
    entries = [CacheEntry(0, "full_attention", attention_parts(1, draw(st.sampled_from([4, 8])), "float32"))]
    if draw(st.booleans()):
        parts = attention_parts(1, draw(st.sampled_from([4, 16])), "float32")
        entries.append(CacheEntry(len(entries), "sliding_attention", parts, (("window", WINDOW),)))
    for _ in range(draw(st.integers(0, 2))):
        width = draw(st.sampled_from([64, 200]))
        entries.append(CacheEntry(len(entries), "linear_attention", (Part("recurrent", (width,), "float32"),)))
    return group_entries(entries, pages)


@settings(max_examples=examples(0.3))
@given(
    groups=layouts(),
    pool_bytes=st.integers(4_000, 40_000),
    length=st.integers(1, 10_000),
    warm=st.booleans(),
    budget=st.sampled_from([7, 64, 4096]),
)
def test_the_longest_request_that_fits_completes_and_one_token_more_is_refused(
    groups: tuple[LayerGroup, ...], pool_bytes: int, length: int, warm: bool, budget: int
) -> None:
    try:
        manager = GroupManager(groups, pool_bytes, decode_checkpoint_interval=INTERVAL)
        engine = Engine(FakeRunner(manager), manager, max_batch_tokens=budget)  # type: ignore[arg-type]
    except PoolTooSmall:
        assume(False)
    fit = manager.tokens_that_fit()
    length = 1 + length % fit
    prompt = prompt_of(length)
    if warm:
        engine.generate([prompt[: length // 2 + 1], prompt_of(fit // 2 + 1, 1)], SamplingParams(max_tokens=1))
    count = fit + 1 - length
    check(engine, [prompt], engine.generate([prompt], SamplingParams(max_tokens=count)), count)
    with pytest.raises(PromptTooLong, match=rf"{fit + 2} in all"):
        engine.generate([prompt], SamplingParams(max_tokens=count + 1))


def preempted_once(engine: Engine, requests: list[Request]) -> list[tuple[int, int]]:
    """Runs to the end; for each preemption, the tokens a request had computed and those it came back with."""
    had = dict.fromkeys(requests, 0)
    losses = []
    for _ in range(5000):
        if all(request.done for request in requests):
            return losses
        before = {request: (request.computed, request.preemptions) for request in requests}
        plan = engine._core.step()
        planned = {chunk.request: chunk.size for chunk in plan.chunks}
        for request, (computed, preemptions) in before.items():
            if request.preemptions > preemptions:
                had[request] = computed
            if had[request] and request.seq is not None and request in planned:
                losses.append((had[request], request.computed - planned[request]))
                had[request] = 0
    raise AssertionError("the requests did not end")


def test_a_preempted_request_resumes_close_to_where_it_was() -> None:
    """The first needs only a few pages more than there are."""
    engine = engine_of_slabs(attention_groups(), 60)
    fit = engine.manager.tokens_that_fit()
    first_end, second_end = fit // 2 + 24, fit * 6 // 10
    prompts = [prompt_of(first_end // 4, 1), prompt_of(first_end // 4, 2)]
    requests = [
        submit(engine, prompt, end - len(prompt)) for prompt, end in zip(prompts, (first_end, second_end), strict=True)
    ]
    losses = preempted_once(engine, requests)
    assert losses
    assert requests[0].preemptions == 0
    for had, back in losses:
        assert back >= had - INTERVAL - UNIT, f"{had} tokens were computed, {back} were left"
    for request, prompt in zip(requests, prompts, strict=True):
        assert request.output is not None
        assert request.output.token_ids == expected_tokens(engine.manager.groups, prompt, request.params.max_tokens)


@pytest.mark.parametrize("groups", [hybrid_groups, attention_groups])
def test_requests_that_use_all_their_tokens_are_hardly_ever_preempted(groups: Any) -> None:
    engine = engine_of_slabs(groups(), 60)
    fit = engine.manager.tokens_that_fit()
    prompts = [prompt_of(fit // 20, i) for i in range(40)]
    outs = engine.generate(prompts, SamplingParams(max_tokens=fit // 10))
    check(engine, prompts, outs, fit // 10)
    assert sum(out.preemptions for out in outs) <= 6


def test_requests_that_end_early_run_side_by_side() -> None:
    """Each may use half the pool and uses a twentieth."""
    engine = engine_of_slabs(attention_groups(), 60)
    fit = engine.manager.tokens_that_fit()
    runner: Any = engine._runner
    prompts = [prompt_of(fit // 40, i) for i in range(60)]
    answers = [expected_tokens(engine.manager.groups, prompt, fit // 40) for prompt in prompts]
    params = [SamplingParams(max_tokens=fit // 2, stop_token_ids=(answer[-1],)) for answer in answers]
    engine.generate(prompts, params)
    assert max(len(sizes) for sizes in runner.passes) >= 10


def test_a_request_that_finds_no_room_is_passed_by_some_and_then_waited_for() -> None:
    engine = engine_of_slabs(attention_groups(), 60)
    fit = engine.manager.tokens_that_fit()
    submit(engine, prompt_of(fit // 2, 1), fit // 4)
    engine._core.step()
    large = submit(engine, prompt_of(fit * 6 // 10, 2), 1)
    passed = 0
    for i in range(2000):
        short = submit(engine, prompt_of(20, 100 + i), 1)
        engine._core.step()
        passed += (large.seq is None and short.seq is not None) or (short.done and not large.done)
        if large.done:
            break
    assert large.done
    assert 0 < passed <= 34
    assert large.passed <= 32


def test_after_pages_ran_out_nobody_is_admitted_before_a_running_request_has_ended() -> None:
    """Not even one that would fit: what was freed is for those who run."""
    engine = engine_of_slabs(attention_groups(), 60)
    fit = engine.manager.tokens_that_fit()
    first, second = (submit(engine, prompt_of(fit // 8, i), fit // 2) for i in (1, 2))
    for _ in range(fit):
        if second.preemptions:
            break
        engine._core.step()
    assert second.preemptions == 1
    tiny = submit(engine, prompt_of(4, 3), 1)
    steps = 0
    while not first.done and steps < fit:
        engine._core.step()
        steps += 1
        assert second.seq is None
        assert tiny.seq is None
        assert not tiny.generated
    assert first.done
    assert steps > 5
    for _ in range(fit):
        engine._core.step()
        if tiny.done:
            break
    assert tiny.done
