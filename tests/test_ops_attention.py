"""Attention over pages against one token at a time, for every kind of layer and every way to score."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from hybridkv.entries import CacheEntry, attention_parts, group_entries
from hybridkv.layout import plan_layout
from hybridkv.ops import planning
from hybridkv.ops.attention import KEY, VALUE, Scoring, packed_attention
from hybridkv.ops.planning import PageTable, plan_tokens
from hybridkv.ops.spans import Entry, TokenPlan
from hybridkv.rules import make_rule
from hybridkv.sequence import TokenPages
from hybridkv.storage import PoolStorage, TokenIndex

PAGE = 8
HEADS, KV_HEADS, DIM = 4, 2, 8

KINDS = {
    "full_attention": {},
    "sliding_attention": {"window": 13},
    "chunked_attention": {"chunk": 24},
    "sink_attention": {"sinks": 3, "window": 11},
}

SCORING = {
    "fused": Scoring(0.3),
    "plain": Scoring(0.3, fused=False),
    "softcap": Scoring(0.3, softcap=2.0),
    "sinks": Scoring(0.3, sinks=torch.tensor([0.5, -1.0, 2.0, 0.0])),
    "plain sinks": Scoring(0.3, sinks=torch.tensor([0.5, -1.0, 2.0, 0.0]), fused=False),
    "softcap and sinks": Scoring(0.3, softcap=2.0, sinks=torch.tensor([0.5, -1.0, 2.0, 0.0])),
}

MIXES = {
    "prefill": ([0], [70]),
    "one token": ([0], [1]),
    "decode": ([40, 33, 7, 0], [1, 1, 1, 1]),
    "decode of very different lengths": ([400, 390, 30, 2], [1, 1, 1, 1]),
    "continued": ([37, 64], [50, 3]),
    "mixed": ([90, 5, 0, 12, 31], [1, 1, 25, 2, 40]),
}


class Pages:
    """Random pages for some sequences of one group; all that nobody wrote is NaN."""

    def __init__(self, kind: str, lengths: list[int], counts: list[int], *, scattered: bool = True) -> None:
        params = KINDS[kind]
        entry = CacheEntry(0, kind, attention_parts(KV_HEADS, DIM, "float32"), tuple(params.items()))
        layout = plan_layout(group_entries([entry], PAGE), 1 << 20, PAGE)
        self.rule = make_rule(kind, params)
        self.storage = PoolStorage(layout, poison=True)
        self.entry = Entry(self.storage, 0, 0)
        self.lengths, self.counts = np.array(lengths), np.array(counts)
        free = np.random.default_rng(0).permutation(layout.slots(0)) if scattered else np.arange(layout.slots(0))
        self.held: list[TokenPages] = []
        for length, count in zip(lengths, counts, strict=True):
            pages = set(range(length // PAGE, -(-(length + count) // PAGE)))
            for start, stop in self.rule.needed(np.array([length])):
                if stop[0] > start[0]:
                    pages |= set(range(start[0] // PAGE, -(-stop[0] // PAGE)))
            slots, free = free[: len(pages)], free[len(pages) :]
            self.held.append(TokenPages(np.array(sorted(pages)), slots))

    def plan(self, in_place_from: int | None = None) -> TokenPlan:
        cpu = torch.device("cpu")
        table = PageTable(self.held, PAGE, cpu)
        singles = int((self.counts == 1).sum())
        return plan_tokens(self.rule, table, self.lengths, self.counts, singles, torch.float32, cpu, in_place_from)

    def fill(self, i: int, keys: Tensor, values: Tensor) -> None:
        """Write a sequence's past [kv heads, tokens, dim], as far as it is held."""
        for part, source in ((KEY, keys), (VALUE, values)):
            for page, slot in zip(*self.held[i], strict=True):
                for row in range(PAGE):
                    if page * PAGE + row < self.lengths[i]:
                        index = TokenIndex(torch.tensor([slot]), torch.tensor([row]))
                        self.entry.write_tokens(part, index, source[:, page * PAGE + row][None])


def reference(query: Tensor, keys: Tensor, values: Tensor, pages: Pages, length: int, scoring: Scoring) -> Tensor:
    """Each query by itself over exactly the tokens its rule names and itself: [tokens, heads, dim]."""
    outputs = []
    for i in range(query.shape[1]):
        position = length + i
        seen = {position}
        for start, stop in pages.rule.needed(np.array([position])):
            seen |= set(range(int(start[0]), int(stop[0])))
        columns = sorted(seen)
        heads = []
        for h in range(HEADS):
            kv = h // (HEADS // KV_HEADS)
            scores = keys[kv, columns].double() @ query[h, i].double() * scoring.scale
            if scoring.softcap is not None:
                scores = torch.tanh(scores / scoring.softcap) * scoring.softcap
            weights = scores.exp()
            total = weights.sum() + (math.exp(float(scoring.sinks[h])) if scoring.sinks is not None else 0.0)
            heads.append((weights / total) @ values[kv, columns].double())
        outputs.append(torch.stack(heads))
    return torch.stack(outputs).float()


