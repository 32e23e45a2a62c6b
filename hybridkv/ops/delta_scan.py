"""The gated delta rule in chunks, resumable, and its single step for many requests at once.

    S_t = decay_t S_{t-1} + k_t (beta_t (v_t - (decay_t S_{t-1})^T k_t))^T,    o_t = S_t^T q_t / sqrt(key dim)

with one decay a head (Yang et al., "Gated Delta Networks", 2024) or one for each key channel (Kimi Team, "Kimi Linear",
2025). Within a chunk all corrections follow from one triangular system; from chunk to chunk only the state is carried.

With decays by channel, a score of two tokens is a product weighted by exp(G_i - G_j), G the sums of log decays. It
cannot simply be split in two for a matrix product, since exp(-G_j) overflows. So a chunk is halved again and again:
between its halves, the sum at the middle splits the weight into two factors of at most 1, and any two tokens are in
different halves of something.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

# Measured on a CPU: longer chunks spend more on scores than they save on states, which scores by channel do sooner.
_CHUNK = 32
_CHANNEL_CHUNK = 16
_SEGMENT_ITEMS = 1 << 18
"""Items of each tensor worked on at once, so that a long span stays in the processor's cache."""

_EPSILON = 1e-6


class DeltaInputs(NamedTuple):
    """What a delta rule makes of some tokens.

    Attributes:
        query: [B, T, key heads, key dim].
        key: alike; value heads are a multiple of key heads.
        value: [B, T, value heads, value dim].
        g: log decay, at most 0: [B, T, value heads], or [B, T, value heads, key dim] with one for each channel.
        beta: [B, T, value heads], how much of a correction is written.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    g: Tensor
    beta: Tensor

    def tokens(self, start: int, stop: int | None = None) -> DeltaInputs:
        """Tokens [start, stop) of every row."""
        return DeltaInputs(*(values[:, start:stop] for values in self))


def delta_scan(inputs: DeltaInputs, state: Tensor | None, *, normalise: bool) -> tuple[Tensor, Tensor]:
    """Run a span of T tokens from `state` (zeros if None).

    Args:
        inputs: of the tokens.
        state: [B, value heads, key dim, value dim].
        normalise: scale queries and keys to length 1.

    Returns:
        [B, T, value heads, value dim] in the dtype of query, and the state after the span in float32 (float64 for
        float64 inputs).
    """
    query, key, value, g, _ = inputs
    batch, tokens, heads, value_dim = value.shape
    wide = torch.promote_types(query.dtype, torch.float32)
    if state is None:
        state = value.new_zeros(batch, heads, key.shape[-1], value_dim, dtype=wide)
    state = state.to(wide)
    most = _CHUNK if g.dim() == 3 else _CHANNEL_CHUNK
    segment = max(most, _SEGMENT_ITEMS // (batch * heads * key.shape[-1]) // most * most)
    outputs = []
    for start in range(0, tokens, segment):
        part = inputs.tokens(start, start + segment)
        chunk = min(most, 1 << (part.value.shape[1] - 1).bit_length())
        output, state = _segment(part, state, chunk, normalise)
        outputs.append(output.to(query.dtype))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1), state


def delta_step(inputs: DeltaInputs, state: Tensor, *, normalise: bool) -> tuple[Tensor, Tensor]:
    """One token for each of B requests, each with its own state, which may be changed in place.

    Args:
        inputs: of the tokens; T is 1.
        state: [B, value heads, key dim, value dim].
        normalise: scale queries and keys to length 1.

    Returns:
        [B, 1, value heads, value dim] in the dtype of query, and the new states.
    """
    query, key, value, g, beta = (values[:, 0] for values in inputs)
    requests, heads, value_dim = value.shape
    wide = torch.promote_types(query.dtype, torch.float32)
    pairs = _unit(torch.stack([key, query], 2).to(wide), normalise)
    pairs = pairs.repeat_interleave(heads // pairs.shape[1], 1).flatten(0, 1)
    decay = g.to(wide).exp()
    flat = state.to(wide).flatten(0, 1)
    flat.mul_(decay.reshape(requests * heads, -1, 1))
    recalled, read = torch.bmm(pairs, flat).unbind(1)
    correction = (value.to(wide).flatten(0, 1) - recalled) * beta.to(wide).reshape(-1, 1)
    keys, queries = pairs.unbind(1)
    flat.baddbmm_(keys.unsqueeze(2), correction.unsqueeze(1))
    output = torch.addcmul(read, (keys * queries).sum(-1, keepdim=True), correction) / math.sqrt(key.shape[-1])
    return output.view(requests, 1, heads, value_dim).to(query.dtype), flat.view(state.shape)


def _segment(inputs: DeltaInputs, state: Tensor, chunk: int, normalise: bool) -> tuple[Tensor, Tensor]:
    """`delta_scan` of a few chunks. Inside, tensors are [chunks, B * heads, chunk, dim]."""
    query, key, value, g, beta = inputs
    batch, tokens, heads, value_dim = value.shape
    key_dim, wide = key.shape[-1], state.dtype
    query, key = (_unit(_chunks(values, chunk, wide), normalise) for values in (query, key))
    query = query / math.sqrt(key_dim)
    repeats = batch * heads // key.shape[1]
    if repeats > 1:
        query, key = query.repeat_interleave(repeats, 1), key.repeat_interleave(repeats, 1)
    value = _chunks(value, chunk, wide)
    beta = _chunks(beta.unsqueeze(-1), chunk, wide)
    by_channel = g.dim() == 4
    sums = _chunks(g if by_channel else g.unsqueeze(-1), chunk, wide).cumsum(2)
    attended, recalled = (_scores_by_channel if by_channel else _scores)(query, key, sums)

    # What the tokens of a chunk write depends on what earlier ones wrote: a triangular system, for the part that
    # comes from the values and, since the system is linear, for the part that comes from the state.
    since_start = sums.exp()
    wanted = torch.cat([value * beta, key * since_start * beta], -1)
    solved = torch.linalg.solve_triangular(recalled.mul_(beta), wanted, upper=False, unitriangular=True)
    reads = torch.cat([solved[..., value_dim:], query * since_start], 2)
    last = sums[:, :, -1:]
    writes = (key * (last - sums).exp_()).transpose(2, 3)
    kept = last.exp().transpose(2, 3)
    written = solved[..., :value_dim].contiguous()
    output = torch.empty_like(written)
    flat = state.flatten(0, 1)
    for i in range(len(written)):
        from_state = torch.bmm(reads[i], flat)
        written[i] -= from_state[:, :chunk]
        output[i] = from_state[:, chunk:]
        flat = torch.baddbmm(flat * kept[i], writes[i], written[i])
    output += torch.matmul(attended, written)
    in_order = output.unflatten(1, (batch, heads)).permute(1, 0, 3, 2, 4).flatten(1, 2)
    return in_order[:, :tokens], flat.view(state.shape)


def _chunks(values: Tensor, chunk: int, wide: torch.dtype) -> Tensor:
    """[B, T, heads, dim] -> [chunks, B * heads, chunk, dim], padded with zeros, which leave a state as it is."""
    padded = functional.pad(values, (0, 0, 0, 0, 0, -values.shape[1] % chunk))
    rows: Tensor = padded.unflatten(1, (-1, chunk))
    return rows.permute(1, 0, 3, 2, 4).to(wide, memory_format=torch.contiguous_format).flatten(1, 2)


def _unit(values: Tensor, normalise: bool) -> Tensor:
    if not normalise:
        return values
    return values * torch.rsqrt((values * values).sum(-1, keepdim=True) + _EPSILON)


def _scores(query: Tensor, key: Tensor, sums: Tensor) -> tuple[Tensor, Tensor]:
    """Products of queries with keys up to their own, and of keys with keys, decayed: [.., chunk, chunk] each.

    Above the diagonal, the first are 0. Of the second only what lies below the diagonal counts.
    """
    decay = (sums - sums.transpose(-1, -2)).exp_().tril_()
    columns = key.transpose(-1, -2)
    return torch.matmul(query, columns).mul_(decay), torch.matmul(key, columns).mul_(decay)


def _scores_by_channel(query: Tensor, key: Tensor, sums: Tensor) -> tuple[Tensor, Tensor]:
    """`_scores` with a decay for each channel; the diagonal of the second is not computed."""
    chunk = key.shape[-2]
    attended = key.new_zeros(*key.shape[:-1], chunk)
    recalled = torch.zeros_like(attended)
    attended.diagonal(dim1=-2, dim2=-1).copy_((query * key).sum(-1))
    half = chunk // 2
    while half:
        early_sums, late_sums = sums.unflatten(-2, (-1, 2, half)).unbind(-3)
        middle = early_sums[..., -1:, :]
        early = key.unflatten(-2, (-1, 2, half))[..., 0, :, :] * (middle - early_sums).exp_()
        decay = (late_sums - middle).exp_()
        for rows, scores in ((query, attended), (key, recalled)):
            late = rows.unflatten(-2, (-1, 2, half))[..., 1, :, :] * decay
            blocks = scores.unflatten(-1, (-1, 2, half)).unflatten(-4, (-1, 2, half)).diagonal(dim1=-6, dim2=-3)
            blocks[..., 1, :, 0, :, :] = torch.matmul(late, early.transpose(-1, -2)).movedim(-3, -1)
        half //= 2
    return attended, recalled
