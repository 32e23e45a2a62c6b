"""The physical pool: slabs, who owns them, and compaction. Integers only; no bytes are touched here."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from hybridkv.errors import IntegrityError
from hybridkv.layout import Layout
from hybridkv.pages import GroupPages, Pages


class PageCopy(NamedTuple):
    """Copy one page slot of a group onto another. A list of these must run in order."""

    group: int
    src: int
    dst: int


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
