"""Engines over the fake model, prompts, and what every output has to be."""

from __future__ import annotations

import random
from typing import Any

from hybridkv.engine.engine import Engine
from hybridkv.engine.outputs import RequestOutput
from hybridkv.engine.params import SamplingParams
from hybridkv.engine.request import Request
from hybridkv.manager import GroupManager
from tests.engine_fakes import VOCAB, FakeRunner, expected_tokens, hybrid_groups


def make(groups: Any = None, pool_bytes: int = 1 << 20, **options: Any) -> tuple[Engine, FakeRunner]:
    manager = GroupManager(groups or hybrid_groups(), pool_bytes, decode_checkpoint_interval=16)
    runner = FakeRunner(manager)
    return Engine(runner, manager, **options), runner  # type: ignore[arg-type]


def prompt_of(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(length)]


def submit(engine: Engine, prompt: list[int], max_tokens: int, *, priority: int = 0, **params: Any) -> Request:
    """A request in the queue of an engine whose steps the test runs."""
    (request,) = engine._intake.requests(prompt, SamplingParams(max_tokens, **params), None, None, True, priority)
    engine._core.submit(request)
    return request


def check(engine: Engine, prompts: list[list[int]], outs: list[RequestOutput], count: int) -> None:
    for prompt, out in zip(prompts, outs, strict=True):
        assert out.token_ids == expected_tokens(engine.manager.groups, prompt, count)
        assert out.finish_reason == "length"
        assert out.prompt_tokens == len(prompt)
    engine.manager.check()
    assert engine.usage().live_bytes == 0
    assert engine.manager.running == ()
