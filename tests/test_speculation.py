"""Speculation in the step loop: any guesses, the same output, and no trace of wrong ones."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from hybridkv.engine.engine import Engine
from hybridkv.engine.params import SamplingParams
from hybridkv.errors import ConfigError, HybridKVError
from hybridkv.hashing import unit_digests
from hybridkv.manager import GroupManager
from tests.drafters import Oracle
from tests.engine_fakes import VOCAB, FakeRunner, attention_groups, expected_tokens, hybrid_groups

WRONG = (0.0, 0.15, 0.5, 1.0)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(length)]


def make(
    texts: Sequence[Sequence[int]], wrong: float, groups: Any = hybrid_groups, pool_bytes: int = 1 << 20, **options: Any
) -> tuple[Engine, FakeRunner]:
    manager = GroupManager(groups(), pool_bytes, decode_checkpoint_interval=16)
    runner = FakeRunner(manager)
    options.setdefault("speculate", 6)
    engine = Engine(runner, manager, drafter=lambda: Oracle(texts, wrong, 1, VOCAB), **options)  # type: ignore[arg-type]
    return engine, runner


def texts_of(prompts: Sequence[Sequence[int]], count: int, groups: Any = hybrid_groups) -> list[list[int]]:
    return [[*prompt, *expected_tokens(groups(), prompt, count)] for prompt in prompts]


def allowed_digests(engine: Engine, texts: Sequence[Sequence[int]]) -> set[bytes]:
    """Keys that a server without speculation may have in its index."""
    manager, found = engine.manager, set()
    for text in texts:
        seq = manager.open(text)
        ids = seq.token_ids()
        unit = manager.unit_tokens
        found.update(unit_digests(seq.seed, ids[: len(ids) // unit * unit], unit, {}, manager.hash))
        manager.close(seq, cache=False)
    return found


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("groups", [hybrid_groups, attention_groups])
def test_the_output_is_that_of_plain_decoding_and_wrong_guesses_are_never_published(groups: Any, wrong: float) -> None:
    prompts = [prompt_of(length, length) for length in (1, 15, 16, 40)]
    texts = texts_of(prompts, 40, groups)
    engine, runner = make(texts, wrong, groups, max_batch_tokens=64)
    allowed = allowed_digests(engine, texts)
    requests = engine._intake.requests(prompts, SamplingParams(max_tokens=40), None, None, True, 0)
    for request in requests:
        engine._core.submit(request)
    while not all(request.done for request in requests):
        engine._core.step()
        engine.manager.check()
        assert {digest for digest in engine.manager._ledger.index._digests if digest} <= allowed
    assert [request.tokens for request in requests] == texts
    assert engine.usage().live_bytes == 0
    outs = [request.output for request in requests]
    accepted = [out.accepted / max(out.drafted, 1) for out in outs if out is not None]
    if wrong == 0:
        assert accepted == [1.0] * 4
        assert len(runner.passes) < 15
    elif wrong == 1:
        assert accepted == [0.0] * 4
    else:
        assert 0 < sum(accepted) < 4
    for text in texts:
        again = engine.generate([*text, 1, 2, 3], SamplingParams(max_tokens=1))[0]
        assert again.cached_tokens >= (len(text) - 1) // 16 * 16 - (16 if groups is hybrid_groups else 0)


@pytest.mark.parametrize("groups", [hybrid_groups, attention_groups])
@pytest.mark.parametrize("seed", range(12))
def test_any_mix_in_any_pool(groups: Any, seed: int) -> None:
    """Prefills beside decodes, shared prefixes, preemption, eviction, two rounds."""
    rng = random.Random(seed)
    wrong, pool = WRONG[seed % 4], (20_000, 40_000, 1 << 20)[seed % 3]
    budget, speculate = rng.choice([4, 16, 40, 500]), rng.randrange(1, 10)
    shared = prompt_of(48, seed)
    prompts = [
        [*shared[: rng.randrange(49)], *prompt_of(rng.randrange(1, 30), seed + i)] for i in range(rng.randrange(1, 7))
    ]
    texts = texts_of(prompts, 25, groups)
    engine, runner = make(texts, wrong, groups, pool, max_batch_tokens=budget, speculate=speculate)
    allowed = allowed_digests(engine, texts)
    preemptions = 0
    for _ in range(2):
        outs = engine.generate(prompts, SamplingParams(max_tokens=25))
        assert [[*prompt, *out.token_ids] for prompt, out in zip(prompts, outs, strict=True)] == texts
        preemptions += sum(out.preemptions for out in outs)
    assert max(sum(sizes) for sizes in runner.passes) <= budget
    engine.manager.check()
    assert engine.usage().live_bytes == 0
    if pool == 20_000 and len(prompts) > 3:
        assert preemptions
    assert {digest for digest in engine.manager._ledger.index._digests if digest} <= allowed


def test_prompts_come_before_guesses() -> None:
    """A long prompt beside a decode takes as many passes as without guesses; once it is through, there are some."""
    prompts = [prompt_of(5, 1), prompt_of(320, 2)]
    taken = []
    for speculate in (0, 6):
        engine, runner = make(texts_of(prompts, 60), 0.0, max_batch_tokens=16, speculate=speculate)
        first = engine.stream(prompts[0], SamplingParams(max_tokens=60))
        next(first)
        start = len(runner.passes)
        second = engine.stream(prompts[1], SamplingParams(max_tokens=2))
        next(second)
        taken.append(len(runner.passes) - start)
        assert len(list(first)) == 59
        assert len(list(second)) == 1
        assert (max(sizes[0] for sizes in runner.passes[start + taken[-1] :]) > 1) == (speculate > 0)
    assert taken[0] == taken[1]


@pytest.mark.parametrize("count", range(1, 12))
def test_max_tokens_inside_right_guesses(count: int) -> None:
    prompt = prompt_of(20)
    texts = texts_of([prompt], 20)
    engine, runner = make(texts, 0.0)
    out = engine.generate(prompt, SamplingParams(max_tokens=count))[0]
    assert [*prompt, *out.token_ids] == texts[0][: 20 + count]
    assert out.finish_reason == "length"
    assert runner.computed == 20 + count - 1


@pytest.mark.parametrize("place", range(1, 10))
def test_a_stop_token_inside_right_guesses(place: int) -> None:
    prompt = prompt_of(20, 3)
    texts = texts_of([prompt], 20)
    output = texts[0][20:]
    stop = output[place]
    engine, runner = make(texts, 0.0)
    out = engine.generate(prompt, SamplingParams(max_tokens=20, stop_token_ids=(stop,)))[0]
    assert out.token_ids == output[: output.index(stop) + 1]
    assert out.finish_reason == "stop"
    assert runner.computed == 20 + len(out.token_ids) - 1, "what follows a stop token is not computed"


def test_streams_give_every_token_once_and_in_order() -> None:
    prompt = prompt_of(30)
    texts = texts_of([prompt], 40)
    engine, _ = make(texts, 0.3)
    events = list(engine.stream(prompt, SamplingParams(max_tokens=40)))
    assert [token for event in events for token in event.token_ids] == texts[0][30:]
    assert [event.output is not None for event in events] == [False] * 39 + [True]


def test_a_dropped_stream_leaves_nothing_held() -> None:
    prompt = prompt_of(30)
    engine, _ = make(texts_of([prompt], 40), 0.3)
    stream = engine.stream(prompt, SamplingParams(max_tokens=40))
    for _ in range(9):
        next(stream)
    stream.close()
    assert engine.usage().live_bytes == 0
    engine.manager.check()


def test_a_failed_pass_drops_guesses_too() -> None:
    prompt = prompt_of(30)
    texts = texts_of([prompt], 40)
    engine, runner = make(texts, 0.0)
    runner.fail_at = 3
    with pytest.raises(RuntimeError, match="fell off"):
        engine.generate(prompt, SamplingParams(max_tokens=40))
    engine.manager.check()
    assert engine.usage().live_bytes == 0
    runner.fail_at = None
    assert [*prompt, *engine.generate(prompt, SamplingParams(max_tokens=40))[0].token_ids] == texts[0]


def test_logits_that_are_not_numbers_end_a_request_only_where_plain_decoding_ends_it() -> None:
    prompt = prompt_of(20, 8)
    texts = texts_of([prompt], 30)
    absent = next(token for token in range(VOCAB) if token not in texts[0])
    guessed = [[*texts[0][:24], absent, *texts[0][25:]], texts[0]]
    engine, runner = make(guessed, 0.0, speculate=4)
    runner.nan_at = absent
    sound = engine.generate(prompt, SamplingParams(max_tokens=30))[0]
    assert [*prompt, *sound.token_ids] == texts[0]
    assert runner.spoilt > 0, "a guess that spoils the logits was computed"
    runner.nan_at = texts[0][30]
    with pytest.raises(HybridKVError, match="not a number"):
        engine.generate(prompt, SamplingParams(max_tokens=30))
    engine.manager.check()
    assert engine.usage().live_bytes == 0


@pytest.mark.parametrize("speculate", [-1, 1.5, True, None])
def test_a_number_of_guesses_that_makes_no_sense(speculate: Any) -> None:
    with pytest.raises(ConfigError, match="speculate must be an integer of at least 0"):
        make([], 0.0, speculate=speculate)


def test_without_the_option_nothing_is_guessed() -> None:
    prompt = prompt_of(20)
    engine, runner = make(texts_of([prompt], 8), 0.0, speculate=0)
    out = engine.generate(prompt, SamplingParams(max_tokens=8))[0]
    assert (out.drafted, out.accepted) == (0, 0)
    assert runner.passes == [[20], *[[1]] * 7]
