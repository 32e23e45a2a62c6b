"""Taking pages for the next tokens: all groups or none, and what may be given up to make room."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from collections.abc import Sequence as Seq

import numpy as np

from hybridkv.errors import OutOfPages, UsageError
from hybridkv.ledger import Ledger
from hybridkv.pages import Pages
from hybridkv.rules import page_ranges
from hybridkv.sequence import NO_PAGE, Sequence, Snapshot, StatePages, TokenPages

Wants = Seq[tuple[Sequence, int]]


def reserve(ledger: Ledger, running: Mapping[int, Sequence], wants: Wants, keep: Collection[Sequence] = ()) -> None:
    """Pages for the next tokens of these distinct sequences, with a page for every checkpoint on the way.

    Under pressure it first goes without checkpoints, then without the decode snapshots of running requests, then
    takes a hit's own checkpoint instead of copying it: what is left is exactly what must be held. Snapshots go one by
    one, those of the longest open requests first, and those of the sequences in `keep` not at all.

    Raises:
        OutOfPages: that does not fit either. Nothing was changed.
        UsageError: no whole number of tokens, or below 1.
    """
    for _, n in wants:
        if n < 1 or n != int(n):
            raise UsageError(f"reserve a whole number of at least 1 token, got {n}")
    sweep(ledger, [seq for seq, _ in wants])
    pool = ledger.pool
    checkpoints = [_checkpoints(ledger, seq, n) for seq, n in wants]
    demand = _demand(ledger, wants, checkpoints)
    if not pool.fits_live(demand):
        checkpoints = [[] for _ in wants]
        demand = _demand(ledger, wants, checkpoints)
    if not pool.fits_live(demand):
        _make_room(ledger, running, wants, demand, keep)
        demand = _demand(ledger, wants, checkpoints)
    ledger.fund(demand)
    for (seq, n), boundaries in zip(wants, checkpoints, strict=True):
        _take(ledger, seq, n, boundaries)
        drop_spare(ledger, seq)
        seq.reserved = n


def begin_decode(ledger: Ledger, seqs: Seq[Sequence]) -> None:
    """One more token of each of these sequences, which have the pages for it."""
    for seq in seqs:
        if seq.firm:
            drop_spare(ledger, seq)
        seq.reserved = 1


def reserve_drafts(ledger: Ledger, seq: Sequence, firm: int, drafts: int, interval: int | None) -> int:
    """Pages for `firm` tokens and guesses behind them, with a second state page that only right guesses end up in.

    Args:
        ledger: the books.
        seq: the sequence.
        firm: tokens that are certain.
        drafts: guesses asked for.
        interval: states are copied aside at its multiples, so that guesses must not jump over one.

    Returns:
        The guesses there is room for. None are taken if that asks for more than free and cached pages.

    Raises:
        UsageError: a number below 1.
    """
    if firm < 1 or drafts < 1 or firm != int(firm) or drafts != int(drafts):
        raise UsageError(f"reserve whole numbers of at least 1 token and 1 draft, got {firm} and {drafts}")
    if ledger.states and interval:
        drafts = min(drafts, -(seq.length + firm) % interval)
    if not drafts:
        return 0
    sweep(ledger, [seq])
    wants = [(seq, firm + drafts)]
    checkpoints = _checkpoints(ledger, seq, firm + drafts)
    demand = _demand(ledger, wants, [checkpoints])
    for g in ledger.states:
        demand[g] += g not in seq.spare
    if not ledger.pool.fits_live(demand):
        return 0
    ledger.fund(demand)
    _take(ledger, seq, firm + drafts, checkpoints)
    for g in ledger.states:
        if g not in seq.spare:
            seq.spare[g] = ledger.pool.groups[g].take_one()
    seq.firm = firm
    seq.reserved = firm + drafts
    return drafts


def token_pages(ledger: Ledger, seq: Sequence, group: int) -> TokenPages:
    """Where the tokens of a token group of a sequence lie."""
    table = seq.table(group)
    pages = table.held()
    return TokenPages(pages, ledger.pool.groups[group].slot[table.pages[pages]])


def state_pages(ledger: Ledger, seq: Sequence, group: int) -> StatePages:
    """Where a state group of a sequence is read and written in the step under way.

    Raises:
        UsageError: nothing was reserved yet, so there is no working state.
    """
    if seq.working[group] < 0:
        raise UsageError(f"{seq!r} has no working state before its first reservation")
    slot = ledger.pool.groups[group].slot
    stop = seq.length + seq.reserved
    saves = [(at, pages[group]) for at, pages in sorted(seq.pending.items()) if at <= stop]
    last = working = seq.working[group]
    if seq.firm:
        saves.append((seq.length + seq.firm, working))
        last = seq.spare[group]
    return StatePages(int(slot[working]), tuple((at, int(slot[page])) for at, page in saves), int(slot[last]))


def adopt_spare(ledger: Ledger, seq: Sequence) -> None:
    """All guesses were right: their states are the working ones."""
    for g, page in seq.spare.items():
        ledger.release_one(g, seq.working[g])
        seq.working[g] = page
    seq.spare = {}


def drop_spare(ledger: Ledger, seq: Sequence) -> None:
    """Let go of the states behind guesses, and of the guesses."""
    for g, page in seq.spare.items():
        ledger.release_one(g, page)
    seq.spare = {}
    seq.firm = 0


def shrink(ledger: Ledger, seq: Sequence, tokens: int) -> None:
    """Give token pages back that were taken for positions from `tokens` on."""
    for g, group in enumerate(ledger.layout.groups):
        if group.is_state:
            continue
        table = seq.table(g)
        end = -(-tokens // group.page_tokens)
        if table.end > end:
            ledger.release(g, table.cut(end))
        seq.capacity = min(seq.capacity, table.end * group.page_tokens)


def sweep(ledger: Ledger, seqs: Seq[Sequence]) -> None:
    """Let go of pages the next token of each sequence no longer needs."""
    lengths = np.array([seq.length for seq in seqs], np.int64)
    for g in ledger.windows:
        group = ledger.layout.groups[g]
        ranges = [
            (first.tolist(), last.tolist()) for first, last in page_ranges(group.rule, lengths, group.page_tokens)
        ]
        for i, seq in enumerate(seqs):
            table = seq.table(g)
            stop = start = 0
            for first, last in ranges:
                start = min(first[i], table.end)
                begin = max(stop, min(table.swept, start))
                if start > begin:
                    _let_go(ledger, g, table.pages[begin:start])
                stop = last[i]
            table.swept = start


def _let_go(ledger: Ledger, group: int, gap: Pages) -> None:
    if len(gap) == 1 and gap[0] >= 0:
        ledger.retention.tick()
        ledger.release_one(group, int(gap[0]))
    elif len(held := gap[gap >= 0]):
        ledger.retention.tick()
        ledger.release(group, held)
    gap[:] = NO_PAGE


def snapshot(ledger: Ledger, seq: Sequence) -> None:
    """Copy the working states aside, over the copy before; skipped where there is no room."""
    states = ledger.states
    if not states:
        return
    if seq.snapshot is None:
        demand = [int(group.is_state) for group in ledger.layout.groups]
        if not ledger.pool.fits_live(demand):
            return
        ledger.fund(demand)
        pages = {g: ledger.pool.groups[g].take_one() for g in states}
    else:
        pages = seq.snapshot.pages
    for g in states:
        ledger.refresh_copy(g, seq.working[g], pages[g])
    seq.snapshot = Snapshot(seq.length, pages)


def _checkpoints(ledger: Ledger, seq: Sequence, n: int) -> list[int]:
    if not ledger.states:
        return []
    return [at for at in seq.plan if seq.length < at <= seq.length + n and at not in seq.pending]


def _demand(ledger: Ledger, wants: Wants, checkpoints: Seq[list[int]]) -> list[int]:
    """New pages by group."""
    demand = []
    for g, group in enumerate(ledger.layout.groups):
        more = 0
        written: list[int] = []
        for (seq, n), boundaries in zip(wants, checkpoints, strict=True):
            if group.is_state:
                more += len(boundaries) + (seq.working[g] < 0)
                written += [seq.working[g]] if seq.working[g] >= 0 else []
            else:
                table = seq.table(g)
                more += max(-(-(seq.length + n) // group.page_tokens) - table.end, 0)
                tail = _shared_tail(ledger, seq, g)
                written += [int(table.pages[tail])] if tail >= 0 else []
        demand.append(more + _copies(ledger, g, written))
    return demand


def _copies(ledger: Ledger, group: int, written: list[int]) -> int:
    """Private copies needed before these pages are written, one mention per writer."""
    if not written:
        return 0
    copies = 0
    for page, writers in Counter(written).items():
        published = ledger.index.row_of[group][page] >= 0
        # The last holder of an unpublished page writes to it in place, once the others have their copies.
        copies += writers if published else min(writers, int(ledger.pool.groups[group].refs[page]) - 1)
    return copies


def _shared_tail(ledger: Ledger, seq: Sequence, group: int) -> int:
    """The index of the half-full page the next token falls in, if others see it too; else -1."""
    index, within = divmod(seq.length, ledger.layout.groups[group].page_tokens)
    if not within:
        return -1
    return -1 if ledger.is_writable(group, int(seq.table(group).pages[index])) else index


def _make_room(
    ledger: Ledger, running: Mapping[int, Sequence], wants: Wants, demand: list[int], keep: Collection[Sequence]
) -> None:
    """Give up snapshots and claim hit checkpoints, if that makes `demand` fit; else raise and change nothing."""
    owners = [seq for seq in running.values() if seq.snapshot is not None and seq not in keep]
    claims = [
        (g, seq.working[g])
        for seq, _ in wants
        for g, group in enumerate(ledger.layout.groups)
        if group.is_state and seq.working[g] >= 0 and _is_claimable(ledger, g, seq.working[g])
    ]
    relieved = demand[:]
    for g, group in enumerate(ledger.layout.groups):
        relieved[g] -= len(owners) * group.is_state + sum(g == other for other, _ in claims)
    if not ledger.pool.fits_live(relieved):
        asked, live = ledger.bytes_of(demand), ledger.live_bytes()
        total = ledger.layout.pool_bytes
        raise OutOfPages(
            f"{asked:,} bytes of pages were asked for, running requests hold {live:,} of the pool's {total:,}; "
            "close or preempt a request, reserve fewer tokens at a time, or make the pool larger",
            requested=asked,
            live=live,
            pool=total,
        )
    for seq in owners:
        if ledger.pool.fits_live(demand):
            return
        drop_snapshot(ledger, seq)
    if not ledger.pool.fits_live(demand):
        for g, page in claims:
            ledger.claim(g, page)


def drop_snapshot(ledger: Ledger, seq: Sequence) -> None:
    """Give up a decode snapshot."""
    if seq.snapshot is not None:
        for g, page in seq.snapshot.pages.items():
            ledger.release_one(g, page)
        seq.snapshot = None


def _is_claimable(ledger: Ledger, group: int, page: int) -> bool:
    return bool(ledger.pool.groups[group].refs[page] == 1 and ledger.index.row_of[group][page] >= 0)


def _take(ledger: Ledger, seq: Sequence, n: int, checkpoints: list[int]) -> None:
    end = seq.length + n
    capacity = 1 << 62
    for g, group in enumerate(ledger.layout.groups):
        if group.is_state:
            page = seq.working[g]
            if page < 0:
                seq.working[g] = ledger.pool.groups[g].take_one()
            elif not ledger.is_writable(g, page):
                seq.working[g] = ledger.copy_page(g, page)
        else:
            table = seq.table(g)
            tail = _shared_tail(ledger, seq, g)
            if tail >= 0:
                table.pages[tail] = ledger.copy_page(g, int(table.pages[tail]))
            more = -(-end // group.page_tokens) - table.end
            if more == 1:
                table.append_one(ledger.pool.groups[g].take_one())
            elif more > 0:
                table.append(ledger.take(g, more))
            capacity = min(capacity, table.end * group.page_tokens)
    for at in checkpoints:
        seq.pending[at] = {g: ledger.pool.groups[g].take_one() for g in ledger.states}
    later = [at for at in seq.plan if at > end]
    seq.capacity = min(capacity, later[0] - 1) if later else capacity
