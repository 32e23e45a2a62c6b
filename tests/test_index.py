"""The prefix index against a dictionary of tuples."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from hybridkv.errors import IntegrityError
from hybridkv.index import PrefixIndex
from tests.strategies import examples

PAGES = (60, 60)
Prefix = tuple[int, ...]
short_prefix = st.lists(st.integers(0, 2), min_size=1, max_size=7).map(tuple)


def digest(prefix: Prefix) -> bytes:
    return bytes(prefix)


def digests(prefix: Prefix) -> list[bytes]:
    return [digest(prefix[: i + 1]) for i in range(len(prefix))]


def row_of(index: PrefixIndex, prefix: Prefix) -> int:
    return index.row(digest(prefix))


def add(index: PrefixIndex, prefix: Prefix) -> int:
    """Rows for every unit of a prefix; returns the last one, which nothing holds yet."""
    known = index.match(digests(prefix))
    if known < len(prefix):
        parent = row_of(index, prefix[:known]) if known else -1
        index.extend(parent, digests(prefix)[known:])
    return row_of(index, prefix)


class IndexMachine(RuleBasedStateMachine):
    """A prefix is known while it, or a longer one, is held or has a page."""

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex(PAGES)
        self.held: dict[Prefix, int] = {}
        self.pages: list[dict[Prefix, int]] = [{}, {}]
        self.unused = [list(range(count)) for count in PAGES]

    def known(self) -> set[Prefix]:
        needed = {*self.held, *self.pages[0], *self.pages[1]}
        return {prefix[: i + 1] for prefix in needed for i in range(len(prefix))}

    @rule(prefix=short_prefix)
    def hold(self, prefix: Prefix) -> None:
        self.index.hold(add(self.index, prefix))
        self.held[prefix] = self.held.get(prefix, 0) + 1

    @rule(data=st.data())
    def unhold(self, data: st.DataObject) -> None:
        if self.held:
            prefix = data.draw(st.sampled_from(sorted(self.held)))
            self.index.unhold(row_of(self.index, prefix))
            self.held[prefix] -= 1
            if not self.held[prefix]:
                del self.held[prefix]

    @rule(prefix=short_prefix, group=st.integers(0, 1), one=st.booleans())
    def publish(self, prefix: Prefix, group: int, one: bool) -> None:
        """Pages at every unit of a prefix, or only at its last, where there are none."""
        last = add(self.index, prefix)
        rows = self.index.chain(last)
        wanted = [prefix] if one else [prefix[: i + 1] for i in range(len(prefix))]
        fresh = [p for p in wanted if p not in self.pages[group]]
        pages = [self.unused[group].pop() for _ in fresh]
        self.index.hold(last)
        if one and fresh:
            self.index.publish_one(group, last, pages[0])
        else:
            self.index.publish(group, rows[[len(p) - 1 for p in fresh]], np.array(pages, np.int64))
        self.index.unhold(last)
        self.pages[group].update(zip(fresh, pages, strict=True))

    @rule(group=st.integers(0, 1), data=st.data())
    def unpublish(self, group: int, data: st.DataObject) -> None:
        if self.pages[group]:
            gone = data.draw(st.lists(st.sampled_from(sorted(self.pages[group])), unique=True, min_size=1))
            pages = [self.pages[group].pop(prefix) for prefix in gone]
            self.index.unpublish(group, np.array(pages, np.int64))
            self.unused[group] += pages

    @rule(prefix=short_prefix, assumed=st.booleans())
    def match_is_a_linear_scan(self, prefix: Prefix, assumed: bool) -> None:
        known = self.known()
        matched = next((i for i in range(len(prefix)) if prefix[: i + 1] not in known), len(prefix))
        assert self.index.match(digests(prefix)) == matched
        assert self.index.match(digests(prefix), matched if assumed else 0) == matched

    @invariant()
    def rows_are_exactly_what_is_needed(self) -> None:
        known = self.known()
        assert set(self.index._rows) == {digest(prefix) for prefix in known}
        assert len(self.index) == len(known)
        holds: dict[int, int] = {}
        for prefix, count in self.held.items():
            holds[row_of(self.index, prefix)] = count
        self.index.check(holds)

    @invariant()
    def chains_are_parent_walks(self) -> None:
        for prefix in self.known():
            walk = [row_of(self.index, prefix[: i + 1]) for i in range(len(prefix))]
            assert self.index.chain(walk[-1]).tolist() == walk
            assert self.index.chain(walk[-1], len(walk) // 2).tolist() == walk[len(walk) // 2 :]
            assert self.index.depth[walk].tolist() == list(range(1, len(walk) + 1))

    @invariant()
    def pages_are_where_they_were_published(self) -> None:
        for group, pages in enumerate(self.pages):
            for prefix, page in pages.items():
                assert self.index.page_at[group][row_of(self.index, prefix)] == page
                assert self.index.row_of[group][page] == row_of(self.index, prefix)
            assert np.count_nonzero(self.index.page_at[group] >= 0) == len(pages)


def test_the_index_is_a_dictionary_of_prefixes() -> None:
    run_state_machine_as_test(IndexMachine, settings=settings(max_examples=examples(0.4), stateful_step_count=25))


def long_digests(text: int, units: int) -> list[bytes]:
    return [f"{text}-{unit}".encode() for unit in range(units)]


def test_chains_survive_growth_and_the_reuse_of_rows() -> None:
    index = PrefixIndex([0])
    ends = []
    for text in range(6):
        rows = index.extend(-1, long_digests(text, 700))
        index.hold(int(rows[-1]))
        ends.append((text, int(rows[-1])))
    for text, row in ends[::2]:
        index.unhold(row)
        assert index.row(long_digests(text, 700)[0]) == -1
    kept = ends[1][1]
    parent = index.chain(kept)[299]
    branch = index.extend(int(parent), long_digests(9, 1500))
    index.hold(int(branch[-1]))
    walk = [index.row(d) for d in long_digests(1, 300) + long_digests(9, 1500)]
    assert index.chain(int(branch[-1])).tolist() == walk
    assert index.chain(int(branch[-1]), 299).tolist() == walk[299:]
    assert index.match(long_digests(1, 300) + long_digests(9, 1600)) == 1800
    index.check({**{row: 1 for _, row in ends[1::2]}, int(branch[-1]): 1})


def test_the_empty_prefix_has_no_row() -> None:
    index = PrefixIndex([4])
    index.hold(-1)
    index.unhold(-1)
    assert index.chain(-1).tolist() == []
    assert index.match([]) == 0
    assert index.match([b"x"]) == 0
    assert index.row(b"x") == -1
    assert len(index) == 0


def test_a_row_somebody_stands_on_outlives_its_pages() -> None:
    index = PrefixIndex([4])
    row = add(index, (1, 2))
    index.hold(row)
    index.publish_one(0, row, 3)
    index.unpublish(0, np.array([3]))
    assert row_of(index, (1,)) >= 0
    index.unhold(row)
    assert len(index) == 0


def test_check_finds_a_wrong_use_count() -> None:
    index = PrefixIndex([4])
    index.hold(add(index, (1, 2)))
    with pytest.raises(IntegrityError, match="wrong use count"):
        index.check({})
    index._uses[row_of(index, (1,))] += 1
    with pytest.raises(IntegrityError, match="wrong use count"):
        index.check({row_of(index, (1, 2)): 1})
