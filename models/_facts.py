"""Reading a model's config, as a transformers object or as the raw fields of a config.json, in one way.

Raw files leave out what equals the default of their transformers config class; each family states those defaults.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hybridkv.entries import ITEM_BYTES
from hybridkv.errors import ConfigError, MalformedConfig, UnsupportedModel

Config = Any
"""A transformers config object, or the mapping a config.json holds."""

DEFAULT_DTYPE = "float32"
"""What transformers builds from a config that names no dtype."""

MAX_SIZE = 2**31 - 1
"""A larger size in a config is a typing error."""

MAX_LAYERS = 10_000
"""More layers than this are a typing error."""

_LEGACY_KINDS: Mapping[str, str] = {"attention": "full_attention", "mamba": "linear_attention"}


class Facts:
    """The decoder's fields of one config.

    Attributes:
        model_type: as the config spells it.
        dtype: of K, V and conv states, by name ("bfloat16").
    """

    def __init__(self, config: Config, family: str, dtype: str | None = None, *, by_layer: bool = False) -> None:
        """Read a config.

        Args:
            config: a transformers config object, or the mapping a config.json holds.
            family: the model type, where the config names none.
            dtype: of K, V and conv states; the config's own by default.
            by_layer: the family asks `of_layer` for every size that single layers may override.

        Raises:
            UnsupportedModel: single layers override sizes, and the family does not ask for them.
            MalformedConfig: the config's dtype is none.
        """
        self._decoder = decoder_of(config)
        self.model_type = str(field_of(config, "model_type") or family)
        self.dtype = dtype_name(dtype) if dtype is not None else _config_dtype(self._decoder, config)
        if not by_layer and _has_layer_overrides(self._decoder):
            raise UnsupportedModel(
                f"this {self.model_type!r} model overrides sizes for single layers (per_layer_config), which hybridkv "
                "does not read; build its cache entries by hand and pass them to hybridkv.group_entries()"
            )

    def get(self, name: str, default: Any = None) -> Any:
        """A field, or `default` where the config has none. A field that says null is None."""
        return field_of(self._decoder, name, default)

    def size(self, name: str, default: int | None = None, *, least: int = 1) -> int:
        """A field that counts something: an integer of at least `least`. Null or absent is the default.

        Raises:
            MalformedConfig: no value and no default, or a value that is no such integer.
        """
        value = self.get(name)
        if value is None:
            if default is None:
                raise MalformedConfig(f"model type {self.model_type!r} needs the field {name!r}, which is missing")
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= MAX_SIZE:
            raise MalformedConfig(f"field {name!r} must be an integer from {least} to {MAX_SIZE:,}, got {value!r}")
        return value

    def layers(self) -> int:
        """`num_hidden_layers`.

        Raises:
            MalformedConfig: it is missing, or no number of layers.
        """
        layers = self.size("num_hidden_layers")
        if layers > MAX_LAYERS:
            raise MalformedConfig(f"field 'num_hidden_layers' must be at most {MAX_LAYERS:,}, got {layers:,}")
        return layers

    def head_dim(self, hidden_size: int | None = None, heads: int | None = None) -> int:
        """`head_dim`, or the hidden size shared out to the attention heads; both may have defaults."""
        if self.get("head_dim") is not None:
            return self.size("head_dim")
        return self.size("hidden_size", hidden_size) // self.size("num_attention_heads", heads)

    def of_layer(self, layer: int, otherwise: Mapping[str, Any]) -> Facts:
        """The fields as one layer sees them (`per_layer_config`).

        Args:
            layer: its index.
            otherwise: what the layer overrides where a raw config has no `per_layer_config`.

        Raises:
            MalformedConfig: `per_layer_config` is no mapping of layers to fields.
            UnsupportedModel: the layer leaves out parts of itself.
        """
        if isinstance(self._decoder, Mapping):
            view: Config = {**self._decoder, **self._raw_overrides(layer, otherwise), "per_layer_config": None}
        else:
            view = self._decoder.per_layer_config[layer]
        facts = Facts(view, self.model_type, self.dtype)
        if facts.get("skip"):
            raise UnsupportedModel(
                f"layer {layer} of this {self.model_type!r} model skips {', '.join(map(str, facts.get('skip')))} "
                "(per_layer_config), which hybridkv does not read; build its cache entries by hand and pass them to "
                "hybridkv.group_entries()"
            )
        return facts

    def _raw_overrides(self, layer: int, otherwise: Mapping[str, Any]) -> Mapping[str, Any]:
        listed = self.get("per_layer_config", {layer: otherwise})
        try:
            return next((dict(fields) for key, fields in (listed or {}).items() if int(key) == layer), {})
        except (AttributeError, TypeError, ValueError) as error:
            raise MalformedConfig(f"field 'per_layer_config' must map layers to fields, got {listed!r}") from error

    def layer_kinds(self, name: str, otherwise: Callable[[int], str]) -> tuple[str, ...]:
        """The layer type of every layer, in Hugging Face's spelling.

        Args:
            name: the field that lists them.
            otherwise: the layer type of layer i where the config has no such list.

        Raises:
            MalformedConfig: the list is no list of names or does not have one for each layer.
        """
        listed = self.get(name)
        if listed is None:
            return tuple(otherwise(i) for i in range(self.layers()))
        if not isinstance(listed, Sequence) or isinstance(listed, str) or not all(isinstance(x, str) for x in listed):
            raise MalformedConfig(f"field {name!r} must be a list of layer types, got {listed!r}")
        layers = self.size("num_hidden_layers", len(listed))
        if len(listed) != layers:
            raise MalformedConfig(f"field {name!r} names {len(listed)} layers, but 'num_hidden_layers' is {layers}")
        return tuple(_LEGACY_KINDS.get(kind, kind) for kind in listed)


def decoder_of(config: Config) -> Config:
    """The text model's part of a config: its `text_config` where it has one, else the config itself."""
    nested = field_of(config, "text_config")
    return config if nested is None else nested


def field_of(config: Config, name: str, default: Any = None) -> Any:
    """One field of a config object or of raw fields; `default` where it has none."""
    if isinstance(config, Mapping):
        return config.get(name, default)
    return getattr(config, name, default)


def dtype_name(dtype: Any) -> str:
    """The name of a dtype given as text or as a torch dtype: "bfloat16".

    Raises:
        ConfigError: no dtype a pool can hold.
    """
    name = str(dtype).removeprefix("torch.")
    if name not in ITEM_BYTES:
        raise ConfigError(f"unknown dtype {dtype!r}; known are {', '.join(ITEM_BYTES)}")
    return name


def _has_layer_overrides(decoder: Config) -> bool:
    if isinstance(decoder, Mapping):
        return bool(decoder.get("per_layer_config"))
    return getattr(decoder, "is_heterogeneous", False) is True


def _config_dtype(*configs: Config) -> str:
    for config in configs:
        # Config objects warn when asked for the old name; raw files may have either.
        for name in ("dtype", "torch_dtype") if isinstance(config, Mapping) else ("dtype",):
            value = field_of(config, name)
            if value is not None and value != "auto":
                try:
                    return dtype_name(value)
                except ConfigError as error:
                    raise MalformedConfig(f"field {name!r}: {error}") from error
    return DEFAULT_DTYPE
