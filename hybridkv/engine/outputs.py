"""What a caller gets back."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

FinishReason = Literal["stop", "length"]


class Likely(NamedTuple):
    """A token that could have come, and the natural logarithm of its probability."""

    token_id: int
    logprob: float


class TokenLogprob(NamedTuple):
    """A token that did come, by the model's own distribution.

    Attributes:
        token_id: the token.
        logprob: natural logarithm of its probability: log_softmax of the model's logits, before biases, penalties,
            bans and temperature.
        likeliest: the most likely tokens in its place, most likely first, as many as were asked for. The token itself
            is among them only if it is one of these.
    """

    token_id: int
    logprob: float
    likeliest: tuple[Likely, ...]


class Completion(NamedTuple):
    """One output of a prompt.

    Attributes:
        token_ids, text, finish_reason, logprobs, cumulative_logprob: as in `RequestOutput`.
    """

    token_ids: list[int]
    text: str
    finish_reason: FinishReason
    logprobs: tuple[TokenLogprob, ...] | None = None
    cumulative_logprob: float | None = None

    @property
    def mean_logprob(self) -> float:
        """`cumulative_logprob` by tokens; minus infinity where it was not measured."""
        return -math.inf if self.cumulative_logprob is None else self.cumulative_logprob / len(self.token_ids)


def best(completions: Sequence[Completion], n: int) -> tuple[Completion, ...]:
    """The n of highest mean log-probability, highest first; all of them, in the order given, if there are only n."""
    if len(completions) <= n:
        return tuple(completions)
    return tuple(sorted(completions, key=lambda one: one.mean_logprob, reverse=True)[:n])


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A finished request.

    Attributes:
        token_ids: generated tokens, the ending stop token included, as `model.generate` returns them.
        text: their text, without special tokens, cut before a stop string; empty without a tokenizer.
        prompt_tokens: tokens of the prompt.
        cached_tokens: of these, how many were not computed because a prefix of the prompt was cached.
        finish_reason: "stop" (a stop token, an end-of-sequence token or a stop string) or "length" (max_tokens).
        ttft_s: seconds from submission to the first token, time in the waiting queue included.
        total_s: seconds from submission to the last token.
        preemptions: how often the request gave its pages back and was computed again from the cache.
        drafted: tokens guessed ahead and checked by the model.
        accepted: of these, how many it chose as well.
        logprobs: one for each of `token_ids`; None unless `SamplingParams.logprobs` asked for them.
        prompt_logprobs: one for each prompt token but the first, given the tokens before it; None unless
            `SamplingParams.prompt_logprobs` asked for them.
        cumulative_logprob: natural logarithm of the probability of all of `token_ids`; None unless log-probabilities
            were computed, for `logprobs` or to choose the best.
        others: the second and further outputs of a prompt with `n` above 1; everything above is about the first one,
            but the preemptions of all are counted and the last token of all ends `total_s`.
    """

    token_ids: list[int]
    text: str
    prompt_tokens: int
    cached_tokens: int
    finish_reason: FinishReason
    ttft_s: float
    total_s: float
    preemptions: int = 0
    drafted: int = 0
    accepted: int = 0
    logprobs: tuple[TokenLogprob, ...] | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None
    cumulative_logprob: float | None = None
    others: tuple[Completion, ...] = ()

    @property
    def completions(self) -> tuple[Completion, ...]:
        """All `n` outputs of the prompt; one, unless more were asked for."""
        own = (self.token_ids, self.text, self.finish_reason, self.logprobs, self.cumulative_logprob)
        return (Completion(*own), *self.others)

    @property
    def decode_tokens_per_s(self) -> float:
        """Tokens after the first of each output, per second after the first; 0 for a single token."""
        seconds = self.total_s - self.ttft_s
        return sum(len(one.token_ids) - 1 for one in self.completions) / seconds if seconds > 0 else 0.0


@dataclass(frozen=True, slots=True)
class StreamEvent:
    """News of a streamed request.

    Attributes:
        token_ids: tokens since the last event.
        text: characters that became final since the last event; possibly empty while a character is incomplete
            or a stop string may have begun.
        finish_reason: None until the last event of this `index`.
        output: the whole output, with the last event of all.
        logprobs: one for each of `token_ids`; None unless `SamplingParams.logprobs` asked for them.
        index: which of the prompt's `n` outputs goes on.
    """

    token_ids: list[int]
    text: str
    finish_reason: FinishReason | None = None
    output: RequestOutput | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None
    index: int = 0
