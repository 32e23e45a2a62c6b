"""Families of attention layers alone: configs beside their tiny ones, against the model's own full forward pass."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, PreTrainedModel
from transformers.cache_utils import KVSharingDict
from transformers.models.gemma3n import modeling_gemma3n

from hybridkv.entries import CacheEntry
from hybridkv.errors import MalformedConfig, UnsupportedModel
from hybridkv.hf.runner import ModelRunner, Span, build_manager
from hybridkv_models import family
from tests.test_hf_runner import one_pass, start, tiny

FULL, SLIDING = "full_attention", "sliding_attention"
IDS = np.random.default_rng(3).integers(1, 100, 110)


def entries_of(config: Any) -> tuple[CacheEntry, ...]:
    known = family(config["model_type"] if isinstance(config, dict) else config.model_type)
    assert known is not None
    return known.entries(config)


def check_parity(model: PreTrainedModel) -> None:
    """Two requests in one pass, one token apart, have the logits of one full forward pass."""
    with torch.no_grad():
        expected = model(torch.from_numpy(IDS)[None], use_cache=False).logits[0]
    manager = build_manager(model, "2MiB")
    runner = ModelRunner(model, manager, poison=True)
    seqs = [manager.open(IDS, salt=salt) for salt in "ab"]
    for counts in ((41, 40), (1, 1), (1, 1), (50, 1), (1, 40), (10, 20)):
        spans = []
        for seq, count in zip(seqs, counts, strict=True):
            manager.reserve(seq, count)
            spans.append(Span(seq, IDS[seq.length : seq.length + count]))
        for seq, count, row in zip(seqs, counts, runner.forward(spans), strict=True):
            manager.commit(seq, count)
            error = (row - expected[seq.length - 1]).abs().max() / expected[seq.length - 1].abs().max()
            assert error < 1e-3
    runner.close()


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("gemma3n", {"num_kv_shared_layers": 0}),
        ("gemma4", {"num_kv_shared_layers": 0, "enable_moe_block": False, "hidden_size_per_layer_input": 0}),
        ("gemma4", {"attention_k_eq_v": False}),
        ("gemma4", {"per_layer_config": {i: {"num_key_value_heads": 4, "head_dim": 8} for i in (0, 1, 3, 5)}}),
        ("llama4", {"attention_chunk_size": None, "layer_types": [FULL] * 5}),
        ("llama4", {"attn_temperature_tuning": False, "use_qk_norm": False, "attention_chunk_size": 23}),
        ("exaone4", {"sliding_window": None, "layer_types": [FULL] * 5}),
        ("ministral", {"layer_types": [SLIDING] * 4}),
    ],
)
def test_other_configs_of_a_type_are_served_as_well(model_type: str, changes: dict[str, Any]) -> None:
    check_parity(tiny(model_type, **changes))


@pytest.mark.parametrize("model_type", ["gemma3n", "gemma4"])
def test_layers_that_share_keys_keep_nothing_themselves(model_type: str) -> None:
    config = tiny(model_type).config
    assert config.num_kv_shared_layers == 3
    assert {entry.layer for entry in entries_of(config)} == set(range(config.num_hidden_layers - 3))


def test_shared_keys_that_are_copied_on_the_way_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    class Copies(KVSharingDict):
        def __getitem__(self, kind: str) -> tuple[torch.Tensor, ...]:
            return tuple(part.clone() for part in super().__getitem__(kind))

    monkeypatch.setattr(modeling_gemma3n, "KVSharingDict", Copies)
    manager, runner = start(tiny("gemma3n"))
    with pytest.raises(UnsupportedModel, match="keys that no cache update has returned"):
        one_pass(manager, runner)
    runner.close()


def test_gemma4_layers_of_different_shapes_are_different_groups() -> None:
    shapes = {(entry.kind, entry.parts[0].shape) for entry in entries_of(tiny("gemma4").config)}
    assert shapes == {(SLIDING, (2, 16)), (FULL, (1, 32))}


@pytest.mark.parametrize(
    "fields",
    [
        {"per_layer_config": {"00": {"head_dim": 64, "num_key_value_heads": 8}, "11": {"head_dim": 128}}},
        {"per_layer_config": {}},
        {"global_head_dim": 64, "num_global_key_value_heads": 1},
        {"global_head_dim": 64, "num_global_key_value_heads": 1, "attention_k_eq_v": True},
        {"num_kv_shared_layers": 6, "num_key_value_heads": 2},
        {"layer_types": [SLIDING] * 12},
        {"use_bidirectional_attention": "vision"},
    ],
)
def test_raw_gemma4_fields_mean_what_the_config_object_means(fields: dict[str, Any]) -> None:
    fields = {"num_hidden_layers": 12, **fields}
    config = AutoConfig.for_model("gemma4_text", **{**fields})
    assert entries_of({"model_type": "gemma4_text", **fields}) == entries_of(config)


@pytest.mark.parametrize(
    ("fields", "error", "named"),
    [
        ({"model_type": "gemma4_text", "use_bidirectional_attention": "all"}, UnsupportedModel, "bidirectional"),
        ({"model_type": "gemma4_text", "per_layer_config": {"0": {"skip": ["mlp"]}}}, UnsupportedModel, "skips mlp"),
        ({"model_type": "gemma4_text", "per_layer_config": [1]}, MalformedConfig, "per_layer_config"),
        ({"model_type": "gemma4_text", "num_kv_shared_layers": 12}, MalformedConfig, "first 0 is one"),
        ({"model_type": "gemma3n_text", "num_kv_shared_layers": 9}, MalformedConfig, r"layer 4 .*first 3 is one"),
        ({"model_type": "llama4_text", "no_rope_layers": [1, 0]}, MalformedConfig, "no_rope_layers"),
        (
            {"model_type": "llama4_text", "layer_types": ["chunked_attention"] * 12, "attention_chunk_size": None},
            MalformedConfig,
            "attention_chunk_size.*null",
        ),
        ({"model_type": "olmo3", "sliding_window": None}, MalformedConfig, "sliding_window.*null"),
    ],
)
def test_configs_that_cannot_be_served_are_refused_by_name(
    fields: dict[str, Any], error: type[Exception], named: str
) -> None:
    with pytest.raises(error, match=named):
        entries_of({"num_hidden_layers": 12, **fields})


def test_the_wrapper_types_read_the_text_part() -> None:
    for name in ("gemma3n", "gemma4", "llama4"):
        text = {"model_type": f"{name}_text", "num_hidden_layers": 32}
        nested = {"model_type": name, "dtype": "bfloat16", "text_config": text}
        assert entries_of(nested) == entries_of({**text, "dtype": "bfloat16"})
