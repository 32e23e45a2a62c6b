"""The pool's memory: views at the right bytes, copies in order, poison."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybridkv.entries import CacheEntry, Part, attention_parts, group_entries
from hybridkv.layout import Layout, plan_layout
from hybridkv.pool import PageCopy
from hybridkv.storage import PoolStorage, TokenIndex

FULL, STATE = 0, 1


def make_layout() -> Layout:
    attention = [CacheEntry(layer, "full_attention", attention_parts(2, 8, "float32")) for layer in (0, 2)]
    state = [
        CacheEntry(
            layer, "linear_attention", (Part("conv", (12, 3), "bfloat16"), Part("recurrent", (12, 4), "float32"))
        )
        for layer in (1, 3, 4)
    ]
    return plan_layout(group_entries([*attention, *state], 8), 1 << 18, 8)


def raw(storage: PoolStorage) -> torch.Tensor:
    return storage.part(0, 0, 0).untyped_storage()  # type: ignore[return-value]


def test_a_pool_made_in_inference_mode_is_written_outside_of_it() -> None:
    layout = make_layout()
    with torch.inference_mode():
        storage = PoolStorage(layout)
    storage.write_states(STATE, 0, 0, torch.tensor([1]), torch.ones(1, 12, 3))
    assert bool((storage.part(STATE, 0, 0)[1] == 1).all())


def test_every_part_lies_at_its_bytes() -> None:
    layout = make_layout()
    storage = PoolStorage(layout)
    seen = np.zeros(layout.pool_bytes, np.int64)
    for g, plan in enumerate(layout.plans):
        seen[:] = 0
        for e in range(plan.group.layers):
            for p, part in enumerate(plan.group.parts):
                view = storage.part(g, e, p)
                shape = part.shape if plan.group.is_state else (plan.group.page_tokens, *part.shape)
                assert view.shape == (layout.slots(g), *shape)
                assert str(view.dtype) == f"torch.{part.dtype}"
                for slot in (0, 1, layout.slots(g) - 1):
                    start = view[slot].storage_offset() * part.item_bytes
                    assert start == slot * plan.stride + plan.offsets[e][p]
                    assert view[slot].is_contiguous()
                    seen[start : start + view[slot].numel() * part.item_bytes] += 1
        assert seen.max() == 1, "two parts of one group overlap"


def test_tokens_read_back() -> None:
    layout = make_layout()
    storage = PoolStorage(layout)
    slots = torch.tensor([5, 0, 5, 3])
    rows = torch.tensor([7, 0, 2, 4])
    values = torch.randn(4, 2, 8)
    index = TokenIndex(slots, rows)
    storage.write_tokens(FULL, 1, 0, index, values)
    assert torch.equal(storage.read_tokens(FULL, 1, 0, index), values)
    assert torch.equal(storage.part(FULL, 1, 0)[slots, rows], values)


def test_tokens_of_parts_with_different_widths_read_back() -> None:
    # Pages are no whole number of keys apart, so rows cannot be counted over the whole pool.
    entries = [CacheEntry(layer, "full_attention", attention_parts(1, 6, "float32", 4)) for layer in range(3)]
    layout = plan_layout(group_entries(entries, 8), 1 << 16, 8)
    storage = PoolStorage(layout)
    index = TokenIndex(torch.tensor([3, 1]), torch.tensor([7, 2]))
    for part, width in ((0, 6), (1, 4)):
        values = torch.randn(2, 1, width)
        storage.write_tokens(0, 2, part, index, values)
        assert torch.equal(storage.read_tokens(0, 2, part, index), values)


def test_states_read_back_in_their_dtype() -> None:
    storage = PoolStorage(make_layout())
    slots = torch.tensor([2, 0])
    values = torch.randn(2, 12, 3)
    storage.write_states(STATE, 2, 0, slots, values)
    assert torch.equal(storage.read_states(STATE, 2, 0, slots), values.bfloat16())


copies = st.lists(
    st.tuples(st.sampled_from([FULL, STATE]), st.integers(0, 5), st.integers(0, 5)).filter(lambda c: c[1] != c[2]),
    max_size=30,
)


@given(copies)
def test_copies_have_the_effect_of_one_after_the_other(steps: list[tuple[int, int, int]]) -> None:
    layout = make_layout()
    one, other = PoolStorage(layout), PoolStorage(layout)
    start = torch.randint(0, 256, (layout.pool_bytes,), dtype=torch.uint8)
    for storage in (one, other):
        torch.empty(0, dtype=torch.uint8).set_(raw(storage)).copy_(start)
    one.apply([PageCopy(*step) for step in steps])
    for group, src, dst in steps:
        for e in range(layout.groups[group].layers):
            for p in range(len(layout.groups[group].parts)):
                view = other.part(group, e, p)
                view[dst] = view[src].clone()
    for g, plan in enumerate(layout.plans):
        for e in range(plan.group.layers):
            for p in range(len(plan.group.parts)):
                # As bits: random bytes hold NaN, which equals nothing.
                bits = {4: torch.int32, 2: torch.int16}[plan.group.parts[p].item_bytes]
                assert torch.equal(
                    one.part(g, e, p).contiguous().view(bits), other.part(g, e, p).contiguous().view(bits)
                )


def test_a_slab_passed_on_between_two_copies_is_read_in_time() -> None:
    layout = make_layout()
    storage = PoolStorage(layout)
    storage.part(FULL, 0, 0)[0] = 1.0
    storage.part(STATE, 0, 1)[1] = 2.0
    # The page leaves slot 0 of the attention group, then a state moves over the same bytes.
    storage.apply([PageCopy(FULL, 0, layout.slots(FULL) - 1), PageCopy(STATE, 1, 0)])
    assert (storage.part(FULL, 0, 0)[layout.slots(FULL) - 1] == 1.0).all()
    assert (storage.part(STATE, 0, 1)[0] == 2.0).all()


def test_a_chain_of_copies_carries_one_page_along() -> None:
    storage = PoolStorage(make_layout())
    storage.part(FULL, 0, 0)[0] = 7.0
    storage.apply([PageCopy(FULL, a, b) for a, b in pairwise(range(6))])
    assert (storage.part(FULL, 0, 0)[5] == 7.0).all()


def test_poison_is_nan_in_every_dtype_and_only_where_asked() -> None:
    storage = PoolStorage(make_layout(), poison=True)
    assert storage.part(FULL, 0, 0).isnan().all()
    assert storage.part(STATE, 0, 0).isnan().all()
    storage.part(FULL, 0, 0)[:] = 1.0
    storage.part(FULL, 1, 1)[:] = 1.0
    storage.poison(FULL, np.array([2], np.int64))
    assert storage.part(FULL, 0, 0)[2].isnan().all()
    assert storage.part(FULL, 1, 1)[2].isnan().all()
    assert not storage.part(FULL, 0, 0)[[0, 1, 3]].isnan().any()
    storage.poison(FULL, np.zeros(0, np.int64))


def test_without_poison_mode_pages_are_left_alone() -> None:
    storage = PoolStorage(make_layout())
    storage.part(FULL, 0, 0)[2] = 1.0
    storage.poison(FULL, [2])
    assert (storage.part(FULL, 0, 0)[2] == 1.0).all()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"])
def test_poison_bytes_are_nan(dtype: str) -> None:
    entries = [CacheEntry(0, "full_attention", attention_parts(1, 16, dtype))]
    storage = PoolStorage(plan_layout(group_entries(entries, 16), 1 << 14, 16), poison=True)
    assert storage.part(0, 0, 0).float().isnan().all()
