"""The managers and small moves that tests of the manager share."""

from __future__ import annotations

from typing import Any

from hybridkv.manager import GroupManager
from hybridkv.sequence import Sequence
from tests.strategies import attention, groups_of, manager_of, state

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
