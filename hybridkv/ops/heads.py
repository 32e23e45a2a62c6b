"""A recurrent state of several heads that a mixer moves on head by head, each with a scan of its own."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from hybridkv.ops.spans import Entry


class HeadEntry(NamedTuple):
    """One head's share of a layer's states, which are [heads, ...] each."""

    entry: Entry
    head: int

    def read_states(self, part: int, slots: Tensor) -> Tensor:
        return self._pages(part).index_select(0, slots)

    def write_states(self, part: int, slots: Tensor, values: Tensor) -> None:
        pages = self._pages(part)
        pages.index_copy_(0, slots, values.detach().to(pages.dtype))

    def _pages(self, part: int) -> Tensor:
        return self.entry.views[part].pages[:, self.head]