@pytest.mark.parametrize("in_place_from", [None, 1], ids=["gathered", "in place"])
@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("scoring", SCORING)
@pytest.mark.parametrize("kind", KINDS)
def test_packed_attention_equals_one_token_at_a_time(
    kind: str, scoring: str, mix: str, in_place_from: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planning, "_MASK_ITEMS", 1)  # several blocks even here
    monkeypatch.setattr(planning, "_RUN_PAGES", 1)
    lengths, counts = MIXES[mix]
    torch.manual_seed(0)
    pages = Pages(kind, lengths, counts, scattered=in_place_from is None)
    total = sum(counts)
    query, own_keys, own_values = torch.randn(HEADS, total, DIM), torch.randn(2, total, DIM), torch.randn(2, total, DIM)
    plan = pages.plan(in_place_from)
    assert bool(plan.in_place) == (in_place_from is not None and 1 in counts and max(lengths) > 2 * PAGE)
    expected, at = [], 0
    for i, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        past_keys, past_values = torch.randn(2, length, DIM), torch.randn(2, length, DIM)
        pages.fill(i, past_keys, past_values)
        own = slice(at, at + count)
        keys, values = torch.cat([past_keys, own_keys[:, own]], 1), torch.cat([past_values, own_values[:, own]], 1)
        expected.append(reference(query[:, own], keys, values, pages, length, SCORING[scoring]))
        at += count
    pages.entry.write_tokens(KEY, plan.own, own_keys.transpose(0, 1))
    pages.entry.write_tokens(VALUE, plan.own, own_values.transpose(0, 1))
    found = packed_attention(query, own_keys, own_values, plan, pages.entry, SCORING[scoring])
    torch.testing.assert_close(found, torch.cat(expected), rtol=1e-5, atol=1e-5)


def test_a_sliding_layer_never_scores_the_whole_square() -> None:
    pages = Pages("sliding_attention", [40], [900])
    (chunk,) = pages.plan().chunks
    assert len(chunk.blocks) > 5
    for block in chunk.blocks:
        assert isinstance(block.columns, slice)
        assert (
            block.columns.stop - block.columns.start
            <= block.stop - block.start + KINDS["sliding_attention"]["window"] - 1
        )


def test_a_first_chunk_of_a_full_layer_needs_no_mask_and_no_page() -> None:
    (chunk,) = Pages("full_attention", [0], [900]).plan().chunks
    (block,) = chunk.blocks
    assert chunk.history is None
    assert block.causal
    assert chunk.mask(block) is None


def test_masks_of_a_long_history_stay_small() -> None:
    (chunk,) = Pages("full_attention", [700], [900]).plan().chunks
    assert all(
        mask.numel() <= planning._MASK_ITEMS for block in chunk.blocks if (mask := chunk.mask(block)) is not None
    )


def test_one_long_request_does_not_pad_all_others() -> None:
    plan = Pages("full_attention", [1000, 40, 39, 5], [1, 1, 1, 1]).plan()
    assert [(bucket.start, bucket.stop) for bucket in plan.buckets] == [(0, 1), (1, 4)]


def test_a_long_past_in_adjacent_pages_is_read_where_it_lies() -> None:
    lengths = [1003, 900, 90]
    (long, other) = Pages("full_attention", lengths, [1, 1, 1], scattered=False).plan(512).in_place
    assert long.runs == ((0, 125),)
    assert other.runs == ((126, 238),)
    assert long.rest.rows.tolist() == [3, 0, 1, 2]
    scattered = Pages("full_attention", lengths, [1, 1, 1]).plan(512)
    assert scattered.in_place == ()
    assert [(bucket.start, bucket.stop) for bucket in scattered.buckets] == [(0, 2), (2, 3)]


def test_spans_between_those_read_in_place_are_gathered() -> None:
    pages = Pages("full_attention", [1000, 990, 980, 970], [1, 1, 1, 1], scattered=False)
    slots = np.random.default_rng(0).permutation(pages.held[1].slots)
    pages.held[1] = TokenPages(pages.held[1].pages, slots)
    plan = pages.plan(512)
    assert [span.token for span in plan.in_place] == [0, 2, 3]
    assert [(bucket.start, bucket.stop) for bucket in plan.buckets] == [(1, 2)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scoring", ["fused", "softcap and sinks"])
def test_half_precision_stays_close(dtype: torch.dtype, scoring: str) -> None:
    torch.manual_seed(0)
    lengths, counts = MIXES["mixed"]
    pages = Pages("full_attention", lengths, counts)
    for i, length in enumerate(lengths):
        pages.fill(i, torch.randn(2, length, DIM).to(dtype).float(), torch.randn(2, length, DIM).to(dtype).float())
    plan = pages.plan()
    total = sum(counts)
    query, keys, values = (torch.randn(heads, total, DIM).to(dtype) for heads in (HEADS, 2, 2))
    pages.entry.write_tokens(KEY, plan.own, keys.transpose(0, 1))
    pages.entry.write_tokens(VALUE, plan.own, values.transpose(0, 1))
    found = packed_attention(query, keys, values, plan, pages.entry, SCORING[scoring])
    exact = packed_attention(query.float(), keys.float(), values.float(), pages.plan(), pages.entry, SCORING[scoring])
    assert found.dtype == dtype
    torch.testing.assert_close(found.float(), exact, rtol=2e-2, atol=2e-2)
