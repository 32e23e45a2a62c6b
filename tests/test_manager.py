"""The manager's calls, one by one: what each returns, publishes, holds, lets go of and refuses."""

from __future__ import annotations

import numpy as np
import pytest

from hybridkv.errors import (
    RequestError,
)
from hybridkv.manager import GroupManager
from tests.manager_cases import FULL, STATE, TEXT, WINDOW, cached, decode, hybrid, live, tokens_only
from tests.strategies import attention, cache, compute, groups_of, hit_of, state


def test_the_life_of_a_request() -> None:
    manager = hybrid()
    seq = manager.open(TEXT)
    assert (seq.hit_tokens, seq.length, seq.known) == (0, 0, 61)
    assert manager.running == (seq,)
    assert live(manager) == [0, 0, 0]
    manager.reserve(seq, 20)
    assert seq.length == 0
    assert live(manager) == [5, 5, 1]
    manager.commit(seq, 20)
    assert seq.length == 20
    assert live(manager) == [5, 2, 1], "what slid out of the window is let go of at once"
    compute(manager, seq)
    decode(manager, seq, 3)
    assert (seq.length, seq.known) == (64, 64)
    manager.close(seq)
    assert manager.running == ()
    assert live(manager) == [0, 0, 0]
    assert cached(manager) == [16, 16, 2]
    assert manager.resume_points() == (60, 64)
    manager.check()


def test_a_hit_holds_what_each_rule_needs() -> None:
    manager = hybrid()
    cache(manager, TEXT)
    seq = manager.open(TEXT)
    assert seq.hit_tokens == 60
    assert live(manager) == [15, 2, 1]
    assert manager.token_pages(seq, FULL).pages.tolist() == list(range(15))
    assert manager.token_pages(seq, WINDOW).pages.tolist() == [13, 14]
    manager.check()


def test_a_hit_copies_its_state_before_it_is_written() -> None:
    manager = hybrid()
    cache(manager, TEXT)
    seq = manager.open(TEXT)
    frozen = manager.state_pages(seq, STATE).slot
    assert manager.take_copies() == []
    manager.reserve(seq, 1)
    (copy,) = manager.take_copies()
    assert copy == (STATE, frozen, manager.state_pages(seq, STATE).slot)
    assert copy.src != copy.dst
    assert hit_of(manager, TEXT) == 60


def test_a_place_that_was_hit_becomes_a_resume_point() -> None:
    manager = tokens_only()
    cache(manager, TEXT)
    other = manager.open([*TEXT[:31], 9, 9, 9])
    assert other.hit_tokens == 28
    assert 28 in manager.resume_points()
    manager.check()


def test_pages_of_the_same_prompt_are_held_once() -> None:
    manager = hybrid()
    one, two = manager.open(TEXT), manager.open(TEXT)
    compute(manager, one, chunk=9)
    compute(manager, two, chunk=7)
    pages = [manager.token_pages(seq, FULL).slots.tolist() for seq in (one, two)]
    assert pages[0][:15] == pages[1][:15], "the second request to finish a page takes the first one's"
    assert pages[0][15] != pages[1][15]
    assert live(manager)[FULL] == 17
    manager.check()


@pytest.mark.parametrize("chunk", [1, 3, 4, 61])
def test_checkpoints_are_inside_the_reservation_that_computes_them(chunk: int) -> None:
    manager = hybrid(checkpoint_interval=20)
    seq = manager.open(TEXT, breakpoints=[31, 32, 33])
    found = []
    while seq.length < 61:
        n = min(chunk, 61 - seq.length)
        manager.reserve(seq, n)
        working, checkpoints, end = manager.state_pages(seq, STATE)
        assert end == working
        for at, slot in checkpoints:
            assert seq.length < at <= seq.length + n
            assert slot != working
            assert hit_of(manager, TEXT) < at, "it is not published before it was written"
            found.append(at)
        manager.commit(seq, n)
    assert found == [20, 28, 32, 40, 60]
    assert manager.resume_points() == (20, 28, 32, 40, 60)
    manager.check()


def test_checkpoints_are_made_when_a_prompt_is_computed_token_by_token() -> None:
    manager = hybrid(checkpoint_interval=20)
    seq = manager.open(TEXT)
    for token in TEXT:
        manager.reserve_decode([seq])
        manager.commit_decode([seq], [token])
    assert seq.known == 61
    assert manager.resume_points() == (20, 40, 60)


def test_intervals_are_rounded_up_to_boundaries() -> None:
    manager = hybrid(checkpoint_interval=5, decode_checkpoint_interval=9)
    assert (manager.checkpoint_interval, manager.decode_checkpoint_interval) == (8, 12)


