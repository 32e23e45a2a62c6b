"""What each kind of layer needs to go on: the one question a group answers.

A rule is a pure function. `needed(n)` takes an array of prefix lengths in tokens and returns the token ranges whose
pages must be present to compute token `n`. Hits, live pages, retention and eviction all derive from it. A state is
found under its last token, so "the checkpoint at exactly n" is the range [n - 1, n).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from hybridkv.errors import ConfigError, UnknownGroupKind

Lengths = NDArray[np.int64]
Range = tuple[Lengths, Lengths]
Holds = Literal["tokens", "state"]


class Rule(Protocol):
    """The question one group kind answers."""

    def needed(self, lengths: Lengths) -> tuple[Range, ...]:
        """Token ranges needed to compute the token after each prefix.

        Args:
            lengths: prefix lengths in tokens, int64, any shape, all >= 0.

        Returns:
            One or more (start, stop) pairs of arrays of the same shape, with 0 <= start <= stop <= length, in
            ascending order. `start == stop` needs nothing.
        """
        ...


@dataclass(frozen=True, slots=True)
class FullAttention:
    """Every token before the next one."""

    def needed(self, lengths: Lengths) -> tuple[Range, ...]:
        return ((np.zeros_like(lengths), lengths),)


@dataclass(frozen=True, slots=True)
class SlidingAttention:
    """The last `window - 1` tokens: a token sees itself and the `window - 1` before it."""

    window: int

    def __post_init__(self) -> None:
        if self.window < 1:
            raise ConfigError(f"a sliding window must be at least 1 token, got {self.window}")

    def needed(self, lengths: Lengths) -> tuple[Range, ...]:
        return ((np.maximum(lengths - (self.window - 1), 0), lengths),)


@dataclass(frozen=True, slots=True)
class ChunkedAttention:
    """The tokens of the chunk the next token falls in."""

    chunk: int

    def __post_init__(self) -> None:
        if self.chunk < 1:
            raise ConfigError(f"an attention chunk must be at least 1 token, got {self.chunk}")

    def needed(self, lengths: Lengths) -> tuple[Range, ...]:
        return ((lengths - lengths % self.chunk, lengths),)


@dataclass(frozen=True, slots=True)
class SinkAttention:
    """The first `sinks` tokens and a sliding window (StreamingLLM, Xiao et al. 2023)."""

    sinks: int
    window: int

    def __post_init__(self) -> None:
        if self.sinks < 1 or self.window < 1:
            raise ConfigError(f"sinks and window must be at least 1 token, got {self.sinks} and {self.window}")

    def needed(self, lengths: Lengths) -> tuple[Range, ...]:
        sinks = np.minimum(lengths, self.sinks)
        return (np.zeros_like(lengths), sinks), (np.maximum(lengths - (self.window - 1), sinks), lengths)


@dataclass(frozen=True, slots=True)
class State:
    """The checkpoint at exactly this length."""

    def needed(self, lengths: Lengths) -> tuple[Range, ...]:
        return ((np.maximum(lengths - 1, 0), lengths),)


@dataclass(frozen=True, slots=True)
class GroupKind:
    """A registered kind: what its pages hold and how its rule is made from an entry's parameters."""

    name: str
    holds: Holds
    rule: Callable[..., Rule]


_KINDS: dict[str, GroupKind] = {}


def register_group_kind(name: str, *, holds: Holds, rule: Callable[..., Rule]) -> GroupKind:
    """Make a new kind of layer group known under `name`.

    Args:
        name: the layer-type string, as Hugging Face spells it where it has one.
        holds: "tokens" if a page keeps K and V (or any per-token rows), "state" if it keeps one whole state.
        rule: called with the entry's parameters as keywords (`window=1024`), returns a `Rule`.

    Raises:
        ConfigError: the name is taken by another kind, `holds` is neither word, or `rule` cannot be called.
    """
    if not callable(rule):
        raise ConfigError(f"the rule of a group kind is called with an entry's parameters; {rule!r} cannot be called")
    if holds not in ("tokens", "state"):
        raise ConfigError(f"a group kind holds 'tokens' or 'state', got {holds!r}")
    kind = GroupKind(name, holds, rule)
    known = _KINDS.get(name)
    if known is not None and known != kind:
        raise ConfigError(f"group kind {name!r} is already registered with {known.rule!r}; choose another name")
    _KINDS[name] = kind
    return kind


def group_kind(name: str) -> GroupKind:
    """The kind registered as `name`, in this process or by an installed package's `hybridkv.groups` entry point.

    Raises:
        UnknownGroupKind: nobody registered it.
    """
    if name not in _KINDS:
        for point in entry_points(group="hybridkv.groups", name=name):
            point.load()()
    if name not in _KINDS:
        raise UnknownGroupKind(
            f"no group kind {name!r}; known kinds are {', '.join(sorted(_KINDS))}. "
            "Register it with hybridkv.register_group_kind() or a 'hybridkv.groups' entry point."
        )
    return _KINDS[name]


def make_rule(kind: str, params: Mapping[str, int]) -> Rule:
    """The rule of a kind with an entry's parameters.

    Raises:
        ConfigError: the parameters do not fit the kind.
    """
    maker = group_kind(kind).rule
    try:
        return maker(**params)
    except TypeError as error:
        raise ConfigError(f"{kind!r} cannot take the parameters {dict(params)}: {error}") from error


def page_ranges(rule: Rule, lengths: Lengths, page_tokens: int) -> tuple[Range, ...]:
    """`rule.needed` in pages: ascending, disjoint (start, stop) ranges of page indices for every length.

    Args:
        rule: the rule of a group.
        lengths: prefix lengths in tokens.
        page_tokens: tokens a page covers; for a state, the hash unit its checkpoint ends.
    """
    ranges: list[Range] = []
    floor = np.zeros_like(lengths)
    for start, stop in rule.needed(lengths):
        first = np.maximum(start // page_tokens, floor)
        last = np.where(stop > start, -(-stop // page_tokens), first)
        floor = np.maximum(first, last)
        ranges.append((first, floor))
    return tuple(ranges)


def resumable(rule: Rule, lengths: Lengths, page_tokens: int, present: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """After which prefixes every needed page is there and the next token starts a new page.

    Args:
        rule: the rule of a group.
        lengths: prefix lengths in tokens.
        page_tokens: tokens a page covers.
        present: [pages] whether page i of the prompt is cached; pages past the end are not. A page that reaches past
            a prefix belongs to a longer one and does not count for it.

    Returns:
        One bool per length.
    """
    seen = np.concatenate((np.zeros(1, np.int64), np.cumsum(present, dtype=np.int64)))
    known = len(present)
    whole = np.minimum(lengths // page_tokens, known)
    # Where a rule needs nothing, a prefix could end inside a page, which would then be published with its head empty.
    ok: NDArray[np.bool_] = lengths % page_tokens == 0
    for start, stop in page_ranges(rule, lengths, page_tokens):
        inside = np.minimum(stop, whole)
        ok &= seen[inside] - seen[np.minimum(start, inside)] == stop - start
    return ok


register_group_kind("full_attention", holds="tokens", rule=FullAttention)
register_group_kind("sliding_attention", holds="tokens", rule=SlidingAttention)
register_group_kind("chunked_attention", holds="tokens", rule=ChunkedAttention)
register_group_kind("indexed_attention", holds="tokens", rule=FullAttention)
register_group_kind("sink_attention", holds="tokens", rule=SinkAttention)
register_group_kind("linear_attention", holds="state", rule=State)
