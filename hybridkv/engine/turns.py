"""In which order prompts share what a step has left for them.

Shortest first: a prompt that is nearly done does not wait for one that has just begun, so a question asked behind a
book is answered while the book is read. The prompt whose turn it is by priority and arrival is owed a quarter of every
step, so that the book is read to its end however many questions come: every prompt's turn comes, because those before
it are finite and none of them can be held up either.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from hybridkv.engine.request import Request, by_rank

Urgency = tuple[int, int, int]
"""Priority, tokens left, arrival."""

_OWED = 4


def owed(budget: int) -> int:
    """Tokens of a step that belong to the prompt whose turn it is."""
    return max(budget // _OWED, 1)


def in_turn(
    prompts: Sequence[Request],
    tokens_left: Callable[[Request], int],
    awaited: Mapping[Request, Urgency],
    budget: int,
) -> list[Request]:
    """Prompts in the order in which they take from the step's budget.

    Args:
        prompts: running and waiting ones.
        tokens_left: of a prompt, asked for only where it matters.
        awaited: the most urgent request that waits for a prefix of a prompt, with the tokens left until it is there.
        budget: tokens the step has for prompts.
    """
    if sum(len(request.tokens) - request.computed for request in prompts) <= budget:
        return sorted(prompts, key=by_rank)
    return sorted(prompts, key=lambda request: _urgency(request, tokens_left(request), awaited))


def _urgency(request: Request, left: int, awaited: Mapping[Request, Urgency]) -> Urgency:
    own = (request.priority, left, request.arrival)
    return min(own, awaited.get(request, own))
