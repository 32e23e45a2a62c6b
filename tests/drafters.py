"""Drafters for tests: they know what plain decoding gives, and how often to say something else."""

from __future__ import annotations

import random
from collections.abc import Sequence


class Oracle:
    """Proposes what plain decoding will give, with a share of its tokens replaced by others.

    Args:
        texts: prompts with their outputs.
        wrong: share of wrong tokens: 0 is always right, 1 always wrong.
        seed: of where the wrong ones are.
        vocab: tokens there are.
    """

    def __init__(self, texts: Sequence[Sequence[int]], wrong: float, seed: int, vocab: int) -> None:
        self._texts = texts
        self._wrong = wrong
        self._random = random.Random(seed)
        self._vocab = vocab

    def propose(self, tokens: Sequence[int], most: int) -> list[int]:
        size = len(tokens)
        text = next(text for text in self._texts if list(text[:size]) == list(tokens))
        known = [*text[size : size + most], *[0] * most][:most]
        return [self._other(token) if self._random.random() < self._wrong else token for token in known]

    def _other(self, token: int) -> int:
        return (token + self._random.randrange(1, self._vocab)) % self._vocab
