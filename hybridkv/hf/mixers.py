"""Recurrent layers made to know spans and states, without touching any model.

Mixers of transformers call functions of their own module: a convolution, then a scan. Those names are wrapped, module
by module. Outside a pass of ours a wrapper calls what it replaced; inside a packed pass it runs the operation span by
span over state pages. Wrapping counts its users and is undone by the last of them.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from types import ModuleType
from typing import Any

from torch import Tensor, nn
from transformers.activations import ACT2FN

from hybridkv.hf.step import PackedStep, active_step
from hybridkv.ops.conv import packed_conv
from hybridkv.ops.delta import DeltaKernels, packed_delta_rule
from hybridkv.ops.delta_scan import DeltaInputs
from hybridkv.ops.heads import HeadEntry
from hybridkv.ops.mamba1 import packed_selective_scan
from hybridkv.ops.mamba2 import Discretisation, packed_ssd
from hybridkv.ops.recurrence import States
from hybridkv.ops.selective_scan import selective_scan

CONV, RECURRENT = 0, 1
"""Parts of a recurrent layer's entry."""

Function = Callable[..., Any]
Handler = Callable[..., Any]

resumed_states: ContextVar[Iterator[Tensor] | None] = ContextVar("hybridkv_resumed_states", default=None)
"""The states [batch, channels, N] that the Mamba-1 scans of this context start from, in the order of the scans: one for
each head of the mixer. The stock scan always starts at zero."""


def _conv(
    step: PackedStep,
    module: ModuleType,
    original: Function,
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **ignored: Any,
) -> Tensor:
    plan, entry = step.states_of(step.layer, CONV)
    function = None if activation is None else ACT2FN[activation]
    return packed_conv(hidden_states, weight, bias, function, plan, entry, CONV)


def _selective_scan(
    step: PackedStep,
    module: ModuleType,
    original: Function,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    **ignored: Any,
) -> Any:
    plan, entry = step.states_of(step.layer, RECURRENT)
    states: States = entry
    if entry.views[RECURRENT].pages.ndim > 3:
        # Mixers of several heads call once for each, in order; the state holds them all.
        states = HeadEntry(entry, step.heads[step.layer])
        step.heads[step.layer] += 1
    y = packed_selective_scan(hidden_states, dt, A, B, C, D, z, delta_bias, delta_softplus, plan, states, RECURRENT)
    # The state is in its pages already; mixers of several heads stack what they get.
    return (y, y.new_empty(0)) if return_last_state else y


def _chunk_scan(
    step: PackedStep,
    module: ModuleType,
    original: Function,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    **ignored: Any,
) -> Any:
    plan, entry = step.states_of(step.layer, RECURRENT)
    rule = Discretisation(A, dt_bias, dt_softplus, (float(dt_limit[0]), float(dt_limit[1])))
    y = packed_ssd(hidden_states, dt, B, C, D, rule, chunk_size, original, plan, entry, RECURRENT)
    return (y, None) if return_final_states else y


def _delta_rule(
    recurrent_form: str,
    step: PackedStep,
    module: ModuleType,
    original: Function,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    use_qk_l2norm_in_kernel: bool = False,
    **ignored: Any,
) -> tuple[Tensor, Tensor]:
    plan, entry = step.states_of(step.layer, RECURRENT)
    kernels = None
    if query.device.type != "cpu":
        kernels = DeltaKernels(original, getattr(module, recurrent_form, original))
    inputs = DeltaInputs(query, key, value, g, beta)
    out = packed_delta_rule(inputs, use_qk_l2norm_in_kernel, kernels, plan, entry, RECURRENT)
    # Some mixers convert the state they get back, so it has to be a tensor; nobody keeps it.
    return out, query.new_empty(0)


_HANDLERS: Mapping[str, Handler] = {
    "causal_conv1d_fn": _conv,
    "mamba_selective_scan": _selective_scan,
    "mamba2_chunk_scan": _chunk_scan,
    "torch_chunk_gated_delta_rule": functools.partial(_delta_rule, "torch_recurrent_gated_delta_rule"),
    "chunk_kimi_delta_attention": functools.partial(_delta_rule, "recurrent_kimi_delta_attention"),
}


REPLACED = tuple(_HANDLERS)
"""Names of the functions a recurrent layer must call, each found in the layer's own Python module."""


def source_modules(module: nn.Module) -> list[ModuleType]:
    """The Python modules whose functions a layer's methods call: those of its class and of all its bases."""
    found = (sys.modules.get(base.__module__) for base in type(module).__mro__)
    return [source for source in found if source is not None]


class Wrapped:
    """A module's function while somebody needs to get between. Calls outside a pass of ours go straight through."""

    def __init__(self, module: ModuleType, name: str) -> None:
        self.original: Function = getattr(module, name)
        self.users = 0
        self._module = module
        self._handler = _HANDLERS[name]
        self._resumes = name == "mamba_selective_scan"
        functools.update_wrapper(self, self.original)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        step = active_step.get()
        if step is not None:
            return self._handler(step, self._module, self.original, *args, **kwargs)
        states = resumed_states.get() if self._resumes else None
        if states is not None:
            return _resumed_scan(next(states), *args, **kwargs)
        return self.original(*args, **kwargs)


def _resumed_scan(state: Tensor, *args: Any, return_last_state: bool = False, **kwargs: Any) -> Any:
    for unknown in ("use_mambapy", "use_associative_scan"):
        kwargs.pop(unknown, None)
    y, final = selective_scan(*args, initial_state=state, **kwargs)
    return (y, final) if return_last_state else y


class MixerHooks:
    """Holds the wrapped functions of a model's modules until `close`, and no reference to the model.

    Attributes:
        closed: whether it has let go.
    """

    def __init__(self, model: nn.Module) -> None:
        self.closed = False
        self._held: list[tuple[ModuleType, str]] = []
        sources = {id(source): source for module in model.modules() for source in source_modules(module)}
        for source in sources.values():
            for name in _HANDLERS:
                if callable(getattr(source, name, None)):
                    self._hold(source, name)

    def close(self) -> None:
        """Let go; a function nobody holds any more is put back. Calling it again changes nothing."""
        self.closed = True
        while self._held:
            module, name = self._held.pop()
            wrapped = getattr(module, name)
            if isinstance(wrapped, Wrapped):
                wrapped.users -= 1
                if wrapped.users == 0:
                    setattr(module, name, wrapped.original)

    def _hold(self, module: ModuleType, name: str) -> None:
        current = getattr(module, name)
        if not isinstance(current, Wrapped):
            current = Wrapped(module, name)
            setattr(module, name, current)
        current.users += 1
        self._held.append((module, name))
