"""The engine for asyncio: one thread runs the steps, any number of tasks read their streams."""

from __future__ import annotations

import asyncio
import atexit
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

from hybridkv.audit import Usage
from hybridkv.engine.engine import Engine
from hybridkv.engine.outputs import StreamEvent
from hybridkv.engine.params import SamplingParams
from hybridkv.engine.prompts import Prompt
from hybridkv.engine.request import Request
from hybridkv.errors import EngineClosed, HybridKVError, UsageError
from hybridkv.hashing import Salt

_T = TypeVar("_T")
_News = StreamEvent | BaseException


class AsyncEngine:
    """Serves streams to the tasks of one event loop. Takes the engine over: use it through this object only.

    Everything that touches the engine runs on a thread of its own, which sleeps while there is nothing to do. Nobody
    has to read: what a task does not read waits for it.

    Args:
        engine: from `wrap()`.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._wake = threading.Condition()
        self._calls: deque[Callable[[], None]] = deque()
        self._readers: dict[Request, asyncio.Queue[_News]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="hybridkv-engine", daemon=True)
        self._thread.start()
        # A thread that still computes while the interpreter goes away would crash it.
        atexit.register(self._stop)

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        breakpoints: Sequence[int] | None = None,
        salt: Salt | None = None,
        cache: bool = True,
        priority: int = 0,
        adapter: str | None = None,
    ) -> AsyncIterator[StreamEvent]:
        """Serve one prompt and yield each token as it comes; the last event carries the whole output.

        The prompt is checked and scheduled when the first event is asked for. Closing the generator early, cancelling
        the task that reads it, or a timeout around it gives the request's pages back at the end of the step under way.

        Args:
            prompt, params, breakpoints, salt, cache, priority, adapter: as for `Engine.stream`.

        Raises:
            RequestError: the prompt or params can never be served.
            HybridKVError: the logits of this request are not a number, or the forward pass failed, for everybody.
            EngineClosed: after `aclose()`, or when it comes while this request runs.
            UsageError: another event loop uses this engine.
        """
        self._join_loop()
        news: asyncio.Queue[_News] = asyncio.Queue()
        started: list[Request] = []

        def submit() -> None:
            try:
                request = self._engine.prepare(
                    prompt,
                    params,
                    breakpoints=breakpoints,
                    salt=salt,
                    cache=cache,
                    priority=priority,
                    adapter=adapter,
                )
            except Exception as error:
                self._tell([(news, error)])
                return
            started.append(request)
            self._readers[request] = news
            self._engine.submit(request)

        def forget() -> None:
            for request in started:
                if self._readers.pop(request, None) is not None:
                    self._engine.drop(request)

        self._call(submit)
        try:
            while True:
                event = await news.get()
                if isinstance(event, BaseException):
                    raise event
                yield event
                if event.output is not None:
                    return
        finally:
            self._call(forget, closed_too=True)

    async def usage(self) -> Usage:
        """Bytes of the pool by layer group, between two steps."""
        return await self._ask(self._engine.usage)

    async def clear_cache(self) -> int:
        """Drop every cached page no running request holds; returns the bytes that became free."""
        return await self._ask(self._engine.clear_cache)

    async def between_steps(self, function: Callable[[], _T]) -> _T:
        """Call a function while no step is under way, on the engine's thread: to load or delete adapters, say."""
        return await self._ask(function)

    async def aclose(self) -> None:
        """End every request with `EngineClosed` at the end of the step under way, and close the engine.

        Closing twice, or from another event loop, is allowed.
        """
        await asyncio.to_thread(self._stop)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def _join_loop(self) -> None:
        loop = asyncio.get_running_loop()
        if self._loop is None or self._loop.is_closed():
            self._loop = loop
        elif self._loop is not loop:
            raise UsageError("this AsyncEngine serves another event loop; make one AsyncEngine per loop")

    async def _ask(self, question: Callable[[], _T]) -> _T:
        self._join_loop()
        answer: asyncio.Queue[Any] = asyncio.Queue()

        def ask() -> None:
            try:
                found: Any = question()
            except BaseException as error:
                found = error
            self._tell([(answer, found)])

        self._call(ask)
        found = await answer.get()
        if isinstance(found, BaseException):
            raise found
        return found  # type: ignore[no-any-return]

    def _call(self, call: Callable[[], None], *, closed_too: bool = False) -> None:
        """Have the engine's thread do this before its next step."""
        with self._wake:
            if self._closing and not closed_too:
                raise EngineClosed("the engine is closed; wrap the model again")
            self._calls.append(call)
            self._wake.notify()

    def _stop(self) -> None:
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join()
        atexit.unregister(self._stop)

    def _run(self) -> None:
        try:
            while self._wait_for_work():
                while self._calls:
                    self._calls.popleft()()
                if self._readers:
                    self._step()
        finally:
            with self._wake:
                self._closing = True
            # Calls that came before the end are answered like those that come after it.
            while self._calls:
                self._calls.popleft()()
            self._engine.close()
            self._fail_all(lambda: EngineClosed("the engine was closed while this request was running"))

    def _wait_for_work(self) -> bool:
        """Whether to go on."""
        with self._wake:
            self._wake.wait_for(lambda: self._calls or self._readers or self._closing)
            return not self._closing

    def _step(self) -> None:
        try:
            self._engine.step()
        except Exception as error:
            self._deliver(error)
        else:
            self._deliver()

    def _deliver(self, failure: Exception | None = None) -> None:
        """Hand out what the step brought; a failure goes to everybody who has no output yet."""
        news: list[tuple[asyncio.Queue[_News], _News]] = []
        for request, reader in tuple(self._readers.items()):
            while request.events:
                news.append((reader, request.events.popleft()))
            if request.error is not None:
                news.append((reader, request.error))
            if request.done or failure is not None:
                del self._readers[request]
                if request.output is None and request.error is None:
                    news.append((reader, _dropped(failure)))
        self._tell(news)

    def _fail_all(self, error: Callable[[], BaseException]) -> None:
        news = [(reader, error()) for reader in self._readers.values()]
        self._readers.clear()
        self._tell(news)

    def _tell(self, news: list[tuple[asyncio.Queue[Any], Any]]) -> None:
        """Put news into queues, on the thread of the loop that reads them."""
        if not news or self._loop is None:
            return

        def put() -> None:
            for reader, one in news:
                reader.put_nowait(one)

        try:
            self._loop.call_soon_threadsafe(put)
        except RuntimeError:
            # The loop is closed: nobody reads any more.
            for request in tuple(self._readers):
                self._engine.drop(request)
            self._readers.clear()


def _dropped(failure: Exception | None) -> HybridKVError:
    """An error of its own for every reader: each adds its traceback."""
    if failure is None:
        return HybridKVError("the request was dropped, because the pool lost what it had computed; submit it again")
    error = HybridKVError(
        f"the forward pass failed, and with it every request of that moment; submit this one again: {failure}"
    )
    error.__cause__ = failure
    return error
