"""Which tokens the next forward pass computes, and who gives way when the pages run out.

One step holds every running decode, one token each, then chunks of prompts within a budget of tokens. So the gap
between two tokens of a request is one step, however long the prompts beside it are. Rules, all of them:

- A decode that finds no page preempts the running request that is last in order of priority and arrival. It goes back
  to its place in the queue with its prompt and its output so far, and its pages stay cached.
- Prompts take from the budget as turns.py says. A chunk that finds no page is halved until it fits; if nothing fits,
  the prompt sits the step out. Only where the step would otherwise be empty does it preempt.
- Waiting requests are admitted as admission.py says.
- A waiting request that shares a prefix with a prompt being computed waits for that prefix rather than compute it
  twice. The prompt being computed keeps a resume point there, and is as urgent as the one that waits for it.
- Decodes guess ahead in what budget and pages are left then. A guess is given up before anybody waits for it.
"""

from __future__ import annotations

from typing import NamedTuple

from hybridkv.engine.admission import Admission
from hybridkv.engine.request import Request, by_rank
from hybridkv.engine.turns import Urgency, in_turn, owed
from hybridkv.errors import ConfigError, OutOfPages
from hybridkv.manager import GroupManager
from hybridkv.sequence import Sequence

_WORTH_ALIGNING = 8


class Chunk(NamedTuple):
    """The next `size` tokens of a prompt."""

    request: Request
    size: int


