"""What the manager refuses, and that a refusal leaves nothing behind."""

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
from tests.manager_cases import FULL, STATE, TEXT, hybrid
from tests.strategies import attention, cache, compute, groups_of, hit_of, manager_of, state


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
