"""Requests with LoRA adapters: each equals what PEFT generates with that adapter, and none sees another's pages."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from peft import get_peft_model

from hybridkv.engine.async_engine import AsyncEngine
from hybridkv.engine.engine import Engine
from hybridkv.engine.params import SamplingParams
from hybridkv.engine.request import Request
from hybridkv.engine.wrap import wrap
from hybridkv.errors import RequestError, UnknownAdapter, UsageError
from tests.adapter_cases import ATTENTION, MAMBA, lora, own, peft_model
from tests.model_cases import memory_for_two, prompt_of, tiny_model

EIGHT = SamplingParams(max_tokens=8)


@pytest.fixture(scope="module", params=["gemma3", "jamba"])
def model(request: pytest.FixtureRequest) -> Any:
    """Two adapters; on jamba one changes attention and Mamba layers, the other Mamba layers alone."""
    states = MAMBA if request.param == "jamba" else []
    return peft_model(request.param, sql=lora([*ATTENTION, *states]), law=lora(states or ["down_proj", "q_proj"]))


@pytest.fixture
def engine(model: Any) -> Iterator[Engine]:
    with wrap(model, memory="4MiB", max_batch_tokens=64, poison=True) as engine:
        yield engine
        engine.manager.check()
        assert engine.usage().live_bytes == 0


def test_a_step_of_several_adapters_equals_each_alone(model: Any, engine: Engine) -> None:
    prompts = [prompt_of(length, length) for length in (1, 16, 37, 90, 21, 40)]
    adapters = ["sql", None, "law", "sql", None, "law"]
    expected = [own(model, adapter, prompt, 8) for adapter, prompt in zip(adapters, prompts, strict=True)]
    assert [out.token_ids for out in engine.generate(prompts, EIGHT, adapter=adapters)] == expected
    assert len({tuple(own(model, adapter, prompts[3], 8)) for adapter in ("sql", "law", None)}) == 3


def test_one_adapter_for_all_prompts_and_for_a_stream(model: Any, engine: Engine) -> None:
    prompts = [prompt_of(20, 1), prompt_of(30, 2)]
    expected = [own(model, "law", prompt, 8) for prompt in prompts]
    assert [out.token_ids for out in engine.generate(prompts, EIGHT, adapter="law")] == expected
    tokens = [token for event in engine.stream(prompts[1], EIGHT, adapter="law") for token in event.token_ids]
    assert tokens == expected[1]


def test_prefixes_are_resumed_within_an_adapter_and_never_across(model: Any, engine: Engine) -> None:
    shared = prompt_of(96, 3)
    for adapter in ("sql", "law", None):
        first = engine.generate([*shared, 5, 6], SamplingParams(max_tokens=1), breakpoints=[96], adapter=adapter)[0]
        assert first.cached_tokens == 0
    prompts = [[*shared, *prompt_of(9, i)] for i in range(6)]
    adapters = ["sql", "law", None] * 2
    outs = engine.generate(prompts, EIGHT, adapter=adapters)
    assert [out.cached_tokens for out in outs] == [96] * 6
    expected = [own(model, adapter, prompt, 8) for adapter, prompt in zip(adapters, prompts, strict=True)]
    assert [out.token_ids for out in outs] == expected


def test_a_prefix_under_way_is_waited_for_within_an_adapter_only(model: Any) -> None:
    shared = prompt_of(96, 4)
    prompts = [[*shared, *prompt_of(9, i)] for i in range(4)]
    adapters = ["sql", "law", "sql", None]
    with wrap(model, memory="4MiB", max_batch_tokens=32, poison=True) as engine:
        outs = engine.generate(prompts, EIGHT, adapter=adapters)
    assert [out.cached_tokens for out in outs] == [0, 0, 96, 0]
    expected = [own(model, adapter, prompt, 8) for adapter, prompt in zip(adapters, prompts, strict=True)]
    assert [out.token_ids for out in outs] == expected


def test_forks_of_one_prompt_keep_its_adapter(model: Any, engine: Engine) -> None:
    prompts = [prompt_of(20, 7), prompt_of(33, 8)]
    params = SamplingParams(max_tokens=8, n=3, temperature=1.0, top_k=1)
    outs = engine.generate(prompts, params, adapter=["sql", "law"])
    for prompt, adapter, out in zip(prompts, ("sql", "law"), outs, strict=True):
        assert [one.token_ids for one in out.completions] == [own(model, adapter, prompt, 8)] * 3


def test_requests_of_different_adapters_have_no_prefix_in_common() -> None:
    keys = [("sql", "1"), ("sql", "1"), ("sql", "2"), ("law", "1"), None]
    first, *others = (Request(i, [7] * 40, EIGHT, frozenset(), adapter=key) for i, key in enumerate(keys))
    assert [other.shared_tokens(first, 16) for other in others] == [32, 0, 0, 0]


def test_small_chunks_in_a_pool_that_preempts_and_evicts(model: Any) -> None:
    prompts = [prompt_of(8 + 2 * i, i) for i in range(3)]
    adapters = ["sql", "law", None]
    expected = [own(model, adapter, prompt, 44) for adapter, prompt in zip(adapters, prompts, strict=True)]
    memory = memory_for_two(model, 32)
    preemptions = 0
    with wrap(model, memory=memory, max_batch_tokens=17, poison=True, decode_checkpoint_interval=16) as engine:
        for _ in range(2):
            outs = engine.generate(prompts, SamplingParams(max_tokens=44), adapter=adapters)
            assert [out.token_ids for out in outs] == expected
            preemptions += sum(out.preemptions for out in outs)
        engine.manager.check()
    assert preemptions > 0


def test_the_model_keeps_its_own_state(model: Any, engine: Engine) -> None:
    model.set_adapter("law")
    before = [(name, p.requires_grad) for name, p in model.named_parameters()]
    prompt = prompt_of(20, 5)
    expected = own(model, "law", prompt, 5)
    engine.generate([prompt] * 2, EIGHT, adapter=["sql", None])
    ids = torch.tensor([prompt])
    plain = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=5, do_sample=False)
    assert plain[0, 20:].tolist() == expected
    assert model.active_adapters == ["law"]
    assert [(name, p.requires_grad) for name, p in model.named_parameters()] == before
    assert any(wanted for _, wanted in before)


def test_a_loop_of_ones_own_over_the_pool_uses_the_adapter_that_is_set(model: Any, engine: Engine) -> None:
    prompt = prompt_of(40, 6)
    expected = own(model, "sql", prompt, 6)
    ids = torch.tensor([prompt])
    with engine.paged_cache() as cache:
        out = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False, cache=cache
        )
    assert out[0, 40:].tolist() == expected
    assert engine.generate(prompt, EIGHT)[0].cached_tokens == 0


# Coming, going, and what is refused. One model, llama, is enough.


def test_an_adapter_loaded_later_can_be_used_at_once() -> None:
    model = peft_model("llama", sql=lora(ATTENTION))
    prompt = prompt_of(40, 1)
    with wrap(model, memory="4MiB") as engine:
        engine.generate(prompt, EIGHT, adapter="sql")
        model.add_adapter("late", lora(["down_proj"]))
        out = engine.generate(prompt, EIGHT, adapter="late")[0]
        assert (out.cached_tokens, out.token_ids) == (0, own(model, "late", prompt, 8))


def test_the_first_adapter_of_a_model_that_was_wrapped_without_any() -> None:
    model = tiny_model("llama")
    prompt = prompt_of(40, 2)
    with wrap(model, memory="4MiB", poison=True) as engine:
        base = engine.generate(prompt, EIGHT)[0]
        with pytest.raises(UnknownAdapter, match=r"'x' is not loaded; the model has none. Load it with .*load_adapter"):
            engine.generate(prompt, EIGHT, adapter="x")
        later = get_peft_model(model, lora(ATTENTION), adapter_name="x").eval()
        expected = own(later, "x", prompt, 8)
        outs = engine.generate([prompt, prompt], EIGHT, adapter=["x", None])
        assert [out.token_ids for out in outs] == [expected, base.token_ids]
        assert expected != base.token_ids
        assert [out.cached_tokens for out in outs] == [0, 32]
        later.unload()
        with pytest.raises(UnknownAdapter, match="the model has none"):
            engine.generate(prompt, EIGHT, adapter="x")
        assert engine.generate(prompt, EIGHT)[0].token_ids == base.token_ids


def test_adapters_that_had_one_name_after_each_other_share_nothing() -> None:
    model = peft_model("llama", keep=lora(ATTENTION), sql=lora(ATTENTION))
    prompt = prompt_of(40, 3)
    with wrap(model, memory="4MiB") as engine:
        first = engine.generate(prompt, EIGHT, adapter="sql")[0]
        weights = {name: p.clone() for name, p in model.named_parameters() if ".sql." in name}
        model.delete_adapter("sql")
        model.add_adapter("sql", lora(ATTENTION))
        second = engine.generate(prompt, EIGHT, adapter="sql")[0]
        assert (second.cached_tokens, second.token_ids) == (0, own(model, "sql", prompt, 8))
        assert second.token_ids != first.token_ids
        with torch.no_grad():
            for name, p in model.named_parameters():
                if name in weights:
                    p.copy_(weights[name])
        again = engine.generate(prompt, EIGHT, adapter="sql")[0]
        assert (again.cached_tokens, again.token_ids) == (32, first.token_ids)


def test_an_adapter_that_is_not_loaded_is_refused_before_anything_runs() -> None:
    model = peft_model("llama", first=lora(ATTENTION), second=lora(ATTENTION))
    with wrap(model, memory="4MiB") as engine:
        with pytest.raises(UnknownAdapter, match="'third' is not loaded; the model has 'first', 'second'"):
            engine.generate([[1, 2], [3, 4]], adapter=["first", "third"])
        with pytest.raises(UnknownAdapter, match="third"):
            engine.stream([1, 2], adapter="third")
        for adapter in (3, b"first", ["first", 3]):
            with pytest.raises(RequestError, match="name of one that is loaded"):
                engine.generate([[1, 2], [3, 4]], adapter=adapter)
        with pytest.raises(RequestError, match="2 prompts but 1 values of adapter"):
            engine.generate([[1, 2], [3, 4]], adapter=["first"])
        assert engine.manager.running == ()


@pytest.mark.parametrize("after", ["nothing", "another of that name"])
def test_a_deleted_adapter_ends_its_requests_and_no_others(after: str) -> None:
    model = peft_model("llama", keep=lora(ATTENTION), gone=lora(ATTENTION))
    prompts = [prompt_of(20 + i, i) for i in range(4)]
    expected = own(model, "keep", prompts[0], 8), own(model, None, prompts[1], 8)
    with wrap(model, memory="4MiB", max_running=3) as engine:
        adapters = ["keep", None, "gone", "gone"]
        streams = [engine.stream(p, EIGHT, adapter=a) for p, a in zip(prompts, adapters, strict=True)]
        got = [next(streams[i]).token_ids for i in range(3)]
        waiting = engine.prepare(prompts[3], EIGHT, adapter="gone")
        engine.submit(waiting)
        model.delete_adapter("gone")
        if after != "nothing":
            model.add_adapter("gone", lora(ATTENTION))
        said = "'gone' is not loaded" if after == "nothing" else "'gone' has other weights now"
        for i in (0, 1):
            got[i] += [token for event in streams[i] for token in event.token_ids]
        assert tuple(got[:2]) == expected
        with pytest.raises(UnknownAdapter, match=said):
            list(streams[2])
        assert isinstance(waiting.error, UnknownAdapter)
        assert engine.usage().live_bytes == 0
        engine.manager.check()


def test_generate_says_which_prompt_lost_its_adapter(monkeypatch: pytest.MonkeyPatch) -> None:
    model = peft_model("llama", keep=lora(ATTENTION), gone=lora(ATTENTION))
    with wrap(model, memory="4MiB") as engine:
        steps = iter(range(100))
        step = engine._core.step

        def meanwhile() -> Any:
            if next(steps) == 3:
                model.delete_adapter("gone")
            return step()

        monkeypatch.setattr(engine._core, "step", meanwhile)
        with pytest.raises(UnknownAdapter, match="prompt 1: adapter 'gone' is not loaded; the model has 'keep'"):
            engine.generate([[1, 2], [3, 4]], EIGHT, adapter=["keep", "gone"])
        assert engine.usage().live_bytes == 0


def test_adapters_come_and_go_under_an_async_engine() -> None:
    model = peft_model("llama", keep=lora(ATTENTION))
    prompt = prompt_of(40, 6)

    async def tokens_of(engine: AsyncEngine, adapter: str | None) -> list[int]:
        return [t async for event in engine.generate(prompt, EIGHT, adapter=adapter) for t in event.token_ids]

    async def main() -> list[list[int]]:
        async with AsyncEngine(wrap(model, memory="4MiB")) as engine:
            await engine.between_steps(lambda: model.add_adapter("late", lora(["down_proj"])))
            found = await asyncio.gather(*(tokens_of(engine, adapter) for adapter in ("keep", "late", None)))
            await engine.between_steps(lambda: model.delete_adapter("keep"))
            with pytest.raises(UnknownAdapter, match="'keep' is not loaded; the model has 'late'"):
                await tokens_of(engine, "keep")
            return [*found, await tokens_of(engine, "late")]

    keep = own(model, "keep", prompt, 8)
    *found, again = asyncio.run(asyncio.wait_for(main(), 60))
    late = own(model, "late", prompt, 8)
    assert found == [keep, late, own(model, None, prompt, 8)]
    assert again == late


def test_merged_adapters_serve_themselves_and_nothing_else() -> None:
    model = peft_model("llama", sql=lora(ATTENTION), law=lora(ATTENTION))
    prompt = prompt_of(40, 4)
    expected = own(model, "sql", prompt, 8), own(model, None, prompt, 8)
    with wrap(model, memory="4MiB") as engine:
        model.merge_adapter(["sql"])
        assert engine.generate(prompt, EIGHT, adapter="sql")[0].token_ids == expected[0]
        for adapter, what in ((None, "the base model"), ("law", "adapter 'law'")):
            with pytest.raises(UsageError, match=rf"'sql' merged .* so {what} cannot be .*; call unmerge_adapter"):
                engine.generate(prompt, EIGHT, adapter=adapter)
        model.unmerge_adapter()
        assert engine.generate(prompt, EIGHT)[0].token_ids == expected[1]
    merged = model.merge_and_unload()
    with wrap(merged, memory="4MiB") as engine:
        assert engine.generate(prompt, EIGHT)[0].token_ids == expected[0]


def test_an_adapter_from_a_folder(tmp_path: Any) -> None:
    model = peft_model("llama", sql=lora(ATTENTION, lora_dropout=0.5))
    prompt = prompt_of(40, 5)
    expected = own(model, "sql", prompt, 8)
    model.save_pretrained(tmp_path)
    plain: Any = tiny_model("llama")
    with wrap(plain, memory="4MiB") as engine:
        plain.load_adapter(str(tmp_path / "sql"), adapter_name="from a folder")
        assert engine.generate(prompt, EIGHT, adapter="from a folder")[0].token_ids == expected
