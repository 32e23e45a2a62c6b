"""Sizes as people write them, and the environment."""

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridkv.config import (
    MAX_BYTES,
    MAX_TOKENS,
    format_bytes,
    parse_bytes,
    parse_token_list,
    parse_tokens,
    read_environment,
)
from hybridkv.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("16GiB", 16 * 2**30),
        ("512MiB", 512 * 2**20),
        ("1.5GB", 1_500_000_000),
        ("1.5GiB", 3 * 2**29),
        (".5KiB", 512),
        ("4096", 4096),
        ("4096B", 4096),
        ("  2 gib ", 2**31),
        ("3k", 3072),
        ("3KB", 3000),
        ("1T", 2**40),
        ("1TB", 10**12),
        ("1.0001KB", 1000),
        (4096, 4096),
        (MAX_BYTES, MAX_BYTES),
    ],
)
def test_parse_bytes_reads(text: int | str, nbytes: int) -> None:
    assert parse_bytes(text) == nbytes


@pytest.mark.parametrize("value", ["", "GiB", "16 gigs", "-1GiB", "0", "nan", "inf", "1e9", "0.2B", "1,5GB", "1.2.3"])
@pytest.mark.parametrize("strange", [str.upper, str.lower])
def test_parse_bytes_refuses_text(value: str, strange: Callable[[str], str]) -> None:
    with pytest.raises(ConfigError, match="for example"):
        parse_bytes(strange(value))


@pytest.mark.parametrize("value", [0, -5, 2**51, "2000TiB", "\u0663GiB", 1.5, float("nan"), True, None, b"1GiB"])
def test_parse_bytes_refuses(value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_bytes(value)  # type: ignore[arg-type]
    assert repr(value) in str(caught.value), "the message names what was given"
    assert "for example" in str(caught.value)


@given(st.integers(1, MAX_BYTES))
def test_parse_bytes_keeps_numbers_exactly(nbytes: int) -> None:
    assert parse_bytes(nbytes) == parse_bytes(str(nbytes)) == nbytes


@pytest.mark.parametrize(
    ("text", "tokens"), [("4k", 4096), ("128K", 131072), ("1m", 2**20), ("1.5k", 1536), ("777", 777), (16, 16)]
)
def test_parse_tokens_reads(text: int | str, tokens: int) -> None:
    assert parse_tokens(text) == tokens


@pytest.mark.parametrize("value", ["", "k", "4g", "0.3k", "1.5", "-4k", 0, -1, "nan", 3.0, False, None, 2**31, "2048m"])
def test_parse_tokens_refuses(value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_tokens(value)  # type: ignore[arg-type]
    assert repr(value) in str(caught.value)


def test_the_largest_context_is_accepted_and_the_next_is_not() -> None:
    assert parse_tokens(MAX_TOKENS) == MAX_TOKENS
    with pytest.raises(ConfigError, match="too large"):
        parse_tokens(MAX_TOKENS + 1)


def test_token_lists_keep_their_order() -> None:
    assert parse_token_list("32k, 4k,128k") == (32768, 4096, 131072)
    assert parse_token_list(4096) == (4096,)


@pytest.mark.parametrize("text", ["", "4k,", ",4k", "4k,,32k", "4k;32k"])
def test_token_lists_refuse_gaps(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_token_list(text)


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (83_165_184, "79.3 MiB"),
        (2**34, "16.0 GiB"),
        (2**43, "8.0 TiB"),
    ],
)
def test_format_bytes(nbytes: int, text: str) -> None:
    assert format_bytes(nbytes) == text


def test_an_empty_environment_has_defaults() -> None:
    environment = read_environment({"HOME": "/users/someone"})
    assert environment.memory is None
    assert environment.cache_dir == Path("/users/someone/.cache/hybridkv")


def test_the_environment_is_read() -> None:
    environment = read_environment(
        {"HYBRIDKV_MEMORY": " 2GiB ", "HYBRIDKV_CACHE_DIR": "~/models", "HOME": "/users/someone"}
    )
    assert environment.memory == 2**31
    assert environment.cache_dir == Path("/users/someone/models")


def test_the_users_cache_folder_is_honoured_and_empty_variables_are_unset() -> None:
    variables = {"HYBRIDKV_MEMORY": "", "HYBRIDKV_CACHE_DIR": " ", "XDG_CACHE_HOME": "/var/cache/me", "HOME": "/h"}
    environment = read_environment(variables)
    assert environment.memory is None
    assert environment.cache_dir == Path("/var/cache/me/hybridkv")


def test_a_bad_variable_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"HYBRIDKV_MEMORY.*'lots'"):
        read_environment({"HYBRIDKV_MEMORY": "lots"})
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(ConfigError, match=r"HYBRIDKV_CACHE_DIR.*is a file"):
        read_environment({"HYBRIDKV_CACHE_DIR": str(file)})
