"""Model families: what every layer of a Hugging Face model type stores between tokens.

One module per model type. Each has

    entries(config, dtype=None, state_dtype="float32") -> tuple[CacheEntry, ...]
        from a transformers config object or the raw fields of a config.json;
    tiny_config() -> PreTrainedConfig
        a model of that type small enough for tests, with every kind of layer the type has.

and may have

    MODE = "single"
        its layers cannot share a forward pass with other requests: one request a pass;
    NOTE: str
        what a reader of docs/models.md should know.

Nothing here imports torch or transformers until `tiny_config` is called. `presets/` holds the configs of real models.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib import import_module
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast

from hybridkv.entries import CacheEntry
from hybridkv.errors import UnknownPreset

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

__all__ = ["Family", "Mode", "family", "load_preset", "mode", "model_types", "note", "preset_names"]

Mode = Literal["packed", "single"]
"""Whether one forward pass computes tokens of many requests, or of one."""

_MODULES: Mapping[str, str] = {
    "afmoe": "afmoe",
    "axk2": "axk2",
    "bailing_hybrid": "bailing_hybrid",
    "bamba": "bamba",
    "cohere2": "cohere2",
    "cohere2_moe": "cohere2_moe",
    "cwm": "cwm",
    "deepseek_v32": "deepseek_v32",
    "exaone4": "exaone4",
    "exaone_moe": "exaone_moe",
    "falcon_h1": "falcon_h1",
    "falcon_mamba": "falcon_mamba",
    "gemma2": "gemma2",
    "gemma3": "gemma3",
    "gemma3_text": "gemma3",
    "gemma3n": "gemma3n",
    "gemma3n_text": "gemma3n",
    "gemma4": "gemma4",
    "gemma4_text": "gemma4",
    "glm_moe_dsa": "glm_moe_dsa",
    "gpt_oss": "gpt_oss",
    "granite_swa": "granite_swa",
    "granitemoe_swa": "granitemoe_swa",
    "granitemoehybrid": "granitemoehybrid",
    "hy_v4": "hy_v4",
    "inkling_text": "inkling",
    "jamba": "jamba",
    "kimi_linear": "kimi_linear",
    "lara_mini": "lara_mini",
    "lfm2": "lfm2",
    "lfm2_moe": "lfm2_moe",
    "lfm3": "lfm3",
    "llama": "llama",
    "llama4": "llama4",
    "llama4_text": "llama4",
    "mamba": "mamba",
    "mamba2": "mamba2",
    "mimo_v2_flash": "mimo_v2_flash",
    "minimax": "minimax",
    "ministral": "ministral",
    "mistral": "mistral",
    "nemotron_h": "nemotron_h",
    "olmo3": "olmo3",
    "olmo_hybrid": "olmo_hybrid",
    "qwen3_5": "qwen3_5",
    "qwen3_5_moe": "qwen3_5_moe",
    "qwen3_5_moe_text": "qwen3_5_moe",
    "qwen3_5_text": "qwen3_5",
    "qwen3_next": "qwen3_next",
    "vaultgemma": "vaultgemma",
    "zamba": "zamba",
    "zamba2": "zamba2",
    "zaya": "zaya",
}


class Family(Protocol):
    """What a family module offers."""

    def entries(self, config: Any, dtype: str | None = None, state_dtype: str = "float32") -> tuple[CacheEntry, ...]:
        """What every layer of the model stores.

        Args:
            config: a transformers config object, or the mapping a config.json holds.
            dtype: of K, V and conv states; the config's own by default.
            state_dtype: of the recurrent states.

        Raises:
            MalformedConfig: a field is missing or impossible.
            UnsupportedModel: a layer kind that cannot be served.
        """
        ...

    def tiny_config(self) -> PreTrainedConfig:
        """A config of at least four layers that builds, with random weights, in well under a second."""
        ...


def model_types() -> tuple[str, ...]:
    """The model types with a family, sorted."""
    return tuple(sorted(_MODULES))


def family(model_type: str) -> Family | None:
    """The module that describes a model type, or None if there is none."""
    name = _MODULES.get(model_type)
    return None if name is None else cast(Family, import_module(f"hybridkv_models.{name}"))


def mode(model_type: str) -> Mode:
    """How forward passes of a model type are run; "packed" unless its family says otherwise."""
    return cast(Mode, getattr(family(model_type), "MODE", "packed"))


def note(model_type: str) -> str:
    """What a family says beside its entries, possibly nothing."""
    return str(getattr(family(model_type), "NOTE", ""))


def preset_names() -> tuple[str, ...]:
    """The names of the bundled configs, sorted."""
    presets = files("hybridkv_models") / "presets"
    return tuple(sorted(item.name.removesuffix(".json") for item in presets.iterdir() if item.name.endswith(".json")))


def load_preset(name: str) -> dict[str, Any]:
    """The fields of a bundled config.

    Raises:
        UnknownPreset: there is none of that name.
    """
    if name not in preset_names():
        raise UnknownPreset(f"no preset {name!r}; there are {', '.join(preset_names())}")
    text = (files("hybridkv_models") / "presets" / f"{name}.json").read_text(encoding="utf-8")
    return cast(dict[str, Any], json.loads(text))
