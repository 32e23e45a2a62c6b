"""From a model's config to its layer groups: a transformers config, a config.json, or the name of a preset."""

from __future__ import annotations

import json
from collections.abc import Mapping
from difflib import get_close_matches
from os import PathLike
from pathlib import Path
from typing import Any

# The module, not its names: whichever of the two packages is imported first, the other is only half there.
import hybridkv_models as models
from hybridkv.entries import CacheEntry, LayerGroup, group_entries
from hybridkv.errors import MalformedConfig, UnknownGroupKind, UnknownPreset, UnsupportedModel
from hybridkv.rules import group_kind

Source = Any
"""A transformers config object, the mapping a config.json holds, a path to one or to its folder, or a preset's name."""

_STATELESS = ("mlp", "moe", "dummy")

# Types whose layer kinds look ordinary, but whose layers keep them where no cache can reach.
_OUT_OF_REACH: Mapping[str, str] = {
    "deepseek_v4": (
        "its heavily_compressed_attention and compressed_sparse_attention layers keep running buffers of compressed "
        "keys inside transformers' own cache, whose sizes depend on how the tokens came in"
    ),
    "recurrent_gemma": "its linear_attention layers keep their states as module attributes",
    **dict.fromkeys(
        ("qwen4_exp", "qwen4_exp_text"),
        "its indexed_attention layers keep positions, and its n-gram layers token ids, inside transformers' own cache, "
        "where no page can hold them",
    ),
}


def layer_groups(
    source: Source,
    page_tokens: int | Mapping[str, int] = 16,
    *,
    dtype: str | None = None,
    state_dtype: str = "float32",
) -> tuple[LayerGroup, ...]:
    """The layer groups of a model.

    Args:
        source: a transformers config object, the fields of a config.json as a mapping, a path to a config.json or to
            the folder that holds one, or the name of a preset.
        page_tokens: tokens per attention page, one number or one per kind.
        dtype: of K, V and conv states, by name; the config's own by default.
        state_dtype: of recurrent states.

    Raises:
        UnknownPreset: text that is neither a preset nor a path.
        MalformedConfig: a config that cannot be read, or that lacks a field its model type needs.
        UnsupportedModel: a model type, or a kind of layer, that cannot be served.
        ConfigError: a page size below 1, or an unknown dtype.
    """
    config = read_config(source)
    try:
        entries = model_entries(config, dtype, state_dtype)
    except MalformedConfig as error:
        raise MalformedConfig(f"{_origin(source)}: {error}") from error
    return group_entries(entries, page_tokens)


def model_entries(config: Any, dtype: str | None = None, state_dtype: str = "float32") -> tuple[CacheEntry, ...]:
    """What every layer of a model stores.

    Args:
        config: a transformers config object, or the fields of a config.json as a mapping.
        dtype: of K, V and conv states, by name; the config's own by default.
        state_dtype: of recurrent states.

    Raises:
        MalformedConfig: the config lacks a field its model type needs.
        UnsupportedModel: its model type, or one of its layers, cannot be served.
    """
    model_type = _field(config, "model_type")
    if not isinstance(model_type, str) or not model_type:
        raise MalformedConfig("the field 'model_type' is missing, so nothing says which architecture this is")
    known = models.family(model_type)
    if known is None:
        raise UnsupportedModel(_refusal(model_type, config))
    return known.entries(config, dtype, state_dtype)


def read_config(source: Source) -> Any:
    """The config behind a source: an object or mapping as it is, a file or preset as the mapping it holds.

    Raises:
        UnknownPreset: text that is neither a preset nor a path.
        MalformedConfig: a file that is missing, unreadable, or no JSON object.
    """
    if not isinstance(source, str | PathLike):
        return source
    if isinstance(source, str) and source in models.preset_names():
        return models.load_preset(source)
    path = Path(source).expanduser()
    if isinstance(source, str) and not _looks_like_path(source) and not (source and path.exists()):
        raise UnknownPreset(_no_preset(source))
    return _read_json(path / "config.json" if path.is_dir() else path)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise MalformedConfig(f"{path}: no such file; name a config.json, the folder that holds it, or a preset") from (
            error
        )
    except OSError as error:
        raise MalformedConfig(f"{path}: cannot be read: {error.strerror or error}") from error
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise MalformedConfig(f"{path}: is no JSON text: {error}") from error
    if not isinstance(fields, dict):
        raise MalformedConfig(f"{path}: holds a JSON {type(fields).__name__}, not an object with a config's fields")
    return fields


def _looks_like_path(text: str) -> bool:
    return text.endswith(".json") or text.startswith((".", "/", "~", "\\"))


def _no_preset(name: str) -> str:
    names = models.preset_names()
    close = get_close_matches(name.lower(), names, n=1, cutoff=0.5)
    hint = f"did you mean {close[0]!r}? " if close else ""
    hub = "Names on a model hub are not looked up: pass a folder with its config.json. " if "/" in name else ""
    return f"no preset, file or folder named {name!r}; {hint}{hub}Presets: {', '.join(names)}"


def out_of_reach(model_type: str) -> str | None:
    """Why no model of a type can be served, although its layers may look ordinary; None where nothing is known."""
    return _OUT_OF_REACH.get(model_type)


def _refusal(model_type: str, config: Any) -> str:
    supported = f"Supported model types: {', '.join(models.model_types())}"
    if model_type in _OUT_OF_REACH:
        return f"model type {model_type!r} cannot be served: {_OUT_OF_REACH[model_type]}. {supported}"
    kinds = _kinds(config)
    unknown = [kind for kind in kinds if not _is_registered(kind)]
    if unknown:
        reason = f"it has layers of kind {', '.join(map(repr, unknown))}, which hybridkv cannot serve"
    elif kinds:
        reason = f"nothing describes what its layers ({', '.join(kinds)}) store"
    else:
        reason = "nothing describes what its layers store"
    return (
        f"model type {model_type!r} is not supported: {reason}. {supported}. "
        "A loaded model of another type may be served as it is, by hybridkv.wrap(model); to plan for one by its "
        "config, describe its layers in hybridkv_models (docs/models.md)"
    )


def _kinds(config: Any) -> list[str]:
    """The distinct layer types a config lists, as far as it lists any."""
    decoder = _field(config, "text_config") or config
    for name in ("layer_types", "layers_block_type"):
        listed = _field(decoder, name)
        if isinstance(listed, list | tuple) and listed:
            return sorted({str(kind) for kind in listed} - set(_STATELESS))
    return []


def _is_registered(kind: str) -> bool:
    try:
        group_kind(kind)
    except UnknownGroupKind:
        return False
    return True


def _field(config: Any, name: str) -> Any:
    return config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)


def _origin(source: Source) -> str:
    if isinstance(source, str | PathLike):
        return str(source)
    return f"config of type {type(source).__name__}"
