"""Several outputs of one prompt: it is computed once, then every further output goes on in a fork of its sequence.

Forks share pages until they write to them. A copy has its own random stream, its own text and its own end, and is
scheduled, preempted and resumed like any request.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from hybridkv.engine.request import Request
from hybridkv.engine.verify import Asked


def add_copies(head: Request, arrivals: Iterator[int]) -> None:
    """Give a new request the copies its params ask for.

    Args:
        head: not scheduled yet. It computes the prompt; its copies wait for their first token in `head.copies`.
        arrivals: numbers in order of submission, one is taken for each copy.
    """
    head.copies += [
        replace(
            head,
            arrival=next(arrivals),
            index=i,
            origin=head,
            copies=[],
            logprobs=[],
            speculation=head.speculation and head.speculation.another(),
        )
        for i in range(1, head.params.sampled)
    ]


def new_copies(asked: Iterable[Asked]) -> list[Asked]:
    """The copies that take their first token now, from the row of their head."""
    return [
        one._replace(request=copy, firm=0)
        for one in asked
        if one.due and len(one.request.tokens) == len(one.request.prompt)
        for copy in one.request.copies
    ]
