"""From a plan to spans, and from their logits to tokens: one for each request that is due, more for right guesses.

A guess is right if it is the very token that sampling takes there. Tokens are taken one after the other, each from a
row of logits that was computed over right tokens only, and with penalties, bans and the random stream as they are by
then. So the output is that of a request without guesses, also where it draws; only some passes are saved.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from hybridkv.engine.logprobs import Measured
from hybridkv.engine.request import Request
from hybridkv.engine.sampler import sample
from hybridkv.engine.scheduler import Plan
from hybridkv.hf.step import Span


class Asked(NamedTuple):
    """What a pass computes of one request.

    Attributes:
        request: whose.
        first: its first row of logits.
        row: the row after its last token that is certain; one more follows for each guess.
        firm: tokens that are certain.
        drafts: guesses behind them.
        due: whether a token is to be chosen: not so inside a prompt.
    """

    request: Request
    first: int
    row: int
    firm: int
    drafts: list[int]
    due: bool


def ask(plan: Plan) -> tuple[list[Asked], list[Span]]:
    """The spans of a plan, and what each of them is for."""
    asked: list[Asked] = []
    spans: list[Span] = []
    first = 0
    for request in plan.decodes:
        known, drafts = request.tokens[request.computed :], plan.drafts.get(request, [])
        asked.append(Asked(request, first, first, len(known), drafts, due=True))
        spans.append(Span(request.sequence, [*known, *drafts] if drafts else known, 1 + len(drafts)))
        first += 1 + len(drafts)
    for request, size in plan.chunks:
        done, rows = request.computed, request.logits_rows(size)
        asked.append(Asked(request, first, first + rows - 1, size, [], due=size == request.remaining))
        spans.append(Span(request.sequence, request.tokens[done : done + size], rows))
        first += rows
    return asked, spans


def usable(logits: Tensor, asked: Sequence[Asked]) -> tuple[list[Asked], list[Request]]:
    """Requests that have logits to go on from, and those whose logits are not numbers.

    A row behind a guess may be spoilt by that guess alone: then the guesses end before it.
    """
    bad = logits.amax(-1).isnan()
    if not bool(bad.any()):
        return list(asked), []
    spoilt: list[bool] = bad.tolist()
    good: list[Asked] = []
    failed: list[Request] = []
    for one in asked:
        if any(spoilt[one.first : one.row + 1]):
            failed.append(one.request)
            continue
        sound = [*spoilt[one.row + 1 : one.row + 1 + len(one.drafts)], True].index(True)
        good.append(one._replace(drafts=one.drafts[:sound]))
    return good, failed


def choose(logits: Tensor, asked: Sequence[Asked]) -> list[int]:
    """Append the chosen tokens to the requests that are due; returns how many guesses each of `asked` keeps.

    The last token appended is never among them: it was not computed, or the request ended with it.
    """
    kept = [0] * len(asked)
    for one in asked:
        one.request.drafted += len(one.drafts)
    going = [i for i, one in enumerate(asked) if one.due]
    while going:
        rows = [asked[i].row + kept[i] for i in going]
        # Several requests may ask for one row, so as many rows as there are need not be all of them.
        wanted = logits if rows == list(range(len(logits))) else logits[rows]
        measured = Measured(wanted, [asked[i].request for i in going])
        tokens = sample(wanted, [asked[i].request.state for i in going])
        right: list[int] = []
        for i, token, logprob in zip(going, tokens, measured.of(tokens), strict=True):
            request, drafts = asked[i].request, asked[i].drafts
            is_right = kept[i] < len(drafts) and drafts[kept[i]] == token
            request.accepted += is_right
            request.append(token, logprob)
            if is_right and not request.done:
                kept[i] += 1
                right.append(i)
        going = right
    return kept
