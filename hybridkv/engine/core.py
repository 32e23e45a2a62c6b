"""The step loop: plan, one packed forward pass, commit, sample."""

from __future__ import annotations

from hybridkv.engine.request import Request
from hybridkv.engine.sampler import sample
from hybridkv.engine.scheduler import Plan, Scheduler
from hybridkv.hf.runner import ModelRunner, Span
from hybridkv.manager import GroupManager


class EngineCore:
    """Runs submitted requests step by step. Not thread-safe."""

    def __init__(self, runner: ModelRunner, manager: GroupManager, scheduler: Scheduler) -> None:
        self._runner = runner
        self._manager = manager
        self._scheduler = scheduler

    def submit(self, request: Request) -> None:
        self._scheduler.submit(request)

    def drop(self, request: Request) -> None:
        """Forget a request that nobody waits for any more."""
        if not request.done:
            self._scheduler.drop(request)

    def drop_all(self) -> None:
        self._scheduler.drop_all()

    def step(self) -> Plan:
        """One forward pass for whoever has work; the plan is empty when nobody has.

        Any error, an interrupt included, drops every request and gives back all their pages before it goes on, so
        the engine is usable afterwards. Nothing a failed pass wrote is ever hit; an interrupt empties the cache.
        """
        try:
            plan = self._scheduler.plan()
            if not plan.empty:
                self._run(plan)
        except BaseException as error:
            self._scheduler.drop_all()
            if not isinstance(error, Exception):
                # An interrupt may fall between taking page copies and running them.
                self._manager.evict(self._manager.layout.pool_bytes)
            raise
        return plan

    def _run(self, plan: Plan) -> None:
        spans = [Span(request.sequence, request.tokens[-1:]) for request in plan.decodes]
        ready = list(enumerate(plan.decodes))
        for request, size in plan.chunks:
            if size == request.remaining:
                ready.append((len(spans), request))
            done = request.computed
            spans.append(Span(request.sequence, request.tokens[done : done + size]))
        logits = self._runner.forward(spans)
        if plan.decodes:
            self._manager.commit_decode(
                [request.sequence for request in plan.decodes], [request.tokens[-1] for request in plan.decodes]
            )
        for request, size in plan.chunks:
            self._manager.commit(request.sequence, size)
        if not ready:
            return
        rows = [row for row, _ in ready]
        wanted = logits if len(rows) == len(spans) else logits[rows]
        tokens = sample(wanted, [request.state for _, request in ready])
        for (_, request), token in zip(ready, tokens, strict=True):
            request.append(token)
            if request.done:
                self._scheduler.finish(request)
