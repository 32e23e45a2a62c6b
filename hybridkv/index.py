"""The prefix index: one entry row per hash unit, and for each group the page that ends there.

A row's parent is the row of the unit before it, and a row outlives its parents' need for it: every prefix of a known
prefix is known. So the longest match is a binary search over digests, and the rows of a chain are read run by run.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hybridkv.errors import IntegrityError

Rows = NDArray[np.int64]

_FIRST_ROWS = 1024


class PrefixIndex:
    """Digest -> row, row -> pages.

    Attributes:
        page_at: [groups][rows] the page of each group whose last unit is this row, -1 if none.
        row_of: [groups][pages] the row a page is published at, -1 if it is not.
        depth: [rows] units from the root, the first unit has depth 1.
    """

    def __init__(self, pages: Sequence[int]) -> None:
        """`pages[g]` is the number of page ids of group g."""
        size = _FIRST_ROWS
        self.page_at = [np.full(size, -1, np.int64) for _ in pages]
        self.row_of = [np.full(count, -1, np.int64) for count in pages]
        self.depth = np.zeros(size, np.int64)
        self._parent = np.full(size, -1, np.int64)
        self._run_start = np.zeros(size, np.int64)
        self._uses = np.zeros(size, np.int64)
        self._digests: list[bytes | None] = [None] * size
        self._rows: dict[bytes, int] = {}
        self._free = np.arange(size - 1, -1, -1, dtype=np.int64)
        self._free_top = size

    def __len__(self) -> int:
        return len(self._rows)

    def match(self, digests: Sequence[bytes], known: int = 0) -> int:
        """How many leading digests have rows; the first `known` are taken for granted."""
        low, high = known, len(digests)
        rows = self._rows
        while low < high:
            middle = (low + high + 1) // 2
            if digests[middle - 1] in rows:
                low = middle
            else:
                high = middle - 1
        return low

    def row(self, digest: bytes) -> int:
        """The row of a digest, -1 if nobody has it."""
        return self._rows.get(digest, -1)

    def chain(self, row: int, since: int = 0) -> Rows:
        """Rows of the prefix that ends at `row`, oldest unit first, without its first `since` units."""
        count = int(self.depth[row]) - since if row >= 0 else 0
        rows = np.empty(count, np.int64)
        end = count
        while end > 0:
            start = max(int(self._run_start[row]), row - end + 1)
            rows[end - (row - start + 1) : end] = np.arange(start, row + 1)
            end -= row - start + 1
            row = int(self._parent[start])
        return rows

    def extend(self, parent: int, digests: Sequence[bytes]) -> Rows:
        """New rows for digests nobody has, each the child of the one before; the first is a child of `parent`."""
        count = len(digests)
        if count == 1:
            return np.array([self.extend_one(parent, digests[0])], np.int64)
        while self._free_top < count:
            self._grow()
        rows = np.sort(self._free[self._free_top - count : self._free_top])
        self._free_top -= count
        parents = np.concatenate((np.array([parent], np.int64), rows[:-1]))
        self._parent[rows] = parents
        base = int(self.depth[parent]) if parent >= 0 else 0
        self.depth[rows] = np.arange(base + 1, base + count + 1)
        breaks = rows != parents + 1
        breaks[0] |= parent < 0
        first = int(self._run_start[parent]) if parent >= 0 else 0
        starts = np.where(breaks, np.arange(count), -1)
        starts = np.maximum.accumulate(starts)
        self._run_start[rows] = np.where(starts >= 0, rows[starts], first)
        self._uses[rows[:-1]] = 1
        self._uses[rows[-1]] = 0
        if parent >= 0:
            self._uses[parent] += 1
        listed = rows.tolist()
        if listed[-1] - listed[0] == count - 1:
            self._digests[listed[0] : listed[-1] + 1] = digests
        else:
            for row, digest in zip(listed, digests, strict=True):
                self._digests[row] = digest
        self._rows.update(zip(digests, listed, strict=True))
        return rows

    def publish(self, group: int, rows: Rows, pages: Rows) -> None:
        """Enter pages at rows that have none of this group yet."""
        self.page_at[group][rows] = pages
        self.row_of[group][pages] = rows
        self._uses[rows] += 1

    def publish_one(self, group: int, row: int, page: int) -> None:
        """`publish` for one page."""
        self.page_at[group][row] = page
        self.row_of[group][page] = row
        self._uses[row] += 1

    def unpublish(self, group: int, pages: Rows) -> None:
        """Forget published pages; rows that nothing needs any more go with them."""
        rows = self.row_of[group][pages]
        self.row_of[group][pages] = -1
        self.page_at[group][rows] = -1
        self._uses[rows] -= 1
        self._prune(rows)

    def hold(self, row: int) -> None:
        """Keep a row although it may have no pages, while a sequence or a resume point stands on it."""
        if row >= 0:
            self._uses[row] += 1

    def unhold(self, row: int) -> None:
        if row >= 0:
            self._uses[row] -= 1
            if not self._uses[row]:
                self._prune(np.array([row], np.int64))

    def nbytes(self) -> int:
        """Bytes of the arrays (the dictionary and its digests come on top)."""
        arrays = [*self.page_at, *self.row_of, self.depth, self._parent, self._run_start, self._uses, self._free]
        return sum(array.nbytes for array in arrays)

    def check(self, holds: dict[int, int]) -> None:
        """Raise IntegrityError unless rows, pages and uses agree; `holds[row]` is how often each row is held."""
        live = np.array(sorted(self._rows.values()), np.int64)
        uses = np.zeros_like(self._uses)
        np.add.at(uses, self._parent[live][self._parent[live] >= 0], 1)
        for row, count in holds.items():
            uses[row] += count
        for g, (page_at, row_of) in enumerate(zip(self.page_at, self.row_of, strict=True)):
            rows = np.flatnonzero(page_at >= 0)
            uses[rows] += 1
            pages = np.flatnonzero(row_of >= 0)
            if len(pages) != len(rows) or (row_of[page_at[rows]] != rows).any():
                raise IntegrityError(f"group number {g}: published pages and entry rows do not agree")
        if (uses != self._uses)[live].any():
            raise IntegrityError(f"entry rows {live[(uses != self._uses)[live]].tolist()} have the wrong use count")
        if (self._uses[live] == 0).any():
            raise IntegrityError("an entry row that nothing needs was kept")
        if len(live) + self._free_top != len(self.depth):
            raise IntegrityError("entry rows were lost")
        for digest, row in self._rows.items():
            parent = int(self._parent[row])
            if self._digests[row] != digest or (parent >= 0 and self._digests[parent] is None):
                raise IntegrityError(f"entry row {row} has the wrong digest or no parent")
            if int(self.depth[row]) != (int(self.depth[parent]) + 1 if parent >= 0 else 1):
                raise IntegrityError(f"entry row {row} has the wrong depth")

    def extend_one(self, parent: int, digest: bytes) -> int:
        """`extend` by one row."""
        if not self._free_top:
            self._grow()
        self._free_top -= 1
        row = int(self._free[self._free_top])
        self._parent[row] = parent
        if parent >= 0:
            self.depth[row] = self.depth[parent] + 1
            self._run_start[row] = self._run_start[parent] if row == parent + 1 else row
            self._uses[parent] += 1
        else:
            self.depth[row] = 1
            self._run_start[row] = row
        self._uses[row] = 0
        self._digests[row] = digest
        self._rows[digest] = row
        return row

    def _prune(self, rows: Rows) -> None:
        """Remove rows without uses, deepest first, and every ancestor that this leaves without uses."""
        idle = rows[self._uses[rows] == 0]
        for row in idle[np.argsort(-self.depth[idle])].tolist():
            while row >= 0 and not self._uses[row]:
                digest = self._digests[row]
                if digest is None:
                    break
                del self._rows[digest]
                self._digests[row] = None
                self._free[self._free_top] = row
                self._free_top += 1
                row = int(self._parent[row])
                if row >= 0:
                    self._uses[row] -= 1

    def _grow(self) -> None:
        size = len(self.depth)
        self.page_at = [np.concatenate((array, np.full(size, -1, np.int64))) for array in self.page_at]
        self.depth = np.concatenate((self.depth, np.zeros(size, np.int64)))
        self._parent = np.concatenate((self._parent, np.full(size, -1, np.int64)))
        self._run_start = np.concatenate((self._run_start, np.zeros(size, np.int64)))
        self._uses = np.concatenate((self._uses, np.zeros(size, np.int64)))
        self._digests.extend([None] * size)
        free = np.empty(2 * size, np.int64)
        fresh = np.arange(2 * size - 1, size - 1, -1)
        free[:size] = fresh
        free[size : size + self._free_top] = self._free[: self._free_top]
        self._free = free
        self._free_top += size
