"""Workloads from a seed: the same each time, and sharing what their names say."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from hybridkv.errors import ConfigError
from hybridkv.sim.generators import GENERATORS, generated
from hybridkv.sim.requests import Request, summarize


def shared(one: Request, other: Request) -> int:
    """Tokens the two prompts have in common at their beginnings."""
    n = min(len(one.tokens), len(other.tokens))
    differ = np.flatnonzero(one.tokens[:n] != other.tokens[:n])
    return int(differ[0]) if len(differ) else n


@pytest.mark.parametrize("name", GENERATORS)
def test_a_seed_makes_the_same_requests_and_another_seed_others(name: str) -> None:
    trace = generated(name)
    first, again, other = list(trace), list(trace), list(generated(f"{name}:seed=1"))
    assert len(first) == len(again) > 10
    for one, two in zip(first, again, strict=True):
        assert (one.arrival, one.session) == (two.arrival, two.session)
        assert np.array_equal(one.tokens, two.tokens)
        assert np.array_equal(one.output, two.output)
    assert not np.array_equal(first[0].tokens, other[0].tokens)
    arrivals = [request.arrival for request in first]
    assert arrivals == sorted(arrivals)
    assert arrivals[-1] / len(first) == pytest.approx(0.5, rel=0.4), "two a second"


def test_a_chat_repeats_its_system_prompt_and_the_talk_so_far_with_the_answers() -> None:
    requests = list(generated("chat:users=4,turns=3,systems=1,system=50,question=10,answer=20"))
    assert len(requests) == 12
    assert [shared(requests[0], other) for other in requests[1:4]] == [50, 50, 50]
    turns = [request for request in requests if request.session == "user 2"]
    for before, after in itertools.pairwise(turns):
        said = np.concatenate((before.tokens, before.output))
        assert np.array_equal(after.tokens[: len(said)], said)
        assert len(after.tokens) == len(said) + 10


def test_an_agent_goes_on_from_its_last_step_or_from_one_up_to_three_steps_back() -> None:
    spec = "agent:agents=1,steps=40,system=30,observation=8,action=4,rewind={}"
    for before, after in zip(requests := list(generated(spec.format(0))), requests[1:], strict=False):
        assert shared(before, after) == len(before.tokens)
    steps = list(generated(spec.format(50)))
    back = [(len(one.tokens) - shared(one, two) + 4) // 12 for one, two in itertools.pairwise(steps)]
    assert {1, 2, 3} <= set(back) <= {0, 1, 2, 3}


def test_thoughts_branch_from_one_prompt_and_the_kept_ones_are_gone_on_from() -> None:
    requests = list(generated("tree:problems=1,depth=2,branch=3,beam=2,problem=40,thought=5"))
    assert [len(request.tokens) for request in requests] == [40] * 3 + [45] * 6
    assert shared(requests[0], requests[2]) == 40
    thoughts = {request.output.tobytes() for request in requests[:3]}
    kept = {request.tokens[40:].tobytes() for request in requests[3:]}
    assert len(kept) == 2
    assert kept < thoughts


def test_documents_are_shared_and_noise_is_not() -> None:
    documents = summarize(generated("rag:requests=60,documents=5,picked=1,system=16,document=160,question=16"))
    assert documents.repeated_tokens > 0.7 * documents.prompt_tokens
    assert summarize(generated("noise")).repeated_tokens == 0


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("chatter", "no trace file or workload named 'chatter'; workloads are chat, agent, tree, rag, noise"),
        ("chat:user=4", "chat has no parameter 'user'; it has users, turns"),
        ("chat:users=0", "users must be a whole number of at least 1, not '0'"),
        ("chat:users", "users must be a whole number"),
        ("rag:documents=2,picked=3", "cannot pick 3 of 2"),
    ],
)
def test_a_workload_that_cannot_be_is_refused(spec: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        list(generated(spec))
