"""Which loaded models are refused before anything touches them, and what each refusal says to do."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedModel,
    RecurrentGemmaConfig,
    T5Config,
    T5ForConditionalGeneration,
)

from hybridkv.errors import UnsupportedModel
from hybridkv.hf.checks import check_model
from hybridkv_models import family


def tiny(model_type: str = "llama") -> PreTrainedModel:
    described = family(model_type)
    assert described is not None
    model: PreTrainedModel = AutoModelForCausalLM.from_config(described.tiny_config(), dtype=torch.float32)
    return model.eval()


def refused(model: Any, message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        check_model(model)


def test_a_model_in_order_gives_its_entries() -> None:
    model = tiny("gemma2")
    described = family("gemma2")
    assert described is not None
    assert check_model(model) == described.entries(model.config)


def test_what_is_no_causal_language_model() -> None:
    small = {"d_model": 16, "d_kv": 4, "d_ff": 16, "num_layers": 1, "num_heads": 2, "vocab_size": 32}
    refused(T5ForConditionalGeneration(T5Config(**small)).eval(), "encoder-decoder.*own generate")
    refused(AutoModel.from_config(tiny().config).eval(), "no language-model head; load .*AutoModelForCausalLM")
    refused(nn.Linear(2, 2), r"got Linear; load one .*from_pretrained\(\)")


def test_a_model_in_training_mode() -> None:
    refused(tiny().train(), r"training mode; call model.eval\(\) first")


def test_a_model_without_weights() -> None:
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(tiny().config)
    refused(empty.eval(), "'llama' has no weights yet .*load them first")


def test_a_model_on_several_devices() -> None:
    model = tiny()
    model.get_output_embeddings().to("meta")
    refused(model, "'llama' is spread over cpu, meta.*load the model onto one device")


@pytest.mark.parametrize("where", ["config", "quantizer", "flag"])
def test_a_quantised_model(where: str) -> None:
    model: Any = tiny()
    named = {"config": "bitsandbytes", "quantizer": "SimpleNamespace", "flag": "gptq"}[where]
    if where == "config":
        model.config.quantization_config = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    elif where == "quantizer":
        model.hf_quantizer = SimpleNamespace()
    else:
        model.is_quantized, model.quantization_method = True, SimpleNamespace(value="gptq")
    refused(model, rf"'llama' is quantised \({named}\).*load it in float32.*without quantization_config")


@pytest.mark.parametrize("away", ["cpu", "disk"])
def test_a_model_whose_layers_are_offloaded(away: str) -> None:
    model: Any = tiny()
    model.hf_device_map = {"model.layers.0": 0, "model.layers.1": away, "lm_head": 0}
    refused(model, rf"'llama' has layers offloaded to {away} .*load it onto one device, without device_map")


def test_a_device_map_that_names_one_place_is_none() -> None:
    model: Any = tiny()
    model.hf_device_map = {"": "cpu"}
    assert check_model(model)


@pytest.mark.parametrize("nested", [False, True])
def test_a_model_with_offloading_hooks(nested: bool) -> None:
    model: Any = tiny()
    hook = SimpleNamespace(offload=True)
    model.model.layers[1]._hf_hook = SimpleNamespace(hooks=(hook,)) if nested else hook
    refused(model, r"hook of accelerate on 'model.layers.1'.*remove_hook_from_submodules")
    hook.offload = False
    assert check_model(model)


def test_rotary_angles_that_depend_on_the_batch() -> None:
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0},
    )  # fmt: skip
    refused(AutoModelForCausalLM.from_config(config).eval(), "rotary type 'dynamic'.*default rotary type")


def test_a_type_known_not_to_work() -> None:
    config = RecurrentGemmaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=3, num_attention_heads=2, lru_width=16
    )
    refused(AutoModelForCausalLM.from_config(config).eval(), "'recurrent_gemma' cannot be served: .*module attributes")
