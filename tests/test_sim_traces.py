"""Reading traces: what becomes of ids, texts and turns, and which line is at fault."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hybridkv.errors import ConfigError, MalformedTrace
from hybridkv.sim.requests import INVENTED, summarize
from hybridkv.sim.traces import read_mooncake, read_sessions, read_trace

GOOD = {"timestamp": 0, "input_length": 1100, "output_length": 3, "hash_ids": [4, 9, 2]}


def written(folder: Path, *lines: Any) -> Path:
    path = folder / "trace.jsonl"
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return path


def test_equal_hash_ids_are_equal_blocks_and_the_last_block_is_as_long_as_the_prompt_says(tmp_path: Path) -> None:
    path = written(tmp_path, GOOD, {**GOOD, "timestamp": 2500, "input_length": 1536, "hash_ids": [4, 9, 7]})
    first, second = read_mooncake(path)
    assert (len(first.tokens), len(second.tokens)) == (1100, 1536)
    assert (first.tokens[:1024] == second.tokens[:1024]).all()
    assert not np.isin(first.tokens[1024:], second.tokens).any()
    assert (first.arrival, second.arrival) == (0.0, 2.5)
    assert len(first.output) == 3
    assert (first.output >= INVENTED).all()
    assert not np.isin(first.output, second.output).any()


def test_prompts_cut_to_whole_blocks_leave_out_those_without_any(tmp_path: Path) -> None:
    path = written(tmp_path, GOOD, {**GOOD, "input_length": 511, "hash_ids": [1]})
    (only,) = read_mooncake(path, whole_blocks=True)
    assert (only.tokens == next(iter(read_mooncake(path))).tokens[:1024]).all()


def test_a_summary_counts_a_half_full_block_as_a_unique_one(tmp_path: Path) -> None:
    path = written(tmp_path, GOOD, {**GOOD, "hash_ids": [4, 9, 3]}, {**GOOD, "hash_ids": [4, 8, 3]})
    summary = summarize(read_mooncake(path))
    assert summary.unique_tokens == 6 * 512, "block 3 is another one behind 8 than behind 9"
    assert (summary.requests, summary.prompt_tokens, summary.output_tokens) == (3, 3300, 9)
    assert summary.repeated_tokens == 1024 + 512
    assert summary.longest == 1103


def test_a_gzip_file_is_read_and_its_format_told_by_its_fields(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl.gz"
    path.write_bytes(gzip.compress(json.dumps(GOOD).encode()))
    trace = read_trace(path, limit=None)
    assert trace.unit_tokens == 512
    assert [len(request.tokens) for request in trace] == [1100]
    assert len(list(trace)) == 1, "a trace can be gone through again"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "is no JSON"),
        ("[1]", "holds a JSON list"),
        ({**GOOD, "hash_ids": [4, 9]}, "1100 tokens are 3 blocks of 512, but there are 2"),
        ({**GOOD, "hash_ids": [4, 9, -1]}, "'hash_ids' must be a list of whole numbers"),
        ({**GOOD, "hash_ids": [4, 9, True]}, "'hash_ids' must be a list"),
        ({**GOOD, "input_length": 0, "hash_ids": []}, "'input_length' must be a whole number of at least 1"),
        ({**GOOD, "output_length": 1.5}, "'output_length' must be a whole number of at least 0"),
        ({**GOOD, "timestamp": "now"}, "'timestamp' must be a number"),
        ({**GOOD, "timestamp": -1}, "earlier than that of the line before"),
        ({"input": "text"}, "'timestamp' must be a number, not None"),
    ],
)
def test_a_mooncake_line_at_fault_is_named(tmp_path: Path, line: Any, words: str) -> None:
    path = written(tmp_path, GOOD, "", line)
    with pytest.raises(MalformedTrace, match=r"trace\.jsonl, line 3: ") as caught:
        list(read_mooncake(path))
    assert words in str(caught.value)


def test_sessions_are_sorted_by_time_and_text_is_its_bytes(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        {"timestamp": 9000, "session_id": 7, "input": "hé", "output": "yo"},
        {"timestamp": 7000, "input_ids": [5, 4294967295], "output_ids": [1]},
    )
    first, second = read_trace(path, limit=None)
    assert (first.tokens.tolist(), first.output.tolist(), first.session) == ([5, 4294967295], [1], None)
    assert (second.tokens.tolist(), second.output.tolist()) == (list("hé".encode()), [121, 111])
    assert (first.arrival, second.arrival, second.session) == (0.0, 2.0, "7")


def test_an_output_known_by_its_length_is_what_the_next_turn_of_the_session_repeats(tmp_path: Path) -> None:
    turn = {"session_id": "a", "output_length": 2}
    path = written(
        tmp_path,
        {**turn, "input_ids": [1, 2]},
        {"session_id": "b", "input_ids": [1, 2, 8, 8, 8]},
        {**turn, "input_ids": [1, 2, 3, 4, 5]},
        {**turn, "input_ids": [1, 9, 9]},
    )
    first, _, second, third = read_sessions(path)
    assert first.output.tolist() == [3, 4]
    assert (second.output >= INVENTED).all(), "the next turn goes on from elsewhere"
    assert (third.output >= INVENTED).all()


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ({"output": "x"}, "give the prompt"),
        ({"input": ""}, "give the prompt"),
        ({"input": 5}, "'input' must be text, not int"),
        ({"input_ids": [2**32]}, "'input_ids' must be a list of whole numbers from 0 to 4294967295"),
        ({"input": "x", "session_id": [1]}, "'session_id' must be text"),
        ({"input": "x", "output_length": -1}, "'output_length' must be a whole number of at least 0"),
    ],
)
def test_a_session_line_at_fault_is_named(tmp_path: Path, line: Any, words: str) -> None:
    with pytest.raises(MalformedTrace, match="line 2: ") as caught:
        list(read_sessions(written(tmp_path, {"input": "x"}, line)))
    assert words in str(caught.value)


def test_files_that_hold_no_trace_are_refused(tmp_path: Path) -> None:
    with pytest.raises(MalformedTrace, match="holds no requests"):
        read_trace(written(tmp_path, ""), limit=None)
    with pytest.raises(MalformedTrace, match="cannot be read"):
        read_trace(tmp_path / "absent.jsonl", limit=None)
    broken = tmp_path / "broken.jsonl.gz"
    broken.write_bytes(gzip.compress(json.dumps(GOOD).encode())[:-9])
    with pytest.raises(MalformedTrace, match="cannot be read"):
        list(read_mooncake(broken))
    sessions = written(tmp_path, {"input": "x"})
    with pytest.raises(ConfigError, match="whole blocks"):
        read_trace(sessions, whole_blocks=True, limit=None)
    with pytest.raises(ConfigError, match="unknown unit of time 'h'"):
        read_sessions(sessions, time_unit="h")
