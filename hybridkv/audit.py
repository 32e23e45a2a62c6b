"""Usage by group and by state, and the walk over every invariant."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from typing import NamedTuple

import numpy as np

from hybridkv.errors import IntegrityError, UsageError
from hybridkv.ledger import Ledger
from hybridkv.sequence import Sequence


class GroupUsage(NamedTuple):
    """Pages and bytes of one group. Bytes count whole strides, padding included."""

    name: str
    kind: str
    layers: int
    page_bytes: int
    slabs: int
    live_pages: int
    cached_pages: int
    free_pages: int
    live_bytes: int
    cached_bytes: int
    free_bytes: int


class Usage(NamedTuple):
    """Bytes of the pool by state; live + cached + free = pool.

    Attributes:
        padding_bytes: bytes inside live and cached pages that hold nothing.
        free_bytes: free slabs, and free slots in the groups' slabs.
    """

    pool_bytes: int
    live_bytes: int
    cached_bytes: int
    free_bytes: int
    padding_bytes: int
    resume_points: int
    groups: tuple[GroupUsage, ...]


class Counters(NamedTuple):
    """What has happened since the pool was made.

    Attributes:
        evicted_pages: cached pages dropped for want of room.
        lost_points: resume points given up for want of room.
        moved_pages: pages copied by compaction.
    """

    evicted_pages: int
    lost_points: int
    moved_pages: int


def counters(ledger: Ledger) -> Counters:
    """Evictions and moves so far."""
    return Counters(ledger.evicted, ledger.retention.lost, ledger.moved)


def missing_groups(ledger: Ledger, digests: Seq[bytes], tokens: int) -> tuple[int, ...]:
    """Numbers of the groups that cannot resume after the first `tokens` tokens of a prompt with these digests.

    Raises:
        UsageError: no multiple of `layout.boundary_tokens` within the units that have digests.
    """
    step, known = ledger.layout.boundary_tokens, len(digests) * ledger.layout.unit_tokens
    if tokens < 0 or tokens % step or tokens > known:
        raise UsageError(
            f"no resume point can be at {tokens} tokens: it takes a multiple of {step} within the {known} tokens that "
            "have digests"
        )
    matched = ledger.index.match(digests[: tokens // ledger.layout.unit_tokens])
    row = ledger.index.row(digests[matched - 1]) if matched else -1
    needed = ledger.retention.needed_pages(row, tokens)
    return tuple(g for g, pages in enumerate(needed) if (pages < 0).any())


def usage(ledger: Ledger) -> Usage:
    """Where the bytes are now."""
    groups = []
    padding = 0
    for plan, pages in zip(ledger.layout.plans, ledger.pool.groups, strict=True):
        cached = pages.used - pages.live
        padding += pages.used * (plan.stride - plan.group.page_bytes)
        groups.append(
            GroupUsage(
                name=plan.group.name,
                kind=plan.group.kind,
                layers=plan.group.layers,
                page_bytes=plan.group.page_bytes,
                slabs=pages.owned // pages.per_slab,
                live_pages=pages.live,
                cached_pages=cached,
                free_pages=pages.spare,
                live_bytes=pages.live * plan.stride,
                cached_bytes=cached * plan.stride,
                free_bytes=pages.spare * plan.stride,
            )
        )
    free = ledger.pool.free_slabs * ledger.layout.slab_bytes + sum(group.free_bytes for group in groups)
    return Usage(
        pool_bytes=ledger.layout.pool_bytes,
        live_bytes=sum(group.live_bytes for group in groups),
        cached_bytes=sum(group.cached_bytes for group in groups),
        free_bytes=free,
        padding_bytes=padding,
        resume_points=len(ledger.retention.points),
        groups=tuple(groups),
    )


def check(ledger: Ledger, running: Iterable[Sequence]) -> None:
    """Raise IntegrityError unless every count can be derived again from what is held, published and kept."""
    sequences = list(running)
    ledger.pool.check()
    _check_references(ledger, sequences)
    _check_needs(ledger)
    holds = Counter(int(seq.rows[seq.units - 1]) for seq in sequences if seq.units)
    holds.update(point.row for point in ledger.retention.points)
    ledger.index.check(holds)
    for seq in sequences:
        _check_sequence(ledger, seq)
    total = usage(ledger)
    if total.live_bytes + total.cached_bytes + total.free_bytes != total.pool_bytes:
        raise IntegrityError(f"live + cached + free is not the pool: {total}")


def _check_references(ledger: Ledger, sequences: list[Sequence]) -> None:
    for g, (group, pages) in enumerate(zip(ledger.layout.groups, ledger.pool.groups, strict=True)):
        refs = np.zeros_like(pages.refs)
        for seq in sequences:
            if group.is_state:
                held = [seq.working[g]] if seq.working[g] >= 0 else []
                held += [pending[g] for pending in seq.pending.values()]
                held += [seq.snapshot.pages[g]] if seq.snapshot else []
                held += [seq.spare[g]] if seq.spare else []
            else:
                held = seq.table(g).pages[seq.table(g).held()].tolist()
            np.add.at(refs, np.array(held, np.int64), 1)
        if (refs != pages.refs).any():
            wrong = np.flatnonzero(refs != pages.refs).tolist()
            raise IntegrityError(f"group {group.name!r}: pages {wrong} have the wrong reference count")
        idle = np.flatnonzero((pages.slot >= 0) & (pages.refs == 0) & (ledger.index.row_of[g] < 0))
        if len(idle):
            raise IntegrityError(f"group {group.name!r}: pages {idle.tolist()} are neither held nor published")
        lost = np.flatnonzero((pages.slot < 0) & (ledger.index.row_of[g] >= 0))
        if len(lost):
            raise IntegrityError(f"group {group.name!r}: pages {lost.tolist()} are published but have no slot")


def _check_needs(ledger: Ledger) -> None:
    needs = [np.zeros_like(array) for array in ledger.retention.needs]
    for point in ledger.retention.points:
        for g, held in enumerate(ledger.retention.needed_pages(point.row, point.tokens)):
            if (held < 0).any():
                raise IntegrityError(f"the resume point at {point.tokens} tokens has lost a page of group number {g}")
            needs[g][held] += 1
    for g, (counted, kept) in enumerate(zip(needs, ledger.retention.needs, strict=True)):
        if (counted != kept).any():
            raise IntegrityError(f"group number {g}: the pages resume points need are counted wrong")


def _check_sequence(ledger: Ledger, seq: Sequence) -> None:
    unit = ledger.layout.unit_tokens
    if not 0 <= seq.firm <= seq.reserved or (seq.firm == 0 and seq.spare):
        raise IntegrityError(f"{seq!r} holds pages for guesses that nobody makes")
    units = 0 if seq.private else seq.length // unit
    if seq.units != units:
        raise IntegrityError(f"{seq!r} stands on {seq.units} entry rows, not {units}")
    if seq.units:
        rows = ledger.index.chain(int(seq.rows[seq.units - 1]))
        if (rows != seq.rows[: seq.units]).any() or ledger.index.row(seq.digests[seq.units - 1]) != rows[-1]:
            raise IntegrityError(f"{seq!r} stands on rows of another prefix")
    for g, group in enumerate(ledger.layout.groups):
        if group.is_state:
            continue
        table = seq.table(g)
        if table.end * group.page_tokens < seq.length:
            raise IntegrityError(f"{seq!r} lacks pages of group {group.name!r}")
        for index in table.held().tolist():
            row = int(ledger.index.row_of[g][table.pages[index]])
            if row >= 0 and seq.private:
                raise IntegrityError(f"{seq!r} is private but holds a published page of group {group.name!r}")
            last_unit = (index + 1) * group.page_tokens // unit - 1
            if row >= 0 and last_unit < seq.units and row != seq.rows[last_unit]:
                raise IntegrityError(f"{seq!r} holds a page of another prefix in group {group.name!r}")
