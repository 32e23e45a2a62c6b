"""Sizes as people write them, and the settings read from the environment.

Byte sizes take the usual suffixes: KiB, MiB, GiB, TiB (and K, M, G, T) are powers of 1024, KB, MB, GB, TB powers of
1000. Token counts take k and m as powers of 1024, the way context lengths are quoted: 4k is 4096, 128k is 131072.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path

from hybridkv.errors import ConfigError

MAX_BYTES = 2**50
"""One pebibyte: a larger pool is a typing error."""

MAX_TOKENS = 2**30
"""A context of more than a billion tokens is a typing error."""

_SIZE = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*([A-Za-z]*)", re.ASCII)
_BYTE_UNITS: Mapping[str, int] = {
    "": 1, "b": 1,
    "k": 2**10, "kib": 2**10, "kb": 10**3,
    "m": 2**20, "mib": 2**20, "mb": 10**6,
    "g": 2**30, "gib": 2**30, "gb": 10**9,
    "t": 2**40, "tib": 2**40, "tb": 10**12,
}  # fmt: skip
_TOKEN_UNITS: Mapping[str, int] = {"": 1, "k": 2**10, "m": 2**20}


def parse_bytes(value: int | str) -> int:
    """A size in bytes, from a number or from text such as "16GiB", "512MiB", "1.5GB" or "4096".

    A fraction of a byte is dropped.

    Raises:
        ConfigError: not a size, below one byte, or above MAX_BYTES.
    """
    return _parse(value, _BYTE_UNITS, MAX_BYTES, what="size in bytes", example="'16GiB', '512MiB' or 4096")


def parse_tokens(value: int | str) -> int:
    """A number of tokens, from a number or from text such as "4096", "4k" (4096) or "1m" (1048576).

    Raises:
        ConfigError: not a whole number of tokens, below one, or above MAX_TOKENS.
    """
    return _parse(value, _TOKEN_UNITS, MAX_TOKENS, what="number of tokens", example="4096, '4k' or '128k'", whole=True)


def parse_token_list(value: int | str) -> tuple[int, ...]:
    """Token counts separated by commas, such as "4k,32k,128k", in the order given.

    Raises:
        ConfigError: an item that is no number of tokens, or an empty item.
    """
    return tuple(parse_tokens(item) for item in (value.split(",") if isinstance(value, str) else [value]))


def format_bytes(nbytes: int) -> str:
    """A size for people, with one decimal in the largest binary unit it reaches: "79.3 MiB"."""
    amount = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(amount) < 1024:
            return f"{nbytes} B" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} TiB"


@dataclass(frozen=True, slots=True)
class Environment:
    """What the HYBRIDKV_* variables say.

    Attributes:
        memory: bytes of the pool where none are asked for (HYBRIDKV_MEMORY), or None.
        cache_dir: folder for downloaded models (HYBRIDKV_CACHE_DIR), by default under the user's cache folder.
    """

    memory: int | None
    cache_dir: Path


def read_environment(variables: Mapping[str, str]) -> Environment:
    """Read the HYBRIDKV_* variables of a process environment. An empty variable counts as unset.

    Args:
        variables: e.g. `os.environ`; also HOME and XDG_CACHE_HOME are looked up in it.

    Raises:
        ConfigError: a value that cannot be used, with the name of its variable.
    """
    memory: int | None = None
    if text := variables.get("HYBRIDKV_MEMORY", "").strip():
        try:
            memory = parse_bytes(text)
        except ConfigError as error:
            raise ConfigError(f"HYBRIDKV_MEMORY: {error}") from error
    home = Path(variables.get("HOME") or Path.home())
    if text := variables.get("HYBRIDKV_CACHE_DIR", "").strip():
        cache_dir = home / text[2:] if text.startswith("~/") else Path(text)
        if cache_dir.is_file():
            raise ConfigError(f"HYBRIDKV_CACHE_DIR: {text!r} is a file; name a folder")
    else:
        cache_dir = Path(variables.get("XDG_CACHE_HOME") or home / ".cache") / "hybridkv"
    return Environment(memory=memory, cache_dir=cache_dir)


def _parse(
    value: int | str, units: Mapping[str, int], limit: int, *, what: str, example: str, whole: bool = False
) -> int:
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ConfigError(f"{value!r} is no {what}; write for example {example}")
    if isinstance(value, int):
        amount = Decimal(value)
    else:
        match = _SIZE.fullmatch(value.strip())
        if match is None or match[2].lower() not in units:
            raise ConfigError(f"{value!r} is no {what}; write for example {example}")
        amount = Decimal(match[1]) * units[match[2].lower()]
        if whole and amount != int(amount):
            raise ConfigError(f"{value!r} is no whole {what}; write for example {example}")
    if amount < 1:
        raise ConfigError(f"{value!r} is below 1; a {what} must be at least 1, for example {example}")
    if amount > limit:
        raise ConfigError(f"{value!r} is too large; the largest {what} is {limit:,}, write for example {example}")
    return int(amount)
