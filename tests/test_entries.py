"""Cache entries, their sizes, and how they are gathered into groups."""

import pytest

from hybridkv.entries import CacheEntry, Part, attention_parts, group_entries
from hybridkv.errors import ConfigError, UnknownGroupKind
from hybridkv.rules import SlidingAttention

KV = attention_parts(2, 16, "bfloat16")
STATE = (Part("conv", (64, 3), "bfloat16"), Part("recurrent", (64, 8), "float32"))


def full(layer: int) -> CacheEntry:
    return CacheEntry(layer, "full_attention", KV)


def sliding(layer: int, window: int) -> CacheEntry:
    return CacheEntry(layer, "sliding_attention", KV, (("window", window),))


def state(layer: int, index: int = 0) -> CacheEntry:
    return CacheEntry(layer, "linear_attention", STATE, index=index)


def test_sizes_of_parts() -> None:
    assert [part.nbytes for part in KV] == [64, 64]
    assert [part.nbytes for part in STATE] == [64 * 3 * 2, 64 * 8 * 4]
    wide = attention_parts(2, 16, "float32", value_dim=8)
    assert [(part.name, part.shape) for part in wide] == [("k", (2, 16)), ("v", (2, 8))]


@pytest.mark.parametrize("shape", [(), (0,), (4, -1)])
def test_a_part_needs_a_size(shape: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        Part("k", shape, "float32")


def test_a_part_needs_a_known_dtype() -> None:
    with pytest.raises(ConfigError, match=r"'float31'.*known are .*bfloat16"):
        Part("k", (4,), "float31")


def test_groups_gather_equal_entries_in_order_of_appearance() -> None:
    groups = group_entries([state(0), full(1), sliding(2, 24), state(3), sliding(4, 24), full(5)])
    assert [(group.name, [entry.layer for entry in group.entries]) for group in groups] == [
        ("linear_attention", [0, 3]),
        ("full_attention", [1, 5]),
        ("sliding_attention_24", [2, 4]),
    ]
    assert [group.layers for group in groups] == [2, 2, 2]
    assert groups[2].rule == SlidingAttention(24)


def test_different_windows_shapes_and_dtypes_are_different_groups() -> None:
    other_heads = CacheEntry(2, "full_attention", attention_parts(1, 16, "bfloat16"))
    other_dtype = CacheEntry(3, "full_attention", attention_parts(2, 16, "float32"))
    groups = group_entries([sliding(0, 24), sliding(1, 48), full(4), other_heads, other_dtype])
    assert len(groups) == 5
    assert len({group.name for group in groups}) == 5, "names are unique"


def test_page_bytes_cover_all_layers() -> None:
    token, fixed = group_entries([full(0), full(1), full(2), state(3), state(4)], page_tokens=32)
    assert (token.page_tokens, token.page_bytes) == (32, 32 * 3 * 128)
    assert (fixed.page_tokens, fixed.page_bytes) == (0, 2 * (384 + 2048))
    assert not token.is_state
    assert fixed.is_state


def test_page_tokens_may_differ_by_kind() -> None:
    groups = group_entries([full(0), sliding(1, 24)], page_tokens={"full_attention": 64})
    assert [group.page_tokens for group in groups] == [64, 16]


@pytest.mark.parametrize("size", [0, -16, {"full_attention": 0}])
def test_a_page_holds_at_least_a_token(size: int | dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="at least 1 token"):
        group_entries([full(0)], page_tokens=size)


def test_a_layer_may_own_two_entries() -> None:
    groups = group_entries([full(0), state(0), state(0, index=1)])
    assert [group.layers for group in groups] == [1, 2]
    assert [entry.number for entry in groups[1].entries] == [0, 1]


def test_an_entry_named_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match="layer 3 declares 'full_attention' number 0 twice"):
        group_entries([full(3), full(3)])


def test_a_model_without_entries_is_refused() -> None:
    with pytest.raises(ConfigError, match="no cache entries"):
        group_entries([])


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(UnknownGroupKind, match="'hybrid'"):
        group_entries([CacheEntry(0, "hybrid", KV)])


def test_parameters_must_fit_the_kind() -> None:
    with pytest.raises(ConfigError, match="'sliding_attention' cannot take"):
        group_entries([CacheEntry(0, "sliding_attention", KV)])


def test_a_split_keeps_the_kind_of_group() -> None:
    (group,) = group_entries([state(layer) for layer in range(4)])
    half = group.with_entries("linear_attention.0", group.entries[:2])
    assert (half.layers, half.page_bytes, half.parts) == (2, group.page_bytes // 2, group.parts)
