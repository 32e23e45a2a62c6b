"""The delta rule in chunks and in single steps against transformers' loop over tokens, in float32 to 1e-5."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.kimi_linear.modeling_kimi_linear import recurrent_kimi_delta_attention
from transformers.models.qwen3_next.modeling_qwen3_next import torch_recurrent_gated_delta_rule

from hybridkv.ops import delta_scan as module
from hybridkv.ops.delta_scan import DeltaInputs, delta_scan, delta_step

BATCH, HEADS, KEY_DIM, DIM = 2, 4, 16, 12

LOOPS: dict[str, Callable[..., Any]] = {
    "by head": torch_recurrent_gated_delta_rule,
    "by channel": recurrent_kimi_delta_attention,
}


def inputs(
    decay: str, tokens: int, *, key_heads: int = HEADS, strength: float = 1.0, wide: bool = False
) -> DeltaInputs:
    torch.manual_seed(tokens)
    dtype = torch.float64 if wide else torch.float32
    query, key = (torch.randn(BATCH, tokens, key_heads, KEY_DIM, dtype=dtype) for _ in range(2))
    shape = (BATCH, tokens, HEADS) if decay == "by head" else (BATCH, tokens, HEADS, KEY_DIM)
    value = torch.randn(BATCH, tokens, HEADS, DIM, dtype=dtype)
    # Up to 2, as models have it whose states may change sign.
    beta = 2 * torch.rand(BATCH, tokens, HEADS, dtype=dtype)
    return DeltaInputs(query, key, value, -strength * torch.rand(shape, dtype=dtype), beta)


def start() -> Tensor:
    return torch.randn(BATCH, HEADS, KEY_DIM, DIM, generator=torch.Generator().manual_seed(1))


def loop(decay: str, given: DeltaInputs, state: Tensor | None, normalise: bool = True) -> tuple[Tensor, Tensor]:
    query, key, value, g, beta = given
    options = {"output_final_state": True, "use_qk_l2norm_in_kernel": normalise}
    out, state = LOOPS[decay](query, key, value, g=g, beta=beta, initial_state=state, **options)
    return out, state


def close(found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("resumed", [True, False])
@pytest.mark.parametrize("tokens", [1, 2, 15, 16, 33, 150])
@pytest.mark.parametrize("decay", LOOPS)
def test_a_span_equals_the_loop_over_its_tokens(decay: str, tokens: int, resumed: bool) -> None:
    given = inputs(decay, tokens)
    state = start() if resumed else None
    close(delta_scan(given, state, normalise=True), loop(decay, given, state))


@pytest.mark.parametrize("decay", LOOPS)
def test_segments_pass_the_state_on(decay: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SEGMENT_ITEMS", 1)
    given = inputs(decay, 150)
    close(delta_scan(given, start(), normalise=True), loop(decay, given, start()))


@pytest.mark.parametrize("strength", [1e-3, 30.0, 1e3])
@pytest.mark.parametrize("decay", LOOPS)
def test_decays_from_none_to_total_neither_overflow_nor_lose_digits(decay: str, strength: float) -> None:
    given = inputs(decay, 70, strength=strength)
    close(delta_scan(given, start(), normalise=True), loop(decay, given, start()))


@pytest.mark.parametrize("decay", LOOPS)
def test_a_span_cut_anywhere_ends_the_same(decay: str) -> None:
    given = inputs(decay, 60)
    whole, end = delta_scan(given, None, normalise=True)
    for cut in (1, 16, 37, 59):
        first, between = delta_scan(given.tokens(0, cut), None, normalise=True)
        second, state = delta_scan(given.tokens(cut), between, normalise=True)
        close((torch.cat([first, second], 1), state), (whole, end))


@pytest.mark.parametrize("decay", LOOPS)
def test_single_steps_equal_the_loop(decay: str) -> None:
    given = inputs(decay, 5)
    state, outputs = start(), []
    for i in range(5):
        out, state = delta_step(given.tokens(i, i + 1), state, normalise=True)
        outputs.append(out)
    close((torch.cat(outputs, 1), state), loop(decay, given, start()))


def test_several_value_heads_share_a_key_head() -> None:
    given = inputs("by head", 40, key_heads=2)
    expected = loop("by head", given, start())
    close(delta_scan(given, start(), normalise=True), expected)
    first = given.tokens(0, 1)
    close(delta_step(first, start(), normalise=True), loop("by head", first, start()))


@pytest.mark.parametrize("decay", LOOPS)
def test_keys_may_come_as_they_are(decay: str) -> None:
    given = inputs(decay, 40)
    given = given._replace(key=given.key / 8)
    close(delta_scan(given, start(), normalise=False), loop(decay, given, start(), normalise=False))
    first = given.tokens(0, 1)
    close(delta_step(first, start(), normalise=False), loop(decay, first, start(), normalise=False))


@pytest.mark.parametrize("decay", LOOPS)
def test_half_precision_is_computed_in_float32(decay: str) -> None:
    given = DeltaInputs(*(values.bfloat16() for values in inputs(decay, 40)))
    out, state = delta_scan(given, start(), normalise=True)
    expected, end = delta_scan(DeltaInputs(*(values.float() for values in given)), start(), normalise=True)
    assert out.dtype == torch.bfloat16
    assert state.dtype == torch.float32
    assert torch.equal(out, expected.bfloat16())
    assert torch.equal(state, end)


@pytest.mark.parametrize("decay", LOOPS)
def test_float64_keeps_its_digits(decay: str) -> None:
    given = inputs(decay, 40, wide=True)
    whole, end = delta_scan(given, None, normalise=True)
    state, outputs = torch.zeros_like(end), []
    for i in range(40):
        out, state = delta_step(given.tokens(i, i + 1), state, normalise=True)
        outputs.append(out)
    torch.testing.assert_close(whole, torch.cat(outputs, 1), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(end, state, rtol=1e-12, atol=1e-12)
