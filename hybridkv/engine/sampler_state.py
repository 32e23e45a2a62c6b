"""What sampling remembers of one request between its tokens."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from hybridkv.engine.params import SamplingParams


class TokenCounts:
    """Distinct tokens and how often each came, ready to become arrays without a walk in Python.

    Attributes:
        ids: distinct tokens.
        counts: of the token at the same place.
    """

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self._place = {token: i for i, token in enumerate(dict.fromkeys(tokens))}
        self.ids = array("q", self._place)
        self.counts = array("q", [1]) * len(self.ids)

    def add(self, token: int) -> None:
        place = self._place.setdefault(token, len(self.ids))
        if place < len(self.ids):
            self.counts[place] += 1
        else:
            self.ids.append(token)
            self.counts.append(1)


class SamplerState:
    """The random generator of one request and, where its parameters need them, the tokens it has seen.

    Attributes:
        params: of the request.
        seen: tokens the repetition penalty is about, of the prompt and generated; only with penalties.
        generated: tokens the presence and frequency penalties are about; only with penalties.
        bias_ids, biases: of `params.logit_bias`.
    """

    def __init__(
        self, params: SamplingParams, prompt: Sequence[int], stop_ids: Iterable[int] = (), index: int = 0
    ) -> None:
        """Start before the first token.

        Args:
            params: of the request.
            prompt: its tokens.
            stop_ids: every token that would end it; banned for its first `params.min_tokens` tokens.
            index: which of the prompt's outputs this is; each has its own random stream.
        """
        self.params = params
        self._generator: torch.Generator | None = None
        if not params.greedy:
            seed = int(torch.randint(2**63 - 1, ()).item()) if params.seed is None else params.seed + index
            self._generator = torch.Generator().manual_seed(seed)
        self.seen = TokenCounts(prompt if params.repetition_penalty != 1.0 else ())
        self.generated = TokenCounts()
        biases = dict(params.logit_bias)
        self.bias_ids = np.array(list(biases), np.int64)
        self.biases = np.array(list(biases.values()), np.float32)
        self._stop_ids = np.array(sorted(stop_ids) if params.min_tokens else [], np.int64)
        self._unbanned_after = params.min_tokens if len(self._stop_ids) else 0

    def append(self, token: int) -> None:
        """Note a generated token."""
        self._unbanned_after -= 1
        if self.params.penalised:
            self.generated.add(token)
            self.seen.add(token)

    @property
    def banned(self) -> NDArray[np.int64]:
        """Tokens that must not come next."""
        return self._stop_ids if self._unbanned_after > 0 else self._stop_ids[:0]

    def uniform(self) -> float:
        """The next number in [0, 1) of this request's own stream."""
        return float(torch.rand((), dtype=torch.float64, generator=self._generator).item())
