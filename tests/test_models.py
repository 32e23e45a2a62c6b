"""Model families: what they declare against what transformers really stores, from objects and from raw fields."""

import re
import subprocess
import sys
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

import hybridkv_models
from hybridkv.entries import CacheEntry
from hybridkv.errors import UnknownPreset
from hybridkv_models import family, load_preset, mode, model_types, preset_names
from tests.model_cases import entries_of, tiny_config

TOKENS = 41
MODEL_TYPES = model_types()
PACKED = [model_type for model_type in MODEL_TYPES if mode(model_type) == "packed"]
"""The others are in test_hf_single.py."""
MIXED = {
    "afmoe",
    "bailing_hybrid",
    "bamba",
    "cohere2",
    "cohere2_moe",
    "cwm",
    "exaone4",
    "exaone_moe",
    "falcon_h1",
    "gemma2",
    "gemma3",
    "gemma3_text",
    "gemma3n",
    "gemma3n_text",
    "gemma4",
    "gemma4_text",
    "gpt_oss",
    "granite_swa",
    "granitemoe_swa",
    "granitemoehybrid",
    "jamba",
    "kimi_linear",
    "lfm2",
    "lfm2_moe",
    "llama4",
    "llama4_text",
    "mimo_v2_flash",
    "ministral",
    "nemotron_h",
    "olmo3",
    "olmo_hybrid",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_5_moe_text",
    "qwen3_5_text",
    "qwen3_next",
    "vaultgemma",
    "zamba",
    "zamba2",
}
"""Types with entries of two kinds."""
LATENT = {"bailing_hybrid", "kimi_linear"}
"""Types whose full attention stores latents."""

MOST_MIXED = {"lara_mini", "lfm3"}
"""Types with entries of three kinds."""


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("model_type", PACKED)
def test_entries_are_what_a_real_cache_stores(model_type: str, dtype: str) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(model_type), dtype=getattr(torch, dtype)).eval()
    tokens = torch.randint(1, 128, (1, TOKENS))
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(tokens[:, :-1], cache=cache)
        model(tokens[:, -1:], cache=cache)
    declared = entries_of(model_type, model.config)
    for layer, stored in enumerate(cache.layers):
        known = [entry for entry in declared if entry.layer == layer]
        states = [entry for entry in known if entry.kind == "linear_attention"]
        tokens = [entry for entry in known if entry.kind != "linear_attention"]
        assert (not known) == cache.is_dummy[layer], f"layer {layer}: what is stored and what is declared"
        assert len(tokens) == (getattr(stored, "keys", None) is not None)
        assert len(states) == bool(getattr(stored, "conv_states", None))
        for entry in tokens:
            assert [part.name for part in entry.parts] == (["latent", "rope"] if model_type in LATENT else ["k", "v"])
            check_tokens(entry, stored, sliding=cache.is_sliding[layer])
        for entry in states:
            check_state(entry, stored)
    assert {entry.layer for entry in declared} <= set(range(len(cache.layers))), "layers the model does not have"


def check_tokens(entry: CacheEntry, stored: Any, *, sliding: bool) -> None:
    assert entry.kind in (("sliding_attention", "chunked_attention") if sliding else ("full_attention",))
    window = dict(entry.params).get("window", dict(entry.params).get("chunk", TOKENS + 1))
    for part, kept in zip(entry.parts, (stored.keys, stored.values), strict=True):
        heads, dim = part.shape
        assert kept.shape == (1, heads, min(TOKENS, window - 1), dim)
        assert str(kept.dtype) == f"torch.{part.dtype}"


def check_state(entry: CacheEntry, stored: Any) -> None:
    (conv,), (recurrent,) = stored.conv_states.values(), stored.recurrent_states.values()
    columns = entry.parts[0]
    assert conv.shape == (1, columns.shape[0], columns.shape[1] + 1), "transformers keeps one column more than matters"
    assert str(conv.dtype) == f"torch.{columns.dtype}"
    if recurrent is None:
        assert [part.name for part in entry.parts] == ["conv"]
    else:
        assert [part.name for part in entry.parts] == ["conv", "recurrent"]
        assert recurrent.shape == (1, *entry.parts[1].shape)
        assert str(recurrent.dtype) == f"torch.{entry.parts[1].dtype}"


@pytest.mark.parametrize("model_type", PACKED)
def test_a_tiny_config_is_tiny_and_has_what_its_family_has(model_type: str) -> None:
    config = tiny_config(model_type)
    known = entries_of(model_type, config)
    assert config.num_hidden_layers >= 4
    assert config.vocab_size <= 256
    kinds = {entry.kind for entry in known}
    assert len(kinds) == (3 if model_type in MOST_MIXED else 2 if model_type in MIXED else 1)
    for entry in known:
        if window := dict(entry.params).get("window"):
            assert window % 16, "a window inside a page finds more bugs than one at its edge"
        if entry.kind != "linear_attention":
            assert entry.parts[0].shape[0] < config.num_attention_heads, "grouped-query attention"


def test_unknown_names() -> None:
    assert family("no_such_type") is None
    with pytest.raises(UnknownPreset, match=r"'no-such-preset'.*jamba-1.5-mini"):
        load_preset("no-such-preset")


def test_every_reference_layout_has_a_preset() -> None:
    wanted = {"jamba-1.5-mini", "gemma-3-12b", "qwen3-next-80b-a3b", "gpt-oss-20b", "nemotron-h-8b", "gemma-3-270m"}
    assert wanted <= set(preset_names())


@pytest.mark.parametrize("name", preset_names())
def test_transformers_reads_every_preset_the_same_way(name: str) -> None:
    raw = load_preset(name)
    fields = {key: value for key, value in raw.items() if key != "model_type"}
    config = AutoConfig.for_model(raw["model_type"], **fields)
    assert entries_of(raw["model_type"], raw) == entries_of(raw["model_type"], config)
    text = config.get_text_config()
    assert text.vocab_size > 32000
    assert text.max_position_embeddings >= 8192


def test_families_are_described_without_torch() -> None:
    code = (
        "import sys, hybridkv_models as m\n"
        "for name in m.preset_names():\n"
        "    config = m.load_preset(name)\n"
        "    m.family(config['model_type']).entries(config)\n"
        "loaded = {'torch', 'transformers'} & set(sys.modules)\n"
        "sys.exit(f'imported {loaded}' if loaded else 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_exports() -> None:
    assert all(hasattr(hybridkv_models, name) for name in hybridkv_models.__all__)


def blocks_of_the_guide() -> list[str]:
    text = (Path(__file__).parents[1] / "docs" / "models.md").read_text(encoding="utf-8")
    return re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)


def test_the_worked_example_of_the_guide_is_the_family() -> None:
    assert blocks_of_the_guide()[0] == Path(str(files("hybridkv_models") / "olmo3.py")).read_text(encoding="utf-8")


def test_the_kind_registered_in_the_guide_works() -> None:
    done = subprocess.run([sys.executable, "-c", blocks_of_the_guide()[1]], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["[3", "4", "5", "6]"]
