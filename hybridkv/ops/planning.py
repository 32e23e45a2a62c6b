"""Building the plan of a token group for one step, from its rule and its pages."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hybridkv.ops.spans import Block, Bucket, InPlace, Ints, TokenChunk, TokenPlan
from hybridkv.rules import Rule
from hybridkv.sequence import TokenPages
from hybridkv.storage import TokenIndex

_MASK_ITEMS = 1 << 22
"""Largest attention mask of one block, in items."""

_RUN_PAGES = 16
"""Least pages of a run, on average, for which reading in place beats gathering."""


class PageTable:
    """The pages several sequences hold in one group: sequence and position become slot and row."""

    def __init__(self, pages: Sequence[TokenPages], page_tokens: int, device: torch.device) -> None:
        dense = [_dense(held.pages, held.slots) for held in pages]
        sizes = np.array([len(slots) for _, slots in dense], np.int64)
        firsts = np.array([first for first, _ in dense], np.int64)
        self._base = np.cumsum(sizes) - sizes - firsts
        self._slots = np.concatenate([slots for _, slots in dense]) if dense else np.zeros(0, np.int64)
        self.page_tokens = page_tokens
        self._device = device

    def index(self, sequences: Ints | int, positions: Ints) -> TokenIndex:
        """Where tokens lie; `sequences` are numbers in the order given and broadcast against `positions`."""
        pages, rows = np.divmod(positions, self.page_tokens)
        slots = self._slots[self._base[sequences] + pages]
        return TokenIndex(self._tensor(slots), self._tensor(np.broadcast_to(rows, slots.shape)))

    def runs(self, sequence: int, first: int, last: int) -> list[tuple[int, int]]:
        """The slots of the pages [first, last) of a sequence, adjacent ones joined, as (start, stop) pairs."""
        slots = self._slots[self._base[sequence] + first : self._base[sequence] + last]
        breaks = np.flatnonzero(np.diff(slots) != 1) + 1
        starts, stops = slots[np.append(0, breaks)], slots[np.append(breaks, len(slots)) - 1] + 1
        return list(zip(starts.tolist(), stops.tolist(), strict=True))

    def _tensor(self, values: Ints) -> Tensor:
        return torch.from_numpy(values.flatten()).to(self._device)


def _dense(pages: Ints, slots: Ints) -> tuple[int, Ints]:
    """First page, and a slot for every page from there on; pages in between that are not held repeat the first."""
    if len(pages) == 0:
        return 0, slots
    first = int(pages[0])
    if int(pages[-1]) - first + 1 == len(pages):
        return first, slots
    filled = np.full(int(pages[-1]) - first + 1, slots[0], np.int64)
    filled[pages - first] = slots
    return first, filled


def plan_tokens(
    rule: Rule,
    table: PageTable,
    lengths: Ints,
    counts: Ints,
    singles: int,
    dtype: torch.dtype,
    device: torch.device,
    in_place_from: int | None = None,
) -> TokenPlan:
    """The plan of one token group.

    Args:
        rule: of the group.
        table: the pages of all spans, in packed order.
        lengths: tokens computed before this pass, per span.
        counts: tokens of each span; the first `singles` are 1, the others more.
        singles: number of one-token spans, sorted by falling length.
        dtype: of masks, the one queries have.
        device: of masks and indices.
        in_place_from: tokens of a past from which it is read where it lies, if its pages are adjacent; None for never.
    """
    sequences = np.repeat(np.arange(len(counts)), counts)
    stops = np.cumsum(counts)
    starts = stops - counts
    positions = np.arange(len(sequences)) - np.repeat(starts - lengths, counts)
    in_place: list[InPlace] = []
    if in_place_from is not None and singles and lengths[0] >= in_place_from:
        found = (_in_place(rule, table, i, lengths[i : i + 1], in_place_from) for i in range(singles))
        in_place = [span for span in found if span is not None]
    gathered = np.delete(np.arange(singles), [span.token for span in in_place])
    buckets = tuple(_buckets(rule, table, gathered, lengths, dtype, device))
    chunks = tuple(
        _chunk(rule, table, i, positions[starts[i] : stops[i]], int(starts[i]), dtype, device)
        for i in range(singles, len(counts))
    )
    return TokenPlan(table.index(sequences, positions), buckets, tuple(in_place), chunks)


def _in_place(rule: Rule, table: PageTable, span: int, length: Ints, least: int) -> InPlace | None:
    """How a one-token span reads its past where it lies, or None if it should be gathered."""
    size = table.page_tokens
    runs: list[tuple[int, int]] = []
    rest = [length]
    pages = 0
    for start, stop in rule.needed(length):
        a, b = int(start[0]), int(stop[0])
        first, last = -(-a // size), b // size
        if last > first:
            pages += last - first
            runs += table.runs(span, first, last)
            rest += [np.arange(a, first * size), np.arange(last * size, b)]
        else:
            rest.append(np.arange(a, b))
    if pages * size < least or len(runs) * _RUN_PAGES > pages:
        return None
    return InPlace(span, tuple(runs), table.index(span, np.concatenate(rest)))


def _buckets(
    rule: Rule, table: PageTable, spans: Ints, lengths: Ints, dtype: torch.dtype, device: torch.device
) -> list[Bucket]:
    """Gather the past of these one-token spans, sorted by falling length, a few neighbours at a time."""
    if len(spans) == 0:
        return []
    positions = lengths[spans]
    ranges = rule.needed(positions)
    sizes = sum((stop - start for start, stop in ranges), np.ones(len(spans), np.int64))
    jumps = np.diff(spans, append=spans[-1] + 2) != 1
    found: list[Bucket] = []
    first = 0
    while first < len(spans):
        # Half-empty rows cost more than another call.
        close = sizes[first:] * 2 < sizes[first] if sizes[first] > 128 else np.zeros(1, bool)
        last = first + int(close.argmax()) if close.any() else len(spans)
        last = min(last, first + int(jumps[first:].argmax()) + 1)
        own = positions[first:last, None]
        columns, valid = [], []
        for start, stop in ranges:
            start, stop = start[first:last, None], stop[first:last, None]
            asked = start + np.arange(int((stop - start).max()))
            columns.append(np.where(asked < stop, asked, own))
            valid.append(asked < stop)
        seen = np.hstack([*valid, np.ones_like(own, bool)])
        index = table.index(spans[first:last, None], np.hstack([*columns, own]))
        mask = None if seen.all() else additive(seen, dtype, device)
        found.append(Bucket(int(spans[first]), int(spans[last - 1]) + 1, index, mask))
        first = last
    return found


def additive(seen: NDArray[np.bool_], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Which keys [rows, keys] may be seen, as a mask [rows, 1, 1, keys] to add to scores."""
    hidden = torch.from_numpy(~seen).to(device)[:, None, None, :]
    return torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, -torch.inf)


