"""Workloads made up from a seed, each with a few parameters. Lengths are in tokens; `rate` is arrivals per second."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from hybridkv.errors import ConfigError
from hybridkv.sim.requests import INVENTED, Request, Tokens, Trace

_SPEC = re.compile(r"(\w+)(?::(.*))?", re.ASCII)
Turns = Iterator[tuple[Tokens, Tokens, str | None]]


def chat(
    rng: np.random.Generator, users: int, turns: int, systems: int, system: int, question: int, answer: int
) -> Turns:
    """Users talk in turn, each after one of a few shared system prompts; every prompt repeats the talk so far."""
    heads = [_text(rng, system) for _ in range(systems)]
    talks = [heads[int(rng.integers(systems))] for _ in range(users)]
    for _ in range(turns):
        for user in rng.permutation(users).tolist():
            prompt = np.concatenate((talks[user], _text(rng, question)))
            reply = _text(rng, answer)
            talks[user] = np.concatenate((prompt, reply))
            yield prompt, reply, f"user {user}"


def agent(
    rng: np.random.Generator, agents: int, steps: int, system: int, observation: int, action: int, rewind: int
) -> Turns:
    """Loops whose context grows by an observation and an action a step; with `rewind` percent a loop first forgets up
    to three of its last steps."""
    head = _text(rng, system)
    contexts = [[head] for _ in range(agents)]
    for _ in range(steps):
        for i in range(agents):
            past = contexts[i]
            if len(past) > 1 and rng.integers(100) < rewind:
                del past[max(1, len(past) - int(rng.integers(1, 4))) :]
            prompt = np.concatenate((*past, _text(rng, observation)))
            act = _text(rng, action)
            past.append(np.concatenate((prompt[sum(map(len, past)) :], act)))
            yield prompt, act, f"agent {i}"


def tree(
    rng: np.random.Generator, problems: int, depth: int, branch: int, beam: int, problem: int, thought: int
) -> Turns:
    """Tree of thoughts: each of `beam` kept paths is continued `branch` times from the same prompt, level by level."""
    for i in range(problems):
        paths = [_text(rng, problem)]
        for _ in range(depth):
            children = []
            for path in paths:
                for _ in range(branch):
                    idea = _text(rng, thought)
                    children.append(np.concatenate((path, idea)))
                    yield path, idea, f"problem {i}"
            kept = rng.permutation(len(children))[:beam].tolist()
            paths = [children[k] for k in kept]


def rag(
    rng: np.random.Generator,
    requests: int,
    documents: int,
    picked: int,
    system: int,
    document: int,
    question: int,
    answer: int,
) -> Turns:
    """A system prompt, `picked` of the shared documents (popular ones more often, and first), and a question."""
    if picked > documents:
        raise ConfigError(f"rag cannot pick {picked} of {documents} documents")
    head = _text(rng, system)
    texts = [_text(rng, document) for _ in range(documents)]
    weights = 1 / np.arange(1, documents + 1)
    for _ in range(requests):
        chosen = np.sort(rng.choice(documents, picked, replace=False, p=weights / weights.sum())).tolist()
        prompt = np.concatenate((head, *(texts[k] for k in chosen), _text(rng, question)))
        yield prompt, _text(rng, answer), None


def noise(rng: np.random.Generator, requests: int, length: int, answer: int) -> Turns:
    """Prompts that share nothing, of any length up to `length`."""
    for _ in range(requests):
        yield _text(rng, int(rng.integers(1, length + 1))), _text(rng, answer), None


GENERATORS: dict[str, tuple[Callable[..., Turns], dict[str, int]]] = {
    "chat": (chat, {"users": 20, "turns": 4, "systems": 2, "system": 1000, "question": 100, "answer": 200}),
    "agent": (agent, {"agents": 8, "steps": 12, "system": 2000, "observation": 400, "action": 100, "rewind": 20}),
    "tree": (tree, {"problems": 6, "depth": 4, "branch": 3, "beam": 2, "problem": 1000, "thought": 150}),
    "rag": (
        rag,
        {"requests": 100, "documents": 40, "picked": 3, "system": 200, "document": 1000, "question": 50, "answer": 100},
    ),
    "noise": (noise, {"requests": 50, "length": 4000, "answer": 100}),
}
"""Workloads by name, with the defaults of their parameters; each also takes `seed` (0) and `rate` (2)."""

_MAY_BE_ZERO = ("answer", "rewind", "seed", "system")


def generated(spec: str, limit: int | None = None) -> Trace:
    """The workload of a name such as "chat" or "chat:users=50,turns=8".

    Raises:
        ConfigError: no such workload or parameter, or a value that is no whole number of its range.
    """
    match = _SPEC.fullmatch(spec.strip())
    if match is None or match[1] not in GENERATORS:
        raise ConfigError(f"no trace file or workload named {spec!r}; workloads are {', '.join(GENERATORS)}")
    make, defaults = GENERATORS[match[1]]
    values = {**defaults, "seed": 0, "rate": 2}
    for item in filter(None, (match[2] or "").split(",")):
        name, _, text = item.partition("=")
        if name not in values:
            raise ConfigError(f"{match[1]} has no parameter {name!r}; it has {', '.join(values)}")
        least = 0 if name in _MAY_BE_ZERO else 1
        if not re.fullmatch(r"\d{1,9}", text, re.ASCII) or int(text) < least:
            raise ConfigError(f"{match[1]}: {name} must be a whole number of at least {least}, not {text!r}")
        values[name] = int(text)
    name = f"{match[1]}:" + ",".join(f"{key}={value}" for key, value in values.items())
    seed, rate = values.pop("seed"), values.pop("rate")
    return Trace(name, partial(_requests, make, values, seed, rate), limit=limit)


def _requests(make: Callable[..., Turns], values: dict[str, int], seed: int, rate: int) -> Iterator[Request]:
    rng, clock = np.random.default_rng(seed), np.random.default_rng([seed, 1])
    arrival = 0.0
    for prompt, output, session in make(rng, **values):
        yield Request(arrival, prompt, output, session)
        arrival += float(clock.exponential(1 / rate))


def _text(rng: np.random.Generator, length: int) -> Tokens:
    return rng.integers(0, INVENTED, length, np.uint32)
