"""Convolution and recurrences over packed spans against each request by itself, states and checkpoints included."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from transformers.models.mamba2 import modeling_mamba2
from transformers.models.qwen3_next import modeling_qwen3_next

from hybridkv.entries import CacheEntry, Part, group_entries
from hybridkv.layout import plan_layout
from hybridkv.ops.conv import packed_conv
from hybridkv.ops.delta import DeltaKernels, packed_delta_rule
from hybridkv.ops.delta_scan import DeltaInputs
from hybridkv.ops.mamba1 import packed_selective_scan
from hybridkv.ops.mamba2 import Discretisation, packed_ssd, ssd_step
from hybridkv.ops.selective_scan import selective_scan
from hybridkv.ops.spans import Entry, StateChunk, StatePlan
from hybridkv.storage import PoolStorage

CHANNELS, WIDTH = 6, 4


class Request(NamedTuple):
    """A request in one pass: tokens before it, tokens in it, and the lengths at which checkpoints are due."""

    length: int
    count: int
    checkpoints: tuple[int, ...] = ()


MIXES: dict[str, list[Request]] = {
    "prefill": [Request(0, 40)],
    "prefill with checkpoints": [Request(0, 40, (16, 32))],
    "a checkpoint at the end": [Request(0, 32, (16, 32))],
    "continued": [Request(21, 19, (32,))],
    "shorter than the convolution": [Request(0, 2), Request(1, 2, (2, 3))],
    "decode": [Request(30, 1), Request(15, 1, (16,)), Request(0, 1)],
    "mixed": [Request(47, 1, (48,)), Request(5, 1), Request(0, 1), Request(0, 33, (16,)), Request(12, 9, (16, 20))],
}


class Passes:
    """State pages of some requests; the states before the pass come from running what went before."""

    def __init__(self, shapes: list[tuple[int, ...]], requests: list[Request]) -> None:
        parts = tuple(Part(f"part{i}", shape, "float32") for i, shape in enumerate(shapes))
        groups = group_entries([CacheEntry(0, "linear_attention", parts)])
        layout = plan_layout(groups, 1 << 20)
        self.entry = Entry(PoolStorage(layout, poison=True), 0, 0)
        self.requests = requests
        free = iter(torch.randperm(layout.slots(0)).tolist())
        self.working = [next(free) for _ in requests]
        self.saved = [{at: next(free) for at in request.checkpoints} for request in requests]

    def plan(self) -> StatePlan:
        singles = [i for i, request in enumerate(self.requests) if request.count == 1]
        fresh = [i for i in singles if self.requests[i].length == 0]
        saves = [(i, slot) for i in singles for slot in self.saved[i].values()]
        chunks, at = [], len(singles)
        for i, request in enumerate(self.requests[len(singles) :], len(singles)):
            slots = {at + request.count: [self.working[i]]}
            for position, slot in self.saved[i].items():
                slots.setdefault(at + position - request.length, []).append(slot)
            cuts = tuple((stop, torch.tensor(slots[stop])) for stop in sorted(slots))
            chunks.append(StateChunk(at, torch.tensor([self.working[i]]) if request.length else None, cuts))
            at += request.count
        return StatePlan(
            len(singles),
            torch.tensor([self.working[i] for i in singles], dtype=torch.int64),
            torch.tensor(fresh) if fresh else None,
            (torch.tensor([i for i, _ in saves]), torch.tensor([slot for _, slot in saves])) if saves else None,
            tuple(chunks),
        )

    def start(self, part: int, i: int, state: Tensor) -> None:
        self.entry.write_states(part, torch.tensor([self.working[i]]), state[None])

    def check(self, part: int, i: int, state_at: Callable[[int], Tensor]) -> None:
        """The working state and every checkpoint are what `state_at(length)` says."""
        request = self.requests[i]
        slots = {request.length + request.count: self.working[i], **{}}
        for at, slot in [*slots.items(), *self.saved[i].items()]:
            found = self.entry.read_states(part, torch.tensor([slot]))[0]
            torch.testing.assert_close(found, state_at(at), rtol=1e-4, atol=1e-5)


def pack(requests: list[Request], whole: list[Tensor], dim: int) -> Tensor:
    """The tokens of the pass from each request's whole inputs."""
    return torch.cat([x.narrow(dim, r.length, r.count) for r, x in zip(requests, whole, strict=True)], dim)


