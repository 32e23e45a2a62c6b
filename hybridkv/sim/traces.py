"""Traces from files: Mooncake's block hashes, and sessions with text or token ids. Plain or gzip, one object a line."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hybridkv.errors import ConfigError, MalformedTrace
from hybridkv.sim.requests import INVENTED, Request, Tokens, Trace, invented

MOONCAKE_BLOCK = 512
"""Tokens that one hash id of a Mooncake trace stands for."""

Encode = Callable[[str], Sequence[int]]
Line = tuple[int, dict[str, Any]]

TIME_UNITS = {"s": 1.0, "ms": 1e3, "us": 1e6}


def utf8_bytes(text: str) -> Sequence[int]:
    """Text as the numbers of its UTF-8 bytes: the tokenizer where none is named."""
    return text.encode()


def read_trace(
    path: Path, *, whole_blocks: bool = False, encode: Encode = utf8_bytes, time_unit: str = "ms", limit: int | None
) -> Trace:
    """A trace from a file of either format; Mooncake's is told by its field `hash_ids`.

    Args:
        path: a JSON Lines file; a name that ends in .gz is unpacked.
        whole_blocks: for Mooncake traces, see `read_mooncake`.
        encode: for sessions, see `read_sessions`.
        time_unit: for sessions.
        limit: how many requests to take.

    Raises:
        MalformedTrace: a file that cannot be read, or a first line that is of neither format.
    """
    first = next(_lines(path), None)
    if first is None:
        raise MalformedTrace(f"{path}: holds no requests")
    if "hash_ids" in first[1]:
        return read_mooncake(path, whole_blocks=whole_blocks, limit=limit)
    if whole_blocks:
        raise ConfigError(f"{path}: whole blocks can only be asked of a Mooncake trace, with hash_ids on every line")
    return read_sessions(path, encode=encode, time_unit=time_unit, limit=limit)


def read_mooncake(path: Path, *, whole_blocks: bool = False, limit: int | None = None) -> Trace:
    """A Mooncake trace: `timestamp` in ms, `input_length`, `output_length`, `hash_ids` of the 512-token blocks.

    Equal ids become equal tokens. The last id of a prompt stands for a block that may be partial; that block has an id
    of its own, so a later prompt that goes on from here shares only the whole blocks before it.

    Args:
        path: the file.
        whole_blocks: cut prompts to whole blocks, and leave out those without any.
        limit: how many requests to take.

    Raises:
        MalformedTrace: while the trace is gone through, at a line whose fields are missing or do not fit together.
    """
    return Trace(path.name, partial(_mooncake, path, whole_blocks), MOONCAKE_BLOCK, limit)


def read_sessions(path: Path, *, encode: Encode = utf8_bytes, time_unit: str = "ms", limit: int | None = None) -> Trace:
    """A trace of sessions. Fields of a line:

    `input` (text) or `input_ids` (token ids): the whole prompt, with the turns before it.
    `output` (text), `output_ids`, or `output_length`: what is generated; nothing if absent. Where only a length is
    known and the next prompt of the session goes on from this one, the tokens there are the output; else some are
    invented.
    `session_id` (text or number) and `timestamp` (a number): optional. Requests are sorted by time.

    Args:
        path: the file.
        encode: text as token ids; the bytes of its UTF-8 form by default.
        time_unit: "s", "ms" or "us".
        limit: how many requests to take.

    Raises:
        ConfigError: an unknown unit of time.
        MalformedTrace: while the trace is gone through, at a line that cannot be read.
    """
    if time_unit not in TIME_UNITS:
        raise ConfigError(f"unknown unit of time {time_unit!r}; choose one of {', '.join(TIME_UNITS)}")
    return Trace(path.name, partial(_sessions, path, encode, TIME_UNITS[time_unit]), limit=limit)


def _mooncake(path: Path, whole_blocks: bool) -> Iterator[Request]:
    offsets = np.arange(MOONCAKE_BLOCK, dtype=np.uint32)
    last = 0.0
    for number, fields in _lines(path):
        where = f"{path}, line {number}"
        arrival = _number(fields, "timestamp", where) / 1e3
        length = _count(fields, "input_length", where, least=1)
        output = _count(fields, "output_length", where)
        ids = _ids(fields, "hash_ids", where, INVENTED // MOONCAKE_BLOCK)
        if len(ids) != -(-length // MOONCAKE_BLOCK):
            raise MalformedTrace(
                f"{where}: {length} tokens are {-(-length // MOONCAKE_BLOCK)} blocks of {MOONCAKE_BLOCK}, but there "
                f"are {len(ids)} hash_ids"
            )
        if arrival < last:
            raise MalformedTrace(f"{where}: the timestamp is earlier than that of the line before; sort by time")
        last = arrival
        if whole_blocks:
            length -= length % MOONCAKE_BLOCK
        if length:
            blocks = ids[: -(-length // MOONCAKE_BLOCK), None] * np.uint32(MOONCAKE_BLOCK) + offsets
            yield Request(arrival, blocks.reshape(-1)[:length], invented(output, number))


class _Turn(NamedTuple):
    request: Request
    length: int | None
    line: int


def _sessions(path: Path, encode: Encode, per_second: float) -> Iterator[Request]:
    turns = sorted(
        (_turn(number, fields, f"{path}, line {number}", encode, per_second) for number, fields in _lines(path)),
        key=lambda turn: turn.request.arrival,
    )
    following: dict[str, Request] = {}
    requests = []
    for turn in reversed(turns):
        request = turn.request
        later = following.get(request.session) if request.session is not None else None
        if turn.length:
            request = request._replace(output=_continued(request.tokens, turn.length, later, turn.line))
        if request.session is not None:
            following[request.session] = request
        requests.append(request)
    start = turns[0].request.arrival if turns else 0.0
    for request in reversed(requests):
        yield request._replace(arrival=request.arrival - start)


def _continued(prompt: Tokens, length: int, later: Request | None, key: int) -> Tokens:
    """The output: what the session's next prompt has behind this one, or invented tokens."""
    if later is not None and len(later.tokens) >= len(prompt) + length:
        head, tail = np.split(later.tokens[: len(prompt) + length], [len(prompt)])
        if np.array_equal(head, prompt):
            return tail
    return invented(length, key)


