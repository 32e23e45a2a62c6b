"""Bytes by layer type: planned, for requests of some length in some pool, and measured, in a running manager.

A request of n tokens holds, in every group, the pages of `rule.needed(n)` and the half-full page it is writing to; a
state group holds one working state. While it computes a token it may hold one page more of a sliding group than
afterwards, so "how many fit" counts the most it holds at any step on the way.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from hybridkv.audit import Usage
from hybridkv.config import parse_bytes, parse_tokens
from hybridkv.entries import LayerGroup
from hybridkv.errors import ConfigError
from hybridkv.holding import held_pages, step_pages
from hybridkv.layout import GroupPlan, Layout, plan_layout

_STEPS = 2**20
"""Peaks are looked for in this many last steps: the holdings of every rule grow or repeat with a shorter period."""


class GroupMemory(NamedTuple):
    """How the pages of one layer group lie in the pool.

    Attributes:
        layers: layers of the group.
        page_tokens: tokens of a page, 0 for a state.
        page_bytes: bytes of one page over all layers.
        stride: bytes such a page takes in the pool, padding included.
        split: groups that the plan cut this one into, by layers, so that slabs stay small.
    """

    name: str
    kind: str
    layers: int
    page_tokens: int
    page_bytes: int
    stride: int
    split: int


class GroupHolding(NamedTuple):
    """What one request holds in one group.

    Attributes:
        pages: after computing the whole context.
        nbytes: bytes of those pages, without padding.
        peak_pages: the most at any step on the way, one token at a time.
    """

    name: str
    kind: str
    pages: int
    nbytes: int
    peak_pages: int


class ContextMemory(NamedTuple):
    """What requests of one length need.

    Attributes:
        tokens: the length.
        groups: one per layer group, in the plan's order.
        minimum: bytes one request holds, without padding.
        all_full: bytes if every layer were full attention with the same heads; None for a model without attention.
        requests: requests of this length that can run in the pool at the same time.
    """

    tokens: int
    groups: tuple[GroupHolding, ...]
    minimum: int
    all_full: int | None
    requests: int


class MemoryPlan(NamedTuple):
    """A pool and what fits in it.

    Attributes:
        pool_bytes: bytes the pool uses, a whole number of slabs within the budget.
        padding: largest share of any group's stride that holds nothing.
    """

    pool_bytes: int
    slab_bytes: int
    slabs: int
    unit_tokens: int
    padding: float
    groups: tuple[GroupMemory, ...]
    contexts: tuple[ContextMemory, ...]

    def as_dict(self) -> dict[str, Any]:
        """The same as plain dictionaries and lists, for JSON."""
        return {
            **self._asdict(),
            "groups": [group._asdict() for group in self.groups],
            "contexts": [
                {**context._asdict(), "groups": [holding._asdict() for holding in context.groups]}
                for context in self.contexts
            ],
        }


class KindUsage(NamedTuple):
    """Bytes that all groups of one kind use now, whole strides. Free bytes lie in slabs the groups own."""

    kind: str
    layers: int
    live_bytes: int
    cached_bytes: int
    free_bytes: int


def plan_memory(
    groups: Sequence[LayerGroup],
    contexts: Iterable[int | str],
    pool_bytes: int | str,
    unit_tokens: int = 16,
) -> MemoryPlan:
    """What requests of these lengths need, by layer group, and how many of each length fit in the pool.

    Args:
        groups: the layer groups of a model.
        contexts: lengths in tokens, numbers or text such as "32k".
        pool_bytes: the budget, a number or text such as "16GiB".
        unit_tokens: hash granularity in tokens.

    Raises:
        ConfigError: no contexts, or a size that cannot be.
        PoolTooSmall: the budget has no room for one slab per group.
    """
    lengths = [parse_tokens(context) for context in contexts]
    if not lengths:
        raise ConfigError("name at least one context length, for example '32k'")
    layout = plan_layout(groups, parse_bytes(pool_bytes), unit_tokens)
    pieces = [_pieces(group, layout) for group in groups]
    return MemoryPlan(
        pool_bytes=layout.pool_bytes,
        slab_bytes=layout.slab_bytes,
        slabs=layout.slabs,
        unit_tokens=layout.unit_tokens,
        padding=max(plan.padding for plan in layout.plans),
        groups=tuple(
            GroupMemory(
                name=group.name,
                kind=group.kind,
                layers=group.layers,
                page_tokens=group.page_tokens,
                page_bytes=group.page_bytes,
                stride=sum(plan.stride for plan in plans),
                split=len(plans),
            )
            for group, plans in zip(groups, pieces, strict=True)
        ),
        contexts=tuple(_context(groups, pieces, layout, tokens) for tokens in lengths),
    )


def usage_by_kind(usage: Usage) -> tuple[KindUsage, ...]:
    """Measured bytes by layer type, from `manager.usage()`. Slabs that no group owns are in none of the rows."""
    rows: dict[str, KindUsage] = {}
    for group in usage.groups:
        row = rows.get(group.kind, KindUsage(group.kind, 0, 0, 0, 0))
        rows[group.kind] = KindUsage(
            group.kind,
            row.layers + group.layers,
            row.live_bytes + group.live_bytes,
            row.cached_bytes + group.cached_bytes,
            row.free_bytes + group.free_bytes,
        )
    return tuple(rows.values())


def all_full_bytes(groups: Sequence[LayerGroup], tokens: int) -> int | None:
    """Bytes of `tokens` tokens if every layer that has a cache were full attention.

    A layer that keeps only states counts with the heads of the model's full-attention layers, or of its largest other
    attention layers. None where the model has no attention.
    """
    attention = [group for group in groups if not group.is_state]
    if not attention:
        return None
    model = max(attention, key=lambda group: (group.kind == "full_attention", group.entry_bytes))
    total = sum(_whole_pages(tokens, group) * group.entry_bytes * group.layers for group in attention)
    covered = {entry.layer for group in attention for entry in group.entries}
    states = {entry.layer for group in groups if group.is_state for entry in group.entries} - covered
    return total + len(states) * _whole_pages(tokens, model) * model.entry_bytes


def _context(
    groups: Sequence[LayerGroup], pieces: Sequence[Sequence[GroupPlan]], layout: Layout, tokens: int
) -> ContextMemory:
    steps = np.arange(max(tokens - _STEPS, 0), tokens)
    holdings = []
    for group in groups:
        pages = int(held_pages(group, np.array([tokens]))[0])
        peak = max(pages, int(step_pages(group, steps).max()))
        holdings.append(GroupHolding(group.name, group.kind, pages, pages * group.page_bytes, peak))
    demand = [
        (holding.peak_pages, plan.per_slab) for holding, plans in zip(holdings, pieces, strict=True) for plan in plans
    ]
    return ContextMemory(
        tokens=tokens,
        groups=tuple(holdings),
        minimum=sum(holding.nbytes for holding in holdings),
        all_full=all_full_bytes(groups, tokens),
        requests=_most(demand, layout.slabs),
    )


def _most(demand: Sequence[tuple[int, int]], slabs: int) -> int:
    """The most requests whose (pages, pages per slab) fit in `slabs` slabs, each slab of one group."""
    least, most = 0, slabs * max(per_slab for _, per_slab in demand) + 1
    while most - least > 1:
        middle = (least + most) // 2
        if sum(-(-pages * middle // per_slab) for pages, per_slab in demand) <= slabs:
            least = middle
        else:
            most = middle
    return least


def _pieces(group: LayerGroup, layout: Layout) -> list[GroupPlan]:
    """The plans that serve a group: its own, or those of the groups it was split into."""
    mine = set(group.entries)
    return [
        plan
        for plan in layout.plans
        if (plan.group.kind, plan.group.parts, plan.group.params) == (group.kind, group.parts, group.params)
        and mine.issuperset(plan.group.entries)
    ]


def _whole_pages(tokens: int, group: LayerGroup) -> int:
    return -(-tokens // group.page_tokens) * group.page_tokens