def wholes(requests: list[Request], *shape: int, dim: int) -> list[Tensor]:
    """Random inputs of every request, with the token dimension put in at `dim`."""
    sizes = [list(shape) for _ in requests]
    for size, request in zip(sizes, requests, strict=True):
        size.insert(dim, request.length + request.count)
    return [torch.randn(size) for size in sizes]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("mix", MIXES)
def test_convolution(mix: str, bias: bool) -> None:
    torch.manual_seed(0)
    requests = MIXES[mix]
    passes = Passes([(CHANNELS, WIDTH - 1)], requests)
    weight, shift = torch.randn(CHANNELS, WIDTH), torch.randn(CHANNELS) if bias else None
    whole = wholes(requests, 1, CHANNELS, dim=2)
    padded = [functional.pad(x, (WIDTH - 1, 0)) for x in whole]
    for i, request in enumerate(requests):
        if request.length:
            passes.start(0, i, padded[i][0, :, request.length : request.length + WIDTH - 1])
    found = packed_conv(pack(requests, whole, 2), weight, shift, functional.silu, passes.plan(), passes.entry, 0)
    full = [functional.silu(functional.conv1d(x, weight[:, None], shift, groups=CHANNELS)) for x in padded]
    torch.testing.assert_close(found, pack(requests, full, 2), rtol=1e-5, atol=1e-5)
    for i in range(len(requests)):
        passes.check(0, i, lambda at, i=i: padded[i][0, :, at : at + WIDTH - 1])


@pytest.mark.parametrize("mix", MIXES)
def test_mamba1(mix: str) -> None:
    torch.manual_seed(0)
    requests = MIXES[mix]
    passes = Passes([(CHANNELS, 4)], requests)
    A, D, bias = -torch.rand(CHANNELS, 4), torch.randn(CHANNELS), torch.randn(CHANNELS)
    x, dt, z = (wholes(requests, 1, CHANNELS, dim=2) for _ in range(3))
    B, C = (wholes(requests, 1, 4, dim=2) for _ in range(2))

    def run(i: int, stop: int) -> tuple[Tensor, Tensor]:
        parts = [values[i][..., :stop] for values in (x, dt, B, C, z)]
        return selective_scan(
            parts[0], parts[1], A, parts[2], parts[3], D, z=parts[4], delta_bias=bias, delta_softplus=True
        )

    for i, request in enumerate(requests):
        if request.length:
            passes.start(0, i, run(i, request.length)[1][0])
    packed = [pack(requests, values, 2) for values in (x, dt, B, C, z)]
    found = packed_selective_scan(
        packed[0], packed[1], A, packed[2], packed[3], D, packed[4], bias, True, passes.plan(), passes.entry, 0
    )
    full = [run(i, r.length + r.count)[0] for i, r in enumerate(requests)]
    torch.testing.assert_close(found, pack(requests, full, 2), rtol=1e-4, atol=1e-5)
    for i in range(len(requests)):
        passes.check(0, i, lambda at, i=i: run(i, at)[1][0])


