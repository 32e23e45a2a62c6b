"""From what a caller passes to checked requests, none of them scheduled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count

from hybridkv.engine.detokenize import Tokenizer
from hybridkv.engine.drafts import Drafter, Speculation
from hybridkv.engine.forks import add_copies
from hybridkv.engine.params import SamplingParams
from hybridkv.engine.prompts import (
    Limits,
    Prompts,
    adapters_for,
    breakpoints_for,
    caching_for,
    params_for,
    priorities_for,
    token_lists,
)
from hybridkv.engine.request import Request
from hybridkv.errors import ConfigError, InvalidSampling, RequestError
from hybridkv.hashing import Salt
from hybridkv.hf.adapters import Adapters


class Intake:
    """Makes the requests of one engine and numbers them in order of arrival.

    Args:
        limits: what the engine can serve.
        adapters: those of its model.
        tokenizer: None if only token ids go in and out.
        eos_token_ids: tokens that end an output unless its params ignore them; those beyond the vocabulary never come.
        speculate: most tokens to guess ahead; 0 guesses none.
        drafter: makes what guesses for one request.

    Raises:
        ConfigError: fewer than 0 guesses.
    """

    def __init__(
        self,
        limits: Limits,
        adapters: Adapters,
        tokenizer: Tokenizer | None,
        eos_token_ids: frozenset[int],
        *,
        speculate: int,
        drafter: Callable[[], Drafter],
    ) -> None:
        if isinstance(speculate, bool) or not isinstance(speculate, int) or speculate < 0:
            raise ConfigError(f"speculate must be an integer of at least 0, got {speculate!r}")
        self._limits = limits
        self._adapters = adapters
        self._tokenizer = tokenizer
        self._eos = frozenset(token for token in eos_token_ids if token < limits.vocab_size)
        self._speculate = speculate
        self._drafter = drafter
        self._arrivals = count(1)

    def requests(
        self,
        prompts: Prompts,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        breakpoints: Sequence[int] | Sequence[Sequence[int]] | None = None,
        salt: Salt | None = None,
        cache: bool | Sequence[bool] = True,
        priority: int | Sequence[int] = 0,
        adapter: str | Sequence[str | None] | None = None,
    ) -> list[Request]:
        """One request for each prompt; the arguments are those of `Engine.generate`.

        Raises:
            RequestError: one of them can never be served; the message names the prompt where there are several.
        """
        if salt is not None and not isinstance(salt, str | bytes):
            raise RequestError(f"a salt is a string or bytes, got {type(salt).__name__}")
        lists = token_lists(prompts, self._tokenizer)
        each = params_for(params, len(lists))
        points = breakpoints_for(breakpoints, [len(tokens) for tokens in lists])
        caching, priorities = caching_for(cache, len(lists)), priorities_for(priority, len(lists))
        names = adapters_for(adapter, len(lists))
        for i, (tokens, one) in enumerate(zip(lists, each, strict=True)):
            try:
                self._limits.check(tokens, one)
                self._check_params(one)
            except RequestError as error:
                if len(lists) == 1:
                    raise
                raise type(error)(f"prompt {i}: {error}") from None
        keys = {name: self._adapters.key(name) for name in set(names)}
        requests = []
        for i, (tokens, one) in enumerate(zip(lists, each, strict=True)):
            stop_ids = frozenset(one.stop_token_ids) | (frozenset() if one.ignore_eos else self._eos)
            requests.append(
                Request(
                    next(self._arrivals),
                    tokens,
                    one,
                    stop_ids,
                    salt,
                    points[i],
                    caching[i],
                    priorities[i],
                    keys[names[i]],
                    tokenizer=self._tokenizer,
                    speculation=Speculation(self._drafter, self._speculate) if self._speculate else None,
                )
            )
            add_copies(requests[-1], self._arrivals)
        return requests

    def _check_params(self, params: SamplingParams) -> None:
        if params.stop and self._tokenizer is None:
            raise InvalidSampling("stop strings need a tokenizer; pass one to wrap(), or use stop_token_ids")
        self._limits.check_params(params)
