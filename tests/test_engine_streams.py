"""Streams: events, interleaving, ends, and streams that nobody reads any more."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

from hybridkv.engine.params import SamplingParams
from tests.engine_cases import check, make, prompt_of
from tests.engine_fakes import VOCAB, expected_tokens, hybrid_groups


def test_an_abandoned_stream_gives_its_pages_back() -> None:
    engine, _ = make()
    stream = engine.stream(prompt_of(50), SamplingParams(max_tokens=100))
    next(stream)
    assert engine.usage().live_bytes > 0
    stream.close()  # type: ignore[attr-defined]
    assert engine.usage().live_bytes == 0
    never_started = engine.stream(prompt_of(50))
    del never_started
    assert engine.usage().live_bytes == 0


def test_a_stream_abandoned_at_the_end_of_the_program_says_nothing() -> None:
    code = """
from hybridkv.engine.params import SamplingParams
from tests.engine_cases import make, prompt_of
engine, _ = make()
stream = engine.stream(prompt_of(50), SamplingParams(max_tokens=100))
next(stream)
"""
    root = Path(__file__).resolve().parent.parent
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_stream_abandoned_in_the_middle_of_a_step_waits_for_its_end() -> None:
    engine, runner = make()
    stream = engine.stream(prompt_of(30, 1), SamplingParams(max_tokens=100))
    next(stream)
    forward = runner.forward

    def collected_meanwhile(spans: Any) -> Any:
        stream.close()  # type: ignore[attr-defined]
        return forward(spans)

    runner.forward = collected_meanwhile  # type: ignore[method-assign]
    prompt = prompt_of(40, 2)
    check(engine, [prompt], engine.generate(prompt, SamplingParams(max_tokens=5)), 5)


def test_streams_interleave() -> None:
    engine, _ = make()
    prompts = [prompt_of(30, 1), prompt_of(20, 2)]
    streams = [engine.stream(prompt, SamplingParams(max_tokens=10)) for prompt in prompts]
    tokens: list[list[int]] = [[], []]
    for _ in range(10):
        for got, stream in zip(tokens, streams, strict=True):
            got += next(stream).token_ids
    assert tokens == [expected_tokens(engine.manager.groups, prompt, 10) for prompt in prompts]
    outputs = [list(stream) for stream in streams]
    assert outputs == [[], []]


def test_the_last_event_carries_the_output() -> None:
    engine, _ = make()
    events = list(engine.stream([1, 2, 3], SamplingParams(max_tokens=4)))
    assert [event.finish_reason for event in events] == [None, None, None, "length"]
    output = events[-1].output
    assert output is not None
    assert output.token_ids == [token for event in events for token in event.token_ids]
    assert 0 < output.ttft_s <= output.total_s
    assert output.decode_tokens_per_s > 0


def test_stop_tokens_and_end_of_sequence() -> None:
    prompt = prompt_of(20)
    tokens = expected_tokens(hybrid_groups(), prompt, 30)
    stop = tokens[5]
    end = tokens.index(stop) + 1
    engine, _ = make()
    out = engine.generate(prompt, SamplingParams(max_tokens=30, stop_token_ids=[stop]))[0]  # type: ignore[arg-type]
    assert (out.token_ids, out.finish_reason) == (tokens[:end], "stop")
    engine, _ = make(eos_token_ids=frozenset([stop]))
    out = engine.generate(prompt, SamplingParams(max_tokens=30))[0]
    assert (out.token_ids, out.finish_reason) == (tokens[:end], "stop")
    out = engine.generate(prompt, SamplingParams(max_tokens=30, ignore_eos=True))[0]
    assert (out.token_ids, out.finish_reason) == (tokens, "length")
    out = engine.generate(prompt, SamplingParams(max_tokens=end))[0]
    assert out.finish_reason == "stop"


def test_an_end_of_sequence_token_beyond_the_vocabulary_never_comes() -> None:
    prompt = prompt_of(20)
    tokens = expected_tokens(hybrid_groups(), prompt, 12)
    engine, _ = make(eos_token_ids=frozenset([tokens[5], VOCAB, VOCAB + 7]))
    (out,) = engine.generate(prompt, SamplingParams(max_tokens=12, min_tokens=4))
    assert out.token_ids == tokens[: tokens.index(tokens[5]) + 1]
