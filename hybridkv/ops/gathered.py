"""Attention for layers that cache less than keys and values, and expand it before they attend (latent attention).

Such a layer gets back from its cache what all its tokens may see: the histories of all spans end to end, one after the
other in packed order, each with the span's own tokens last. It hands the keys and values it makes of them to the
attention function, which shares them out to the spans again. So nothing here reads a page.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hybridkv.errors import UsageError
from hybridkv.ops.attention import Scoring, attend, attend_chunk
from hybridkv.ops.planning import PageTable, additive
from hybridkv.ops.spans import Ints, TokenPlan
from hybridkv.rules import Rule
from hybridkv.storage import TokenIndex

_BATCHED_TOKENS = 64
"""Spans of more tokens than this on average attend one by one: a call costs less than bringing keys into rows."""


class GatheredBucket(NamedTuple):
    """One-token spans, [start, stop) of the pass, that attend as one batch.

    Their keys are [first, last) of what was gathered. Where lengths differ, `columns` spreads them into rows of equal
    width, int64 [(stop - start) * width], and `mask` hides the rest of each row, additive [stop - start, 1, 1, width].
    """

    start: int
    stop: int
    first: int
    last: int
    columns: Tensor | None
    mask: Tensor | None


@dataclass(frozen=True, slots=True)
class Gathering:
    """Where the histories of a pass lie, and which part of what was gathered belongs to whom.

    Attributes:
        index: the histories of all spans, end to end; None where the pass's own tokens are all there is.
        tokens: how many that are.
        buckets: the one-token spans.
        chunks: where the keys of each longer span begin, in the order of the plan's chunks.
    """

    index: TokenIndex | None
    tokens: int
    buckets: tuple[GatheredBucket, ...]
    chunks: tuple[int, ...]


def plan_gathering(
    rule: Rule, table: PageTable, plan: TokenPlan, lengths: Ints, counts: Ints, dtype: torch.dtype, device: torch.device
) -> Gathering:
    """Lay out the histories of a pass.

    Args:
        rule: of the group.
        table: the pages of all spans, in packed order.
        plan: of the group.
        lengths: tokens computed before this pass, per span.
        counts: tokens of each span.
        dtype: of masks, the one queries have.
        device: of masks and indices.
    """
    ranges = [*rule.needed(lengths), (lengths, lengths + counts)]
    starts = np.stack([start for start, _ in ranges], 1).ravel()
    sizes = np.stack([stop for _, stop in ranges], 1).ravel() - starts
    ends = np.cumsum(sizes)
    # Every range counts up from its start: the place in the whole, minus the place where the range begins, plus that.
    positions = np.arange(ends[-1]) - np.repeat(ends - sizes - starts, sizes)
    per_span = sizes.reshape(len(counts), -1).sum(1)
    index = None
    if ends[-1] > counts.sum():
        index = table.index(np.repeat(np.arange(len(counts)), per_span), positions)
    firsts = np.cumsum(per_span) - per_span
    buckets = tuple(
        bucket
        for batch in plan.buckets
        for bucket in _buckets(batch.start, batch.stop, firsts, per_span, dtype, device)
    )
    singles = len(counts) - len(plan.chunks)
    return Gathering(index, int(ends[-1]), buckets, tuple(firsts[singles:].tolist()))


def gathered_attention(
    query: Tensor, key: Tensor, value: Tensor, plan: TokenPlan, gathering: Gathering, scoring: Scoring
) -> Tensor:
    """Attend from every token of the pass to its own request's part of the keys.

    Args:
        query: [heads, tokens, dim], packed order.
        key: [kv heads, gathered tokens, dim].
        value: [kv heads, gathered tokens, value dim].
        plan: of the layer's group.
        gathering: of the same group.
        scoring: of the layer.

    Returns:
        [tokens, heads, value dim]

    Raises:
        UsageError: keys of another number of tokens than the cache returned.
    """
    if key.shape[1] != gathering.tokens:
        raise UsageError(
            f"a layer attends to {key.shape[1]} keys, but its cache returned {gathering.tokens} tokens; it must expand "
            "exactly what cache.update() returns"
        )
    output = query.new_empty(query.shape[1], query.shape[0], value.shape[-1])
    for bucket in gathering.buckets:
        output[bucket.start : bucket.stop] = _singles(query, key, value, bucket, scoring)
    for chunk, first in zip(plan.chunks, gathering.chunks, strict=True):
        attend_chunk(query, key[:, first:], value[:, first:], chunk, scoring, output)
    return output


def _buckets(
    start: int, stop: int, firsts: Ints, sizes: Ints, dtype: torch.dtype, device: torch.device
) -> Iterator[GatheredBucket]:
    asked = sizes[start:stop]
    ends = firsts + sizes
    if (asked == asked[0]).all():
        yield GatheredBucket(start, stop, int(firsts[start]), int(ends[stop - 1]), None, None)
    elif asked.mean() > _BATCHED_TOKENS:
        for i in range(start, stop):
            yield GatheredBucket(i, i + 1, int(firsts[i]), int(ends[i]), None, None)
    else:
        width = np.arange(asked.max())
        seen = width < asked[:, None]
        # The end of a short row may be any keys at all; they only have to be there.
        columns = torch.from_numpy((firsts[start:stop, None] + np.where(seen, width, 0)).ravel()).to(device)
        mask = additive(seen, dtype, device)
        yield GatheredBucket(start, stop, int(firsts[start]), int(ends[stop - 1]), columns, mask)


def _singles(query: Tensor, key: Tensor, value: Tensor, bucket: GatheredBucket, scoring: Scoring) -> Tensor:
    rows = bucket.stop - bucket.start
    kv_heads = key.shape[0]
    asked = query[:, bucket.start : bucket.stop].transpose(0, 1).unflatten(1, (kv_heads, -1))
    keys, values = (_rows(gathered, bucket, rows) for gathered in (key, value))
    sinks = None if scoring.sinks is None else scoring.sinks.view(1, kv_heads, -1, 1)
    return attend(asked, keys, values, bucket.mask, False, scoring, sinks).flatten(1, 2)


def _rows(gathered: Tensor, bucket: GatheredBucket, rows: int) -> Tensor:
    """The bucket's part as [rows, kv heads, width, dim]."""
    columns = bucket.columns
    part = gathered[:, bucket.first : bucket.last] if columns is None else gathered.index_select(1, columns)
    in_rows: Tensor = part.unflatten(1, (rows, -1))
    return in_rows.transpose(0, 1)
