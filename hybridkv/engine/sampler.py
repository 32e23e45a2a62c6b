"""From logits to one token per request, in one call for a whole batch.

Order of the steps: logit bias, repetition penalty, presence and frequency penalties, tokens banned by min_tokens,
temperature, top-k, top-p, min-p, draw; where transformers has a step too, it has this order. Every step works on the
rows that ask for it; a greedy row costs its argmax.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from hybridkv.engine.adjust import adjust, column
from hybridkv.engine.params import SamplingParams
from hybridkv.engine.sampler_state import SamplerState
from hybridkv.errors import HybridKVError

_TOP_P_HEAD = 512
_Step = Callable[[Tensor, list[SamplingParams]], None]


def sample(logits: Tensor, states: Sequence[SamplerState]) -> list[int]:
    """One token for each request.

    Args:
        logits: float32 [requests, vocab], on any device. Changed in place where a request has
            biases, penalties or banned tokens.
        states: one per row; a row that draws takes one number from its state's generator.

    Raises:
        HybridKVError: a row holds a NaN.
    """
    adjust(logits, states)
    best = logits.max(dim=-1)
    if bool(best.values.isnan().any()):
        row = int(best.values.isnan().nonzero()[0, 0])
        raise HybridKVError(
            f"the model's logits for request {row + 1} of {len(states)} in this step are not a number; "
            "half precision overflows in some models: try bfloat16 or float32"
        )
    tokens: list[int] = best.indices.tolist()
    rows = [i for i, state in enumerate(states) if not state.params.greedy]
    if rows:
        drawn = [states[i] for i in rows]
        kept = logits if len(rows) == len(states) else logits[_index(rows, logits.device)]
        warped = warp(kept, [state.params for state in drawn])
        for i, token in zip(rows, draw(warped, [state.uniform() for state in drawn]), strict=True):
            tokens[i] = token
    return tokens


def warp(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Temperature, top-k, top-p and min-p; dropped tokens become -inf.

    Args:
        logits: float [requests, vocab]; not changed.
        params: one per row, every temperature above 0.
    """
    # Shifting by the maximum first keeps tiny temperatures from overflowing; probabilities do not change.
    shifted = logits - logits.amax(dim=-1, keepdim=True)
    scores = shifted / column([p.temperature for p in params], logits).clamp_min(torch.finfo(logits.dtype).tiny)
    vocab = scores.shape[-1]
    _on_rows(scores, [i for i, p in enumerate(params) if 0 < p.top_k < vocab], params, _top_k)
    _on_rows(scores, [i for i, p in enumerate(params) if p.top_p < 1.0], params, _top_p)
    _on_rows(scores, [i for i, p in enumerate(params) if p.min_p > 0.0], params, _min_p)
    return scores


def draw(scores: Tensor, uniforms: Sequence[float]) -> list[int]:
    """The token of each row at which the cumulated probability passes its uniform number in [0, 1)."""
    mass = scores.double().softmax(dim=-1).cumsum(dim=-1)
    total = mass[:, -1:]
    target = torch.tensor(uniforms, dtype=torch.float64, device=scores.device)[:, None] * total
    # A product rounded up to the total would point past the last token.
    target = torch.minimum(target, torch.nextafter(total, torch.zeros_like(total)))
    tokens: list[int] = torch.searchsorted(mass, target, right=True)[:, 0].tolist()
    return tokens


def _on_rows(scores: Tensor, rows: list[int], params: Sequence[SamplingParams], step: _Step) -> None:
    if len(rows) == scores.shape[0]:
        step(scores, list(params))
    elif rows:
        index = _index(rows, scores.device)
        part = scores[index]
        step(part, [params[i] for i in rows])
        scores[index] = part


def _top_k(scores: Tensor, params: list[SamplingParams]) -> None:
    ks = torch.tensor([p.top_k for p in params], device=scores.device)
    best = scores.topk(int(ks.max()), dim=-1).values
    scores.masked_fill_(scores < best.gather(1, ks[:, None] - 1), -torch.inf)


def _top_p(scores: Tensor, params: list[SamplingParams]) -> None:
    limits = column([p.top_p for p in params], scores)
    probs = scores.softmax(dim=-1)
    head = min(_TOP_P_HEAD, scores.shape[-1])
    values, order = probs.topk(head, dim=-1)
    # Sorting the whole vocabulary is worth it only where the likeliest few hundred tokens do not reach top_p.
    if head < scores.shape[-1] and bool((values.sum(dim=-1, keepdim=True) < limits).any()):
        values, order = probs.sort(dim=-1, descending=True)
    before = values.cumsum(dim=-1) - values
    dropped = torch.ones_like(scores, dtype=torch.bool)
    dropped.scatter_(1, order, before >= limits)
    dropped.scatter_(1, order[:, :1], torch.zeros_like(dropped[:, :1]))
    scores.masked_fill_(dropped, -torch.inf)


def _min_p(scores: Tensor, params: list[SamplingParams]) -> None:
    probs = scores.softmax(dim=-1)
    floor = column([p.min_p for p in params], scores) * probs.amax(dim=-1, keepdim=True)
    scores.masked_fill_(probs < floor, -torch.inf)


def _index(rows: Iterable[int], device: torch.device) -> Tensor:
    return torch.tensor(list(rows), device=device)
