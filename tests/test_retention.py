"""Which cached pages resume points need, and in which order pages are lost."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridkv.errors import ConfigError
from hybridkv.manager import GroupManager
from hybridkv.retention import POLICIES, ResumePoint, Victims, policy_named
from tests.shadow import needed_tokens
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

TEXT = [i % 7 for i in range(64)]
OTHER = [5, *TEXT[1:]]
BIG = (400,)


def windowed(pages: int = 60, **options: object) -> GroupManager:
    """Full attention, and a window of two pages and a token."""
    groups = groups_of(attention(), attention("sliding_attention", window=9))
    return manager_of(groups, pages, unit_tokens=4, checkpoint_interval=None, **options)


def hybrid(pages: int = 60, **options: object) -> GroupManager:
    options.setdefault("checkpoint_interval", None)
    return manager_of(groups_of(attention(), state()), pages, unit_tokens=4, **options)


def evict_page(manager: GroupManager) -> list[tuple[int, int, int]]:
    """One eviction as small as it gets: group, stamp and depth of each lost page."""
    ledger = manager._ledger
    lost = []
    victims = ledger.retention.next_victims(1)
    for group, pages in victims:
        for page in pages.tolist():
            assert not ledger.pool.groups[group].refs[page], "held by a running request"
            assert not ledger.retention.needs[group][page], "needed by a resume point"
            depth = int(ledger.index.depth[ledger.index.row_of[group][page]])
            lost.append((group, int(ledger.retention.stamps[group][page]), depth))
    ledger.lose(victims)
    return lost


@settings(max_examples=examples(0.5))
@given(managers(pages=BIG), st.lists(prompts(), min_size=1, max_size=4), st.data())
def test_a_resume_point_needs_what_the_rules_say(
    manager: GroupManager, texts: list[list[int]], data: st.DataObject
) -> None:
    for text in texts:
        cache(manager, text, data.draw(st.integers(1, 30)), breakpoints=[data.draw(st.integers(0, len(text)))])
    ledger, unit = manager._ledger, manager.unit_tokens
    counted = [np.zeros_like(needs) for needs in ledger.retention.needs]
    for point in ledger.retention.points:
        rows = ledger.index.chain(point.row)
        assert len(rows) * unit == point.tokens
        for g, group in enumerate(manager.groups):
            size = group.page_tokens or unit
            for page in {p // size for p in needed_tokens(group.rule, point.tokens, 1)}:
                counted[g][ledger.index.page_at[g][rows[(page + 1) * size // unit - 1]]] += 1
    for needs, expected in zip(ledger.retention.needs, counted, strict=True):
        assert (needs == expected).all()


@settings(max_examples=examples(0.5))
@given(managers(pages=BIG), st.lists(prompts(), min_size=1, max_size=4))
def test_unneeded_pages_go_first_the_oldest_first_and_the_tail_before_the_head(
    manager: GroupManager, texts: list[list[int]]
) -> None:
    for text in texts:
        cache(manager, text)
    ledger = manager._ledger
    points = len(manager.resume_points())
    unneeded = sum(
        int(((row_of >= 0) & (needs == 0)).sum())
        for row_of, needs in zip(ledger.index.row_of, ledger.retention.needs, strict=True)
    )
    order = [lost for _ in range(unneeded) for lost in evict_page(manager)]
    assert len(order) == unneeded
    assert len(manager.resume_points()) == points, "no resume point is given up while another page is left"
    assert order == sorted(order, key=lambda page: (page[1], -page[2]))
    manager.check()
    if points:
        assert evict_page(manager) or len(manager.resume_points()) < points
        manager.check()


@settings(max_examples=examples(0.3))
@given(managers(pages=BIG), st.lists(prompts(), min_size=1, max_size=3), st.integers(1, 2000))
def test_eviction_ends_with_an_empty_pool(manager: GroupManager, texts: list[list[int]], step: int) -> None:
    for text in texts:
        cache(manager, text)
    cached = manager.usage().cached_bytes
    while freed := manager.evict(step):
        assert freed == cached - manager.usage().cached_bytes
        assert freed >= min(step, cached)
        cached -= freed
        manager.check()
    usage = manager.usage()
    assert (usage.cached_bytes, usage.live_bytes, usage.resume_points) == (0, 0, 0)
    assert len(manager._ledger.index) == 0


def test_pages_that_slid_out_go_before_any_resume_point() -> None:
    manager = windowed()
    cache(manager, TEXT)
    assert manager.resume_points() == (60, 64)
    lost = [page for _ in range(13) for page in evict_page(manager)]
    # The window before 60 needs tokens 52 to 59, pages 13 and 14 of the window group; pages 0 to 12 are left.
    assert [(group, depth) for group, _, depth in lost] == [(1, depth) for depth in range(13, 0, -1)]
    assert hit_of(manager, [*TEXT, 1]) == 64
    assert manager.resume_points() == (60, 64)


def test_what_was_let_go_of_first_goes_first() -> None:
    manager = manager_of(groups_of(attention()), 60, unit_tokens=4)
    short, long = TEXT[:17], OTHER[:41]
    cache(manager, short)
    cache(manager, long)
    for point in manager._ledger.retention.points:
        manager._ledger.retention.drop(point.row)
    lost = [depth for _ in range(14) for _, _, depth in evict_page(manager)]
    assert lost == [4, 3, 2, 1, *range(10, 0, -1)]


def test_what_was_used_since_waits_for_its_new_turn() -> None:
    manager = manager_of(groups_of(attention()), 60, unit_tokens=4)
    retention = manager._ledger.retention
    cache(manager, TEXT[:17])
    cache(manager, OTHER[:17])
    for point in retention.points:
        retention.drop(point.row)
    assert [depth for _, _, depth in evict_page(manager)] == [4]
    assert hit_of(manager, TEXT[:17]) == 12
    for point in retention.points:
        retention.drop(point.row)
    lost = [depth for _ in range(7) for _, _, depth in evict_page(manager)]
    assert lost == [4, 3, 2, 1, 3, 2, 1], "the other prompt goes first now"


def test_the_resume_point_used_longest_ago_goes_first() -> None:
    manager = hybrid()
    for first in (1, 2, 3):
        cache(manager, [first, *TEXT[:16]])
    assert manager.resume_points() == (16, 16, 16)
    assert hit_of(manager, [1, *TEXT[:16]]) == 16
    while len(manager.resume_points()) == 3:
        manager.evict(1)
    assert [hit_of(manager, [first, *TEXT[:16]]) for first in (1, 2, 3)] == [16, 0, 16]


def test_a_running_request_keeps_its_pages() -> None:
    manager = windowed()
    cache(manager, TEXT)
    seq = manager.open([*TEXT, 1])
    held = manager.usage().live_bytes
    assert seq.hit_tokens == 64
    manager.evict(1 << 40)
    assert manager.usage().cached_bytes == 0
    assert manager.usage().live_bytes == held
    compute(manager, seq)
    manager.close(seq)
    assert hit_of(manager, [*TEXT, 1]) == 64
    manager.check()


def test_a_point_without_its_pages_is_not_made() -> None:
    manager = hybrid()
    cache(manager, TEXT)
    ledger = manager._ledger
    row = int(ledger.index.chain(ledger.retention.points[-1].row)[3])
    assert not ledger.retention.add(row, 16, 0), "there is no state at 16 tokens"
    assert not ledger.retention.has(row)
    manager.check()


def test_a_point_made_again_counts_as_used() -> None:
    manager = windowed()
    cache(manager, TEXT)
    cache(manager, OTHER)
    first, *_ = manager._ledger.retention.points
    assert manager._ledger.retention.add(first.row, first.tokens, request=99)
    assert manager._ledger.retention.points[-1] is first
    assert first.hits == 1
    manager.check()


def test_losing_a_needed_page_loses_exactly_the_points_that_need_it() -> None:
    manager = hybrid()
    cache(manager, TEXT, breakpoints=[16, 32])
    assert manager.resume_points() == (16, 32, 60, 64)
    ledger = manager._ledger
    page = int(ledger.index.page_at[0][ledger.index.chain(ledger.retention.points[2].row)[5]])
    ledger.retention.drop_needing(0, page)
    assert manager.resume_points() == (16,), "tokens 20 to 23 are needed by every later point"
    ledger.lose([Victims(0, np.array([page]))])
    assert hit_of(manager, TEXT) == 16
    manager.check()


def value_of(manager: GroupManager, tokens: int) -> float:
    retention = manager._ledger.retention
    return retention.value(next(point for point in retention.points if point.tokens == tokens))


def test_value_is_tokens_saved_per_byte_that_only_this_point_keeps() -> None:
    manager = hybrid()
    cache(manager, TEXT[:62], breakpoints=[20])
    page, state_bytes = (plan.stride for plan in manager.layout.plans)
    retention = manager._ledger.retention
    early, late = retention.points
    assert (early.tokens, late.tokens) == (20, 60)
    early.hits = late.hits = 0
    retention.refresh(early.request)
    # The pages before 20 are kept by both points, so giving up the first frees its state alone.
    assert retention.value(early) == 20 / (1 + state_bytes) / (retention.clock - early.stamp + 1)
    freed = 1 + state_bytes + 10 * page
    assert retention.value(late) == 40 / freed / (retention.clock - late.stamp + 1)
    late.hits = 3
    assert retention.value(late) == pytest.approx(4 * 40 / freed / (retention.clock - late.stamp + 1))


def test_pages_in_use_free_nothing() -> None:
    manager = hybrid()
    cache(manager, TEXT[:62])
    idle = value_of(manager, 60)
    seq = manager.open(TEXT[:62])
    assert value_of(manager, 60) > idle
    manager.close(seq)


def test_cost_keeps_what_saves_most_per_byte() -> None:
    """Two prompts, the older one long: recency loses it, cost loses the short one with the same state."""
    long, short = TEXT[:61], [9, *TEXT[:8]]
    for policy, kept in {"lru": (0, 8), "cost": (60, 0)}.items():
        manager = manager_of(groups_of(attention(), state(3, 256)), 60, unit_tokens=4, policy=policy)
        cache(manager, long)
        cache(manager, short)
        assert len(manager.resume_points()) == 2
        while len(manager.resume_points()) == 2:
            manager.evict(1)
        assert (hit_of(manager, long), hit_of(manager, short)) == kept, policy


def test_policies_are_chosen_by_name() -> None:
    assert {name: policy_named(name) for name in POLICIES} == POLICIES
    with pytest.raises(ConfigError, match=r"'lfu'.*lru, cost"):
        policy_named("lfu")


def test_the_least_recent_policy_takes_the_first() -> None:
    points = [ResumePoint(row, 16, stamp) for row, stamp in [(3, 1), (1, 2)]]
    assert POLICIES["lru"](hybrid()._ledger.retention, points) is points[0]
