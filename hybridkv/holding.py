"""How many pages a running request holds, and the longest one that a pool can hold."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hybridkv.entries import LayerGroup
from hybridkv.layout import Layout
from hybridkv.rules import Lengths, page_ranges

_SCAN = 2**20
_MOST = 2**40


def held_pages(group: LayerGroup, lengths: Lengths) -> NDArray[np.int64]:
    """Pages of a group that a request holds once it has computed `lengths` tokens, checkpoints aside.

    They are the pages the next token looks at, and the half-full page it will be written to.
    """
    if group.is_state:
        return np.asarray(lengths > 0, np.int64)
    return _pages(group, lengths, lengths % group.page_tokens > 0)


def step_pages(group: LayerGroup, lengths: Lengths) -> NDArray[np.int64]:
    """Pages of a group that a request of `lengths` tokens holds while it computes the next one."""
    if group.is_state:
        return np.ones_like(lengths)
    return _pages(group, lengths, np.ones(lengths.shape, np.bool_))


def tokens_that_fit(layout: Layout) -> int:
    """The longest request that can be computed alone in the pool, one token at a time.

    A model whose layers all forget has no such limit; then the answer is 2**40.
    """
    low, high = 0, 1
    while high < _MOST and _fits(layout, np.array([high], np.int64))[0]:
        low, high = high, 2 * high
    if high == _MOST:
        low = high
    while low + 1 < high:
        middle = (low + high) // 2
        if _fits(layout, np.array([middle], np.int64))[0]:
            low = middle
        else:
            high = middle
    # Holdings grow, but not at every step: before a page boundary a window takes one page more. Look at the first
    # step of each unit where the pool is nearly full, and where windows and chunks fill for the first time.
    unit = layout.unit_tokens
    for start in (1, max(1, low - _SCAN)):
        lengths = np.arange(start - (start - 1) % unit, min(start + _SCAN, low) + 1, unit, dtype=np.int64)
        failing = np.flatnonzero(~_fits(layout, lengths))
        if len(failing):
            return int(lengths[failing[0]]) - 1
    return low


def _fits(layout: Layout, lengths: Lengths) -> NDArray[np.bool_]:
    """Whether the step that computes the last of `lengths` tokens fits the empty pool."""
    slabs = np.zeros_like(lengths)
    for plan in layout.plans:
        slabs += -(-step_pages(plan.group, lengths - 1) // plan.per_slab)
    return np.asarray(slabs <= layout.slabs)


def _pages(group: LayerGroup, lengths: Lengths, with_next: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Pages that are needed after `lengths` tokens and, where `with_next`, the page the next token goes to."""
    following = lengths // group.page_tokens
    count = np.zeros_like(lengths)
    extra = with_next
    for start, stop in page_ranges(group.rule, lengths, group.page_tokens):
        count += stop - start
        extra = extra & ~((start <= following) & (following < stop))
    return count + extra
