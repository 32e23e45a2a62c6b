"""Which tokens the next forward pass computes, and who gives way when the pages run out.

One step holds every running decode, one token each, then chunks of prompts in order of priority and arrival, within a
budget of tokens; a long prompt therefore never holds up a decode. Rules, all of them:

- A decode that finds no page preempts the running request that is last in that order. It goes back to its place in the
  queue with its prompt and its output so far, and its pages stay cached.
- A prompt chunk that finds no page is halved until it fits; if nothing fits, the prompt sits the step out. Only where
  the step would otherwise be empty does it preempt.
- After pages ran out nobody is admitted until a running request has finished, so that a preempted request does not
  come back only to be preempted again.
- A waiting request that shares a prefix with a prompt being computed waits for that prefix rather than compute it
  twice, and the prompt being computed keeps a resume point there.
"""

from __future__ import annotations

from bisect import insort
from typing import NamedTuple

from hybridkv.engine.request import Request, shared_boundaries
from hybridkv.errors import ConfigError, OutOfPages
from hybridkv.manager import GroupManager

_SHARED_RESUME_POINTS = 4


class Chunk(NamedTuple):
    """The next `size` tokens of a prompt."""

    request: Request
    size: int


class Plan(NamedTuple):
    """One forward pass. Pages are reserved for all of it."""

    decodes: list[Request]
    chunks: list[Chunk]

    @property
    def empty(self) -> bool:
        return not self.decodes and not self.chunks


