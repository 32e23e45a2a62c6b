"""An allocation fails only if live bytes and requested bytes exceed the pool minus one slab per group."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridkv import layer_groups, reservation
from hybridkv.errors import OutOfPages
from hybridkv.manager import GroupManager
from hybridkv.rules import SlidingAttention
from hybridkv.sequence import Sequence
from tests.shadow import Server
from tests.strategies import (
    attention,
    cache,
    compute,
    examples,
    groups_of,
    hit_of,
    manager_of,
    managers,
    prompts,
    state,
)

TIGHT = (3, 4, 6, 9)
MOST = 150


def everything(manager: GroupManager) -> tuple[Any, ...]:
    """All that an allocation could change."""
    ledger = manager._ledger
    published = [
        (g, page, ledger.index._digests[int(ledger.index.row_of[g][page])])
        for g, row_of in enumerate(ledger.index.row_of)
        for page in np.flatnonzero(row_of >= 0).tolist()
    ]
    held = [
        (
            seq.id,
            [[] if table is None else table.pages[: table.end].tolist() for table in seq.tables],
            list(seq.working),
            dict(seq.pending),
            seq.snapshot,
            (seq.length, seq.reserved, seq.capacity, list(seq.plan)),
        )
        for seq in manager.running
    ]
    slots = [pages.slot.tolist() for pages in ledger.pool.groups]
    return manager.usage(), manager.resume_points(), published, held, slots, list(ledger.copies)


def least_bytes(manager: GroupManager, seq: Sequence, n: int) -> int:
    """Bytes that running requests and the next `n` tokens of one of them cannot do without."""
    ledger = manager._ledger
    total = 0
    for g, (group, plan) in enumerate(zip(manager.groups, manager.layout.plans, strict=True)):
        pages, row_of = ledger.pool.groups[g], ledger.index.row_of[g]
        count = pages.live
        if group.is_state:
            count -= sum(1 for other in manager.running if other.snapshot)
            count += seq.working[g] < 0
            # Where nobody else runs on it, a hit's checkpoint can be written in place.
            count += seq.working[g] >= 0 and pages.refs[seq.working[g]] > 1
        else:
            table = seq.table(g)
            count += max(-(-(seq.length + n) // group.page_tokens) - table.end, 0)
            if seq.length % group.page_tokens:
                tail = table.pages[seq.length // group.page_tokens]
                count += bool(pages.refs[tail] > 1 or row_of[tail] >= 0)
        total += int(count) * plan.stride
    return total


def reserve_or_be_right(manager: GroupManager, seq: Sequence, n: int) -> bool:
    """Reserve; a refusal must have been due, and must have changed nothing."""
    reservation.sweep(manager._ledger, [seq])
    before = everything(manager)
    layout = manager.layout
    try:
        manager.reserve(seq, n)
    except OutOfPages as error:
        refusal = error
    else:
        manager.check()
        return True
    manager.check()
    assert everything(manager) == before
    room = layout.pool_bytes - len(layout.groups) * layout.slab_bytes
    assert least_bytes(manager, seq, n) > room
    assert (refusal.live, refusal.pool) == (manager.usage().live_bytes, layout.pool_bytes)
    assert refusal.live + refusal.requested > room
    return False


@settings(max_examples=examples(1.2))
@given(managers(TIGHT), st.lists(prompts(), min_size=1, max_size=4), st.data())
def test_a_reservation_fails_only_when_it_must(
    manager: GroupManager, texts: list[list[int]], data: st.DataObject
) -> None:
    """Requests in the middle of prefill and decode, forks and cached prompts compete for a pool that is too small."""
    running: list[Sequence] = []
    for _ in range(data.draw(st.integers(1, 25))):
        act = data.draw(st.sampled_from(["open", "grow", "grow", "grow", "decode", "fork", "close"]))
        if act == "open" or not running:
            running.append(manager.open(data.draw(st.sampled_from(texts))))
            continue
        seq = data.draw(st.sampled_from(running))
        if act == "close":
            running.remove(seq)
            manager.close(seq, cache=data.draw(st.booleans()))
        elif act == "fork" and not seq.reserved:
            running.append(manager.fork(seq))
        elif act == "grow":
            n = data.draw(st.integers(1, max(1, seq.known - seq.length)))
            if reserve_or_be_right(manager, seq, n):
                manager.commit(seq, n, token_ids=[1] * max(0, seq.length + n - seq.known) or None)
        elif act == "decode":
            while data.draw(st.booleans()) and reserve_or_be_right(manager, seq, 1):
                manager.commit(seq, 1, token_ids=None if seq.known > seq.length else [1])


@settings(max_examples=examples(0.6))
@given(managers(TIGHT), prompts(), st.integers(2, 9))
def test_a_batch_is_reserved_as_a_whole_or_not_at_all(manager: GroupManager, text: list[int], size: int) -> None:
    first = manager.open(text)
    try:
        compute(manager, first, chunk=3)
    except OutOfPages:
        return
    batch = [first, *(manager.fork(first) for _ in range(size - 1))]
    for _ in range(20):
        reservation.sweep(manager._ledger, batch)
        before = everything(manager)
        try:
            manager.reserve_decode(batch)
        except OutOfPages:
            assert everything(manager) == before
            manager.check()
            break
        assert all(seq.reserved == 1 for seq in batch)
        manager.commit_decode(batch, range(size))
        manager.check()


@settings(max_examples=examples(0.6))
@given(managers((3, 6, 12, 30)), st.booleans())
def test_the_longest_request_that_fits_is_served_and_one_token_more_is_not(manager: GroupManager, full: bool) -> None:
    fit = manager.tokens_that_fit()
    text = [i % 3 for i in range(min(fit, MOST) + 1)]
    for i in range(5 if full else 0):
        seq = manager.open([9, i, *text[: min(fit // 2, 30)]][: max(fit, 1)])
        compute(manager, seq, chunk=1)
        manager.close(seq)
    for _ in range(2):
        seq = manager.open(text[:fit])
        compute(manager, seq, chunk=1)
        assert seq.length == min(fit, len(text))
        manager.check()
        manager.close(seq)
    seq = manager.open(text)
    if fit < len(text):
        with pytest.raises(OutOfPages):
            compute(manager, seq, chunk=1)
        assert seq.length <= fit
    manager.close(seq)
    manager.check()


@settings(max_examples=examples(0.4))
@given(managers((3, 6, 12, 30)), st.sampled_from([4, 16, 64]))
def test_chunks_that_shrink_under_pressure_serve_the_longest_request(manager: GroupManager, chunk: int) -> None:
    server = Server(manager)
    fit = min(manager.tokens_that_fit(), MOST)
    request = server.open([i % 3 for i in range(fit)])
    while request.seq.length < fit:
        n = min(chunk, fit - request.seq.length)
        while not server.step([(request, n)]):
            assert n > 1, "a single token always fits"
            n = (n + 1) // 2
    server.close(request, cache=True)
    manager.check()


def test_a_model_that_forgets_has_no_longest_request() -> None:
    groups = groups_of(attention("sliding_attention", window=9), state())
    assert manager_of(groups, 20, unit_tokens=4).tokens_that_fit() == 2**40


@pytest.mark.parametrize("pages", [3, 4, 5, 6])
def test_a_chunk_that_cannot_be_finished_limits_a_request_that_could_go_on_after_it(pages: int) -> None:
    groups = groups_of(attention("chunked_attention", chunk=40))
    manager = manager_of(groups, pages, unit_tokens=4)
    assert manager.layout.slabs == pages
    assert manager.tokens_that_fit() == 4 * pages


def fill(manager: GroupManager, n: int = 1) -> list[Sequence]:
    """As many requests of n tokens as there is room for."""
    running = []
    for i in range(10**4):
        seq = manager.open([i, *range(n - 1)])
        if not reserve_or_be_right(manager, seq, n):
            manager.close(seq)
            return running
        manager.commit(seq, n)
        running.append(seq)
    raise AssertionError("the pool has no end")


def test_every_slot_of_a_single_group_can_be_live() -> None:
    manager = manager_of(groups_of(attention()), 10, unit_tokens=4)
    assert len(fill(manager)) == manager.layout.slots(0)
    assert manager.usage().free_bytes == 0


def test_live_pages_in_slivers_of_slabs_are_packed() -> None:
    """Four slabs with one live page each, and requests that each want a slab of their own."""
    groups = groups_of(attention(), state(width=76))
    manager = GroupManager(groups, 16 * 768, unit_tokens=4)
    assert [plan.per_slab for plan in manager.layout.plans] == [12, 1]
    assert manager.layout.slabs == 16
    first = [manager.open([50 + i] * 48, breakpoints=[4]) for i in range(4)]
    for seq in first:
        compute(manager, seq, chunk=4)
    for seq in first:
        assert manager.truncate(seq, 4) == 4
    manager.evict(1 << 40)
    assert [group.slabs for group in manager.usage().groups] == [4, 4]
    manager.take_copies()
    manager.reserve(first[0], 1)
    (copied,) = manager._ledger.copies
    assert len(fill(manager, 4)) == 10
    assert manager.take_copies()[0] == copied, "pages move after what was written to them before"
    assert [group.slabs for group in manager.usage().groups] == [2, 14]
    assert manager._ledger.moved >= 2


def test_what_one_group_cached_pays_for_another() -> None:
    """Cross-group funding, both ways: a pool full of cached attention pages takes states, and the reverse."""
    manager = manager_of(groups_of(attention(), state(1, 64)), 40, unit_tokens=4, checkpoint_interval=None)
    slabs = manager.layout.slabs
    long = [i % 11 for i in range(4 * manager.layout.plans[0].per_slab * (slabs - 2))]
    cache(manager, long)
    assert manager.usage().groups[0].slabs >= slabs - 2
    shorts = fill(manager)
    assert manager.usage().groups[1].slabs >= slabs // 2
    assert manager.usage().cached_bytes < manager.layout.slab_bytes
    for seq in shorts:
        manager.close(seq)
    seq = manager.open(long)
    assert reserve_or_be_right(manager, seq, len(long))
    assert manager.usage().groups[0].slabs >= slabs - 2


def test_everything_cached_is_given_up_before_a_request_is_refused() -> None:
    manager = manager_of(groups_of(attention(), state()), 30, unit_tokens=4)
    for i in range(30):
        cache(manager, [i] * 20)
    assert manager.usage().cached_bytes > manager.usage().free_bytes
    fit = manager.tokens_that_fit()
    seq = manager.open([99] * fit)
    compute(manager, seq, chunk=1)
    assert seq.length == fit


def test_snapshots_are_given_up_before_a_request_is_refused() -> None:
    groups = groups_of(attention(), state(1, 64))
    manager = manager_of(groups, 8, unit_tokens=4, decode_checkpoint_interval=4, checkpoint_interval=None)
    one = manager.open([1, 2, 3])
    compute(manager, one)
    for _ in range(9):
        manager.reserve_decode([one])
        manager.commit_decode([one], [5])
    assert one.snapshot is not None
    others = fill(manager)
    assert one.snapshot is None, "the room of the snapshot went to a request"
    assert others
    manager.check()


def test_a_resend_that_fits_only_without_its_checkpoint_takes_the_checkpoint() -> None:
    """A hit copies the state it resumes from. With room for one state alone it is written in place."""
    groups = groups_of(attention(), state(1, 256))
    manager = manager_of(groups, 1, unit_tokens=4)
    while manager.layout.slabs > 2:
        manager = GroupManager(groups, manager.layout.slab_bytes * 2, unit_tokens=4)
    cache(manager, [1] * 8)
    assert hit_of(manager, [1] * 9) == 8
    seq = manager.open([1] * 9)
    assert reserve_or_be_right(manager, seq, 1)
    assert manager.take_copies() == []
    manager.check()
    manager.commit(seq, 1)
    manager.close(seq, cache=False)
    assert hit_of(manager, [1] * 9) == 0, "the state has moved on, so nobody may resume from it"


@pytest.mark.parametrize("preset", ["gemma-3-12b", "gpt-oss-20b", "gemma-3-270m"])
@pytest.mark.parametrize("chunk", [1, 100, 512, 8192])
def test_a_sliding_group_holds_its_window_the_chunk_and_one_page(preset: str, chunk: int) -> None:
    manager = GroupManager(layer_groups(preset), "16GiB")
    seq = manager.open(np.arange(9000 if chunk > 1 else 2100) % 1000)
    while seq.length < seq.known:
        n = min(chunk, seq.known - seq.length)
        manager.reserve(seq, n)
        for g, group in enumerate(manager.groups):
            if isinstance(group.rule, SlidingAttention):
                tokens = len(manager.token_pages(seq, g).pages) * group.page_tokens
                assert tokens < group.rule.window - 1 + n + 2 * group.page_tokens
        manager.commit(seq, n)
