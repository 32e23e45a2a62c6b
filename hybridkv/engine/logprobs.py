"""Log-probabilities of the model's own distribution: of tokens that were chosen, and of a prompt's own tokens.

They are log_softmax of the logits as the model gave them, before biases, penalties, bans and temperature, so they do
not depend on how a token was drawn.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hybridkv.engine.outputs import Likely, TokenLogprob
from hybridkv.engine.request import Request


def token_logprobs(logits: Tensor, tokens: Sequence[int], likeliest: Sequence[int]) -> list[TokenLogprob]:
    """The log-probability of one token a row, with the most likely tokens of that row.

    Args:
        logits: float32 [rows, vocab], as the model gave them; not changed.
        tokens: one per row.
        likeliest: how many most likely tokens are wanted of each row; a vocabulary has no more than it has.
    """
    total = logits.logsumexp(dim=-1, keepdim=True)
    chosen = torch.tensor(tokens, device=logits.device)[:, None]
    own = (logits.gather(1, chosen) - total)[:, 0].tolist()
    most = min(max(likeliest), logits.shape[-1])
    best = logits.topk(most, dim=-1)
    ids, values = best.indices.tolist(), (best.values - total).tolist()
    return [
        TokenLogprob(token, logprob, tuple(map(Likely, ids[row][:k], values[row][:k])))
        for row, (token, logprob, k) in enumerate(zip(tokens, own, likeliest, strict=True))
    ]


class Measured:
    """The rows of a step whose requests want log-probabilities, kept before sampling changes logits in place."""

    def __init__(self, logits: Tensor, requests: Sequence[Request]) -> None:
        """Copy the rows that are wanted.

        Args:
            logits: float32 [requests, vocab].
            requests: one per row.
        """
        self._rows = [row for row, request in enumerate(requests) if request.params.measured]
        self._likeliest = [requests[row].params.logprobs or 0 for row in self._rows]
        self._logits = logits[self._rows] if self._rows else logits[:0]
        self._count = len(requests)

    def of(self, tokens: Sequence[int]) -> list[TokenLogprob | None]:
        """The log-probability of each row's token, None where nobody asked."""
        found: list[TokenLogprob | None] = [None] * self._count
        if self._rows:
            measured = token_logprobs(self._logits, [tokens[row] for row in self._rows], self._likeliest)
            for row, logprob in zip(self._rows, measured, strict=True):
                found[row] = logprob
        return found


def read_prompt(request: Request, logits: Tensor, end: int) -> None:
    """Take the log-probabilities of prompt tokens from a chunk's logits.

    Args:
        request: the chunk's.
        logits: float32 [rows, vocab], those after the chunk's last tokens.
        end: tokens of the request up to the end of the chunk.
    """
    start = end - len(logits)
    targets = request.prompt[start + 1 : end + 1]
    if request.scoring and targets and start == len(request.prompt_logprobs):
        likeliest = [request.params.prompt_logprobs or 0] * len(targets)
        request.prompt_logprobs += token_logprobs(logits[: len(targets)], targets, likeliest)
