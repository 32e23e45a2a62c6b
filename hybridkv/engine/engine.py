"""The engine a user holds: many prompts in, outputs or a stream out, over one pool."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Self

from tqdm import tqdm

from hybridkv.audit import Usage
from hybridkv.config import parse_bytes
from hybridkv.engine.core import EngineCore
from hybridkv.engine.detokenize import Tokenizer
from hybridkv.engine.drafts import Drafter, PromptLookup
from hybridkv.engine.intake import Intake
from hybridkv.engine.outputs import RequestOutput, StreamEvent
from hybridkv.engine.params import SamplingParams
from hybridkv.engine.prompts import Limits, Prompt, Prompts
from hybridkv.engine.request import Request
from hybridkv.engine.scheduler import Plan, Scheduler
from hybridkv.errors import EngineClosed, HybridKVError, InvalidSampling, PoolTooSmall, RequestError
from hybridkv.hashing import Salt
from hybridkv.hf.paged_cache import PagedCache, paged_cache
from hybridkv.hf.runner import ModelRunner
from hybridkv.manager import GroupManager


class Engine:
    """Serves requests for one model from one pool. Made by `wrap()`; use it from one thread at a time.

    Attributes:
        manager: the group manager of the pool.
        tokenizer: None if only token ids go in and out.

    Args:
        runner: runs packed forward passes of the model over the manager's pool.
        manager: the same manager the runner has.
        tokenizer: needed for string prompts, stop strings and text.
        eos_token_ids: tokens that end an output unless its params ignore them; ids beyond the vocabulary, which a
            config may name, never come.
        max_batch_tokens: most tokens in one forward pass.
        max_running: most requests that hold pages at once.
        logits_memory: bytes of float32 logits one pass may give for `prompt_logprobs`, an int or "64MiB". Such
            prompts are computed in chunks of as many tokens as that allows, at least one.
        speculate: most tokens to guess ahead of each request's next one; 0 guesses none.
        drafter: makes what guesses for one request.

    Raises:
        ConfigError: a limit below 1, or fewer than 0 guesses.
        PoolTooSmall: the pool cannot hold a request of two tokens.
    """

    def __init__(
        self,
        runner: ModelRunner,
        manager: GroupManager,
        *,
        tokenizer: Tokenizer | None = None,
        eos_token_ids: frozenset[int] = frozenset(),
        max_batch_tokens: int = 2048,
        max_running: int = 64,
        logits_memory: int | str = "64MiB",
        speculate: int = 0,
        drafter: Callable[[], Drafter] = PromptLookup,
    ) -> None:
        self.manager = manager
        self.tokenizer = tokenizer
        self._runner = runner
        scored = max(parse_bytes(logits_memory) // (4 * runner.vocab_size), 1)
        self._core = EngineCore(runner, manager, Scheduler(manager, max_batch_tokens, max_running, scored))
        limits = Limits(runner.vocab_size, runner.max_positions, manager.tokens_that_fit(), manager.layout.pool_bytes)
        if limits.pool_tokens < 2:
            raise PoolTooSmall(
                f"a pool of {limits.pool_bytes} bytes holds {limits.pool_tokens} tokens of this model; "
                "give it more memory"
            )
        self._intake = Intake(limits, runner.adapters, tokenizer, eos_token_ids, speculate=speculate, drafter=drafter)
        self._closed = False

    def generate(
        self,
        prompts: Prompts,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        breakpoints: Sequence[int] | Sequence[Sequence[int]] | None = None,
        salt: Salt | None = None,
        cache: bool | Sequence[bool] = True,
        priority: int | Sequence[int] = 0,
        adapter: str | Sequence[str | None] | None = None,
        progress: bool = False,
    ) -> list[RequestOutput]:
        """Serve all prompts together and return their outputs in the same order.

        Args:
            prompts: a string, a list of token ids, or a sequence of such, of any lengths.
            params: one for all or one per prompt; greedy with 64 tokens by default.
            breakpoints: prompt positions in tokens at which a later prompt is likely to part, such as the end of a
                system prompt: one list for all prompts or one list each. A resume point is kept at each.
            salt: only requests with the same salt share cached pages.
            cache: False looks nothing up for a prompt and keeps nothing of it: one for all or one per prompt.
            priority: lower runs first, ties in order of arrival: one for all or one per prompt.
            adapter: name of a LoRA adapter of PEFT that the model has loaded, None for the model without adapters:
                one for all or one per prompt.
            progress: show a bar on stderr.

        Raises:
            RequestError: one of the prompts or params can never be served. Nothing was scheduled.
            EngineClosed: after `close()`.
            UnknownAdapter: an adapter is not loaded, or was deleted meanwhile.
            HybridKVError: the logits of one prompt are not a number; the others of this call end with it.
        """
        self._require_open()
        requests = self._intake.requests(prompts, params, breakpoints, salt, cache, priority, adapter)
        with tqdm(total=len(requests), desc="Generating", unit="request", disable=not progress) as bar:
            tokens = 0
            for request in requests:
                self._core.submit(request)
            try:
                while not all(request.done for request in requests):
                    plan = self.step()
                    tokens += len(plan.decodes) + sum(chunk.size for chunk in plan.chunks)
                    bar.update(sum(request.done for request in requests) - bar.n)
                    bar.set_postfix(tokens=tokens, refresh=False)
                    for i, request in enumerate(requests):
                        if request.error is not None:
                            raise type(request.error)(f"prompt {i}: {request.error}") from request.error
            except BaseException:
                for request in requests:
                    self._core.drop(request)
                raise
        return [_output(request) for request in requests]

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        breakpoints: Sequence[int] | None = None,
        salt: Salt | None = None,
        cache: bool = True,
        priority: int = 0,
        adapter: str | None = None,
        progress: bool = False,
    ) -> Iterator[StreamEvent]:
        """Serve one prompt and yield each token as it comes; the last event carries the whole output.

        With `n` above 1 the events of all outputs come interleaved, each with its `index`.

        The prompt is checked at once and scheduled when the first event is asked for. Closing the iterator early
        gives the request's pages back. Several streams may be open together: each step of one moves all of them.

        Args:
            breakpoints, salt, cache, priority, adapter: as for `generate`.
            progress: show a bar of the prompt's computation on stderr.

        Raises:
            RequestError: the prompt or params can never be served.
            EngineClosed: after `close()`.
        """
        request = self.prepare(
            prompt, params, breakpoints=breakpoints, salt=salt, cache=cache, priority=priority, adapter=adapter
        )
        return self._stream(request, progress)

    def prepare(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        breakpoints: Sequence[int] | None = None,
        salt: Salt | None = None,
        cache: bool = True,
        priority: int = 0,
        adapter: str | None = None,
    ) -> Request:
        """A checked request for a stream, not scheduled: for callers with a step loop of their own.

        Such a loop calls `submit`, then `step` until the request is done, and reads its events; or `drop`.

        Raises:
            RequestError: the prompt or params can never be served.
            EngineClosed: after `close()`.
        """
        self._require_open()
        requests = self._intake.requests(prompt, params, breakpoints, salt, cache, priority, adapter)
        if len(requests) != 1:
            raise RequestError(f"a stream serves one prompt, got {len(requests)}; use generate() for several")
        if (one := requests[0].params).sampled > one.n:
            raise InvalidSampling(
                f"a stream cannot tell the best {one.n} of {one.sampled} outputs before they have ended; use generate()"
            )
        return requests[0]

    def submit(self, request: Request) -> None:
        """Queue a prepared request."""
        self._core.submit(request)

    def step(self) -> Plan:
        """One forward pass for whoever has work. An error of the pass ends every request; the engine stays usable.

        Raises:
            EngineClosed: after `close()`.
        """
        self._require_open()
        return self._core.step()

    def drop(self, request: Request) -> None:
        """Give the pages of a request back, at the end of the step under way if there is one."""
        self._core.drop(request)

    def usage(self) -> Usage:
        """Bytes of the pool by layer group: live, cached, free."""
        return self.manager.usage()

    def clear_cache(self) -> int:
        """Drop every cached page no running request holds; returns the bytes that became free."""
        return self.manager.evict(self.manager.layout.pool_bytes)

    def paged_cache(self) -> PagedCache:
        """A cache over this engine's pool, for `model.generate(..., cache=)`. The two take turns on the pool.

        Raises:
            EngineClosed: the engine is closed.
        """
        self._require_open()
        return paged_cache(self._runner.model, runner=self._runner)

    def close(self) -> None:
        """Drop every request and give the model back as it was. Closing twice is allowed."""
        if not self._closed:
            self._closed = True
            self._core.drop_all()
            self._runner.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _stream(
        self, request: Request, progress: bool, exiting: Callable[[], bool] = sys.is_finalizing
    ) -> Iterator[StreamEvent]:
        self._core.submit(request)
        try:
            with tqdm(
                total=len(request.prompt), desc="Prefill", unit="token", disable=not progress, leave=False
            ) as bar:
                while not request.events and not request.done:
                    self.step()
                    bar.update(min(request.computed, len(request.prompt)) - bar.n)
            while True:
                while request.events:
                    yield request.events.popleft()
                if request.done:
                    _output(request)
                    return
                self.step()
        finally:
            # An interpreter that exits takes the pool with it, and half of what giving pages back needs is gone.
            if not exiting():
                self._core.drop(request)

    def _require_open(self) -> None:
        if self._closed:
            raise EngineClosed("the engine is closed; wrap the model again")


def _output(request: Request) -> RequestOutput:
    if request.error is not None:
        raise request.error
    if request.output is None:
        raise HybridKVError(
            "the request was dropped: another call on this engine failed in the same forward pass, or it was closed; "
            "submit it again"
        )
    return request.output
