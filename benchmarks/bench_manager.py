"""What the manager costs: CPU time of every call, by layout and prompt length, and metadata per page.

    python benchmarks/bench_manager.py [--json] [--repeats 9]

Each number is the median over the repeats, in microseconds of CPU time. The last line is JSON with everything.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
import tracemalloc
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

import hybridkv.lookup as lookup_module
from hybridkv import GroupManager, layer_groups
from hybridkv.hashing import chain_seed, unit_digests

LAYOUTS = {"gemma-3-12b": "gemma-3-12b", "jamba-1.5-mini": "jamba-1.5-mini", "all-full": "llama-3.1-8b"}
SHORT = {"gemma-3-12b": "gemma", "jamba-1.5-mini": "jamba", "all-full": "all-full"}
LENGTHS = (4096, 32768, 131072)
CHUNK = 8192
BATCH = 64
DECODE_STEPS = 64
UNIT = 16

AIMS = {
    "hash": 4000.0,
    "open, full hit": 800.0,
    "reserve, one chunk": 800.0,
    "first decode step": 200.0,
    "decode, per request": 2.0,
    "close": 500.0,
}
"""Microseconds aimed at for 128k tokens on gemma-3-12b."""


def cpu_us(call: Callable[[], Any]) -> tuple[float, Any]:
    start = time.process_time_ns()
    result = call()
    return (time.process_time_ns() - start) / 1000, result


def open_us(manager: GroupManager, tokens: np.ndarray) -> tuple[float, Any]:
    """The cost of `open` without the hashing inside it, which has a row of its own."""
    hashing = 0.0
    digests = lookup_module.unit_digests

    def timed(*args: Any, **kwargs: Any) -> list[bytes]:
        nonlocal hashing
        us, found = cpu_us(lambda: digests(*args, **kwargs))
        hashing += us
        return found

    with mock.patch.object(lookup_module, "unit_digests", timed):
        us, seq = cpu_us(lambda: manager.open(tokens))
    return us - hashing, seq


def prefill(manager: GroupManager, tokens: np.ndarray, chunk: int) -> Any:
    seq = manager.open(tokens)
    while seq.length < seq.known:
        n = min(chunk, seq.known - seq.length)
        manager.reserve(seq, n)
        manager.take_copies()
        manager.commit(seq, n)
    return seq


def one_round(preset: str, length: int, seed: int) -> dict[str, float]:
    """Every call once, on a fresh manager whose pool holds four such prompts."""
    rng = np.random.default_rng(seed)
    groups = layer_groups(preset)
    manager = GroupManager(groups, pool_size(groups, length))
    tokens = rng.integers(0, 100_000, length).astype(np.uint32)
    other = rng.integers(0, 100_000, length).astype(np.uint32)
    diverged = np.concatenate((tokens[: length // 2], other[length // 2 :]))
    took: dict[str, float] = {}
    took["hash"], _ = cpu_us(lambda: unit_digests(chain_seed(), tokens))

    took["open, miss"], seq = open_us(manager, tokens)
    took["reserve, one chunk"], _ = cpu_us(lambda: manager.reserve(seq, length))
    took["commit, one chunk"], _ = cpu_us(lambda: manager.commit(seq, length))
    manager.reserve_decode([seq])
    manager.commit_decode([seq], [1])
    took["close"], _ = cpu_us(lambda: manager.close(seq))

    took["open, full hit"], seq = open_us(manager, tokens)
    took["hit tokens"] = seq.hit_tokens
    took["reserve, after the hit"], _ = cpu_us(lambda: manager.reserve(seq, length - seq.hit_tokens))
    manager.commit(seq, length - seq.hit_tokens)
    took["first decode step"], _ = cpu_us(lambda: decode(manager, [seq]))
    manager.close(seq)

    took["open, diverged"], seq = open_us(manager, diverged)
    manager.close(seq)

    chunked = GroupManager(groups, pool_size(groups, length))
    seq = chunked.open(tokens)
    spent = 0.0
    while seq.length < length:
        n = min(CHUNK, length - seq.length)
        us, _ = cpu_us(lambda n=n: chunked.reserve(seq, n))
        spent += us
        chunked.commit(seq, n)
    took["reserve, 8k chunks"] = spent
    return took


def decode(manager: GroupManager, seqs: list[Any]) -> None:
    manager.reserve_decode(seqs)
    manager.take_copies()
    manager.commit_decode(seqs, [7] * len(seqs))


def decode_batch(preset: str, length: int) -> float:
    """Microseconds per request and step for 64 requests that share a prompt, over 64 steps."""
    groups = layer_groups(preset)
    manager = GroupManager(groups, pool_size(groups, length, requests=BATCH))
    rng = np.random.default_rng(0)
    shared = rng.integers(0, 100_000, length - 64).astype(np.uint32)
    seqs = []
    for i in range(BATCH):
        own = rng.integers(0, 100_000, 17 + i % UNIT).astype(np.uint32)
        seqs.append(prefill(manager, np.concatenate((shared, own)), CHUNK))
    decode(manager, seqs)
    steps = [cpu_us(lambda: decode(manager, seqs))[0] for _ in range(DECODE_STEPS)]
    return statistics.mean(steps) / BATCH


def pool_size(groups: Any, length: int, requests: int = 4) -> int:
    token = sum(group.page_bytes // group.page_tokens for group in groups if group.page_tokens)
    state = sum(group.page_bytes for group in groups if not group.page_tokens)
    return (length * 4 + requests * 2048) * token + (80 + 3 * requests) * state + (1 << 30)


def metadata(preset: str) -> dict[str, float]:
    """Bytes of bookkeeping per page of a pool that is full of cached prompts."""
    groups = layer_groups(preset)
    gc.collect()
    tracemalloc.start()
    manager = GroupManager(groups, pool_size(groups, 131072, requests=1))
    rng = np.random.default_rng(0)
    for _ in range(5):
        manager.close(prefill(manager, rng.integers(0, 100_000, 131072).astype(np.uint32), CHUNK))
    gc.collect()
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    usage = manager.usage()
    pages = sum(group.cached_pages + group.live_pages for group in usage.groups)
    return {"pages": pages, "bytes per page": held / pages, "pool bytes": usage.pool_bytes, "metadata bytes": held}


def padding(preset: str) -> float:
    manager = GroupManager(layer_groups(preset), "16GiB")
    return max(plan.padding for plan in manager.layout.plans)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print only the JSON line")
    parser.add_argument("--repeats", type=int, default=9, help="rounds per number; the median is kept")
    args = parser.parse_args()
    results: dict[str, Any] = {"calls_us": {}, "metadata": {}, "padding": {}}
    one_round(LAYOUTS["gemma-3-12b"], 4096, 0)
    for name, preset in LAYOUTS.items():
        for length in LENGTHS:
            rounds = [one_round(preset, length, seed) for seed in range(args.repeats)]
            medians = {call: statistics.median(r[call] for r in rounds) for call in rounds[0]}
            medians["decode, per request"] = decode_batch(preset, length)
            results["calls_us"][f"{name} {length}"] = {call: round(us, 2) for call, us in medians.items()}
        results["metadata"][name] = metadata(preset)
        results["padding"][name] = padding(preset)
    results["aims_us"] = {"gemma-3-12b 131072": AIMS}
    if not args.json:
        show(results, Console(width=max(132, Console().width)))
    print(json.dumps(results))
    sys.stdout.flush()


def show(results: dict[str, Any], console: Console) -> None:
    columns = list(results["calls_us"])
    table = Table(title="GroupManager, microseconds of CPU (opens without the hash)", box=box.SIMPLE)
    table.add_column("call", no_wrap=True)
    for column in columns:
        name, length = column.split()
        table.add_column(f"{SHORT[name]}\n{int(length) // 1024}k", justify="right", no_wrap=True)
    table.add_column("aim for\ngemma 128k", justify="right", no_wrap=True)
    for call in (call for call in results["calls_us"][columns[0]] if call != "hit tokens"):
        values = [f"{results['calls_us'][column][call]:,.{1 if 'per request' in call else 0}f}" for column in columns]
        table.add_row(call, *values, f"{AIMS[call]:,.0f}" if call in AIMS else "")
    console.print(table)
    for name, found in results["metadata"].items():
        console.print(
            f"{name}: {found['bytes per page']:.0f} bytes of metadata per page ({found['pages']:,} pages), "
            f"largest padding {results['padding'][name]:.2%}"
        )


if __name__ == "__main__":
    main()
