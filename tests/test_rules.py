"""Rules against the attention masks they stand for, and the registry of group kinds."""

from collections.abc import Callable
from importlib.metadata import EntryPoint

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridkv import rules
from hybridkv.errors import ConfigError, UnknownGroupKind
from hybridkv.rules import (
    ChunkedAttention,
    FullAttention,
    Rule,
    SinkAttention,
    SlidingAttention,
    State,
    group_kind,
    make_rule,
    page_ranges,
    register_group_kind,
    resumable,
)

Mask = Callable[[int, int], bool]
"""Whether the token at position q may look at the earlier token at position k, or needs what was left after it."""


def mask_of(rule: Rule) -> Mask:
    match rule:
        case FullAttention():
            return lambda q, k: True
        case SlidingAttention(window):
            return lambda q, k: q - k < window
        case ChunkedAttention(chunk):
            return lambda q, k: q // chunk == k // chunk
        case SinkAttention(sinks, window):
            return lambda q, k: k < sinks or q - k < window
        case State():
            return lambda q, k: k == q - 1
    raise AssertionError(rule)


def seen_by(rule: Rule, length: int) -> set[int]:
    """The earlier tokens the token at position `length` looks at."""
    mask = mask_of(rule)
    return {k for k in range(length) if mask(length, k)}


sizes = st.integers(1, 70)
any_rule = st.one_of(
    st.just(FullAttention()),
    st.builds(SlidingAttention, window=sizes),
    st.builds(ChunkedAttention, chunk=sizes),
    st.builds(SinkAttention, sinks=sizes, window=sizes),
    st.just(State()),
)


@given(any_rule, st.lists(st.integers(0, 200), min_size=1, max_size=8))
def test_needed_is_what_the_mask_shows(rule: Rule, lengths: list[int]) -> None:
    ranges = rule.needed(np.array(lengths, np.int64))
    for i, length in enumerate(lengths):
        edge = 0
        tokens: set[int] = set()
        for start, stop in ranges:
            assert edge <= start[i] <= stop[i] <= length, "ascending, disjoint, inside the prefix"
            edge = int(stop[i])
            tokens.update(range(int(start[i]), int(stop[i])))
        assert tokens == seen_by(rule, length)


@given(any_rule, st.integers(0, 200), st.sampled_from([1, 4, 16, 48]))
def test_page_ranges_are_the_pages_of_those_tokens(rule: Rule, length: int, page_tokens: int) -> None:
    pages: list[int] = []
    for start, stop in page_ranges(rule, np.array([length], np.int64), page_tokens):
        pages.extend(range(int(start[0]), int(stop[0])))
    assert pages == sorted({k // page_tokens for k in seen_by(rule, length)}), "every page once, ascending"


@settings(max_examples=200)
@given(any_rule, st.lists(st.booleans(), max_size=12), st.sampled_from([4, 16]))
def test_resumable_looks_at_every_needed_page(rule: Rule, present: list[bool], page_tokens: int) -> None:
    lengths = np.arange(len(present) + 3, dtype=np.int64) * page_tokens
    ok = resumable(rule, lengths, page_tokens, np.array(present, np.bool_))
    for length, answer in zip(lengths.tolist(), ok.tolist(), strict=True):
        needed = {k // page_tokens for k in seen_by(rule, length)}
        assert answer == all(page < len(present) and present[page] for page in needed)


def test_nothing_is_needed_before_the_first_token() -> None:
    zero = np.zeros(1, np.int64)
    for rule in (FullAttention(), SlidingAttention(4), ChunkedAttention(4), SinkAttention(2, 4), State()):
        assert all(start[0] == stop[0] == 0 for start, stop in rule.needed(zero)), rule


def test_a_window_of_one_token_needs_no_past() -> None:
    (start, stop), *_ = SlidingAttention(1).needed(np.arange(40))
    assert (start == stop).all()


def test_a_full_chunk_needs_no_past() -> None:
    ((start, stop),) = ChunkedAttention(8).needed(np.array([7, 8, 9]))
    assert (stop - start).tolist() == [7, 0, 1]


def test_needed_keeps_the_shape_of_its_argument() -> None:
    lengths = np.arange(6, dtype=np.int64).reshape(2, 3)
    for rule in (FullAttention(), SlidingAttention(3), ChunkedAttention(3), SinkAttention(1, 2), State()):
        assert all(start.shape == stop.shape == (2, 3) for start, stop in rule.needed(lengths))


@pytest.mark.parametrize(
    "make",
    [
        lambda: SlidingAttention(0),
        lambda: SlidingAttention(-4),
        lambda: ChunkedAttention(0),
        lambda: SinkAttention(0, 4),
        lambda: SinkAttention(4, 0),
    ],
)
def test_rules_refuse_sizes_below_one(make: Callable[[], Rule]) -> None:
    with pytest.raises(ConfigError, match="at least 1 token"):
        make()


@pytest.fixture
def fresh_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "_KINDS", dict(rules._KINDS))


@pytest.mark.usefixtures("fresh_registry")
def test_a_registered_kind_is_found_and_makes_its_rule() -> None:
    kind = register_group_kind("last_four", holds="tokens", rule=lambda: SlidingAttention(5))
    assert group_kind("last_four") is kind
    assert make_rule("last_four", {}) == SlidingAttention(5)


@pytest.mark.usefixtures("fresh_registry")
def test_a_taken_name_is_refused_but_registering_twice_is_not() -> None:
    register_group_kind("full_attention", holds="tokens", rule=FullAttention)
    with pytest.raises(ConfigError, match="already registered"):
        register_group_kind("full_attention", holds="tokens", rule=State)
    assert group_kind("full_attention").rule is FullAttention


@pytest.mark.usefixtures("fresh_registry")
def test_a_page_holds_tokens_or_a_state() -> None:
    with pytest.raises(ConfigError, match="'tokens' or 'state'"):
        register_group_kind("other", holds="pages", rule=State)  # type: ignore[arg-type]


def test_an_unknown_kind_is_named_beside_the_known_ones() -> None:
    with pytest.raises(UnknownGroupKind, match=r"'paged_attention'.*chunked_attention.*sliding_attention"):
        group_kind("paged_attention")


def test_parameters_must_fit_the_kind() -> None:
    assert make_rule("sliding_attention", {"window": 24}) == SlidingAttention(24)
    assert make_rule("sink_attention", {"sinks": 4, "window": 24}) == SinkAttention(4, 24)
    with pytest.raises(ConfigError, match=r"'sliding_attention' cannot take .*'chunk'"):
        make_rule("sliding_attention", {"chunk": 24})
    with pytest.raises(ConfigError, match="'full_attention' cannot take"):
        make_rule("full_attention", {"window": 24})


def register_from_a_package() -> None:
    register_group_kind("from_a_package", holds="state", rule=State)


@pytest.mark.usefixtures("fresh_registry")
def test_an_installed_package_can_bring_a_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    class Point(EntryPoint):
        def load(self) -> Callable[[], None]:
            return register_from_a_package

    def points(group: str, name: str) -> list[EntryPoint]:
        wanted = group == "hybridkv.groups" and name == "from_a_package"
        return [Point(name, "some_package:register", group)] if wanted else []

    monkeypatch.setattr(rules, "entry_points", points)
    assert group_kind("from_a_package").holds == "state"
