"""Attention of a packed pass over the pages of one layer.

Two ways to compute it: torch's fused kernel, and plain arithmetic for what the fused kernel has no argument for
(logit soft-capping; off the CPU, attention sinks). The plain one is also the reference of the tests.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from hybridkv.ops.inplace import Fused, attend_in_place, everything, fused
from hybridkv.ops.spans import Bucket, Entry, TokenChunk, TokenPlan

_SCORE_ITEMS = 1 << 24
"""Scores the plain way holds at once, in items."""

KEY, VALUE = 0, 1
"""Parts of an attention entry."""


@dataclass(frozen=True, slots=True)
class Scoring:
    """How a layer turns queries and keys into weights.

    Attributes:
        scale: factor of the dot products.
        softcap: scores become softcap * tanh(scores / softcap), or None.
        sinks: [query heads], a logit per head that takes part in the softmax and has no value, or None.
        fused: use torch's fused kernel where it can express the layer.
    """

    scale: float
    softcap: float | None = None
    sinks: Tensor | None = None
    fused: bool = True


def packed_attention(
    query: Tensor, key: Tensor, value: Tensor, plan: TokenPlan, entry: Entry, scoring: Scoring
) -> Tensor:
    """Attend from every token of the pass to its own request's past. Keys and values are in their pages already.

    Args:
        query: [heads, tokens, dim], packed order.
        key: [kv heads, tokens, dim], the pass's own.
        value: [kv heads, tokens, value dim], the pass's own.
        plan: of the layer's group.
        entry: the layer's pages.
        scoring: of the layer.

    Returns:
        [tokens, heads, value dim]
    """
    if len(plan.buckets) == 1 and not plan.chunks and not plan.in_place:
        return _singles(query, key.shape[0], plan.buckets[0], entry, scoring)
    output = query.new_empty(query.shape[1], query.shape[0], value.shape[-1])
    for bucket in plan.buckets:
        output[bucket.start : bucket.stop] = _singles(
            query[:, bucket.start : bucket.stop], key.shape[0], bucket, entry, scoring
        )
    for span in plan.in_place:
        if scoring.fused and scoring.softcap is None:
            output[span.token] = attend_in_place(query[:, span.token], span, entry, scoring.scale, scoring.sinks)
        else:
            tokens = everything(span, entry.views[KEY].pages.shape[1])
            bucket = Bucket(span.token, span.token + 1, tokens, None)
            output[bucket.start : bucket.stop] = _singles(
                query[:, bucket.start : bucket.stop], key.shape[0], bucket, entry, scoring
            )
    for chunk in plan.chunks:
        keys, values = key[:, chunk.start : chunk.stop], value[:, chunk.start : chunk.stop]
        if chunk.history is not None:
            keys, values = (read.transpose(0, 1) for read in entry.read_pair(KEY, chunk.history, query.dtype))
        attend_chunk(query, keys, values, chunk, scoring, output)
    return output


def _singles(query: Tensor, kv_heads: int, bucket: Bucket, entry: Entry, scoring: Scoring) -> Tensor:
    heads, rows, dim = query.shape
    # The query heads of one KV head act as the queries of a batch row, so no key is ever repeated.
    asked = query.transpose(0, 1).reshape(rows, kv_heads, heads // kv_heads, dim)
    keys, values = (
        read.view(rows, -1, *read.shape[1:]).transpose(1, 2)
        for read in entry.read_pair(KEY, bucket.tokens, query.dtype)
    )
    sinks = None if scoring.sinks is None else scoring.sinks.view(1, kv_heads, -1, 1)
    return attend(asked, keys, values, bucket.mask, False, scoring, sinks).flatten(1, 2)


def attend_chunk(
    query: Tensor, keys: Tensor, values: Tensor, chunk: TokenChunk, scoring: Scoring, output: Tensor
) -> None:
    """Fill a chunk's rows of `output` [tokens, heads, value dim].

    `query` [heads, tokens, dim] is of the whole pass; `keys` and `values` [kv heads, n, dim] begin with the chunk's
    history and its own tokens.
    """
    sinks = None if scoring.sinks is None else scoring.sinks.view(1, -1, 1, 1)
    for block in chunk.blocks:
        seen = attend(
            query[None, :, block.start : block.stop],
            keys[None, :, block.columns],
            values[None, :, block.columns],
            chunk.mask(block),
            block.causal,
            scoring,
            sinks,
        )
        output[block.start : block.stop] = seen[0].transpose(0, 1)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    causal: bool,
    scoring: Scoring,
    sinks: Tensor | None = None,
) -> Tensor:
    """softmax(scores) @ value.

    Args:
        query: [batch, heads, queries, dim].
        key: [batch, kv heads, keys, dim]; kv heads divide heads.
        value: [batch, kv heads, keys, value dim].
        mask: additive, broadcast against [batch, heads, queries, keys], or None.
        causal: queries and keys are the same tokens and each sees those up to itself; then `mask` is None.
        scoring: of the layer.
        sinks: the layer's sinks, shaped to broadcast against [batch, heads, queries, 1].

    Returns:
        [batch, heads, queries, value dim]
    """
    if scoring.fused and scoring.softcap is None:
        if sinks is None:
            return _fused(query, key, value, mask, causal, scoring.scale)
        kernel = fused(query.device)
        if kernel is not None and key.shape[-1] == value.shape[-1]:
            return _fused_with_sinks(kernel, query, key, value, mask, causal, scoring.scale, sinks)
    return _plain(query, key, value, mask, causal, scoring, sinks)


def _fused(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, scale: float) -> Tensor:
    grouped = query.shape[1] != key.shape[1]
    if grouped and query.device.type != "cpu" and mask is not None:
        # Off the CPU the memory-efficient kernels take either a mask or grouped heads.
        repeats = query.shape[1] // key.shape[1]
        key, value, grouped = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1), False
    return functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=causal and query.shape[2] > 1, scale=scale, enable_gqa=grouped
    )


def _fused_with_sinks(
    kernel: Fused,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float,
    sinks: Tensor,
) -> Tensor:
    repeats = query.shape[1] // key.shape[1]
    if repeats > 1:
        key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    output, normaliser = kernel(query, key, value, is_causal=causal and query.shape[2] > 1, attn_mask=mask, scale=scale)
    # A sink adds exp(sink) to the sum that every weight was divided by.
    share = torch.sigmoid(normaliser.unsqueeze(-1) - sinks.float())
    return output * share.to(output.dtype)


def _plain(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    causal: bool,
    scoring: Scoring,
    sinks: Tensor | None,
) -> Tensor:
    batch, heads, queries, _ = query.shape
    repeats = heads // key.shape[1]
    if repeats > 1:
        key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    output = query.new_empty(batch, heads, queries, value.shape[-1])
    step = max(16, _SCORE_ITEMS // (batch * heads * key.shape[2]))
    for first in range(0, queries, step):
        last = min(first + step, queries)
        keys = last if causal else key.shape[2]
        scores = torch.matmul(query[:, :, first:last], key[:, :, :keys].transpose(2, 3)) * scoring.scale
        if scoring.softcap is not None:
            scores = torch.tanh(scores / scoring.softcap) * scoring.softcap
        if causal:
            later = torch.ones(last - first, keys, dtype=torch.bool, device=query.device).triu_(first + 1)
            scores.masked_fill_(later, -math.inf)
        elif mask is not None:
            scores = scores + (mask if mask.shape[-2] == 1 else mask[..., first:last, :])
        weights = _weights(scores.float(), sinks).to(query.dtype)
        output[:, :, first:last] = torch.matmul(weights, value[:, :, :keys])
    return output


def _weights(scores: Tensor, sinks: Tensor | None) -> Tensor:
    if sinks is None:
        return torch.softmax(scores, -1)
    sinks = sinks.float()
    top = torch.maximum(scores.amax(-1, keepdim=True), sinks)
    weights = torch.exp(scores - top)
    return weights / (weights.sum(-1, keepdim=True) + torch.exp(sinks - top))
