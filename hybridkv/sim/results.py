"""What a replay counts."""

from __future__ import annotations

from typing import Any, NamedTuple

from hybridkv.audit import Counters


class KindBytes(NamedTuple):
    """Bytes of one kind of layer: means over the moments at which a request ended, and at the end of the replay."""

    mean_live: float
    mean_cached: float
    end_cached: int


class Cpu(NamedTuple):
    """CPU time of the cache itself, in microseconds per request: `prefill` and `decode` are reserve and commit."""

    open: float
    prefill: float
    decode: float
    close: float


class Replay(NamedTuple):
    """Counts of one replay. Refused requests are in `refused` only.

    Attributes:
        requests: requests that ran to their end.
        refused: requests that do not fit in the pool alone.
        preemptions: how often a running request had to make room and start again.
        hit_tokens: prompt tokens found computed when a request first started.
        unbounded_hit_tokens: what they would be in a pool that never evicts; None if that was not replayed.
        lost: tokens by which a hit fell short of the unbounded one, by the kinds that lacked a page there, joined by
            "+": "linear_attention" alone means that all else was still cached.
        recomputed_tokens: tokens computed again after preemptions.
        counters: evictions and moves.
        held: bytes by kind.
        cpu: time of the cache's own code.
        hits: the hit of every request by its number, refused ones too.
    """

    requests: int
    refused: int
    preemptions: int
    prompt_tokens: int
    computed_tokens: int
    hit_tokens: int
    unbounded_hit_tokens: int | None
    lost: dict[str, int]
    recomputed_tokens: int
    counters: Counters
    held: dict[str, KindBytes]
    cpu: Cpu
    hits: tuple[int, ...]

    @property
    def hit_rate(self) -> float:
        """Share of the prompt tokens that was found computed."""
        return self.hit_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def unbounded_hit_rate(self) -> float | None:
        """The same in a pool that never evicts."""
        if self.unbounded_hit_tokens is None:
            return None
        return self.unbounded_hit_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Plain dictionaries for JSON, rates included and the hits of single requests left out."""
        fields = self._asdict()
        del fields["hits"]
        return {
            **fields,
            "hit_rate": self.hit_rate,
            "unbounded_hit_rate": self.unbounded_hit_rate,
            "counters": self.counters._asdict(),
            "held": {kind: bytes_._asdict() for kind, bytes_ in self.held.items()},
            "cpu": self.cpu._asdict(),
        }
