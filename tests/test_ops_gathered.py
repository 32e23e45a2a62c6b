"""Attention over gathered histories is attention over pages, once the keys are there."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hybridkv.errors import UsageError
from hybridkv.ops.attention import KEY, VALUE, packed_attention
from hybridkv.ops.gathered import Gathering, gathered_attention, plan_gathering
from hybridkv.ops.planning import PageTable
from hybridkv.ops.spans import TokenPlan
from tests.test_ops_attention import DIM, HEADS, KINDS, MIXES, PAGE, SCORING, Pages

CPU = torch.device("cpu")


def gathering_of(pages: Pages, plan: TokenPlan) -> Gathering:
    table = PageTable(pages.held, PAGE, CPU)
    return plan_gathering(pages.rule, table, plan, pages.lengths, pages.counts, torch.float32, CPU)


def gathered(pages: Pages, part: int, gathering: Gathering, own: Tensor) -> Tensor:
    """What a layer without any compression would expand: [kv heads, gathered tokens, dim]."""
    return own if gathering.index is None else pages.entry.read_tokens(part, gathering.index).transpose(0, 1)


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("scoring", ["fused", "softcap and sinks"])
@pytest.mark.parametrize("kind", KINDS)
def test_gathered_attention_equals_attention_over_pages(kind: str, scoring: str, mix: str) -> None:
    lengths, counts = MIXES[mix]
    torch.manual_seed(0)
    pages = Pages(kind, lengths, counts)
    for i, length in enumerate(lengths):
        pages.fill(i, torch.randn(2, length, DIM), torch.randn(2, length, DIM))
    plan = pages.plan()
    query, keys, values = (torch.randn(heads, sum(counts), DIM) for heads in (HEADS, 2, 2))
    pages.entry.write_tokens(KEY, plan.own, keys.transpose(0, 1))
    pages.entry.write_tokens(VALUE, plan.own, values.transpose(0, 1))
    gathering = gathering_of(pages, plan)
    all_keys, all_values = (gathered(pages, part, gathering, own) for part, own in ((KEY, keys), (VALUE, values)))
    found = gathered_attention(query, all_keys, all_values, plan, gathering, SCORING[scoring])
    expected = packed_attention(query, keys, values, plan, pages.entry, SCORING[scoring])
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_a_history_is_gathered_once_and_without_padding() -> None:
    pages = Pages("full_attention", [90, 80, 9, 12], [1, 1, 1, 40])
    gathering = gathering_of(pages, pages.plan())
    assert gathering.tokens == 91 + 81 + 10 + 52
    assert gathering.index is not None
    assert len(gathering.index.slots) == gathering.tokens
    (bucket,) = gathering.buckets
    assert (bucket.first, bucket.last) == (0, 182)
    assert gathering.chunks == (182,)


def test_rows_of_one_length_are_neither_spread_nor_masked() -> None:
    pages = Pages("full_attention", [50, 50], [1, 1])
    (bucket,) = gathering_of(pages, pages.plan()).buckets
    assert bucket.columns is None
    assert bucket.mask is None


def test_long_rows_of_different_lengths_are_not_copied_into_a_batch() -> None:
    pages = Pages("full_attention", [100, 90], [1, 1])
    buckets = gathering_of(pages, pages.plan()).buckets
    assert [(bucket.first, bucket.last, bucket.columns) for bucket in buckets] == [(0, 101, None), (101, 192, None)]


def test_first_chunks_need_no_page() -> None:
    pages = Pages("full_attention", [0, 0], [1, 60])
    assert gathering_of(pages, pages.plan()).index is None


def test_a_layer_that_expands_something_else_is_refused() -> None:
    pages = Pages("full_attention", [20], [4])
    plan = pages.plan()
    own = torch.zeros(HEADS, 4, DIM)
    with pytest.raises(UsageError, match=r"4 keys.*24 tokens"):
        gathered_attention(own, own, own, plan, gathering_of(pages, plan), SCORING["fused"])
