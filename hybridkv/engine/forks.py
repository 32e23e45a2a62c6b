"""Several outputs of one prompt: it is computed once, then every further output goes on in a fork of its sequence.

Forks share pages until they write to them. A copy has its own random stream, its own text and its own end, and is
scheduled, preempted and resumed like any request.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from hybridkv.engine.request import Request


def add_copies(head: Request, arrivals: Iterator[int]) -> None:
    """Give a new request the copies its params ask for.

    Args:
        head: not scheduled yet. It computes the prompt; its copies wait for their first token in `head.copies`.
        arrivals: numbers in order of submission, one is taken for each copy.
    """
    head.copies += [
        replace(head, arrival=next(arrivals), index=i, origin=head, copies=[], logprobs=[])
        for i in range(1, head.params.sampled)
    ]


def with_new_copies(ready: list[tuple[int, Request]]) -> list[tuple[int, Request]]:
    """Rows of logits and who samples from them: copies take their first token from the row of their head."""
    spread = []
    for row, request in ready:
        spread.append((row, request))
        if len(request.tokens) == len(request.prompt):
            spread += [(row, copy) for copy in request.copies]
    return spread
