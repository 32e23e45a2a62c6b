"""Reservations with guesses: what was right stays, what was wrong never was."""

from __future__ import annotations

from typing import Any

import pytest

from hybridkv.errors import UsageError
from hybridkv.manager import GroupManager
from hybridkv.sequence import Sequence
from tests.manager_cases import STATE, TEXT, cached, decode, hybrid, live, tokens_only
from tests.strategies import compute, groups_of, hit_of, manager_of, state


def stateful() -> GroupManager:
    """Without copies of the states, which guesses would have to stop at."""
    return hybrid(decode_checkpoint_interval=None)


def prefilled(manager: GroupManager, tokens: list[int] = TEXT) -> Sequence:
    seq = manager.open(tokens)
    compute(manager, seq)
    return seq


@pytest.mark.parametrize("make", [stateful, tokens_only])
def test_a_rejected_guess_is_never_hit(make: Any) -> None:
    """Six guesses that would fill a unit, of which the first two are right."""
    manager = make()
    seq = prefilled(manager, TEXT[:25])
    assert manager.reserve_drafts(seq, 1, 6) == 6
    manager.commit_drafts(seq, [90, 91, 92])
    right, wrong = [*TEXT[:25], 90, 91, 92], [*TEXT[:25], *range(90, 97)]
    decode(manager, seq, 28 - seq.length, 0)
    manager.close(seq)
    assert hit_of(manager, [*wrong, 1, 1, 1, 1]) <= len(right)
    digests = {digest for digest in manager._ledger.index._digests if digest}
    probe = manager.open([*wrong, 97, 98, 99])
    assert not digests & set(probe.digests[7:])
    manager.check()


def test_states_stop_after_the_firm_tokens_and_where_the_guesses_end() -> None:
    manager = stateful()
    seq = prefilled(manager)
    before = manager.state_pages(seq, STATE)
    assert manager.reserve_drafts(seq, 2, 3) == 3
    places = manager.state_pages(seq, STATE)
    assert places.slot == before.slot
    assert places.checkpoints == ((len(TEXT) + 2, places.slot),)
    assert places.end != places.slot
    manager.commit_drafts(seq, [1, 2, 3, 4, 5])
    assert (seq.length, manager.state_pages(seq, STATE).slot) == (len(TEXT) + 5, places.end)
    assert manager.reserve_drafts(seq, 1, 2) == 2
    manager.commit_drafts(seq, [6, 7])
    assert (seq.length, seq.known, manager.state_pages(seq, STATE).slot) == (len(TEXT) + 6, len(TEXT) + 6, places.end)
    assert manager.take_copies() == []


def test_without_states_every_right_guess_is_kept() -> None:
    manager = tokens_only()
    seq = prefilled(manager)
    assert manager.reserve_drafts(seq, 1, 5) == 5
    manager.commit_drafts(seq, [1, 2, 3])
    assert (seq.length, seq.known) == (len(TEXT) + 3, len(TEXT) + 3)


@pytest.mark.parametrize("make", [stateful, tokens_only])
@pytest.mark.parametrize("right", [0, 1, 30])
def test_guesses_leave_no_page_behind(make: Any, right: int) -> None:
    """Afterwards a sequence holds what one holds that decoded the same tokens one by one."""
    manager, plain = make(), make()
    seq, other = prefilled(manager), prefilled(plain)
    assert manager.reserve_drafts(seq, 1, 30) == 30
    manager.commit_drafts(seq, [5] * (1 + right))
    if seq.length < len(TEXT) + 1 + right:
        decode(manager, seq, right)
    decode(plain, other, 1 + right)
    for one, held in ((manager, seq), (plain, other)):
        one.reserve(held, 1)
    assert live(manager) == live(plain)
    assert cached(manager) == cached(plain)
    manager.check()


def test_guesses_take_nothing_that_a_request_holds() -> None:
    """States only, so that a guess needs as much room as another request."""
    manager = manager_of(groups_of(state()), 8, unit_tokens=4, decode_checkpoint_interval=4)
    seq = prefilled(manager, TEXT[:8])
    decode(manager, seq, 4)
    held, others = live(manager), 0
    while manager.reserve_drafts(seq, 1, 3):
        assert seq.snapshot is not None
        manager.reserve_decode([seq])
        manager.reserve(manager.open([9, others]), 1)
        held, others = live(manager), others + 1
    assert others > 1
    assert live(manager) == held
    assert seq.snapshot is not None
    manager.reserve(manager.open([9, 9]), 1)
    assert seq.snapshot is None, "a request may take it"
    manager.check()


def test_guesses_do_not_jump_over_a_copy_of_the_states() -> None:
    manager = hybrid(decode_checkpoint_interval=8)
    seq = prefilled(manager)
    assert len(TEXT) == 61
    assert manager.reserve_drafts(seq, 1, 9) == 2
    manager.commit_drafts(seq, [5, 5, 5])
    assert seq.snapshot is not None
    assert seq.snapshot.tokens == 64
    assert manager.reserve_drafts(seq, 8, 9) == 0
    manager.reserve(seq, 7)
    manager.commit(seq, 7, [5] * 7)
    assert manager.reserve_drafts(seq, 1, 9) == 0


def drafted(manager: GroupManager, firm: int = 1, drafts: int = 3) -> Sequence:
    seq = prefilled(manager)
    assert manager.reserve_drafts(seq, firm, drafts) == drafts
    return seq


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: m.reserve_drafts(prefilled(m), 0, 1), "at least 1 token and 1 draft, got 0 and 1"),
        (lambda m: m.reserve_drafts(prefilled(m), 1, 0), "got 1 and 0"),
        (lambda m: m.commit_drafts(prefilled(m), [1]), "not reserved with drafts"),
        (lambda m: m.commit_drafts(drafted(m, 2), [1]), "1 tokens cannot be right: 2 are certain and 5 were computed"),
        (lambda m: m.commit_drafts(drafted(m), [1] * 5), "5 tokens cannot be right"),
        (lambda m: m.commit(drafted(m), 4, [1] * 4), "commit_drafts\\(\\) says"),
        (lambda m: m.commit_decode([drafted(m)], [1]), "reserved for 4 tokens"),
        (lambda m: m.fork(drafted(m)), "between a reservation and its commit"),
    ],
)
def test_calls_that_cannot_be_right(call: Any, message: str) -> None:
    manager = stateful()
    with pytest.raises(UsageError, match=message):
        call(manager)
    manager.check()


def test_known_tokens_cannot_become_others() -> None:
    manager = stateful()
    seq = manager.open([1, 2, 3])
    assert manager.reserve_drafts(seq, 2, 3) == 3
    with pytest.raises(UsageError, match="knows other tokens"):
        manager.commit_drafts(seq, [1, 9])
    manager.commit_drafts(seq, [1, 2, 3, 7])
    assert (seq.length, seq.tokens.tolist()) == (2, [1, 2, 3])


@pytest.mark.parametrize("end", ["close", "truncate", "reserve", "reserve_decode"])
def test_a_step_with_guesses_may_be_given_up(end: str) -> None:
    manager = stateful()
    seq = drafted(manager)
    if end == "close":
        manager.close(seq)
        assert sum(live(manager)) == 0
    elif end == "truncate":
        assert manager.truncate(seq, 60) == 60
    elif end == "reserve":
        manager.reserve(seq, 1)
    else:
        manager.reserve_decode([seq])
    assert (seq.firm, seq.spare) == (0, {})
    manager.check()
