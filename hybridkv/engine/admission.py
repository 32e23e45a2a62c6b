"""The waiting queue, and who may come out of it.

A request is admitted when it and the running ones fit the pool at the lengths they are expected to end with. One that
does not fit is not tried again before a running request has ended, and until then a bounded number of later ones may
pass it. After pages ran out nobody is admitted until a running request has ended, so that a preempted request does not
come back only to be preempted again.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence

from hybridkv.engine.foresight import Foresight
from hybridkv.engine.request import Request, by_rank, shared_boundaries
from hybridkv.manager import GroupManager

_SHARED_RESUME_POINTS = 4
_PATIENCE = 32


class Admission:
    """Requests that hold no pages.

    Attributes:
        waiting: in order of service.
    """

    def __init__(self, manager: GroupManager, max_running: int) -> None:
        self._manager = manager
        self._unit = manager.layout.unit_tokens
        self._max_running = max_running
        self._foresight = Foresight()
        self._starved = False
        self._ends = 0
        self.waiting: list[Request] = []

    @property
    def candidates(self) -> list[Request]:
        """The waiting requests that are looked at in a step, in order of service."""
        return self.waiting[: self._max_running]

    def submit(self, request: Request) -> None:
        insort(self.waiting, request, key=by_rank)

    def starve(self) -> None:
        """Pages ran out."""
        self._starved = True

    def preempted(self, request: Request) -> None:
        """A request was put out to make room; it goes back to its place in the queue."""
        self._starved = True
        self._foresight.preempted()
        request.foreseen_hit = None
        self.submit(request)

    def ended(self, request: Request) -> None:
        """A running request has given its pages back for good."""
        self._starved = False
        self._ends += 1
        if request.finish_reason is not None:
            self._foresight.ended(request)

    def clear(self) -> None:
        self.waiting.clear()
        self._starved = False

    def tokens_left(self, request: Request) -> int:
        """Tokens to compute until the prompt is done. For a waiting one as the cache was when this was first asked."""
        if request.seq is not None:
            return request.remaining
        if request.foreseen_hit is None:
            known = request.cache and not request.scoring
            request.foreseen_hit = (
                self._manager.hit_tokens(request.tokens, salt=request.salt, adapter=request.adapter) if known else 0
            )
        return len(request.tokens) - request.foreseen_hit

    def admit(self, request: Request, running: Sequence[Request], first: Request) -> bool:
        """Open the sequence of a waiting request if there is room for all of it.

        Args:
            running: requests that hold pages.
            first: whose turn it is; if it waits, it is asked for before anybody else.
        """
        if not running:
            self._open(request)
        elif (
            not self._has_place(running)
            or request.refused_at == self._ends
            or (first is not request and first.seq is None and first.passed >= _PATIENCE)
        ):
            return False
        else:
            self._open(request)
            if not self._fits(request, running):
                request.refused_at = self._ends
                return False
        if first is not request and first.seq is None:
            first.passed += 1
        self.waiting.remove(request)
        if request.cached_tokens is None:
            request.cached_tokens = request.computed
        return True

    def fork(self, copy: Request, running: Sequence[Request]) -> bool:
        """Fork the sequence of a copy's head, if there is room for all of the copy."""
        if not self._has_place(running):
            return False
        copy.seq = self._manager.fork(copy.head.sequence)
        return self._fits(copy, running)

    def _has_place(self, running: Sequence[Request]) -> bool:
        return len(running) < self._max_running and not self._starved

    def _fits(self, request: Request, running: Sequence[Request]) -> bool:
        """Whether an open request fits beside the running ones at the lengths they are expected to end with."""
        wants = [(one.sequence, self._foresight.length(one)) for one in (*running, request)]
        fits = self._manager.fits_grown(wants)
        if not fits:
            self._manager.close(request.sequence)
            request.seq = None
        return fits

    def _open(self, request: Request) -> None:
        others = [other for other in self.candidates if other is not request]
        shared = shared_boundaries(request, others, self._unit, _SHARED_RESUME_POINTS)
        request.seq = self._manager.open(
            request.tokens,
            salt=request.salt,
            adapter=request.adapter,
            breakpoints=tuple(sorted({*request.breakpoints, *shared})),
            cache=request.cache,
            # What a prefix would have given in log-probabilities is not cached.
            most_hit=len(request.prompt_logprobs) if request.scoring else None,
        )
