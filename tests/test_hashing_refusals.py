"""What no digest is computed of: every bad input is refused with its reason."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hybridkv.errors import ConfigError, RequestError, TokenOutOfRange
from hybridkv.hashing import canonical, chain_seed, image_extras, unit_digests

TOKENS = np.arange(1000, 1064, dtype=np.uint32)


@pytest.mark.parametrize("algorithm", ["md5", "", "SHA256", None, ["sha256"]])
def test_an_unknown_algorithm_is_refused_with_the_choices(algorithm: Any) -> None:
    with pytest.raises(ConfigError, match="sha256, xxh3_128"):
        chain_seed(algorithm=algorithm)
    with pytest.raises(ConfigError, match="sha256, xxh3_128"):
        unit_digests(bytes(32), TOKENS, algorithm=algorithm)


@pytest.mark.parametrize("unit_tokens", [0, -16, 1.0, "16", True, None])
def test_a_unit_must_be_a_number_of_tokens(unit_tokens: Any) -> None:
    with pytest.raises(ConfigError, match="token unit"):
        chain_seed(unit_tokens=unit_tokens)
    with pytest.raises(ConfigError, match="token unit"):
        unit_digests(bytes(32), TOKENS, unit_tokens)
    with pytest.raises(ConfigError, match="token unit"):
        image_extras([(0, "a")], unit_tokens)


@pytest.mark.parametrize("fields", [{"model": None}, {"dtype": 16}, {"model": b"m"}])
def test_identity_must_be_text(fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="must be strings"):
        chain_seed(**fields)


@pytest.mark.parametrize(
    "fields",
    [{"salt": 7}, {"salt": ["a"]}, {"adapter": 7}, {"adapter": ("a",)}, {"adapter": ("a", None)}, {"adapter": b"a"}],
)
def test_a_salt_or_adapter_of_another_type_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=r"salt|adapter"):
        chain_seed(**fields)


@pytest.mark.parametrize("tokens", [[-1] * 16, [2**32] * 16, [0.5] * 16, [True] * 16, ["a"] * 16, [2**70] * 16])
def test_tokens_that_are_no_uint32_are_refused(tokens: list[Any]) -> None:
    with pytest.raises(TokenOutOfRange, match="token ids"):
        unit_digests(chain_seed(), tokens)


def test_tokens_must_be_whole_units_in_one_row() -> None:
    with pytest.raises(ConfigError, match="17 tokens"):
        unit_digests(chain_seed(), range(17))
    with pytest.raises(ConfigError, match="shape"):
        unit_digests(chain_seed(), np.zeros((2, 16), dtype=np.uint32))


def test_a_digest_of_another_algorithm_is_refused() -> None:
    with pytest.raises(ConfigError, match="16 bytes, got 32"):
        unit_digests(chain_seed(), TOKENS, algorithm="xxh3_128")


@pytest.mark.parametrize(
    "images",
    [[(-1, "a")], [(1.5, "a")], [("1", "a")], [(True, "a")], [(0, "")], [(0, b"")], [(0, 5)], [0], [(0, "a", "b")]],
)
def test_malformed_images_are_refused(images: list[Any]) -> None:
    with pytest.raises(RequestError, match="image"):
        image_extras(images)


def test_two_images_cannot_start_at_one_token() -> None:
    with pytest.raises(RequestError, match="token 5"):
        image_extras([(5, "a"), (5, "b")])


@pytest.mark.parametrize("value", [2**63, -(2**63) - 1, True, 1.5, {"a": 1}, [object()]])
def test_values_without_canonical_bytes_are_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match="canonical"):
        canonical(value)
