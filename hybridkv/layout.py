"""Groups and a byte budget become strides and a slab size.

A slab belongs to one group at a time, so every group's stride must divide it. Attention pages keep their exact size;
a state page may be padded by under 1 % so that a whole number of them fills a slab. Page slot i of a group then sits
at byte `i * stride` of the pool, and each layer's tensor is one strided view.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from hybridkv.entries import LayerGroup
from hybridkv.errors import ConfigError, PoolTooSmall

MAX_PADDING = 0.01
"""Largest share of a stride that may be padding."""

SLAB_SHARE = 64
"""A slab larger than 1/64 of the pool makes groups fight over too few slabs."""

MAX_SLABS = 8192
"""More slabs than this make bookkeeping slower without making sharing finer."""

ALIGN = 16
"""Bytes every stride is a multiple of, so that typed views over the pool are aligned."""


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """Where the pages of one group lie.

    Attributes:
        stride: bytes from one page slot to the next, over the whole pool.
        per_slab: page slots in one slab.
        offsets: [entry][part], bytes from the start of a page to the tensor of that layer: [page_tokens, *shape] for
            a token page, [*shape] for a state page, contiguous.
    """

    group: LayerGroup
    stride: int
    per_slab: int
    offsets: tuple[tuple[int, ...], ...]

    @property
    def padding(self) -> float:
        """Share of the stride that holds nothing."""
        return 1 - self.group.page_bytes / self.stride


@dataclass(frozen=True, slots=True)
class Layout:
    """The plan of one pool.

    Attributes:
        plans: one per group. A state group may have been split by layers, so use these groups, not the ones planned.
        slab_bytes: the unit of ownership.
        slabs: how many the pool has.
        unit_tokens: tokens per hash unit; every prefix boundary is a multiple.
        groups: the groups of the plans, in order.
    """

    plans: tuple[GroupPlan, ...]
    slab_bytes: int
    slabs: int
    unit_tokens: int
    groups: tuple[LayerGroup, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "groups", tuple(plan.group for plan in self.plans))

    @property
    def pool_bytes(self) -> int:
        return self.slab_bytes * self.slabs

    @property
    def boundary_tokens(self) -> int:
        """Tokens between boundaries at which pages of every group can end: the common multiple of page sizes."""
        return math.lcm(self.unit_tokens, *(group.page_tokens for group in self.groups if group.page_tokens))

    def slots(self, group: int) -> int:
        """Page slots of a group over the whole pool."""
        return self.slabs * self.plans[group].per_slab


class _Candidate(NamedTuple):
    slab_bytes: int
    per_slab: tuple[int, ...]
    padding: float

    def rank(self) -> tuple[bool, int]:
        return self.padding > MAX_PADDING, self.slab_bytes


def plan_layout(groups: Sequence[LayerGroup], pool_bytes: int, unit_tokens: int = 16) -> Layout:
    """Choose slab size and strides; split state groups by layers where a slab would be too large for the pool.

    Args:
        groups: the layer groups of a model.
        pool_bytes: the budget; the pool uses the largest whole number of slabs within it.
        unit_tokens: hash granularity in tokens; each attention page must be a multiple of it.

    Raises:
        ConfigError: no groups, or a page size that is no multiple of the unit.
        PoolTooSmall: the budget has no room for one slab per group.
    """
    if not groups:
        raise ConfigError("a layout needs at least one layer group")
    if isinstance(groups, str) or not all(isinstance(group, LayerGroup) for group in groups):
        raise ConfigError(f"layer groups come from layer_groups() or group_entries(); got {groups!r}")
    if isinstance(unit_tokens, bool) or not isinstance(unit_tokens, int) or unit_tokens < 1:
        raise ConfigError(f"unit_tokens must be a whole number of at least 1, got {unit_tokens!r}")
    for group in groups:
        if not group.is_state and group.page_tokens % unit_tokens:
            raise ConfigError(
                f"group {group.name!r} has pages of {group.page_tokens} tokens, which is no multiple of the hash unit "
                f"of {unit_tokens}; use a multiple of {unit_tokens} or a smaller unit_tokens"
            )
    best: tuple[tuple[LayerGroup, ...], _Candidate] | None = None
    for split in _splits(tuple(groups)):
        candidate = _smallest_slab(split, pool_bytes)
        if candidate is None:
            continue
        if best is None or candidate.rank() < best[1].rank():
            best = split, candidate
        if candidate.padding <= MAX_PADDING and candidate.slab_bytes * SLAB_SHARE <= pool_bytes:
            break
    if best is None:
        smallest = min(len(split) * max(map(_page_bytes, split)) for split in _splits(tuple(groups)))
        raise PoolTooSmall(
            f"a pool of {pool_bytes:,} bytes cannot hold one slab for each of {len(groups)} layer groups; "
            f"this layout needs at least {smallest:,} bytes"
        )
    chosen, candidate = best
    plans = tuple(
        GroupPlan(group, candidate.slab_bytes // count, count, _offsets(group))
        for group, count in zip(chosen, candidate.per_slab, strict=True)
    )
    return Layout(plans, candidate.slab_bytes, pool_bytes // candidate.slab_bytes, unit_tokens)


def _splits(groups: tuple[LayerGroup, ...]) -> Iterator[tuple[LayerGroup, ...]]:
    """The groups as they are, then with state groups cut into 2, 3, ... groups of fewer layers each."""
    most = max((group.layers for group in groups if group.is_state), default=1)
    done = set()
    for ways in range(1, most + 1):
        split: list[LayerGroup] = []
        for group in groups:
            split.extend(_split(group, ways) if group.is_state else [group])
        sizes = tuple(group.layers for group in split)
        if sizes not in done:
            done.add(sizes)
            yield tuple(split)


def _split(group: LayerGroup, ways: int) -> list[LayerGroup]:
    ways = min(ways, group.layers)
    if ways == 1:
        return [group]
    bounds = [group.layers * i // ways for i in range(ways + 1)]
    return [
        group.with_entries(f"{group.name}.{i}", group.entries[start:stop])
        for i, (start, stop) in enumerate(pairwise(bounds))
    ]


def _smallest_slab(groups: Sequence[LayerGroup], pool_bytes: int) -> _Candidate | None:
    """The smallest slab that every stride divides with at most 1 % padding in any of them, if it fits the pool."""
    sizes = [_page_bytes(group) for group in groups]
    exact = [size for group, size in zip(groups, sizes, strict=True) if not group.is_state] or [max(sizes)]
    least = max(max(sizes), pool_bytes // MAX_SLABS)
    most = min(pool_bytes // len(groups), 64 * max(sizes) + least)
    best: _Candidate | None = None
    # Multiples of the common multiple keep attention pages exact; where that is huge, the largest page is the step.
    for step in (math.lcm(*exact), max(sizes)):
        for slab in range(-(-least // step) * step, most + 1, step):
            candidate = _fit(groups, sizes, slab)
            if candidate.padding <= MAX_PADDING:
                return candidate
            if best is None or candidate.rank() < best.rank():
                best = candidate
    return best


def _fit(groups: Sequence[LayerGroup], sizes: Sequence[int], slab: int) -> _Candidate:
    counts: list[int] = []
    worst = 0.0
    for group, size in zip(groups, sizes, strict=True):
        count = slab // size
        while slab % count or slab // count % ALIGN:
            count -= 1
        counts.append(count)
        worst = max(worst, 1 - group.page_bytes * count / slab)
    return _Candidate(slab, tuple(counts), worst)


def _page_bytes(group: LayerGroup) -> int:
    return -(-_end(group) // ALIGN) * ALIGN


def _end(group: LayerGroup) -> int:
    tokens = max(group.page_tokens, 1)
    return max(
        offset + part.nbytes * tokens for row in _offsets(group) for offset, part in zip(row, group.parts, strict=True)
    )


def _offsets(group: LayerGroup) -> tuple[tuple[int, ...], ...]:
    """Wide parts of all layers first, so that a page needs no padding between parts of different item sizes."""
    tokens = max(group.page_tokens, 1)
    rows = [[0] * len(group.parts) for _ in group.entries]
    offset = 0
    for index in sorted(range(len(group.parts)), key=lambda i: -group.parts[i].item_bytes):
        for row in rows:
            row[index] = offset
            offset += group.parts[index].nbytes * tokens
    return tuple(tuple(row) for row in rows)
