"""Where resume points are placed: settings and wishes rounded to boundaries."""

from __future__ import annotations

from collections.abc import Iterable

from hybridkv.errors import ConfigError, RequestError


def interval(name: str, tokens: int | None, step: int) -> int | None:
    """A distance between resume points, rounded up to whole boundaries; None for none.

    Raises:
        ConfigError: below one token.
    """
    if tokens is None:
        return None
    if tokens < 1:
        raise ConfigError(f"{name} must be at least 1 token or None, got {tokens}")
    return -(-tokens // step) * step


def checked_breakpoints(breakpoints: Iterable[int], length: int) -> list[int]:
    """The breakpoints of a prompt of `length` tokens.

    Raises:
        RequestError: one lies outside the prompt.
    """
    checked = list(breakpoints)
    for tokens in checked:
        if not 0 <= tokens <= length:
            raise RequestError(f"a breakpoint lies inside the prompt, at 0 to {length} tokens; got {tokens}")
    return checked


def planned(wanted: Iterable[int], step: int, past: int) -> list[int]:
    """Prefix lengths rounded down to boundaries, those past what is computed, ascending."""
    return sorted({tokens - tokens % step for tokens in wanted if tokens - tokens % step > past})
