"""The digest format against golden vectors and a second implementation; no two inputs meet; any cut, any process."""

from __future__ import annotations

import hashlib
import itertools
import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from hybridkv.entries import CacheEntry, EntryRef, Part, attention_parts, group_entries
from hybridkv.hashing import canonical, chain_seed, image_extras, layout_identity, unit_digests

TOKENS = np.arange(1000, 1064, dtype=np.uint32)


# A second implementation, written from the format in the module's docstring and from nothing else.


def spelled(value: Any) -> bytes:
    if value is None:
        return b"n"
    if isinstance(value, int):
        return b"i" + value.to_bytes(8, "little", signed=True)
    if isinstance(value, bytes):
        return b"b" + len(value).to_bytes(8, "little") + value
    if isinstance(value, str):
        return b"t" + len(value.encode()).to_bytes(8, "little") + value.encode()
    out = b"l" + len(value).to_bytes(8, "little")
    for item in value:
        out += spelled(item)
    return out


def tagged(algorithm: str, name: str, body: bytes) -> bytes:
    head = b"hybridkv/1/" + name.encode()
    message = head + b"\0" * (64 - len(head)) + body
    return hashlib.sha256(message).digest() if algorithm == "sha256" else xxhash.xxh3_128(message).digest()


def expected_digests(
    algorithm: str, seed: bytes, tokens: list[int], unit: int, extras: dict[int, bytes]
) -> list[bytes]:
    digests = [seed]
    for i in range(len(tokens) // unit):
        ids = b"".join(token.to_bytes(4, "little") for token in tokens[i * unit : (i + 1) * unit])
        name = "extra" if i in extras else "unit"
        digests.append(tagged(algorithm, name, digests[-1] + ids + extras.get(i, b"")))
    return digests[1:]


# Golden vectors: a change of any of these loses every digest stored or published by an older version.


@pytest.mark.parametrize(
    ("fields", "digest"),
    [
        ({}, "29a7acc3768f83a3b2278d58a74daa663c96b26522976825b8b8ead4e2fa4861"),
        (
            {
                "model": "ai21/jamba",
                "dtype": "bfloat16",
                "groups": b"\x01",
                "adapter": ("sql", "v2"),
                "salt": "tenant-7",
            },
            "6608641f75039af50f1fdc1d9f2f03d936f5f00594551b6ce67702df7cf8ca55",
        ),
        ({"algorithm": "xxh3_128"}, "1444ade5fd63ea79cd10fdb87e6b1865"),
    ],
)
def test_golden_seed(fields: dict[str, Any], digest: str) -> None:
    assert chain_seed(**fields).hex() == digest


@pytest.mark.parametrize(
    ("algorithm", "digests"),
    [
        (
            "sha256",
            [
                "41d2a473050de66a1d04ca75bde232bdc2477288cfffde45f1cdeb1b74a89bc6",
                "fa613108076bf9de6f95c9601ec5269c8acc91720d4850e1ecebcfc6dd5fad27",
                "fd4de60f3d3d9e876065716ccbdf83238e025ac19c7d9eefa7b7d96639d8960e",
                "6a1517221c96a2ffdc78ba5e0f1dcf9587d50b6bb356838964fdda98dfae611e",
            ],
        ),
        (
            "xxh3_128",
            [
                "85103458316e58f3ad83ea3438251a2a",
                "cddba3b234f9725c40600d358d7faa2c",
                "731d651d5d6ed39236564be6396a5cd3",
                "a75b9094305fa93419134a4082f83cbf",
            ],
        ),
    ],
)
def test_golden_units(algorithm: str, digests: list[str]) -> None:
    extras = image_extras([(33, b"\xaa\xbb"), (47, "cat")])
    seed = chain_seed(algorithm=algorithm)
    assert [d.hex() for d in unit_digests(seed, TOKENS, extras=extras, algorithm=algorithm)] == digests


def test_golden_layout() -> None:
    attention = CacheEntry(1, "sliding_attention", attention_parts(2, 64, "bfloat16"), (("window", 128),))
    state = CacheEntry(0, "linear_attention", (Part("conv", (32, 3), "bfloat16"), Part("ssm", (32, 16), "float32")))
    assert (
        hashlib.sha256(layout_identity(group_entries([state, attention]))).hexdigest()
        == "8174327b6022ad43b1f77023eb621a16a6228a176c9f8357db9453b8883c4335"
    )


@given(
    st.sampled_from(["sha256", "xxh3_128"]),
    st.integers(1, 5),
    st.integers(0, 6),
    st.dictionaries(st.integers(0, 6), st.binary(max_size=3)),
    st.data(),
)
def test_digests_follow_the_format(
    algorithm: str, unit: int, units: int, extras: dict[int, bytes], data: st.DataObject
) -> None:
    tokens = data.draw(st.lists(st.integers(0, 2**32 - 1), min_size=unit * units, max_size=unit * units))
    seed = chain_seed(algorithm=algorithm, unit_tokens=unit)
    fields = (algorithm, "", "", "", unit, None, None)
    assert seed == tagged(algorithm, "seed", spelled(fields))
    got = unit_digests(seed, tokens, unit, extras=extras, algorithm=algorithm)
    assert got == expected_digests(algorithm, seed, tokens, unit, extras)


# Domain separation.

texts = st.text(max_size=4)
salts = st.one_of(st.none(), texts, st.binary(max_size=4))
adapters = st.one_of(st.none(), texts, st.tuples(texts, texts))
seeds = st.fixed_dictionaries(
    {
        "algorithm": st.sampled_from(["sha256", "xxh3_128"]),
        "model": texts,
        "dtype": texts,
        "groups": st.one_of(texts, st.binary(max_size=4)),
        "unit_tokens": st.integers(1, 64),
        "adapter": adapters,
        "salt": salts,
    }
)


@given(seeds, seeds)
def test_seeds_are_equal_only_for_equal_fields(a: dict[str, Any], b: dict[str, Any]) -> None:
    assert (chain_seed(**a) == chain_seed(**b)) == (a == b)


@given(seeds, st.sampled_from(["model", "dtype", "groups", "adapter", "salt"]), st.data())
def test_one_changed_field_changes_the_seed(fields: dict[str, Any], name: str, data: st.DataObject) -> None:
    other = data.draw({"adapter": adapters, "salt": salts}.get(name, texts).filter(lambda value: value != fields[name]))
    assert chain_seed(**fields) != chain_seed(**{**fields, name: other})


def test_one_value_in_every_field_gives_as_many_seeds() -> None:
    names = ["model", "dtype", "groups", "adapter", "salt"]
    variants: list[dict[str, Any]] = [{}, *({name: "x"} for name in names)]
    variants += [{"salt": ""}, {"salt": b""}, {"salt": b"x"}, {"adapter": ""}, {"adapter": ("x", "")}]
    variants += [
        {"adapter": ("x", "y")},
        {"adapter": "xy"},
        {"adapter": "x", "salt": "y"},
        {"adapter": "y", "salt": "x"},
    ]
    variants += [{"salt": "xy"}, {"unit_tokens": 32}, {"model": "x", "dtype": "y"}, {"model": "xy"}, {"groups": b"x"}]
    assert len({chain_seed(**fields) for fields in variants}) == len(variants)


values = st.recursive(
    st.one_of(st.none(), st.integers(-(2**63), 2**63 - 1), texts, st.binary(max_size=4)),
    lambda inner: st.lists(inner, max_size=3).map(tuple),
    max_leaves=6,
)


@given(values, values)
def test_canonical_bytes_are_injective(a: Any, b: Any) -> None:
    assert (canonical(a) == canonical(b)) == (a == b)
    # No value's bytes begin another's, so a sequence of values splits in one way only.
    assert a == b or not canonical(a).startswith(canonical(b))


def layout(**changes: Any) -> bytes:
    entry = {"kind": "sliding_attention", "heads": 2, "dtype": "bfloat16", "window": 128, "layers": (0, 1), "page": 16}
    entry |= changes
    parts = attention_parts(entry["heads"], 64, entry["dtype"])
    made = [CacheEntry(i, entry["kind"], parts, (("window", entry["window"]),)) for i in entry["layers"]]
    return layout_identity(group_entries(made, entry["page"]))


def test_every_property_of_a_layout_counts() -> None:
    changes: list[dict[str, Any]] = [{}, {"heads": 4}, {"dtype": "float32"}, {"window": 64}, {"layers": (0, 2)}]
    changes += [{"layers": (0,)}, {"page": 32}]
    seeds = {chain_seed(groups=layout(**change)) for change in changes}
    assert len(seeds) == len(changes)


def test_a_layout_is_the_same_however_its_groups_are_cut_and_ordered() -> None:
    state = [CacheEntry(i, "linear_attention", (Part("ssm", (4, 4), "float32"),)) for i in range(4)]
    attention = [CacheEntry(4, "full_attention", attention_parts(1, 8, "float32"))]
    groups = group_entries([*state, *attention])
    cut = [groups[1], *(groups[0].with_entries(f"part.{i}", [EntryRef(i, 0)]) for i in (2, 0, 1, 3))]
    assert layout_identity(groups) == layout_identity(cut)
    assert chain_seed(groups=groups) == chain_seed(groups=layout_identity(cut))


@given(st.lists(st.integers(0, 3), min_size=4, max_size=16), st.lists(st.integers(0, 3), min_size=4, max_size=16))
def test_other_tokens_give_another_last_digest(a: list[int], b: list[int]) -> None:
    a, b = a[: len(a) // 4 * 4], b[: len(b) // 4 * 4]
    seed = chain_seed(unit_tokens=4)
    assert (unit_digests(seed, a, 4)[-1] == unit_digests(seed, b, 4)[-1]) == (a == b)


# Images.

placed_images = st.dictionaries(
    st.integers(0, 63), st.one_of(st.text("ab", min_size=1), st.binary(min_size=1)), max_size=4
)


@given(placed_images, placed_images)
def test_images_separate_prompts_from_where_they_start(a: dict[int, str | bytes], b: dict[int, str | bytes]) -> None:
    seed = chain_seed()
    of_a, of_b = (unit_digests(seed, TOKENS, extras=image_extras(images.items())) for images in (a, b))
    for unit in range(4):
        before = (unit + 1) * 16
        seen_a, seen_b = ({at: i for at, i in images.items() if at < before} for images in (a, b))
        assert (of_a[unit] == of_b[unit]) == (seen_a == seen_b)


def test_the_order_of_images_does_not_matter() -> None:
    images: list[tuple[int, str | bytes]] = [(20, "b"), (3, b"a"), (17, "c"), (40, "d")]
    made = [image_extras(order) for order in itertools.permutations(images)]
    assert sorted(made[0]) == [0, 1, 2]
    assert all(extras == made[0] for extras in made)


def test_a_unit_with_empty_extra_keys_is_not_a_plain_one() -> None:
    seed = chain_seed()
    assert unit_digests(seed, TOKENS, extras={0: b""}) != unit_digests(seed, TOKENS)


def test_extra_keys_of_other_units_are_ignored() -> None:
    seed = chain_seed()
    assert unit_digests(seed, TOKENS, extras={4: b"x", 9: b"x", -1: b"x"}) == unit_digests(seed, TOKENS)
    assert unit_digests(seed, TOKENS[:0], extras={0: b"x"}) == []


# The chain.


@given(
    st.sampled_from(["sha256", "xxh3_128"]),
    st.integers(1, 4),
    st.lists(st.integers(0, 4), max_size=5),
    st.dictionaries(st.integers(0, 20), st.binary(max_size=2), max_size=5),
)
def test_a_prompt_cut_anywhere_has_the_same_digests(
    algorithm: str, unit: int, pieces: list[int], extras: dict[int, bytes]
) -> None:
    tokens = np.random.default_rng(0).integers(0, 2**32, sum(pieces) * unit, dtype=np.uint32)
    seed = chain_seed(algorithm=algorithm, unit_tokens=unit)
    whole = unit_digests(seed, tokens, unit, extras=extras, algorithm=algorithm)
    joined: list[bytes] = []
    for n in pieces:
        first = len(joined)
        piece = tokens[first * unit : (first + n) * unit]
        previous = joined[-1] if joined else seed
        joined += unit_digests(previous, piece, unit, extras=extras, algorithm=algorithm, first_unit=first)
    assert joined == whole
    assert len(set(whole)) == len(whole) == sum(pieces)


@pytest.mark.parametrize("dtype", [np.int64, np.uint16, np.int32, ">u4", "<u4"])
def test_any_integers_and_any_layout_in_memory(dtype: Any) -> None:
    seed = chain_seed()
    expected = unit_digests(seed, TOKENS)
    assert unit_digests(seed, TOKENS.astype(dtype)) == expected
    assert unit_digests(seed, TOKENS.tolist()) == expected
    assert unit_digests(seed, np.repeat(TOKENS.astype(dtype), 2)[::2]) == expected


SCRIPT = """
from hybridkv.entries import CacheEntry, attention_parts, group_entries
from hybridkv.hashing import *
groups = group_entries([CacheEntry(0, "sliding_attention", attention_parts(1, 8, "float32"), (("window", 64),))])
seed = chain_seed(model="m", groups=groups, adapter=("a", "1"), salt="s")
print(unit_digests(seed, range(32), extras=image_extras([(20, "b"), (3, "a")]))[-1].hex())
"""


def test_every_process_gives_the_same_digests() -> None:
    def run(hash_seed: str) -> str:
        env = {**os.environ, "PYTHONHASHSEED": hash_seed}
        return subprocess.run(
            [sys.executable, "-c", SCRIPT], env=env, capture_output=True, text=True, check=True
        ).stdout

    outputs = {run(hash_seed) for hash_seed in ("0", "1", "424242")}
    assert len(outputs) == 1
    assert len(outputs.pop().strip()) == 64
