"""Guessing the next tokens from the text itself (prompt look-up decoding), and how many to guess.

What was just written often occurred before: a quotation, a name, a line of code. The longest recent repetition of the
last tokens proposes what followed it then. No second model, and a wrong guess changes nothing but time.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import Protocol

_LONGEST_PAUSE = 64


class Drafter(Protocol):
    """Guesses the next tokens of one request."""

    def propose(self, tokens: Sequence[int], most: int) -> list[int]:
        """At most `most` tokens that may follow `tokens`: prompt and output so far, only ever appended to."""
        ...


class PromptLookup:
    """Finds the last tokens of a text earlier in it.

    Every token costs one dictionary entry, whatever its text's length; a proposal looks at no more than `tried` places.

    Args:
        shortest: tokens that must repeat for a proposal.
        longest: tokens beyond which a longer repetition counts for no more.
        tried: earlier places compared, the most recent ones.
    """

    def __init__(self, shortest: int = 3, longest: int = 32, tried: int = 16) -> None:
        self._shortest = shortest
        self._longest = longest
        self._tried = tried
        self._last: dict[tuple[int, ...], int] = {}
        # before[i]: where the n-gram that ends at i ended the time before; 0 if it is new.
        self._before = array("q", [0] * shortest)

    def propose(self, tokens: Sequence[int], most: int) -> list[int]:
        """What followed the longest repetition of the last tokens; the most recent one of equals.

        A repetition that reaches into the tokens it repeats is carried on: after "abcabc" comes "abcabc...".
        """
        self._index(tokens)
        end = len(tokens)
        best = length = 0
        place = self._before[end] if end < len(self._before) else 0
        for _ in range(self._tried):
            if not place or length == self._longest:
                break
            same = self._common(tokens, place, end)
            if same > length:
                best, length = place, same
            place = self._before[place]
        return [tokens[best + i % (end - best)] for i in range(most)] if length else []

    def _index(self, tokens: Sequence[int]) -> None:
        size = self._shortest
        for end in range(len(self._before), len(tokens) + 1):
            gram = tuple(tokens[end - size : end])
            self._before.append(self._last.get(gram, 0))
            self._last[gram] = end

    def _common(self, tokens: Sequence[int], one: int, two: int) -> int:
        """How many tokens before `one` equal those before `two`, `one` < `two`."""
        most = min(one, self._longest)
        for same in range(self._shortest, most):
            if tokens[one - 1 - same] != tokens[two - 1 - same]:
                return same
        return most


class Speculation:
    """One request's guesses: as many as have been right lately.

    A guess that was right doubles the number, up to `most`; a wrong one takes it back to what was right. After guesses
    of which none was right come steps without, each time twice as many, so that text without repetition costs little.
    """

    def __init__(self, make: Callable[[], Drafter], most: int) -> None:
        """Start without experience.

        Args:
            make: gives something that guesses.
            most: tokens guessed at once.
        """
        self._make = make
        self._drafter = make()
        self._most = most
        self._size = min(most, 4)
        self._pause = 0
        self._wait = 0

    def another(self) -> Speculation:
        """The same for another request."""
        return Speculation(self._make, self._most)

    def propose(self, tokens: Sequence[int], most: int) -> list[int]:
        """At most `most` tokens that may follow `tokens`, often none."""
        if self._wait:
            self._wait -= 1
            return []
        most = min(most, self._size)
        return self._drafter.propose(tokens, most)[:most] if most > 0 else []

    def judge(self, drafted: int, accepted: int) -> None:
        """Learn how many of the proposed tokens were checked, and how many of those were right."""
        if accepted:
            self._pause = 0
            self._size = min(self._most, 2 * self._size) if accepted == drafted else accepted
        else:
            self._size = max(1, self._size // 2)
            self._pause = min(2 * self._pause + 1, _LONGEST_PAUSE)
            self._wait = self._pause
