"""The command line: what it prints, and one line with exit code 2 for every bad input."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner, Result

import hybridkv
from hybridkv.cli import app
from hybridkv_models import family, preset_names
from tests.engine_fakes import byte_level_tokenizer


def run(*arguments: str, stdin: str | bytes | None = None) -> Result:
    return CliRunner().invoke(app, list(arguments), input=stdin)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny untrained Jamba with a byte tokenizer, as from_pretrained wants it."""
    path = tmp_path_factory.mktemp("model")
    torch.manual_seed(3)
    module = family("jamba")
    assert module is not None
    AutoModelForCausalLM.from_config(module.tiny_config()).save_pretrained(path)
    byte_level_tokenizer(128).save_pretrained(path)
    return path


def expect_bad(result: Result, *words: str) -> None:
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    line = result.stderr
    assert line.startswith("hybridkv: ")
    assert line.count("\n") == 1
    assert line.endswith("\n")
    for word in words:
        assert word in line


def test_version_and_help() -> None:
    for argument in ("version", "--version"):
        result = run(argument)
        assert (result.exit_code, result.stdout) == (0, f"hybridkv {hybridkv.__version__}\n")
    for arguments in ((), ("--help",), ("-h",)):
        result = run(*arguments)
        assert result.exit_code == 0
        assert all(command in result.stdout for command in ("generate", "memory", "version"))


def test_memory_and_version_start_without_torch() -> None:
    code = (
        "import sys; from hybridkv.cli import app; app(['memory', 'gemma-3-12b'], standalone_mode=False); "
        "print([name for name in ('torch', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_python_dash_m() -> None:
    done = subprocess.run([sys.executable, "-m", "hybridkv", "memory", "nope"], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("preset", sorted(preset_names()))
def test_memory_of_every_preset(preset: str) -> None:
    result = run("memory", preset, "--context", "4k,32k", "--pool", "32GiB")
    assert result.exit_code == 0
    assert preset in result.stdout
    assert "requests in" in result.stdout
    plan = json.loads(run("memory", preset, "--context", "4k,32k", "--pool", "32GiB", "--json").stdout)
    assert plan["model"] == preset
    assert [context["tokens"] for context in plan["contexts"]] == [4096, 32768]
    for context in plan["contexts"]:
        assert sum(group["nbytes"] for group in context["groups"]) == context["minimum"]


def test_memory_of_a_folder_and_its_config(folder: Path) -> None:
    one = json.loads(run("memory", str(folder), "--context", "1000", "--pool", "1MiB", "--json").stdout)
    two = json.loads(run("memory", str(folder / "config.json"), "--context", "1000", "--pool", "1MiB", "--json").stdout)
    assert one["groups"] == two["groups"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["memory"], ["MODEL"]),
        (["memory", "gemma-3-12"], ["gemma-3-12b"]),
        (["memory", "./nowhere"], ["nowhere"]),
        (["memory", "some/where"], ["some/where"]),
        (["memory", "gemma-3-12b", "--pool", "16 parsecs"], ["16 parsecs"]),
        (["memory", "gemma-3-12b", "--pool", "-1GiB"], ["-1GiB"]),
        (["memory", "gemma-3-12b", "--pool", "1MiB"], ["1,048,576"]),
        (["memory", "gemma-3-12b", "--context", "4k,,8k"], ["tokens"]),
        (["memory", "gemma-3-12b", "--context", "nan"], ["nan"]),
        (["memory", "gemma-3-12b", "--page-tokens", "0"], ["0"]),
        (["memory", "gemma-3-12b", "--frobnicate"], ["--frobnicate"]),
        (["memory", "gemma-3-12b", "extra"], ["extra"]),
        (["remember"], ["remember"]),
        (["generate"], ["MODEL"]),
        (["generate", "gemma-3-12b", "hello"], ["preset"]),
        (["generate", "./nowhere", "hello"], ["./nowhere"]),
        (["generate", "some/where", "hello"], ["some/where"]),
        (["generate", "some/where", ""], ["empty"]),
        (["generate", "some/where", " \n "], ["empty"]),
        (["generate", "some/where", "--file", "not there.txt"], ["not there.txt"]),
        (["generate", "some/where", "--file", "."], ["cannot read"]),
        (["generate", "some/where", "hello", "--file", "x"], ["not both"]),
        (["generate", "some/where", "hello", "--temperature", "nan"], ["temperature", "nan"]),
        (["generate", "some/where", "hello", "--temperature", "inf"], ["temperature", "inf"]),
        (["generate", "some/where", "hello", "--max-tokens", "-1"], ["max_tokens", "-1"]),
        (["generate", "some/where", "hello", "--max-tokens", "many"], ["max-tokens"]),
        (["generate", "some/where", "hello", "--max-tokens", "99999999999"], ["max_tokens"]),
        (["generate", "some/where", "hello", "--top-p", "0"], ["top_p"]),
        (["generate", "some/where", "hello", "--stop", ""], ["stop"]),
        (["generate", "some/where", "hello", "--n", "0"], ["n must", "0"]),
        (["generate", "some/where", "hello", "--min-tokens", "200"], ["min_tokens", "200"]),
        (["generate", "some/where", "hello", "--frequency-penalty", "3"], ["frequency_penalty", "3"]),
        (["generate", "some/where", "hello", "--logprobs", "2"], ["--logprobs", "--json"]),
        (["generate", "some/where", "hello", "--memory", "much"], ["much"]),
    ],
)
def test_bad_input_without_a_model(arguments: list[str], words: list[str]) -> None:
    expect_bad(run(*arguments), *words)


