"""`hybridkv sim`: what it prints and writes, and one line for every bad input."""

from __future__ import annotations

import json
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from tests.test_cli import expect_bad, run

CHAT = "chat:users=3,turns=2,systems=1,system=64,question=20,answer=10"


def test_json_has_the_counts_of_every_policy_and_pool() -> None:
    arguments = ("sim", CHAT, "--preset", "gemma-3-12b", "--pool", "64MiB,1GiB", "--compare", "--json")
    result = run(*arguments, "--requests", "5", "--arrival", "trace")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["trace"].startswith(CHAT)
    assert (found["summary"]["requests"], found["arrival"]) == (5, "trace")
    assert [(r["policy"], r["pool"]) for r in found["runs"]] == [
        (policy, pool) for policy in ("lru", "cost", "pages") for pool in ("64MiB", "1GiB")
    ]
    for counts in found["runs"]:
        assert counts["requests"] == 5
        assert 0 < counts["hit_rate"] <= counts["unbounded_hit_rate"] < 1
        assert set(counts["held"]) == {"full_attention", "sliding_attention"}
        assert set(counts["cpu"]) == {"open", "prefill", "decode", "close"}


def test_a_table_and_a_plot(tmp_path: Path) -> None:
    plot = tmp_path / "plot.svg"
    result = run("sim", CHAT, "--preset", "jamba-1.5-mini", "--pool", "900%,5000%", "--plot", str(plot), "--no-losses")
    assert result.exit_code == 0, result.output
    for word in ("jamba-1.5-mini", "900%", "5000%", "lru", "evicted"):
        assert word in result.stdout
    texts = [node.text for node in ElementTree.parse(plot).iter("{http://www.w3.org/2000/svg}text")]
    assert "pool size, GiB (log scale)" in texts
    assert "share of prompt tokens found in the cache" in texts
    assert "lru" in texts
    assert "unbounded" not in texts


def test_a_file_is_replayed_with_its_own_tokenizer(tmp_path: Path) -> None:
    trace = tmp_path / "talk.jsonl"
    said = "one two three four " * 40
    trace.write_text(json.dumps({"input": said}) + "\n" + json.dumps({"input": said + "five"}))
    tokenizer = tmp_path / "tokenizer.json"
    from tests.engine_fakes import byte_level_tokenizer

    byte_level_tokenizer(128).save_pretrained(tmp_path)
    for extra in ((), ("--tokenizer", str(tokenizer))):
        result = run("sim", str(trace), "--preset", "gemma-3-270m", "--pool", "1GiB", "--json", *extra)
        assert result.exit_code == 0, result.output
        assert json.loads(result.stdout)["runs"][0]["hit_tokens"] > 700


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("nothing",), ["no trace file or workload named 'nothing'"]),
        ((CHAT, "--policy", "best"), ["unknown policy 'best'", "lru, cost, pages"]),
        ((CHAT, "--arrival", "now"), ["unknown arrival 'now'"]),
        ((CHAT, "--requests", "0"), ["at least 1 request"]),
        ((CHAT, "--pool", "0%"), ["0%", "0 bytes"]),
        ((CHAT, "--pool", "a lot"), ["'a lot' is no size in bytes"]),
        ((CHAT, "--pool", "1GiB", "--plot", "x.svg"), ["at least two pool sizes"]),
        ((CHAT, "--pool", "1GiB,1024MiB", "--plot", "x.svg"), ["at least two pool sizes"]),
        ((CHAT, "--whole-blocks"), ["--whole-blocks", "no file"]),
        ((CHAT, "--chunk", "0"), ["must be above 0"]),
        ((CHAT, "--checkpoint-interval", "-3"), ["checkpoint_interval"]),
        ((CHAT, "--pool", "1GiB,2GiB", "--plot", "/no/such/folder/x.svg"), ["cannot write"]),
    ],
)
def test_bad_input_is_one_line(arguments: tuple[str, ...], words: list[str]) -> None:
    expect_bad(run("sim", *arguments, "--preset", "gemma-3-270m"), *words)


def test_a_tokenizer_that_cannot_be_loaded_is_named(tmp_path: Path) -> None:
    trace = tmp_path / "talk.jsonl"
    trace.write_text('{"input": "hello"}')
    expect_bad(
        run("sim", str(trace), "--preset", "gemma-3-270m", "--tokenizer", str(trace)), "cannot load the tokenizer"
    )


def test_it_runs_without_torch() -> None:
    code = (
        "import sys; from hybridkv.cli import app; "
        f"app(['sim', '{CHAT}', '--preset', 'gemma-3-270m', '--pool', '1GiB', '--json'], standalone_mode=False); "
        "print([name for name in ('torch', 'transformers') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.endswith("[]\n")
