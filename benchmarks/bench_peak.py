"""Peak memory of a serving process, against its pool and its model.

Fills the pool of one model with requests and reads the process's high-water mark. What the process had before the model
was made (Python, torch, transformers) is counted apart. Run it once for each model: the mark never goes down.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from rich.console import Console

sys.path.insert(0, str(Path(__file__).parent.parent))

import hybridkv
from benchmarks.toys import TOYS, VOCAB, build
from hybridkv.config import format_bytes, parse_bytes


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=TOYS, default="gemma3")
    parser.add_argument("--memory", default="1GiB", help="size of the pool")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    # The first pass of a process also allocates what libraries keep for good.
    warm = build("llama")
    warm.generate(torch.ones(1, 8, dtype=torch.long), max_new_tokens=2, pad_token_id=0)  # type: ignore[operator]
    del warm
    before = high_water()
    model = build(options.model)
    weights = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    pool = parse_bytes(options.memory)
    random = np.random.default_rng(0)
    params = hybridkv.SamplingParams(max_tokens=16, ignore_eos=True)
    with hybridkv.wrap(model, memory=pool) as engine:
        usage = engine.usage()
        while usage.free_bytes > pool // 50:
            engine.generate([random.integers(1, VOCAB, int(n)).tolist() for n in random.integers(500, 4000, 8)], params)
            usage = engine.usage()
    peak = high_water() - before
    share = peak / (pool + weights) - 1
    Console(width=120).print(
        f"{options.model}: pool {format_bytes(pool)} ({1 - usage.free_bytes / pool:.0%} used), "
        f"model {format_bytes(weights)}, peak {format_bytes(peak)}: {share:+.1%}"
    )
    print(json.dumps({"model": options.model, "pool": pool, "weights": weights, "peak": peak, "over": share}))
    return 0


def high_water() -> int:
    """Most bytes this process ever had in memory."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


if __name__ == "__main__":
    sys.exit(main())
