"""Models by name: a folder, the tiny model that comes with the package, or a name on the Hugging Face hub."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any, NamedTuple

import hybridkv_models
from hybridkv.catalog import read_config
from hybridkv.cli.console import one_line
from hybridkv.errors import ConfigError, UnknownPreset

_HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?", re.ASCII)
_HUB_TIMEOUT_S = 10.0
_EMBEDDED = {"tiny-jamba": "tiny_jamba", "tiny_jamba": "tiny_jamba"}


class Loaded(NamedTuple):
    """A model in eval mode and its tokenizer."""

    model: Any
    tokenizer: Any


def embedded(name: str) -> Path | None:
    """The folder of a model that comes with the package, None for any other name."""
    folder = _EMBEDDED.get(name)
    return Path(hybridkv_models.__file__).parent / folder if folder else None


def config_source(name: str) -> Any:
    """What `layer_groups` takes for a model's name: a preset, a path, or a config from the hub.

    Raises:
        UnknownPreset: a name the hub does not have, or that cannot be looked up.
    """
    folder = embedded(name)
    if folder is not None:
        return folder
    if name in hybridkv_models.preset_names() or Path(name).exists() or "/" not in name:
        return name
    if not _HUB_NAME.fullmatch(name):
        return name
    _check_hub(name)
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(name)
    except Exception as error:
        raise ConfigError(f"cannot read the config of {name}: {one_line(str(error), 200)}") from error


def load(name: str, device: str = "auto", dtype: str = "auto") -> Loaded:
    """Load a model's weights and tokenizer, with progress on stderr if that is a terminal.

    Args:
        name: a folder with config.json, "tiny-jamba", or a name on the hub.
        device: "cpu", "cuda", ... or "auto".
        dtype: of the weights, by name; "auto" is the one they were saved in.

    Raises:
        ConfigError: no such model, or one that cannot be loaded.
    """
    source = str(embedded(name) or name)
    if Path(source).is_dir():
        read_config(Path(source))
    elif Path(source).exists():
        raise ConfigError(f"{name} is a file; name the folder that holds config.json and the weights")
    elif name in hybridkv_models.preset_names():
        raise ConfigError(f"{name} is a preset: a layout without weights, for `hybridkv memory`; name a model folder")
    elif not _HUB_NAME.fullmatch(name):
        raise UnknownPreset(f"no model folder named {name!r}")
    else:
        _check_hub(name)
    return _load(source, device, dtype)


def _load(source: str, device: str, dtype: str) -> Loaded:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()
    if not sys.stderr.isatty():
        logging.disable_progress_bar()
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype).eval().to(torch.device(device))
    except Exception as error:
        raise ConfigError(f"cannot load the model {source}: {one_line(str(error), 200)}") from error
    try:
        tokenizer = AutoTokenizer.from_pretrained(source)
    except Exception as error:
        raise ConfigError(f"cannot load the tokenizer of {source}: {one_line(str(error), 200)}") from error
    return Loaded(model, tokenizer)


def _check_hub(name: str) -> None:
    """Whether a model is in the local hub cache or on the hub, asked once and without retries."""
    from huggingface_hub import HfApi, try_to_load_from_cache

    try:
        if not isinstance(try_to_load_from_cache(name, "config.json"), str):
            HfApi().model_info(name, timeout=_HUB_TIMEOUT_S)
    except Exception as error:
        raise UnknownPreset(
            f"no folder named {name!r}, and the Hugging Face hub did not give a model of that name "
            f"({one_line(str(error).strip() or type(error).__name__, 150)})"
        ) from error
