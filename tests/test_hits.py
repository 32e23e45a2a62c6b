"""The prefix hit against brute force: every kind, mixes of kinds, page sizes and units, with any pages lost."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridkv.entries import CacheEntry
from hybridkv.manager import GroupManager
from hybridkv.retention import Victims
from tests.shadow import brute_force_hit
from tests.strategies import (
    BASES,
    TOKEN_KINDS,
    attention,
    cache,
    examples,
    groups_of,
    hybrid_groups,
    manager_of,
    prompts,
    state,
    token_layers,
)


def lose_pages(manager: GroupManager, data: st.DataObject, most: int) -> None:
    """Lose any cached pages, needed or not."""
    ledger = manager._ledger
    for _ in range(data.draw(st.integers(0, most))):
        cached = [(g, page) for g, row_of in enumerate(ledger.index.row_of) for page in np.flatnonzero(row_of >= 0)]
        if cached:
            g, page = data.draw(st.sampled_from(cached))
            ledger.retention.drop_needing(g, int(page))
            ledger.lose([Victims(g, np.array([page]))])
    manager.check()


def check_hits(manager: GroupManager, texts: list[list[int]], data: st.DataObject) -> None:
    """Open every text, and one past each of its lengths, against what is cached now."""
    for text in texts:
        for tokens in (text, [*text, 1], text[: data.draw(st.integers(1, len(text)))]):
            seq = manager.open(tokens)
            assert seq.hit_tokens == brute_force_hit(manager, seq)
            assert seq.hit_tokens < len(tokens), "the last token is always computed"
            manager.close(seq, cache=False)
    manager.check()


def run(manager: GroupManager, texts: list[list[int]], data: st.DataObject) -> None:
    for text in texts:
        breakpoints = data.draw(st.lists(st.integers(0, len(text)), max_size=2))
        cache(manager, text, data.draw(st.sampled_from([1, 5, 16, 100])), breakpoints=breakpoints)
    check_hits(manager, texts, data)
    lose_pages(manager, data, 12)
    check_hits(manager, texts, data)


@settings(max_examples=examples(0.8))
@given(st.data(), st.sampled_from([1, 2, 4, 16]), st.lists(prompts(80), min_size=1, max_size=3))
def test_any_mix_of_kinds(data: st.DataObject, unit: int, texts: list[list[int]]) -> None:
    groups = data.draw(hybrid_groups(unit))
    interval = data.draw(st.sampled_from([None, 8, 32]))
    run(manager_of(groups, 400, unit_tokens=unit, checkpoint_interval=interval), texts, data)


@pytest.mark.parametrize("kind", [*TOKEN_KINDS, "linear_attention"])
@pytest.mark.parametrize("units_per_page", [1, 3])
def test_each_kind_alone(kind: str, units_per_page: int) -> None:
    @settings(max_examples=examples(0.2))
    @given(st.data(), st.lists(prompts(80), min_size=1, max_size=2))
    def one(data: st.DataObject, texts: list[list[int]]) -> None:
        layers: list[CacheEntry] = state() if kind == "linear_attention" else data.draw(token_layers(kind))
        groups = groups_of(layers, page_tokens=2 * units_per_page)
        run(manager_of(groups, 400, unit_tokens=2, checkpoint_interval=8), texts, data)

    one()


TEXT = [*BASES[0][:40]]


def one_group(kind: str, page_tokens: int = 4, **params: int) -> GroupManager:
    groups = groups_of(attention(kind, **params), page_tokens=page_tokens)
    manager = manager_of(groups, 60, unit_tokens=4)
    cache(manager, TEXT)
    return manager


def lose(manager: GroupManager, group: int, *page_indices: int) -> None:
    """Lose pages of the cached text."""
    ledger = manager._ledger
    unit = manager.unit_tokens
    seq = manager.open([*TEXT, 1])
    rows = ledger.index.chain(ledger.index.row(seq.digests[len(TEXT) // unit - 1]))
    size = (manager.groups[group].page_tokens or unit) // unit
    manager.close(seq, cache=False)
    for i in page_indices:
        page = int(ledger.index.page_at[group][rows[(i + 1) * size - 1]])
        ledger.retention.drop_needing(group, page)
        ledger.lose([Victims(group, np.array([page]))])


def hit(manager: GroupManager, tokens: list[int]) -> int:
    seq = manager.open(tokens)
    manager.close(seq, cache=False)
    return seq.hit_tokens


@pytest.mark.parametrize(
    ("kind", "params", "lost", "expected"),
    [
        ("full_attention", {}, [], 40),
        ("full_attention", {}, [5], 20),
        ("full_attention", {}, [0], 0),
        ("sliding_attention", {"window": 9}, [0, 1, 2], 40),
        ("sliding_attention", {"window": 9}, [8], 32),
        ("sliding_attention", {"window": 9}, [9], 36),
        ("sliding_attention", {"window": 10}, [7], 28),
        ("sliding_attention", {"window": 1}, [9], 40),
        ("chunked_attention", {"chunk": 16}, [7], 40),
        ("chunked_attention", {"chunk": 16}, [8], 32),
        ("chunked_attention", {"chunk": 16}, [8, 9], 32),
        ("chunked_attention", {"chunk": 40}, [3], 40),
        ("sink_attention", {"sinks": 4, "window": 5}, [1, 2, 3], 40),
        ("sink_attention", {"sinks": 4, "window": 5}, [0], 0),
        ("sink_attention", {"sinks": 4, "window": 5}, [9], 36),
    ],
)
def test_what_a_lost_page_costs(kind: str, params: dict[str, int], lost: list[int], expected: int) -> None:
    manager = one_group(kind, **params)
    lose(manager, 0, *lost)
    assert hit(manager, [*TEXT, 1]) == expected


def test_a_chunk_boundary_inside_a_page_is_no_place_to_resume() -> None:
    """Nothing is needed at 36, but the page that token 36 goes to would be published without its first tokens."""
    manager = one_group("chunked_attention", page_tokens=8, chunk=12)
    assert hit(manager, TEXT[:37]) == 32
    assert hit(manager, TEXT[:25]) == 24


def test_a_state_is_found_only_at_its_own_boundary() -> None:
    manager = manager_of(groups_of(state()), 60, unit_tokens=4, checkpoint_interval=None)
    cache(manager, TEXT[:30], breakpoints=[12])
    assert [hit(manager, [*TEXT[:n], 9]) for n in (11, 12, 27, 28, 29)] == [0, 12, 12, 28, 28]


def test_the_hit_is_where_all_groups_agree() -> None:
    layers = [attention(), attention("sliding_attention", window=9), state()]
    groups = groups_of(*layers, page_tokens={"full_attention": 8, "sliding_attention": 4})
    manager = manager_of(groups, 60, unit_tokens=4, checkpoint_interval=16)
    cache(manager, TEXT)
    assert manager.resume_points() == (16, 32, 40)
    assert hit(manager, [*TEXT, 1]) == 40
    lose(manager, 1, 9)
    assert hit(manager, [*TEXT, 1]) == 32
    lose(manager, 0, 3)
    assert hit(manager, [*TEXT, 1]) == 16
    lose(manager, 2, 3)
    assert hit(manager, [*TEXT, 1]) == 0
