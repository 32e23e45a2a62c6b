"""Resume points and eviction order.

A resume point keeps the pages that every group needs at its boundary. Cached pages that no resume point needs go
first, oldest first and the tail of a prefix before its head; then the resume point of least value loses its claim and
its pages follow. The points of one request go from the deepest to the shallowest, so its hit falls back point by
point, and no eviction takes a prompt's hit to zero while an earlier resume point of it lives.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hybridkv.errors import ConfigError
from hybridkv.index import PrefixIndex
from hybridkv.layout import Layout
from hybridkv.pages import Pages
from hybridkv.pool import Pool
from hybridkv.rules import page_ranges

CANDIDATES = 16
"""How many of the least recent requests a value policy compares, each by its deepest resume point."""


class Victims(NamedTuple):
    """Cached pages to give up, in one group."""

    group: int
    pages: Pages


@dataclass(slots=True)
class ResumePoint:
    """A boundary kept on purpose.

    Attributes:
        row: the entry row of the last unit before the boundary.
        tokens: prefix length.
        request: who made it, or resumed at it last.
        hits: how often a look-up resumed here or another request made it again.
        stamp: when that request last made or hit a point.
    """

    row: int
    tokens: int
    request: int
    hits: int = 0
    stamp: int = 0


Policy = Callable[["Retention", Sequence[ResumePoint]], ResumePoint]
"""Chooses the resume point to lose, among the deepest of each of the least recent requests, oldest first."""


def least_recent(_: Retention, points: Sequence[ResumePoint]) -> ResumePoint:
    """The deepest resume point of the request that made or hit one longest ago."""
    return points[0]


def least_value(retention: Retention, points: Sequence[ResumePoint]) -> ResumePoint:
    """Among the oldest points, the one that saves the fewest tokens per byte it alone keeps, discounted by age."""
    return min(points, key=retention.value)


POLICIES: dict[str, Policy] = {"lru": least_recent, "cost": least_value}


def policy_named(name: str) -> Policy:
    """The eviction policy of that name.

    Raises:
        ConfigError: there is none.
    """
    if not isinstance(name, str) or name not in POLICIES:
        raise ConfigError(f"unknown policy {name!r}; choose one of {', '.join(POLICIES)}")
    return POLICIES[name]


class Retention:
    """Which cached pages resume points need, and which page goes next.

    Attributes:
        needs: [groups][pages] how many resume points need each page.
        stamps: [groups][pages] when each page was last let go of by a sequence.
        clock: counts uses; larger is later.
        lost: resume points given up so far for want of room.
    """

    def __init__(self, layout: Layout, pool: Pool, index: PrefixIndex, policy: Policy) -> None:
        self.needs = [np.zeros(layout.slots(g), np.int32) for g in range(len(layout.plans))]
        self.stamps = [np.zeros(layout.slots(g), np.int64) for g in range(len(layout.plans))]
        self.clock = 0
        self.lost = 0
        self._layout = layout
        self._pool = pool
        self._index = index
        self._policy = policy
        self._points: dict[int, ResumePoint] = {}
        self._requests: dict[int, dict[int, ResumePoint]] = {}
        self._strides = np.array([plan.stride for plan in layout.plans], np.int64)
        self._queue_groups = np.zeros(0, np.int64)
        self._queue_pages = np.zeros(0, np.int64)
        self._next = 0
        self._built = 0

    @property
    def points(self) -> Sequence[ResumePoint]:
        """Every resume point, those of the least recent request first."""
        return tuple(point for points in self._requests.values() for point in points.values())

    def has(self, row: int) -> bool:
        return row in self._points

    def tick(self) -> int:
        self.clock += 1
        return self.clock

    def touch(self, row: int, request: int) -> None:
        """`request` hit this resume point or makes it again: it is one of that request's points from now on."""
        point = self._points.get(row)
        if point is not None:
            self._leave(point)
            point.request = request
            point.hits += 1
            self._requests.setdefault(request, {})[row] = point
            self.refresh(request)

    def refresh(self, request: int) -> None:
        """The points of this request are the most recently used ones now."""
        points = self._requests.pop(request, None)
        if points is not None:
            self._requests[request] = points
            now = self.tick()
            for point in points.values():
                point.stamp = now

    def add(self, row: int, tokens: int, request: int) -> bool:
        """Keep what every group needs at this boundary. False, and no change, if some of it is not cached."""
        if row in self._points:
            self.touch(row, request)
            return True
        pages = self.needed_pages(row, tokens)
        if any((held < 0).any() for held in pages):
            return False
        for needs, held in zip(self.needs, pages, strict=True):
            needs[held] += 1
        self._index.hold(row)
        point = ResumePoint(row, tokens, request)
        self._points[row] = self._requests.setdefault(request, {})[row] = point
        self.refresh(request)
        return True

    def drop(self, row: int) -> None:
        """Give up a resume point; its pages stay cached until their turn comes."""
        point = self._points.pop(row)
        self._leave(point)
        for needs, held in zip(self.needs, self.needed_pages(row, point.tokens), strict=True):
            needs[held] -= 1
        self._index.unhold(row)

    def drop_unused(self, row: int) -> bool:
        """Give up a resume point if there is one and nobody came back to it; whether it did."""
        unused = row in self._points and not self._points[row].hits
        if unused:
            self.drop(row)
        return unused

    def drop_needing(self, group: int, page: int) -> None:
        """Give up every resume point that needs this page."""
        for point in self.points:
            if page in self.needed_pages(point.row, point.tokens)[group]:
                self.drop(point.row)

    def needed_pages(self, row: int, tokens: int) -> list[Pages]:
        """Per group, the cached pages needed at this boundary; -1 where one is missing."""
        rows = self._index.chain(row)
        length = np.array([tokens], np.int64)
        unit = self._layout.unit_tokens
        found = []
        for g, group in enumerate(self._layout.groups):
            page_tokens = group.page_tokens or unit
            pieces = []
            for start, stop in page_ranges(group.rule, length, page_tokens):
                ends = (np.arange(start[0], stop[0]) + 1) * (page_tokens // unit) - 1
                known = ends < len(rows)
                pages = np.full(len(ends), -1, np.int64)
                pages[known] = self._index.page_at[g][rows[ends[known]]]
                pieces.append(pages)
            found.append(np.concatenate(pieces))
        return found

    def value(self, point: ResumePoint) -> float:
        """Tokens saved since the previous point of the chain, per byte that only this point keeps and unit of age."""
        chain = self._index.chain(point.row)[:-1]
        others = np.fromiter(self._points, np.int64)
        depths = self._index.depth[others]
        others, depths = others[depths <= len(chain)], depths[depths <= len(chain)]
        earlier = depths[chain[depths - 1] == others]
        saved = point.tokens - int(earlier.max(initial=0)) * self._layout.unit_tokens
        freed = 1
        for g, held in enumerate(self.needed_pages(point.row, point.tokens)):
            alone = (self.needs[g][held] == 1) & (self._pool.groups[g].refs[held] == 0)
            freed += int(np.count_nonzero(alone)) * self._layout.plans[g].stride
        return saved * (1 + point.hits) / freed / (self.clock - point.stamp + 1)

    def next_victims(self, nbytes: int) -> list[Victims]:
        """Cached pages to lose next, up to about `nbytes` of them; the caller drops them. Empty if none is left.

        A resume point is given up only when no other cached page is left.
        """
        chosen: list[Victims] = []
        while nbytes > 0:
            if self._next == len(self._queue_pages):
                if chosen:
                    break
                self._rebuild_queue()
                if not len(self._queue_pages):
                    if not self._points:
                        break
                    oldest = [_deepest(points) for points in islice(self._requests.values(), CANDIDATES)]
                    self.drop(self._policy(self, oldest).row)
                    self.lost += 1
                    continue
            for victims in self._pop(nbytes):
                chosen.append(victims)
                nbytes -= len(victims.pages) * self._strides[victims.group]
        return chosen

    def _leave(self, point: ResumePoint) -> None:
        points = self._requests[point.request]
        del points[point.row]
        if not points:
            del self._requests[point.request]

    def _pop(self, nbytes: int) -> list[Victims]:
        """The head of the queue worth about `nbytes`, without pages that were used since it was built."""
        head = self._queue_groups[self._next :]
        count = int(np.searchsorted(np.cumsum(self._strides[head]), nbytes)) + 1
        groups = head[:count]
        pages = self._queue_pages[self._next : self._next + count]
        self._next += len(groups)
        found = []
        for g in range(len(self.needs)):
            mine = pages[groups == g]
            mine = mine[self._evictable(g, mine) & (self.stamps[g][mine] <= self._built)]
            if len(mine):
                found.append(Victims(g, mine))
        return found

    def _evictable(self, group: int, pages: Pages) -> NDArray[np.bool_]:
        idle = (self._pool.groups[group].refs[pages] == 0) & (self.needs[group][pages] == 0)
        return np.asarray(idle & (self._index.row_of[group][pages] >= 0))

    def _rebuild_queue(self) -> None:
        """Every cached page that no resume point needs: oldest first, and the tail of a prefix before its head."""
        groups, pages, stamps, depths = [], [], [], []
        for g, row_of in enumerate(self._index.row_of):
            published = np.flatnonzero(row_of >= 0)
            idle = published[self._evictable(g, published)]
            groups.append(np.full(len(idle), g))
            pages.append(idle)
            stamps.append(self.stamps[g][idle])
            depths.append(self._index.depth[row_of[idle]])
        order = np.lexsort((-np.concatenate(depths), np.concatenate(stamps)))
        self._queue_groups = np.concatenate(groups)[order]
        self._queue_pages = np.concatenate(pages)[order]
        self._next = 0
        self._built = self.clock


def _deepest(points: Mapping[int, ResumePoint]) -> ResumePoint:
    return max(points.values(), key=lambda point: point.tokens)