def test_no_room_for_a_checkpoint_is_no_reason_to_refuse() -> None:
    groups = groups_of(attention(), state(width=76))
    manager = GroupManager(groups, 2 * 768, unit_tokens=4, checkpoint_interval=4)
    seq = manager.open([1] * 20)
    manager.reserve(seq, 20)
    assert manager.state_pages(seq, 1).checkpoints == ()
    manager.commit(seq, 20)
    assert manager.resume_points() == ()
    manager.close(seq)
    assert manager.resume_points() == (20,), "the end of the request is free to keep"
    assert hit_of(manager, [1] * 21) == 20
    manager.check()


def test_decoding_keeps_one_snapshot_and_the_end_resumes_from_it() -> None:
    manager = hybrid(decode_checkpoint_interval=8)
    seq = manager.open(TEXT)
    compute(manager, seq)
    states = []
    for _ in range(34):
        decode(manager, seq, 1)
        states.append(live(manager)[STATE])
    assert max(states) == 2, "a working state and one copy, whatever the length"
    manager.take_copies()
    manager.close(seq)
    assert seq.length == 95
    assert hit_of(manager, [*TEXT, *[5] * 40]) == 88
    manager.check()


def test_a_snapshot_is_a_copy_of_the_working_state() -> None:
    manager = hybrid(decode_checkpoint_interval=8)
    seq = manager.open(TEXT)
    compute(manager, seq)
    decode(manager, seq, 3)
    working = manager.state_pages(seq, STATE).slot
    (copy,) = manager.take_copies()
    assert (copy.group, copy.src) == (STATE, working)
    decode(manager, seq, 8)
    assert manager.take_copies() == [copy], "each copy replaces the last"


def test_an_end_on_a_boundary_needs_no_copy() -> None:
    manager = hybrid(decode_checkpoint_interval=None)
    seq = manager.open(TEXT)
    compute(manager, seq)
    decode(manager, seq, 7)
    working = manager.state_pages(seq, STATE).slot
    manager.close(seq)
    again = manager.open([*TEXT, *[5] * 8])
    assert again.hit_tokens == 68
    assert manager.state_pages(again, STATE).slot == working
    assert manager.take_copies() == []


def test_nothing_of_an_unfinished_step_is_published() -> None:
    manager = hybrid()
    seq = manager.open(TEXT[:41])
    compute(manager, seq, 24)
    manager.reserve(seq, 17)
    manager.close(seq)
    assert hit_of(manager, TEXT) == 0, "its states may have moved past 24"
    plain = tokens_only()
    seq = plain.open(TEXT[:41])
    compute(plain, seq, 24)
    plain.reserve(seq, 17)
    plain.close(seq)
    assert hit_of(plain, TEXT) == 24
    for one in (manager, plain):
        assert one.usage().live_bytes == 0
        one.check()


def test_closing_without_cache_frees_what_only_this_request_made() -> None:
    manager = hybrid(checkpoint_interval=8)
    before = manager.usage()
    seq = manager.open(TEXT, breakpoints=[30])
    compute(manager, seq, chunk=10)
    decode(manager, seq, 9)
    manager.close(seq, cache=False)
    assert manager.usage() == before, "not a page, a state or a resume point is left"
    manager.check()


@pytest.mark.parametrize("keep", [True, False])
def test_a_request_opened_without_cache_neither_hits_nor_leaves_anything(keep: bool) -> None:
    manager = hybrid(checkpoint_interval=8, decode_checkpoint_interval=4)
    cache(manager, TEXT)
    before, points = manager.usage(), manager.resume_points()
    seq = manager.open(TEXT, breakpoints=[30], cache=False)
    assert seq.hit_tokens == 0
    compute(manager, seq, chunk=10)
    manager.add_breakpoint(seq, 60)
    decode(manager, seq, 9)
    child = manager.fork(seq)
    decode(manager, child, 9)
    manager.check()
    assert cached(manager) == [group.cached_pages for group in before.groups]
    for one in (seq, child):
        manager.close(one, cache=keep)
    assert (manager.usage(), manager.resume_points()) == (before, points)
    manager.check()


def test_a_request_opened_without_cache_frees_what_slides_out_and_evicts_nothing_for_it() -> None:
    manager = hybrid(pages=24)
    cache(manager, TEXT[:21])
    kept = manager.resume_points()
    seq = manager.open([3] * 200, cache=False)
    compute(manager, seq, upto=40, chunk=4)
    assert live(manager)[WINDOW] <= 4, "the window, and not what slid out of it"
    assert manager.resume_points() == kept
    manager.close(seq)
    assert hit_of(manager, TEXT[:21]) == 20


