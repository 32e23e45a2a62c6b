"""From any source of a config to layer groups, and every way that can fail."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hybridkv.catalog import layer_groups, model_entries, read_config
from hybridkv.entries import group_entries
from hybridkv.errors import ConfigError, MalformedConfig, UnknownPreset, UnsupportedModel
from hybridkv_models import family, load_preset, preset_names

# From the reference layouts: group name -> (layers, shapes of the parts).
LAYOUTS: dict[str, dict[str, tuple[int, list[tuple[int, ...]]]]] = {
    "jamba-1.5-mini": {
        "full_attention": (4, [(8, 128), (8, 128)]),
        "linear_attention": (28, [(8192, 3), (8192, 16)]),
    },
    "gemma-3-12b": {
        "full_attention": (8, [(8, 256), (8, 256)]),
        "sliding_attention_1024": (40, [(8, 256), (8, 256)]),
    },
    "qwen3-next-80b-a3b": {
        "full_attention": (12, [(2, 256), (2, 256)]),
        "linear_attention": (36, [(8192, 3), (32, 128, 128)]),
    },
    "gpt-oss-20b": {
        "full_attention": (12, [(8, 64), (8, 64)]),
        "sliding_attention_128": (12, [(8, 64), (8, 64)]),
    },
    "nemotron-h-8b": {
        "full_attention": (4, [(8, 128), (8, 128)]),
        "linear_attention": (24, [(10240, 3), (128, 64, 128)]),
    },
    "gemma-3-270m": {
        "full_attention": (3, [(1, 256), (1, 256)]),
        "sliding_attention_512": (15, [(1, 256), (1, 256)]),
    },
    "llama-3.1-8b": {"full_attention": (32, [(8, 128), (8, 128)])},
}


@pytest.mark.parametrize("name", preset_names())
def test_presets_have_the_reference_layouts(name: str) -> None:
    found = {group.name: (group.layers, [part.shape for part in group.parts]) for group in layer_groups(name)}
    assert found == LAYOUTS[name]


def test_attention_layers_are_where_the_models_have_them() -> None:
    def full(name: str) -> list[int]:
        (group,) = (group for group in layer_groups(name) if group.kind == "full_attention")
        return [entry.layer for entry in group.entries]

    assert full("jamba-1.5-mini") == [4, 12, 20, 28]
    assert full("gemma-3-270m") == [5, 11, 17]
    assert full("gemma-3-12b") == list(range(5, 48, 6))
    assert full("gpt-oss-20b") == list(range(1, 24, 2))
    assert full("qwen3-next-80b-a3b") == list(range(3, 48, 4))
    assert full("nemotron-h-8b") == [7, 18, 29, 40]


def test_every_source_gives_the_same_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = family("gemma3_text")
    assert known is not None
    config = known.tiny_config()
    config.save_pretrained(tmp_path)
    expected = layer_groups(config)
    assert len(expected) == 2
    assert layer_groups(config.to_dict()) == expected
    assert layer_groups(tmp_path) == layer_groups(str(tmp_path)) == expected
    assert layer_groups(tmp_path / "config.json") == expected
    monkeypatch.setenv("HOME", str(tmp_path.parent))
    assert layer_groups(f"~/{tmp_path.name}") == expected
    assert group_entries(model_entries(config)) == expected


def test_options_reach_the_groups() -> None:
    token, state = sorted(layer_groups("qwen3-next-80b-a3b", 64, dtype="float16", state_dtype="bfloat16"), key=str)
    assert token.page_tokens == 64
    assert [part.dtype for part in (*token.parts, *state.parts)] == ["float16", "float16", "float16", "bfloat16"]


def test_a_preset_is_read_as_its_fields_and_an_object_as_itself() -> None:
    assert read_config("llama-3.1-8b") == load_preset("llama-3.1-8b")
    config = SimpleNamespace(model_type="llama")
    assert read_config(config) is config


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("gemma-3-12", "did you mean 'gemma-3-12b'"),
        ("JAMBA-1.5-MINI", "did you mean 'jamba-1.5-mini'"),
        ("", "Presets"),
    ],
)
def test_an_unknown_preset_lists_the_known_ones(name: str, hint: str) -> None:
    with pytest.raises(UnknownPreset) as caught:
        layer_groups(name)
    assert hint in str(caught.value)
    assert all(known in str(caught.value) for known in preset_names())


def test_a_name_on_a_hub_is_not_looked_up() -> None:
    with pytest.raises(UnknownPreset, match="not looked up: pass a folder"):
        layer_groups("some-org/some-model")


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("{", "no JSON text"),
        ("", "no JSON text"),
        ("[" * 100_000, "no JSON text"),
        ("[1]", "a JSON list"),
        ("null", "a JSON NoneType"),
        ("{}", "'model_type' is missing"),
        ('{"model_type": 7}', "'model_type' is missing"),
        ('{"model_type": "mamba", "hidden_size": 64}', "'num_hidden_layers', which is missing"),
        ('{"model_type": "mamba", "hidden_size": 64, "num_hidden_layers": NaN}', "'num_hidden_layers' must be"),
    ],
)
def test_a_malformed_file_is_named_with_the_field(tmp_path: Path, text: str, named: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    for source in (path, str(path), tmp_path):
        with pytest.raises(MalformedConfig) as caught:
            layer_groups(source)
        assert str(tmp_path) in str(caught.value)
        assert named in str(caught.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(MalformedConfig, match="no such file"):
        layer_groups(tmp_path / "absent.json")
    with pytest.raises(MalformedConfig, match="no such file"):
        layer_groups(tmp_path)
    with pytest.raises(MalformedConfig, match="no such file"):
        layer_groups("./absent/config.json")
    binary = tmp_path / "model.bin"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(MalformedConfig, match="no JSON text"):
        layer_groups(binary)


@pytest.mark.parametrize("source", [None, 7, object(), SimpleNamespace(model_type=None), {}])
def test_a_source_that_is_no_config(source: Any) -> None:
    with pytest.raises(MalformedConfig, match="'model_type' is missing"):
        layer_groups(source)


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"model_type": "v", "layer_types": ["hybrid"] * 4}, ["'v'", "kind 'hybrid'"]),
        ({"model_type": "w", "layer_types": ["conv", "full_attention"]}, ["'w'", "kind 'conv',"]),
        (
            {"model_type": "x", "text_config": {"layer_types": ["minimax_m3_sparse", "moe"]}},
            ["kind 'minimax_m3_sparse',"],
        ),
        ({"model_type": "y", "layer_types": ["full_attention"]}, ["'y'", "(full_attention) store"]),
        ({"model_type": "recurrent_gemma"}, ["linear_attention", "module attributes"]),
        ({"model_type": "deepseek_v4"}, ["compressed_sparse_attention", "running buffers"]),
        ({"model_type": "qwen4_exp_text"}, ["indexed_attention", "token ids"]),
        ({"model_type": "bert"}, ["'bert'", "nothing describes"]),
    ],
)
def test_an_unsupported_model_is_refused_with_the_kind_at_fault(config: dict[str, Any], named: list[str]) -> None:
    for source in (config, SimpleNamespace(**config)):
        with pytest.raises(UnsupportedModel) as caught:
            model_entries(source)
        assert all(words in str(caught.value) for words in [*named, "jamba", "gemma3"]), str(caught.value)


def test_page_sizes_and_dtypes_are_checked() -> None:
    with pytest.raises(ConfigError, match="at least 1 token"):
        layer_groups("llama-3.1-8b", 0)
    with pytest.raises(ConfigError, match="unknown dtype 'int3'"):
        layer_groups("llama-3.1-8b", dtype="int3")
    with pytest.raises(ConfigError, match="unknown dtype 'int3'"):
        layer_groups("jamba-1.5-mini", state_dtype="int3")


def test_unused_fields_do_not_matter() -> None:
    config = json.loads(json.dumps(load_preset("llama-3.1-8b")))
    assert layer_groups({**config, "rope_scaling": {"factor": 8.0}, "sliding_window": None}) == layer_groups(config)
