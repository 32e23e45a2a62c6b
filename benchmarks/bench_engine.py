"""The engine against `model.generate` on the CPU: ratios of the two sides, measured in turn in one process.

Models are toys with random weights, shaped like the families they are named after (benchmarks/toys.py), and with
`--gemma` the real Gemma 3 270M. Every number is the median of several runs; a ratio above 1 means that this package is
faster. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from rich import box
from rich.console import Console
from rich.table import Table
from tqdm import tqdm
from transformers import PreTrainedModel
from transformers.utils import logging

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.sides import Arrival, Clock, Ours, Prompt, Stock
from benchmarks.toys import TOYS, VOCAB, build

RAGGED = (97, 194, 260, 340, 420, 510, 600, 683)
LONG_PAGES = 64
"""Tokens per page where contexts are long and layers small, so that a page is worth a call of its own."""


class Row(NamedTuple):
    """One workload of one model; `aim` is the ratio wanted, None where none was set."""

    work: str
    model: str
    ours: float
    stock: float
    unit: str
    ratio: float
    aim: float | None


class Bench:
    """Runs workloads on one model and keeps their rows."""

    def __init__(self, name: str, model: PreTrainedModel, clock: Clock, repeats: int, vocab: int = VOCAB) -> None:
        self.rows: list[Row] = []
        self._name = name
        self._clock = clock
        self._repeats = repeats
        self._random = np.random.default_rng(0)
        self._vocab = vocab
        self._model = model
        self._stock = Stock(model, clock)
        for side in (self._ours(), self._stock):
            side.batch([self._prompt(64)] * 2, 4)

    def ragged(self) -> None:
        """8 ragged prompts, 3,104 tokens in all, 32 new each."""
        prompts = [self._prompt(length) for length in RAGGED]
        tokens = 32 * len(prompts)
        engine = self._ours()
        found = self._both(lambda: engine.batch(prompts, 32), lambda: self._stock.batch(prompts, 32))
        self._faster("8 ragged prompts, 32 new each", "tokens/s", 1.5, *(tokens / seconds for seconds in found))
        engine.close()

    def arriving(self) -> None:
        """32 requests that arrive faster than either side serves them, of 32 to 1,024 tokens and 8 to 128 new ones."""
        lengths = np.exp(self._random.uniform(np.log(32), np.log(1024), 32)).astype(int).tolist()
        news = self._random.integers(8, 129, 32).tolist()
        times = np.cumsum(self._random.exponential(0.05, 32)).tolist()
        requests = [
            Arrival(at, self._prompt(length), new) for at, length, new in zip(times, lengths, news, strict=True)
        ]
        engine = self._ours()
        ours, stock = [], []
        for _ in range(self._repeats):
            ours.append(engine.arrivals(requests))
            stock.append(self._stock.arrivals(requests))
        engine.close()
        medians = [sum(news) / statistics.median(s.makespan_s for s in side) for side in (ours, stock)]
        self._faster("32 requests arriving", "tokens/s", 2.0, *medians)
        latencies = [statistics.median(s.latency_s for s in side) for side in (ours, stock)]
        self._slower("32 requests arriving, mean latency", None, *latencies)

    def decode(self, context: int, aim: float, page_tokens: int = 16) -> None:
        prompt = self._prompt(context)
        engine = self._ours(page_tokens=page_tokens)
        found = self._both(lambda: engine.decode(prompt, 65), lambda: self._stock.decode(prompt, 65))
        pages = "" if page_tokens == 16 else f", pages of {page_tokens}"
        self._slower(f"decode, batch 1, context {context:,}{pages}", aim, *found)
        engine.close()

    def prefill(self, length: int, aim: float | None, prompt: Prompt | None = None) -> None:
        prompt = prompt or self._prompt(length)
        engine = self._ours()
        found = self._both(lambda: engine.first_token(prompt), lambda: self._stock.first_token(prompt))
        self._slower(f"prefill {length:,}", aim, *found)
        engine.close()

    def hit(self, length: int) -> None:
        """Time to first token where all but the last unit is cached, as a share of a cold run."""
        prompt = self._prompt(length)
        engine = self._ours()

        def warm() -> float:
            engine.first_token(prompt, warm=True)
            return engine.first_token(prompt, warm=True)

        found = self._both(warm, lambda: engine.first_token(prompt))
        self._slower(f"first token, {length:,} tokens cached, against its own cold run", 25.0, *found)
        engine.close()

    def chat(self, turns: int = 20, length: int = 500, new_tokens: int = 32) -> None:
        lines = [self._prompt(length - new_tokens) for _ in range(turns)]
        engine = self._ours()
        ours = [engine.chat(lines, new_tokens) for _ in range(self._repeats)]
        kept = [self._stock.chat(lines, new_tokens, keep=True) for _ in range(self._repeats)]
        engine.close()
        fresh = self._stock.chat(lines, new_tokens, keep=False)
        self._slower(
            f"{turns} turns of chat, cache kept by hand", 0.9, statistics.median(ours), statistics.median(kept)
        )
        self._slower(f"{turns} turns of chat, no reuse", 5.0, statistics.median(ours), fresh)

    def _ours(self, **options: Any) -> Ours:
        return Ours(self._model, self._clock, "2GiB", **options)

    def _prompt(self, length: int) -> Prompt:
        found: Prompt = self._random.integers(1, self._vocab, length).tolist()
        return found

    def _both(self, ours: Callable[[], float], stock: Callable[[], float]) -> tuple[float, float]:
        """Median seconds of both, taken in turn."""
        pairs = [(ours(), stock()) for _ in range(self._repeats)]
        return statistics.median(a for a, _ in pairs), statistics.median(b for _, b in pairs)

    def _slower(self, work: str, aim: float | None, ours: float, stock: float) -> None:
        """A row of seconds."""
        self.rows.append(Row(work, self._name, ours, stock, "s", stock / ours, aim))

    def _faster(self, work: str, unit: str, aim: float | None, ours: float, stock: float) -> None:
        """A row of a rate."""
        self.rows.append(Row(work, self._name, ours, stock, unit, ours / stock, aim))


def steps(bench: Bench, name: str) -> Iterator[tuple[str, Callable[[], None]]]:
    """The workloads of one toy, by the names `--only` knows."""
    yield "ragged", bench.ragged
    yield "arriving", bench.arriving
    yield "decode", lambda: bench.decode(512, 0.95)
    yield "long", lambda: bench.decode(16384, 1.3)
    yield "long", lambda: bench.decode(16384, 1.3, LONG_PAGES)
    yield "prefill", lambda: bench.prefill(4096, 4.0 if name == "jamba" else None)
    yield "hit", lambda: bench.hit(8192)
    yield "chat", bench.chat


def gemma(clock: Clock, repeats: int, console: Console) -> list[Row]:
    """Gemma 3 270M in bfloat16 on 8,192 tokens of real text."""
    from benchmarks.demo import gemma_folder, shared_text
    from hybridkv.cli.loading import load

    loaded = load(str(gemma_folder(console)), dtype="bfloat16")
    text = shared_text(loaded, 1 << 30)
    prompt = (text * (8192 // len(text) + 1))[:8192]
    bench = Bench("gemma-3-270m", loaded.model, clock, repeats, loaded.model.config.get_text_config().vocab_size)
    bench.prefill(8192, 2.5, prompt)
    return bench.rows


def table(rows: Sequence[Row]) -> Table:
    made = Table(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False)
    for name in ("work", "model"):
        made.add_column(name, no_wrap=True)
    for name in ("hybridkv", "generate", "ratio", "aim"):
        made.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        good = row.aim is None or row.ratio >= row.aim
        values = (f"{value:.1f} /s" if row.unit == "tokens/s" else _seconds(value) for value in (row.ours, row.stock))
        aim = "" if row.aim is None else f"{row.aim:g}x"
        made.add_row(row.work, row.model, *values, f"{row.ratio:.2f}x", aim, style="" if good else "yellow")
    return made


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1000:.1f} ms"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(TOYS), help="toys, separated by commas; empty for none")
    parser.add_argument("--only", default="", help="workloads, separated by commas: ragged, arriving, decode, ...")
    parser.add_argument("--gemma", action="store_true", help="also Gemma 3 270M (extra 'gguf')")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--cpu-time", action="store_true", help="count processor time: right with one thread only")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    logging.set_verbosity_error()
    clock = time.process_time if options.cpu_time else time.perf_counter
    console = Console(width=140)
    only = set(filter(None, options.only.split(",")))
    rows: list[Row] = []
    for name in filter(None, options.models.split(",")):
        bench = Bench(name, build(name), clock, options.repeats)
        work = [step for step in steps(bench, name) if not only or step[0] in only]
        for _, run in tqdm(work, desc=name, unit="workload", leave=False, disable=not sys.stderr.isatty()):
            run()
        rows += bench.rows
    if options.gemma:
        rows += gemma(clock, options.repeats, console)
    console.print(table(sorted(rows, key=lambda row: row.work)))
    setting = {"threads": options.threads, "clock": clock.__name__, "torch": torch.__version__}
    print(json.dumps({**setting, "rows": [row._asdict() for row in rows]}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