@pytest.mark.parametrize("limit", [(0.0, float("inf")), (0.1, 0.6)])
@pytest.mark.parametrize("mix", MIXES)
def test_mamba2(mix: str, limit: tuple[float, float]) -> None:
    torch.manual_seed(0)
    heads, dim, groups, states = 4, 3, 2, 5
    requests = MIXES[mix]
    passes = Passes([(heads, dim, states)], requests)
    rule = Discretisation(-torch.rand(heads), torch.randn(heads), True, limit)
    D = torch.randn(heads)
    x, dt = wholes(requests, 1, heads, dim, dim=1), wholes(requests, 1, heads, dim=1)
    B, C = (wholes(requests, 1, groups, states, dim=1) for _ in range(2))

    def run(i: int, stop: int) -> tuple[Tensor, Tensor]:
        """The recurrence, one token after the other."""
        state, outputs = torch.zeros(1, heads, dim, states), []
        for t in range(stop):
            y, state = ssd_step(state, x[i][:, t], dt[i][:, t], B[i][:, t], C[i][:, t], D, rule)
            outputs.append(y)
        return torch.stack(outputs, 1), state[0]

    for i, request in enumerate(requests):
        if request.length:
            passes.start(0, i, run(i, request.length)[1])
    packed = [pack(requests, values, 1) for values in (x, dt, B, C)]
    scan = modeling_mamba2.mamba2_chunk_scan
    found = packed_ssd(*packed, D, rule, 16, scan, passes.plan(), passes.entry, 0)
    full = [run(i, r.length + r.count)[0] for i, r in enumerate(requests)]
    torch.testing.assert_close(found, pack(requests, full, 1), rtol=1e-4, atol=1e-5)
    for i in range(len(requests)):
        passes.check(0, i, lambda at, i=i: run(i, at)[1])


def test_ssd_step_against_its_definition() -> None:
    torch.manual_seed(0)
    state, x, dt = torch.randn(2, 4, 3, 5), torch.randn(2, 4, 3), torch.rand(2, 4)
    B, C, A, D = torch.randn(2, 2, 5), torch.randn(2, 2, 5), -torch.rand(4), torch.randn(4)
    before = state.clone()
    y, after = ssd_step(state, x, dt, B, C, D, Discretisation(A))
    assert torch.equal(state, before)
    for r in range(2):
        for h in range(4):
            step = dt[r, h]
            expected = torch.exp(step * A[h]) * state[r, h] + step * torch.outer(x[r, h], B[r, h // 2])
            torch.testing.assert_close(after[r, h], expected)
            torch.testing.assert_close(y[r, h], expected @ C[r, h // 2] + D[h] * x[r, h])


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("mix", MIXES)
def test_gated_delta_rule(mix: str, own: bool) -> None:
    torch.manual_seed(0)
    key_heads, heads, key_dim, dim = 2, 4, 5, 3
    requests = MIXES[mix]
    passes = Passes([(heads, key_dim, dim)], requests)
    q, k = (wholes(requests, 1, key_heads, key_dim, dim=1) for _ in range(2))
    v = wholes(requests, 1, heads, dim, dim=1)
    g = [-x.abs() for x in wholes(requests, 1, heads, dim=1)]
    beta = [x.sigmoid() for x in wholes(requests, 1, heads, dim=1)]
    chunked = modeling_qwen3_next.torch_chunk_gated_delta_rule
    recurrent = modeling_qwen3_next.torch_recurrent_gated_delta_rule

    def run(i: int, stop: int) -> tuple[Tensor, Tensor]:
        parts = [values[i][:, :stop] for values in (q, k, v, g, beta)]
        out, state = recurrent(
            *parts[:3], g=parts[3], beta=parts[4], output_final_state=True, use_qk_l2norm_in_kernel=True
        )
        return out, state[0]

    for i, request in enumerate(requests):
        if request.length:
            passes.start(0, i, run(i, request.length)[1])
    packed = [pack(requests, values, 1) for values in (q, k, v, g, beta)]
    kernels = None if own else DeltaKernels(chunked, recurrent)
    found = packed_delta_rule(DeltaInputs(*packed), True, kernels, passes.plan(), passes.entry, 0)
    full = [run(i, r.length + r.count)[0] for i, r in enumerate(requests)]
    torch.testing.assert_close(found, pack(requests, full, 1), rtol=1e-4, atol=1e-5)
    for i in range(len(requests)):
        passes.check(0, i, lambda at, i=i: run(i, at)[1])
