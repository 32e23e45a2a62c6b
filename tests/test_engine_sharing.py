"""What requests of one engine compute once, and what they never share."""

from __future__ import annotations

from typing import Any

import pytest

from hybridkv.engine.params import SamplingParams
from tests.engine_cases import check, make, prompt_of
from tests.engine_fakes import attention_groups, expected_tokens, hybrid_groups


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
    early = engine._intake.requests(first, SamplingParams(max_tokens=4), None, None)[0]
    engine._core.submit(early)
    for _ in range(5):
        engine._core.step()
    late = engine._intake.requests(later, SamplingParams(max_tokens=4), None, None)[0]
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
