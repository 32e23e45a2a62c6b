"""The rows of a batch as requests of a manager, all of the same length, for a cache that never sees token ids."""

from __future__ import annotations

from uuid import uuid4

import numpy as np
from torch import Tensor

from hybridkv.errors import OutOfPages, UsageError
from hybridkv.hf.runner import ModelRunner
from hybridkv.ops.planning import PageTable
from hybridkv.sequence import Sequence as Request
from hybridkv.storage import TokenIndex


class BatchRows:
    """Takes pages for the next tokens of every row, and commits them when told that they are computed.

    Attributes:
        length: tokens of every row, those of the step under way included.
        pending: tokens of the step under way, 0 between steps.
        held: the requests, always in this one list.
    """

    def __init__(self, runner: ModelRunner) -> None:
        self.length = 0
        self.pending = 0
        self.held: list[Request] = []
        self._losses = runner.losses
        self._runner = runner
        self._manager = runner.manager
        self._groups = runner.manager.groups
        self._random = np.random.default_rng()
        self._own: dict[int, TokenIndex] = {}
        self._visible: dict[int, TokenIndex] = {}

    def __len__(self) -> int:
        return len(self.held)

    @property
    def past(self) -> int:
        """Tokens of every row before the step under way."""
        return self.length - self.pending

    def begin(self, batch: int, tokens: int) -> None:
        """Take pages for `tokens` more of each row.

        Raises:
            OutOfPages: they do not fit; the rows are as before.
            UsageError: another batch size than before, or a failure has lost what the rows hold.
        """
        self._runner.reap()
        if not self.held:
            # A salt nobody else has: what the rows compute must never be a hit of other requests.
            self.held.extend(self._manager.open([0], salt=uuid4().hex) for _ in range(batch))
            self._losses = self._runner.losses
        self._require_intact()
        if batch != len(self.held):
            raise UsageError(f"this cache holds {len(self.held)} rows, got a batch of {batch}; call reset() first")
        try:
            self._manager.reserve_all(self.held, tokens)
        except OutOfPages:
            if not self.length:
                # Rows without a token must not tie the cache to this batch size.
                self.clear()
            raise
        self._runner.settle()
        rows = np.arange(batch)[:, None]
        end = self.length + tokens
        for g, group in enumerate(self._groups):
            if not group.is_state:
                held = [self._manager.token_pages(row, g) for row in self.held]
                table = PageTable(held, group.page_tokens, self._runner.storage.device)
                self._own[g] = table.index(rows, np.arange(self.length, end)[None])
                self._visible[g] = table.index(rows, np.arange(self.first(g), end)[None])
        self.pending = tokens
        self.length = end

    def finish(self) -> None:
        """Commit the step under way, if there is one."""
        if self.pending:
            for row in self.held:
                fresh = max(row.length + self.pending - row.known, 0)
                # Random ids, because equal ones would make the manager merge the pages of forked rows.
                ids = self._random.integers(2**32, size=fresh, dtype=np.uint32) if fresh else None
                self._manager.commit(row, self.pending, ids)
        self._forget_step()

    def own(self, g: int) -> TokenIndex:
        """Where the step's tokens are written, row by row."""
        return self._own[g]

    def visible(self, g: int) -> TokenIndex:
        """The tokens a group's layers may attend to, row by row: from `first` before the step, to its end."""
        return self._visible[g]

    def first(self, g: int) -> int:
        """Position of the first token of a group that the next token may see."""
        window = self._window(g)
        return 0 if window is None else max(self.length - window + 1, 0)

    def working(self, g: int) -> Tensor:
        """Working slots of a state group, int64 [rows]. Between passes, others who share the pool may move them."""
        self._require_intact()
        self._runner.copy_pages()
        storage = self._runner.storage
        return storage.index(self._manager.state_pages(row, g).slot for row in self.held)

    def select(self, indices: list[int]) -> None:
        """Between steps: keep the rows at `indices`, in that order, each as often as it is named.

        Copies share pages with their row until one of the two writes to them.
        """
        kept: list[Request] = []
        used: set[int] = set()
        for index in indices:
            row = self.held[index]
            kept.append(self._manager.fork(row) if index in used else row)
            used.add(index)
        for index, row in enumerate(self.held):
            if index not in used:
                self._manager.close(row, cache=False)
        self.held[:] = kept

    def cut(self, length: int) -> None:
        """Between steps: forget all tokens from `length` on.

        Raises:
            UsageError: the model has states, or a window's tokens are gone; nothing was changed.
        """
        for g, group in enumerate(self._groups):
            if group.is_state:
                raise UsageError(
                    f"cannot crop {group.name!r} layers: a state cannot go back. Call reset() and start again"
                )
            window = self._window(g)
            needed = length if window is None else max(length - window + 1, 0)
            held = self._manager.token_pages(self.held[0], g).pages
            first = int(held[0]) * group.page_tokens if len(held) else self.length
            if needed < min(first, length):
                raise UsageError(
                    f"cannot crop to {length} tokens: {group.name!r} layers have let go of those before {first}. "
                    "Call reset() and start again"
                )
        for row in self.held:
            self._manager.truncate(row, length)
        self.length = length

    def clear(self) -> None:
        """Close all rows and free their pages."""
        self._forget_step()
        for row in self.held:
            self._manager.close(row, cache=False)
        self.held.clear()
        self.length = 0

    def _require_intact(self) -> None:
        if self._losses != self._runner.losses:
            raise UsageError(
                "a failure while pages were copied has lost what this cache holds; call reset() and start again"
            )

    def _window(self, g: int) -> int | None:
        return dict(self._groups[g].params).get("window")

    def _forget_step(self) -> None:
        self.pending = 0
        self._own.clear()
        self._visible.clear()
