"""What a trace is made of: requests in order of arrival, and how much of them is unique."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hybridkv.entries import LayerGroup
from hybridkv.errors import ConfigError

Tokens = NDArray[np.uint32]

INVENTED = 2**31
"""Invented output tokens are at least this, so that they are no token of a generated prompt."""


class Request(NamedTuple):
    """One request.

    Attributes:
        arrival: seconds since the trace began.
        tokens: the prompt, uint32, at least one token.
        output: the tokens that will be generated, uint32, possibly none.
        session: whose turn it is, where the trace says so.
    """

    arrival: float
    tokens: Tokens
    output: Tokens
    session: str | None = None


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests that can be gone through any number of times, made anew each time.

    Attributes:
        name: of the file, or the workload with all its parameters.
        make: starts a new pass, in order of arrival.
        unit_tokens: tokens of the units by which the trace tells prompts apart, e.g. 512 for Mooncake's blocks.
        limit: how many requests to take, None for all.
    """

    name: str
    make: Callable[[], Iterator[Request]]
    unit_tokens: int = 16
    limit: int | None = None

    def __iter__(self) -> Iterator[Request]:
        return islice(self.make(), self.limit)


class Summary(NamedTuple):
    """Sizes of a trace.

    Attributes:
        unique_tokens: distinct units of all prompts, each with what comes before it, times the tokens of a unit. A
            half-full last unit counts as a whole one.
        longest: tokens of the longest prompt with its output.
        repeated_tokens: prompt tokens in units that an earlier prompt had at the same place.
    """

    requests: int
    prompt_tokens: int
    output_tokens: int
    unique_tokens: int
    repeated_tokens: int
    longest: int


def summarize(trace: Trace) -> Summary:
    """Count a trace in one pass.

    Raises:
        ConfigError: a trace without a request.
    """
    unit = trace.unit_tokens
    seen: set[int] = set()
    requests = prompt = output = repeated = longest = 0
    for request in trace:
        requests += 1
        prompt += len(request.tokens)
        output += len(request.output)
        longest = max(longest, len(request.tokens) + len(request.output))
        chain = 0
        for start in range(0, len(request.tokens), unit):
            piece = request.tokens[start : start + unit]
            chain = hash((chain, piece.tobytes()))
            if chain in seen:
                repeated += len(piece)
            seen.add(chain)
    if not requests:
        raise ConfigError(f"the trace {trace.name} has no requests")
    return Summary(requests, prompt, output, len(seen) * unit, repeated, longest)


def bytes_per_token(groups: tuple[LayerGroup, ...]) -> int:
    """Bytes that every token keeps for good: those of the full-attention layers, or of all layers that keep tokens.

    Raises:
        ConfigError: a model whose layers keep states only.
    """
    keeping = [group for group in groups if group.keeps_all] or [group for group in groups if not group.is_state]
    if not keeping:
        raise ConfigError("a share of the trace's bytes needs a model with attention; name the pool in bytes")
    return sum(group.entry_bytes * group.layers for group in keeping)


def invented(count: int, key: int) -> Tokens:
    """Output tokens that depend on `key` alone and differ from those of other keys."""
    numbers = np.arange(count, dtype=np.uint64) + np.uint64((key * 0x9E3779B1) % INVENTED)
    return (numbers % np.uint64(INVENTED) + np.uint64(INVENTED)).astype(np.uint32)
