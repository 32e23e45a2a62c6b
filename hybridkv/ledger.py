"""The books: pool, index and retention moved together, so that a page is never half free or half cached."""

from __future__ import annotations

import numpy as np

from hybridkv.errors import IntegrityError
from hybridkv.index import PrefixIndex, Rows
from hybridkv.layout import Layout
from hybridkv.pages import Pages
from hybridkv.pool import PageCopy, Pool
from hybridkv.retention import Policy, Retention, Victims


class Ledger:
    """Takes, shares, publishes and evicts pages.

    Attributes:
        states: numbers of the state groups.
        windows: numbers of the token groups that let go of pages as a request grows.
        copies: page copies to run, in order, before the next forward pass.
        evicted: cached pages lost so far; moved: pages moved by compaction so far.
    """

    def __init__(self, layout: Layout, policy: Policy) -> None:
        self.layout = layout
        self.pool = Pool(layout)
        self.index = PrefixIndex([layout.slots(g) for g in range(len(layout.plans))])
        self.retention = Retention(layout, self.pool, self.index, policy)
        self.states = tuple(g for g, group in enumerate(layout.groups) if group.is_state)
        self.windows = tuple(g for g, group in enumerate(layout.groups) if not group.is_state and not group.keeps_all)
        self.copies: list[PageCopy] = []
        self.evicted = 0
        self.moved = 0

    def fund(self, demand: list[int]) -> None:
        """Make `demand[g]` slots takeable in every group; the caller has checked `pool.fits_live(demand)`.

        Free slots first, then free slabs, then eviction, then compaction.
        """
        pool = self.pool
        if pool.missing_slabs(demand) > 0:
            while (excess := pool.excess_slabs(demand)) > 0:
                victims = self.retention.next_victims(excess * self.layout.slab_bytes)
                if not victims:
                    raise IntegrityError(f"nothing left to evict, yet {excess} slabs are missing for {demand}")
                self.lose(victims)
            while pool.missing_slabs(demand) > 0:
                moves = pool.compact_one(demand)
                self.moved += len(moves)
                self.copies.extend(moves)
        pool.adopt_for(demand)

    def lose(self, victims: list[Victims]) -> int:
        """Drop cached pages; returns the bytes this frees."""
        freed = 0
        for group, pages in victims:
            self.index.unpublish(group, pages)
            self.pool.drop(group, pages)
            self.evicted += len(pages)
            freed += len(pages) * self.layout.plans[group].stride
        return freed

    def evict(self, nbytes: int) -> int:
        """Drop about this many bytes of cached pages, least valuable first; returns the bytes dropped."""
        freed = 0
        while freed < nbytes and (victims := self.retention.next_victims(nbytes - freed)):
            freed += self.lose(victims)
        return freed

    def take_copies(self) -> list[PageCopy]:
        """The copies to run, handed over once."""
        copies, self.copies = self.copies, []
        return copies

    def take(self, group: int, count: int) -> Pages:
        return self.pool.groups[group].take(count)

    def acquire(self, group: int, pages: Pages) -> None:
        self.pool.groups[group].acquire(pages)

    def release(self, group: int, pages: Pages) -> None:
        """Let go of distinct pages: published ones that nobody else holds become cached, others free."""
        idle = self.pool.groups[group].release(pages)
        if len(idle):
            private = self.index.row_of[group][idle] < 0
            if private.any():
                self.pool.drop(group, idle[private])
                idle = idle[~private]
            self.retention.stamps[group][idle] = self.retention.clock

    def release_one(self, group: int, page: int) -> None:
        """`release` for one page."""
        if self.pool.groups[group].release_one(page):
            if self.index.row_of[group][page] < 0:
                self.pool.drop(group, np.array([page], np.int64))
            else:
                self.retention.stamps[group][page] = self.retention.clock

    def is_writable(self, group: int, page: int) -> bool:
        """Whether one sequence alone sees the page, so that writing to it changes nobody's prefix."""
        return bool(self.pool.groups[group].refs[page] == 1 and self.index.row_of[group][page] < 0)

    def copy_page(self, group: int, page: int) -> int:
        """A private copy of a held page, in exchange for the hold on it. The slot must have been funded."""
        pages = self.pool.groups[group]
        mine = pages.take_one()
        self.copies.append(PageCopy(group, int(pages.slot[page]), int(pages.slot[mine])))
        self.release_one(group, page)
        return mine

    def refresh_copy(self, group: int, source: int, target: int) -> None:
        """Overwrite a private page with another one's content."""
        slot = self.pool.groups[group].slot
        self.copies.append(PageCopy(group, int(slot[source]), int(slot[target])))

    def claim(self, group: int, page: int) -> None:
        """Withdraw a published page that one sequence holds, so that it may write there."""
        self.retention.drop_needing(group, page)
        self.index.unpublish(group, np.array([page], np.int64))

    def publish(self, group: int, rows: Rows, pages: Pages) -> Pages:
        """Enter held pages at their rows; where a row has one already, hold that one instead.

        Returns:
            The pages to hold from now on, in the same order.
        """
        present = self.index.page_at[group][rows]
        fresh = present < 0
        if fresh.all():
            self.index.publish(group, rows, pages)
            return pages
        self.index.publish(group, rows[fresh], pages[fresh])
        other = ~fresh & (present != pages)
        if other.any():
            self.acquire(group, present[other])
            self.release(group, pages[other])
        return np.where(fresh, pages, present)

    def publish_one(self, group: int, row: int, page: int) -> int:
        """`publish` for one page."""
        present = int(self.index.page_at[group][row])
        if present < 0:
            self.index.publish_one(group, row, page)
            return page
        if present != page:
            self.acquire(group, np.array([present], np.int64))
            self.release_one(group, page)
        return present

    def bytes_of(self, demand: list[int]) -> int:
        return sum(plan.stride * count for plan, count in zip(self.layout.plans, demand, strict=True))

    def live_bytes(self) -> int:
        return self.bytes_of([pages.live for pages in self.pool.groups])
