"""What the manager knows about one running request. Others read it; only the manager writes it."""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Seq
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hybridkv.errors import UsageError
from hybridkv.hashing import Adapter, Image

NO_PAGE = -1


class TokenPages(NamedTuple):
    """The pages of a token group that a sequence holds now.

    Attributes:
        pages: ascending page indices; page i covers tokens [i * page_tokens, (i + 1) * page_tokens).
        slots: their slots in the group's strided views, valid until the next reservation.
    """

    pages: NDArray[np.int64]
    slots: NDArray[np.int64]


class StatePages(NamedTuple):
    """Where a state group of a sequence is read and written.

    Attributes:
        slot: the working state. A sequence of length 0 starts from zeros; the slot then holds nothing of use.
        checkpoints: (position, slot) pairs inside the reservation: the state after exactly `position` tokens also
            goes to this slot.
        end: where the state after all reserved tokens goes: the working slot, or another one if they are guesses.
    """

    slot: int
    checkpoints: tuple[tuple[int, int], ...]
    end: int


class Snapshot(NamedTuple):
    """A copy of the working states at a boundary, made while decoding.

    Attributes:
        tokens: the length at which it was taken.
        pages: one page per state group, by group number.
    """

    tokens: int
    pages: dict[int, int]


class GroupTable:
    """The page table of one token group for one sequence.

    Attributes:
        pages: page id by page index, -1 where the sequence holds none.
        end: page indices below this were taken at some time.
        swept: pages of the last needed range below this have been let go of.
    """

    __slots__ = ("end", "pages", "swept")

    def __init__(self, room: int) -> None:
        self.pages = np.full(room, NO_PAGE, np.int64)
        self.end = 0
        self.swept = 0

    def append(self, pages: NDArray[np.int64]) -> None:
        end = self.end + len(pages)
        if end > len(self.pages):
            grown = np.full(max(end, 2 * len(self.pages)), NO_PAGE, np.int64)
            grown[: self.end] = self.pages[: self.end]
            self.pages = grown
        self.pages[self.end : end] = pages
        self.end = end

    def append_one(self, page: int) -> None:
        if self.end == len(self.pages):
            self.append(np.array([page], np.int64))
        else:
            self.pages[self.end] = page
            self.end += 1

    def cut(self, end: int) -> NDArray[np.int64]:
        """Forget the pages at index `end` and after; returns those that were held."""
        tail = self.pages[end : self.end].copy()
        self.pages[end : self.end] = NO_PAGE
        self.end = min(self.end, end)
        self.swept = min(self.swept, end)
        return tail[tail >= 0]

    def held(self) -> NDArray[np.int64]:
        """Indices of the pages held now."""
        return np.flatnonzero(self.pages[: self.end] >= 0)

    def copy(self) -> GroupTable:
        table = GroupTable(len(self.pages))
        table.pages[:] = self.pages
        table.end, table.swept = self.end, self.swept
        return table


class Sequence:
    """One running request.

    Attributes:
        adapter: the LoRA adapter it was opened with, part of its seed.
        images: multimodal input of the tokens so far; `extras` is what it adds to the digests.
        hit_tokens: prefix that was already computed when the request was opened.
        length: tokens computed so far.
        reserved: tokens past `length` that have pages in every group.
        units: hash units of the prefix that have entry rows, listed in `rows`.
        plan: boundaries, in tokens, still to become resume points.
        pending: boundary -> state pages that the step under way writes.
        firm: of the reserved tokens, those that are certain, if guesses follow; else 0.
        spare: state group -> page that the states after the last guess go to.
        capacity: tokens that can be computed before pages must be taken or copied.
        private: nothing of it is published, so it has no digests, no rows and no resume points.
    """

    __slots__ = (
        "adapter",
        "capacity",
        "closed",
        "digests",
        "extras",
        "firm",
        "hit_tokens",
        "id",
        "images",
        "length",
        "made_points",
        "pending",
        "plan",
        "private",
        "prompt_tokens",
        "reserved",
        "rows",
        "seed",
        "snapshot",
        "spare",
        "tables",
        "tokens",
        "units",
        "working",
    )

    def __init__(self, id: int, tokens: array[int], seed: bytes, groups: int, private: bool = False) -> None:
        self.id = id
        self.tokens = tokens
        self.seed = seed
        self.adapter: Adapter | None = None
        self.images: tuple[Image, ...] = ()
        self.extras: dict[int, bytes] = {}
        self.digests: list[bytes] = []
        self.rows = np.zeros(0, np.int64)
        self.units = 0
        self.tables: list[GroupTable | None] = [None] * groups
        self.working: list[int] = [NO_PAGE] * groups
        self.pending: dict[int, dict[int, int]] = {}
        self.plan: list[int] = []
        self.snapshot: Snapshot | None = None
        self.made_points: list[int] = []
        self.prompt_tokens = len(tokens)
        self.hit_tokens = 0
        self.length = 0
        self.reserved = 0
        self.firm = 0
        self.spare: dict[int, int] = {}
        self.capacity = 0
        self.private = private
        self.closed = False

    @property
    def known(self) -> int:
        """Tokens given so far, to `open` or to `commit`."""
        return len(self.tokens)

    def table(self, group: int) -> GroupTable:
        """The page table of a token group."""
        table = self.tables[group]
        if table is None:
            raise UsageError(f"group number {group} keeps a state, not tokens; it has no page table")
        return table

    def set_rows(self, rows: NDArray[np.int64], expected: int) -> None:
        """Stand on these entry rows, with room for `expected` units."""
        self.rows = np.empty(max(expected, len(rows)) + 8, np.int64)
        self.rows[: len(rows)] = rows
        self.units = len(rows)

    def append_row(self, row: int) -> None:
        """The entry row of one more unit."""
        if self.units == len(self.rows):
            self.append_rows(np.array([row], np.int64))
        else:
            self.rows[self.units] = row
            self.units += 1

    def append_rows(self, rows: NDArray[np.int64]) -> None:
        """The entry rows of more units."""
        end = self.units + len(rows)
        if end > len(self.rows):
            self.rows = np.concatenate((self.rows, np.empty(max(end, len(self.rows)), np.int64)))
        self.rows[self.units : end] = rows
        self.units = end

    def token_ids(self, start: int = 0, stop: int | None = None) -> NDArray[np.uint32]:
        """The token ids [start, stop), a copy."""
        return np.frombuffer(self.tokens, np.uint32)[start:stop].copy() if self.tokens else np.zeros(0, np.uint32)

    def __repr__(self) -> str:
        return f"<Sequence {self.id}: {self.length} of {self.known} tokens computed, {self.hit_tokens} from the cache>"


def as_tokens(token_ids: Seq[int] | NDArray[np.integer]) -> array[int]:
    """Token ids as an array of uint32; the caller has checked their range."""
    tokens = array("I")
    tokens.frombytes(np.ascontiguousarray(token_ids, np.uint32).tobytes())
    return tokens
