"""Finding a prefix hit, and holding and releasing pages."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hybridkv.hashing import unit_digests
from hybridkv.index import PrefixIndex, Rows
from hybridkv.layout import Layout
from hybridkv.ledger import Ledger
from hybridkv.pages import Pages
from hybridkv.rules import page_ranges, resumable
from hybridkv.sequence import NO_PAGE, GroupTable, Sequence


class Found(NamedTuple):
    """What is known of a prompt.

    Attributes:
        digests: of its whole units.
        matched: leading units somebody computed before.
        rows: entry rows of the units that every group can resume after.
    """

    digests: list[bytes]
    matched: int
    rows: Rows


def find_hit(
    ledger: Ledger,
    seed: bytes,
    tokens: NDArray[np.uint32],
    extras: dict[int, bytes],
    algorithm: str,
    most_hit: int | None = None,
) -> Found:
    """The prefix hit of a prompt; changes nothing. The last token is always computed: it chooses the first output."""
    unit = ledger.layout.unit_tokens
    digests = unit_digests(seed, tokens[: len(tokens) // unit * unit], unit, extras, algorithm)
    index = ledger.index
    matched = index.match(digests)
    rows = index.chain(index.row(digests[matched - 1])) if matched else np.zeros(0, np.int64)
    most = len(tokens) - 1 if most_hit is None else min(most_hit, len(tokens) - 1)
    hit = resumable_units(ledger.layout, index, rows, min(matched, most // unit))
    return Found(digests, matched, rows[:hit])


def resumable_units(layout: Layout, index: PrefixIndex, rows: Rows, most: int) -> int:
    """The longest prefix, in units and at most `most`, that every group can resume after.

    Args:
        layout: groups and unit size.
        index: what is cached.
        rows: entry rows of the prompt's leading units.
        most: units to consider, at most `len(rows)`.
    """
    if not most or _all_present(layout, index, rows, most):
        return most
    lengths = np.arange(most + 1, dtype=np.int64) * layout.unit_tokens
    ok = np.ones(most + 1, np.bool_)
    for g, group in enumerate(layout.groups):
        page_tokens = group.page_tokens or layout.unit_tokens
        units = page_tokens // layout.unit_tokens
        present = index.page_at[g][rows[units - 1 :: units]] >= 0
        ok &= resumable(group.rule, lengths, page_tokens, present)
    return int(np.flatnonzero(ok)[-1])


def _all_present(layout: Layout, index: PrefixIndex, rows: Rows, units: int) -> bool:
    """Whether every group can resume after exactly this many units: the usual answer, found without the others."""
    length = np.array([units * layout.unit_tokens], np.int64)
    for g, group in enumerate(layout.groups):
        page_tokens = group.page_tokens or layout.unit_tokens
        size = page_tokens // layout.unit_tokens
        if units % size:
            return False
        for start, stop in page_ranges(group.rule, length, page_tokens):
            if (
                stop[0] * size > units
                or (index.page_at[g][rows[start[0] * size + size - 1 : stop[0] * size : size]] < 0).any()
            ):
                return False
    return True


def hold_prefix(ledger: Ledger, seq: Sequence, rows: Rows) -> None:
    """Give a sequence without pages the cached pages it needs to resume after these rows.

    Token pages are whole there and are never written again; a state page is copied by the first reservation.
    """
    layout, index = ledger.layout, ledger.index
    unit = layout.unit_tokens
    tokens = len(rows) * unit
    length = np.array([tokens], np.int64)
    seq.set_rows(rows, len(seq.digests))
    seq.length = tokens
    seq.capacity = 0
    last = int(rows[-1]) if len(rows) else -1
    index.hold(last)
    needed = ledger.retention.needed_pages(last, tokens) if tokens else None
    for g, group in enumerate(layout.groups):
        held = needed[g] if needed else np.zeros(0, np.int64)
        ledger.acquire(g, held)
        if group.is_state:
            seq.working[g] = int(held[0]) if len(held) else NO_PAGE
            continue
        table = GroupTable(-(-seq.known // group.page_tokens) + 8)
        taken = 0
        for start, stop in page_ranges(group.rule, length, group.page_tokens):
            count = int(stop[0] - start[0])
            table.pages[start[0] : stop[0]] = held[taken : taken + count]
            taken += count
            table.end, table.swept = int(stop[0]), int(start[0])
        seq.tables[g] = table
    if tokens:
        if ledger.retention.has(last):
            ledger.retention.touch(last, seq.id)
        else:
            ledger.retention.add(last, tokens, seq.id)


def release_pages(ledger: Ledger, seq: Sequence, *, keep: bool) -> None:
    """Let go of everything a sequence holds.

    With `keep=False`, resume points that only this sequence made and used go too, and so do the pages that are left
    without a purpose by that.
    """
    ledger.retention.tick()
    if not keep:
        for row in [row for row in seq.made_points if ledger.retention.drop_unused(row)]:
            for g in ledger.states:
                _discard(ledger, g, ledger.index.page_at[g][row : row + 1])
    for g, group in enumerate(ledger.layout.groups):
        if group.is_state:
            held = [seq.working[g]] if seq.working[g] >= 0 else []
            held += [pages[g] for pages in seq.pending.values()]
            held += [seq.snapshot.pages[g]] if seq.snapshot else []
            held += [seq.spare[g]] if seq.spare else []
            ledger.release(g, np.array(held, np.int64))
        else:
            table = seq.table(g)
            ledger.release(g, table.pages[table.held()])
            if not keep:
                size = group.page_tokens // ledger.layout.unit_tokens
                first = seq.hit_tokens // group.page_tokens
                ends = seq.rows[(first + 1) * size - 1 : seq.units : size]
                _discard(ledger, g, ledger.index.page_at[g][ends])
    seq.working = [NO_PAGE] * len(seq.working)
    seq.pending, seq.snapshot, seq.spare = {}, None, {}


def _discard(ledger: Ledger, group: int, pages: Pages) -> None:
    """Free those of the pages that are cached and that no resume point needs."""
    pages = pages[pages >= 0]
    purposeless = (ledger.pool.groups[group].refs[pages] == 0) & (ledger.retention.needs[group][pages] == 0)
    gone = pages[purposeless & (ledger.index.row_of[group][pages] >= 0)]
    if len(gone):
        ledger.index.unpublish(group, gone)
        ledger.pool.drop(group, gone)
