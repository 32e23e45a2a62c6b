"""The engine on real models: greedy output equals the model's own generate, whatever the pool does meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from hybridkv import errors
from hybridkv.engine.engine import Engine
from hybridkv.engine.params import SamplingParams
from hybridkv.engine.wrap import eos_token_ids, wrap
from tests.engine_fakes import byte_level_tokenizer
from tests.model_cases import VOCAB, memory_for_two, prompt_of, stock, tiny_model

FAMILIES = ("jamba", "gemma3", "llama")


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest) -> Any:
    return tiny_model(request.param)


@pytest.fixture
def engine(model: Any) -> Iterator[Engine]:
    with wrap(model, memory="4MiB", max_batch_tokens=64, poison=True) as engine:
        yield engine
        engine.manager.check()
        assert engine.usage().live_bytes == 0


def test_ragged_prompts_together_equal_generate_one_by_one(model: Any, engine: Engine) -> None:
    prompts = [prompt_of(length, length) for length in (1, 5, 16, 37, 90)]
    expected = [stock(model, prompt, 12) for prompt in prompts]
    outs = engine.generate(prompts, SamplingParams(max_tokens=12))
    assert [out.token_ids for out in outs] == expected


@pytest.mark.parametrize("budget", [3, 17])
def test_chunked_prefill_with_a_tiny_budget(model: Any, budget: int) -> None:
    prompts = [prompt_of(70, 1), prompt_of(33, 2)]
    with wrap(model, memory="4MiB", max_batch_tokens=budget, poison=True) as engine:
        outs = engine.generate(prompts, SamplingParams(max_tokens=8))
    assert [out.token_ids for out in outs] == [stock(model, prompt, 8) for prompt in prompts]


def test_prefix_hits_and_turns(model: Any, engine: Engine) -> None:
    shared = prompt_of(96, 3)
    first = engine.generate([*shared, 5, 6], SamplingParams(max_tokens=4), breakpoints=[96])[0]
    assert first.cached_tokens == 0
    prompts = [[*shared, *prompt_of(9, i)] for i in range(3)]
    outs = engine.generate(prompts, SamplingParams(max_tokens=10))
    assert [out.cached_tokens for out in outs] == [96, 96, 96]
    assert [out.token_ids for out in outs] == [stock(model, prompt, 10) for prompt in prompts]
    turn = [*prompts[0], *outs[0].token_ids, 9, 9, 9]
    again = engine.generate(turn, SamplingParams(max_tokens=6))[0]
    assert again.cached_tokens >= 96
    assert again.token_ids == stock(model, turn, 6)


def test_a_tiny_pool_preempts_and_evicts_without_changing_a_token(model: Any) -> None:
    prompts = [prompt_of(36 + 3 * i, i) for i in range(3)]
    expected = [stock(model, prompt, 50) for prompt in prompts]
    memory = memory_for_two(model, 80)  # what they are expected to need, and less than they will
    with wrap(model, memory=memory, max_batch_tokens=32, poison=True, decode_checkpoint_interval=16) as engine:
        preemptions = 0
        for _ in range(2):
            outs = engine.generate(prompts, SamplingParams(max_tokens=50))
            assert [out.token_ids for out in outs] == expected
            preemptions += sum(out.preemptions for out in outs)
        assert preemptions > 0
        engine.manager.check()
        assert engine.usage().live_bytes == 0


def test_end_of_sequence_and_stop_tokens_end_as_generate_does(model: Any, engine: Engine) -> None:
    prompt = prompt_of(20, 4)
    tokens = stock(model, prompt, 20)
    stop = tokens[6]
    expected = stock(model, prompt, 20, eos_token_id=stop)
    out = engine.generate(prompt, SamplingParams(max_tokens=20, stop_token_ids=(stop,)))[0]
    assert (out.token_ids, out.finish_reason) == (expected, "stop")


def test_sampled_output_is_the_same_alone_and_in_a_crowd(engine: Engine) -> None:
    params = SamplingParams(max_tokens=15, temperature=0.8, top_k=40, top_p=0.95, min_p=0.01, seed=99)
    prompt = prompt_of(25, 5)
    alone = engine.generate(prompt, params)[0].token_ids
    crowd = [prompt_of(10 + i, 50 + i) for i in range(3)]
    others = [SamplingParams(max_tokens=20, temperature=1.0, seed=i) for i in range(3)]
    assert engine.generate([*crowd, prompt], [*others, params])[3].token_ids == alone
    assert engine.generate(prompt, SamplingParams(max_tokens=15, temperature=0.8, seed=100))[0].token_ids != alone


def test_repetition_penalty_equals_generate(model: Any, engine: Engine) -> None:
    prompt = prompt_of(30, 6)
    expected = stock(model, prompt, 15, repetition_penalty=1.8)
    out = engine.generate([prompt], SamplingParams(max_tokens=15, repetition_penalty=1.8))[0]
    assert out.token_ids == expected


def test_a_loop_of_ones_own_runs_over_the_engines_pool(model: Any, engine: Engine) -> None:
    prompt = prompt_of(40, 3)
    expected = stock(model, prompt, 6)
    (before,) = engine.generate([prompt], SamplingParams(max_tokens=6))
    with engine.paged_cache() as cache:
        own = model.generate(torch.tensor([prompt]), max_new_tokens=6, do_sample=False, cache=cache)
        assert engine.usage().live_bytes > 0
    (after,) = engine.generate([prompt], SamplingParams(max_tokens=6))
    assert before.token_ids == after.token_ids == own[0, 40:].tolist() == expected
    assert after.cached_tokens == 32


def test_a_loop_of_ones_own_ends_with_its_engine() -> None:
    model = tiny_model("jamba")
    with wrap(model, memory="4MiB") as engine:
        cache = engine.paged_cache()
        model(torch.tensor([[1, 2, 3]]), cache=cache)
    with pytest.raises(errors.UsageError, match="open engine"):
        model(torch.tensor([[4, 5]]), cache=cache)
    cache.close()


def test_the_model_is_its_own_again_after_close(model: Any) -> None:
    prompt = prompt_of(20, 8)
    before = stock(model, prompt, 5)
    engine = wrap(model, memory="2MiB")
    during = stock(model, prompt, 5)
    engine.close()
    assert before == during == stock(model, prompt, 5)


def bad_requests(limit: int) -> list[tuple[type[errors.HybridKVError], Any, Any]]:
    one = SamplingParams(max_tokens=1)
    good = [1, 2, 3]
    return [
        (errors.EmptyPrompt, [[]], one),
        (errors.EmptyPrompt, [], one),
        (errors.EmptyPrompt, [good, []], one),
        (errors.TokenOutOfRange, [1, VOCAB], one),
        (errors.TokenOutOfRange, [-1], one),
        (errors.TokenOutOfRange, [good, [2**40]], one),
        (errors.TokenOutOfRange, good, SamplingParams(stop_token_ids=(VOCAB,))),
        (errors.TokenOutOfRange, good, SamplingParams(logit_bias={3: 1.0, VOCAB: -5.0})),
        (errors.InvalidSampling, good, SamplingParams(min_tokens=1, stop_token_ids=tuple(range(VOCAB)))),
        (errors.PromptTooLong, [1] * (limit + 1), one),
        (errors.PromptTooLong, good, SamplingParams(max_tokens=2**31 - 1)),
        (errors.PromptTooLong, [good, good], [one, SamplingParams(max_tokens=limit)]),
        (errors.RequestError, "a string", one),
        (errors.RequestError, [1.5, 2], one),
        (errors.RequestError, [[True]], one),
        (errors.RequestError, 5, one),
        (errors.RequestError, [None], one),
        (errors.InvalidSampling, good, "greedy"),
        (errors.InvalidSampling, good, [one, one]),
        (errors.InvalidSampling, good, SamplingParams(stop=("x",))),
    ]


def test_bad_requests_schedule_nothing_and_the_engine_goes_on(model: Any, engine: Engine) -> None:
    limit = min(engine.manager.tokens_that_fit() + 1, model.config.max_position_embeddings)
    expected = stock(model, [1, 2, 3], 4)
    for kind, prompts, params in bad_requests(limit):
        for call in (engine.generate, engine.stream):
            with pytest.raises(kind) as caught:
                call(prompts, params)
            assert "\n" not in str(caught.value)
            assert engine.usage().live_bytes == 0
    for breakpoints in ([-1], [1.5], [[1], [2]], ["x"], 7):
        with pytest.raises(errors.RequestError):
            engine.generate([1, 2, 3], breakpoints=breakpoints)
    with pytest.raises(errors.RequestError, match="salt"):
        engine.generate([1, 2, 3], salt=5)  # type: ignore[arg-type]
    with pytest.raises(errors.RequestError, match="one prompt"):
        engine.stream([[1], [2]], SamplingParams(max_tokens=1))  # type: ignore[list-item,arg-type]
    assert engine.generate([1, 2, 3], SamplingParams(max_tokens=4))[0].token_ids == expected


def test_too_long_names_both_numbers() -> None:
    model = tiny_model("llama")
    context = model.config.max_position_embeddings
    with (
        wrap(model, memory="64MiB") as engine,
        pytest.raises(errors.PromptTooLong, match=rf"has {context} tokens.*{context + 5} in all.*holds {context}"),
    ):
        engine.generate([1] * context, SamplingParams(max_tokens=5))
    with wrap(model, memory="64KiB") as engine:
        fit = engine.manager.tokens_that_fit()
        with pytest.raises(errors.PromptTooLong, match=rf"has {fit} tokens.*{fit + 9} in all.*at most {fit + 1}"):
            engine.generate([1] * fit, SamplingParams(max_tokens=9))


def test_what_cannot_be_wrapped() -> None:
    model = tiny_model("llama")
    for options in ({"memory": "1 parsec"}, {"memory": -5}, {"max_running": 0}, {"max_batch_tokens": "many"}):
        with pytest.raises(errors.ConfigError):
            wrap(model, **options)  # type: ignore[arg-type]
    with pytest.raises(errors.PoolTooSmall):
        wrap(model, memory=64)
    with pytest.raises(errors.HybridKVError, match="from_pretrained"):
        wrap("jamba")
    with pytest.raises(errors.ConfigError, match="loaded tokenizer"):
        wrap(model, "gpt2")  # type: ignore[arg-type]
    assert stock(model, [1, 2], 3)


def test_text_in_text_out() -> None:
    tokenizer = byte_level_tokenizer(VOCAB)
    model = tiny_model("jamba")
    prompt = "the quick brown fox"
    ids = tokenizer.encode(prompt)
    expected = stock(model, ids, 24)
    text = tokenizer.decode(expected, skip_special_tokens=True)
    with wrap(model, tokenizer, memory="4MiB") as engine:
        outs = engine.generate([prompt, ids], SamplingParams(max_tokens=24))
        assert [out.text for out in outs] == [text, text]
        events = list(engine.stream(prompt, SamplingParams(max_tokens=24)))
        assert "".join(event.text for event in events) == text
        stop = text[9:12]
        out = engine.generate(prompt, SamplingParams(max_tokens=24, stop=("never there", stop)))[0]
        assert out.finish_reason == "stop"
        assert out.text == text[: text.index(stop)]
        events = list(engine.stream(prompt, SamplingParams(max_tokens=24, stop=(stop,))))
        assert "".join(event.text for event in events) == out.text
        with pytest.raises(errors.EmptyPrompt):
            engine.generate("")
        with pytest.raises(errors.EmptyPrompt):
            engine.generate(["fine", ""])
        with pytest.raises(errors.RequestError):
            engine.generate(["fine", b"bytes"])  # type: ignore[list-item]
        assert engine.usage().live_bytes == 0


def test_what_a_tokenizer_returns_is_not_taken_for_prompts(engine: Engine) -> None:
    encoding = byte_level_tokenizer(VOCAB)("two words")
    for prompts in (encoding, dict(encoding)):
        for call in (engine.generate, engine.stream):
            with pytest.raises(errors.RequestError, match=r"pass encoding\['input_ids'\]"):
                call(prompts)
    assert len(engine.generate(encoding["input_ids"], SamplingParams(max_tokens=2))) == 1


def test_arrays_and_tensors_are_prompts_too(model: Any, engine: Engine) -> None:
    prompt = prompt_of(10, 9)
    expected = stock(model, prompt, 3)
    params = SamplingParams(max_tokens=3)
    tensor = torch.tensor(prompt)
    for prompts in (tensor, tensor[None], tensor.numpy(), tuple(prompt), [tuple(prompt)]):
        assert engine.generate(prompts, params)[0].token_ids == expected  # type: ignore[arg-type]


def test_a_failing_model_leaks_nothing() -> None:
    model = tiny_model("jamba")
    prompt = prompt_of(60, 10)
    expected = stock(model, prompt, 10)
    with wrap(model, memory="4MiB", max_batch_tokens=16, poison=True) as engine:
        calls = []

        def fail(*_: Any) -> None:
            calls.append(1)
            if len(calls) == 3:
                raise RuntimeError("broken layer")

        handle = model.model.layers[2].register_forward_pre_hook(fail)
        with pytest.raises(RuntimeError, match="broken layer"):
            engine.generate([prompt, prompt_of(20, 11)], SamplingParams(max_tokens=10))
        handle.remove()
        assert engine.usage().live_bytes == 0
        engine.manager.check()
        assert engine.generate(prompt, SamplingParams(max_tokens=10))[0].token_ids == expected


def test_end_of_sequence_ids_come_from_the_generation_config() -> None:
    model = tiny_model("llama")
    assert eos_token_ids(model) == frozenset() or model.config.eos_token_id is not None
    model.generation_config.eos_token_id = [3, 4]
    assert eos_token_ids(model) == {3, 4}
    model.generation_config.eos_token_id = 5
    assert eos_token_ids(model) == {5}
