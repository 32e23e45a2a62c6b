"""Families whose attention chooses its tokens by an index: which layers keep index keys, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoConfig

from hybridkv.entries import CacheEntry
from hybridkv.errors import MalformedConfig, UnsupportedModel
from hybridkv_models import family

TYPES = ("axk2", "deepseek_v32", "glm_moe_dsa", "hy_v4")


def entries_of(model_type: str, config: Any) -> tuple[CacheEntry, ...]:
    described = family(model_type)
    assert described is not None
    return described.entries(config)


def choosers(model_type: str, **fields: Any) -> list[int]:
    found = entries_of(model_type, {"model_type": model_type, **fields})
    return [entry.layer for entry in found if len(entry.parts) == 3]


@pytest.mark.parametrize(
    ("model_type", "fields"),
    [
        *((model_type, {"num_hidden_layers": 7}) for model_type in TYPES),
        ("glm_moe_dsa", {"num_hidden_layers": 9, "index_topk_freq": 3}),
        ("glm_moe_dsa", {"num_hidden_layers": 9, "index_topk_freq": 4, "index_skip_topk_offset": 3}),
        ("glm_moe_dsa", {"num_hidden_layers": 5, "index_topk_pattern": "FSSFS"}),
    ],
)
def test_fields_left_out_have_the_defaults_of_transformers(model_type: str, fields: dict[str, Any]) -> None:
    config = AutoConfig.for_model(model_type, **fields)
    assert entries_of(model_type, {"model_type": model_type, **fields}) == entries_of(model_type, config)


def test_layers_that_share_a_choice_keep_no_index() -> None:
    assert choosers("deepseek_v32", num_hidden_layers=4) == [0, 1, 2, 3]
    assert choosers("hy_v4", num_hidden_layers=7) == [0, 1, 5]
    assert choosers("glm_moe_dsa", num_hidden_layers=5, index_topk_pattern="FSSFS") == [0, 3]
    assert choosers("glm_moe_dsa", num_hidden_layers=3, indexer_types=["full", "shared", "full"]) == [0, 2]


@pytest.mark.parametrize(
    "fields", [{"indexer_types": ["full"]}, {"indexer_types": ["full", "none"]}, {"index_topk_pattern": "FX"}]
)
def test_lists_that_do_not_say_which_layers_choose(fields: dict[str, Any]) -> None:
    with pytest.raises(MalformedConfig, match="'full' or 'shared' for each of 2 layers"):
        choosers("glm_moe_dsa", num_hidden_layers=2, **fields)


def test_other_kinds_of_layers_are_refused() -> None:
    with pytest.raises(UnsupportedModel, match=r"layer 1 .*'axk2'.* kind 'full_attention'"):
        choosers("axk2", num_hidden_layers=2, layer_types=["indexed_attention", "full_attention"])
