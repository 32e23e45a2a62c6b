"""The physical pool: slabs, page slots, reference counts and compaction. Integers only; no bytes are touched here.

A page has a logical id for life and a slot that compaction may change. It is *free* (no slot), *live* (held by at
least one sequence) or *cached* (held by none, kept for a later hit).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hybridkv.errors import IntegrityError
from hybridkv.layout import Layout

Pages = NDArray[np.int64]


class PageCopy(NamedTuple):
    """Copy one page slot of a group onto another. A list of these must run in order."""

    group: int
    src: int
    dst: int


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


class Pool:
    """Slabs shared by all groups.

    Attributes:
        groups: one `GroupPages` per group of the layout.
    """

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.groups = tuple(GroupPages(layout.slots(g), plan.per_slab) for g, plan in enumerate(layout.plans))
        self._free_slabs = list(range(layout.slabs - 1, -1, -1))

    @property
    def free_slabs(self) -> int:
        return len(self._free_slabs)

    def fits_live(self, demand: list[int]) -> bool:
        """Whether `demand[g]` more live pages fit once everything cached is gone and every slab is packed."""
        slabs = sum(-(-(pages.live + more) // pages.per_slab) for pages, more in zip(self.groups, demand, strict=True))
        return slabs <= self.layout.slabs

    def excess_slabs(self, demand: list[int]) -> int:
        """Slabs still missing for `demand` after perfect compaction; 0 or less means nothing must be evicted."""
        needed = sum(pages.slabs_for(more) for pages, more in zip(self.groups, demand, strict=True))
        return needed - self.layout.slabs

    def missing_slabs(self, demand: list[int]) -> int:
        """Slabs the groups must still adopt for `demand` as the pool lies now, beyond the free ones."""
        needed = 0
        for pages, more in zip(self.groups, demand, strict=True):
            needed += -(-max(more - pages.spare, 0) // pages.per_slab)
        return needed - len(self._free_slabs)

    def adopt_for(self, demand: list[int]) -> None:
        """Hand free slabs to the groups that lack slots for `demand`."""
        for pages, more in zip(self.groups, demand, strict=True):
            if more > pages.spare:
                count = -(-(more - pages.spare) // pages.per_slab)
                pages.adopt(self._free_slabs[-count:])
                del self._free_slabs[-count:]

    def compact_one(self, demand: list[int]) -> list[PageCopy]:
        """Empty one slab by moving its pages within their group; the copies must run in order.

        The caller has checked that `excess_slabs(demand) <= 0` and `missing_slabs(demand) > 0`, so some group owns
        more slabs than its pages need.
        """
        best: tuple[int, int, int] | None = None
        for g, (pages, more) in enumerate(zip(self.groups, demand, strict=True)):
            if pages.owned // pages.per_slab > pages.slabs_for(more):
                slab = pages.emptiest()
                cost = int(pages.filled[slab]) * self.layout.plans[g].stride
                if best is None or cost < best[0]:
                    best = cost, g, slab
        if best is None:
            raise IntegrityError(f"no slab can be emptied for {demand}; the pool's counters are wrong")
        _, g, slab = best
        pages = self.groups[g]
        copies = []
        for page in pages.pages_in(slab).tolist():
            slot = pages.pop_slot_outside(slab)
            copies.append(PageCopy(g, int(pages.slot[page]), slot))
            pages.move(page, slot)
        pages.forget_open()
        self._free(g, slab)
        return copies

    def drop(self, group: int, pages: Pages) -> None:
        """Free unreferenced pages; slabs left empty go back to the pool."""
        for slab in self.groups[group].drop(pages):
            self._free(group, slab)

    def free_slots(self, group: int) -> Pages:
        """Slots of `group` that hold nothing of anybody: in its own slabs and in free ones."""
        pages = self.groups[group]
        free = np.asarray(sorted(self._free_slabs), np.int64)
        whole = (free[:, None] * pages.per_slab + np.arange(pages.per_slab)).reshape(-1)
        return np.concatenate((pages.free_slots(), whole))

    def check(self) -> None:
        """Raise IntegrityError unless every slab has one owner and every page one slot."""
        owners = np.zeros(self.layout.slabs, np.int64)
        owners[self._free_slabs] += 1
        for g, pages in enumerate(self.groups):
            owners += pages.owns
            filled = (pages.page_at >= 0).reshape(-1, pages.per_slab).sum(1)
            placed = np.flatnonzero(pages.slot >= 0)
            facts = {
                "pages per slab": bool((filled == pages.filled).all()),
                "pages outside owned slabs": not filled[~pages.owns].any(),
                "empty owned slabs": bool((filled[pages.owns] > 0).all()),
                "page and slot tables": bool((pages.page_at[pages.slot[placed]] == placed).all()),
                "used pages": len(placed) == pages.used == int(filled.sum()),
                "owned slots": pages.owned == int(pages.owns.sum()) * pages.per_slab,
                "live pages": pages.live == int((pages.refs > 0).sum()),
                "references to free pages": not pages.refs[pages.slot < 0].any(),
                "negative references": not (pages.refs < 0).any(),
                "free ids": pages.free_ids_match(),
            }
            for name, holds in facts.items():
                if not holds:
                    raise IntegrityError(f"group {self.layout.plans[g].group.name!r}: {name} do not add up")
        if (owners != 1).any():
            raise IntegrityError(f"slabs {np.flatnonzero(owners != 1).tolist()} have no owner or several")

    def _free(self, group: int, slab: int) -> None:
        self.groups[group].disown(slab)
        self._free_slabs.append(slab)