class Scheduler:
    """The waiting queue and the running requests of one engine."""

    def __init__(
        self, manager: GroupManager, max_batch_tokens: int, max_running: int, max_scored_tokens: int = 2048
    ) -> None:
        """Start empty.

        Args:
            manager: of the pool.
            max_batch_tokens: most tokens of a forward pass.
            max_running: most requests that hold pages.
            max_scored_tokens: most tokens of a forward pass for prompts whose every token gives a row of logits.

        Raises:
            ConfigError: a limit below 1.
        """
        for name, value in (("max_batch_tokens", max_batch_tokens), ("max_running", max_running)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name} must be an integer of at least 1, got {value!r}")
        self._manager = manager
        self._unit = manager.layout.unit_tokens
        self._max_batch_tokens = max_batch_tokens
        self._max_scored_tokens = max_scored_tokens
        # Every running request may decode in the same step.
        self._max_running = min(max_running, max_batch_tokens)
        self._starved = False
        self.waiting: list[Request] = []
        self.running: list[Request] = []

    def submit(self, request: Request) -> None:
        """Queue a request that was checked."""
        insort(self.waiting, request, key=_rank)

    def plan(self) -> Plan:
        """Choose and reserve the next forward pass; empty only if no request is left.

        Raises:
            OutOfPages: the only running request cannot go on, because others hold pages of this pool.
        """
        plan = Plan(self._reserve_decodes(), [])
        budget = self._max_batch_tokens - len(plan.decodes)
        for request in sorted((r for r in self.running if not r.decoding), key=_rank):
            if request.seq is not None and (size := self._chunk_size(plan, request, budget)):
                budget -= self._add_chunk(plan, request, size)
        self._admit(plan, budget)
        return plan

    def finish(self, request: Request) -> None:
        """Take a finished request out; what it computed stays cached."""
        self.running.remove(request)
        self._close(request, cache=True)
        self._starved = False

    def branch(self, copy: Request) -> None:
        """Let a copy that has its first token go on: as a fork of its head's prompt, or later if there is no room."""
        copy.cached_tokens = copy.head.cached_tokens
        if self._starved or len(self.running) >= self._max_running:
            self.submit(copy)
        else:
            copy.seq = self._manager.fork(copy.head.sequence)
            self.running.append(copy)

    def drop(self, request: Request, *, cache: bool = True) -> None:
        """Take out a request and its copies, which nobody wants any more, between two steps or after a failure."""
        for one in request.members:
            one.dropped = one.dropped or not one.ended
            if one in self.running:
                self._close(one, cache=cache)
                self.finish(one)
            elif one in self.waiting:
                self.waiting.remove(one)

    def drop_all(self) -> None:
        """Close everything after a failed step; what that step wrote is not trusted."""
        for request in (*self.running, *self.waiting):
            for one in request.members:
                one.dropped = True
            self._close(request, cache=False)
        self.running.clear()
        self.waiting.clear()
        self._starved = False

    def _reserve_decodes(self) -> list[Request]:
        while decodes := [request for request in self.running if request.decoding]:
            try:
                self._manager.reserve_decode([request.sequence for request in decodes])
            except OutOfPages:
                if len(self.running) == 1:
                    raise
                self._preempt_last()
            else:
                break
        return decodes

    def _add_chunk(self, plan: Plan, request: Request, size: int) -> int:
        """Plan a chunk of a running prompt, as much of it as there is room for; its size, or 0."""
        while not (fits := self._reserve(request, size)):
            self._starved = True
            if not plan.empty:
                return 0
            if len(self.running) == 1:
                self._manager.reserve(request.sequence, 1)
            else:
                self._preempt_last(keep=request)
        plan.chunks.append(Chunk(request, fits))
        return fits

    def _admit(self, plan: Plan, budget: int) -> None:
        for request in self.waiting[: self._max_running]:
            # Asked first: the prompt under way must learn in time where to keep a resume point.
            if self._prefix_is_coming(request):
                continue
            if not budget or len(self.running) >= self._max_running or (self._starved and self.running):
                return
            if request.scoring and not self._chunk_size(plan, request, budget):
                return
            self._open(request)
            size = self._chunk_size(plan, request, budget)
            if self.running and not self._reserve(request, size, smallest=size):
                self._starved = True
                self._close(request, cache=True)
                return
            self.waiting.remove(request)
            self.running.append(request)
            if len(self.running) > 1:
                plan.chunks.append(Chunk(request, size))
            else:
                size = self._add_chunk(plan, request, size)
            budget -= size
            if request.cached_tokens is None:
                request.cached_tokens = request.computed

    def _chunk_size(self, plan: Plan, request: Request, budget: int) -> int:
        size = min(budget, request.remaining)
        if request.scoring:
            taken = sum(chunk.size for chunk in plan.chunks if chunk.request.scoring)
            size = min(size, self._max_scored_tokens - taken)
        return size

    def _reserve(self, request: Request, size: int, smallest: int = 1) -> int:
        """Reserve `size` tokens, or half of it and so on down to `smallest`; how many, or 0."""
        while size >= smallest:
            try:
                self._manager.reserve(request.sequence, size)
            except OutOfPages:
                size //= 2
            else:
                return size
        return 0

    def _open(self, request: Request) -> None:
        others = [other for other in self.waiting[: self._max_running] if other is not request]
        shared = shared_boundaries(request, others, self._unit, _SHARED_RESUME_POINTS)
        request.seq = self._manager.open(
            request.tokens,
            salt=request.salt,
            breakpoints=tuple(sorted({*request.breakpoints, *shared})),
            cache=request.cache,
            # What a prefix would have given in log-probabilities is not cached.
            most_hit=len(request.prompt_logprobs) if request.scoring else None,
        )

    def _prefix_is_coming(self, request: Request) -> bool:
        if request.scoring:
            return False
        coming = False
        for other in self.running:
            if other.computed < len(other.prompt):
                shared = request.shared_tokens(other, self._unit)
                if shared > other.computed:
                    self._manager.add_breakpoint(other.sequence, shared)
                    coming = True
        return coming

    def _preempt_last(self, keep: Request | None = None) -> None:
        victim = max((r for r in self.running if r is not keep), key=_rank)
        self.running.remove(victim)
        self._close(victim, cache=True)
        victim.preemptions += 1
        self.submit(victim)
        self._starved = True

    def _close(self, request: Request, *, cache: bool) -> None:
        if request.seq is not None:
            self._manager.close(request.seq, cache=cache)
            request.seq = None


def _rank(request: Request) -> tuple[int, int]:
    return request.rank
