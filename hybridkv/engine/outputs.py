"""What a caller gets back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

FinishReason = Literal["stop", "length"]


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
    """

    token_ids: list[int]
    text: str
    prompt_tokens: int
    cached_tokens: int
    finish_reason: FinishReason
    ttft_s: float
    total_s: float
    preemptions: int = 0

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
    """

    token_ids: list[int]
    text: str
    finish_reason: FinishReason | None = None
    output: RequestOutput | None = None
