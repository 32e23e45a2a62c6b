"""Planned and measured bytes by layer type, against brute force and against the manager itself."""

import json
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridkv.catalog import layer_groups
from hybridkv.entries import CacheEntry, LayerGroup, Part, attention_parts, group_entries
from hybridkv.errors import ConfigError, OutOfPages, PoolTooSmall
from hybridkv.holding import held_pages, step_pages
from hybridkv.manager import GroupManager
from hybridkv.memory import all_full_bytes, plan_memory, usage_by_kind

MIB = 2**20
KV = attention_parts(2, 16, "bfloat16")
STATE = (Part("conv", (64, 3), "bfloat16"), Part("recurrent", (64, 8), "float32"))


@pytest.mark.parametrize(
    ("preset", "state_dtype", "mib"),
    [
        ("jamba-1.5-mini", "float32", [79.3, 527.3, 2063.3]),
        ("gemma-3-12b", "float32", [576.0, 2368.0, 8512.0]),
        ("qwen3-next-80b-a3b", "bfloat16", [133.7, 805.7, 3109.7]),
        ("qwen3-next-80b-a3b", "float32", [169.7, 841.7, 3145.7]),
        ("gpt-oss-20b", "float32", [99.0, 771.0, 3075.0]),
        ("nemotron-h-8b", "float32", [161.4, 609.4, 2145.4]),
        ("llama-3.1-8b", "float32", [512.0, 4096.0, 16384.0]),
    ],
)
def test_the_minimum_of_every_reference_layout(preset: str, state_dtype: str, mib: list[float]) -> None:
    plan = plan_memory(layer_groups(preset, state_dtype=state_dtype), ["4k", "32k", "128k"], "16GiB")
    assert [round(context.minimum / MIB, 1) for context in plan.contexts] == mib
    assert plan.padding <= 0.01


def test_a_plan_by_layer_group() -> None:
    plan = plan_memory(layer_groups("jamba-1.5-mini"), [4096], "16GiB")
    state, token = plan.groups
    assert (state.name, state.layers, state.page_tokens) == ("linear_attention", 28, 0)
    assert (token.name, token.layers, token.page_tokens) == ("full_attention", 4, 16)
    assert state.page_bytes == 28 * (8192 * 3 * 2 + 8192 * 16 * 4)
    assert token.page_bytes == token.stride == 4 * 16 * 2 * 8 * 128 * 2, "attention pages are exact"
    assert state.page_bytes <= state.stride <= state.page_bytes * 1.01
    assert plan.slab_bytes * plan.slabs == plan.pool_bytes <= 16 * 2**30
    (context,) = plan.contexts
    assert [(holding.name, holding.pages) for holding in context.groups] == [
        ("linear_attention", 1),
        ("full_attention", 256),
    ]
    assert [holding.nbytes for holding in context.groups] == [state.page_bytes, 256 * token.page_bytes]
    assert context.minimum == sum(holding.nbytes for holding in context.groups)


def test_a_split_group_is_one_row() -> None:
    groups = layer_groups("nemotron-h-8b")
    plan = plan_memory(groups, ["4k"], "2GiB")
    state = plan.groups[0]
    assert state.split > 1
    assert (state.layers, state.page_bytes) == (24, groups[0].page_bytes)
    assert state.page_bytes <= state.stride <= state.page_bytes * 1.01
    assert plan.contexts[0].groups[0].pages == 1


@pytest.mark.parametrize(
    ("preset", "factor"), [("jamba-1.5-mini", 8), ("gemma-3-12b", 6), ("gpt-oss-20b", 2), ("nemotron-h-8b", 7)]
)
def test_all_full_counts_every_layer_that_has_a_cache(preset: str, factor: int) -> None:
    groups = layer_groups(preset)
    (full,) = (group for group in groups if group.kind == "full_attention")
    assert all_full_bytes(groups, 32768) == factor * 32768 * full.layers * full.entry_bytes


def test_all_full_rounds_up_to_pages_and_needs_attention() -> None:
    token = group_entries([CacheEntry(0, "full_attention", KV)])
    assert all_full_bytes(token, 17) == 2 * token[0].page_bytes
    assert all_full_bytes(group_entries([CacheEntry(0, "linear_attention", STATE)]), 17) is None
    twice = group_entries([CacheEntry(0, "full_attention", KV), CacheEntry(0, "linear_attention", STATE)])
    assert all_full_bytes(twice, 17) == all_full_bytes(token, 17), "a layer with both is one layer"


def one(kind: str, **params: int) -> LayerGroup:
    return group_entries([CacheEntry(0, kind, KV, tuple(params.items()))])[0]


any_group = st.one_of(
    st.just(one("full_attention")),
    st.integers(1, 60).map(lambda window: one("sliding_attention", window=window)),
    st.integers(1, 60).map(lambda chunk: one("chunked_attention", chunk=chunk)),
    st.tuples(st.integers(1, 40), st.integers(1, 60)).map(lambda s: one("sink_attention", sinks=s[0], window=s[1])),
)


