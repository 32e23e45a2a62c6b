"""Slabs and pages against a list of sets."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from hybridkv.entries import LayerGroup
from hybridkv.errors import IntegrityError
from hybridkv.layout import plan_layout
from hybridkv.pool import Pool
from tests.strategies import attention, examples, groups_of

GROUPS: tuple[LayerGroup, ...] = groups_of(
    attention(width=2),
    attention("sliding_attention", width=4, window=9),
    attention("chunked_attention", width=12, chunk=9),
)
"""Page sizes 1 : 2 : 6."""


def pool_of(slabs: int) -> Pool:
    slab = plan_layout(GROUPS, 1 << 16, 4).slab_bytes
    return Pool(plan_layout(GROUPS, slabs * slab, 4))


def take(pool: Pool, group: int, count: int) -> list[int]:
    demand = [0] * len(pool.groups)
    demand[group] = count
    pool.adopt_for(demand)
    return [int(page) for page in pool.groups[group].take(count)]


def slots(pool: Pool, group: int, pages: list[int]) -> list[int]:
    return [int(slot) for slot in pool.groups[group].slot[pages]]


class PoolMachine(RuleBasedStateMachine):
    """Take, share, release, drop and compact; the model is one dict of references per group."""

    @initialize(slabs=st.integers(3, 9))
    def start(self, slabs: int) -> None:
        self.pool = pool_of(slabs)
        self.refs: list[dict[int, int]] = [{} for _ in GROUPS]

    def pages(self, data: st.DataObject, group: int, refs: bool) -> list[int]:
        some = [page for page, count in self.refs[group].items() if bool(count) == refs]
        return data.draw(st.lists(st.sampled_from(some), unique=True)) if some else []

    def slabs_needed(self, demand: list[int]) -> int:
        return sum(
            -(-(len(refs) + more) // pages.per_slab)
            for refs, pages, more in zip(self.refs, self.pool.groups, demand, strict=True)
        )

    @rule(demand=st.tuples(st.integers(0, 9), st.integers(0, 5), st.integers(0, 3)).map(list), one=st.booleans())
    def take(self, demand: list[int], one: bool) -> None:
        pool = self.pool
        excess = self.slabs_needed(demand) - pool.layout.slabs
        assert pool.excess_slabs(demand) == excess
        if excess > 0:
            return
        while pool.missing_slabs(demand) > 0:
            free = pool.free_slabs
            for copy in pool.compact_one(demand):
                pages = pool.groups[copy.group]
                assert pages.slot[pages.page_at[copy.dst]] == copy.dst
                assert copy.src // pages.per_slab != copy.dst // pages.per_slab
            assert pool.free_slabs == free + 1
            pool.check()
        pool.adopt_for(demand)
        for g, count in enumerate(demand):
            group = pool.groups[g]
            filled = group.filled.copy()
            taken = [group.take_one() for _ in range(count)] if one else group.take(count).tolist() if count else []
            assert not set(taken) & set(self.refs[g]), "a page in use is never given out again"
            assert len(set(taken)) == count
            self.refs[g].update(dict.fromkeys(taken, 1))
            if not one:
                touched = np.flatnonzero(group.filled > filled)
                room = np.flatnonzero(group.owns & (group.filled < group.per_slab))
                fullest_left = max((int(filled[slab]) for slab in room), default=0)
                assert all(filled[slab] >= fullest_left for slab in touched), "fullest slabs first"

    @rule(group=st.integers(0, 2), data=st.data(), held=st.booleans())
    def acquire(self, group: int, data: st.DataObject, held: bool) -> None:
        pages = self.pages(data, group, held)
        self.pool.groups[group].acquire(np.array(pages, np.int64))
        for page in pages:
            self.refs[group][page] += 1

    @rule(group=st.integers(0, 2), data=st.data())
    def release(self, group: int, data: st.DataObject) -> None:
        pages = self.pages(data, group, True)
        idle = self.pool.groups[group].release(np.array(pages, np.int64))
        for page in pages:
            self.refs[group][page] -= 1
        assert sorted(idle.tolist()) == sorted(page for page in pages if not self.refs[group][page])

    @rule(group=st.integers(0, 2), data=st.data())
    def drop(self, group: int, data: st.DataObject) -> None:
        pages = self.pages(data, group, False)
        self.pool.drop(group, np.array(pages, np.int64))
        for page in pages:
            del self.refs[group][page]

    @precondition(lambda self: hasattr(self, "pool"))
    @invariant()
    def the_books_agree(self) -> None:
        pool = self.pool
        pool.check()
        owned = 0
        for g, (pages, refs) in enumerate(zip(pool.groups, self.refs, strict=True)):
            assert set(np.flatnonzero(pages.slot >= 0).tolist()) == set(refs)
            assert {page: int(pages.refs[page]) for page in refs} == refs
            assert pages.used == len(refs)
            assert pages.live == sum(1 for count in refs.values() if count)
            owned += pages.owned // pages.per_slab
            free = pool.free_slots(g)
            assert not set(free.tolist()) & set(pages.slot[list(refs)].tolist())
            assert len(free) == pages.spare + pool.free_slabs * pages.per_slab
        assert owned + pool.free_slabs == pool.layout.slabs
        live = [sum(1 for count in refs.values() if count) for refs in self.refs]
        slabs = sum(-(-count // pages.per_slab) for count, pages in zip(live, pool.groups, strict=True))
        assert pool.fits_live([0, 0, 0]) == (slabs <= pool.layout.slabs)


def test_pages_and_slabs_are_conserved() -> None:
    run_state_machine_as_test(PoolMachine, settings=settings(max_examples=examples(0.5), stateful_step_count=25))


def test_a_page_comes_from_the_fullest_slab() -> None:
    pool = pool_of(4)
    pages = take(pool, 0, 3 * pool.groups[0].per_slab)
    per_slab = pool.groups[0].per_slab
    pool.groups[0].release(np.array(pages, np.int64))
    by_slab = [pages[i * per_slab : (i + 1) * per_slab] for i in range(3)]
    pool.drop(0, np.array([*by_slab[0][:3], *by_slab[1][:1], *by_slab[2][:2]], np.int64))
    fullest = slots(pool, 0, by_slab[1][1:])[0] // per_slab
    assert slots(pool, 0, [pool.groups[0].take_one()])[0] // per_slab == fullest
    second = slots(pool, 0, by_slab[2][2:])[0] // per_slab
    assert {slot // per_slab for slot in slots(pool, 0, pool.groups[0].take(2).tolist())} == {second}


def leave(pool: Pool, group: int, counts: list[int]) -> None:
    """Fill as many slabs of a group and leave so many pages in each."""
    per_slab = pool.groups[group].per_slab
    pages = take(pool, group, per_slab * len(counts))
    pool.groups[group].release(np.array(pages, np.int64))
    for i, count in enumerate(counts):
        pool.drop(group, np.array(pages[i * per_slab : (i + 1) * per_slab - count], np.int64))


def test_compaction_empties_the_emptiest_slab() -> None:
    pool = pool_of(3)
    leave(pool, 0, [3, 1, 2])
    assert pool.missing_slabs([0, 0, 1]) == 1
    assert [copy.group for copy in pool.compact_one([0, 0, 1])] == [0]
    assert pool.free_slabs == 1
    pool.check()


def test_compaction_moves_the_fewest_bytes_into_the_fullest_slab() -> None:
    """Three narrow pages are less to move than two of twice the size."""
    pool = pool_of(6)
    leave(pool, 0, [3, 4, 5])
    leave(pool, 1, [2, 2, 2])
    assert [group.per_slab for group in pool.groups[:2]] == [6, 3]
    copies = pool.compact_one([0, 0, 1])
    assert [copy.group for copy in copies] == [0, 0, 0]
    assert [copy.dst // 6 for copy in copies] == [2, 1, 1]
    pool.check()


def test_an_empty_slab_goes_back_to_everybody() -> None:
    pool = pool_of(3)
    pages = take(pool, 0, 7)
    assert pool.free_slabs == 1
    pool.groups[0].release(np.array(pages, np.int64))
    pool.drop(0, np.array(pages, np.int64))
    assert pool.free_slabs == 3
    assert len(take(pool, 2, 3)) == 3


def test_impossible_compaction_is_an_integrity_error() -> None:
    pool = pool_of(3)
    take(pool, 2, 3)
    with pytest.raises(IntegrityError, match="no slab can be emptied"):
        pool.compact_one([0, 0, 1])


@pytest.mark.parametrize(
    ("table", "at", "value"),
    [("slot", 2, 3), ("refs", 5, 1), ("refs", 2, -1), ("page_at", 2, 3), ("filled", 1, 3), ("owns", 2, True)],
)
def test_check_finds_a_wrong_table(table: str, at: int, value: int) -> None:
    pool = pool_of(3)
    take(pool, 0, 4)
    getattr(pool.groups[0], table)[at] = value
    with pytest.raises(IntegrityError):
        pool.check()


@given(st.lists(st.integers(1, 6), min_size=1, max_size=4))
def test_taking_one_by_one_or_at_once_fills_the_same_slabs(counts: list[int]) -> None:
    at_once, single = pool_of(5), pool_of(5)
    for count in counts:
        take(at_once, 0, count)
        for _ in range(count):
            single.adopt_for([1, 0, 0])
            single.groups[0].take_one()
    assert (at_once.groups[0].filled == single.groups[0].filled).all()
