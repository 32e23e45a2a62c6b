"""The manager's calls, one by one: what each returns, publishes, holds, lets go of and refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from hybridkv.errors import (
    ConfigError,
    EmptyPrompt,
    HybridKVError,
    IntegrityError,
    OutOfPages,
    PoolTooSmall,
    RequestError,
    TokenOutOfRange,
    UsageError,
)
from hybridkv.manager import GroupManager
from hybridkv.sequence import Sequence
from tests.shadow import Server
from tests.strategies import attention, cache, compute, groups_of, hit_of, manager_of, state

TEXT = [i % 7 for i in range(61)]
FULL, WINDOW, STATE = 0, 1, 2


def hybrid(pages: int = 100, **options: Any) -> GroupManager:
    """Full attention, a window of two pages and a token, and a state; pages and units of 4 tokens."""
    options.setdefault("checkpoint_interval", None)
    groups = groups_of(attention(), attention("sliding_attention", window=9), state())
    return manager_of(groups, pages, unit_tokens=4, **options)


def tokens_only(pages: int = 100, **options: Any) -> GroupManager:
    return manager_of(groups_of(attention(), attention("sliding_attention", window=9)), pages, unit_tokens=4, **options)


def decode(manager: GroupManager, seq: Sequence, steps: int, token: int = 5) -> None:
    for _ in range(steps):
        manager.reserve_decode([seq])
        manager.commit_decode([seq], [token])


def live(manager: GroupManager) -> list[int]:
    return [group.live_pages for group in manager.usage().groups]


def cached(manager: GroupManager) -> list[int]:
    return [group.cached_pages for group in manager.usage().groups]


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
        working, checkpoints = manager.state_pages(seq, STATE)
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


@pytest.mark.parametrize("child_first", [True, False])
def test_a_fork_shares_pages_until_one_writes(child_first: bool) -> None:
    manager = tokens_only()
    seq = manager.open(TEXT[:22])
    compute(manager, seq)
    before = live(manager)
    child = manager.fork(seq)
    if not child_first:
        seq, child = child, seq
    assert (child.length, child.known, child.tokens) == (22, 22, seq.tokens)
    assert live(manager) == before
    shared = manager.token_pages(seq, FULL).slots.tolist()
    assert manager.token_pages(child, FULL).slots.tolist() == shared
    decode(manager, child, 1)
    own = manager.token_pages(child, FULL).slots.tolist()
    assert own[:5] == shared[:5]
    assert own[5] != shared[5]
    assert [(c.group, c.src, c.dst) for c in manager.take_copies() if c.group == FULL] == [(FULL, shared[5], own[5])]
    decode(manager, seq, 1)
    assert manager.take_copies() == [], "the last holder writes in place"
    assert manager.token_pages(seq, FULL).slots.tolist() == shared
    manager.check()


def test_a_fork_does_not_share_pages_that_were_taken_ahead() -> None:
    server = Server(manager_of(groups_of(attention()), 60, unit_tokens=4))
    request = server.open(TEXT[:10])
    server.step([(request, 10)])
    assert server.reserve(request, 20)
    server.forward([request])
    server.commit(request, 1)
    child = server.fork(request)
    for token in range(12):
        assert server.decode([request, child], [token, token + 1])
    server.manager.check()


def test_the_end_of_a_fork_that_never_ran_is_a_resume_point() -> None:
    manager = hybrid()
    seq = manager.open(TEXT[:24])
    compute(manager, seq)
    child = manager.fork(seq)
    manager.close(child)
    assert manager.resume_points() == (20, 24)
    decode(manager, seq, 1)
    (copy,) = [copy for copy in manager.take_copies() if copy.group == STATE]
    assert copy.dst == manager.state_pages(seq, STATE).slot
    assert hit_of(manager, TEXT[:25]) == 24
    manager.check()


def test_an_abandoned_reservation_publishes_no_checkpoint_early() -> None:
    server = Server(hybrid(checkpoint_interval=4))
    request = server.open(TEXT)
    assert server.reserve(request, 40)
    for _ in range(5):
        server.step([(request, 5)])
    server.run_copies()
    assert server.manager.resume_points() == (4, 8, 12, 16, 20, 24)
    assert live(server.manager)[STATE] == 1 + 4, "the next steps will write the rest"
    server.truncate(request, 25)
    assert live(server.manager)[STATE] == 1


def test_going_back_lets_go_of_the_checkpoints_of_the_step() -> None:
    manager = hybrid(checkpoint_interval=4)
    seq = manager.open(TEXT)
    compute(manager, seq, 20)
    manager.reserve(seq, 30)
    assert live(manager)[STATE] == 1 + 7
    assert manager.truncate(seq, 20) == 20
    assert live(manager)[STATE] == 1
    manager.check()


def test_forks_copy_the_state() -> None:
    manager = hybrid()
    seq = manager.open(TEXT[:22])
    compute(manager, seq)
    manager.take_copies()
    children = [manager.fork(seq) for _ in range(3)]
    assert live(manager)[STATE] == 1 + 0
    manager.reserve_decode([seq, *children])
    slots = {manager.state_pages(one, STATE).slot for one in (seq, *children)}
    assert len(slots) == 4
    assert sum(copy.group == STATE for copy in manager.take_copies()) == 3
    manager.commit_decode([seq, *children], [1, 2, 3, 4])
    for one in (seq, *children):
        manager.close(one)
    manager.check()


@pytest.mark.parametrize("n", [22, 21, 20, 17, 12, 3, 0])
def test_full_attention_goes_back_to_any_token(n: int) -> None:
    manager = manager_of(groups_of(attention()), 60, unit_tokens=4)
    seq = manager.open(TEXT[:22])
    compute(manager, seq)
    assert manager.truncate(seq, n) == n
    assert (seq.length, seq.known) == (n, n)
    decode(manager, seq, 30, token=6)
    manager.close(seq)
    assert hit_of(manager, [*TEXT[:n], *[6] * 40]) == (n + 30) // 4 * 4
    manager.check()


def test_a_window_goes_back_while_it_holds_the_pages_and_else_to_a_boundary() -> None:
    manager = tokens_only()
    seq = manager.open(TEXT[:43])
    compute(manager, seq)
    assert manager.token_pages(seq, WINDOW).pages.tolist() == [8, 9, 10]
    assert manager.truncate(seq, 42) == 42, "tokens 34 to 41 are all held"
    assert manager.truncate(seq, 27) == 24, "the window before 27 slid out; what is cached ends at 24"
    assert (seq.length, seq.known) == (24, 27)
    assert manager.token_pages(seq, WINDOW).pages.tolist() == [4, 5]
    compute(manager, seq)
    assert seq.length == 27
    manager.check()


def test_a_page_that_slid_out_cannot_be_written_to() -> None:
    """A window of one token needs no past, but going back into a page that is gone would leave its head empty."""
    manager = manager_of(groups_of(attention("sliding_attention", window=1)), 60, unit_tokens=4)
    seq = manager.open(TEXT[:43])
    compute(manager, seq)
    assert manager.truncate(seq, 42) == 42
    assert manager.truncate(seq, 30) == 28
    compute(manager, seq)
    manager.check()


def test_what_is_computed_again_after_going_back_is_this_requests_own() -> None:
    manager = tokens_only()
    cache(manager, TEXT)
    seq = manager.open(TEXT)
    assert seq.hit_tokens == 60
    assert manager.truncate(seq, 20) == 20
    assert seq.hit_tokens == 20
    pages = manager.usage()
    decode(manager, seq, 30)
    manager.close(seq, cache=False)
    now = manager.usage()
    assert now.live_bytes == 0
    assert now.cached_bytes == pages.cached_bytes + pages.live_bytes, "its own continuation is gone"
    manager.check()


def test_states_go_back_only_to_checkpoints() -> None:
    manager = hybrid()
    seq = manager.open(TEXT, breakpoints=[20, 40])
    compute(manager, seq)
    assert manager.truncate(seq, 61) == 61
    assert manager.truncate(seq, 59) == 40
    assert seq.known == 59
    assert manager.truncate(seq, 40) == 40
    assert manager.truncate(seq, 39) == 20
    assert manager.truncate(seq, 3) == 0
    assert (seq.length, seq.known) == (0, 3)
    manager.check()


def test_states_go_back_to_the_snapshot_of_the_generation() -> None:
    manager = hybrid(decode_checkpoint_interval=8)
    seq = manager.open(TEXT)
    compute(manager, seq)
    decode(manager, seq, 30)
    assert seq.length == 91
    assert manager.truncate(seq, 90) == 88
    compute(manager, seq)
    assert manager.truncate(seq, 87) == 60, "the snapshot is past that"
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


def test_prompts_come_as_lists_or_arrays() -> None:
    manager = hybrid()
    cache(manager, TEXT)
    for prompt in (tuple(TEXT), np.array(TEXT), np.array(TEXT, np.uint32), np.array(TEXT, np.int16)):
        assert hit_of(manager, prompt) == 60
    top = 2**32 - 1
    assert cache(manager, [top] * 9) == 0
    assert cache(manager, [top] * 9) == 8


@pytest.mark.parametrize(
    ("prompt", "error", "message"),
    [
        ([], EmptyPrompt, "no tokens"),
        (np.zeros(0, np.uint32), EmptyPrompt, "no tokens"),
        ([-1], TokenOutOfRange, "-1"),
        ([1] * 17 + [-1], TokenOutOfRange, "-1"),
        ([2**32], TokenOutOfRange, "4294967296"),
        ([1.5], TokenOutOfRange, "integers"),
        (["a"], TokenOutOfRange, "integers"),
        ([[1, 2], [3, 4]], HybridKVError, "one row"),
        (7, HybridKVError, "one row"),
    ],
)
def test_prompts_that_cannot_be_served(prompt: Any, error: type[Exception], message: str) -> None:
    manager = hybrid()
    with pytest.raises(error, match=message):
        manager.open(prompt)
    assert manager.running == ()
    manager.check()


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"breakpoints": [-1]}, "got -1"),
        ({"breakpoints": [62]}, "0 to 61 tokens; got 62"),
        ({"images": [(61, "x")]}, "token 61, past the prompt's 61 tokens"),
        ({"images": [(-1, "x")]}, "-1"),
        ({"images": [(3, "")]}, "not empty"),
        ({"images": [(3, "x"), (3, "y")]}, "two images"),
        ({"images": [5]}, "token offset, digest"),
        ({"salt": 3}, "salt"),
        ({"adapter": 3}, "adapter"),
    ],
)
def test_keys_that_make_no_sense(keys: dict[str, Any], message: str) -> None:
    manager = hybrid()
    with pytest.raises(RequestError, match=message):
        manager.open(TEXT, **keys)
    assert manager.running == ()


def opened(manager: GroupManager, n: int = 0) -> Sequence:
    seq = manager.open(TEXT)
    if n:
        manager.reserve(seq, n)
    return seq


def closed(manager: GroupManager) -> Sequence:
    seq = opened(manager, 5)
    manager.close(seq)
    return seq


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: m.reserve(opened(m), 0), "at least 1 token, got 0"),
        (lambda m: m.reserve(opened(m), -3), "got -3"),
        (lambda m: m.commit(opened(m), 1), "0 are reserved"),
        (lambda m: m.commit(opened(m, 5), 6), "5 are reserved"),
        (lambda m: m.commit(opened(m, 5), 0), "cannot commit 0"),
        (lambda m: m.commit(opened(m, 5), 4), "states have advanced"),
        (lambda m: m.commit(opened(m, 61), 61, token_ids=[1]), "0 new tokens, got 1"),
        (lambda m: m.commit(opened(m, 63), 63), "2 new tokens, got 0"),
        (lambda m: m.commit_decode([opened(m)], [1]), "reserved for 0 tokens"),
        (lambda m: m.commit_decode([opened(m, 3)], [1]), "reserved for 3 tokens"),
        (lambda m: m.commit_decode([opened(m, 1)], []), "0 token ids for 1"),
        (lambda m: m.fork(opened(m, 5)), "between a reservation and its commit"),
        (lambda m: m.truncate(opened(m), 1), "0 are computed"),
        (lambda m: m.truncate(opened(m), -1), "-1"),
        (lambda m: m.state_pages(opened(m), STATE), "before its first reservation"),
        (lambda m: m.token_pages(opened(m), STATE), "no page table"),
        (lambda m: m.reserve(closed(m), 1), "is closed"),
        (lambda m: m.reserve_decode([closed(m)]), "is closed"),
        (lambda m: m.commit(closed(m), 1), "is closed"),
        (lambda m: m.commit_decode([closed(m)], [1]), "reserved for 0 tokens"),
        (lambda m: m.fork(closed(m)), "is closed"),
        (lambda m: m.truncate(closed(m), 0), "is closed"),
        (lambda m: m.close(closed(m)), "is closed"),
        (lambda m: m.reserve(hybrid().open(TEXT), 1), "belongs to another manager"),
    ],
)
def test_calls_in_an_order_that_cannot_be_right(call: Callable[[GroupManager], Any], message: str) -> None:
    manager = hybrid()
    with pytest.raises(UsageError, match=message):
        call(manager)
    manager.check()


@pytest.mark.parametrize("token", [-1, 2**32, 1.5])
def test_a_decoded_token_out_of_range_commits_nothing(token: Any) -> None:
    manager = hybrid()
    seqs = [opened(manager) for _ in range(2)]
    for seq in seqs:
        compute(manager, seq)
    manager.reserve_decode(seqs)
    with pytest.raises(TokenOutOfRange):
        manager.commit_decode(seqs, [1, token])
    with pytest.raises(TokenOutOfRange):
        manager.commit(seqs[0], 1, token_ids=[token])
    assert [(seq.length, seq.known) for seq in seqs] == [(61, 61)] * 2
    manager.commit_decode(seqs, [1, 2])
    manager.check()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"pool_bytes": 64}, PoolTooSmall, "64 bytes cannot hold"),
        ({"pool_bytes": "2 parsecs"}, ConfigError, "parsecs"),
        ({"unit_tokens": 3}, ConfigError, "multiple of the hash unit"),
        ({"unit_tokens": 0}, ConfigError, "at least 1"),
        ({"hash": "md5"}, ConfigError, "md5"),
        ({"policy": "random"}, ConfigError, "random"),
        ({"checkpoint_interval": 0}, ConfigError, "checkpoint_interval must be at least 1"),
        ({"decode_checkpoint_interval": -4}, ConfigError, "decode_checkpoint_interval must be at least 1"),
    ],
)
def test_settings_that_cannot_work(options: dict[str, Any], error: type[Exception], message: str) -> None:
    settings: dict[str, Any] = {"pool_bytes": "1MiB", "unit_tokens": 4, **options}
    with pytest.raises(error, match=message):
        GroupManager(groups_of(attention(), state()), **settings)


def test_a_refusal_says_how_much_was_asked_for_and_what_to_do() -> None:
    manager = manager_of(groups_of(attention()), 10, unit_tokens=4)
    seq = manager.open([1] * 60)
    with pytest.raises(
        OutOfPages, match=r"960 bytes of pages were asked for.* hold 0 of .*; close or preempt"
    ) as refused:
        manager.reserve(seq, 60)
    assert (refused.value.requested, refused.value.live, refused.value.pool) == (960, 0, manager.layout.pool_bytes)
    manager.reserve(seq, 40)


def break_refs(manager: GroupManager) -> None:
    manager._ledger.pool.groups[0].refs[3] += 1


def break_needs(manager: GroupManager) -> None:
    manager._ledger.retention.needs[1][3] += 1


def break_rows(manager: GroupManager) -> None:
    manager.running[0].rows[2] = 0


def break_table(manager: GroupManager) -> None:
    pages = manager.running[0].table(FULL).pages
    pages[[0, 1]] = pages[[1, 0]]


def break_units(manager: GroupManager) -> None:
    manager.running[0].length += 4


def break_publication(manager: GroupManager) -> None:
    manager._ledger.index.row_of[0][2] = -1


@pytest.mark.parametrize("damage", [break_refs, break_needs, break_rows, break_table, break_units, break_publication])
def test_check_finds_damage(damage: Callable[[GroupManager], None]) -> None:
    manager = hybrid()
    cache(manager, TEXT)
    compute(manager, manager.open(TEXT[:30]))
    manager.check()
    damage(manager)
    with pytest.raises(IntegrityError):
        manager.check()
