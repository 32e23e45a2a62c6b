"""Text of a growing list of tokens: whole characters only, cut before a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

_UNFINISHED = "\ufffd"
_LONGEST_CHARACTER = 8
_LONGEST_WINDOW = 256


class Tokenizer(Protocol):
    """The two calls the engine makes of a tokenizer; Hugging Face's have both."""

    def encode(self, text: str) -> list[int]: ...

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> Any: ...


class Detokenizer:
    """Tokens in, text out.

    The text equals `tokenizer.decode` of all tokens with special tokens skipped. A character whose bytes are spread
    over several tokens comes out with its last byte.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []
        self._read = 0
        self._given = 0

    def push(self, token: int) -> str:
        """Characters that are complete with this token."""
        self._window.append(token)
        text = self._decode(self._window)
        waiting = len(self._window) - self._read
        if text.endswith(_UNFINISHED) and waiting < _LONGEST_WINDOW:
            # Only the last replacement character can still become a real one, once there are more tokens than the
            # longest character has bytes.
            return "" if waiting < _LONGEST_CHARACTER else self._give(text[:-1])
        fresh = self._give(text)
        if len(text) > len(self._decode(self._window[: self._read])) or len(self._window) >= _LONGEST_WINDOW:
            # Keep the tokens just read as context: some tokenizers decode a first token differently.
            self._window = self._window[self._read :]
            self._read = len(self._window)
            self._given = len(self._decode(self._window))
        return fresh

    def flush(self) -> str:
        """What is left, as it is."""
        return self._give(self._decode(self._window))

    def _give(self, text: str) -> str:
        fresh = text[self._given :]
        self._given = max(self._given, len(text))
        return fresh

    def _decode(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True)) if tokens else ""


class StopStrings:
    """Finds the first stop string in text that arrives in pieces, and holds back what may be the start of one."""

    def __init__(self, stop: Sequence[str], *, include: bool = False) -> None:
        """Look for `stop`; with `include`, the one that ends the text is part of it."""
        self._stop = tuple(stop)
        self._include = include
        self._held = ""
        self.found = False

    def push(self, text: str) -> str:
        """Text that cannot belong to a stop string any more; `found` tells that the output ends here."""
        if not self._stop:
            return text
        text = self._held + text
        found = [(text.find(stop), len(stop)) for stop in self._stop if stop in text]
        if found:
            self.found = True
            self._held = ""
            start, size = min(found)
            return text[: start + size * self._include]
        held = self._unsettled(text)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def flush(self) -> str:
        """The text held back, when nothing more will come."""
        text, self._held = self._held, ""
        return text

    def _unsettled(self, text: str) -> int:
        longest = min(max(map(len, self._stop)) - 1, len(text))
        for size in range(longest, 0, -1):
            tail = text[len(text) - size :]
            if any(stop.startswith(tail) for stop in self._stop):
                return size
        return 0


class OutputText:
    """The text of one request; empty without a tokenizer."""

    def __init__(self, tokenizer: Tokenizer | None, stop: Sequence[str], *, include_stop: bool = False) -> None:
        self._detokenizer = Detokenizer(tokenizer) if tokenizer is not None else None
        self._stops = StopStrings(stop, include=include_stop)
        self._pieces: list[str] = []

    @property
    def stopped(self) -> bool:
        """Whether a stop string ended the text."""
        return self._stops.found

    @property
    def text(self) -> str:
        return "".join(self._pieces)

    def push(self, token: int, *, may_stop: bool = True) -> str:
        """Characters that are final with this token; those that came before it `may_stop` are in no stop string."""
        if self._detokenizer is None:
            return ""
        text = self._detokenizer.push(token)
        return self._keep(self._stops.push(text) if may_stop else text)

    def finish(self) -> str:
        """The characters still held back, at the end of the output."""
        if self._detokenizer is None or self.stopped:
            return ""
        text = self._stops.push(self._detokenizer.flush())
        return self._keep(text if self.stopped else text + self._stops.flush())

    def _keep(self, text: str) -> str:
        self._pieces.append(text)
        return text
