"""What a model's layers keep for one adapter: a digest that tells contents apart, and a cheap look for changes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hybridkv.errors import RequestError


class _Place(NamedTuple):
    """A value by the mapping that holds it, so that a value put in its place is seen."""

    path: str
    held_in: Mapping[str, Any]
    key: str


class AdapterContent:
    """Modules, tensors and plain values that layers of PEFT keep under an adapter's name.

    Args:
        name: of the adapter.
        layers: the layers PEFT has put into the model, by path.
    """

    def __init__(self, name: str, layers: Sequence[tuple[str, Any]]) -> None:
        self._name = name
        self._places = [place for path, layer in layers for place in _places(name, path, layer)]

    def trace(self) -> list[object]:
        """Differs from an earlier one if a value was replaced, or changed in a way that torch counts."""
        return [_seen(place.held_in.get(place.key)) for place in self._places]

    def digest(self, config: Any) -> str:
        """SHA-256 of the adapter's config and of all that is kept.

        Raises:
            RequestError: weights that are not there, or dropout in training mode.
        """
        digest = hashlib.sha256(json.dumps(config.to_dict(), sort_keys=True, default=_ordered).encode())
        for path, held_in, key in self._places:
            value = held_in[key]
            self._check(value)
            tensor = isinstance(value, Tensor)
            kind = f"{value.dtype} {tuple(value.shape)}" if tensor else type(value).__name__
            plain = None if isinstance(value, Tensor | nn.Module) else repr(value)
            digest.update(json.dumps([path, kind, plain]).encode())
            if tensor:
                digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
        return digest.hexdigest()

    def _check(self, value: Any) -> None:
        if isinstance(value, Tensor) and value.is_meta:
            raise RequestError(f"adapter {self._name!r} has no weights yet (device 'meta'); load them first")
        if isinstance(value, nn.modules.dropout._DropoutNd) and value.training and value.p:
            raise RequestError(
                f"the dropout of adapter {self._name!r} is in training mode; call model.eval() after loading it"
            )


def _places(name: str, path: str, layer: Any) -> Iterator[_Place]:
    for attribute in (*layer.adapter_layer_names, *layer.other_param_names):
        kept = attrgetter(attribute)(layer)
        if not hasattr(kept, "keys") or name not in kept:
            continue
        where = f"{path}.{attribute}"
        for held_in in _mappings(kept) if isinstance(kept, nn.Module) else (kept,):
            if name in held_in:
                yield _Place(where, held_in, name)
        if isinstance(kept[name], nn.Module):
            for below, module in kept[name].named_modules():
                for held_in in _mappings(module):
                    yield from (_Place(f"{where}.{below}.{key}", held_in, key) for key in held_in)


def _mappings(module: nn.Module) -> tuple[Mapping[str, Any], ...]:
    return module._modules, module._parameters, module._buffers


def _seen(value: Any) -> object:
    if isinstance(value, Tensor):
        return id(value), value.data_ptr(), 0 if value.is_inference() else value._version
    return id(value) if isinstance(value, nn.Module) else value


def _ordered(value: Any) -> Any:
    """Sets have no order that stays the same from one process to the next."""
    return sorted(map(str, value)) if isinstance(value, set | frozenset) else str(value)
