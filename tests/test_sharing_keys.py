"""What is part of the key: salts, adapters, images, models and units never share a page."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridkv import layer_groups
from hybridkv.manager import GroupManager
from tests.strategies import (
    attention,
    cache,
    compute,
    examples,
    groups_of,
    hit_of,
    manager_of,
    managers,
    prompts,
    state,
)

KEYS: tuple[dict[str, Any], ...] = (
    {},
    {"salt": ""},
    {"salt": "a"},
    {"salt": b"a"},
    {"adapter": "a"},
    {"adapter": ("a", "")},
    {"adapter": ("a", "1")},
    {"adapter": "a1"},
    {"salt": "a", "adapter": "a"},
    {"images": [(0, "a")]},
    {"images": [(1, "a")]},
    {"images": [(0, "b")]},
    {"images": [(0, b"a")]},
)


@pytest.mark.parametrize("i", range(len(KEYS)))
def test_no_two_keys_share_a_page(i: int) -> None:
    manager = manager_of(groups_of(attention(), state()), 400, unit_tokens=4, checkpoint_interval=4)
    text = [1] * 21
    cache(manager, text, **KEYS[i])
    assert [cache(manager, text, **other) for other in KEYS] == [20 if j == i else 0 for j in range(len(KEYS))]
    manager.check()


@settings(max_examples=examples(0.5))
@given(managers((100, 200)), prompts(), st.lists(st.sampled_from(KEYS), min_size=2, max_size=5), st.integers(1, 20))
def test_tenants_hold_disjoint_pages(manager: GroupManager, text: list[int], keys: list[Any], chunk: int) -> None:
    text = [1, 1, *text]
    for key in keys:
        cache(manager, text, chunk, **key)
    running = [manager.open(text, **key) for key in keys]
    for seq in running:
        compute(manager, seq, chunk=chunk)
    for g, group in enumerate(manager.groups):
        held = [
            {seq.working[g]} if group.is_state else set(seq.table(g).pages[seq.table(g).held()].tolist())
            for seq in running
        ]
        for i, one in enumerate(held):
            for j, other in enumerate(held[:i]):
                # An image counts from the unit it starts in, so the units before it are everybody's.
                shared = {
                    page
                    for page in one & other
                    if manager._ledger.index.row_of[g][page] < 0
                    or manager._ledger.index.depth[manager._ledger.index.row_of[g][page]] * manager.unit_tokens > 1
                }
                assert not shared or keys[i] == keys[j]
    manager.check()


def test_an_image_is_shared_up_to_the_unit_it_starts_in() -> None:
    manager = manager_of(groups_of(attention()), 100, unit_tokens=4)
    text = [1] * 21
    cache(manager, text, images=[(9, "x")])
    assert hit_of(manager, text, images=[(9, "y")]) == 8
    assert hit_of(manager, text) == 8
    assert hit_of(manager, text, images=[(9, "x")]) == 20
    assert hit_of(manager, text, images=[(9, "x"), (17, "y")]) == 16


@pytest.mark.parametrize(("cut", "with_image", "without"), [(8, 8, 20), (9, 12, 20), (10, 20, 8)])
def test_an_image_that_was_cut_off_is_forgotten(cut: int, with_image: int, without: int) -> None:
    """Going back before an image and on with plain tokens must not publish them under the image's key."""
    manager = manager_of(groups_of(attention()), 100, unit_tokens=4)
    seq = manager.open([1] * 12, images=[(9, "x")])
    compute(manager, seq)
    manager.truncate(seq, cut)
    manager.evict(1 << 40)
    for _ in range(24 - cut):
        manager.reserve_decode([seq])
        manager.commit_decode([seq], [1])
    manager.close(seq)
    assert hit_of(manager, [1] * 21, images=[(9, "x")]) == with_image
    assert hit_of(manager, [1] * 21) == without


def test_models_units_and_hashes_do_not_share() -> None:
    groups = groups_of(attention())
    seeds = {
        manager_of(groups, 20, unit_tokens=unit, model=model, hash=hash).open([1] * 9).digests[0]
        for unit in (2, 4)
        for model in ("", "m")
        for hash in ("sha256", "xxh3_128")
    }
    assert len(seeds) == 8


def test_the_size_of_the_pool_does_not_change_the_keys() -> None:
    groups = layer_groups("jamba-1.5-mini")
    small, large = GroupManager(groups, "1GiB"), GroupManager(groups, "16GiB")
    assert len(small.groups) > len(large.groups)
    assert small.open(range(64)).digests == large.open(range(64)).digests
