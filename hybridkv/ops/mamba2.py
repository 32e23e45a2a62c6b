"""Mamba-2 over a packed pass.

Longer spans go through a chunked scan that takes an initial state: the one the model's own module uses. One-token
spans take the recurrence itself (Dao and Gu, "Transformers are SSMs", 2024), for head h with scalar decay:

    S_t = exp(dt_t * A) * S_{t-1} + dt_t * x_t B_t^T          S [P, N], x_t [P], B_t and C_t [N]
    y_t = S_t C_t + D * x_t
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from hybridkv.ops.recurrence import packed_recurrence
from hybridkv.ops.spans import Entry, StatePlan

_MIN_CHUNK = 16


@dataclass(frozen=True, slots=True)
class Discretisation:
    """How raw time steps become decays.

    Attributes:
        A: [heads], negative.
        bias: [heads], added to dt, or None.
        softplus: pass dt through softplus.
        limit: dt is clamped to this range.
    """

    A: Tensor
    bias: Tensor | None = None
    softplus: bool = False
    limit: tuple[float, float] = (0.0, float("inf"))

    def __call__(self, dt: Tensor) -> Tensor:
        dt = dt if self.bias is None else dt + self.bias.to(dt.dtype)
        dt = functional.softplus(dt) if self.softplus else dt
        return dt.clamp(self.limit[0], self.limit[1])


def ssd_step(
    state: Tensor, x: Tensor, dt: Tensor, B: Tensor, C: Tensor, D: Tensor | None, rule: Discretisation
) -> tuple[Tensor, Tensor]:
    """One token for each of R requests, each with its own state; `state` is left as it was.

    Args:
        state: [R, heads, P, N].
        x: [R, heads, P].
        dt: [R, heads], raw.
        B: [R, groups, N]; groups divide heads. C alike.
        C: what reads the state.
        D: [heads], the skip connection, or None.
        rule: how dt becomes decays.

    Returns:
        y [R, heads, P] and the new states [R, heads, P, N], both float32.
    """
    heads = x.shape[1]
    x, B, C, dt = x.float(), B.float(), C.float(), rule(dt).float()
    B, C = (each.repeat_interleave(heads // each.shape[1], 1) for each in (B, C))
    decay = torch.exp(dt * rule.A.float())
    state = state.float() * decay[..., None, None] + (x * dt[..., None])[..., None] * B[:, :, None]
    y = torch.matmul(state, C[..., None])[..., 0]
    return (y if D is None else y + x * D.float()[:, None]), state


def chunk_for(length: int, chunk_size: int) -> int:
    """Tokens per chunk for a span: no more than needed, since a scan pads the span to whole chunks."""
    return min(chunk_size, max(_MIN_CHUNK, 1 << (length - 1).bit_length()))


def packed_ssd(
    x: Tensor,
    dt: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    rule: Discretisation,
    chunk_size: int,
    chunk_scan: Callable[..., Any],
    plan: StatePlan,
    entry: Entry,
    part: int,
) -> Tensor:
    """Scan every span from its own state and leave the new states in their pages.

    Args:
        x: [1, tokens, heads, P], packed order.
        dt: [1, tokens, heads], raw.
        B: [1, tokens, groups, N]; C alike.
        C: what reads the state.
        D: [heads] or None.
        rule: how dt becomes decays.
        chunk_size: the model's.
        chunk_scan: the module's own scan, called with `initial_states` and `return_final_states`.
        plan: of the layer's group.
        entry: the layer's pages; the state is [heads, P, N].
        part: which part of the entry is the state.

    Returns:
        [1, tokens, heads, P]
    """

    def step(state: Tensor) -> tuple[Tensor, Tensor]:
        xs, dts, Bs, Cs = (values[0, : plan.singles] for values in (x, dt, B, C))
        y, state = ssd_step(state, xs, dts, Bs, Cs, D, rule)
        return y.unsqueeze(0), state

    def scan(start: int, stop: int, state: Tensor | None) -> tuple[Tensor, Tensor]:
        xs, dts, Bs, Cs = (values[:, start:stop] for values in (x, dt, B, C))
        y, state = chunk_scan(
            xs,
            dts,
            rule.A,
            Bs,
            Cs,
            chunk_size=chunk_for(stop - start, chunk_size),
            D=D,
            dt_bias=rule.bias,
            dt_softplus=rule.softplus,
            dt_limit=rule.limit,
            initial_states=state,
            return_final_states=True,
        )
        return y, state

    return packed_recurrence(plan, entry, part, 1, step, scan).to(torch.float32)
