"""One head's share of a state, as a scan of that head alone sees it."""

from __future__ import annotations

import torch

from hybridkv.entries import CacheEntry, Part, group_entries
from hybridkv.layout import plan_layout
from hybridkv.ops.heads import HeadEntry
from hybridkv.ops.spans import Entry
from hybridkv.storage import PoolStorage

SHAPE = (3, 4, 5)
"""Heads, channels, N."""


def entry(dtype: str = "float32") -> Entry:
    parts = (Part("conv", (12, 3), "float32"), Part("recurrent", SHAPE, dtype))
    groups = group_entries([CacheEntry(0, "linear_attention", parts)])
    return Entry(PoolStorage(plan_layout(groups, 1 << 20)), 0, 0)


def test_a_head_reads_its_share_of_every_slot() -> None:
    whole = entry()
    slots, states = torch.tensor([6, 2]), torch.randn(2, *SHAPE)
    whole.write_states(1, slots, states)
    for head in range(SHAPE[0]):
        found = HeadEntry(whole, head).read_states(1, slots)
        assert torch.equal(found, states[:, head])
        found.zero_()
    assert torch.equal(whole.read_states(1, slots), states), "what is read is a copy"


def test_a_head_writes_its_share_and_nothing_else() -> None:
    whole = entry()
    slots, before = torch.tensor([1, 5]), torch.randn(2, *SHAPE)
    whole.write_states(1, slots, before)
    new = torch.randn(1, *SHAPE[1:])
    HeadEntry(whole, 1).write_states(1, slots, new.expand(2, *SHAPE[1:]))
    after = whole.read_states(1, slots)
    assert torch.equal(after[:, 1], new.expand(2, *SHAPE[1:]))
    assert torch.equal(after[:, [0, 2]], before[:, [0, 2]])


def test_a_write_has_the_dtype_of_the_part() -> None:
    whole = entry("bfloat16")
    values = torch.randn(1, *SHAPE[1:])
    HeadEntry(whole, 2).write_states(1, torch.tensor([0]), values)
    assert torch.equal(whole.read_states(1, torch.tensor([0]))[:, 2], values.bfloat16())
