"""What the manager says of itself: what it lost, and which group a prefix lacks."""

from __future__ import annotations

import pytest

from hybridkv.errors import UsageError
from tests.manager_cases import FULL, STATE, WINDOW, hybrid
from tests.strategies import cache

TEXT = [i % 7 for i in range(61)]


def test_counters_start_at_zero_and_count_pages_and_resume_points_that_were_given_up() -> None:
    manager = hybrid()
    cache(manager, TEXT, 61)
    assert manager.counters() == (0, 0, 0)
    points, cached = len(manager.resume_points()), sum(group.cached_pages for group in manager.usage().groups)
    manager.evict(2**40)
    evicted, lost, moved = manager.counters()
    assert (evicted, lost, moved) == (cached, points, 0)
    assert points > 0
    assert cached > 0


def test_the_groups_that_lack_a_page_at_a_boundary_are_named() -> None:
    manager = hybrid()
    cache(manager, TEXT, 61)
    seq = manager.open(TEXT)
    assert seq.hit_tokens == 60
    assert manager.missing_groups(seq, 60) == ()
    assert manager.missing_groups(seq, 40) == (STATE,)
    manager.close(seq)
    manager.evict(2**40)
    again = manager.open(TEXT)
    assert manager.missing_groups(again, 60) == (FULL, WINDOW, STATE)
    assert manager.missing_groups(again, 0) == ()


def test_asking_about_a_length_that_cannot_be_a_resume_point_is_refused() -> None:
    manager = hybrid()
    seq = manager.open(TEXT)
    for tokens in (-4, 6, 64):
        with pytest.raises(UsageError, match="no resume point can be at"):
            manager.missing_groups(seq, tokens)
