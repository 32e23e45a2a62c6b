"""How long a request is going to be: what admission reckons with."""

from __future__ import annotations

import math

from hybridkv.engine.request import Request

_START = 0.5
_WEIGHT = 1 / 8


class Foresight:
    """Learns which share of its `max_tokens` a request uses.

    Reckoning with all of `max_tokens` keeps the pool half empty where outputs end early; reckoning with none of it
    admits requests only to preempt them. So the share starts at a half, follows the requests that end, an eighth of
    the way each, and a preemption, which says that it was too low, takes it half of the way to all.
    """

    def __init__(self) -> None:
        self.share = _START

    def ended(self, request: Request) -> None:
        """A request has its whole output."""
        used = (len(request.tokens) - len(request.prompt)) / request.params.max_tokens
        self.share += (used - self.share) * _WEIGHT

    def preempted(self) -> None:
        """The pages ran out."""
        self.share += (1 - self.share) / 2

    def length(self, request: Request) -> int:
        """Tokens the request is expected to have computed at its end, at least those it has now and one more."""
        left = request.params.max_tokens - (len(request.tokens) - len(request.prompt))
        return len(request.tokens) + max(math.ceil(left * self.share), 1) - 1
