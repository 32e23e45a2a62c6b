"""Mamba-1 over a packed pass."""

from __future__ import annotations

from torch import Tensor

from hybridkv.ops.recurrence import States, packed_recurrence
from hybridkv.ops.selective_scan import selective_scan, selective_step
from hybridkv.ops.spans import StatePlan


def packed_selective_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    delta_bias: Tensor | None,
    delta_softplus: bool,
    plan: StatePlan,
    entry: States,
    part: int,
) -> Tensor:
    """Scan every span from its own state and leave the new states in their pages.

    Args:
        x: [1, channels, tokens], packed order; dt and z alike.
        dt: raw time steps.
        A: [channels, N], negative.
        B: [1, N, tokens]; C alike.
        C: what reads the state.
        D: [channels], the skip connection, or None.
        z: the gate, or None.
        delta_bias: [channels], added to dt, or None.
        delta_softplus: pass dt through softplus.
        plan: of the layer's group.
        entry: the pages of the layer, or of a head of it; the state is [channels, N].
        part: which part of the entry is the state.

    Returns:
        [1, channels, tokens]
    """

    def step(state: Tensor) -> tuple[Tensor, Tensor]:
        xs, dts, Bs, Cs = (values[0, :, : plan.singles].t() for values in (x, dt, B, C))
        zs = None if z is None else z[0, :, : plan.singles].t()
        y, state = selective_step(
            state, xs, dts, A, Bs, Cs, D, z=zs, delta_bias=delta_bias, delta_softplus=delta_softplus
        )
        return y.t().unsqueeze(0), state

    def scan(start: int, stop: int, state: Tensor | None) -> tuple[Tensor, Tensor]:
        xs, dts, Bs, Cs = (values[..., start:stop] for values in (x, dt, B, C))
        zs = None if z is None else z[..., start:stop]
        return selective_scan(
            xs, dts, A, Bs, Cs, D, z=zs, delta_bias=delta_bias, delta_softplus=delta_softplus, initial_state=state
        )

    return packed_recurrence(plan, entry, part, -1, step, scan)