def _chunk(
    rule: Rule, table: PageTable, sequence: int, positions: Ints, start: int, dtype: torch.dtype, device: torch.device
) -> TokenChunk:
    past = np.concatenate([np.arange(a[0], b[0]) for a, b in rule.needed(positions[:1])])
    keys = np.concatenate([past, positions])
    history = table.index(sequence, keys) if len(past) else None
    blocks = tuple(_blocks(rule, keys, positions, start, device))
    return TokenChunk(start, start + len(positions), history, blocks, positions, keys, rule, dtype, device)


def _blocks(rule: Rule, keys: Ints, positions: Ints, start: int, device: torch.device) -> list[Block]:
    count = len(positions)
    needed = sum(b - a for a, b in rule.needed(positions))
    reach = int(np.max(needed)) + 1
    if reach == len(keys):
        size = count if reach == count else max(64, _MASK_ITEMS // len(keys))
    else:
        size = min(max(reach // 2, 64), 512)
    blocks = []
    for first in range(0, count, size):
        last = min(first + size, count)
        asked = positions[first:last]
        past = np.concatenate([np.arange(a[0], b[0]) for a, b in rule.needed(asked[:1])])
        found = np.searchsorted(keys, np.concatenate([past, asked]))
        seen_by_last = int(sum(int(b[0] - a[0]) for a, b in rule.needed(asked[-1:]))) + 1
        causal = len(past) == 0 and seen_by_last == len(asked)
        columns: slice | Tensor = slice(int(found[0]), int(found[-1]) + 1)
        if len(found) != found[-1] - found[0] + 1:
            columns = torch.from_numpy(found).to(device)
        blocks.append(Block(start + first, start + last, columns, causal))
    return blocks
