"""The two sides of the engine benchmark: this package, and what one would use without it.

Both get the same prompts as token ids and generate greedily, ignoring end-of-sequence tokens. A clock is any function
that returns seconds. Requests that arrive over time do so on a clock of their own, which runs while a side computes and
jumps over its idle time, so that a run takes no longer than its work.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from transformers import DynamicCache, PreTrainedModel

import hybridkv

Clock = Callable[[], float]
Prompt = list[int]


class Arrival(NamedTuple):
    """A request that arrives `at` seconds and asks for `new_tokens`."""

    at: float
    prompt: Prompt
    new_tokens: int


class Served(NamedTuple):
    """How a stream of requests went: seconds until the last was done, and the mean from arrival to last token."""

    makespan_s: float
    latency_s: float


class Ours:
    """An engine over one pool; its cache is emptied before every measurement."""

    name = "hybridkv"

    def __init__(self, model: PreTrainedModel, clock: Clock, memory: str, **options: Any) -> None:
        self.engine = hybridkv.wrap(model, memory=memory, **options)
        self._clock = clock

    def close(self) -> None:
        self.engine.close()

    def batch(self, prompts: Sequence[Prompt], new_tokens: int) -> float:
        self.engine.clear_cache()
        began = self._clock()
        self.engine.generate(list(prompts), _params(new_tokens))
        return self._clock() - began

    def first_token(self, prompt: Prompt, *, warm: bool = False) -> float:
        if not warm:
            self.engine.clear_cache()
        began = self._clock()
        self.engine.generate(prompt, _params(1))
        return self._clock() - began

    def decode(self, prompt: Prompt, new_tokens: int) -> float:
        """Median seconds of a token after the first."""
        self.engine.clear_cache()
        stream = self.engine.stream(prompt, _params(new_tokens))
        stamps = [self._clock() for _ in stream]
        return statistics.median(after - before for before, after in pairwise(stamps))

    def chat(self, turns: Sequence[Prompt], new_tokens: int) -> float:
        self.engine.clear_cache()
        history: Prompt = []
        began = self._clock()
        for turn in turns:
            history += turn
            history += self.engine.generate(history, _params(new_tokens))[0].token_ids
        return self._clock() - began

    def arrivals(self, requests: Sequence[Arrival]) -> Served:
        self.engine.clear_cache()
        waiting = list(requests)
        streams: list[tuple[Arrival, Any]] = []
        latencies: list[float] = []
        now = 0.0
        while waiting or streams:
            if not streams and waiting[0].at > now:
                now = waiting[0].at
            began = self._clock()
            while waiting and waiting[0].at <= now:
                request = waiting.pop(0)
                streams.append((request, self.engine.stream(request.prompt, _params(request.new_tokens))))
            left = []
            for request, stream in streams:
                # Each step of one stream moves all of them, so the others mostly hand out what is there already.
                event = next(stream)
                if event.output is None:
                    left.append((request, stream))
                else:
                    latencies.append(now + self._clock() - began - request.at)
            streams = left
            now += self._clock() - began
        return Served(now, statistics.mean(latencies))


class Stock:
    """`model.generate` as it comes: left-padded batches, one cache per call."""

    name = "generate"

    def __init__(self, model: PreTrainedModel, clock: Clock) -> None:
        self._model = model
        self._clock = clock

    def batch(self, prompts: Sequence[Prompt], new_tokens: int) -> float:
        began = self._clock()
        self._generate(prompts, new_tokens)
        return self._clock() - began

    def first_token(self, prompt: Prompt) -> float:
        return self.batch([prompt], 1)

    def decode(self, prompt: Prompt, new_tokens: int) -> float:
        stamps = _Stamps(self._clock)
        self._generate([prompt], new_tokens, streamer=stamps)
        return statistics.median(after - before for before, after in pairwise(stamps.seconds))

    def chat(self, turns: Sequence[Prompt], new_tokens: int, *, keep: bool) -> float:
        """`keep`: one cache carried by hand from turn to turn; else every turn computes the whole history."""
        cache = DynamicCache(config=self._model.config) if keep else None
        history: Prompt = []
        began = self._clock()
        for turn in turns:
            history += turn
            history += self._generate([history], new_tokens, **({"cache": cache} if keep else {}))[0]
        return self._clock() - began

    def arrivals(self, requests: Sequence[Arrival], batch: int = 8) -> Served:
        """Batches of the next requests in order; each begins when all of it are there and the one before is done."""
        now, latencies = 0.0, []
        for first in range(0, len(requests), batch):
            members = requests[first : first + batch]
            now = max(now, members[-1].at)
            now += self.batch([member.prompt for member in members], max(member.new_tokens for member in members))
            latencies += [now - member.at for member in members]
        return Served(now, statistics.mean(latencies))

    def _generate(self, prompts: Sequence[Prompt], new_tokens: int, **options: Any) -> list[list[int]]:
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        generated: torch.Tensor = self._model.generate(  # type: ignore[operator]
            ids,
            attention_mask=mask,
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            do_sample=False,
            pad_token_id=0,
            **options,
        )
        found: list[list[int]] = generated[:, width:].tolist()
        return found


class _Stamps:
    """A streamer that notes when a token came; the first call hands over the prompt."""

    def __init__(self, clock: Clock) -> None:
        self.seconds: list[float] = []
        self._clock = clock
        self._prompt = True

    def put(self, tokens: Any) -> None:
        if not self._prompt:
            self.seconds.append(self._clock())
        self._prompt = False

    def end(self) -> None:
        pass


def _params(new_tokens: int) -> hybridkv.SamplingParams:
    return hybridkv.SamplingParams(max_tokens=new_tokens, ignore_eos=True)
