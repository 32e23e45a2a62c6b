"""What the commands share on the terminal: one-line errors, texts to read, sizes to show."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperGroup
from typer.exceptions import TyperException

from hybridkv.errors import ConfigError, HybridKVError

BAD_INPUT = 2


class OneLineErrors(TyperGroup):
    """A command group that says what is wrong in one line instead of a usage panel or a traceback."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        """Run a command; in standalone mode exit with 0, 2 for bad input, or what the command asked for."""
        if not standalone_mode:
            return super().main(args, prog_name, complete_var, False, windows_expand_args, **extra)
        try:
            code = super().main(args, prog_name, complete_var, False, windows_expand_args, **extra)
        except typer.Abort:
            code = 130
        except TyperException as error:
            fail(error.format_message() if hasattr(error, "format_message") else str(error))
        except HybridKVError as error:
            fail(str(error))
        sys.exit(code if isinstance(code, int) else 0)


def fail(message: str) -> None:
    """Print one line on stderr and exit with code 2."""
    typer.secho(f"hybridkv: {one_line(message)}", err=True, fg=typer.colors.RED)
    sys.exit(BAD_INPUT)


def one_line(text: str, longest: int = 500) -> str:
    """The text with every run of white space as one space, cut where it gets long."""
    line = " ".join(text.split())
    return line if len(line) <= longest else line[: longest - 3] + "..."


def read_prompt(prompt: str | None, file: Path | None) -> str:
    """The prompt from the argument, the file, or standard input when something is piped in.

    Raises:
        ConfigError: none of them, two of them, an empty one, or a file that cannot be read as UTF-8.
    """
    if prompt is not None and file is not None:
        raise ConfigError("give the prompt either as an argument or with --file, not both")
    source = "the prompt"
    if file is not None:
        source, prompt = f"{file}", _read(file)
    elif prompt is None:
        if sys.stdin.isatty():
            raise ConfigError("no prompt: pass it as an argument, with --file, or on standard input")
        source, prompt = "standard input", _decode(sys.stdin.buffer.read(), "standard input")
    if not prompt.strip():
        raise ConfigError(f"{source} is empty; give at least one character that is not white space")
    return prompt


def _read(file: Path) -> str:
    try:
        return _decode(file.read_bytes(), str(file))
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror or error}") from error


def _decode(content: bytes, source: str) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{source} is not UTF-8 text: {error.reason} at byte {error.start}") from error
