"""The engine for asyncio: many readers, cancellation, failures, closing."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any

import pytest

from hybridkv.engine.async_engine import AsyncEngine
from hybridkv.engine.params import SamplingParams
from hybridkv.errors import EngineClosed, HybridKVError, PromptTooLong, RequestError, UsageError
from tests.engine_cases import make, prompt_of
from tests.engine_fakes import FakeRunner, expected_tokens, hybrid_groups

TIMEOUT = 60.0


def run(main: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(main, TIMEOUT))


def engine_of(**options: Any) -> tuple[AsyncEngine, FakeRunner]:
    engine, runner = make(pool_bytes=4 << 20, **options)
    return AsyncEngine(engine), runner


async def tokens_of(engine: AsyncEngine, prompt: list[int], count: int, **options: Any) -> list[int]:
    return [
        token
        async for event in engine.generate(prompt, SamplingParams(max_tokens=count), **options)
        for token in event.token_ids
    ]


async def nothing_live(engine: AsyncEngine) -> None:
    """Wait for the step under way to end, not longer."""
    assert (await engine.usage()).live_bytes == 0


def test_many_readers_share_the_steps() -> None:
    async def main() -> None:
        engine, runner = engine_of(max_batch_tokens=64)
        async with engine:
            prompts = [prompt_of(10 + 7 * i, i) for i in range(12)]
            outputs = await asyncio.gather(*(tokens_of(engine, prompt, 15) for prompt in prompts))
            assert outputs == [expected_tokens(hybrid_groups(), prompt, 15) for prompt in prompts]
            assert max(len(sizes) for sizes in runner.passes) > 5
            await nothing_live(engine)
        assert runner.closed

    run(main())


def test_the_last_event_carries_the_output_and_options_reach_the_request() -> None:
    async def main() -> None:
        async with engine_of()[0] as engine:
            prompt = prompt_of(64)
            await tokens_of(engine, prompt, 2)
            events = [event async for event in engine.generate(prompt, SamplingParams(max_tokens=3), salt="other")]
            assert [event.finish_reason for event in events] == [None, None, "length"]
            assert events[-1].output is not None
            assert events[-1].output.cached_tokens == 0
            await engine.clear_cache()
            await tokens_of(engine, prompt, 2, cache=False, priority=-1)
            usage = await engine.usage()
            assert (usage.live_bytes, usage.cached_bytes) == (0, 0)

    run(main())


@pytest.mark.parametrize("how", ["cancel", "close", "timeout"])
def test_a_reader_that_goes_away_gives_its_pages_back(how: str) -> None:
    async def main() -> None:
        engine, runner = engine_of()
        async with engine:
            before = await engine.usage()
            begun = asyncio.Event()

            async def read() -> None:
                async for _ in engine.generate(prompt_of(50), SamplingParams(max_tokens=10_000), cache=False):
                    begun.set()

            if how == "close":
                stream = engine.generate(prompt_of(50), SamplingParams(max_tokens=10_000), cache=False)
                await anext(stream)
                await stream.aclose()  # type: ignore[attr-defined]
            elif how == "cancel":
                task = asyncio.create_task(read())
                await begun.wait()
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            else:
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(read(), 0.2)
            assert await engine.usage() == before
            passes = len(runner.passes)
            for _ in range(3):
                await engine.usage()
            assert len(runner.passes) == passes, "between two questions there was no step, for nobody waits"

    run(main())


def test_a_reader_that_never_reads_holds_nobody_up() -> None:
    async def main() -> None:
        async with engine_of()[0] as engine:
            lazy = engine.generate(prompt_of(20, 1), SamplingParams(max_tokens=30))
            first = await anext(lazy)
            prompt = prompt_of(30, 2)
            assert await tokens_of(engine, prompt, 60) == expected_tokens(hybrid_groups(), prompt, 60)
            rest = [token async for event in lazy for token in event.token_ids]
            assert [*first.token_ids, *rest] == expected_tokens(hybrid_groups(), prompt_of(20, 1), 30)
            never_started = engine.generate(prompt_of(20, 3))
            await nothing_live(engine)
            await never_started.aclose()  # type: ignore[attr-defined]

    run(main())


def test_what_is_wrong_with_one_request_reaches_its_reader_alone() -> None:
    async def main() -> None:
        engine, runner = engine_of(max_batch_tokens=64)
        async with engine:
            good = [token for token in prompt_of(40, 1) if token != 7]
            runner.nan_at = 7
            task = asyncio.create_task(tokens_of(engine, good, 6))
            with pytest.raises(HybridKVError, match="not a number"):
                await tokens_of(engine, [*prompt_of(30, 2), 7], 2)
            for bad, kind in (([], RequestError), ([1] * 10**6, PromptTooLong), ("text", RequestError)):
                with pytest.raises(kind):
                    await tokens_of(engine, bad, 2)  # type: ignore[arg-type]
            with pytest.raises(RequestError, match="priority"):
                await tokens_of(engine, [1], 2, priority="high")
            assert await task == expected_tokens(hybrid_groups(), good, 6)
            await nothing_live(engine)

    run(main())


def test_a_failed_pass_reaches_everybody_and_the_engine_goes_on() -> None:
    async def main() -> None:
        engine, runner = engine_of()
        async with engine:
            runner.fail_at = 5
            reads = [tokens_of(engine, prompt_of(20, i), 50) for i in range(3)]
            for error in await asyncio.gather(*reads, return_exceptions=True):
                assert isinstance(error, HybridKVError)
                assert "the device fell off" in str(error)
                assert isinstance(error.__cause__, RuntimeError)
            runner.fail_at = None
            await nothing_live(engine)
            assert await tokens_of(engine, [1, 2], 4) == expected_tokens(hybrid_groups(), [1, 2], 4)

    run(main())


def test_closing_ends_what_runs_and_refuses_what_comes() -> None:
    async def main() -> None:
        engine, runner = engine_of()
        stream = engine.generate(prompt_of(20), SamplingParams(max_tokens=10_000))
        await anext(stream)
        await engine.aclose()
        with pytest.raises(EngineClosed):
            async for _ in stream:
                pass
        assert runner.closed
        for late in (tokens_of(engine, [1], 1), engine.usage()):
            with pytest.raises(EngineClosed):
                await late
        await engine.aclose()

    run(main())
    assert not [thread for thread in threading.enumerate() if thread.name == "hybridkv-engine"]


def test_one_event_loop_at_a_time() -> None:
    engine, _ = engine_of()

    async def elsewhere() -> None:
        await engine.usage()

    async def main() -> None:
        await engine.usage()
        with pytest.raises(UsageError, match="event loop"):
            await asyncio.to_thread(asyncio.run, elsewhere())

    run(main())
    run(elsewhere())
    run(engine.aclose())


def test_a_loop_that_ended_leaves_nothing_running() -> None:
    engine, _ = engine_of()

    async def abandon() -> None:
        stream = engine.generate(prompt_of(20), SamplingParams(max_tokens=10_000))
        await anext(stream)

    run(abandon())
    run(nothing_live(engine))
    run(engine.aclose())
