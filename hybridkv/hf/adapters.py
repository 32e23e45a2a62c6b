"""The adapters of PEFT that a model carries, by name: which there are, what they hold, and switching to one of them.

PEFT puts a layer of its own around every layer that an adapter changes. Those are known by the two attributes that
switch them, and a PeftModel by its `get_base_model`, so PEFT itself is never imported.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from hybridkv.errors import HybridKVError, RequestError, UnknownAdapter, UsageError
from hybridkv.hashing import Adapter
from hybridkv.hf.adapter_content import AdapterContent

METHODS = ("ADALORA", "FOURIERFT", "HRA", "IA3", "LOHA", "LOKR", "LORA", "OFT", "VERA")
"""Methods of PEFT whose layers treat every token by itself, and leave the model as it was when switched off."""

_OPTIONS = {
    "alora_invocation_tokens": "it starts at certain tokens of a prompt (activated LoRA), so what comes before is not "
    "its own",
    "arrow_config": "it mixes other adapters, whose weights its name says nothing about",
    "layer_replication": "it changes how many layers the model has",
}


def base_model(model: nn.Module) -> nn.Module:
    """The transformers model inside a PeftModel; any other model as it is."""
    if not hasattr(model, "get_base_model"):
        return model
    inner: Any = model.base_model
    found: nn.Module = inner if isinstance(inner, PreTrainedModel) else inner.model
    return found


@dataclass(frozen=True, slots=True)
class _Loaded:
    """An adapter as it was when its revision was computed."""

    config: object
    content: AdapterContent
    trace: list[object]
    revision: str


class Adapters:
    """The adapters of one model. They may come and go: every call looks at what is there.

    Args:
        model: a PeftModel, or a transformers model with or without adapters of its own.
    """

    def __init__(self, model: nn.Module) -> None:
        self._outer: Any = model
        self._base: Any = base_model(model)
        self._seen: dict[str, _Loaded] = {}
        self._configs_of_layers: list[object] = []
        self._layers: list[tuple[str, Any]] = []

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the adapters loaded now."""
        return tuple(self._configs())

    def key(self, name: str | None) -> tuple[str, str] | None:
        """The name and revision of an adapter: what tells its requests from all others in the cache.

        None stays None, the model without adapters.

        The revision is the SHA-256 of its config, weights and scalings. It is computed on first use and again when
        PEFT has loaded the name anew or torch has counted a change of a weight.

        Raises:
            UnknownAdapter: it is not loaded; the message names those that are.
            RequestError: it cannot be served, with the reason.
            UsageError: adapters are merged into the weights, so that this one cannot be computed.
        """
        self._check_merged(name)
        if name is None:
            return None
        config = self._servable(name)
        known = self._seen.get(name)
        if known is None or known.config is not config or known.content.trace() != known.trace:
            content = AdapterContent(name, self._tuned())
            known = self._seen[name] = _Loaded(config, content, content.trace(), content.digest(config))
        return name, known.revision

    def problem(self, adapter: Adapter | None) -> HybridKVError | None:
        """Why a request that was submitted with this key cannot go on, or None if it can."""
        name = adapter[0] if isinstance(adapter, tuple) else adapter
        try:
            self._check_merged(name)
            if name is None:
                return None
            config = self._servable(name)
            known = self._seen.get(name)
            if isinstance(adapter, tuple):
                key = (name, known.revision) if known and known.config is config else self.key(name)
                if key != adapter:
                    raise UnknownAdapter(
                        f"adapter {name!r} has other weights now than when the request was submitted; submit it again"
                    )
        except HybridKVError as error:
            return error
        return None

    @contextmanager
    def active(self, adapter: Adapter | None) -> Iterator[None]:
        """Have one adapter switched on, or none, until the end of a `with` block; then everything is as before.

        Raises:
            UsageError: adapters are merged into the weights, so that this one cannot be computed.
            UnknownAdapter: it is not loaded.
        """
        name = adapter[0] if isinstance(adapter, tuple) else adapter
        self._check_merged(name)
        if name is not None and name not in self._configs():
            raise self._unknown(name)
        layers = self._tuned()
        # The setters of PEFT would also change which weights take gradients.
        before = [(layer, layer._active_adapter, layer._disable_adapters) for _, layer in layers]
        try:
            for layer, active, _ in before:
                if name is not None:
                    # Copies of whole modules know whose they have; the others pass over a name they do not know.
                    active = [name] if name in vars(layer).get("_adapters", (name,)) else []
                _switch(layer, active, name is None)
            yield
        finally:
            for layer, active, disabled in before:
                _switch(layer, active, disabled)

    def _configs(self) -> Mapping[str, Any]:
        # Only methods that change no layer are kept by the PeftModel alone.
        found = getattr(self._base, "peft_config", None) or getattr(self._outer, "_peft_config", None)
        return found if isinstance(found, Mapping) else {}

    def _servable(self, name: str) -> Any:
        config = self._configs().get(name)
        if config is None:
            raise self._unknown(name)
        method = getattr(config, "peft_type", "?")
        method = str(getattr(method, "value", method))
        if getattr(config, "is_prompt_learning", False):
            raise RequestError(
                f"adapter {name!r} is of method {method}, which adds virtual tokens to every prompt instead of "
                f"changing layers, and no page knows of them; hybridkv serves {', '.join(METHODS)}"
            )
        if method not in METHODS:
            raise RequestError(
                f"adapter {name!r} is of method {method}, whose layers may depend on more than the token they compute; "
                f"hybridkv serves {', '.join(METHODS)}"
            )
        for option, reason in _OPTIONS.items():
            if getattr(config, option, None):
                raise RequestError(f"adapter {name!r} has {option} set: {reason}. Use the model's own generate()")
        if getattr(config, "bias", "none") != "none":
            raise RequestError(
                f"adapter {name!r} changes biases of the base model (bias={config.bias!r}), which stay when it is "
                "switched off; wrap the model that merge_and_unload() returns"
            )
        return config

    def _unknown(self, name: str) -> UnknownAdapter:
        names = ", ".join(map(repr, self.names))
        there = f"the model has {names}" if names else "the model has none"
        return UnknownAdapter(f"adapter {name!r} is not loaded; {there}. Load it with model.load_adapter()")

    def _check_merged(self, name: str | None) -> None:
        """Weights that hold an adapter compute that adapter and nothing else.

        Raises:
            UsageError: something else is wanted.
        """
        merged = {one for _, layer in self._tuned() for one in layer.merged_adapters}
        if merged - {name}:
            raise UsageError(
                f"{', '.join(map(repr, sorted(merged)))} merged into the model's weights, so "
                f"{'the base model' if name is None else f'adapter {name!r}'} cannot be computed; call "
                "unmerge_adapter(), or wrap the model that merge_and_unload() returns"
            )

    def _tuned(self) -> list[tuple[str, Any]]:
        """The layers PEFT has put into the model, by path; looked for again when adapters have come or gone."""
        configs = list(self._configs().values())
        known = self._configs_of_layers
        if len(configs) != len(known) or any(now is not then for now, then in zip(configs, known, strict=True)):
            found = self._base.named_modules()
            self._layers = [(path, module) for path, module in found if hasattr(module, "_disable_adapters")]
            self._configs_of_layers = configs
            self._seen = {name: one for name, one in self._seen.items() if any(one.config is c for c in configs)}
        return self._layers


def _switch(layer: Any, active: Any, disabled: bool) -> None:
    # Not by setattr, where a module looks for parameters first: this runs for every layer of every pass.
    vars(layer).update(_active_adapter=active, _disable_adapters=disabled)