def test_malformed_models(tmp_path: Path, folder: Path) -> None:
    config = tmp_path / "config.json"
    for content in ("", "{", "[]", "{}", '{"model_type": "llama"}', '{"model_type": "t5"}', "\udcff"):
        config.write_text(content, encoding="utf-8", errors="surrogateescape")
        expect_bad(run("memory", str(tmp_path), "--pool", "1MiB"))
        expect_bad(run("memory", str(config), "--pool", "1MiB"))
        expect_bad(run("generate", str(tmp_path), "hello"))
    expect_bad(run("generate", str(config), "hello"), "folder")
    config.unlink()
    expect_bad(run("generate", str(tmp_path), "hello"), "config.json")
    config.write_text((folder / "config.json").read_text())
    expect_bad(run("generate", str(tmp_path), "hello"), "cannot load")


def test_generate_streams_text(folder: Path) -> None:
    result = run("generate", str(folder), "hello world", "--max-tokens", "12", "--memory", "1MiB")
    assert result.exit_code == 0, result.output
    assert "11 prompt tokens" in result.stderr
    assert "12 tokens" in result.stderr
    told = json.loads(run("generate", str(folder), "hello world", "--max-tokens", "12", "--json").stdout)
    assert told["text"] == result.stdout.removesuffix("\n")
    assert len(told["token_ids"]) == 12
    assert (told["prompt_tokens"], told["cached_tokens"], told["finish_reason"]) == (11, 0, "length")


def test_generate_takes_the_prompt_from_three_places(folder: Path, tmp_path: Path) -> None:
    prompt = "one two three"
    file = tmp_path / "prompt.txt"
    file.write_text(prompt)
    common = ("--max-tokens", "8", "--json")
    texts = {
        json.loads(result.stdout)["text"]
        for result in (
            run("generate", str(folder), prompt, *common),
            run("generate", str(folder), "--file", str(file), *common),
            run("generate", str(folder), *common, stdin=prompt),
        )
    }
    assert len(texts) == 1
    expect_bad(run("generate", str(folder), stdin=""), "standard input is empty")
    expect_bad(run("generate", str(folder), stdin=b"\xff\xfe\xff"), "UTF-8")
    file.write_bytes(b"ab\xff")
    expect_bad(run("generate", str(folder), "--file", str(file)), "UTF-8", "byte 2")


def test_sampling_options_reach_the_engine(folder: Path) -> None:
    def text(*options: str) -> str:
        out = run("generate", str(folder), "abc", "--max-tokens", "20", "--json", "--temperature", "1.5", *options)
        return str(json.loads(out.stdout)["text"])

    assert text("--seed", "1") == text("--seed", "1")
    assert text("--seed", "1") != text("--seed", "2")
    assert text("--seed", "2", "--top-k", "1") == text("--seed", "1", "--top-k", "1")


def test_several_outputs(folder: Path) -> None:
    options = ("abc", "--max-tokens", "6", "--n", "3", "--temperature", "1.5", "--seed", "1", "--ignore-eos")
    told = json.loads(run("generate", str(folder), *options, "--json", "--logprobs", "1").stdout)
    texts = [told["text"], *(one["text"] for one in told["others"])]
    assert len(set(texts)) == 3
    shown = run("generate", str(folder), *options)
    assert shown.stdout == "".join(text if text.endswith("\n") else f"{text}\n" for text in texts)
    assert [line for line in shown.stderr.splitlines() if line.startswith("output ")] == [
        f"output {i} of 3, finished by length:" for i in (1, 2, 3)
    ]
    assert "18 tokens" in shown.stderr
    for one in (told, *told["others"]):
        assert [logprob["token_id"] for logprob in one["logprobs"]] == one["token_ids"]
        assert all(logprob["likeliest"][0]["logprob"] >= logprob["logprob"] for logprob in one["logprobs"])


def test_guesses_change_nothing_and_are_counted(folder: Path) -> None:
    options = ("ab" * 20, "--max-tokens", "24", "--repetition-penalty", "0.1")
    plain, guessed = (
        json.loads(run("generate", str(folder), *options, "--json", *more).stdout)
        for more in ((), ("--speculate", "4"))
    )
    assert guessed["token_ids"] == plain["token_ids"]
    assert plain["drafted"] == 0
    assert guessed["drafted"] > 0
    line = run("generate", str(folder), *options, "--speculate", "4").stderr
    assert f"{guessed['accepted']} of {guessed['drafted']} guesses right" in line


def test_requests_that_do_not_fit(folder: Path) -> None:
    expect_bad(run("generate", str(folder), "hello", "--memory", "4KiB"), "4,096")
    expect_bad(run("generate", str(folder), "a" * 3000, "--memory", "64KiB"), "3000 tokens", "holds at most")
    expect_bad(run("generate", str(folder), "hello", "--max-tokens", "100000"), "100000", "4096")
    expect_bad(run("generate", str(folder), "hello", "--max-batch-tokens", "0"), "max_batch_tokens")
    expect_bad(run("generate", str(folder), "hello", "--speculate", "-1"), "speculate", "-1")
    expect_bad(run("generate", str(folder), "hello", "--device", "abacus"), "abacus")


def test_memory_from_the_environment(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYBRIDKV_MEMORY", "4KiB")
    expect_bad(run("generate", str(folder), "hello"), "4,096")
    monkeypatch.setenv("HYBRIDKV_MEMORY", "lots")
    expect_bad(run("generate", str(folder), "hello"), "HYBRIDKV_MEMORY")
