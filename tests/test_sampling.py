"""SamplingParams refuse bad values; the sampler agrees with transformers' own logits processors."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
import torch
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from hybridkv.engine.adjust import adjust
from hybridkv.engine.params import SamplingParams
from hybridkv.engine.sampler import draw, sample, warp
from hybridkv.engine.sampler_state import SamplerState
from hybridkv.errors import HybridKVError, InvalidSampling

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("max_tokens", value) for value in (0, -1, 2**31, 10**30, 1.5, True, "64", None, NAN)],
        *[("temperature", value) for value in (NAN, INF, -INF, -0.1, "hot", None, True)],
        *[("top_k", value) for value in (-1, 2.0, "5", True, 10**20)],
        *[("top_p", value) for value in (0.0, -0.5, 1.1, NAN, INF, "0.5")],
        *[("min_p", value) for value in (-0.1, 1.1, NAN, None)],
        *[("repetition_penalty", value) for value in (0.0, -1.0, NAN, INF, "1")],
        *[("presence_penalty", value) for value in (-2.1, 2.1, NAN, INF)],
        *[("frequency_penalty", value) for value in (-2.1, 2.1, NAN, "1")],
        *[("logit_bias", value) for value in (5, {1: 101}, {1: -100.5}, {1: NAN}, {-1: 0}, {"1": 0}, {1.5: 0}, [1, 2])],
        *[("logit_bias", value) for value in ([(1, 2, 3)], [(1, 2), (1, 3)], {True: 1}, {2**31: 1}, {1: None})],
        *[("n", value) for value in (0, -1, 1025, 1.0, "2", True, None)],
        *[("best_of", value) for value in (0, 1025, 2.5, "2", True)],
        *[("min_tokens", value) for value in (-1, 65, 1.0, "1", True)],
        *[(name, value) for name in ("logprobs", "prompt_logprobs") for value in (-1, 1.0, "1", True)],
        *[("seed", value) for value in (-1, 2**63, 1.5, "7", True)],
        *[("stop", value) for value in ("", ("a", ""), 5, (b"a",), [None])],
        *[("stop_token_ids", value) for value in (-1, [-1], "12", [1.5], [True], 2.5)],
        *[("ignore_eos", value) for value in (1, "yes", None)],
        *[("include_stop_str_in_output", value) for value in (0, "yes", None)],
    ],
)
def test_bad_values_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(InvalidSampling, match=name.split("_ids")[0].replace("stop_token", "stop.token")) as caught:
        SamplingParams(**{name: value})
    assert "\n" not in str(caught.value)


def test_defaults_are_greedy_and_values_are_normalised() -> None:
    params = SamplingParams()
    assert params.greedy
    assert not params.penalised
    params = SamplingParams(temperature=1, stop="end", stop_token_ids=[3, 4], top_k=torch.tensor(5).item())
    assert params.stop == ("end",)
    assert params.stop_token_ids == (3, 4)
    assert isinstance(params.temperature, float)
    assert SamplingParams(stop_token_ids=7).stop_token_ids == (7,)  # type: ignore[arg-type]
    biased = SamplingParams(logit_bias={9: -100, 2: 1.5})
    assert biased.logit_bias == ((2, 1.5), (9, -100.0))
    assert hash(biased) == hash(SamplingParams(logit_bias=((9, -100.0), (2, 1.5))))
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.top_k = 1  # type: ignore[misc]


def logits_of(rows: int, vocab: int, seed: int = 0, spread: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * spread


SETTINGS = [
    SamplingParams(temperature=0.7),
    SamplingParams(temperature=1.3, top_k=7),
    SamplingParams(temperature=1.0, top_p=0.8),
    SamplingParams(temperature=0.9, min_p=0.05),
    SamplingParams(temperature=1.1, top_k=40, top_p=0.9, min_p=0.02),
    SamplingParams(temperature=2.0, top_p=0.999),
    SamplingParams(temperature=0.5, top_k=1),
    SamplingParams(temperature=1.0, top_k=10**6, top_p=1e-9),
]


def warped_by_transformers(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    ids = torch.zeros(1, 1, dtype=torch.long)
    scores = TemperatureLogitsWarper(params.temperature)(ids, logits)
    if params.top_k:
        scores = TopKLogitsWarper(params.top_k)(ids, scores)
    if params.top_p < 1:
        scores = TopPLogitsWarper(params.top_p)(ids, scores)
    if params.min_p:
        scores = MinPLogitsWarper(params.min_p)(ids, scores)
    return scores


@pytest.mark.parametrize("vocab", [50, 3000])
def test_warping_a_mixed_batch_equals_transformers_row_by_row(vocab: int) -> None:
    for seed in range(5):
        logits = logits_of(len(SETTINGS), vocab, seed)
        got = warp(logits, SETTINGS).softmax(-1)
        for row, params in enumerate(SETTINGS):
            expected = warped_by_transformers(logits[row : row + 1], params).softmax(-1)[0]
            assert torch.equal(got[row] > 0, expected > 0), params
            torch.testing.assert_close(got[row], expected, rtol=1e-4, atol=1e-7)


def test_a_flat_distribution_needs_more_than_the_head_of_the_sort() -> None:
    logits = logits_of(2, 5000, spread=0.01)
    params = SamplingParams(temperature=1.0, top_p=0.7)
    got = warp(logits, [params, SamplingParams(temperature=1.0, top_p=0.01)])
    assert torch.equal(got[0] > -torch.inf, warped_by_transformers(logits[:1], params)[0] > -torch.inf)
    assert int((got[0] > -torch.inf).sum()) > 3000


def test_penalties_equal_transformers_and_the_definition() -> None:
    logits = logits_of(4, 60)
    prompt, output = [1, 2, 2, 59], [5, 5, 7]
    params = [
        SamplingParams(),
        SamplingParams(repetition_penalty=1.7),
        SamplingParams(presence_penalty=0.6),
        SamplingParams(repetition_penalty=0.5, presence_penalty=-1.5),
    ]
    states = [SamplerState(one, prompt) for one in params]
    for state in states:
        for token in output:
            state.append(token)
    got = logits.clone()
    adjust(got, states)
    seen = torch.tensor([prompt + output])
    presence = torch.zeros(60)
    presence[[5, 7]] = 1.0
    for row, one in enumerate(params):
        expected = RepetitionPenaltyLogitsProcessor(one.repetition_penalty)(seen, logits[row : row + 1].clone())[0]
        torch.testing.assert_close(got[row], expected - one.presence_penalty * presence)


def adjusted_one_by_one(logits: torch.Tensor, params: SamplingParams, prompt: list[int], output: list[int]) -> Any:
    """The definition, token by token."""
    row = logits.tolist()
    biases = dict(params.logit_bias)
    for token in range(len(row)):
        row[token] += biases.get(token, 0.0)
        if token in prompt or token in output:
            factor = params.repetition_penalty
            row[token] = row[token] * factor if row[token] < 0 else row[token] / factor
        row[token] -= params.presence_penalty * (token in output) + params.frequency_penalty * output.count(token)
        if token in STOPS and len(output) < params.min_tokens:
            row[token] = -INF
    return torch.tensor(row)


STOPS = (0, 17, 39)


def random_params(rng: random.Random) -> SamplingParams:
    def maybe(value: Any, default: Any) -> Any:
        return value if rng.random() < 0.5 else default

    return SamplingParams(
        temperature=maybe(rng.uniform(0.2, 2), 0.0),
        top_k=maybe(rng.randrange(1, 60), 0),
        top_p=maybe(rng.uniform(0.1, 1), 1.0),
        min_p=maybe(rng.uniform(0, 0.2), 0.0),
        repetition_penalty=maybe(rng.uniform(0.5, 2), 1.0),
        presence_penalty=maybe(rng.uniform(-2, 2), 0.0),
        frequency_penalty=maybe(rng.uniform(-2, 2), 0.0),
        logit_bias=maybe({rng.randrange(40): rng.uniform(-100, 100) for _ in range(rng.randrange(5))}, {}),
        min_tokens=maybe(rng.randrange(12), 0),
        seed=rng.randrange(100),
    )


@pytest.mark.parametrize("seed", range(30))
def test_a_mixed_batch_equals_every_row_by_itself(seed: int) -> None:
    rng = random.Random(seed)
    count = rng.randrange(1, 9)
    params = [random_params(rng) for _ in range(count)]
    prompts = [[rng.randrange(40) for _ in range(rng.randrange(1, 12))] for _ in range(count)]
    outputs = [[rng.randrange(40) for _ in range(rng.randrange(9))] for _ in range(count)]
    logits = logits_of(count, 40, seed)

    def states_of(rows: range) -> list[SamplerState]:
        states = [SamplerState(params[row], prompts[row], STOPS) for row in rows]
        for state, row in zip(states, rows, strict=True):
            for token in outputs[row]:
                state.append(token)
        return states

    got = logits.clone()
    adjust(got, states_of(range(count)))
    for row in range(count):
        expected = adjusted_one_by_one(logits[row], params[row], prompts[row], outputs[row])
        torch.testing.assert_close(got[row], expected, rtol=1e-5, atol=1e-5)
    together = sample(logits.clone(), states_of(range(count)))
    alone = [sample(logits[row : row + 1].clone(), states_of(range(row, row + 1)))[0] for row in range(count)]
    assert together == alone
    for row, token in enumerate(together):
        assert token not in STOPS or len(outputs[row]) >= params[row].min_tokens
        if params[row].greedy:
            assert token == int(got[row].argmax())


def test_a_bias_of_a_hundred_decides() -> None:
    logits = logits_of(2, 50)
    best = logits.argmax(-1).tolist()
    states = [
        SamplerState(SamplingParams(logit_bias={7: 100}), [0]),
        SamplerState(SamplingParams(temperature=1.0, logit_bias={best[1]: -100}, seed=1), [0]),
    ]
    tokens = [sample(logits.clone(), states) for _ in range(50)]
    assert {first for first, _ in tokens} == {7}
    assert best[1] not in {second for _, second in tokens}


def test_rows_without_features_are_not_touched() -> None:
    logits = logits_of(3, 50)
    got = logits.clone()
    adjust(got, [SamplerState(SamplingParams(temperature=t, seed=1), [1, 2], STOPS) for t in (0.0, 1.0, 0.5)])
    assert torch.equal(got, logits)


def test_draws_follow_the_probabilities() -> None:
    logits = torch.tensor([[0.1, 0.2, 0.0, 0.7]]).log()
    count = 20000
    uniforms = torch.rand(count, generator=torch.Generator().manual_seed(1), dtype=torch.float64).tolist()
    tokens = draw(logits.expand(count, -1), uniforms)
    shares = torch.bincount(torch.tensor(tokens), minlength=4) / count
    torch.testing.assert_close(shares, torch.tensor([0.1, 0.2, 0.0, 0.7]), atol=0.01, rtol=0)
    assert shares[2] == 0


def test_the_ends_of_the_unit_interval_draw_possible_tokens() -> None:
    logits = torch.tensor([[-torch.inf, 0.0, 0.0, -torch.inf]])
    assert draw(logits.expand(2, -1), [0.0, 1.0 - 2.0**-53]) == [1, 2]


def test_a_request_draws_the_same_whoever_runs_beside_it() -> None:
    logits = logits_of(6, 200, spread=1.0)
    params = SamplingParams(temperature=1.0, top_p=0.95, seed=11)

    def run(rows: list[int], others: SamplingParams) -> list[int]:
        states = [SamplerState(params if row == 2 else others, [1]) for row in rows]
        return [sample(logits[rows].clone(), states)[rows.index(2)] for _ in range(20)]

    alone = run([2], SamplingParams())
    assert alone == run([0, 1, 2, 3, 4, 5], SamplingParams())
    assert alone == run([5, 2], SamplingParams(temperature=0.3, top_k=3))
    assert len(set(alone)) > 3


def test_seeds() -> None:
    logits = logits_of(1, 500)

    def run(seed: int | None) -> list[int]:
        state = SamplerState(SamplingParams(temperature=1.0, seed=seed), [0])
        return [sample(logits.clone(), [state])[0] for _ in range(12)]

    assert run(3) == run(3)
    assert run(3) != run(4)
    assert run(None) != run(None)
    torch.manual_seed(5)
    first = run(None)
    torch.manual_seed(5)
    assert run(None) == first


def test_greedy_rows_take_the_first_maximum_and_never_touch_a_generator() -> None:
    logits = torch.zeros(2, 9)
    logits[1, 4] = 1.0
    before = torch.get_rng_state()
    states = [SamplerState(SamplingParams(), [0]) for _ in range(2)]
    assert sample(logits, states) == [0, 4]
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("temperature", [1e-300, 1e-30, 1e-6])
def test_tiny_temperatures_are_nearly_greedy(temperature: float) -> None:
    logits = logits_of(1, 50, spread=1000.0)
    state = SamplerState(SamplingParams(temperature=temperature, seed=1), [0])
    assert sample(logits.clone(), [state]) == logits.argmax(-1).tolist()


def test_not_a_number_is_an_error_that_names_the_row() -> None:
    logits = torch.zeros(2, 9)
    logits[1, 3] = NAN
    with pytest.raises(HybridKVError, match="not a number"):
        sample(logits, [SamplerState(SamplingParams(), [0]) for _ in range(2)])
