"""`hybridkv memory`: what a model's layers need, before anything is loaded."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hybridkv.catalog import layer_groups
from hybridkv.cli.loading import config_source
from hybridkv.config import format_bytes, parse_bytes, parse_token_list
from hybridkv.memory import MemoryPlan, plan_memory


def memory(
    model: Annotated[str, typer.Argument(metavar="MODEL|PRESET", help="Folder, config.json, preset or hub name.")],
    context: Annotated[str, typer.Option(help="Context lengths in tokens.")] = "4k,32k,128k",
    pool: Annotated[str, typer.Option(help="Size of the pool.")] = "16GiB",
    page_tokens: Annotated[int, typer.Option(help="Tokens per attention page.")] = 16,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Bytes by layer type, what one request needs, and how many requests fit."""
    contexts = parse_token_list(context)
    pool_bytes = parse_bytes(pool)
    plan = plan_memory(layer_groups(config_source(model), page_tokens), contexts, pool_bytes)
    if as_json:
        typer.echo(json.dumps({"model": model, **plan.as_dict()}))
    else:
        console = Console()
        console.print(_table(model, plan))
        console.print(_footnote(plan), style="dim", highlight=False)


def _table(model: str, plan: MemoryPlan) -> Table:
    title = Text(f"{model}: bytes one request holds, by its length in tokens", style="bold")
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False)
    table.add_column("layers", no_wrap=True)
    table.add_column("page", justify="right", style="dim", no_wrap=True)
    for context in plan.contexts:
        table.add_column(_tokens(context.tokens), justify="right", no_wrap=True)
    for i, group in enumerate(plan.groups):
        held = [format_bytes(context.groups[i].nbytes) for context in plan.contexts]
        table.add_row(f"{group.layers} x {group.name}", format_bytes(group.page_bytes), *held)
    table.add_section()
    table.add_row("one request", "", *(format_bytes(c.minimum) for c in plan.contexts), style="bold")
    if any(context.all_full is not None for context in plan.contexts):
        full = ["-" if c.all_full is None else format_bytes(c.all_full) for c in plan.contexts]
        table.add_row("were all layers full", "", *full, style="dim")
    fit = [f"{context.requests:,}" for context in plan.contexts]
    table.add_row(f"requests in {format_bytes(plan.pool_bytes)}", "", *fit, style="green")
    return table


def _footnote(plan: MemoryPlan) -> str:
    tokens = sorted({group.page_tokens for group in plan.groups if group.page_tokens})
    holds = [f"{' or '.join(map(str, tokens))} tokens"] if tokens else []
    holds += ["one state"] if any(group.page_tokens == 0 for group in plan.groups) else []
    return (
        f"A page holds {', or '.join(holds)}. The pool has {plan.slabs:,} slabs of {format_bytes(plan.slab_bytes)}; "
        f"padding {plan.padding:.2%}."
    )


def _tokens(count: int) -> str:
    return f"{count // 1024}k" if count % 1024 == 0 else f"{count:,}"
