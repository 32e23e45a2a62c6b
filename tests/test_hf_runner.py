"""The packed pass as a guest in somebody else's model: what it refuses, and that it leaves no trace."""

from __future__ import annotations

import inspect
import re
import sys
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    PreTrainedModel,
)
from transformers.models.bamba import modeling_bamba
from transformers.models.jamba import modeling_jamba

from hybridkv.errors import ConfigError, UnsupportedModel, UsageError
from hybridkv.hf.attention import hybridkv_attention
from hybridkv.hf.mixers import MixerHooks, Wrapped
from hybridkv.hf.runner import ModelRunner, Span, build_manager
from hybridkv.hf.step import LayerMap
from hybridkv.manager import GroupManager
from hybridkv_models import family

IDS = np.random.default_rng(0).integers(1, 100, 60)


def tiny(model_type: str, **changes: Any) -> PreTrainedModel:
    described = family(model_type)
    assert described is not None
    config = described.tiny_config()
    for name, value in changes.items():
        setattr(config, name, value)
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return model.eval()


@pytest.fixture(scope="module")
def jamba() -> PreTrainedModel:
    return tiny("jamba")


def start(model: PreTrainedModel, *, poison: bool = True) -> tuple[GroupManager, ModelRunner]:
    manager = build_manager(model, "1MiB")
    return manager, ModelRunner(model, manager, poison=poison)


def stock_logits(model: PreTrainedModel) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.from_numpy(IDS)[None], use_cache=False).logits  # type: ignore[no-any-return]


def one_pass(manager: GroupManager, runner: ModelRunner, count: int = 20) -> torch.Tensor:
    seq = manager.open(IDS)
    manager.reserve(seq, count)
    logits = runner.forward([Span(seq, IDS[:count])])
    manager.commit(seq, count)
    manager.close(seq)
    return logits


# What it leaves behind


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_the_model_is_its_old_self_outside_a_pass(attention: str) -> None:
    model = tiny("jamba")
    model.set_attn_implementation(attention)
    before = stock_logits(model)
    manager, runner = start(model)
    assert torch.equal(stock_logits(model), before)
    one_pass(manager, runner)
    assert model.config._attn_implementation == attention
    assert torch.equal(stock_logits(model), before)
    runner.close()
    assert torch.equal(stock_logits(model), before)


def test_generate_works_beside_a_runner(jamba: PreTrainedModel) -> None:
    ids = torch.from_numpy(IDS)[None]
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    before = jamba.generate(ids, **options)
    manager, runner = start(jamba)
    one_pass(manager, runner)
    assert torch.equal(jamba.generate(ids, **options), before)
    runner.close()


def test_closing_gives_the_functions_back() -> None:
    own = {name: getattr(modeling_jamba, name) for name in ("causal_conv1d_fn", "mamba_selective_scan")}
    first, second = MixerHooks(tiny("jamba")), MixerHooks(tiny("jamba"))
    for name, function in own.items():
        wrapped = getattr(modeling_jamba, name)
        assert isinstance(wrapped, Wrapped)
        assert wrapped.original is function, "wrapped twice"
    first.close()
    first.close()
    assert isinstance(modeling_jamba.causal_conv1d_fn, Wrapped)
    second.close()
    for name, function in own.items():
        assert getattr(modeling_jamba, name) is function


def test_other_modules_are_left_alone(jamba: PreTrainedModel) -> None:
    hooks = MixerHooks(jamba)
    assert not isinstance(modeling_bamba.causal_conv1d_fn, Wrapped)
    hooks.close()


def test_a_pass_that_fails_leaves_the_model_as_it_was() -> None:
    model = tiny("llama")
    manager, runner = start(model)
    before = model.config._attn_implementation

    def fail(*args: Any) -> None:
        raise ArithmeticError("stop")

    handle = model.get_output_embeddings().register_forward_pre_hook(fail)
    seq = manager.open(IDS)
    manager.reserve(seq, 4)
    with pytest.raises(ArithmeticError):
        runner.forward([Span(seq, IDS[:4])])
    handle.remove()
    assert model.config._attn_implementation == before
    with pytest.raises(UsageError, match="only inside"):
        hybridkv_attention(model, *(torch.zeros(1, 1, 1, 4) for _ in range(3)), None)
    runner.close()


# Modeling code of other modules


