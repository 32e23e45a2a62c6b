"""`hybridkv generate`: stream a continuation to stdout."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from hybridkv.cli.console import read_prompt
from hybridkv.cli.loading import load
from hybridkv.config import parse_bytes, read_environment
from hybridkv.engine.outputs import RequestOutput
from hybridkv.engine.params import SamplingParams
from hybridkv.errors import ConfigError


def generate(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Folder, 'tiny-jamba' or hub name.")],
    prompt: Annotated[
        str | None, typer.Argument(metavar="PROMPT", help="Text to continue, else --file or stdin")
    ] = None,
    file: Annotated[Path | None, typer.Option(help="Read the prompt from this file.")] = None,
    max_tokens: Annotated[int, typer.Option(help="Most tokens to generate.")] = 128,
    memory: Annotated[str | None, typer.Option(help="Size of the pool; HYBRIDKV_MEMORY or 1GiB by default.")] = None,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="0 is off.")] = 0,
    top_p: Annotated[float, typer.Option(help="1 is off.")] = 1.0,
    min_p: Annotated[float, typer.Option(help="0 is off.")] = 0.0,
    repetition_penalty: Annotated[float, typer.Option(help="1 is off.")] = 1.0,
    presence_penalty: Annotated[float, typer.Option(help="0 is off.")] = 0.0,
    frequency_penalty: Annotated[float, typer.Option(help="0 is off.")] = 0.0,
    min_tokens: Annotated[int, typer.Option(help="Fewest tokens to generate.")] = 0,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on after end-of-sequence tokens.")] = False,
    n: Annotated[int, typer.Option("--n", "-n", help="Outputs; several are printed when all are done.")] = 1,
    logprobs: Annotated[int | None, typer.Option(help="With --json: also of this many likely tokens.")] = None,
    seed: Annotated[int | None, typer.Option(help="Makes sampling repeatable.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Stop string; may be repeated.")] = None,
    speculate: Annotated[int, typer.Option(help="Most tokens to guess ahead; 0 is off.")] = 0,
    max_batch_tokens: Annotated[int, typer.Option(help="Most tokens in one forward pass.")] = 2048,
    device: Annotated[str, typer.Option(help="cpu, cuda, ...")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object at the end.")] = False,
) -> None:
    """Continue a prompt. Text goes to stdout, progress and statistics to stderr."""
    params = SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        min_tokens=min_tokens,
        ignore_eos=ignore_eos,
        n=n,
        logprobs=logprobs,
        seed=seed,
        stop=tuple(stop or ()),
    )
    if logprobs is not None and not as_json:
        raise ConfigError("--logprobs are printed with --json only; add it")
    pool_bytes = parse_bytes(memory) if memory is not None else read_environment(os.environ).memory or 2**30
    text = read_prompt(prompt, file)
    loaded = load(model, device)

    from hybridkv.engine.wrap import wrap

    progress = sys.stderr.isatty()
    output: RequestOutput | None = None
    with wrap(loaded.model, loaded.tokenizer, pool_bytes, max_batch_tokens, speculate=speculate) as engine:
        for event in engine.stream(text, params, progress=progress):
            output = event.output
            if not as_json and n == 1:
                sys.stdout.write(event.text)
                sys.stdout.flush()
    if output is not None:
        _report(output, as_json)


def _report(output: RequestOutput, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(_plain(output), ensure_ascii=False))
        return
    several = bool(output.others)
    for i, one in enumerate(output.completions, 1):
        if several:
            typer.secho(
                f"output {i} of {len(output.completions)}, finished by {one.finish_reason}:", err=True, dim=True
            )
            sys.stdout.write(one.text)
        if not one.text.endswith("\n"):
            typer.echo()
    tokens = sum(len(one.token_ids) for one in output.completions)
    typer.secho(
        f"{output.prompt_tokens:,} prompt tokens, first token after {output.ttft_s:.2f} s, "
        f"{tokens:,} tokens at {output.decode_tokens_per_s:.1f}/s"
        + (f", {output.accepted:,} of {output.drafted:,} guesses right" if output.drafted else "")
        + ("" if several else f", finished by {output.finish_reason}"),
        err=True,
        dim=True,
    )


def _plain(output: RequestOutput) -> dict[str, Any]:
    """Every field of an output by its name, in what JSON knows."""
    fields = {name: _named(getattr(output, name)) for name in output.__slots__}
    return {**fields, "decode_tokens_per_s": output.decode_tokens_per_s}


def _named(value: Any) -> Any:
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return {name: _named(one) for name, one in value._asdict().items()}
    return [_named(one) for one in value] if isinstance(value, tuple | list) else value
