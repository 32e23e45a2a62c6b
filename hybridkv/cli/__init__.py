"""The `hybridkv` command. Every bad input gets one line on stderr and exit code 2."""

from __future__ import annotations

from typing import Annotated

import typer

from hybridkv import __version__
from hybridkv.cli.console import OneLineErrors
from hybridkv.cli.generate import generate
from hybridkv.cli.memory import memory
from hybridkv.cli.sim import sim

app = typer.Typer(
    name="hybridkv",
    cls=OneLineErrors,
    help="Run hybrid models from one shared pool of KV memory, and plan that memory.",
    no_args_is_help=False,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(generate)
app.command()(memory)
app.command()(sim)


@app.command()
def version() -> None:
    """Print the version."""
    typer.echo(f"hybridkv {__version__}")


def _print_version(wanted: bool) -> None:
    if wanted:
        version()
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _help_without_command(
    context: typer.Context,
    _: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