class Plan(NamedTuple):
    """One forward pass. Pages are reserved for all of it.

    Attributes:
        decodes: requests that are given all tokens they have.
        chunks: parts of prompts.
        drafts: what some of `decodes` guess to come next.
    """

    decodes: list[Request]
    chunks: list[Chunk]
    drafts: dict[Request, list[int]]

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
        self._boundary = manager.layout.boundary_tokens
        self._max_batch_tokens = max_batch_tokens
        self._max_scored_tokens = max_scored_tokens
        # Every running request may decode in the same step.
        self._admission = Admission(manager, min(max_running, max_batch_tokens))
        self.running: list[Request] = []

    @property
    def requests(self) -> tuple[Request, ...]:
        """Running and waiting ones."""
        return (*self.running, *self._admission.waiting)

    def submit(self, request: Request) -> None:
        """Queue a request that was checked."""
        self._admission.submit(request)

    def plan(self) -> Plan:
        """Choose and reserve the next forward pass; empty only if no request is left.

        Raises:
            OutOfPages: the only running request cannot go on, because others hold pages of this pool.
        """
        plan = Plan(self._reserve_decodes(), [], {})
        self._share_out(plan, self._max_batch_tokens - sum(request.remaining for request in plan.decodes))
        if plan.empty and self.running:
            self._force(plan)
        self._add_drafts(plan)
        return plan

    def finish(self, request: Request) -> None:
        """Take a finished request out; what it computed stays cached."""
        self.running.remove(request)
        self._close(request, cache=True)
        self._admission.ended(request)

    def branch(self, copy: Request) -> None:
        """Let a copy that has its first token go on: as a fork of its head's prompt, or later if there is no room."""
        copy.cached_tokens = copy.head.cached_tokens
        if self._admission.fork(copy, self.running):
            self.running.append(copy)
        else:
            self._admission.submit(copy)

    def drop(self, request: Request, *, cache: bool = True) -> None:
        """Take out a request and its copies, which nobody wants any more, between two steps or after a failure."""
        for one in request.members:
            one.dropped = one.dropped or not one.ended
            if one in self.running:
                self._close(one, cache=cache)
                self.finish(one)
            elif one in self._admission.waiting:
                self._admission.waiting.remove(one)

    def drop_all(self) -> None:
        """Close everything after a failed step; what that step wrote is not trusted."""
        for request in self.requests:
            for one in request.members:
                one.dropped = True
            self._close(request, cache=False)
        self.running.clear()
        self._admission.clear()

    def _reserve_decodes(self) -> list[Request]:
        while decodes := self._decodes():
            singles = [request.sequence for request in decodes if request.remaining == 1]
            keep = self._next_out()
            try:
                self._manager.reserve_decode(singles, keep=keep)
                for request in decodes:
                    if request.remaining > 1:
                        self._manager.reserve(request.sequence, request.remaining, keep=keep)
            except OutOfPages:
                if len(self.running) == 1:
                    raise
                self._preempt_last()
            else:
                break
        return decodes

    def _decodes(self) -> list[Request]:
        """Running requests that decode. Who has right guesses to compute again may leave no room for the last ones."""
        found, left = [], self._max_batch_tokens
        for request in self.running:
            if request.decoding and request.remaining <= left:
                found.append(request)
                left -= request.remaining
        return found

    def _add_drafts(self, plan: Plan) -> None:
        computed = [request.remaining for request in plan.decodes] + [chunk.size for chunk in plan.chunks]
        budget = self._max_batch_tokens - sum(computed)
        for request in plan.decodes:
            guesses = request.guess(budget)
            if guesses:
                granted = self._manager.reserve_drafts(request.sequence, request.remaining, len(guesses))
                if granted:
                    plan.drafts[request] = guesses[:granted]
                    budget -= granted

    def _share_out(self, plan: Plan, budget: int) -> None:
        """Chunks of prompts, running and waiting ones, within the budget."""
        prompts = [request for request in self.running if not request.decoding]
        waiting, awaited = self._await_prefixes(prompts)
        prompts += waiting
        if not budget or not prompts:
            return
        first = min(prompts, key=by_rank)
        # Nobody shorter may take the last place or the last pages from the one whose turn it is.
        started = [first] if first.seq is None and self._admit(first, first) else []
        debt = min(owed(budget), first.remaining) if first.seq is not None else 0
        closed = False
        for request in in_turn(prompts, self._admission.tokens_left, awaited, budget):
            if request is first:
                debt = 0
            room = self._room(plan, request, budget - debt)
            if request.seq is None and request is not first and room and not closed:
                if not request.scoring and any(
                    request.shared_tokens(other, self._unit) > other.computed for other in started
                ):
                    continue
                # The next ones are longer still, so who finds no room closes the door behind it.
                closed = not self._admit(request, first)
                started.append(request)
            if request.seq is not None and room:
                budget -= self._add_chunk(plan, request, min(room, request.remaining))

    def _room(self, plan: Plan, request: Request, budget: int) -> int:
        """Tokens of the budget that this prompt may take."""
        if not request.scoring:
            return budget
        taken = sum(chunk.size for chunk in plan.chunks if chunk.request.scoring)
        return max(min(budget, self._max_scored_tokens - taken), 0)

    def _admit(self, request: Request, first: Request) -> bool:
        admitted = self._admission.admit(request, self.running, first)
        if admitted:
            self.running.append(request)
        return admitted

    def _await_prefixes(self, prompts: list[Request]) -> tuple[list[Request], dict[Request, Urgency]]:
        """Waiting requests that need not wait for a prefix, and the prompts that the others wait for."""
        ready: list[Request] = []
        awaited: dict[Request, Urgency] = {}
        for request in self._admission.candidates:
            waits = False
            for other in prompts:
                if request.scoring or other.computed >= len(other.prompt):
                    continue
                shared = request.shared_tokens(other, self._unit)
                if shared > other.computed:
                    # Asked before its next chunk is reserved: it must learn in time where to keep a resume point.
                    self._manager.add_breakpoint(other.sequence, shared)
                    urgency = request.priority, shared - other.computed, request.arrival
                    awaited[other] = min(urgency, awaited.get(other, urgency))
                    waits = True
            if waits:
                request.foreseen_hit = None
            else:
                ready.append(request)
        return ready, awaited

    def _add_chunk(self, plan: Plan, request: Request, size: int) -> int:
        """Plan a chunk of a running prompt, as much of it as there is room for; its size, or 0."""
        fits = self._reserve(request, self._aligned(request, size))
        if fits:
            plan.chunks.append(Chunk(request, fits))
        else:
            self._admission.starve()
        return fits

    def _force(self, plan: Plan) -> None:
        """Let the first of the running prompts go on, whoever has to go for it."""
        request = min(self.running, key=by_rank)
        size = min(self._room(plan, request, self._max_batch_tokens), request.remaining)
        while not self._add_chunk(plan, request, size):
            if len(self.running) == 1:
                self._manager.reserve(request.sequence, 1)
            else:
                self._preempt_last()

    def _aligned(self, request: Request, size: int) -> int:
        """The size of a chunk that ends at a boundary where that costs little: a preempted prompt resumes there."""
        beyond = (request.computed + size) % self._boundary
        last = size == request.remaining
        return size if last or beyond * _WORTH_ALIGNING > size else size - beyond

    def _reserve(self, request: Request, size: int) -> int:
        """Reserve `size` tokens, or half of it and so on; how many, or 0."""
        while size:
            try:
                self._manager.reserve(request.sequence, size, keep=self._next_out())
            except OutOfPages:
                size //= 2
            else:
                break
        return size

    def _next_out(self) -> tuple[Sequence, ...]:
        """The sequence to be preempted next, if any: it resumes from its copy of the states, so that one stays."""
        return (max(self.running, key=by_rank).sequence,) if len(self.running) > 1 else ()

    def _preempt_last(self) -> None:
        victim = max(self.running, key=by_rank)
        self.running.remove(victim)
        self._close(victim, cache=True)
        victim.preemptions += 1
        self._admission.preempted(victim)

    def _close(self, request: Request, *, cache: bool) -> None:
        if request.seq is not None:
            self._manager.close(request.seq, cache=cache)
            request.seq = None
