"""A model type nobody described: its entries are read from its own cache, and it is tried out before it is served."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicIndexedLayer

import hybridkv
from hybridkv.engine.params import SamplingParams
from hybridkv.errors import UnsupportedModel
from hybridkv.hf.checks import check_model
from hybridkv.hf.probe import probe_entries
from hybridkv.hf.runner import ModelRunner, build_manager
from hybridkv_models import family, mode, model_types

TINY: dict[str, Any] = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "pad_token_id": 0, "bos_token_id": None,
    "eos_token_id": None, "initializer_range": 0.1,
}  # fmt: skip

UNDESCRIBED: dict[str, dict[str, Any]] = {
    "vaultgemma": {"head_dim": 16, "sliding_window": 24},
    "granite_swa": {"sliding_window": 24},
    "gpt_neox": {},
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "kv_lora_rank": 24,
        "q_lora_rank": 32,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 12,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 2,
    },
    "qwen3_moe": {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
}
"""Types without a family, and what makes a small model of each."""


@pytest.fixture
def no_families(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if nobody had described any type, whatever families there will be."""
    monkeypatch.setattr("hybridkv_models._MODULES", {})


def undescribed(model_type: str) -> PreTrainedModel:
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **{**TINY, **UNDESCRIBED[model_type]})
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return model.eval()


def described(model_type: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    known = family(model_type)
    assert known is not None
    model: PreTrainedModel = AutoModelForCausalLM.from_config(known.tiny_config(), dtype=dtype)
    return model.eval()


@pytest.mark.parametrize("model_type", [name for name in model_types() if mode(name) == "packed"])
def test_a_probe_finds_what_the_family_declares(model_type: str) -> None:
    model = described(model_type, torch.bfloat16)
    known = family(model_type)
    assert known is not None
    declared = known.entries(model.config, "bfloat16")
    assert sorted(probe_entries(model), key=str) == sorted(declared, key=str)


@pytest.mark.parametrize("model_type", UNDESCRIBED)
@pytest.mark.usefixtures("no_families")
def test_wrap_serves_a_type_without_a_family(model_type: str) -> None:
    model = undescribed(model_type)
    prompts = [np.random.default_rng(i).integers(1, 128, size) for i, size in enumerate((70, 33, 1))]
    prompts.append(np.concatenate([prompts[0][:64], prompts[1][:9]]))
    expected = [greedy(model, prompt, 12) for prompt in prompts]
    params = SamplingParams(max_tokens=12)
    with hybridkv.wrap(model, memory="2MiB", max_batch_tokens=48, poison=True) as engine:
        first, second = engine.generate(prompts, params), engine.generate(prompts, params)
    assert [output.token_ids for output in first] == expected
    assert [output.token_ids for output in second] == expected
    assert second[0].cached_tokens == 64


def greedy(model: PreTrainedModel, prompt: Any, count: int) -> list[int]:
    ids = torch.from_numpy(prompt)[None]
    for _ in range(count):
        with torch.no_grad():
            ids = torch.cat([ids, model(ids, use_cache=False).logits[:, -1:].argmax(-1)], 1)
    return ids[0, len(prompt) :].tolist()


@pytest.mark.parametrize(("page_tokens", "unit_tokens"), [(8, 8), (24, 12), (64, 64)])
@pytest.mark.usefixtures("no_families")
def test_the_trial_takes_pages_and_units_of_other_sizes(page_tokens: int, unit_tokens: int) -> None:
    model = undescribed("granite_swa")
    prompt = np.random.default_rng(0).integers(1, 128, 150)
    expected = greedy(model, prompt, 4)
    with hybridkv.wrap(model, memory="4MiB", page_tokens=page_tokens, unit_tokens=unit_tokens, poison=True) as engine:
        outs = [engine.generate(prompt, SamplingParams(max_tokens=4))[0] for _ in range(2)]
    assert [out.token_ids for out in outs] == [expected] * 2
    assert outs[1].cached_tokens >= 128


@pytest.mark.usefixtures("no_families")
def test_a_layer_of_an_unknown_kind_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    model = undescribed("gpt_neox")

    def with_an_index(config: Any) -> DynamicCache:
        cache = DynamicCache(config=config)
        cache.layers[2] = DynamicIndexedLayer()
        return cache

    monkeypatch.setattr("hybridkv.hf.probe.DynamicCache", with_an_index)
    with pytest.raises(UnsupportedModel, match=r"'gpt_neox'.*layer 2 is of kind .*DynamicIndexedLayer"):
        check_model(model)


@pytest.mark.usefixtures("no_families")
def test_a_model_that_cannot_run_on_a_cache_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    model = undescribed("gpt_neox")
    monkeypatch.setattr(type(model), "forward", lambda self, input_ids: input_ids)
    with pytest.raises(UnsupportedModel, match=r"'gpt_neox'.*unexpected keyword argument 'cache'"):
        check_model(model)


@pytest.mark.usefixtures("no_families")
def test_a_model_that_stores_nothing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = undescribed("gpt_neox")
    monkeypatch.setattr(type(model), "forward", lambda self, input_ids, cache, use_cache: input_ids)
    with pytest.raises(UnsupportedModel, match="'gpt_neox' stores nothing"):
        check_model(model)


class Remembers(nn.Module):
    """A norm that adds its input's running sum over the sequence: a state no cache knows of."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + hidden.cumsum(1)


@pytest.mark.usefixtures("no_families")
def test_a_state_outside_the_cache_is_found_in_the_trial_and_the_model_left_as_it_was() -> None:
    model: Any = undescribed("gpt_neox")
    model.gpt_neox.final_layer_norm = Remembers()
    manager = build_manager(model, "1MiB")
    with pytest.raises(UnsupportedModel, match=r"'gpt_neox'.*off by .* in a trial of 41 tokens"):
        ModelRunner(model, manager)
    assert model(torch.ones(1, 3, dtype=torch.long)).logits.isfinite().all()


def test_a_failed_trial_leaves_no_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = described("jamba")
    monkeypatch.setattr("hybridkv_models._MODULES", {})
    manager = build_manager(model, "1MiB")
    module = importlib.import_module(type(model).__module__)
    own = module.mamba_selective_scan
    model.model.final_layernorm = Remembers()
    with pytest.raises(UnsupportedModel, match="trial"):
        ModelRunner(model, manager)
    assert module.mamba_selective_scan is own


def test_a_layer_that_makes_its_own_mask_is_refused() -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("doge", **TINY), dtype=torch.float32).eval()
    with pytest.raises(UnsupportedModel, match="layer 0 attends through a mask it makes itself"):
        ModelRunner(model, build_manager(model, "1MiB"))