def test_closing_without_cache_leaves_what_others_made_or_use() -> None:
    manager = hybrid()
    cache(manager, TEXT[:41])
    kept = manager.resume_points()
    pages = cached(manager)
    seq = manager.open([*TEXT[:41], *[3] * 20])
    assert seq.hit_tokens == 40
    compute(manager, seq)
    other = manager.open([*TEXT[:41], *[3] * 20, 4])
    assert other.hit_tokens == 60
    manager.close(seq, cache=False)
    assert manager.token_pages(other, FULL).pages.tolist() == list(range(15))
    assert 60 in manager.resume_points(), "somebody came back to it"
    manager.close(other, cache=False)
    assert hit_of(manager, TEXT[:41]) == 40
    assert set(kept) <= set(manager.resume_points())
    assert all(now >= then for now, then in zip(cached(manager), pages, strict=True))
    manager.check()


def test_a_cut_request_does_not_take_the_resume_points_of_others_with_it() -> None:
    """Rows are used again: what a request made past its new end may belong to somebody else by now."""
    manager = hybrid(checkpoint_interval=4)
    seq = manager.open([9] * 21)
    compute(manager, seq)
    manager.truncate(seq, 4)
    manager.evict(1 << 40)
    cache(manager, TEXT[:29])
    mine = manager.resume_points()
    manager.close(seq, cache=False)
    assert [tokens for tokens in mine if tokens > 4] == [tokens for tokens in manager.resume_points() if tokens > 4]
    assert hit_of(manager, TEXT[:29]) == 28
    manager.check()


def test_usage_adds_up() -> None:
    manager = hybrid()
    cache(manager, TEXT)
    seq = manager.open(TEXT[:30])
    compute(manager, seq)
    usage = manager.usage()
    assert usage.pool_bytes == manager.layout.pool_bytes
    assert usage.live_bytes + usage.cached_bytes + usage.free_bytes == usage.pool_bytes
    for group, plan in zip(usage.groups, manager.layout.plans, strict=True):
        assert group.live_bytes == group.live_pages * plan.stride
        assert group.cached_bytes == group.cached_pages * plan.stride
        assert group.live_pages + group.cached_pages + group.free_pages == group.slabs * plan.per_slab
        assert (group.name, group.kind, group.layers) == (plan.group.name, plan.group.kind, plan.group.layers)
    padding = sum(
        (group.live_pages + group.cached_pages) * (plan.stride - plan.group.page_bytes)
        for group, plan in zip(usage.groups, manager.layout.plans, strict=True)
    )
    assert usage.padding_bytes == padding
    assert usage.resume_points == len(manager.resume_points())


def test_free_slots_are_exactly_those_without_a_page() -> None:
    manager = hybrid()
    cache(manager, TEXT)
    seq = manager.open(TEXT[:30])
    compute(manager, seq)
    for g, pages in enumerate(manager._ledger.pool.groups):
        free = manager.free_slots(g).tolist()
        used = pages.slot[pages.slot >= 0].tolist()
        assert not set(free) & set(used)
        foreign = {
            slab * pages.per_slab + i
            for other in manager._ledger.pool.groups
            if other is not pages
            for slab in np.flatnonzero(other.owns).tolist()
            for i in range(pages.per_slab)
        }
        assert sorted([*free, *used, *foreign]) == list(range(manager.layout.slots(g)))


def test_copies_are_handed_over_once_and_in_order() -> None:
    manager = hybrid()
    cache(manager, TEXT)
    one, two = manager.open(TEXT), manager.open(TEXT)
    manager.reserve(one, 1)
    manager.reserve(two, 1)
    targets = [manager.state_pages(seq, STATE).slot for seq in (one, two)]
    assert [copy.dst for copy in manager.take_copies()] == targets
    assert manager.take_copies() == []


def test_a_breakpoint_can_be_added_while_the_prompt_is_computed() -> None:
    manager = hybrid()
    seq = manager.open(TEXT)
    compute(manager, seq, upto=10)
    manager.add_breakpoint(seq, 8)
    manager.add_breakpoint(seq, 31)
    manager.add_breakpoint(seq, 31)
    manager.check()
    compute(manager, seq)
    assert 28 in manager.resume_points()
    assert 8 not in manager.resume_points(), "the state is past it"
    with pytest.raises(RequestError, match="0 to 61 tokens; got 62"):
        manager.add_breakpoint(seq, 62)
    manager.close(seq)
    assert hit_of(manager, [*TEXT[:31], 9, 9]) == 28
    manager.check()
