"""From what a caller passes to checked token ids: everything that can refuse a request does so here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import numpy as np

from hybridkv.engine.detokenize import Tokenizer
from hybridkv.engine.params import SamplingParams
from hybridkv.errors import EmptyPrompt, InvalidSampling, PromptTooLong, RequestError, TokenOutOfRange

Prompt = str | Sequence[int]
Prompts = Prompt | Sequence[Prompt]


@dataclass(frozen=True, slots=True)
class Limits:
    """What one engine can serve.

    Attributes:
        vocab_size: token ids are below it.
        max_positions: tokens of the model's context, None if it has no limit.
        pool_tokens: longest request the empty pool can hold.
        pool_bytes: size of that pool.
    """

    vocab_size: int
    max_positions: int | None
    pool_tokens: int
    pool_bytes: int

    def check(self, tokens: Sequence[int], params: SamplingParams) -> None:
        """Refuse what can never be served.

        Raises:
            EmptyPrompt, TokenOutOfRange, PromptTooLong: as they say, with the numbers.
        """
        if not tokens:
            raise EmptyPrompt("the prompt is empty; give at least one token")
        for token in (min(tokens), max(tokens)):
            if not 0 <= token < self.vocab_size:
                raise TokenOutOfRange(
                    f"token id {token} at position {tokens.index(token)} is outside the vocabulary; "
                    f"ids are 0 to {self.vocab_size - 1}"
                )
        total = len(tokens) + params.max_tokens
        asked = f"the prompt has {len(tokens)} tokens and max_tokens is {params.max_tokens}, {total} in all"
        if self.max_positions is not None and total > self.max_positions:
            raise PromptTooLong(
                f"{asked}, but the model's context holds {self.max_positions}; shorten the prompt or lower max_tokens"
            )
        # The last generated token is never computed, so it needs no room.
        if total - 1 > self.pool_tokens:
            raise PromptTooLong(
                f"{asked}, but the pool of {self.pool_bytes} bytes holds at most {self.pool_tokens + 1}; "
                "give it more memory, shorten the prompt or lower max_tokens"
            )

    def check_params(self, params: SamplingParams) -> None:
        """Refuse parameters this vocabulary does not allow.

        Raises:
            TokenOutOfRange: a stop token or a token of logit_bias outside the vocabulary.
            InvalidSampling: min_tokens where every token would end the output.
        """
        named = [("stop_token_ids names token id", token) for token in params.stop_token_ids]
        for what, token in [*named, *(("logit_bias names token id", token) for token in dict(params.logit_bias))]:
            if token >= self.vocab_size:
                raise TokenOutOfRange(
                    f"{what} {token}, which is outside the vocabulary; ids are 0 to {self.vocab_size - 1}"
                )
        if params.min_tokens and len(set(params.stop_token_ids)) >= self.vocab_size:
            raise InvalidSampling(
                f"min_tokens is {params.min_tokens} and all {self.vocab_size} tokens are stop tokens, "
                "so none could be drawn"
            )


def token_lists(prompts: Prompts, tokenizer: Tokenizer | None) -> list[list[int]]:
    """Token ids of one prompt or several.

    Args:
        prompts: a string, a list of token ids, or a sequence of such. Arrays and tensors of ids count as lists.

    Raises:
        EmptyPrompt: no prompt at all, or an empty one.
        RequestError: something else, or a string where there is no tokenizer.
    """
    if isinstance(prompts, Mapping):
        raise RequestError(
            f"prompts must be strings or lists of token ids, got a {type(prompts).__name__}, which is what calling a "
            "tokenizer returns: pass encoding['input_ids']"
        )
    given = _plain(prompts)
    if isinstance(given, str) or _is_ids(given):
        given = [given]
    if not isinstance(given, Iterable):
        raise RequestError(f"prompts must be strings or lists of token ids, got {type(given).__name__}")
    lists = [_tokens(_plain(prompt), tokenizer) for prompt in given]
    if not lists:
        raise EmptyPrompt("no prompt was given; give at least one string or list of token ids")
    return lists


def params_for(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    """One SamplingParams per prompt.

    Raises:
        InvalidSampling: another type, or a list of another length.
    """
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    each: list[object] = [params] if isinstance(params, Mapping) or not isinstance(params, Iterable) else list(params)
    checked = []
    for one in each:
        if not isinstance(one, SamplingParams):
            raise InvalidSampling(f"params must be SamplingParams or a list of them, got {type(one).__name__}")
        checked.append(one)
    if len(checked) != count:
        raise InvalidSampling(f"{count} prompts but {len(checked)} SamplingParams; give one for all or one for each")
    return checked


def priorities_for(priority: int | Sequence[int], count: int) -> list[int]:
    """One priority per prompt.

    Raises:
        RequestError: not integers, or a list of another length.
    """
    each = _each("priority", priority, count)
    for one in each:
        if isinstance(one, bool) or not isinstance(one, Integral):
            raise RequestError(f"a priority is an integer, lower runs first, got {one!r}")
    return [int(one) for one in each]


def caching_for(cache: bool | Sequence[bool], count: int) -> list[bool]:
    """Per prompt, whether it may use and fill the cache.

    Raises:
        RequestError: not True or False, or a list of another length.
    """
    each = _each("cache", cache, count)
    for one in each:
        if not isinstance(one, bool):
            raise RequestError(f"cache must be True or False, got {one!r}")
    return each


def adapters_for(adapter: str | Sequence[str | None] | None, count: int) -> list[str | None]:
    """Per prompt, the name of a LoRA adapter, or None for the base model.

    Raises:
        RequestError: something else, or a list of another length.
    """
    each = _each("adapter", adapter, count)
    for one in each:
        if one is not None and not isinstance(one, str):
            raise RequestError(f"an adapter is the name of one that is loaded, or None, got {one!r}")
    return each


def breakpoints_for(
    breakpoints: Sequence[int] | Sequence[Sequence[int]] | None, lengths: Sequence[int]
) -> list[tuple[int, ...]]:
    """Breakpoints per prompt; positions past its end are left out, so that one list can serve many prompts.

    Raises:
        RequestError: not positions, or lists for another number of prompts.
    """
    given: Any = () if breakpoints is None else _plain(breakpoints)
    if isinstance(given, str) or not isinstance(given, Sequence):
        raise RequestError(f"breakpoints must be a list of positions, got {breakpoints!r}")
    if given and isinstance(given[0], Iterable):
        if len(given) != len(lengths):
            raise RequestError(
                f"{len(lengths)} prompts but breakpoints for {len(given)}; give one list for all or one each"
            )
        each = [list(positions) for positions in given]
    else:
        each = [list(given)] * len(lengths)
    for position in (position for positions in each for position in positions):
        if isinstance(position, bool) or not isinstance(position, Integral) or position < 0:
            raise RequestError(f"a breakpoint is a number of tokens of at least 0, got {position!r}")
    return [
        tuple(sorted({int(position) for position in positions if position <= length}))
        for positions, length in zip(each, lengths, strict=True)
    ]


def _each(name: str, value: Any, count: int) -> list[Any]:
    """The same value for every prompt, or a list with one for each."""
    value = _plain(value)
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        return [value] * count
    if len(value) != count:
        raise RequestError(f"{count} prompts but {len(value)} values of {name}; give one for all or one for each")
    return list(value)


def _plain(value: Any) -> Any:
    """Lists for arrays and tensors, anything else as it is."""
    return value.tolist() if hasattr(value, "tolist") and not isinstance(value, np.generic) else value


def _is_ids(value: Any) -> bool:
    return isinstance(value, bytes | bytearray) or (
        isinstance(value, Sequence) and len(value) > 0 and isinstance(value[0], Integral)
    )


def _tokens(prompt: Any, tokenizer: Tokenizer | None) -> list[int]:
    if isinstance(prompt, str):
        if tokenizer is None:
            raise RequestError("a string prompt needs a tokenizer; pass one to wrap(), or pass token ids")
        if not prompt:
            raise EmptyPrompt("the prompt is an empty string; give at least one character")
        return list(tokenizer.encode(prompt))
    if not isinstance(prompt, Sequence) or isinstance(prompt, bytes | bytearray):
        raise RequestError(f"a prompt must be a string or a list of token ids, got {type(prompt).__name__}")
    if type(prompt) is list and set(map(type, prompt)) <= {int}:
        return list(prompt)
    for token in prompt:
        if isinstance(token, bool) or not isinstance(token, Integral):
            raise RequestError(f"a prompt must hold integer token ids, got {token!r}")
    return [int(token) for token in prompt]
