"""What the replay asks of a cache, and the real manager behind that face."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from hybridkv.audit import Counters
from hybridkv.manager import GroupManager
from hybridkv.memory import usage_by_kind
from hybridkv.sequence import Sequence
from hybridkv.sim.requests import Tokens


class Held(NamedTuple):
    """Bytes of one kind of layer: held by running requests, and cached."""

    live: int
    cached: int


class Lease(Protocol):
    """One request that is open in a cache."""

    @property
    def hit_tokens(self) -> int:
        """Prompt tokens that were found computed."""

    @property
    def length(self) -> int:
        """Tokens computed by now."""

    def compute(self, n: int, fresh: Tokens) -> None:
        """Compute `n` tokens, of which the last `len(fresh)` were not known before.

        Raises:
            OutOfPages: no room; nothing was computed.
        """

    def close(self, keep: bool) -> None:
        """End the request; with `keep`, its end can be resumed at."""

    def missing(self, tokens: int) -> tuple[str, ...]:
        """Kinds of the groups that keep a new request from resuming after this many of the tokens; distinct."""


class Cache(Protocol):
    """A pool of pages that prompts share."""

    def open(self, tokens: Tokens) -> Lease:
        """Start a request."""

    def held(self) -> dict[str, Held]:
        """Bytes by kind of layer, now."""

    def counters(self) -> Counters:
        """Evictions and moves so far."""


@dataclass(frozen=True, slots=True)
class ManagerLease:
    """A sequence of the manager. Page copies are taken and forgotten: there are no bytes to copy."""

    manager: GroupManager
    seq: Sequence

    @property
    def hit_tokens(self) -> int:
        return self.seq.hit_tokens

    @property
    def length(self) -> int:
        return self.seq.length

    def compute(self, n: int, fresh: Tokens) -> None:
        self.manager.reserve(self.seq, n)
        self.manager.take_copies()
        self.manager.commit(self.seq, n, fresh if len(fresh) else None)

    def close(self, keep: bool) -> None:
        self.manager.close(self.seq, cache=keep)

    def missing(self, tokens: int) -> tuple[str, ...]:
        groups = self.manager.groups
        return tuple(dict.fromkeys(groups[g].kind for g in self.manager.missing_groups(self.seq, tokens)))


@dataclass(frozen=True, slots=True)
class ManagerCache:
    """The real manager."""

    manager: GroupManager

    def open(self, tokens: Tokens) -> ManagerLease:
        return ManagerLease(self.manager, self.manager.open(tokens))

    def held(self) -> dict[str, Held]:
        return {row.kind: Held(row.live_bytes, row.cached_bytes) for row in usage_by_kind(self.manager.usage())}

    def counters(self) -> Counters:
        return self.manager.counters()