def _turn(number: int, fields: dict[str, Any], where: str, encode: Encode, per_second: float) -> _Turn:
    prompt = _tokens(fields, "input", where, encode)
    if prompt is None or not len(prompt):
        raise MalformedTrace(f"{where}: give the prompt as text in 'input' or as numbers in 'input_ids', not empty")
    output = _tokens(fields, "output", where, encode)
    length = None
    if output is None and "output_length" in fields:
        length = _count(fields, "output_length", where)
    session = fields.get("session_id")
    if session is not None and (isinstance(session, bool) or not isinstance(session, str | int)):
        raise MalformedTrace(f"{where}: 'session_id' must be text or a whole number, not {session!r}")
    arrival = _number(fields, "timestamp", where) / per_second if "timestamp" in fields else 0.0
    empty = np.zeros(0, np.uint32)
    name = None if session is None else str(session)
    return _Turn(Request(arrival, prompt, empty if output is None else output, name), length, number)


def _tokens(fields: dict[str, Any], name: str, where: str, encode: Encode) -> Tokens | None:
    if f"{name}_ids" in fields:
        return _ids(fields, f"{name}_ids", where, 2**32)
    text = fields.get(name)
    if text is None:
        return None
    if not isinstance(text, str):
        raise MalformedTrace(f"{where}: {name!r} must be text, not {type(text).__name__}")
    return np.array(list(encode(text)), np.uint32)


def _lines(path: Path) -> Iterator[Line]:
    """Line numbers from 1, and the object on each line that is not blank."""
    try:
        with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield number, _fields(line, f"{path}, line {number}")
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise MalformedTrace(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from error


def _fields(line: str, where: str) -> dict[str, Any]:
    try:
        fields = json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        raise MalformedTrace(f"{where}: is no JSON: {error}") from error
    if not isinstance(fields, dict):
        raise MalformedTrace(f"{where}: holds a JSON {type(fields).__name__}, not an object with fields")
    return fields


def _number(fields: dict[str, Any], name: str, where: str) -> float:
    value = fields.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < float("inf"):
        raise MalformedTrace(f"{where}: {name!r} must be a number, not {value!r}")
    return float(value)


def _count(fields: dict[str, Any], name: str, where: str, least: int = 0) -> int:
    value = fields.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise MalformedTrace(f"{where}: {name!r} must be a whole number of at least {least}, not {value!r}")
    return value


def _ids(fields: dict[str, Any], name: str, where: str, limit: int) -> Tokens:
    value = fields.get(name)
    if not isinstance(value, list) or any(type(item) is not int or not 0 <= item < limit for item in value):
        raise MalformedTrace(f"{where}: {name!r} must be a list of whole numbers from 0 to {limit - 1}")
    return np.array(value, np.uint32)
