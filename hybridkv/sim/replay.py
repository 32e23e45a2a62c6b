"""The loop that drives a cache with the requests of a trace: one after another, or overlapping as they arrive.

The service model is one accelerator that works in steps. A step computes one chunk of the oldest unfinished prompt,
which takes its tokens over `prefill_rate` seconds, and meanwhile every request past its prompt decodes at
`decode_rate`. Requests start in order of arrival while fewer than `max_running` run. Where pages run out, the request
that started last is preempted, is put back in front of the queue, and nothing starts until a request has ended.

A request computes its prompt and all of its output but the last token, which nobody looks at. Decoding commits up to 64
tokens at once, never past a multiple of 64: copies of states are due only there, so what is left at the end is what
single tokens would leave. Meanwhile a window group may hold a few pages more than with single tokens.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from time import process_time
from typing import NamedTuple

import numpy as np

from hybridkv.errors import ConfigError, OutOfPages
from hybridkv.sim.caches import Cache, Held, Lease
from hybridkv.sim.requests import Request, Tokens
from hybridkv.sim.results import Cpu, KindBytes, Replay

STRIDE = 64
"""Most tokens that decode in one commit, and whose multiples none crosses."""


@dataclass(frozen=True, slots=True)
class Service:
    """How requests overlap.

    Attributes:
        prefill_rate: prompt tokens a second, of all requests together.
        decode_rate: output tokens a second, of each request.
        max_running: most requests at a time.
        chunk_tokens: most prompt tokens in one step.
        timed: False runs one request after another and ignores arrivals and rates.
    """

    prefill_rate: float = 20_000.0
    decode_rate: float = 50.0
    max_running: int = 32
    chunk_tokens: int = 2048
    timed: bool = False

    def __post_init__(self) -> None:
        rates = self.prefill_rate, self.decode_rate
        if any(not 0 < rate < math.inf for rate in rates) or self.max_running < 1 or self.chunk_tokens < 1:
            raise ConfigError(
                "rates, the most running requests and the chunk must be above 0, got "
                f"{self.prefill_rate}, {self.decode_rate}, {self.max_running} and {self.chunk_tokens}"
            )


def replay(
    cache: Cache,
    requests: Iterable[Request],
    service: Service,
    unbounded: Sequence[int] | None = None,
    progress: Callable[[], object] = lambda: None,
) -> Replay:
    """Run all requests to their end and count.

    Args:
        cache: a fresh cache.
        requests: in order of arrival.
        service: how they overlap.
        unbounded: hits of the same requests in a pool that never evicts, to tell what was lost.
        progress: called at the end of every request.
    """
    return _Loop(cache, requests, service, unbounded, progress).run()


class _Active:
    """A request that waits or runs.

    Attributes:
        tokens: its prompt and what it computes of its output.
        known: how many of them it starts with: the prompt, and what it generated before a preemption.
        computed: tokens computed before it was preempted.
        lost: the kinds that lacked a page, and the tokens this cost.
        credit: tokens it may decode by now.
    """

    def __init__(self, number: int, request: Request) -> None:
        self.number = number
        self.arrival = request.arrival
        self.tokens: Tokens = np.concatenate((request.tokens, request.output[:-1]))
        self.prompt = self.known = len(request.tokens)
        self.computed = 0
        self.hit: int | None = None
        self.lost: tuple[str, int] | None = None
        self.credit = 0.0


class _Run(NamedTuple):
    active: _Active
    lease: Lease

    @property
    def left(self) -> int:
        """Tokens it has yet to compute."""
        return len(self.active.tokens) - self.lease.length


class _Loop:
    def __init__(
        self,
        cache: Cache,
        requests: Iterable[Request],
        service: Service,
        unbounded: Sequence[int] | None,
        progress: Callable[[], object],
    ) -> None:
        self._cache, self._service, self._unbounded, self._progress = cache, service, unbounded, progress
        self._arrivals = (_Active(number, request) for number, request in enumerate(requests))
        self._waiting: deque[_Active] = deque()
        self._running: list[_Run] = []
        self._clock = 0.0
        self._blocked = False
        self._count: Counter[str] = Counter()
        self._cpu: dict[str, float] = dict.fromkeys(Cpu._fields, 0.0)
        self._lost: Counter[str] = Counter()
        self._hits: dict[int, int] = {}
        self._sums: dict[str, Held] = {}

    def run(self) -> Replay:
        while True:
            self._admit()
            if self._running:
                self._step()
            elif self._waiting:
                self._clock = max(self._clock, self._waiting[0].arrival)
            else:
                return self._result()

    def _admit(self) -> None:
        timed = self._service.timed
        most = self._service.max_running if timed else 1
        while len(self._running) < most and not self._blocked:
            if not self._waiting:
                following = next(self._arrivals, None)
                if following is None:
                    return
                self._waiting.append(following)
            if timed and self._waiting[0].arrival > self._clock:
                return
            self._start(self._waiting.popleft())

    def _start(self, active: _Active) -> None:
        begun = process_time()
        lease = self._cache.open(active.tokens[: active.known])
        self._cpu["open"] += process_time() - begun
        self._running.append(_Run(active, lease))
        if active.hit is not None:
            self._count["recomputed"] += max(active.computed - lease.hit_tokens, 0)
            return
        active.hit = self._hits[active.number] = lease.hit_tokens
        if self._unbounded is not None and (short := self._unbounded[active.number] - active.hit) > 0:
            active.lost = "+".join(lease.missing(self._unbounded[active.number])), short

    def _step(self) -> None:
        service = self._service
        prompt = next((run for run in self._running if run.lease.length < run.active.known), None)
        n = 0
        if prompt is not None:
            n = min(service.chunk_tokens, prompt.active.known - prompt.lease.length)
            self._compute(prompt, n)
        seconds = n / service.prefill_rate if n else STRIDE / service.decode_rate
        self._clock += seconds
        for run in tuple(self._running):
            if run is not prompt and run.lease.length >= run.active.known:
                run.active.credit += seconds * service.decode_rate
                self._decode(run)
        for run in [run for run in self._running if not run.left]:
            self._finish(run)

    def _decode(self, run: _Run) -> None:
        allowed = min(int(run.active.credit), run.left) if self._service.timed else run.left
        run.active.credit -= allowed
        while allowed:
            n = min(allowed, STRIDE - run.lease.length % STRIDE)
            if run not in self._running or not self._compute(run, n):
                return
            allowed -= n

    def _compute(self, run: _Run, n: int) -> bool:
        """Whether the tokens were computed; if not, the request was preempted or refused."""
        active, lease = run
        start = lease.length
        kind = "prefill" if start < active.prompt else "decode"
        while True:
            begun = process_time()
            try:
                lease.compute(n, active.tokens[max(start, active.known) : start + n])
            except OutOfPages:
                victim = self._running[-1]
                if len(self._running) == 1:
                    self._refuse(run)
                else:
                    self._preempt(victim)
                if victim is run:
                    return False
            else:
                self._count["computed"] += n
                return True
            finally:
                self._cpu[kind] += process_time() - begun

    def _preempt(self, run: _Run) -> None:
        active, lease = run
        self._count["preemptions"] += 1
        active.computed = lease.length
        active.known = max(active.known, lease.length)
        active.credit = 0.0
        self._leave(run, keep=True)
        self._waiting.appendleft(active)
        self._blocked = True

    def _refuse(self, run: _Run) -> None:
        self._count["refused"] += 1
        self._leave(run, keep=False)
        self._blocked = False
        self._progress()

    def _finish(self, run: _Run) -> None:
        active = run.active
        self._leave(run, keep=True)
        self._blocked = False
        self._count["requests"] += 1
        self._count["prompt"] += active.prompt
        self._count["hit"] += active.hit or 0
        self._count["unbounded"] += (active.hit or 0) + (active.lost[1] if active.lost else 0)
        if active.lost:
            self._lost[active.lost[0]] += active.lost[1]
        for kind, held in self._cache.held().items():
            live, cached = self._sums.get(kind, (0, 0))
            self._sums[kind] = Held(live + held.live, cached + held.cached)
        self._progress()

    def _leave(self, run: _Run, *, keep: bool) -> None:
        begun = process_time()
        run.lease.close(keep)
        self._cpu["close"] += process_time() - begun
        self._running = [other for other in self._running if other is not run]

    def _result(self) -> Replay:
        count = self._count
        ended = max(count["requests"], 1)
        return Replay(
            requests=count["requests"],
            refused=count["refused"],
            preemptions=count["preemptions"],
            prompt_tokens=count["prompt"],
            computed_tokens=count["computed"],
            hit_tokens=count["hit"],
            unbounded_hit_tokens=None if self._unbounded is None else count["unbounded"],
            lost=dict(self._lost.most_common()),
            recomputed_tokens=count["recomputed"],
            counters=self._cache.counters(),
            held={
                kind: KindBytes(
                    self._sums[kind].live / ended if kind in self._sums else 0.0,
                    self._sums[kind].cached / ended if kind in self._sums else 0.0,
                    held.cached,
                )
                for kind, held in self._cache.held().items()
            },
            cpu=Cpu(**{part: 1e6 * seconds / ended for part, seconds in self._cpu.items()}),
            hits=tuple(self._hits[number] for number in sorted(self._hits)),
        )
