"""Forks, and going back to fewer tokens."""

from __future__ import annotations

import pytest

from tests.manager_cases import FULL, STATE, TEXT, WINDOW, decode, hybrid, live, tokens_only
from tests.shadow import Server
from tests.strategies import attention, cache, compute, groups_of, hit_of, manager_of


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
