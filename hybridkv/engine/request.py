"""One request on its way through the engine."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from hybridkv.engine.detokenize import OutputText, Tokenizer
from hybridkv.engine.drafts import Speculation
from hybridkv.engine.outputs import Completion, FinishReason, RequestOutput, StreamEvent, TokenLogprob, best
from hybridkv.engine.params import SamplingParams
from hybridkv.engine.sampler_state import SamplerState
from hybridkv.errors import HybridKVError, UsageError
from hybridkv.hashing import Adapter, Salt
from hybridkv.sequence import Sequence as ManagedSequence


@dataclass(slots=True, eq=False)
class Request:
    """A prompt, its progress and its sequence in the manager while it runs.

    Attributes:
        arrival: number in order of submission.
        tokens: prompt and generated tokens.
        logprobs: of generated tokens, where the params ask for them.
        prompt_logprobs: of prompt tokens from the second on, as far as they were computed, where the params ask.
        stop_ids: token ids that end it, end-of-sequence ids included.
        cache: whether it may use and fill the cache.
        priority: lower runs first.
        adapter: name and revision of its LoRA adapter, None for the base model.
        speculation: guesses its next tokens; None if nobody does.
        seq: held while running, None while waiting or done.
        drafted, accepted: guesses that were checked, and how many of them the model chose as well.
        error: why it ended without an output, if it did so alone.
        index: which of its prompt's outputs it generates.
        origin: the request that computes the prompt for it, if it is a copy.
        copies: requests that go on from this one's prompt.
        events: news of all outputs of the prompt.
        completion: its own output, once it has ended.
        output: once all of them have ended; copies have none.
        foreseen_hit, refused_at, passed: kept by the admission while it waits.
    """

    arrival: int
    prompt: list[int]
    params: SamplingParams
    stop_ids: frozenset[int]
    salt: Salt | None = None
    breakpoints: tuple[int, ...] = ()
    cache: bool = True
    priority: int = 0
    adapter: Adapter | None = None
    tokenizer: Tokenizer | None = None
    speculation: Speculation | None = None
    seq: ManagedSequence | None = None
    cached_tokens: int | None = None
    preemptions: int = 0
    drafted: int = 0
    accepted: int = 0
    finish_reason: FinishReason | None = None
    dropped: bool = False
    error: HybridKVError | None = None
    index: int = 0
    origin: Request | None = None
    copies: list[Request] = field(default_factory=list)
    completion: Completion | None = None
    foreseen_hit: int | None = None
    refused_at: int | None = None
    passed: int = 0
    output: RequestOutput | None = None
    events: deque[StreamEvent] = field(default_factory=deque)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    tokens: list[int] = field(init=False)
    state: SamplerState = field(init=False)
    _array: NDArray[np.int64] = field(init=False)
    _text: OutputText = field(init=False)
    _submitted: float = field(default_factory=time.perf_counter)
    _first: float = 0.0

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)
        self.state = SamplerState(self.params, self.prompt, self.stop_ids, self.index)
        self._array = np.array(self.prompt, dtype=np.int64)
        self._text = OutputText(self.tokenizer, self.params.stop, include_stop=self.params.include_stop_str_in_output)

    @property
    def generated(self) -> list[int]:
        return self.tokens[len(self.prompt) :]

    @property
    def head(self) -> Request:
        """The request that computes the prompt."""
        return self.origin or self

    @property
    def members(self) -> tuple[Request, ...]:
        """All outputs of the prompt."""
        return (self.head, *self.head.copies)

    @property
    def done(self) -> bool:
        """Whether every output of the prompt has ended."""
        return all(one.ended for one in self.members)

    @property
    def ended(self) -> bool:
        """Whether this output has ended, whatever others of its prompt do."""
        return self.dropped or self.error is not None or self.finish_reason is not None

    @property
    def sequence(self) -> ManagedSequence:
        """The sequence of a running request.

        Raises:
            UsageError: the request is waiting or done.
        """
        if self.seq is None:
            raise UsageError(f"request {self.arrival} holds no sequence")
        return self.seq

    @property
    def computed(self) -> int:
        """Tokens whose keys, values and states are in the pool."""
        return self.seq.length if self.seq is not None else 0

    @property
    def remaining(self) -> int:
        """Known tokens still to be computed; while decoding 1, and more where a guess after right ones was wrong."""
        return len(self.tokens) - self.computed

    @property
    def scoring(self) -> bool:
        """Whether log-probabilities of prompt tokens are still to be computed."""
        return self.params.prompt_logprobs is not None and len(self.prompt_logprobs) < len(self.prompt) - 1

    def logits_rows(self, size: int) -> int:
        """How many rows of logits the next `size` tokens must give: one, or one after each token not yet scored."""
        return max(self.computed + size - len(self.prompt_logprobs), 1) if self.scoring else 1

    @property
    def decoding(self) -> bool:
        """Whether the next token to compute is one the sequence was not opened with."""
        return self.seq is not None and self.seq.length == self.seq.known

    def guess(self, most: int) -> list[int]:
        """At most `most` tokens that may come next: none that would end the output, for nothing comes after it."""
        if self.speculation is None:
            return []
        left = len(self.prompt) + self.params.max_tokens - len(self.tokens)
        guesses = self.speculation.propose(self.tokens, min(most, left - 1))
        ends = (i for i, token in enumerate(guesses) if token in self.stop_ids)
        return guesses[: next(ends, len(guesses))]

    def learn(self, drafted: int, kept: int) -> None:
        """Hear how many of its guesses were right."""
        if self.speculation is not None:
            self.speculation.judge(drafted, kept)

    def shared_tokens(self, other: Request, unit_tokens: int) -> int:
        """Longest prefix of this prompt, in whole token units and short of its last token, that `other` shares."""
        # Most prompts part in their first unit: that is cheap to see.
        if (
            (self.salt, self.adapter) != (other.salt, other.adapter)
            or not (self.cache and other.cache)
            or self.prompt[:unit_tokens] != other.prompt[:unit_tokens]
        ):
            return 0
        size = min(len(self._array) - 1, len(other._array))
        differs = self._array[:size] != other._array[:size]
        common = int(differs.argmax()) if differs.any() else size
        return common - common % unit_tokens

    def append(self, token: int, logprob: TokenLogprob | None = None) -> None:
        """Take a sampled token: text, stop conditions, event."""
        logprobs = None if logprob is None else (logprob,)
        self.logprobs += logprobs or ()
        if len(self.tokens) == len(self.prompt):
            self._first = time.perf_counter()
        self.tokens.append(token)
        self.state.append(token)
        count = len(self.tokens) - len(self.prompt)
        may_stop = count >= self.params.min_tokens
        text = "" if token in self.stop_ids else self._text.push(token, may_stop=may_stop)
        last = token in self.stop_ids or count >= self.params.max_tokens
        if last:
            text += self._text.finish()
        if token in self.stop_ids or self._text.stopped:
            self.finish_reason = "stop"
        elif last:
            self.finish_reason = "length"
        if self.finish_reason is not None:
            self.completion = self._completion(self.finish_reason)
        head = self.head
        if head.done:
            head.output = head._finished()
        shown = None if self.params.logprobs is None else logprobs
        head.events.append(StreamEvent([token], text, self.finish_reason, head.output, shown, self.index))

    def _completion(self, reason: FinishReason) -> Completion:
        return Completion(
            self.generated,
            self._text.text,
            reason,
            None if self.params.logprobs is None else tuple(self.logprobs),
            sum(token.logprob for token in self.logprobs) if self.params.measured else None,
        )

    def _finished(self) -> RequestOutput:
        now = time.perf_counter()
        completions = [one.completion for one in self.members if one.completion is not None]
        first, *others = best(completions, self.params.n)
        return RequestOutput(
            token_ids=first.token_ids,
            text=first.text,
            prompt_tokens=len(self.prompt),
            cached_tokens=self.cached_tokens or 0,
            finish_reason=first.finish_reason,
            ttft_s=self._first - self._submitted,
            total_s=now - self._submitted,
            preemptions=sum(one.preemptions for one in self.members),
            logprobs=first.logprobs,
            drafted=sum(one.drafted for one in self.members),
            accepted=sum(one.accepted for one in self.members),
            prompt_logprobs=None if self.params.prompt_logprobs is None else tuple(self.prompt_logprobs),
            cumulative_logprob=first.cumulative_logprob,
            others=tuple(others),
        )


def by_rank(request: Request) -> tuple[int, int]:
    """Its place in the order of service: lower comes first and is preempted last."""
    return request.priority, request.arrival


def shared_boundaries(request: Request, others: Sequence[Request], unit_tokens: int, most: int) -> tuple[int, ...]:
    """Where the prompts of `others` part from this one: boundaries worth a resume point, the most shared first."""
    counts: dict[int, int] = {}
    for other in others:
        boundary = other.shared_tokens(request, unit_tokens)
        if boundary:
            counts[boundary] = counts.get(boundary, 0) + 1
    return tuple(sorted(counts, key=lambda boundary: (-counts[boundary], -boundary))[:most])
