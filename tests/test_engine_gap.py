"""A long prompt of a real model beside running requests: one bounded forward pass between two of their tokens."""

from __future__ import annotations

from typing import Any

import pytest

from hybridkv.engine.wrap import wrap
from tests.engine_cases import submit
from tests.model_cases import prompt_of, stock, tiny_model

LONG = 4000
BUDGET = 128
RUNNING = 4


@pytest.mark.parametrize("family", ["jamba", "llama"])
def test_a_prompt_of_4000_tokens_puts_one_pass_between_two_tokens_of_those_who_run(family: str) -> None:
    model = tiny_model(family)
    model.config.max_position_embeddings = 2 * LONG
    passes: list[int] = []

    def count(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        ids = kwargs["input_ids"] if "input_ids" in kwargs else args[0]
        passes.append(ids.numel())

    with wrap(model, memory="32MiB", max_batch_tokens=BUDGET) as engine:
        short = [prompt_of(20 + i, i) for i in range(RUNNING)]
        requests = [submit(engine, prompt, 2 * LONG // BUDGET) for prompt in short]
        while not all(request.generated for request in requests):
            engine.step()
        long = submit(engine, prompt_of(LONG, 9), 1)
        hook = model.register_forward_pre_hook(count, with_kwargs=True)
        steps = 0
        while not long.generated and steps < LONG:
            before = [len(request.generated) for request in requests]
            engine.step()
            steps += 1
            assert len(passes) == steps
            assert [len(request.generated) for request in requests] == [n + 1 for n in before]
        hook.remove()
        assert max(passes) <= BUDGET
        assert sum(passes) == LONG + RUNNING * steps
        # A chunk may end at a boundary at the cost of an eighth of it.
        assert steps <= -(-LONG // ((BUDGET - RUNNING) * 7 // 8)), "what the others leave is the prompt's"
        while not all(request.done for request in requests):
            engine.step()
    for prompt, request in zip(short, requests, strict=True):
        assert request.generated == stock(model, prompt, 2 * LONG // BUDGET)
