"""Where resume points are placed: settings and wishes rounded to boundaries."""

from __future__ import annotations

from collections.abc import Iterable
from numbers import Integral

from hybridkv.errors import ConfigError, RequestError


def interval(name: str, tokens: int | None, step: int) -> int | None:
    """A distance between resume points, rounded up to whole boundaries; None for none.

    Raises:
        ConfigError: no whole number of tokens, or below one.
    """
    if tokens is None:
        return None
    if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 1:
        raise ConfigError(f"{name} must be at least 1 token, a whole number, or None; got {tokens!r}")
    return -(-tokens // step) * step


def checked_breakpoints(breakpoints: Iterable[int], length: int) -> list[int]:
    """The breakpoints of a prompt of `length` tokens.

    Raises:
        RequestError: one is no whole number or lies outside the prompt.
    """
    if not isinstance(breakpoints, Iterable):
        raise RequestError(f"breakpoints are several prefix lengths in tokens, got {breakpoints!r}")
    checked: list[int] = []
    for tokens in breakpoints:
        if isinstance(tokens, bool) or not isinstance(tokens, Integral) or not 0 <= tokens <= length:
            raise RequestError(f"a breakpoint lies inside the prompt, at 0 to {length} tokens; got {tokens!r}")
        checked.append(int(tokens))
    return checked


def planned(wanted: Iterable[int], step: int, past: int) -> list[int]:
    """Prefix lengths rounded down to boundaries, those past what is computed, ascending."""
    return sorted({tokens - tokens % step for tokens in wanted if tokens - tokens % step > past})
