"""How an output ends: stop strings over token borders, end-of-sequence tokens, min_tokens."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hybridkv.engine.engine import Engine
from hybridkv.engine.params import SamplingParams
from hybridkv.hf.runner import Span
from hybridkv.manager import GroupManager
from tests.engine_fakes import FakeRunner, byte_level_tokenizer, hybrid_groups

TEXT = "I say: \u20ac5 END of \U0001f680 story. "
TOKENIZER = byte_level_tokenizer()
SAID = TOKENIZER.encode(TEXT)
PROMPT = [1, 2, 3]
FULL_STOP = TOKENIZER.encode(".")[0]


class SayingRunner(FakeRunner):
    """Whatever it hears, it says TEXT, a byte a token."""

    vocab_size = 256

    def _next(self, span: Span) -> list[int]:
        stop = span.seq.length + len(span.token_ids) - len(PROMPT)
        return [SAID[at % len(SAID)] for at in range(stop - len(super()._next(span)) + 1, stop + 1)]


@pytest.fixture
def engine() -> Iterator[Engine]:
    manager = GroupManager(hybrid_groups(), 1 << 20)
    runner = SayingRunner(manager)
    eos = frozenset({FULL_STOP})
    with Engine(runner, manager, tokenizer=TOKENIZER, eos_token_ids=eos) as engine:  # type: ignore[arg-type]
        yield engine
        assert engine.usage().live_bytes == 0


@pytest.mark.parametrize("stop", ["END", "\u20ac5", "\U0001f680", "of \U0001f680 st", "I"])
@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_over_several_tokens_ends_text_and_stream(engine: Engine, stop: str, include: bool) -> None:
    expected = TEXT[: TEXT.index(stop)] + (stop if include else "")
    params = SamplingParams(stop=("nowhere", stop), include_stop_str_in_output=include)
    (out,) = engine.generate(PROMPT, params)
    assert (out.text, out.finish_reason) == (expected, "stop")
    assert out.token_ids == TOKENIZER.encode(TEXT[: TEXT.index(stop)] + stop)
    events = list(engine.stream(PROMPT, params))
    assert "".join(event.text for event in events) == expected
    assert [token for event in events for token in event.token_ids] == out.token_ids
    assert all("\ufffd" not in event.text for event in events)
    assert [event.finish_reason for event in events] == [None] * (len(events) - 1) + ["stop"]


def test_what_looked_like_a_stop_string_comes_out_when_it_is_none(engine: Engine) -> None:
    events = list(engine.stream(PROMPT, SamplingParams(stop=("say so",), max_tokens=7)))
    assert [event.text for event in events] == ["I", " ", "", "", "", "say:", " "]
    assert events[-1].output is not None
    assert events[-1].output.text == "I say: "


def test_a_stop_string_that_never_comes_holds_nothing_back_for_good(engine: Engine) -> None:
    (plain,) = engine.generate(PROMPT, SamplingParams(max_tokens=16, ignore_eos=True))
    # Its beginning is the end of the output, so the last characters wait for a decision that never falls.
    stop = plain.text[-2:] + "\x00"
    params = SamplingParams(max_tokens=16, ignore_eos=True, stop=stop)
    events = list(engine.stream(PROMPT, params))
    assert "".join(event.text for event in events) == plain.text
    assert events[-1].finish_reason == "length"
    assert events[-1].output is not None
    assert events[-1].output.token_ids == plain.token_ids


def test_the_end_of_sequence_ends_it_or_is_ignored(engine: Engine) -> None:
    (out,) = engine.generate(PROMPT, SamplingParams())
    assert (out.text, out.finish_reason, out.token_ids[-1]) == (TEXT[:-2], "stop", FULL_STOP)
    (out,) = engine.generate(PROMPT, SamplingParams(ignore_eos=True, max_tokens=64))
    assert (out.finish_reason, len(out.token_ids)) == ("length", 64)
    assert out.text.startswith(TEXT + TEXT[:8])


def test_min_tokens_bans_what_ends_the_output_and_looks_for_no_stop_string(engine: Engine) -> None:
    at = SAID.index(FULL_STOP)
    (out,) = engine.generate(PROMPT, SamplingParams(min_tokens=at + 1, max_tokens=64))
    assert out.token_ids[:at] == SAID[:at]
    assert out.token_ids[at] != FULL_STOP
    assert (out.finish_reason, len(out.token_ids)) == ("stop", len(SAID) + at + 1)
    (out,) = engine.generate(PROMPT, SamplingParams(min_tokens=at, max_tokens=64))
    assert (out.finish_reason, len(out.token_ids)) == ("stop", at + 1)
    (out,) = engine.generate(PROMPT, SamplingParams(min_tokens=17, stop=("I", "of"), ignore_eos=True))
    assert out.text == TEXT[: TEXT.index("of")]
    (out,) = engine.generate(PROMPT, SamplingParams(min_tokens=9, stop_token_ids=(SAID[1], SAID[10])))
    assert out.token_ids[1] not in (SAID[1], SAID[10])
    assert (out.token_ids[-1], len(out.token_ids)) == (SAID[10], 11)
