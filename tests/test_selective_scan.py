"""The chunked selective scan against a plain loop over tokens in float64."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from hybridkv.ops import selective_scan as module
from hybridkv.ops.selective_scan import chunk_length, selective_scan, selective_step


class Inputs(NamedTuple):
    x: Tensor
    dt: Tensor
    A: Tensor
    B: Tensor
    C: Tensor
    D: Tensor
    z: Tensor
    bias: Tensor
    state: Tensor


def make(batch: int, channels: int, states: int, length: int, seed: int, dtype: torch.dtype = torch.float64) -> Inputs:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    return Inputs(
        x=normal(batch, channels, length),
        dt=normal(batch, channels, length),
        A=-torch.exp(normal(channels, states)),
        B=normal(batch, states, length),
        C=normal(batch, states, length),
        D=normal(channels),
        z=normal(batch, channels, length),
        bias=normal(channels) - 2,
        state=normal(batch, channels, states),
    )


def token_loop(given: Inputs, *, state: Tensor | None, gated: bool = True) -> tuple[Tensor, Tensor]:
    x, dt, A, B, C, D, z, bias, _ = (value.double() for value in given)
    dt = functional.softplus(dt + bias[:, None])
    h = torch.zeros(x.shape[0], *A.shape, dtype=torch.float64) if state is None else state.double()
    outputs = []
    for t in range(x.shape[-1]):
        h = torch.exp(dt[..., t, None] * A) * h + (dt[..., t] * x[..., t])[..., None] * B[:, None, :, t]
        outputs.append((h * C[:, None, :, t]).sum(-1) + D * x[..., t])
    y = torch.stack(outputs, -1)
    return (y * functional.silu(z) if gated else y), h


def scan(
    given: Inputs, *, state: Tensor | None, span: slice = slice(None), chunk: int | None = None
) -> tuple[Tensor, Tensor]:
    x, dt, B, C, z = (value[..., span] for value in (given.x, given.dt, given.B, given.C, given.z))
    return selective_scan(
        x, dt, given.A, B, C, given.D,
        z=z, delta_bias=given.bias, delta_softplus=True, initial_state=state, chunk=chunk,
    )  # fmt: skip


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 100, 257])
@pytest.mark.parametrize("chunk", [None, 1, 7, 16, 1000])
@pytest.mark.parametrize("resumed", [False, True])
def test_equals_a_token_loop(length: int, chunk: int | None, resumed: bool) -> None:
    given = make(2, 5, 4, length, seed=length)
    state = given.state if resumed else None
    y, final = scan(given, state=state, chunk=chunk)
    expected_y, expected_final = token_loop(given, state=state)
    torch.testing.assert_close(y, expected_y, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(final, expected_final, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_accumulates_in_float32(dtype: torch.dtype) -> None:
    given = make(3, 64, 16, 700, seed=1, dtype=dtype)
    given = given._replace(A=given.A.float(), state=given.state.float())
    y, final = scan(given, state=given.state)
    expected_y, expected_final = token_loop(given, state=given.state)
    assert y.dtype == dtype
    assert final.dtype == torch.float32
    torch.testing.assert_close(final.double(), expected_final, rtol=1e-4, atol=1e-4)
    tolerance = 1e-4 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(y.double(), expected_y, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("seed", range(8))
def test_resumes_at_any_split(seed: int) -> None:
    given = make(2, 6, 4, 300, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    cuts = [0, *sorted(torch.randint(0, 301, (4,), generator=generator).tolist()), 300]
    whole, whole_state = scan(given, state=given.state)
    state, parts = given.state, []
    for start, stop in itertools.pairwise(cuts):
        y, state = scan(given, state=state, span=slice(start, stop))
        parts.append(y)
    torch.testing.assert_close(torch.cat(parts, -1), whole, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(state, whole_state, rtol=1e-10, atol=1e-10)


def test_an_empty_span_keeps_the_state() -> None:
    given = make(2, 3, 4, 0, seed=0)
    y, final = scan(given, state=given.state)
    assert y.shape == (2, 3, 0)
    torch.testing.assert_close(final, given.state)


def test_the_given_state_is_not_written() -> None:
    given = make(2, 3, 4, 40, seed=0)
    before = given.state.clone()
    _, final = scan(given, state=given.state)
    final.zero_()
    selective_step(given.state, given.x[..., 0], given.dt[..., 0], given.A, given.B[..., 0], given.C[..., 0])
    torch.testing.assert_close(given.state, before, rtol=0, atol=0)


@pytest.mark.parametrize("step", [1e4, 1e-12, 0.0])
def test_extreme_time_steps_stay_finite(step: float) -> None:
    given = make(1, 8, 4, 200, seed=3, dtype=torch.float32)
    dt = torch.full_like(given.dt, step)
    dt[..., ::3] = 1.0
    y, final = selective_scan(given.x, dt, given.A, given.B, given.C, initial_state=given.state)
    h, outputs = given.state.double(), []
    for t in range(200):
        decay = torch.exp(dt[..., t, None].double() * given.A.double())
        h = decay * h + (dt[..., t] * given.x[..., t]).double()[..., None] * given.B[:, None, :, t].double()
        outputs.append((h * given.C[:, None, :, t].double()).sum(-1))
    assert bool(torch.isfinite(y).all())
    torch.testing.assert_close(y.double(), torch.stack(outputs, -1), rtol=1e-4, atol=1e-4 * max(step, 1.0))
    torch.testing.assert_close(final.double(), h, rtol=1e-4, atol=1e-4 * max(step, 1.0))


@pytest.mark.parametrize(("length", "chunk"), [(1, None), (23, 5), (23, 1), (23, 23), (40, None)])
def test_gradients_equal_those_of_the_token_loop(length: int, chunk: int | None) -> None:
    given = Inputs(*(value.requires_grad_() for value in make(2, 3, 4, length, seed=7)))
    y, final = scan(given, state=given.state, chunk=chunk)
    gradients = torch.autograd.grad((y.sin().sum() + final.cos().sum()), list(given))
    y, final = token_loop(given, state=given.state)
    expected = torch.autograd.grad((y.sin().sum() + final.cos().sum()), list(given))
    for name, gradient, wanted in zip(Inputs._fields, gradients, expected, strict=True):
        torch.testing.assert_close(gradient, wanted, rtol=1e-9, atol=1e-9, msg=name)


def test_gradient_of_the_final_state_alone() -> None:
    given = Inputs(*(value.requires_grad_() for value in make(1, 3, 2, 50, seed=9)))
    _, final = scan(given, state=None, chunk=7)
    gradient = torch.autograd.grad(final.sum(), given.x)[0]
    _, final = token_loop(given, state=None)
    torch.testing.assert_close(gradient, torch.autograd.grad(final.sum(), given.x)[0])


def test_one_step_for_many_requests_equals_their_scans() -> None:
    given = make(5, 6, 4, 12, seed=11)
    whole, final = scan(given, state=given.state)
    state = given.state
    for t in range(12):
        y, state = selective_step(
            state, given.x[..., t], given.dt[..., t], given.A, given.B[..., t], given.C[..., t], given.D,
            z=given.z[..., t], delta_bias=given.bias, delta_softplus=True,
        )  # fmt: skip
        torch.testing.assert_close(y, whole[..., t], rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(state, final, rtol=1e-10, atol=1e-10)


def test_equals_the_scan_that_transformers_ships() -> None:
    from transformers.models.jamba.modeling_jamba import mamba_selective_scan

    given = make(2, 16, 8, 90, seed=13, dtype=torch.float32)
    options = {"z": given.z, "delta_bias": given.bias, "delta_softplus": True}
    expected, expected_state = mamba_selective_scan(
        given.x, given.dt, given.A, given.B, given.C, D=given.D, return_last_state=True, **options
    )
    y, state = scan(given, state=None)
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(state, expected_state, rtol=1e-4, atol=1e-4)


def test_many_channels_are_scanned_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    given = make(2, 50, 4, 90, seed=14)
    whole = scan(given, state=given.state)
    monkeypatch.setattr(module, "_CPU_ELEMENTS", 1)
    monkeypatch.setattr(module, "_MIN_CHANNELS", 16)
    blocks: list[int] = []
    apply = module._ChunkedScan.apply
    monkeypatch.setattr(
        module._ChunkedScan, "apply", lambda dt, *rest: (blocks.append(dt.shape[-1]), apply(dt, *rest))[1]
    )
    for found, expected in zip(scan(given, state=given.state), whole, strict=True):
        torch.testing.assert_close(found, expected)
    assert blocks == [16, 16, 16, 2]


def test_python_steps_stay_few_for_long_spans() -> None:
    cpu = torch.device("cpu")
    assert chunk_length(1, 512, 16, 4096, cpu) <= 4096 // 8
    assert chunk_length(1, 8192, 16, 131072, cpu) <= 131072 // 8
    assert chunk_length(4, 8, 4, 5, cpu) == 5
