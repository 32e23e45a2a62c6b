"""Mamba-1 continued from a cached state in a model's own forward pass, which stock transformers gets wrong.

Its mixers hand the scan no state, so a second multi-token pass starts from zeros and is silently off. Hooks around
each mixer put the cache's state where the wrapped scan finds it, for caches that offer one.
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn

from hybridkv.hf.mixers import resumed_states, source_modules

_PROJECTIONS = ("x_proj", "x_proj_weight")
"""What a Mamba-1 mixer computes dt, B and C with: a layer, or a weight for each of its heads."""


@runtime_checkable
class OffersScanState(Protocol):
    """A cache that knows where a scan starts."""

    def scan_state(self, layer: int, batch: int) -> Tensor:
        """The state of a layer before the tokens it is about to see, [batch, channels, N] or, of a mixer with several
        heads, [batch, heads, channels, N]; zeros at the start."""
        ...


class ScanHooks:
    """Hooks on the Mamba-1 mixers of a model until `close`."""

    def __init__(self, model: nn.Module) -> None:
        self._handles: list[Any] = []
        for module in model.modules():
            scans = any(hasattr(source, "mamba_selective_scan") for source in source_modules(module))
            if scans and hasattr(module, "layer_idx") and any(hasattr(module, name) for name in _PROJECTIONS):
                self._handles.append(module.register_forward_pre_hook(_before, with_kwargs=True))
                self._handles.append(module.register_forward_hook(_after, always_call=True))

    def close(self) -> None:
        """Remove the hooks. Calling it again changes nothing."""
        while self._handles:
            self._handles.pop().remove()


def _before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    cache = kwargs.get("cache", args[1] if len(args) > 1 else None)
    hidden = kwargs.get("hidden_states", args[0] if args else None)
    if isinstance(cache, OffersScanState) and isinstance(hidden, Tensor):
        layer: Any = module.layer_idx
        state = cache.scan_state(int(layer), hidden.shape[0])
        resumed_states.set(iter(state.unbind(1) if state.ndim > 3 else (state,)))


def _after(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    resumed_states.set(None)