def copied_jamba(monkeypatch: pytest.MonkeyPatch, **renamed: str) -> PreTrainedModel:
    """Jamba with modeling code of its own, as remote code has it; `renamed` are functions it calls by another name."""
    code = inspect.getsource(modeling_jamba)
    for old, new in (("...", "transformers."), ("..", "transformers.models."), (".", "transformers.models.jamba.")):
        code = re.sub(rf"^from {re.escape(old)}(?=\w)", f"from {new}", code, flags=re.MULTILINE)
    code = code.replace("from ... import", "from transformers import")
    for name, other in renamed.items():
        code = code.replace(name, other)
    module = ModuleType("modeling_of_somebody_else")
    module.__file__ = modeling_jamba.__file__
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(compile(code, module.__name__, "exec"), module.__dict__)
    model: PreTrainedModel = module.JambaForCausalLM(tiny("jamba").config)
    model.load_state_dict(tiny("jamba").state_dict())
    return model.eval()


def test_a_model_with_modeling_code_of_its_own_is_served_from_its_own_module(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = copied_jamba(monkeypatch)
    manager, runner = start(model)
    seq = manager.open(IDS)
    for count in (20, 1, 30):
        manager.reserve(seq, count)
        (row,) = runner.forward([Span(seq, IDS[seq.length : seq.length + count])])
        manager.commit(seq, count)
        torch.testing.assert_close(row, stock_logits(model)[0, seq.length - 1], rtol=1e-4, atol=1e-4)
    runner.close()


def test_layers_that_inherit_their_forward_pass_are_served(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("a_subclass_elsewhere")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    model = tiny("jamba")
    for layer in model.modules():
        layer.__class__ = type(type(layer).__name__, (type(layer),), {"__module__": module.__name__})
    manager, runner = start(model)
    torch.testing.assert_close(one_pass(manager, runner)[0], stock_logits(model)[0, 19], rtol=1e-4, atol=1e-4)
    runner.close()


@pytest.mark.parametrize(
    ("name", "part"), [("mamba_selective_scan", "recurrent state"), ("causal_conv1d_fn", "conv state")]
)
def test_a_layer_that_moves_its_state_on_by_itself_is_an_error(
    monkeypatch: pytest.MonkeyPatch, name: str, part: str
) -> None:
    model = copied_jamba(monkeypatch, **{name: f"my_{name}"})
    setattr(sys.modules[type(model).__module__], f"my_{name}", getattr(modeling_jamba, name))
    manager, runner = start(model)
    with pytest.raises(UnsupportedModel, match=rf"'jamba': layer 0 \(linear_attention\) computed its {part}.*{name}"):
        one_pass(manager, runner)
    runner.close()


def test_attention_that_is_computed_without_the_pages_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    model = copied_jamba(monkeypatch)
    module = sys.modules[type(model).__module__]
    monkeypatch.setattr(module, "ALL_ATTENTION_FUNCTIONS", type("Own", (), {"get_interface": lambda *_: own_attention}))
    manager, runner = start(model)
    with pytest.raises(UnsupportedModel, match=r"\(full_attention\) computed its attention"):
        one_pass(manager, runner)
    runner.close()


def own_attention(module: Any, query: torch.Tensor, *others: Any, **options: Any) -> tuple[torch.Tensor, None]:
    return query.transpose(1, 2), None


# What a pass is


def test_one_forward_serves_any_mix_and_rows_come_in_the_order_given(jamba: PreTrainedModel) -> None:
    expected = stock_logits(jamba)[0]
    manager, runner = start(jamba)
    passes = []
    handle = jamba.register_forward_pre_hook(lambda *_: passes.append(1))
    seqs = [manager.open(IDS, salt=str(i)) for i in range(4)]
    lengths = [9, 30, 1, 25]
    for counts in ([9, 30, 1, 25], [1, 7, 1, 30], [3, 1, 1, 1]):
        for seq, count in zip(seqs, counts, strict=True):
            manager.reserve(seq, count)
        logits = runner.forward(
            [Span(seq, IDS[seq.length : seq.length + count]) for seq, count in zip(seqs, counts, strict=True)]
        )
        assert logits.shape == (4, runner.vocab_size)
        assert logits.dtype == torch.float32
        for i, (seq, count) in enumerate(zip(seqs, counts, strict=True)):
            manager.commit(seq, count)
            lengths[i] = seq.length
            torch.testing.assert_close(logits[i], expected[seq.length - 1], rtol=1e-4, atol=1e-4)
    handle.remove()
    runner.close()
    assert len(passes) == 3
    assert lengths == [13, 38, 3, 56]


def test_a_span_gives_as_many_rows_as_it_asks_for(jamba: PreTrainedModel) -> None:
    expected = stock_logits(jamba)[0]
    manager, runner = start(jamba)
    seqs = [manager.open(IDS, salt=str(i)) for i in range(3)]
    counts, rows = [9, 1, 30], [4, 1, 30]
    for seq, count in zip(seqs, counts, strict=True):
        manager.reserve(seq, count)
    spans = [Span(seq, IDS[:count], wanted) for seq, count, wanted in zip(seqs, counts, rows, strict=True)]
    logits = runner.forward(spans)
    runner.close()
    wanted = torch.cat([expected[count - row : count] for count, row in zip(counts, rows, strict=True)])
    torch.testing.assert_close(logits, wanted, rtol=1e-4, atol=1e-4)


def test_poison_shows_when_a_page_in_use_is_lost(jamba: PreTrainedModel) -> None:
    for kind in ("full_attention", "linear_attention"):
        manager, runner = start(jamba)
        seq = manager.open(IDS)
        manager.reserve(seq, 20)
        runner.forward([Span(seq, IDS[:20])])
        manager.commit(seq, 20)
        manager.reserve(seq, 1)
        for g, group in enumerate(manager.groups):
            if group.kind == kind:
                slots = [manager.state_pages(seq, g).slot] if group.is_state else manager.token_pages(seq, g).slots[:1]
                runner.storage.poison(g, np.array(slots, np.int64))
        assert runner.forward([Span(seq, IDS[20:21])]).isnan().any()
        runner.close()


@pytest.mark.parametrize("model_type", ["gemma3", "mamba2"])
def test_sizes(model_type: str) -> None:
    model = tiny(model_type)
    _, runner = start(model)
    assert runner.vocab_size == model.config.vocab_size
    assert runner.max_positions == getattr(model.config, "max_position_embeddings", None)
    assert runner.layer_count == model.config.num_hidden_layers
    runner.close()


# What it refuses


def test_spans_that_cannot_be_computed(jamba: PreTrainedModel) -> None:
    manager, runner = start(jamba)
    seq = manager.open(IDS)
    with pytest.raises(UsageError, match="at least one span"):
        runner.forward([])
    with pytest.raises(UsageError, match="0 reserved"):
        runner.forward([Span(seq, IDS[:4])])
    manager.reserve(seq, 4)
    with pytest.raises(UsageError, match="one span of each request"):
        runner.forward([Span(seq, IDS[:2]), Span(seq, IDS[2:4])])
    with pytest.raises(UsageError, match="span of 0 tokens"):
        runner.forward([Span(seq, [])])
    with pytest.raises(UsageError, match="4 reserved"):
        runner.forward([Span(seq, IDS[:5])])
    for rows in (0, 5):
        with pytest.raises(UsageError, match=f"4 tokens cannot give {rows} rows"):
            runner.forward([Span(seq, IDS[:4], rows)])
    jamba.train()
    with pytest.raises(UsageError, match=r"model.eval\(\)"):
        runner.forward([Span(seq, IDS[:4])])
    jamba.eval()
    assert runner.forward([Span(seq, IDS[:4])]).isfinite().all()
    runner.close()
    runner.close()
    with pytest.raises(UsageError, match="closed"):
        runner.forward([Span(seq, IDS[:4])])


def test_the_managers_groups_must_be_the_models(jamba: PreTrainedModel) -> None:
    manager = build_manager(tiny("llama"), "1MiB")
    with pytest.raises(ConfigError, match="not this model's"):
        ModelRunner(jamba, manager)
    half = build_manager(tiny("jamba").to(torch.bfloat16), "1MiB")
    with pytest.raises(ConfigError, match="float"):
        ModelRunner(jamba, half)


def test_a_layer_that_nobody_described_is_named() -> None:
    layers = LayerMap(build_manager(tiny("gemma2"), "1MiB").groups)
    assert layers.layers == 4
    assert not layers.states


def test_managers_of_different_models_do_not_share_a_key(jamba: PreTrainedModel) -> None:
    seeds = [
        build_manager(jamba, "1MiB", **options).open(IDS).seed
        for options in ({}, {"model": "jamba"}, {"model": "mine"})
    ]
    assert seeds[0] == seeds[1], "named after its type where nothing else names it"
    assert seeds[0] != seeds[2]


def test_a_standard_cache_is_untouched_by_an_open_runner(jamba: PreTrainedModel) -> None:
    manager, runner = start(jamba)
    one_pass(manager, runner)
    cache = DynamicCache(config=jamba.config)
    with torch.no_grad():
        jamba(torch.from_numpy(IDS[:-1])[None], cache=cache, use_cache=True)
        last = jamba(torch.from_numpy(IDS[-1:])[None], cache=cache, use_cache=True).logits[0, -1]
    torch.testing.assert_close(last, stock_logits(jamba)[0, -1], rtol=1e-4, atol=1e-4)
    runner.close()
