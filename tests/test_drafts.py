"""Guessing tokens: the longest recent repetition, and how far to trust it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridkv.engine.drafts import PromptLookup, Speculation


def brute_force(tokens: Sequence[int], most: int, shortest: int, longest: int, tried: int) -> list[int]:
    """Every earlier place, latest first; the suffix that repeats there, token by token."""
    end = len(tokens)
    places = [i for i in range(end - 1, shortest - 1, -1) if tokens[i - shortest : i] == tokens[end - shortest :]]
    best, length = 0, 0
    for place in places[:tried]:
        same = 0
        while same < min(place, longest) and tokens[place - 1 - same] == tokens[end - 1 - same]:
            same += 1
        if same > length:
            best, length = place, same
    text = list(tokens)
    for i in range(most if length else 0):
        text.append(text[best + i])
    return text[end:]


@given(
    st.lists(st.integers(0, 2), max_size=60),
    st.integers(1, 12),
    st.integers(1, 4),
    st.integers(4, 9),
    st.integers(1, 5),
    st.integers(1, 9),
)
def test_the_longest_recent_repetition_proposes_what_followed_it(
    tokens: list[int], most: int, shortest: int, longest: int, tried: int, stride: int
) -> None:
    """Asked now and then while the text grows, as a request that pauses does."""
    lookup = PromptLookup(shortest, longest, tried)
    for size in [*range(0, len(tokens), stride), len(tokens)]:
        text = tokens[:size]
        assert lookup.propose(text, most) == brute_force(text, most, shortest, longest, tried)


def test_a_repetition_that_reaches_its_own_end_is_carried_on() -> None:
    assert PromptLookup().propose([9, 1, 2, 3, 1, 2, 3], 7) == [1, 2, 3, 1, 2, 3, 1]


class Always:
    """Proposes as much as it is asked for."""

    def propose(self, tokens: Sequence[int], most: int) -> list[int]:
        return [7] * most


def sizes(speculation: Speculation, rights: Sequence[float]) -> list[int]:
    """How much is guessed when such shares of the guesses turn out right."""
    found = []
    for right in rights:
        drafted = len(speculation.propose([1], 100))
        found.append(drafted)
        if drafted:
            speculation.judge(drafted, int(drafted * right))
    return found


def test_right_guesses_make_more_of_them_and_half_right_ones_fewer() -> None:
    assert sizes(Speculation(Always, 16), [1, 1, 1, 1, 0.5, 1, 0.25, 1]) == [4, 8, 16, 16, 16, 8, 16, 4]


@pytest.mark.parametrize("most", [1, 3])
def test_no_more_than_asked_for(most: int) -> None:
    assert max(sizes(Speculation(Always, most), [1] * 8)) == most
    assert Speculation(Always, 9).propose([1], 2) == [7, 7]
    assert Speculation(Always, 9).propose([1], 0) == []


def test_guesses_that_are_always_wrong_become_rare_and_short() -> None:
    found = sizes(Speculation(Always, 8), [0] * 1000)
    assert sum(found[200:]) <= 800 / 64 + 1


def test_one_right_guess_ends_the_pauses() -> None:
    speculation = Speculation(Always, 8)
    sizes(speculation, [0] * 200)
    while not (drafted := len(speculation.propose([1], 8))):
        pass
    speculation.judge(drafted, drafted)
    assert sizes(speculation, [1, 1, 1]) == [2, 4, 8]
