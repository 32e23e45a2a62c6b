"""The gated delta rule over a packed pass: the longer spans in chunks, all one-token spans at once.

On a CPU the arithmetic is our own, because the forms that come with transformers are references: written to be read,
and slow. Elsewhere it is the module's own, which there may be a fused kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from hybridkv.ops.delta_scan import DeltaInputs, delta_scan, delta_step
from hybridkv.ops.mamba2 import chunk_for
from hybridkv.ops.recurrence import packed_recurrence
from hybridkv.ops.spans import Entry, StatePlan

CHUNK = 64


class DeltaKernels(NamedTuple):
    """A module's own forms of its delta rule; each takes `initial_state` and `output_final_state`.

    Attributes:
        chunked: for many tokens.
        recurrent: for one.
    """

    chunked: Callable[..., Any]
    recurrent: Callable[..., Any]


def packed_delta_rule(
    inputs: DeltaInputs,
    normalise: bool,
    kernels: DeltaKernels | None,
    plan: StatePlan,
    entry: Entry,
    part: int,
) -> Tensor:
    """Run every span from its own state and leave the new states in their pages.

    Args:
        inputs: of all tokens in packed order, as one row.
        normalise: scale queries and keys to length 1.
        kernels: what computes it; None for our own arithmetic.
        plan: of the layer's group.
        entry: the layer's pages; the state is [value heads, key dim, value dim].
        part: which part of the entry is the state.

    Returns:
        [1, tokens, value heads, value dim]
    """

    def step(state: Tensor) -> tuple[Tensor, Tensor]:
        rows = DeltaInputs(*(values[0, : plan.singles].unsqueeze(1) for values in inputs))
        if kernels is None:
            out, state = delta_step(rows, state, normalise=normalise)
        else:
            out, state = _run(kernels.recurrent, rows, normalise, state)
        return out.transpose(0, 1), state

    def scan(start: int, stop: int, state: Tensor | None) -> tuple[Tensor, Tensor]:
        span = inputs.tokens(start, stop)
        if kernels is None:
            return delta_scan(span, state, normalise=normalise)
        return _run(kernels.chunked, span, normalise, state, chunk_size=chunk_for(stop - start, CHUNK))

    return packed_recurrence(plan, entry, part, 1, step, scan)


def _run(
    kernel: Callable[..., Any], inputs: DeltaInputs, normalise: bool, state: Tensor | None, **options: Any
) -> tuple[Tensor, Tensor]:
    query, key, value, g, beta = inputs
    out, state = kernel(
        query,
        key,
        value,
        g=g,
        beta=beta,
        initial_state=state,
        output_final_state=True,
        use_qk_l2norm_in_kernel=normalise,
        **options,
    )
    return out, state
