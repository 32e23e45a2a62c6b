"""Fields of a config: raw ones mean what the config object means, left out ones are defaults, bad ones are named."""

import json
from typing import Any

import pytest
from transformers import AutoConfig

from hybridkv.errors import MalformedConfig, UnsupportedModel
from hybridkv_models import load_preset, model_types
from tests.model_cases import entries_of, tiny_config

MODEL_TYPES = model_types()


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_raw_fields_mean_what_the_config_object_means(model_type: str) -> None:
    config = tiny_config(model_type)
    raw = json.loads(json.dumps(config.to_dict()))
    assert entries_of(model_type, raw) == entries_of(model_type, config)


@pytest.mark.parametrize(
    ("model_type", "fields"),
    [
        ("llama", {"num_hidden_layers": 3, "hidden_size": 96, "num_attention_heads": 6}),
        ("llama", {"num_hidden_layers": 3, "hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 2}),
        ("mistral", {"num_hidden_layers": 3, "hidden_size": 128, "num_attention_heads": 8}),
        ("mistral", {"num_hidden_layers": 3, "hidden_size": 128, "num_attention_heads": 8, "sliding_window": None}),
        ("mistral", {"num_hidden_layers": 3, "hidden_size": 128, "num_attention_heads": 8, "sliding_window": 24}),
        ("gemma2", {"num_hidden_layers": 5}),
        ("gemma3_text", {"num_hidden_layers": 13}),
        ("gemma3_text", {"num_hidden_layers": 7, "sliding_window_pattern": 3, "sliding_window": 512}),
        ("gpt_oss", {"num_hidden_layers": 5}),
        ("cohere2", {"num_hidden_layers": 9}),
        ("cohere2", {"num_hidden_layers": 9, "hidden_size": 96, "num_attention_heads": 6, "sliding_window_pattern": 2}),
        ("exaone4", {"num_hidden_layers": 9}),
        ("exaone4", {"num_hidden_layers": 9, "sliding_window_pattern": 3, "head_dim": 32}),
        ("exaone4", {"num_hidden_layers": 1, "layer_types": ["full_attention"], "sliding_window": None}),
        ("gemma3n_text", {"num_hidden_layers": 25}),
        ("gemma3n_text", {"num_hidden_layers": 9, "num_kv_shared_layers": 0}),
        ("gemma4_text", {"num_hidden_layers": 13}),
        ("llama4_text", {"num_hidden_layers": 9}),
        ("llama4_text", {"num_hidden_layers": 9, "no_rope_layer_interval": 3}),
        ("llama4_text", {"num_hidden_layers": 3, "no_rope_layers": [0, 1, 0]}),
        ("llama4_text", {"num_hidden_layers": 3, "attention_chunk_size": None}),
        ("ministral", {"num_hidden_layers": 3}),
        ("ministral", {"num_hidden_layers": 3, "hidden_size": 96, "num_attention_heads": 6, "sliding_window": None}),
        ("olmo3", {"num_hidden_layers": 9}),
        ("vaultgemma", {"num_hidden_layers": 5}),
        ("cwm", {"num_hidden_layers": 6}),
        ("afmoe", {"num_hidden_layers": 6}),
        ("afmoe", {"num_hidden_layers": 6, "global_attn_every_n_layers": 2, "num_attention_heads": 4}),
        ("cohere2_moe", {"num_hidden_layers": 9}),
        ("cohere2_moe", {"num_hidden_layers": 9, "first_k_dense_replace": 3, "num_attention_heads": 8}),
        (
            "cohere2_moe",
            {"num_hidden_layers": 9, "first_k_dense_replace": 3, "prefix_dense_sliding_window_pattern": 2},
        ),
        ("exaone_moe", {"num_hidden_layers": 9}),
        ("granite_swa", {"num_hidden_layers": 9}),
        ("granite_swa", {"num_hidden_layers": 9, "num_key_value_heads": None, "num_attention_heads": 10}),
        ("granitemoe_swa", {"num_hidden_layers": 9}),
        ("mimo_v2_flash", {"num_hidden_layers": 13}),
        ("mimo_v2_flash", {"num_hidden_layers": 13, "sliding_window_size": 64}),
        ("olmo3", {"num_hidden_layers": 9, "hidden_size": 96, "num_attention_heads": 6}),
        ("jamba", {"num_hidden_layers": 17, "hidden_size": 64, "num_attention_heads": 4}),
        (
            "jamba",
            {
                "num_hidden_layers": 6,
                "hidden_size": 64,
                "num_attention_heads": 4,
                "attn_layer_period": 3,
                "attn_layer_offset": 0,
                "mamba_expand": 3,
            },
        ),
        ("mamba", {"num_hidden_layers": 3, "hidden_size": 96}),
        ("mamba2", {"num_hidden_layers": 3, "hidden_size": 4096}),
        ("bamba", {"num_hidden_layers": 5, "hidden_size": 4096, "num_attention_heads": 32, "attn_layer_indices": [2]}),
        ("bamba", {"num_hidden_layers": 5, "hidden_size": 4096, "num_attention_heads": 32}),
        ("qwen3_next", {"num_hidden_layers": 9}),
        ("qwen3_next", {"num_hidden_layers": 9, "full_attention_interval": 3}),
        ("qwen3_5_text", {"num_hidden_layers": 9}),
        ("qwen3_5_text", {"num_hidden_layers": 9, "full_attention_interval": 3}),
        ("qwen3_5", {"text_config": {"num_hidden_layers": 5}}),
        ("qwen3_5_moe_text", {"num_hidden_layers": 9}),
        ("qwen3_5_moe", {"text_config": {"num_hidden_layers": 5, "full_attention_interval": 2}}),
        ("bailing_hybrid", {"num_hidden_layers": 13}),
        ("bailing_hybrid", {"num_hidden_layers": 5, "layer_group_size": 2, "head_dim": 64, "num_attention_heads": 8}),
        ("kimi_linear", {"num_hidden_layers": 9}),
        ("kimi_linear", {"num_hidden_layers": 3, "linear_attn_config": {"num_heads": 8, "head_dim": 64}}),
        (
            "kimi_linear",
            {
                "num_hidden_layers": 4,
                "linear_attn_config": {
                    "full_attn_layers": [1, 4],
                    "kda_layers": [2, 3],
                    "short_conv_kernel_size": 3,
                },
            },
        ),
        ("olmo_hybrid", {"num_hidden_layers": 9}),
        ("olmo_hybrid", {"num_hidden_layers": 3, "num_attention_heads": 10, "linear_num_key_heads": 7}),
        ("falcon_mamba", {"num_hidden_layers": 3, "hidden_size": 96}),
        ("falcon_mamba", {"num_hidden_layers": 3, "hidden_size": 96, "expand": 3, "state_size": 4, "conv_kernel": 3}),
        ("falcon_h1", {"num_hidden_layers": 3, "hidden_size": 96, "num_attention_heads": 6}),
        (
            "falcon_h1",
            {
                "num_hidden_layers": 3,
                "hidden_size": 96,
                "num_attention_heads": 6,
                "num_key_value_heads": None,
                "mamba_d_ssm": None,
                "mamba_n_heads": 4,
            },
        ),
        ("granitemoehybrid", {"num_hidden_layers": 3, "hidden_size": 1024}),
        (
            "granitemoehybrid",
            {
                "num_hidden_layers": 3,
                "hidden_size": 1024,
                "num_attention_heads": 8,
                "layer_types": ["mamba", "attention", "mamba"],
            },
        ),
        (
            "granitemoehybrid",
            {
                "num_hidden_layers": 2,
                "hidden_size": 1024,
                "num_attention_heads": 8,
                "layers_block_type": ["mamba", "attention"],
            },
        ),
        ("lara_mini", {"num_hidden_layers": 12}),
        ("lfm2", {"num_hidden_layers": 3, "hidden_size": 96, "num_attention_heads": 6}),
        (
            "lfm2",
            {"num_hidden_layers": 3, "hidden_size": 96, "num_attention_heads": 6, "full_attn_idxs": [1]},
        ),
        (
            "lfm2_moe",
            {
                "num_hidden_layers": 2,
                "hidden_size": 96,
                "num_attention_heads": 6,
                "layer_types": ["conv", "full_attention"],
            },
        ),
        ("lfm3", {"num_hidden_layers": 11, "hidden_size": 96}),
        ("zamba", {"num_hidden_layers": 25, "hidden_size": 96}),
        (
            "zamba",
            {
                "num_hidden_layers": 9,
                "hidden_size": 96,
                "num_attention_heads": 4,
                "n_mamba_heads": 4,
                "attn_layer_period": 3,
                "attn_layer_offset": 0,
            },
        ),
        ("zamba2", {"num_hidden_layers": 54, "hidden_size": 128}),
        (
            "zamba2",
            {
                "num_hidden_layers": 3,
                "hidden_size": 64,
                "num_attention_heads": 4,
                "layers_block_type": ["mamba", "hybrid", "mamba"],
            },
        ),
        ("nemotron_h", {"hybrid_override_pattern": "M-M*ME"}),
        ("nemotron_h", {"layers_block_type": ["mamba", "attention", "mlp", "moe"]}),
    ],
)
def test_fields_left_out_have_the_defaults_of_transformers(model_type: str, fields: dict[str, Any]) -> None:
    config = AutoConfig.for_model(model_type, **fields)
    assert entries_of(model_type, {"model_type": model_type, **fields}) == entries_of(model_type, config)


def test_gemma3_reads_the_text_part() -> None:
    text = {"model_type": "gemma3_text", "num_hidden_layers": 6, "sliding_window": 24}
    nested = {"model_type": "gemma3", "torch_dtype": "bfloat16", "text_config": text}
    assert entries_of("gemma3", nested) == entries_of("gemma3_text", text, dtype="bfloat16")
    assert entries_of("gemma3", AutoConfig.for_model("gemma3", text_config=text)) == entries_of("gemma3_text", text)


def test_dtypes_are_taken_from_the_config_or_from_the_caller() -> None:
    config = {**load_preset("jamba-1.5-mini"), "num_hidden_layers": 8}

    def dtypes(**options: Any) -> list[list[str]]:
        found = entries_of("jamba", config, **options)
        return [[part.dtype for part in entry.parts] for entry in (found[4], found[0])]

    assert dtypes() == [["bfloat16", "bfloat16"], ["bfloat16", "float32"]]
    assert dtypes(dtype="float16") == [["float16", "float16"], ["float16", "float32"]]
    assert dtypes(state_dtype="bfloat16")[1] == ["bfloat16", "bfloat16"]
    del config["dtype"]
    assert dtypes()[0] == ["float32", "float32"], "what transformers builds from a config that names no dtype"
    config["torch_dtype"] = "float16"
    assert dtypes()[0] == ["float16", "float16"], "the older name of the field"


@pytest.mark.parametrize(
    ("model_type", "fields", "named"),
    [
        ("llama", {"hidden_size": 64, "num_attention_heads": 4}, "num_hidden_layers"),
        ("llama", {"num_hidden_layers": 2, "num_attention_heads": 4}, "hidden_size"),
        ("llama", {"num_hidden_layers": 2, "hidden_size": 64}, "num_attention_heads"),
        ("jamba", {"num_hidden_layers": 2}, "hidden_size"),
        ("mamba", {"num_hidden_layers": 0, "hidden_size": 64}, "num_hidden_layers"),
        ("mamba", {"num_hidden_layers": "24", "hidden_size": 64}, "num_hidden_layers"),
        ("mamba", {"num_hidden_layers": True, "hidden_size": 64}, "num_hidden_layers"),
        ("mamba", {"num_hidden_layers": 10**9, "hidden_size": 64}, "num_hidden_layers"),
        ("mamba", {"num_hidden_layers": 2, "hidden_size": float("nan")}, "hidden_size"),
        ("mamba", {"num_hidden_layers": 2, "hidden_size": 64, "conv_kernel": 1}, "convolution"),
        (
            "mistral",
            {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "sliding_window": 0},
            "window",
        ),
        ("gemma2", {"num_hidden_layers": 3, "layer_types": ["full_attention"] * 2}, "names 2 layers"),
        ("gemma2", {"num_hidden_layers": 3, "layer_types": "full_attention"}, "layer_types"),
        ("gemma2", {"num_hidden_layers": 2, "dtype": "float31"}, "dtype"),
        ("bamba", {"num_hidden_layers": 2, "hidden_size": 64, "attn_layer_indices": 1}, "attn_layer_indices"),
        (
            "kimi_linear",
            {"num_hidden_layers": 3, "linear_attn_config": {"full_attn_layers": [3], "kda_layers": [1]}},
            "layer 2 is neither",
        ),
        ("lfm2", {"num_hidden_layers": 2, "full_attn_idxs": 1}, "full_attn_idxs"),
        ("lfm2_moe", {"num_hidden_layers": 2}, "layer_types"),
        ("lfm2", {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "conv_L_cache": 1}, "width"),
        ("zamba2", {"num_hidden_layers": 38, "hidden_size": 64}, "layers_block_type"),
        ("nemotron_h", {"num_hidden_layers": 2}, "hybrid_override_pattern"),
        ("nemotron_h", {"hybrid_override_pattern": "MX"}, "letters X"),
        ("nemotron_h", {"hybrid_override_pattern": "MM", "num_hidden_layers": 3}, "names 2 layers"),
    ],
)
def test_missing_and_impossible_fields_are_named(model_type: str, fields: dict[str, Any], named: str) -> None:
    with pytest.raises(MalformedConfig, match=named):
        entries_of(model_type, {"model_type": model_type, **fields})


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"layer_types": ["full_attention", "chunked_attention"]}, r"layer 1 .*'gemma2'.*'chunked_attention'"),
        ({"use_bidirectional_attention": True}, "bidirectional"),
        ({"per_layer_config": {"0": {"head_dim": 8}}}, "per_layer_config"),
    ],
)
def test_layers_that_cannot_be_served_are_named(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedModel, match=named):
        entries_of("gemma2", {"model_type": "gemma2", "num_hidden_layers": 2, **fields})


def test_a_config_object_with_sizes_by_layer_is_refused() -> None:
    config = tiny_config("llama")
    config.per_layer_config = {0: {"num_key_value_heads": 1}}
    with pytest.raises(UnsupportedModel, match="per_layer_config"):
        entries_of("llama", config)
