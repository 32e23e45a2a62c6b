"""What becomes of computed tokens: rows, published pages, checkpoints, resume points, forks and going back."""

from __future__ import annotations

import numpy as np

from hybridkv.hashing import image_extras, unit_digest, unit_digests
from hybridkv.ledger import Ledger
from hybridkv.lookup import hold_prefix, release_pages, resumable_units
from hybridkv.rules import page_ranges
from hybridkv.sequence import NO_PAGE, Sequence


def advance(ledger: Ledger, seq: Sequence, n: int, algorithm: str) -> None:
    """Count `n` more tokens as computed and publish what that completes."""
    seq.length += n
    seq.reserved = 0
    if seq.private:
        return
    units = seq.length // ledger.layout.unit_tokens
    if units > seq.units:
        _extend_digests(ledger, seq, units, algorithm)
        _publish_units(ledger, seq, units)
    if seq.plan and seq.plan[0] <= seq.length:
        _publish_checkpoints(ledger, seq)
        _make_points(ledger, seq)


def keep_end(ledger: Ledger, seq: Sequence) -> None:
    """Make the last boundary that can be resumed after into a resume point, before the sequence lets go."""
    if seq.private:
        return
    unit = ledger.layout.unit_tokens
    tokens = seq.length - seq.length % ledger.layout.boundary_tokens
    if ledger.states:
        # A step under way may have written to the working states, so they stand for a boundary only between steps.
        if seq.length == tokens and not seq.reserved and tokens:
            _publish_states(ledger, seq, tokens, {g: seq.working[g] for g in ledger.states})
            seq.working = [NO_PAGE] * len(seq.working)
        elif seq.snapshot is not None:
            tokens = seq.snapshot.tokens
            _publish_states(ledger, seq, tokens, seq.snapshot.pages)
            seq.snapshot = None
    if tokens:
        row = int(seq.rows[tokens // unit - 1])
        if ledger.retention.has(row):
            ledger.retention.refresh(seq.id)
        else:
            ledger.retention.add(row, tokens, seq.id)


def fork(ledger: Ledger, seq: Sequence, id: int) -> Sequence:
    """A copy of `seq` that holds the same pages up to its length."""
    child = Sequence(id, seq.tokens[:], seq.seed, len(seq.tables), private=seq.private)
    child.adapter, child.images, child.extras, child.digests = seq.adapter, seq.images, seq.extras, seq.digests[:]
    child.hit_tokens, child.length, child.prompt_tokens = seq.hit_tokens, seq.length, seq.prompt_tokens
    child.set_rows(seq.rows[: seq.units], len(seq.digests))
    child.plan = seq.plan[:]
    ledger.index.hold(int(seq.rows[seq.units - 1]) if seq.units else -1)
    for g, group in enumerate(ledger.layout.groups):
        if group.is_state:
            child.working[g] = seq.working[g]
            if seq.working[g] >= 0:
                ledger.acquire(g, np.array([seq.working[g]], np.int64))
        else:
            table = seq.table(g).copy()
            table.cut(-(-seq.length // group.page_tokens))
            child.tables[g] = table
            ledger.acquire(g, table.pages[table.held()])
    seq.capacity = child.capacity = 0
    return child


def truncate(ledger: Ledger, seq: Sequence, n: int) -> int:
    """Cut `seq` to `n` tokens, or to the longest shorter prefix that can be resumed after; returns the length."""
    unit = ledger.layout.unit_tokens
    del seq.tokens[n:]
    seq.prompt_tokens = min(seq.prompt_tokens, n)
    seq.plan = [tokens for tokens in seq.plan if tokens <= n]
    seq.images = tuple(image for image in seq.images if image[0] < n)
    seq.extras = image_extras(seq.images, unit)
    _drop_ahead(ledger, seq)
    old = int(seq.rows[seq.units - 1]) if seq.units else -1
    units = min(n // unit, seq.units)
    del seq.digests[n // unit :]
    if _held_exactly(ledger, seq, n):
        _cut(ledger, seq, n)
        seq.units = units
        ledger.index.hold(int(seq.rows[units - 1]) if units else -1)
    else:
        if seq.snapshot is not None:
            _publish_states(ledger, seq, *seq.snapshot)
            seq.snapshot = None
        rows = seq.rows[:units].copy()
        hit = resumable_units(ledger.layout, ledger.index, rows, units)
        release_pages(ledger, seq, keep=True)
        hold_prefix(ledger, seq, rows[:hit])
        seq.hit_tokens = min(seq.hit_tokens, seq.length)
    # Past the new end others may replace the rows, and with them the resume points.
    seq.made_points = [row for row in seq.made_points if ledger.index.depth[row] * unit <= seq.length]
    ledger.index.unhold(old)
    seq.reserved = seq.capacity = 0
    return seq.length


def _extend_digests(ledger: Ledger, seq: Sequence, units: int, algorithm: str) -> None:
    done = len(seq.digests)
    if units > done:
        unit = ledger.layout.unit_tokens
        previous = seq.digests[-1] if done else seq.seed
        if units == done + 1:
            last = seq.token_ids(done * unit, units * unit)
            seq.digests.append(unit_digest(previous, last, seq.extras.get(done), algorithm))
            return
        fresh = seq.token_ids(done * unit, units * unit)
        seq.digests += unit_digests(previous, fresh, unit, seq.extras, algorithm, done)


def _publish_units(ledger: Ledger, seq: Sequence, units: int) -> None:
    """Rows for the units completed since the last call, and the pages that they fill."""
    index = ledger.index
    old = seq.units
    parent = int(seq.rows[old - 1]) if old else -1
    if units == old + 1:
        _publish_unit(ledger, seq, parent)
        return
    matched = index.match(seq.digests[:units], old)
    last = parent
    rows = np.zeros(0, np.int64)
    if matched > old:
        last = index.row(seq.digests[matched - 1])
        rows = index.chain(last, old)
    if units > matched:
        rows = np.concatenate((rows, index.extend(last, seq.digests[matched:units])))
    seq.append_rows(rows)
    index.hold(int(rows[-1]))
    index.unhold(parent)
    for g, group in enumerate(ledger.layout.groups):
        if group.is_state:
            continue
        size = group.page_tokens // ledger.layout.unit_tokens
        first, stop = old // size, units // size
        if stop > first:
            table = seq.table(g)
            ends = seq.rows[(first + 1) * size - 1 : stop * size : size]
            held = table.pages[first:stop] >= 0
            pages = table.pages[first:stop][held]
            table.pages[first:stop][held] = ledger.publish(g, ends[held], pages)


def _publish_unit(ledger: Ledger, seq: Sequence, parent: int) -> None:
    """`_publish_units` for the one unit a decoding request has completed."""
    index = ledger.index
    row = index.row(seq.digests[seq.units])
    if row < 0:
        row = index.extend_one(parent, seq.digests[seq.units])
    seq.append_row(row)
    index.hold(row)
    index.unhold(parent)
    tokens = seq.units * ledger.layout.unit_tokens
    for g, group in enumerate(ledger.layout.groups):
        if not group.is_state and tokens % group.page_tokens == 0:
            pages = seq.table(g).pages
            last = tokens // group.page_tokens - 1
            if pages[last] >= 0:
                pages[last] = ledger.publish_one(g, row, int(pages[last]))


def _publish_checkpoints(ledger: Ledger, seq: Sequence) -> None:
    for tokens in [tokens for tokens in seq.pending if tokens <= seq.length]:
        _publish_states(ledger, seq, tokens, seq.pending.pop(tokens))


def _publish_states(ledger: Ledger, seq: Sequence, tokens: int, pages: dict[int, int]) -> None:
    """Publish state pages at a boundary and let go of them: from now on they are cached."""
    row = seq.rows[tokens // ledger.layout.unit_tokens - 1 :][:1]
    for g, page in pages.items():
        kept = ledger.publish(g, row, np.array([page], np.int64))
        ledger.release(g, kept)


def _make_points(ledger: Ledger, seq: Sequence) -> None:
    while seq.plan and seq.plan[0] <= seq.length:
        tokens = seq.plan.pop(0)
        row = int(seq.rows[tokens // ledger.layout.unit_tokens - 1])
        known = ledger.retention.has(row)
        if ledger.retention.add(row, tokens, seq.id) and not known:
            seq.made_points.append(row)


def _drop_ahead(ledger: Ledger, seq: Sequence) -> None:
    """Let go of the states that an unfinished step was to write."""
    for pages in (*seq.pending.values(), seq.spare):
        for g, page in pages.items():
            ledger.release_one(g, page)
    seq.pending, seq.spare, seq.firm = {}, {}, 0


def _held_exactly(ledger: Ledger, seq: Sequence, n: int) -> bool:
    """Whether the sequence itself holds all it needs to go on from `n` tokens."""
    length = np.array([n], np.int64)
    for g, group in enumerate(ledger.layout.groups):
        if group.is_state:
            if not _working_is_at(seq, n) and (seq.snapshot is None or seq.snapshot.tokens != n):
                return False
        else:
            table = seq.table(g)
            index, within = divmod(n, group.page_tokens)
            if within and table.pages[index] < 0:
                return False
            for start, stop in page_ranges(group.rule, length, group.page_tokens):
                if (table.pages[start[0] : stop[0]] < 0).any():
                    return False
    return True


def _working_is_at(seq: Sequence, n: int) -> bool:
    """Whether the working states are those after `n` tokens: a step under way may have written to them."""
    return n == seq.length and not seq.reserved


def _cut(ledger: Ledger, seq: Sequence, n: int) -> None:
    for g, group in enumerate(ledger.layout.groups):
        if not group.is_state:
            table = seq.table(g)
            dropped = table.cut(-(-n // group.page_tokens))
            ledger.release(g, dropped)
    if seq.snapshot is not None and not _working_is_at(seq, n):
        for g, page in seq.snapshot.pages.items():
            ledger.release_one(g, seq.working[g])
            seq.working[g] = page
        seq.snapshot = None
    seq.length = n
