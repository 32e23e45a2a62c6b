"""`hybridkv sim`: replay a trace of requests against the cache, without a model."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text
from tqdm import tqdm

from hybridkv.catalog import layer_groups
from hybridkv.cli.loading import config_source
from hybridkv.config import format_bytes
from hybridkv.errors import ConfigError
from hybridkv.sim.chart import Series, line_chart
from hybridkv.sim.generators import generated
from hybridkv.sim.replay import Service
from hybridkv.sim.requests import Summary, Trace, summarize
from hybridkv.sim.results import Replay
from hybridkv.sim.runs import BASELINE, POLICIES, Options, pool_size, simulate, simulate_unbounded
from hybridkv.sim.traces import Encode, read_trace, utf8_bytes


class Run(NamedTuple):
    """One line of the table."""

    policy: str
    pool: str
    pool_bytes: int
    replay: Replay


def sim(
    trace: Annotated[str, typer.Argument(metavar="TRACE", help="JSONL file, or a workload such as 'chat:users=50'.")],
    preset: Annotated[str, typer.Option(help="Preset, folder, config.json or hub name.")],
    pool: Annotated[str, typer.Option(help="Sizes, or % of the trace's unique bytes.")] = "5%,15%,40%",
    policy: Annotated[str, typer.Option(help="lru, cost or pages (the baseline).")] = "lru",
    compare: Annotated[bool, typer.Option("--compare", help="All policies side by side.")] = False,
    checkpoint_interval: Annotated[int, typer.Option(help="Tokens between resume points; 0 for none.")] = 4096,
    page_tokens: Annotated[int, typer.Option(help="Tokens per attention page.")] = 16,
    arrival: Annotated[str, typer.Option(help="sequential, or trace: overlapping.")] = "sequential",
    prefill_rate: Annotated[float, typer.Option(help="Prompt tokens/s of all requests.")] = 20_000.0,
    decode_rate: Annotated[float, typer.Option(help="Output tokens/s of each request.")] = 50.0,
    max_running: Annotated[int, typer.Option(help="Most requests at a time.")] = 32,
    chunk: Annotated[int, typer.Option(help="Most prompt tokens in a step.")] = 2048,
    requests: Annotated[int | None, typer.Option(help="Take this many requests.")] = None,
    whole_blocks: Annotated[bool, typer.Option("--whole-blocks", help="Cut Mooncake prompts to whole blocks.")] = False,
    tokenizer: Annotated[Path | None, typer.Option(help="tokenizer.json for text; bytes by default.")] = None,
    time_unit: Annotated[str, typer.Option(help="Of session timestamps: s, ms or us.")] = "ms",
    losses: Annotated[bool, typer.Option(help="Compare with an unbounded pool.")] = True,
    plot: Annotated[Path | None, typer.Option(help="Write hit rate over pool size to this SVG.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Replay requests against the cache of a model that is not loaded: hit rates, what was lost, and why."""
    if arrival not in ("sequential", "trace"):
        raise ConfigError(f"unknown arrival {arrival!r}; choose sequential or trace")
    if requests is not None and requests < 1:
        raise ConfigError(f"take at least 1 request, not {requests}")
    pools = [text.strip() for text in pool.split(",")]
    policies = POLICIES if compare else (policy,)
    service = Service(prefill_rate, decode_rate, max_running, chunk, timed=arrival == "trace")
    options = Options(checkpoint_interval or None, service=service)
    groups = layer_groups(config_source(preset), page_tokens)
    source = _trace(trace, requests, whole_blocks, tokenizer, time_unit)
    summary = summarize(source)
    sizes = {text: pool_size(text, groups, summary) for text in pools}
    if plot is not None and len(set(sizes.values())) < 2:
        raise ConfigError(f"a plot needs at least two pool sizes, for example --pool 5%,15%,40%; got {pool!r}")
    references: dict[bool, Replay] = {}
    runs = []
    with tqdm(total=None, unit=" requests", disable=None, leave=False) as bar:
        for name in policies:
            baseline = name == BASELINE
            if losses and baseline not in references:
                bar.set_description(f"{'pages' if baseline else 'manager'}, unbounded")
                references[baseline] = simulate_unbounded(source, groups, summary, name, options, _tick(bar, summary))
            for text, size in sizes.items():
                bar.set_description(f"{name}, {text}")
                bar.reset(summary.requests)
                known = references.get(baseline)
                replayed = simulate(source, groups, size, name, options, unbounded=known, progress=_tick(bar, summary))
                runs.append(Run(name, text, size, replayed))
    if plot is not None:
        _write(plot, f"{preset}, {arrival}, {source.name}", runs)
    if as_json:
        settings = {"checkpoint_interval": options.checkpoint_interval, "arrival": arrival, "chunk": chunk}
        typer.echo(json.dumps(_as_dict(source, preset, whole_blocks, settings, summary, runs)))
    else:
        Console().print(_table(f"{source.name}: {preset}, {summary.requests:,} requests, {arrival}", runs))


