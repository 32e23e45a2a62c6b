"""The step loop: plan, one packed forward pass, sample, commit."""

from __future__ import annotations

from hybridkv.engine.adapters import end_without_adapter
from hybridkv.engine.forks import new_copies
from hybridkv.engine.logprobs import read_prompt
from hybridkv.engine.request import Request
from hybridkv.engine.scheduler import Plan, Scheduler
from hybridkv.engine.verify import Asked, ask, choose, usable
from hybridkv.errors import HybridKVError
from hybridkv.hf.runner import ModelRunner
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
        asked, spans = ask(plan)
        logits = self._runner.forward(spans)
        # What is wrong with a pass must be known before any of its pages are published.
        sound, failed = usable(logits, asked)
        for request in failed:
            self._fail(request)
        sound = [one for one in sound if one.request.seq is not None]
        for one in sound:
            if one.request.scoring:
                read_prompt(one.request, logits[one.first : one.row + 1], one.request.computed + one.firm)
        copies = new_copies(sound)
        kept = choose(logits, [*sound, *copies])
        self._commit(plan, sound, kept[: len(sound)])
        for copy in copies:
            if not copy.request.ended:
                self._scheduler.branch(copy.request)
        for one in sound:
            if one.request.ended:
                self._scheduler.finish(one.request)

    def _commit(self, plan: Plan, asked: list[Asked], kept: list[int]) -> None:
        """Count as computed what each request was right to compute."""
        singles: list[Request] = []
        for one, right in zip(asked, kept, strict=True):
            request, seq = one.request, one.request.sequence
            computed = request.tokens[request.computed : request.computed + one.firm + right]
            if request in plan.drafts:
                self._manager.commit_drafts(seq, computed)
                request.learn(len(plan.drafts[request]), right)
            elif not request.decoding:
                self._manager.commit(seq, one.firm)
            elif one.firm == 1:
                singles.append(request)
            else:
                self._manager.commit(seq, one.firm, computed)
        if singles:
            fed = [request.tokens[request.computed] for request in singles]
            self._manager.commit_decode([request.sequence for request in singles], fed)

    def _fail(self, request: Request) -> None:
        """End a request whose logits are not numbers, and its copies; nothing of theirs is kept."""
        request.head.error = HybridKVError(
            f"the model's logits for a request of {len(request.tokens)} tokens are not a number; "
            "half precision overflows in some models: try bfloat16 or float32"
        )
        self._scheduler.drop(request, cache=False)
