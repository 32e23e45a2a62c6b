"""What single operations cost on the CPU, each beside the way it would be done otherwise.

Processor time of one thread, the least of several runs. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from rich import box
from rich.console import Console
from rich.table import Table
from tqdm import tqdm
from transformers.models.jamba.modeling_jamba import mamba_selective_scan
from transformers.models.kimi_linear.modeling_kimi_linear import chunk_kimi_delta_attention
from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

from hybridkv.entries import CacheEntry, attention_parts, group_entries
from hybridkv.layout import plan_layout
from hybridkv.ops.attention import Scoring, attend, packed_attention
from hybridkv.ops.delta_scan import DeltaInputs, delta_scan
from hybridkv.ops.planning import PageTable, plan_tokens
from hybridkv.ops.selective_scan import selective_scan
from hybridkv.ops.spans import Entry
from hybridkv.sequence import TokenPages
from hybridkv.storage import PoolStorage

CPU = torch.device("cpu")
Work = Callable[[], object]


class Row(NamedTuple):
    """One operation, ours and the other way, in milliseconds."""

    operation: str
    ours_ms: float
    other: str
    other_ms: float


def cases() -> Iterator[tuple[str, Work, str, Work]]:
    """Each operation: its name, ours, the name of the other way, that way."""
    for heads, dim, page, dtype in ((1, 64, 64, "float32"), (8, 128, 16, "float32"), (8, 128, 16, "bfloat16")):
        yield decode(heads, dim, page, dtype)
    yield sinks()
    yield mamba(512, 4096)
    yield mamba(8192, 256)
    yield delta(by_channel=False)
    yield delta(by_channel=True)


def decode(kv_heads: int, dim: int, page_tokens: int, dtype: str) -> tuple[str, Work, str, Work]:
    """One token over 16,384 of one layer, in pages that eight layers share."""
    past, layers = 16384, 8
    kind = getattr(torch, dtype)
    entries = [CacheEntry(i, "full_attention", attention_parts(kv_heads, dim, dtype)) for i in range(layers)]
    group = group_entries(entries, page_tokens)[0]
    pages = past // page_tokens + 1
    storage = PoolStorage(plan_layout([group], group.page_bytes * (pages + 80), page_tokens))
    for part in (0, 1):
        storage.part(0, 0, part).normal_()
    table = PageTable([TokenPages(np.arange(pages), np.arange(pages))], page_tokens, CPU)
    lengths, counts = np.array([past]), np.array([1])
    here, gathered = (plan_tokens(group.rule, table, lengths, counts, 1, kind, CPU, least) for least in (1, None))
    query = torch.randn(4 * kv_heads, 1, dim).to(kind)
    own = torch.randn(kv_heads, 1, dim).to(kind)
    entry, scoring = Entry(storage, 0, 0), Scoring(dim**-0.5)
    return (
        f"decode over 16k, {kv_heads} x {dim} {dtype}, pages of {page_tokens}, in place",
        lambda: packed_attention(query, own, own, here, entry, scoring),
        "gathered",
        lambda: packed_attention(query, own, own, gathered, entry, scoring),
    )


def sinks() -> tuple[str, Work, str, Work]:
    """1,024 tokens of a layer with attention sinks."""
    query, key, value = (torch.randn(1, heads, 1024, 64) for heads in (8, 2, 2))
    logits = torch.randn(8)
    shaped = logits.view(1, 8, 1, 1)
    fused, plain = Scoring(0.125, sinks=logits), Scoring(0.125, sinks=logits, fused=False)
    return (
        "attention with sinks, 1,024 tokens, fused",
        lambda: attend(query, key, value, None, True, fused, shaped),
        "plain",
        lambda: attend(query, key, value, None, True, plain, shaped),
    )


def mamba(channels: int, tokens: int) -> tuple[str, Work, str, Work]:
    """A Mamba-1 scan with 16 states a channel."""
    x, gate = torch.randn(2, 1, channels, tokens)
    dt = 0.1 * torch.randn(1, channels, tokens)
    decay = -torch.exp(torch.randn(channels, 16))
    write, read = torch.randn(2, 1, 16, tokens)
    skip = torch.randn(channels)
    inputs = (x, dt, decay, write, read, skip)
    return (
        f"Mamba-1 scan, {channels:,} channels, {tokens:,} tokens",
        lambda: selective_scan(*inputs, z=gate, delta_softplus=True),
        "token by token, as in transformers",
        lambda: mamba_selective_scan(*inputs, z=gate, delta_softplus=True, return_last_state=True),
    )


def delta(*, by_channel: bool) -> tuple[str, Work, str, Work]:
    """A gated delta rule with eight heads of 32 x 32."""
    tokens, heads, dim = 4096, 8, 32
    query, key, value = torch.randn(3, 1, tokens, heads, dim)
    g = -torch.rand(1, tokens, heads, dim) if by_channel else -torch.rand(1, tokens, heads)
    beta = torch.rand(1, tokens, heads)
    stock = chunk_kimi_delta_attention if by_channel else torch_chunk_gated_delta_rule
    return (
        f"delta rule, one decay a {'channel' if by_channel else 'head'}, {tokens:,} tokens",
        lambda: delta_scan(DeltaInputs(query, key, value, g, beta), None, normalise=True),
        "chunks of transformers",
        lambda: stock(query, key, value, g=g, beta=beta, use_qk_l2norm_in_kernel=True),
    )


def least_ms(work: Work, repeats: int) -> float:
    times = []
    for _ in range(repeats + 1):
        began = time.process_time()
        work()
        times.append(time.process_time() - began)
    return 1000 * min(times[1:])


def table(rows: Sequence[Row]) -> Table:
    made = Table(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False)
    made.add_column("operation", no_wrap=True)
    made.add_column("ms", justify="right")
    made.add_column("beside", no_wrap=True)
    for name in ("ms", "ratio"):
        made.add_column(name, justify="right")
    for row in rows:
        ratio = f"{row.other_ms / row.ours_ms:.1f}x"
        made.add_row(row.operation, f"{row.ours_ms:.2f}", row.other, f"{row.other_ms:.2f}", ratio)
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rows = []
    with torch.inference_mode():
        for name, ours, other, theirs in tqdm(cases(), total=8, leave=False, disable=not sys.stderr.isatty()):
            rows.append(Row(name, least_ms(ours, options.repeats), other, least_ms(theirs, options.repeats)))
    Console(width=130).print(table(rows))
    print(json.dumps({"torch": torch.__version__, "rows": [row._asdict() for row in rows]}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
