"""How one request is sampled: validated once, then never changed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

from hybridkv.errors import InvalidSampling

MAX_TOKENS_LIMIT = 2**31 - 1
MOST_OUTPUTS = 1024
_SEED_LIMIT = 2**63 - 1


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling of one request. The default is greedy.

    Attributes:
        max_tokens: most tokens to generate, 1 to 2**31 - 1. Prompt and max_tokens together must fit the model.
        temperature: 0 takes the most likely token; above 0 the logits are divided by it and a token is drawn.
        top_k: draw among the k most likely tokens; 0 for all.
        top_p: draw among the fewest tokens whose probabilities add up to at least this, 0 < top_p <= 1.
        min_p: drop tokens less likely than min_p times the most likely one, 0 <= min_p <= 1.
        repetition_penalty: above 0; logits of tokens seen in prompt or output are divided by it if positive and
            multiplied if negative. 1 is off.
        presence_penalty: -2 to 2; subtracted from the logit of every token already generated. 0 is off.
        frequency_penalty: -2 to 2; subtracted from the logit of a token once for each time it was generated. 0 is off.
        logit_bias: token id -> number from -100 to 100 added to its logit, before everything else; at the ends of
            the range a token is practically banned or forced. Kept as pairs sorted by id. No token twice.
        min_tokens: generate at least this many tokens, 0 to max_tokens: before that, tokens that would end the
            output (end of sequence, stop_token_ids) cannot be drawn and stop strings are not looked for.
        seed: makes the draws of this request repeatable whatever runs beside it; output i of several draws with
            seed + i. None takes one from torch's default generator, so `torch.manual_seed` makes a whole program
            repeatable.
        n: outputs of the prompt, 1 to 1024. The prompt is computed once, and its pages are shared. Greedy outputs are
            all the same.
        best_of: generate this many outputs, n to 1024, and return the n whose tokens have the highest mean
            log-probability in the model's own distribution, highest first. None is n. Not for streams.
        logprobs: report every generated token's log-probability and those of this many most likely tokens; 0 reports
            the token's own only, None nothing. Always of the model's own distribution: log_softmax of its logits,
            before biases, penalties, bans and temperature.
        prompt_logprobs: the same for every prompt token but the first, given the tokens before it. Such a prompt is
            computed as a whole: a cached prefix has no logits.
        stop: strings that end the output; the text is cut before the first one.
        include_stop_str_in_output: cut the text after the stop string instead.
        stop_token_ids: token ids that end the output. The id is part of `token_ids`, never of the text.
        ignore_eos: go on after the model's end-of-sequence tokens.

    Raises:
        InvalidSampling: a value of the wrong type or outside its range.
    """

    max_tokens: int = 64
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    seed: int | None = None
    n: int = 1
    best_of: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        self._set("max_tokens", _integer("max_tokens", self.max_tokens, 1, MAX_TOKENS_LIMIT))
        self._set("temperature", _number("temperature", self.temperature, "at least 0", lambda t: t >= 0))
        self._set("top_k", _integer("top_k", self.top_k, 0, MAX_TOKENS_LIMIT))
        self._set("top_p", _number("top_p", self.top_p, "above 0 and at most 1", lambda p: 0 < p <= 1))
        self._set("min_p", _number("min_p", self.min_p, "from 0 to 1", lambda p: 0 <= p <= 1))
        penalty = _number("repetition_penalty", self.repetition_penalty, "above 0", lambda r: r > 0)
        self._set("repetition_penalty", penalty)
        for name in ("presence_penalty", "frequency_penalty"):
            self._set(name, _number(name, getattr(self, name), "from -2 to 2", lambda p: -2 <= p <= 2))
        self._set("logit_bias", _biases(self.logit_bias))
        self._set("min_tokens", _integer("min_tokens", self.min_tokens, 0, self.max_tokens))
        if self.seed is not None:
            self._set("seed", _integer("seed", self.seed, 0, _SEED_LIMIT))
        self._set("n", _integer("n", self.n, 1, MOST_OUTPUTS))
        if self.best_of is not None:
            self._set("best_of", _integer("best_of", self.best_of, self.n, MOST_OUTPUTS))
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                self._set(name, _integer(name, getattr(self, name), 0, MAX_TOKENS_LIMIT))
        self._set("stop", _strings(self.stop))
        self._set("stop_token_ids", _ids(self.stop_token_ids))
        for name in ("ignore_eos", "include_stop_str_in_output"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidSampling(f"{name} must be True or False, got {getattr(self, name)!r}")

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def measured(self) -> bool:
        """Whether the log-probabilities of generated tokens are wanted."""
        return self.logprobs is not None or self.sampled > self.n

    @property
    def sampled(self) -> int:
        """How many outputs are generated, of which `n` are returned."""
        return self.best_of or self.n

    @property
    def penalised(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


def _integer(name: str, value: object, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise InvalidSampling(f"{name} must be an integer from {low} to {high}, got {value!r}")
    if not low <= int(value) <= high:
        raise InvalidSampling(f"{name} must be from {low} to {high}, got {value}")
    return int(value)


def _number(name: str, value: object, range_text: str, fits: Callable[[float], bool]) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise InvalidSampling(f"{name} must be a number {range_text}, got {value!r}")
    number = float(value)
    if not math.isfinite(number):
        raise InvalidSampling(f"{name} must be finite and {range_text}, got {number}")
    if not fits(number):
        raise InvalidSampling(f"{name} must be {range_text}, got {number}")
    return number


def _strings(value: object) -> tuple[str, ...]:
    if isinstance(value, str):
        value = (value,)
    if not isinstance(value, Iterable):
        raise InvalidSampling(f"stop must be a string or several, got {value!r}")
    strings = tuple(value)
    for string in strings:
        if not isinstance(string, str) or not string:
            raise InvalidSampling(f"stop strings must be strings that are not empty, got {string!r}")
    return strings


def _ids(value: object) -> tuple[int, ...]:
    if isinstance(value, Integral):
        value = (value,)
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise InvalidSampling(f"stop_token_ids must be token ids, got {value!r}")
    return tuple(_integer("a stop token id", token, 0, MAX_TOKENS_LIMIT) for token in value)


def _biases(value: object) -> tuple[tuple[int, float], ...]:
    given: Any = value.items() if isinstance(value, Mapping) else value
    try:
        pairs = [(token, bias) for token, bias in given]
    except (TypeError, ValueError):
        raise InvalidSampling(f"logit_bias must map token ids to numbers, got {value!r}") from None
    biases = {}
    for token, bias in pairs:
        token = _integer("a token id of logit_bias", token, 0, MAX_TOKENS_LIMIT)
        biases[token] = _number(f"logit_bias of token {token}", bias, "from -100 to 100", lambda b: -100 <= b <= 100)
    if len(biases) < len(pairs):
        raise InvalidSampling(f"logit_bias names {len(pairs) - len(biases)} tokens twice; give each token one number")
    return tuple(sorted(biases.items()))
