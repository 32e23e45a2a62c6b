"""Tiny layer groups, managers and prompts that property tests draw."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st

from hybridkv.entries import CacheEntry, LayerGroup, Part, attention_parts, group_entries
from hybridkv.errors import PoolTooSmall
from hybridkv.manager import GroupManager

TOKEN_KINDS = ("full_attention", "sliding_attention", "chunked_attention", "sink_attention")


def attention(kind: str = "full_attention", layers: int = 1, width: int = 4, **params: int) -> list[CacheEntry]:
    """Layers of one attention kind; a token takes 4 * width bytes in each."""
    parts = attention_parts(1, width, "bfloat16")
    return [CacheEntry(layer, kind, parts, tuple(params.items())) for layer in range(layers)]


def state(layers: int = 1, width: int = 16) -> list[CacheEntry]:
    """Layers with a state of 10 * width bytes each."""
    parts = (Part("conv", (width, 3), "bfloat16"), Part("recurrent", (width,), "float32"))
    return [CacheEntry(layer, "linear_attention", parts) for layer in range(layers)]


def groups_of(*kinds: list[CacheEntry], page_tokens: int | dict[str, int] = 4) -> tuple[LayerGroup, ...]:
    """Groups of these layers, stacked into one model."""
    stacked: list[CacheEntry] = []
    for entries in kinds:
        first = len(stacked)
        stacked += [CacheEntry(first + i, e.kind, e.parts, e.params, e.index) for i, e in enumerate(entries)]
    return group_entries(stacked, page_tokens)


def manager_of(groups: Sequence[LayerGroup], pages: int, **options: Any) -> GroupManager:
    """A manager whose pool has room for about `pages` pages of every group, or a little more where slabs ask for it."""
    pool = pages * sum(group.page_bytes for group in groups)
    while True:
        try:
            return GroupManager(groups, pool, **options)
        except PoolTooSmall:
            pool *= 2


def compute(manager: GroupManager, seq: Any, upto: int | None = None, chunk: int = 1 << 30) -> None:
    """Reserve and commit the known tokens of a sequence, up to a length, in chunks."""
    stop = seq.known if upto is None else upto
    while seq.length < stop:
        n = min(chunk, stop - seq.length)
        manager.reserve(seq, n)
        manager.take_copies()
        manager.commit(seq, n)


def cache(manager: GroupManager, tokens: Any, chunk: int = 1 << 30, **keys: Any) -> int:
    """Serve a prompt and close it; returns what it hit."""
    seq = manager.open(tokens, **keys)
    compute(manager, seq, chunk=chunk)
    manager.close(seq)
    return int(seq.hit_tokens)


def hit_of(manager: GroupManager, tokens: Any, **keys: Any) -> int:
    """What a prompt would hit now. A resume point there counts as used once more; nothing else changes."""
    seq = manager.open(tokens, **keys)
    manager.close(seq, cache=False)
    return int(seq.hit_tokens)


def examples(share: float) -> int:
    """A share of the profile's examples, for tests whose example is a whole history."""
    return max(1, int(settings().max_examples * share))


@st.composite
def token_layers(draw: st.DrawFn, kind: str | None = None) -> list[CacheEntry]:
    """One or two layers of an attention kind, with a window, chunk or sinks that page sizes need not divide."""
    kind = kind or draw(st.sampled_from(TOKEN_KINDS))
    size = st.integers(1, 24)
    params = {
        "full_attention": {},
        "sliding_attention": {"window": draw(size)},
        "chunked_attention": {"chunk": draw(size)},
        "sink_attention": {"sinks": draw(st.integers(1, 6)), "window": draw(size)},
    }[kind]
    return attention(kind, draw(st.integers(1, 2)), draw(st.sampled_from([2, 4, 6])), **params)


@st.composite
def state_layers(draw: st.DrawFn) -> list[CacheEntry]:
    """One to three layers with a state."""
    return state(draw(st.integers(1, 3)), draw(st.sampled_from([8, 20, 64])))


@st.composite
def hybrid_groups(draw: st.DrawFn, unit: int) -> tuple[LayerGroup, ...]:
    """One to four groups of any kinds, each kind with its own page size, a multiple of the unit."""
    kinds = draw(st.lists(st.one_of(token_layers(), token_layers(), state_layers()), min_size=1, max_size=4))
    pages = {kind: unit * draw(st.integers(1, 3)) for kind in TOKEN_KINDS}
    return groups_of(*kinds, page_tokens=pages)


@st.composite
def managers(draw: st.DrawFn, pages: tuple[int, ...] = (3, 8, 20, 50, 120)) -> GroupManager:
    """A manager over any mix of groups, from a pool that hardly holds one request to one that holds many."""
    unit = draw(st.sampled_from([1, 2, 4]))
    groups = draw(hybrid_groups(unit))
    interval = st.sampled_from([None, 4, 8, 16])
    return manager_of(
        groups,
        draw(st.sampled_from(pages)),
        unit_tokens=unit,
        policy=draw(st.sampled_from(["lru", "cost"])),
        checkpoint_interval=draw(interval),
        decode_checkpoint_interval=draw(interval),
    )


BASES = tuple([(i * k + i // 7 * (k + 1)) % 5 for i in range(96)] for k in (1, 3))
"""Two long prompts. Others share a prefix with one of them and then part from it."""


@st.composite
def prompts(draw: st.DrawFn, most: int = 60) -> list[int]:
    """A prefix of one of two texts, and a few tokens of its own."""
    prefix = draw(st.sampled_from(BASES))[: draw(st.integers(0, most))]
    tail = draw(st.lists(st.integers(0, 1), min_size=0 if prefix else 1, max_size=6))
    return [*prefix, *tail]
