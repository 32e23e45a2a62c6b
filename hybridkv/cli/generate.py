"""`hybridkv generate`: stream a continuation to stdout."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from hybridkv.cli.console import read_prompt
from hybridkv.cli.loading import load
from hybridkv.config import parse_bytes, read_environment
from hybridkv.engine.outputs import RequestOutput
from hybridkv.engine.params import SamplingParams


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
    seed: Annotated[int | None, typer.Option(help="Makes sampling repeatable.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Stop string; may be repeated.")] = None,
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
        seed=seed,
        stop=tuple(stop or ()),
    )
    pool_bytes = parse_bytes(memory) if memory is not None else read_environment(os.environ).memory or 2**30
    text = read_prompt(prompt, file)
    loaded = load(model, device)

    from hybridkv.engine.wrap import wrap

    progress = sys.stderr.isatty()
    output: RequestOutput | None = None
    with wrap(loaded.model, loaded.tokenizer, pool_bytes, max_batch_tokens) as engine:
        for event in engine.stream(text, params, progress=progress):
            output = event.output
            if not as_json:
                sys.stdout.write(event.text)
                sys.stdout.flush()
    if output is not None:
        _report(output, as_json)


def _report(output: RequestOutput, as_json: bool) -> None:
    if as_json:
        fields = {name: getattr(output, name) for name in output.__slots__}
        typer.echo(json.dumps({**fields, "decode_tokens_per_s": output.decode_tokens_per_s}, ensure_ascii=False))
        return
    if not output.text.endswith("\n"):
        typer.echo()
    typer.secho(
        f"{output.prompt_tokens:,} prompt tokens, first token after {output.ttft_s:.2f} s, "
        f"{len(output.token_ids):,} tokens at {output.decode_tokens_per_s:.1f}/s, finished by {output.finish_reason}",
        err=True,
        dim=True,
    )
