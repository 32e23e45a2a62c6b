"""Who shares what: the behaviours measured on other engines, and what must never be shared."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hybridkv import layer_groups
from hybridkv.lookup import resumable_units
from hybridkv.manager import GroupManager
from hybridkv.retention import Victims
from hybridkv.sequence import Sequence
from tests.shadow import Server
from tests.strategies import (
    attention,
    cache,
    compute,
    groups_of,
    hit_of,
    manager_of,
    state,
)

ATTENTION = ("gemma-3-12b", "gemma-3-270m", "gpt-oss-20b", "llama-3.1-8b")
WITH_STATES = ("jamba-1.5-mini", "nemotron-h-8b", "qwen3-next-80b-a3b")
PRESETS = (*ATTENTION, *WITH_STATES)
CHUNK = 2048

A = np.arange(8000) * 7919 % 50_000
B = np.concatenate((A[:5000], 60_000 + np.arange(3000)))
C = np.concatenate((A[:5000], 70_000 + np.arange(3000)))


def serve(preset: str, **options: Any) -> GroupManager:
    options.setdefault("checkpoint_interval", None)
    return GroupManager(layer_groups(preset), "16GiB", **options)


def hit_now(manager: GroupManager, seq: Sequence) -> int:
    """What the prompt of a closed sequence would hit, without counting as a use."""
    index, unit = manager._ledger.index, manager.unit_tokens
    matched = index.match(seq.digests)
    rows = index.chain(index.row(seq.digests[matched - 1])) if matched else np.zeros(0, np.int64)
    return unit * resumable_units(manager.layout, index, rows, min(matched, (seq.known - 1) // unit))


@pytest.mark.parametrize("preset", PRESETS)
def test_a_resend_hits_all_but_the_last_unit(preset: str) -> None:
    manager = serve(preset)
    assert cache(manager, A, CHUNK) == 0
    assert cache(manager, A, CHUNK) == 7984
    assert cache(manager, [*A, 1, 2], CHUNK) == 8000, "the end of the first is a resume point too"
    manager.check()


@pytest.mark.parametrize("preset", PRESETS)
def test_the_first_sibling_hits_at_a_named_breakpoint(preset: str) -> None:
    manager = serve(preset)
    cache(manager, A, CHUNK, breakpoints=[5000])
    assert cache(manager, B, CHUNK) == 4992
    assert cache(manager, C, CHUNK) == 4992
    manager.check()


@pytest.mark.parametrize("preset", WITH_STATES)
def test_without_a_name_the_second_sibling_hits_at_the_junction(preset: str) -> None:
    manager = serve(preset)
    cache(manager, A, CHUNK)
    assert cache(manager, B, CHUNK) == 0
    assert cache(manager, C, CHUNK) == 4992
    assert cache(manager, A, CHUNK) == 7984
    manager.check()


@pytest.mark.parametrize("preset", ATTENTION)
def test_attention_alone_needs_no_name(preset: str) -> None:
    manager = serve(preset)
    cache(manager, A, CHUNK)
    assert cache(manager, B, CHUNK) == 4992
    manager.check()


@pytest.mark.parametrize("preset", WITH_STATES)
def test_a_long_prompt_has_resume_points_on_the_way(preset: str) -> None:
    manager = serve(preset, checkpoint_interval=2048)
    cache(manager, A, 1000)
    assert manager.resume_points() == (2048, 4096, 6144, 7984, 8000)
    assert cache(manager, B, CHUNK) == 4096
    assert cache(manager, C, CHUNK) == 4992


@pytest.mark.parametrize("chunk", [1, 7, 16, 33, 100])
def test_where_checkpoints_lie_does_not_depend_on_chunks(chunk: int) -> None:
    """A chunk off the grid publishes nothing under a wrong boundary: the shadow storage compares the contents."""
    groups = groups_of(attention(), attention("sliding_attention", window=9), state())
    server = Server(manager_of(groups, 100, unit_tokens=4, checkpoint_interval=16))
    text = [i * i % 7 for i in range(61)]
    request = server.open(text, breakpoints=(21,))
    while request.seq.length < 61:
        server.step([(request, min(chunk, 61 - request.seq.length))])
    server.close(request, cache=True)
    assert server.manager.resume_points() == (16, 20, 32, 48, 60)
    for cut, hit in {61: 60, 60: 48, 48: 32, 30: 20, 17: 16}.items():
        again = server.open([*text[: cut - 1], 9])
        assert again.seq.hit_tokens == hit
        server.step([(again, cut - hit)])
        server.close(again, cache=False)


@pytest.mark.parametrize("policy", ["lru", "cost"])
@pytest.mark.parametrize("preset", PRESETS)
def test_under_pressure_the_hit_falls_from_resume_point_to_resume_point(preset: str, policy: str) -> None:
    manager = serve(preset, policy=policy)
    seq = manager.open(A, breakpoints=[1000, 3000, 5000])
    compute(manager, seq, chunk=CHUNK)
    manager.close(seq)
    assert manager.resume_points() == (992, 2992, 4992, 7984, 8000)
    stride = max(plan.stride for plan in manager.layout.plans)
    seen = [hit_now(manager, seq)]
    while manager.evict(stride):
        seen.append(hit_now(manager, seq))
        left = [tokens for tokens in manager.resume_points() if tokens < 8000]
        assert seen[-1] >= max(left, default=0), "a resume point that is kept can be resumed at"
        assert seen[-1] <= seen[-2]
    manager.check()
    assert (seen[0], seen[-1]) == (7984, 0)
    assert {7984, 4992, 2992, 992, 0} <= set(seen), "every resume point breaks the fall"
    if preset in WITH_STATES:
        assert sorted(set(seen)) == [0, 992, 2992, 4992, 7984]


def test_the_loss_of_any_one_page_leaves_the_resume_points_before_it() -> None:
    """Each cached page in turn, and every resume point that does not need it: a hit is never lost as a whole."""
    groups = groups_of(attention(), attention("sliding_attention", window=9), state())
    text = [i % 5 for i in range(64)]
    count = -1
    lost_all = 0
    while count != 0:
        manager = manager_of(groups, 100, unit_tokens=4, checkpoint_interval=None)
        seq = manager.open(text, breakpoints=[16, 32, 48])
        compute(manager, seq, chunk=10)
        manager.close(seq)
        ledger = manager._ledger
        cached = [(g, p) for g, row_of in enumerate(ledger.index.row_of) for p in np.flatnonzero(row_of >= 0)]
        count = len(cached) if count < 0 else count
        g, page = cached[count - 1]
        end = int(ledger.index.depth[ledger.index.row_of[g][page]]) * 4
        unneeded = not ledger.retention.needs[g][page]
        ledger.retention.drop_needing(g, int(page))
        ledger.lose([Victims(g, np.array([page]))])
        hit = hit_now(manager, seq)
        assert hit >= max((at for at in (16, 32, 48, 60) if at < end), default=0)
        assert hit == 60 or not unneeded
        lost_all += hit == 0
        manager.check()
        count -= 1
    assert lost_all <= 4, "only what the first resume point itself needs"


@pytest.mark.parametrize("preset", WITH_STATES)
def test_attention_without_the_states_is_no_hit(preset: str) -> None:
    manager = serve(preset)
    cache(manager, A, CHUNK, breakpoints=[3000])
    ledger = manager._ledger

    def lose_states(since: int) -> None:
        for g, group in enumerate(manager.groups):
            pages = np.flatnonzero(ledger.index.row_of[g] >= 0)
            for page in pages.tolist() if group.is_state else []:
                if ledger.index.depth[ledger.index.row_of[g][page]] * 16 > since:
                    ledger.retention.drop_needing(g, page)
                    ledger.lose([Victims(g, np.array([page]))])

    lose_states(since=3000)
    assert hit_of(manager, A) == 2992
    lose_states(since=0)
    assert hit_of(manager, A) == 0
    assert manager.usage().groups[-1].cached_pages == 500, "attention is still there"
    manager.check()


def test_a_window_without_one_page_falls_back_past_it_and_no_further() -> None:
    manager = serve("gemma-3-12b")
    cache(manager, A, CHUNK)
    ledger = manager._ledger
    sliding = next(g for g, group in enumerate(manager.groups) if group.kind == "sliding_attention")
    rows = ledger.index.chain(ledger.retention.points[-1].row)
    page = int(ledger.index.page_at[sliding][rows[480]])
    ledger.retention.drop_needing(sliding, page)
    ledger.lose([Victims(sliding, np.array([page]))])
    assert hit_of(manager, A) == 480 * 16


@pytest.mark.parametrize("preset", PRESETS)
def test_a_tiny_prompt_holds_a_page_of_each_group_and_is_hit(preset: str) -> None:
    """Attention pages are never blown up to the size of a state, so a short prompt is small and can be shared."""
    manager = serve(preset)
    prompt = A[:12]
    seq = manager.open(prompt)
    compute(manager, seq)
    assert [group.live_pages for group in manager.usage().groups] == [1] * len(manager.groups)
    manager.close(seq)
    assert cache(manager, A[:40]) == 0
    assert cache(manager, A[:40]) == 32


def test_checkpoints_are_bounded_by_the_pool() -> None:
    """Many prompts, each with a checkpoint: they stay inside the pool and never keep a request out."""
    manager = manager_of(groups_of(attention(), state(2, 64)), 12, unit_tokens=4, checkpoint_interval=8)
    for i in range(60):
        cache(manager, [i, *range(30)])
        usage = manager.usage()
        assert usage.cached_bytes + usage.free_bytes == usage.pool_bytes
    assert manager._ledger.evicted > 0
    assert 0 < len(manager.resume_points()) <= manager.layout.slots(1)
    manager.check()


def test_rejected_drafts_are_never_published() -> None:
    groups = groups_of(attention(), attention("sliding_attention", window=9))
    server = Server(manager_of(groups, 60, unit_tokens=4))
    text = [1] * 10
    request = server.open(text)
    server.step([(request, 10)])
    assert server.reserve(request, 6)
    drafts = request.fed[:]
    server.forward([request])
    server.commit(request, 1)
    assert server.decode([request], [9])
    server.close(request, cache=True)
    rejected = server.open([*text, *drafts, 1, 1, 1, 1])
    assert rejected.seq.hit_tokens == 8
    server.step([(rejected, 12)])
    server.close(rejected, cache=True)


@pytest.mark.parametrize("decoded", [0, 3, 9])
def test_states_that_saw_rejected_drafts_go_back_to_a_checkpoint(decoded: int) -> None:
    """Draft, reject, go back, and go on: nothing may read the states the drafts were written to."""
    groups = groups_of(attention(), state())
    server = Server(manager_of(groups, 60, unit_tokens=4, decode_checkpoint_interval=4, checkpoint_interval=None))
    request = server.open([1] * 10)
    server.step([(request, 10)])
    for _ in range(decoded):
        server.decode([request], [5])
    length = request.seq.length
    assert server.reserve(request, 4)
    server.forward([request])
    server.truncate(request, length)
    assert request.seq.length == length - length % 4
    server.step([(request, length - request.seq.length)] if length % 4 else [])
    server.decode([request], [6])
    server.close(request, cache=True)
    again = server.open([1] * 10 + [5] * decoded + [6, 7, 7])
    assert again.seq.hit_tokens >= 8
    server.step([(again, again.seq.known - again.seq.length)])
    server.close(again, cache=True)


@pytest.mark.parametrize("cached", [True, False])
def test_a_preempted_request_resumes_from_no_stale_state(cached: bool) -> None:
    groups = groups_of(attention(), attention("sliding_attention", window=9), state())
    server = Server(manager_of(groups, 30, unit_tokens=4, decode_checkpoint_interval=4))
    request = server.open([1, 2, 3] * 5)
    server.step([(request, 15)])
    for token in range(7):
        server.decode([request], [token])
    assert server.reserve(request, 1)
    server.forward([request])
    tokens = request.seq.tokens.tolist()
    server.close(request, cache=cached)
    for other in range(3):
        filler = server.open([other + 5] * 20)
        server.step([(filler, 20)])
        server.close(filler, cache=True)
    resumed = server.open(tokens)
    assert not cached or resumed.seq.hit_tokens > 0
    server.step([(resumed, len(tokens) - resumed.seq.length)])
    assert server.decode([resumed], [9])
    server.close(resumed, cache=True)
