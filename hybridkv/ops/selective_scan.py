"""The Mamba-1 selective scan, resumable: it takes a state, it returns a state.

    h_t = exp(dt_t * A) * h_{t-1} + dt_t * B_t * x_t          h [D, N], A [D, N], B_t and C_t [N], x_t and dt_t [D]
    y_t = C_t . h_t + D * x_t

Gu and Dao, "Mamba: Linear-Time Sequence Modeling with Selective State Spaces" (2023), section 3.2 and algorithm 2.

A checkpoint in the middle of a span needs no support here: scan what comes before it, keep the state, scan the rest.

How it avoids a loop over tokens: the span is cut into chunks, and one Python step advances all chunks by one token.
The first sweep starts every chunk from zero and yields what it adds to the state; these are carried over the chunks;
the second sweep starts each chunk from its true state and reads the outputs. Decays only ever enter as exp(dt * A) or
exp(sum(dt) * A), both at most 1, so no value of dt can overflow. A tail is padded with dt = 0, which is the identity.

Memory is O(B*T*D) for rearranged inputs plus a few tensors of about `_CPU_ELEMENTS` floats: [T, D, N] never exists.
The backward pass keeps one state in every `sqrt(steps)` and recomputes those in between.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional

# Work per Python step, in state elements: on a CPU large enough to hide the call overhead and small enough for the
# second-level cache; on an accelerator the launches dominate.
_CPU_ELEMENTS = 1 << 17
_DEVICE_ELEMENTS = 1 << 23
_MIN_CHUNKS = 8
_MIN_CHANNELS = 128
_MIN_CHUNK = 16


def selective_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    *,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    initial_state: Tensor | None = None,
    chunk: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Scan a span of T tokens from `initial_state` (zeros if None) and return the outputs and the state after it.

    x, dt, z [B, D, T]; A [D, N] (negative); B, C [B, N, T]; D, delta_bias [D]; initial_state [B, D, N].
    Returns y [B, D, T] in the dtype of x and the final state [B, D, N] in float32 (float64 for float64 inputs).
    `delta_bias` and `delta_softplus` turn the raw dt into time steps; `z` gates the output with silu(z). `chunk` is the
    number of Python steps per sweep; None picks it from the shapes. Differentiable in every tensor argument.
    """
    batch, channels, length = x.shape
    states = A.shape[-1]
    most = _channels_at_once(batch, states, x.device)
    if channels > most:
        blocks = [slice(first, first + most) for first in range(0, channels, most)]
        done = [
            selective_scan(
                x[:, block],
                dt[:, block],
                A[block],
                B,
                C,
                None if D is None else D[block],
                z=None if z is None else z[:, block],
                delta_bias=None if delta_bias is None else delta_bias[block],
                delta_softplus=delta_softplus,
                initial_state=None if initial_state is None else initial_state[:, block],
                chunk=chunk,
            )
            for block in blocks
        ]
        return torch.cat([y for y, _ in done], 1), torch.cat([final for _, final in done], 1)
    wide = _accumulator(x)
    dt = _time_step(dt.to(wide), delta_bias, delta_softplus)
    state = (
        x.new_zeros(batch, channels, states, dtype=wide) if initial_state is None else initial_state.to(x.device, wide)
    )
    if length == 0:
        return x.clone(), state.clone()
    steps = chunk_length(batch, channels, states, length, x.device) if chunk is None else min(chunk, length)
    chunks = -(-length // steps)
    x_wide = x.to(wide)
    apply = cast("Callable[..., tuple[Tensor, Tensor]]", _ChunkedScan.apply)
    y, final = apply(
        _to_rows(dt, chunks, steps),
        _to_rows(dt * x_wide, chunks, steps),
        A.to(wide).t().contiguous(),
        _to_rows(B.to(wide), chunks, steps),
        _to_rows(C.to(wide), chunks, steps),
        state.transpose(1, 2).contiguous(),
        chunks,
    )
    y = y.view(steps, batch, chunks, channels).permute(1, 3, 2, 0).reshape(batch, channels, chunks * steps)
    return _finish(y[..., :length], x_wide, D, z, -1).to(x.dtype), final.transpose(1, 2).contiguous()


def selective_step(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    *,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
) -> tuple[Tensor, Tensor]:
    """One token for each of R requests, each with its own state.

    state [R, D, N]; x, dt, z [R, D]; A [D, N]; B, C [R, N]; D, delta_bias [D]. Returns y [R, D] in the dtype of x and
    the new states [R, D, N] in float32 (float64 for float64 inputs). `state` is left as it was.
    """
    wide = _accumulator(x)
    dt = _time_step(dt.to(wide)[..., None], delta_bias, delta_softplus)
    x_wide = x.to(wide)
    added = (dt[..., 0] * x_wide)[..., None] * B.to(wide)[:, None, :]
    new_state = torch.exp(dt * A.to(wide)) * state.to(wide) + added
    y = torch.matmul(new_state, C.to(wide)[..., None])
    gate = None if z is None else z[..., None]
    return _finish(y, x_wide[..., None], D, gate, -1)[..., 0].to(x.dtype), new_state


def _channels_at_once(batch: int, states: int, device: torch.device) -> int:
    """Channels are independent: on a CPU, so many go together that one step of a few chunks stays in the cache."""
    if device.type != "cpu":
        return sys.maxsize
    return max(_MIN_CHANNELS, _CPU_ELEMENTS // (batch * states * _MIN_CHUNKS))


def chunk_length(batch: int, channels: int, states: int, length: int, device: torch.device) -> int:
    """Python steps per sweep that `selective_scan` takes for these shapes."""
    budget = _CPU_ELEMENTS if device.type == "cpu" else _DEVICE_ELEMENTS
    chunks = max(_MIN_CHUNKS, budget // (batch * channels * states))
    return min(length, max(_MIN_CHUNK, -(-length // chunks)))


def _accumulator(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _time_step(dt: Tensor, bias: Tensor | None, softplus: bool) -> Tensor:
    if bias is not None:
        dt = dt + bias.to(dt.dtype)[:, None]
    return functional.softplus(dt) if softplus else dt


def _finish(y: Tensor, x: Tensor, skip: Tensor | None, gate: Tensor | None, dim: int) -> Tensor:
    if skip is not None:
        y = y + x * skip.to(y.dtype).unsqueeze(dim)
    return y if gate is None else y * functional.silu(gate.to(y.dtype))


def _to_rows(values: Tensor, chunks: int, steps: int) -> Tensor:
    """[B, F, T] -> [steps, B * chunks, F]: features innermost, so that every broadcast runs over contiguous memory."""
    batch, features, length = values.shape
    padded = functional.pad(values, (0, chunks * steps - length))
    rows = padded.view(batch, features, chunks, steps).permute(3, 0, 2, 1).contiguous()
    return rows.view(steps, batch * chunks, features)


class _ChunkedScan(torch.autograd.Function):
    """dt, u [S, R, D]; A [N, D]; B, C [S, R, N]; state [batch, N, D] -> y [S, R, D], final state [batch, N, D].

    R = batch * chunks rows, u = dt * x.
    """

    @staticmethod
    def forward(
        ctx: Any, dt: Tensor, u: Tensor, A: Tensor, B: Tensor, C: Tensor, state: Tensor, chunks: int
    ) -> tuple[Tensor, Tensor]:
        steps, rows = dt.shape[:2]
        batch = rows // chunks
        decay = state.new_empty(rows, *A.shape)
        h = torch.zeros_like(decay)
        if chunks > 1:
            for i in range(steps):
                _advance(h, decay, dt[i], u[i], A, B[i])
        h = _carry(state, dt, A, h, batch)
        keep = math.isqrt(steps - 1) + 1
        kept = []
        y = torch.empty_like(dt)
        for i in range(steps):
            if i % keep == 0 and ctx is not None and any(ctx.needs_input_grad):
                kept.append(h.clone())
            _advance(h, decay, dt[i], u[i], A, B[i])
            torch.bmm(C[i][:, None], h, out=y[i][:, None])
        if kept:
            ctx.save_for_backward(dt, u, A, B, C, *kept)
            ctx.chunks = chunks
        return y, h.view(batch, chunks, *A.shape)[:, -1].clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dt, u, A, B, C, *kept = cast("tuple[Tensor, ...]", ctx.saved_tensors)
        grad_y, grad_final = grads[0].contiguous(), grads[1]
        steps, rows = dt.shape[:2]
        batch = rows // ctx.chunks
        keep = math.isqrt(steps - 1) + 1
        decay = torch.empty_like(kept[0])
        g = torch.zeros_like(decay)
        if ctx.chunks > 1:
            for i in reversed(range(steps)):
                g.addcmul_(C[i][..., None], grad_y[i][:, None])
                g.mul_(_decay(decay, dt[i], A))
        g = _carry(grad_final, dt, A, g, batch, backwards=True)

        grad_dt, grad_u = torch.empty_like(dt), torch.empty_like(u)
        grad_B, grad_C = torch.empty_like(B), torch.empty_like(C)
        grad_A = torch.zeros_like(decay)
        h = decay.new_empty(keep + 1, *decay.shape)
        decays = torch.empty_like(h)
        scratch = torch.empty_like(decay)
        for segment in reversed(range(len(kept))):
            first = segment * keep
            last = min(first + keep, steps)
            h[0] = kept[segment]
            for j, i in enumerate(range(first, last)):
                torch.mul(_decay(decays[j], dt[i], A), h[j], out=h[j + 1])
                h[j + 1].addcmul_(B[i][..., None], u[i][:, None])
            for i in reversed(range(first, last)):
                j = i - first
                g.addcmul_(C[i][..., None], grad_y[i][:, None])
                torch.bmm(h[j + 1], grad_y[i][..., None], out=grad_C[i][..., None])
                torch.bmm(g, u[i][..., None], out=grad_B[i][..., None])
                torch.bmm(B[i][:, None], g, out=grad_u[i][:, None])
                g.mul_(decays[j])
                torch.mul(g, h[j], out=scratch)
                grad_A.addcmul_(scratch, dt[i][:, None])
                torch.sum(scratch.mul_(A), 1, out=grad_dt[i])
        grad_state = g.view(batch, ctx.chunks, *A.shape)[:, 0].clone()
        return grad_dt, grad_u, grad_A.sum(0), grad_B, grad_C, grad_state, None


def _decay(out: Tensor, dt: Tensor, A: Tensor) -> Tensor:
    return torch.mul(dt[:, None], A, out=out).exp_()


def _advance(h: Tensor, decay: Tensor, dt: Tensor, u: Tensor, A: Tensor, B: Tensor) -> None:
    h.mul_(_decay(decay, dt, A)).addcmul_(B[..., None], u[:, None])


def _carry(start: Tensor, dt: Tensor, A: Tensor, local: Tensor, batch: int, *, backwards: bool = False) -> Tensor:
    """From what each chunk adds (`local`) to what each chunk starts from, both [R, N, D]."""
    rows = local.shape[0]
    shape = (batch, rows // batch, *A.shape)
    if shape[1] == 1:
        return start.clone()
    total, local = torch.exp(dt.sum(0)[:, None] * A).view(shape), local.view(shape)
    starts = torch.empty_like(local)
    order = range(shape[1])
    running = start
    for k in reversed(order) if backwards else order:
        starts[:, k] = running
        running = total[:, k] * running + local[:, k]
    return starts.view(rows, *A.shape)
