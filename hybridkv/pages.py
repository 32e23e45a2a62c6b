"""Page ids, slots and reference counts of one group.

A page has a logical id for life and a slot that compaction may change. It is *free* (no slot), *live* (held by at
least one sequence) or *cached* (held by none, kept for a later hit).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Pages = NDArray[np.int64]


class GroupPages:
    """Page ids, slots and reference counts of one group. `Pool` decides; this keeps the arrays consistent.

    Attributes:
        slot: [pages] slot of each page, -1 if free.
        refs: [pages] sequences holding each page.
        used: pages that have a slot; live: pages with at least one reference; owned: slots in the group's slabs.
    """

    def __init__(self, slots: int, per_slab: int) -> None:
        self.per_slab = per_slab
        self.slot = np.full(slots, -1, np.int64)
        self.refs = np.zeros(slots, np.int32)
        self.page_at = np.full(slots, -1, np.int64)
        self.filled = np.zeros(slots // per_slab, np.int64)
        self.owns = np.zeros(slots // per_slab, np.bool_)
        self._free_ids = np.arange(slots - 1, -1, -1, dtype=np.int64)
        self._free_top = slots
        self._open: list[int] = []
        self._open_slab = -1
        self.used = 0
        self.live = 0
        self.owned = 0

    @property
    def spare(self) -> int:
        """Free slots in slabs the group already owns."""
        return self.owned - self.used

    def slabs_for(self, more: int) -> int:
        """Slabs the group needs at least to hold its pages and `more` new ones, packed tightly."""
        return -(-(self.used + more) // self.per_slab)

    def adopt(self, slabs: list[int]) -> None:
        if len(slabs) == 1 and not self.spare:
            start = slabs[0] * self.per_slab
            self._open = list(range(start + self.per_slab - 1, start - 1, -1))
            self._open_slab = slabs[0]
        self.owns[slabs] = True
        self.owned += self.per_slab * len(slabs)

    def disown(self, slab: int) -> None:
        self.owns[slab] = False
        self.owned -= self.per_slab
        if slab == self._open_slab:
            self.forget_open()

    def take_one(self) -> int:
        """A new page in the fullest slab with room; the caller has made sure there is one. References: 1."""
        if not self._open:
            self._reopen()
        slot = self._open.pop()
        self._free_top -= 1
        page = int(self._free_ids[self._free_top])
        self.slot[page] = slot
        self.page_at[slot] = page
        self.refs[page] = 1
        self.filled[self._open_slab] += 1
        self.used += 1
        self.live += 1
        return page

    def take(self, count: int) -> Pages:
        """`count` new pages, fullest slabs first. References: 1 each."""
        self.forget_open()
        slots = self._free_slots_packed(count)
        pages = self._free_ids[self._free_top - count : self._free_top].copy()
        self._free_top -= count
        self.slot[pages] = slots
        self.page_at[slots] = pages
        self.refs[pages] = 1
        np.add.at(self.filled, slots // self.per_slab, 1)
        self.used += count
        self.live += count
        return pages

    def drop(self, pages: Pages) -> list[int]:
        """Give up the slots of unreferenced pages; returns slabs that are empty now."""
        if not len(pages):
            return []
        slots = self.slot[pages]
        slabs = slots // self.per_slab
        self.page_at[slots] = -1
        self.slot[pages] = -1
        self._free_ids[self._free_top : self._free_top + len(pages)] = pages
        self._free_top += len(pages)
        self.used -= len(pages)
        np.subtract.at(self.filled, slabs, 1)
        touched = np.unique(slabs)
        if self._open_slab in touched:
            self.forget_open()
        return [int(slab) for slab in touched[self.filled[touched] == 0]]

    def acquire(self, pages: Pages) -> None:
        """One more reference on each of these distinct pages."""
        refs = self.refs[pages]
        self.live += int(np.count_nonzero(refs == 0))
        self.refs[pages] = refs + 1

    def release(self, pages: Pages) -> Pages:
        """One reference less on each of these distinct pages; returns those that nobody holds now."""
        refs = self.refs[pages] - 1
        self.refs[pages] = refs
        idle: Pages = pages[refs == 0]
        self.live -= len(idle)
        return idle

    def release_one(self, page: int) -> bool:
        """`release` for one page; whether nobody holds it now."""
        refs = int(self.refs[page]) - 1
        self.refs[page] = refs
        if refs:
            return False
        self.live -= 1
        return True

    def move(self, page: int, slot: int) -> None:
        old = int(self.slot[page])
        self.page_at[old] = -1
        self.page_at[slot] = page
        self.slot[page] = slot
        self.filled[old // self.per_slab] -= 1
        self.filled[slot // self.per_slab] += 1

    def free_slots(self) -> Pages:
        """Slots in the group's slabs that hold no page."""
        free = (self.page_at < 0).reshape(-1, self.per_slab) & self.owns[:, None]
        return np.flatnonzero(free.reshape(-1))

    def emptiest(self) -> int:
        """The owned slab with the fewest pages."""
        owned = np.flatnonzero(self.owns)
        return int(owned[np.argmin(self.filled[owned])])

    def pages_in(self, slab: int) -> Pages:
        pages: Pages = self.page_at[slab * self.per_slab : (slab + 1) * self.per_slab]
        return pages[pages >= 0]

    def pop_slot_outside(self, slab: int) -> int:
        """A free slot in the fullest owned slab other than `slab`."""
        room = self.owns & (self.filled < self.per_slab)
        room[slab] = False
        candidates = np.flatnonzero(room)
        best = int(candidates[np.argmax(self.filled[candidates])])
        start = best * self.per_slab
        return start + int(np.argmax(self.page_at[start : start + self.per_slab] < 0))

    def forget_open(self) -> None:
        """Forget the remembered free slots; they may be stale after pages moved."""
        self._open = []
        self._open_slab = -1

    def free_ids_match(self) -> bool:
        """Whether the stack of free page ids is exactly the pages without a slot."""
        return bool((np.sort(self._free_ids[: self._free_top]) == np.flatnonzero(self.slot < 0)).all())

    def _reopen(self) -> None:
        room = np.flatnonzero(self.owns & (self.filled < self.per_slab))
        slab = int(room[np.argmax(self.filled[room])])
        start = slab * self.per_slab
        free = np.flatnonzero(self.page_at[start : start + self.per_slab] < 0) + start
        self._open = free[::-1].tolist()
        self._open_slab = slab

    def _free_slots_packed(self, count: int) -> Pages:
        room = np.flatnonzero(self.owns & (self.filled < self.per_slab))
        room = room[np.argsort(-self.filled[room], kind="stable")]
        enough = int(np.searchsorted(np.cumsum(self.per_slab - self.filled[room]), count)) + 1
        slots: Pages = (room[:enough, None] * self.per_slab + np.arange(self.per_slab)).reshape(-1)
        return slots[self.page_at[slots] < 0][:count]
