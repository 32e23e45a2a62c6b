"""The step loop: plan, one packed forward pass, sample, commit."""

from __future__ import annotations

from itertools import accumulate

from torch import Tensor

from hybridkv.engine.adapters import end_without_adapter
from hybridkv.engine.forks import with_new_copies
from hybridkv.engine.logprobs import Measured, read_prompt
from hybridkv.engine.request import Request
from hybridkv.engine.sampler import sample
from hybridkv.engine.scheduler import Plan, Scheduler
from hybridkv.errors import HybridKVError
from hybridkv.hf.runner import ModelRunner, Span
from hybridkv.manager import GroupManager


class EngineCore:
    """Runs submitted requests step by step. Not thread-safe."""

    def __init__(self, runner: ModelRunner, manager: GroupManager, scheduler: Scheduler) -> None:
        self._runner = runner
        self._manager = manager
        self._scheduler = scheduler
        self._losses = runner.losses
        self._unwanted: list[Request] = []
        self._busy = False

    def submit(self, request: Request) -> None:
        self._scheduler.submit(request)

    def drop(self, request: Request) -> None:
        """Forget a request that nobody waits for any more, as soon as no step is under way.

        Garbage collection may close an abandoned stream in the middle of a step.
        """
        self._unwanted.append(request)
        if not self._busy:
            self._drop_unwanted()

    def drop_all(self) -> None:
        self._scheduler.drop_all()

    def step(self) -> Plan:
        """One forward pass for whoever has work; the plan is empty when nobody has.

        A prompt whose logits are not a number ends alone, with its `error`. Any other error, an interrupt included,
        drops every request and gives back all their pages before it goes on, so the engine is usable afterwards.
        Nothing a failed pass wrote is ever hit. An interrupt, and a failure while pages were copied, empty the cache.
        """
        self._busy = True
        try:
            return self._step()
        finally:
            self._drop_unwanted()

    def _step(self) -> Plan:
        self._runner.reap()
        if self._losses != self._runner.losses:
            # Somebody else who uses the pool failed there. Who waits holds no pages and may still be served.
            for request in tuple(self._scheduler.running):
                self._scheduler.drop(request)
            self._forget_cache()
        end_without_adapter(self._scheduler, self._runner.adapters)
        try:
            plan = self._scheduler.plan()
            if not plan.empty:
                self._run(plan)
        except BaseException as error:
            self._scheduler.drop_all()
            if self._losses != self._runner.losses or not isinstance(error, Exception):
                self._forget_cache()
            raise
        return plan

    def _drop_unwanted(self) -> None:
        self._busy = True
        try:
            while self._unwanted:
                request = self._unwanted.pop()
                if not request.done:
                    self._scheduler.drop(request)
        finally:
            self._busy = False

    def _forget_cache(self) -> None:
        """Cached pages may have been moved in the books and not in memory."""
        self._losses = self._runner.losses
        self._manager.evict(self._manager.layout.pool_bytes)

    def _run(self, plan: Plan) -> None:
        spans = [Span(request.sequence, request.tokens[-1:]) for request in plan.decodes]
        ready = list(enumerate(plan.decodes))
        for request, size in plan.chunks:
            done = request.computed
            spans.append(Span(request.sequence, request.tokens[done : done + size], request.logits_rows(size)))
        ends = list(accumulate(span.rows for span in spans))
        logits = self._runner.forward(spans)
        # What is wrong with a pass must be known before any of its pages are published.
        owners = [*plan.decodes, *(request for request, _ in plan.chunks)]
        failed = self._fail_where_nan(
            logits, [one for one, span in zip(owners, spans, strict=True) for _ in range(span.rows)]
        )
        for i, (request, size) in enumerate(plan.chunks, len(plan.decodes)):
            if size == request.remaining:
                ready.append((ends[i] - 1, request))
            read_prompt(request, logits[ends[i] - spans[i].rows : ends[i]], request.computed + size)
        ready = with_new_copies([(row, request) for row, request in ready if request not in failed])
        rows = [row for row, _ in ready]
        wanted = logits if len(rows) == len(logits) else logits[rows]
        measured = Measured(wanted, [request for _, request in ready])
        tokens = sample(wanted, [request.state for _, request in ready]) if ready else []
        decodes = [request for request in plan.decodes if request not in failed]
        if decodes:
            self._manager.commit_decode(
                [request.sequence for request in decodes], [request.tokens[-1] for request in decodes]
            )
        for request, size in plan.chunks:
            if request not in failed:
                self._manager.commit(request.sequence, size)
        for (_, request), token, logprob in zip(ready, tokens, measured.of(tokens), strict=True):
            request.append(token, logprob)
        for _, request in ready:
            if request.seq is None and not request.ended:
                self._scheduler.branch(request)
        for _, request in ready:
            if request.seq is not None and request.ended:
                self._scheduler.finish(request)

    def _fail_where_nan(self, logits: Tensor, requests: list[Request]) -> list[Request]:
        """End the requests whose row of logits is not a number, and their copies; nothing of theirs is kept.

        Returns:
            All of them.
        """
        bad = logits.amax(-1).isnan()
        failed = []
        for request in [requests[row] for row in bad.nonzero()[:, 0].tolist()]:
            request.head.error = HybridKVError(
                f"the model's logits for a request of {len(request.tokens)} tokens are not a number; "
                "half precision overflows in some models: try bfloat16 or float32"
            )
            self._scheduler.drop(request, cache=False)
            failed += request.members
        return failed
