"""What a layer is told about a packed pass: which tokens belong to which request, and where each finds its past.

A packed pass lays the spans of many requests end to end. One-token spans come first, [0, singles), so that each kind
of layer can run all of them as one batch; longer spans ("chunks") follow, one after the other.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hybridkv.rules import Rule
from hybridkv.storage import PoolStorage, TokenIndex

Ints = NDArray[np.int64]

_KEPT_ITEMS = 1 << 23
"""Masks of one step that are kept for all layers of a group, in items."""


class Entry:
    """The memory of one layer in one group.

    Attributes:
        views: its parts.
    """

    __slots__ = ("_entry", "_group", "_storage", "views")

    def __init__(self, storage: PoolStorage, group: int, entry: int) -> None:
        self.views = storage.views(group, entry)
        self._storage = storage
        self._group = group
        self._entry = entry

    def read_tokens(self, part: int, index: TokenIndex) -> Tensor:
        return self._storage.read_tokens(self._group, self._entry, part, index)

    def read_pair(self, part: int, index: TokenIndex, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Two adjacent parts of the tokens at `index`, a copy of each: [n, *shape]."""
        view = self.views[part]
        if view.rows is None or view.apart is None:
            return self.read_tokens(part, index).to(dtype), self.read_tokens(part + 1, index).to(dtype)
        rows = view.rows.index_select(0, index.pairs(view.per_slot, view.apart))
        both = rows.view(2, -1, *view.pages.shape[2:]).to(dtype)
        return both[0], both[1]

    def write_tokens(self, part: int, index: TokenIndex, values: Tensor) -> None:
        self._storage.write_tokens(self._group, self._entry, part, index, values)

    def read_states(self, part: int, slots: Tensor) -> Tensor:
        return self._storage.read_states(self._group, self._entry, part, slots)

    def write_states(self, part: int, slots: Tensor, values: Tensor) -> None:
        self._storage.write_states(self._group, self._entry, part, slots, values)


class StateChunk(NamedTuple):
    """A span of two or more tokens in a state group.

    Attributes:
        start: first packed token.
        slot: int64 [1], the working state, or None for a span that starts a sequence and so starts from zeros.
        cuts: (stop, slots) pairs, ascending: after packed token `stop - 1` the state goes to each of the slots. The
            last one is the end of the span.
    """

    start: int
    slot: Tensor | None
    cuts: tuple[tuple[int, Tensor], ...]


@dataclass(frozen=True, slots=True)
class StatePlan:
    """Where one state group reads and writes in this step.

    Attributes:
        singles: number of one-token spans.
        slots: int64 [singles], their working states.
        fresh: int64 [m], the one-token spans that start from zeros, or None.
        saves: (which of the one-token spans, slots) that also keep their new state elsewhere, or None.
        chunks: the longer spans.
    """

    singles: int
    slots: Tensor
    fresh: Tensor | None
    saves: tuple[Tensor, Tensor] | None
    chunks: tuple[StateChunk, ...]


class Bucket(NamedTuple):
    """One-token spans of similar length, [start, stop), that attend as one batch.

    `tokens` holds [stop - start, keys] of them row by row. Short rows are padded with their own last token, because the
    rows behind it were never written. `mask` is additive [stop - start, 1, 1, keys], or None without padding.
    """

    start: int
    stop: int
    tokens: TokenIndex
    mask: Tensor | None


class InPlace(NamedTuple):
    """A one-token span that reads most of its past where it lies.

    Attributes:
        token: its packed token.
        runs: slots [start, stop) of pages it needs all of; adjacent ones are one run.
        rest: the tokens of other pages it needs, its own among them.
    """

    token: int
    runs: tuple[tuple[int, int], ...]
    rest: TokenIndex


class Block(NamedTuple):
    """Queries of one chunk that attend in one call.

    Attributes:
        start: first packed token.
        stop: past the last packed token.
        columns: the keys they may see, as a slice or a list of positions in the chunk's keys.
        causal: keys and queries are the same tokens and each sees all before it, so no mask is needed.
    """

    start: int
    stop: int
    columns: slice | Tensor
    causal: bool


@dataclass(slots=True)
class TokenChunk:
    """A span of two or more tokens in a token group.

    Attributes:
        start: first packed token.
        stop: past the last packed token.
        history: where its keys lie, past and own, or None if its own tokens are all there is.
        blocks: its queries, cut so that masks stay small and a sliding layer never scores the whole square.
    """

    start: int
    stop: int
    history: TokenIndex | None
    blocks: tuple[Block, ...]
    _positions: Ints
    _keys: Ints
    _rule: Rule
    _dtype: torch.dtype
    _device: torch.device
    _masks: dict[int, Tensor] = field(default_factory=dict)

    def mask(self, block: Block) -> Tensor | None:
        """Additive mask [queries, keys] of a block, or None where all of it may be seen or `causal` says it all."""
        if block.causal or block.stop - block.start == 1:
            return None
        mask = self._masks.get(block.start)
        if mask is None:
            mask = self._build(block)
            if sum(kept.numel() for kept in self._masks.values()) + mask.numel() <= _KEPT_ITEMS:
                self._masks[block.start] = mask
        return mask

    def _build(self, block: Block) -> Tensor:
        asked = self._positions[block.start - self.start : block.stop - self.start]
        keys = torch.from_numpy(self._keys).to(self._device)[block.columns]
        queries = torch.from_numpy(asked).to(self._device)[:, None]
        seen = keys == queries
        for bounds in self._rule.needed(asked):
            start, stop = (torch.from_numpy(bound).to(self._device)[:, None] for bound in bounds)
            seen = seen | ((keys >= start) & (keys < stop))
        return torch.zeros(seen.shape, dtype=self._dtype, device=self._device).masked_fill_(~seen, -torch.inf)


@dataclass(frozen=True, slots=True)
class TokenPlan:
    """Where one token group reads and writes in this step.

    Attributes:
        own: where the pass's tokens are written, in packed order.
        buckets: the one-token spans whose past is gathered.
        in_place: the other one-token spans.
        chunks: the longer spans.
    """

    own: TokenIndex
    buckets: tuple[Bucket, ...]
    in_place: tuple[InPlace, ...]
    chunks: tuple[TokenChunk, ...]
