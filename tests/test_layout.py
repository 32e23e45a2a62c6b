"""Strides, slabs and offsets: what every pool has to satisfy before a page is handed out."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridkv import layer_groups
from hybridkv.entries import CacheEntry, LayerGroup, Part, group_entries
from hybridkv.errors import ConfigError, PoolTooSmall
from hybridkv.layout import ALIGN, MAX_PADDING, MAX_SLABS, SLAB_SHARE, Layout, plan_layout
from tests.strategies import attention, groups_of, hybrid_groups, state

GIB = 2**30
PRESETS = (
    "gemma-3-12b",
    "gemma-3-270m",
    "gpt-oss-20b",
    "jamba-1.5-mini",
    "llama-3.1-8b",
    "nemotron-h-8b",
    "qwen3-next-80b-a3b",
)


def part_ranges(layout: Layout, g: int) -> list[tuple[int, int]]:
    """Byte ranges of the tensors in a page, ascending."""
    plan = layout.plans[g]
    tokens = max(plan.group.page_tokens, 1)
    return sorted(
        (offset, offset + part.nbytes * tokens)
        for row in plan.offsets
        for offset, part in zip(row, plan.group.parts, strict=True)
    )


def check_layout(layout: Layout, groups: tuple[LayerGroup, ...], pool_bytes: int) -> None:
    assert pool_bytes - layout.slab_bytes < layout.pool_bytes <= pool_bytes, "every whole slab of the budget is used"
    for g, plan in enumerate(layout.plans):
        assert plan.stride * plan.per_slab == layout.slab_bytes, "slot i lies at i * stride, and slabs hold whole slots"
        assert plan.stride % ALIGN == 0
        assert layout.slots(g) == layout.slabs * plan.per_slab
        ranges = part_ranges(layout, g)
        ends = [0, *(stop for _, stop in ranges)]
        assert all(start >= end for (start, _), end in zip(ranges, ends, strict=False)), "parts never overlap"
        assert ends[-1] <= plan.stride, "a page ends before the next one starts"
        for row in plan.offsets:
            for offset, part in zip(row, plan.group.parts, strict=True):
                assert offset % part.item_bytes == 0, "typed views are aligned"
    served = [(group.kind, group.parts, entry) for group in layout.groups for entry in group.entries]
    asked = [(group.kind, group.parts, entry) for group in groups for entry in group.entries]
    assert len(served) == len(asked)
    assert set(served) == set(asked), "splitting loses no layer and serves none twice"


@pytest.mark.parametrize("gib", [1, 4, 16, 80])
@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_wastes_at_most_one_percent_and_its_slabs_are_small(preset: str, gib: int) -> None:
    groups = layer_groups(preset)
    layout = plan_layout(groups, gib * GIB)
    check_layout(layout, groups, gib * GIB)
    assert all(plan.padding <= MAX_PADDING for plan in layout.plans)
    assert layout.slab_bytes * SLAB_SHARE <= gib * GIB
    assert layout.slabs <= MAX_SLABS


@pytest.mark.parametrize("preset", PRESETS)
def test_attention_pages_of_a_preset_are_exact(preset: str) -> None:
    for plan in plan_layout(layer_groups(preset), 16 * GIB).plans:
        if not plan.group.is_state:
            assert plan.stride == plan.group.page_bytes


@pytest.mark.parametrize(
    ("preset", "mib"), [("gemma-3-12b", 5), ("jamba-1.5-mini", 30.75), ("nemotron-h-8b", 97.5), ("llama-3.1-8b", 2)]
)
def test_slabs_of_the_reference_layouts(preset: str, mib: float) -> None:
    assert plan_layout(layer_groups(preset), 16 * GIB).slab_bytes == mib * 2**20


def test_a_state_group_is_split_by_layers_only_where_slabs_would_be_too_large() -> None:
    groups = layer_groups("jamba-1.5-mini")
    roomy, tight = plan_layout(groups, 16 * GIB), plan_layout(groups, GIB)
    assert [group.layers for group in roomy.groups] == [group.layers for group in groups]
    split = [group for group in tight.groups if group.is_state]
    assert len(split) > 1
    assert sum(group.layers for group in split) == 28
    assert len({group.name for group in tight.groups}) == len(tight.groups), "names stay unique"
    assert tight.slab_bytes < roomy.slab_bytes


@given(st.data(), st.sampled_from([1, 2, 4]))
def test_any_layout_keeps_the_rules_of_the_pool(data: st.DataObject, unit: int) -> None:
    groups = data.draw(hybrid_groups(unit))
    pages = sum(group.page_bytes for group in groups)
    budget = data.draw(st.integers(0, 3 * pages) | st.integers(pages, 300 * pages))
    try:
        layout = plan_layout(groups, budget, unit)
    except PoolTooSmall as error:
        needed = int(re.findall(r"[\d,]+", str(error))[-1].replace(",", ""))
        assert needed > budget, "the message asks for more than there is"
        check_layout(plan_layout(groups, needed, unit), groups, needed)
        with pytest.raises(PoolTooSmall):
            plan_layout(groups, needed - 1, unit)
    else:
        check_layout(layout, groups, budget)
        assert layout.slabs >= len(layout.groups)


def test_parts_of_mixed_item_sizes_lie_wide_ones_first() -> None:
    parts = (Part("a", (3,), "uint8"), Part("b", (1,), "float32"), Part("c", (1,), "bfloat16"))
    (plan,) = plan_layout(group_entries([CacheEntry(i, "full_attention", parts) for i in range(2)], 1), 4096, 1).plans
    assert plan.offsets == ((12, 0, 8), (15, 4, 10))


def test_pages_of_odd_sizes_are_padded_to_the_alignment() -> None:
    groups = group_entries([CacheEntry(0, "full_attention", (Part("k", (3,), "uint8"),))], 7)
    layout = plan_layout(groups, 4096, 7)
    check_layout(layout, groups, 4096)
    assert layout.plans[0].stride == 32
    assert layout.plans[0].padding == pytest.approx(1 - 21 / 32)


@pytest.mark.parametrize("budget", [0, 1, 100, 255])
def test_a_pool_needs_a_slab_for_every_group(budget: int) -> None:
    groups = groups_of(attention(width=4), attention(width=8))
    with pytest.raises(PoolTooSmall, match=rf"{budget:,} bytes cannot hold one slab for each of 2 .* at least 256 "):
        plan_layout(groups, budget, 4)
    assert plan_layout(groups, 256, 4).slabs == 2


@pytest.mark.parametrize(("page_tokens", "unit"), [(8, 16), (24, 16), (3, 2)])
def test_a_page_is_a_multiple_of_the_unit(page_tokens: int, unit: int) -> None:
    groups = groups_of(attention(), page_tokens=page_tokens)
    with pytest.raises(ConfigError, match=rf"'full_attention' has pages of {page_tokens} .* unit of {unit}"):
        plan_layout(groups, 1 << 20, unit)


def test_a_layout_needs_groups_and_a_unit() -> None:
    with pytest.raises(ConfigError, match="at least one layer group"):
        plan_layout((), 1 << 20)
    with pytest.raises(ConfigError, match="at least 1, got 0"):
        plan_layout(groups_of(state()), 1 << 20, 0)


def test_boundaries_are_where_pages_of_every_group_end() -> None:
    pages = {"full_attention": 6, "sliding_attention": 4}
    groups = groups_of(attention(), attention("sliding_attention", window=5), state(), page_tokens=pages)
    assert plan_layout(groups, 1 << 16, 2).boundary_tokens == 12
    assert plan_layout(groups_of(state()), 1 << 16, 16).boundary_tokens == 16
