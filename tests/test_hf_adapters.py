"""What counts as an adapter that can be served, how its content is told apart, and switching between them."""

from __future__ import annotations

from typing import Any

import peft
import pytest
import torch
from torch import nn

from hybridkv.engine.params import SamplingParams
from hybridkv.engine.wrap import wrap
from hybridkv.errors import HybridKVError, RequestError, UnknownAdapter, UsageError
from hybridkv.hf.adapters import METHODS, Adapters, base_model
from hybridkv.hf.checks import check_model
from hybridkv.hf.runner import ModelRunner, Span, build_manager
from hybridkv_models import family
from tests.adapter_cases import ATTENTION, lora, own, peft_model
from tests.model_cases import tiny_model

TARGETS = {"target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}
CONFIGS: dict[str, Any] = {
    "LORA": peft.LoraConfig(use_dora=True, init_lora_weights=False, **TARGETS),
    "ADALORA": peft.AdaLoraConfig(total_step=10, init_lora_weights=False, **TARGETS),
    "LOHA": peft.LoHaConfig(r=4, init_weights=False, **TARGETS),
    "LOKR": peft.LoKrConfig(r=4, init_weights=False, **TARGETS),
    "IA3": peft.IA3Config(init_ia3_weights=False, feedforward_modules=[], **TARGETS),
    "OFT": peft.OFTConfig(r=0, oft_block_size=4, init_weights=False, **TARGETS),
    "HRA": peft.HRAConfig(r=4, init_weights=False, **TARGETS),
    "VERA": peft.VeraConfig(r=4, init_weights=False, **TARGETS),
    "FOURIERFT": peft.FourierFTConfig(n_frequency=8, scaling=50.0, init_weights=False, **TARGETS),
}


def layers_of(model: Any) -> list[Any]:
    return [module for module in model.modules() if hasattr(module, "_disable_adapters")]


@pytest.mark.parametrize("method", METHODS)
def test_every_method_served_gives_the_logits_of_peft(method: str) -> None:
    model = peft_model("llama", one=CONFIGS[method])
    ids = list(range(1, 41))
    manager = build_manager(model, "2MiB")
    runner = ModelRunner(model, manager, poison=True)
    keys = [runner.adapters.key("one"), None, "one"]
    seqs = [manager.open(ids, adapter=key) for key in keys]
    manager.reserve_all(seqs, 40)
    found = runner.forward([Span(seq, ids, rows) for seq, rows in zip(seqs, (40, 1, 40), strict=True)])
    runner.close()
    with torch.no_grad():
        expected = model(input_ids=torch.tensor([ids])).logits[0]
        with model.disable_adapter():
            base = model(input_ids=torch.tensor([ids])).logits[0]
    torch.testing.assert_close(found, torch.cat([expected, base[-1:], expected]), rtol=1e-4, atol=1e-4)
    assert (expected - base).abs().max() > 0.01


def test_an_adapter_of_the_experts_of_a_mixture() -> None:
    options: dict[str, Any] = {"target_parameters": ["feed_forward.experts.gate_up_proj"], "lora_alpha": 64}
    model = peft_model("jamba", one=lora([], **options))
    prompt = list(range(1, 41))
    with wrap(model, memory="4MiB", poison=True) as engine:
        outs = engine.generate([prompt] * 2, SamplingParams(max_tokens=8), adapter=["one", None])
    expected = [own(model, adapter, prompt, 8) for adapter in ("one", None)]
    assert [out.token_ids for out in outs] == expected
    assert expected[0] != expected[1]


def test_a_fork_keeps_the_adapter() -> None:
    model = peft_model("llama", one=lora(ATTENTION))
    manager = build_manager(model, "2MiB")
    runner = ModelRunner(model, manager, poison=True)
    seq = manager.open([1, 2, 3], adapter=runner.adapters.key("one"))
    manager.reserve(seq, 3)
    runner.forward([Span(seq, [1, 2, 3])])
    manager.commit(seq, 3)
    child = manager.fork(seq)
    manager.reserve_all([seq, child], 1)
    found = runner.forward([Span(seq, [4]), Span(child, [5])])
    runner.close()
    with torch.no_grad():
        expected = torch.cat([model(input_ids=torch.tensor([[1, 2, 3, last]])).logits[0, -1:] for last in (4, 5)])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_saved_modules_belong_to_the_adapter() -> None:
    model = peft_model("llama", one=lora(ATTENTION, modules_to_save=["lm_head"]), two=lora(ATTENTION))
    saved = next(module for module in model.modules() if type(module).__name__ == "ModulesToSaveWrapper")
    adapters = Adapters(model)
    before = adapters.key("one")
    with torch.no_grad():
        saved.modules_to_save["one"].weight += 1.0
    assert adapters.key("one") != before
    x = torch.ones(1, saved.original_module.in_features)
    outs = []
    for adapter in ("one", "two", None):
        with adapters.active(adapter), torch.no_grad():
            outs.append(saved(x))
            assert saved.weight is not None
    assert not torch.equal(outs[0], outs[1])
    assert torch.equal(outs[1], outs[2])


def test_only_what_an_adapter_holds_tells_it_apart() -> None:
    adapters = []
    for _ in range(2):
        torch.manual_seed(1)
        adapters.append(Adapters(peft_model("llama", x=lora(["v_proj", "q_proj"]), y=lora(["q_proj"]))))
    assert adapters[0].key("x") == adapters[1].key("x")
    assert adapters[0].key("x")[1] != adapters[0].key("y")[1]
    assert adapters[0].key("x") == adapters[0].key("x")


@pytest.mark.parametrize("what", ["a weight", "a scaling", "a new tensor"])
def test_a_change_of_an_adapter_in_place_is_another_revision(what: str) -> None:
    model = peft_model("llama", x=lora(ATTENTION), other=lora(ATTENTION))
    adapters = Adapters(model)
    before, other = adapters.key("x"), adapters.key("other")
    layer = layers_of(model)[3]
    if what == "a weight":
        with torch.no_grad():
            layer.lora_A["x"].weight[0, 0] += 1
    elif what == "a scaling":
        layer.set_scale("x", 3.0)
    else:
        layer.lora_B["x"].weight = nn.Parameter(torch.zeros_like(layer.lora_B["x"].weight))
    assert adapters.key("x") != before
    assert isinstance(adapters.problem(before), UnknownAdapter)
    assert adapters.problem(other) is None
    assert adapters.key("other") == other


def test_switching_is_undone_also_after_an_error() -> None:
    model = peft_model("llama", one=lora(ATTENTION), two=lora(["down_proj"]))
    adapters = Adapters(model)
    model.set_adapter("two")
    during = []
    try:
        with adapters.active(("one", "any")):
            during += [layer.active_adapters for layer in layers_of(model)]
            raise KeyError
    except KeyError:
        assert during == [["one"]] * len(layers_of(model))
    with adapters.active(None):
        assert all(layer.disable_adapters for layer in layers_of(model))
    assert {(*layer.active_adapters, layer.disable_adapters) for layer in layers_of(model)} == {("two", False)}
    with model.disable_adapter():
        with adapters.active("one"):
            assert not any(layer.disable_adapters for layer in layers_of(model))
        assert all(layer.disable_adapters for layer in layers_of(model))
    with pytest.raises(UnknownAdapter, match="'three' is not loaded; the model has 'one', 'two'"):
        adapters.active("three").__enter__()


def test_a_plain_model_has_no_adapters() -> None:
    model = tiny_model("llama")
    adapters = Adapters(model)
    assert base_model(model) is model
    assert adapters.names == ()
    assert adapters.problem(None) is None
    with adapters.active(None), torch.no_grad():
        model(input_ids=torch.tensor([[1, 2]]))


def test_a_peft_model_is_checked_as_the_model_inside() -> None:
    model = peft_model("gemma3", x=lora("all-linear"))
    described = family("gemma3")
    assert described is not None
    assert check_model(model) == described.entries(model.config)
    assert base_model(model) is model.get_base_model()
    model.train()
    with pytest.raises(HybridKVError, match=r"PeftModelForCausalLM is in training mode; call model.eval\(\)"):
        check_model(model)


REFUSED = [
    (peft.PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM"), "PROMPT_TUNING, which adds virtual tokens"),
    (peft.PrefixTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM"), "PREFIX_TUNING, which adds virtual tokens"),
    (peft.LNTuningConfig(target_modules=["norm"], task_type="CAUSAL_LM"), "LN_TUNING, whose layers may depend"),
    (lora(ATTENTION, alora_invocation_tokens=[3]), "alora_invocation_tokens set: it starts at"),
    (lora(ATTENTION, layer_replication=[(0, 2), (0, 2)]), "layer_replication set: it changes how"),
    (lora(ATTENTION, bias="lora_only"), "changes biases of the base model"),
]


@pytest.mark.parametrize(("config", "message"), REFUSED, ids=["prompt", "prefix", "norms", "alora", "layers", "bias"])
def test_adapters_that_cannot_be_served(config: Any, message: str) -> None:
    model = peft_model("llama", odd=config)
    adapters = Adapters(model)
    assert adapters.names == ("odd",)
    with pytest.raises(RequestError, match=f"'odd'.*{message}"):
        adapters.key("odd")
    assert adapters.problem(None) is None


def test_an_adapter_without_weights_is_refused() -> None:
    model = peft_model("llama", empty=lora(ATTENTION))
    layers_of(model)[2].lora_A.to("meta")
    with pytest.raises(RequestError, match=r"adapter 'empty' has no weights yet .*; load them first"):
        Adapters(model).key("empty")


def test_dropout_in_training_mode_is_refused() -> None:
    model = peft_model("llama", calm=lora(ATTENTION))
    model.add_adapter("wild", lora(ATTENTION, lora_dropout=0.1))
    adapters = Adapters(model)
    assert adapters.key("calm")
    with pytest.raises(RequestError, match=r"dropout of adapter 'wild' is in training mode; call model.eval\(\)"):
        adapters.key("wild")
    model.eval()
    assert adapters.key("wild")


def test_merged_weights_compute_one_adapter_only() -> None:
    model = peft_model("llama", one=lora(ATTENTION), two=lora(ATTENTION))
    adapters = Adapters(model)
    keys = [adapters.key("one"), adapters.key("two"), None]
    model.merge_adapter(["one"])
    assert [adapters.problem(key) is None for key in keys] == [True, False, False]
    with pytest.raises(UsageError, match="'one' merged"):
        adapters.active(None).__enter__()
    assert layers_of(model)[0].merged_adapters == ["one"]
    model.unmerge_adapter()
    assert [adapters.problem(key) for key in keys] == [None] * 3