@given(any_group, st.integers(0, 150))
def test_pages_held_are_those_the_next_token_sees_and_the_half_full_one(group: LayerGroup, length: int) -> None:
    lengths = np.array([length], np.int64)
    seen = {token // 16 for start, stop in group.rule.needed(lengths) for token in range(int(start[0]), int(stop[0]))}
    half_full = {length // 16} if length % 16 else set()
    assert held_pages(group, lengths)[0] == len(seen | half_full)
    assert step_pages(group, lengths)[0] == len(seen | {length // 16})


def test_a_state_is_one_page_once_there_is_a_token() -> None:
    (group,) = group_entries([CacheEntry(0, "linear_attention", STATE)])
    assert held_pages(group, np.array([0, 1, 1000])).tolist() == [0, 1, 1]
    assert step_pages(group, np.array([0, 1, 1000])).tolist() == [1, 1, 1]


def grow(manager: GroupManager, seed: int, tokens: int) -> None:
    """Open a request with its own prompt and compute all of it, a page at a time."""
    seq = manager.open(np.random.default_rng(seed).integers(0, 1000, tokens))
    while seq.length < tokens:
        n = min(16, tokens - seq.length)
        manager.reserve(seq, n)
        manager.take_copies()
        manager.commit(seq, n)


@pytest.mark.parametrize(
    ("preset", "tokens", "pool"),
    [
        ("gemma-3-12b", 1000, "2GiB"),
        ("gemma-3-270m", 600, "64MiB"),
        ("jamba-1.5-mini", 2048, "1GiB"),
        ("nemotron-h-8b", 1024, "1GiB"),
        ("qwen3-next-80b-a3b", 2048, "1GiB"),
        ("gpt-oss-20b", 777, "256MiB"),
        ("llama-3.1-8b", 512, "512MiB"),
    ],
)
def test_as_many_requests_fit_in_the_manager_as_planned(preset: str, tokens: int, pool: str) -> None:
    groups = layer_groups(preset)
    (context,) = plan_memory(groups, [tokens], pool).contexts
    assert context.requests > 1
    manager = GroupManager(groups, pool)
    for seed in range(context.requests):
        grow(manager, seed, tokens)
    manager.check()
    live = {row.kind: row.live_bytes for row in usage_by_kind(manager.usage())}
    planned = {
        group.kind: holding.pages * group.stride * context.requests
        for group, holding in zip(plan_memory(groups, [tokens], pool).groups, context.groups, strict=True)
    }
    assert live == planned, "what is held is what was planned"
    with pytest.raises(OutOfPages):
        grow(manager, context.requests, tokens)


small_groups = st.lists(
    st.sampled_from(
        [
            CacheEntry(0, "full_attention", KV),
            CacheEntry(1, "sliding_attention", KV, (("window", 24),)),
            CacheEntry(2, "sliding_attention", KV, (("window", 40),)),
            CacheEntry(3, "linear_attention", STATE),
            CacheEntry(4, "chunked_attention", KV, (("chunk", 48),)),
        ]
    ),
    min_size=1,
    unique=True,
).map(group_entries)


@settings(max_examples=40, deadline=None)
@given(small_groups, st.integers(1, 120), st.integers(8, 40))
def test_planned_requests_run_together_in_any_order(groups: Sequence[LayerGroup], tokens: int, pages: int) -> None:
    pool = pages * max(group.page_bytes for group in groups)
    (context,) = plan_memory(groups, [tokens], pool).contexts
    manager = GroupManager(groups, pool)
    wave = [manager.open([seed + 1] * tokens) for seed in range(context.requests)]
    for _ in range(tokens):
        for seq in wave:
            manager.reserve(seq, 1)
            manager.take_copies()
        for seq in wave:
            manager.commit(seq, 1)


def test_a_context_too_long_for_the_pool_fits_zero_times() -> None:
    (context,) = plan_memory(layer_groups("llama-3.1-8b"), ["128k"], "1GiB").contexts
    assert context.requests == 0
    assert context.minimum == 16 * 2**30


def test_contexts_keep_their_order_and_may_be_text() -> None:
    plan = plan_memory(layer_groups("gemma-3-270m"), ["32k", 100, "4k"], "1GiB")
    assert [context.tokens for context in plan.contexts] == [32768, 100, 4096]


def test_a_plan_becomes_json() -> None:
    plan = plan_memory(layer_groups("jamba-1.5-mini"), ["4k"], "16GiB")
    fields = json.loads(json.dumps(plan.as_dict()))
    assert fields["pool_bytes"] == plan.pool_bytes
    assert [group["name"] for group in fields["groups"]] == ["linear_attention", "full_attention"]
    assert fields["contexts"][0]["minimum"] == plan.contexts[0].minimum
    assert fields["contexts"][0]["groups"][1]["pages"] == 256


def test_bad_sizes_are_refused() -> None:
    groups = layer_groups("gemma-3-270m")
    with pytest.raises(ConfigError, match="at least one context"):
        plan_memory(groups, [], "1GiB")
    with pytest.raises(ConfigError, match="'4q'"):
        plan_memory(groups, ["4q"], "1GiB")
    with pytest.raises(ConfigError, match="'lots'"):
        plan_memory(groups, [4096], "lots")
    with pytest.raises(PoolTooSmall):
        plan_memory(groups, [4096], 4096)


def test_usage_by_kind_adds_up_split_groups() -> None:
    manager = GroupManager(layer_groups("nemotron-h-8b"), "2GiB")
    assert len(manager.groups) > 2
    seq = manager.open(range(100))
    manager.reserve(seq, 100)
    manager.commit(seq, 100)
    usage = manager.usage()
    rows = {row.kind: row for row in usage_by_kind(usage)}
    assert {kind: row.layers for kind, row in rows.items()} == {"linear_attention": 24, "full_attention": 4}
    assert sum(row.live_bytes for row in rows.values()) == usage.live_bytes > 0
    assert sum(row.cached_bytes for row in rows.values()) == usage.cached_bytes