def _trace(name: str, limit: int | None, whole_blocks: bool, tokenizer: Path | None, time_unit: str) -> Trace:
    path = Path(name)
    if path.is_file():
        return read_trace(path, whole_blocks=whole_blocks, encode=_encoder(tokenizer), time_unit=time_unit, limit=limit)
    if whole_blocks or tokenizer is not None:
        raise ConfigError(f"--whole-blocks and --tokenizer are for trace files; there is no file {name!r}")
    return generated(name, limit)


def _encoder(path: Path | None) -> Encode:
    if path is None:
        return utf8_bytes
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:
        raise ConfigError(f"cannot load the tokenizer {path}: {error}") from error
    return lambda text: tokenizer.encode(text).ids


def _tick(bar: Any, summary: Summary) -> Callable[[], object]:
    bar.reset(summary.requests)
    return bar.update  # type: ignore[no-any-return]


def _as_dict(
    trace: Trace, preset: str, whole_blocks: bool, settings: dict[str, Any], summary: Summary, runs: Sequence[Run]
) -> dict[str, Any]:
    return {
        "trace": trace.name,
        "preset": preset,
        "whole_blocks": whole_blocks,
        **settings,
        "summary": summary._asdict(),
        "runs": [
            {"policy": run.policy, "pool": run.pool, "pool_bytes": run.pool_bytes, **run.replay.as_dict()}
            for run in runs
        ],
    }


def _table(title: str, runs: Sequence[Run]) -> Table:
    table = Table(
        title=Text(title, style="bold"),
        title_justify="left",
        box=box.SIMPLE_HEAD,
        header_style="bold",
        pad_edge=False,
        caption=_caption(runs),
        caption_justify="left",
    )
    for name in ("pool", "policy"):
        table.add_column(name, no_wrap=True)
    for name in ("hit", "best", "evicted", "µs"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("lost")
    for run in runs:
        counts = run.replay
        best = counts.unbounded_hit_rate
        table.add_row(
            f"{run.pool} {format_bytes(run.pool_bytes)}" if run.pool.endswith("%") else run.pool,
            run.policy,
            f"{100 * counts.hit_rate:.1f} %",
            "-" if best is None else f"{100 * best:.1f} %",
            f"{counts.counters.evicted_pages:,}",
            f"{sum(counts.cpu):,.0f}",
            "\n".join(
                f"{100 * tokens / counts.prompt_tokens:.1f} % {kinds.replace('_attention', '')}"
                for kinds, tokens in counts.lost.items()
            ),
        )
    return table


def _caption(runs: Sequence[Run]) -> str:
    text = "best: an unbounded pool's hits; lost: by the layers that lacked a page; µs: CPU of the cache per request"
    preempted = sum(run.replay.preemptions for run in runs)
    refused = sum(run.replay.refused for run in runs)
    if preempted or refused:
        text += f"; {preempted:,} preemptions and {refused:,} refusals in all rows together (--json has each row's)"
    return text


def _write(path: Path, title: str, runs: Sequence[Run]) -> None:
    series = []
    for policy in dict.fromkeys(run.policy for run in runs):
        mine = sorted((run for run in runs if run.policy == policy), key=lambda run: run.pool_bytes)
        series.append(Series(policy, [(run.pool_bytes, run.replay.hit_rate) for run in mine]))
    best = max(runs, key=lambda run: run.replay.unbounded_hit_rate or 0.0).replay.unbounded_hit_rate
    if best is not None:
        pools = sorted({run.pool_bytes for run in runs})
        series.append(Series("unbounded", [(size, best) for size in (pools[0], pools[-1])], dashed=True))
    try:
        path.write_text(line_chart(title, series), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror or error}") from error
