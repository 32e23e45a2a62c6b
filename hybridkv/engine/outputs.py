"""What a caller gets back."""

from __future__ import annotations

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
        logprobs: one for each of `token_ids`; None unless `SamplingParams.logprobs` asked for them.
        prompt_logprobs: one for each prompt token but the first, given the tokens before it; None unless
            `SamplingParams.prompt_logprobs` asked for them.
    """

    token_ids: list[int]
    text: str
    prompt_tokens: int
    cached_tokens: int
    finish_reason: FinishReason
    ttft_s: float
    total_s: float
    preemptions: int = 0
    logprobs: tuple[TokenLogprob, ...] | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None

    @property
    def cumulative_logprob(self) -> float | None:
        """The natural logarithm of the probability of the whole output; None without `logprobs`."""
        return None if self.logprobs is None else sum(token.logprob for token in self.logprobs)

    @property
    def decode_tokens_per_s(self) -> float:
        """Tokens after the first, per second after the first; 0 for a single token."""
        seconds = self.total_s - self.ttft_s
        return (len(self.token_ids) - 1) / seconds if seconds > 0 else 0.0


class StreamEvent(NamedTuple):
    """News of a streamed request.

    Attributes:
        token_ids: tokens since the last event.
        text: characters that became final since the last event; possibly empty while a character is incomplete
            or a stop string may have begun.
        finish_reason: None until the last event.
        output: the whole output, with the last event.
        logprobs: one for each of `token_ids`; None unless `SamplingParams.logprobs` asked for them.
    """

    token_ids: list[int]
    text: str
    finish_reason: FinishReason | None = None
    output: RequestOutput | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None
