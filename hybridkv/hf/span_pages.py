"""One request's pages during one span, for a model that runs on a cache of transformers and one request at a time."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from hybridkv.hf.step import LayerMap
from hybridkv.manager import GroupManager
from hybridkv.ops.planning import PageTable
from hybridkv.ops.spans import Entry
from hybridkv.sequence import Sequence as Request
from hybridkv.storage import PoolStorage


class SpanPages:
    """Reads what a request's layers hold before a span, and stores what they add.

    Attributes:
        past: tokens before the span.
        end: tokens after it.
        cuts: positions inside the span after which the states are kept, ascending; the last is its end.
    """

    def __init__(
        self, manager: GroupManager, storage: PoolStorage, layers: LayerMap, request: Request, count: int
    ) -> None:
        self.past = request.length
        self.end = request.length + count
        self._groups = manager.groups
        self._storage = storage
        self._layers = layers
        self._tables: dict[int, PageTable] = {}
        self._slots: dict[int, dict[int, list[int]]] = {}
        self._working: dict[int, int] = {}
        for g, group in enumerate(manager.groups):
            if not group.is_state:
                held = manager.token_pages(request, g)
                self._tables[g] = PageTable([held], group.page_tokens, storage.device)
                continue
            states = manager.state_pages(request, g)
            kept = {self.end: [states.end]}
            for position, slot in states.checkpoints:
                if self.past < position <= self.end:
                    kept.setdefault(position, []).append(slot)
            self._working[g], self._slots[g] = states.slot, kept
        self.cuts = sorted({self.end, *(position for kept in self._slots.values() for position in kept)})

    def tokens(self, layer: int) -> list[Tensor]:
        """Every part of the tokens before the span that a layer still needs, [n, *shape] each, oldest first."""
        if layer not in self._layers.tokens or not self.past:
            return []
        g, e = self._layers.tokens[layer]
        group = self._groups[g]
        ranges = group.rule.needed(np.array([self.past], np.int64))
        positions = np.concatenate([np.arange(start[0], stop[0]) for start, stop in ranges])
        index = self._tables[g].index(0, positions)
        entry = Entry(self._storage, g, e)
        return [entry.read_tokens(part, index) for part in range(len(group.parts))]

    def write_tokens(self, layer: int, first_part: int, position: int, parts: list[Tensor]) -> None:
        """Store some parts [n, *shape] of the tokens from `position` on."""
        g, e = self._layers.tokens[layer]
        index = self._tables[g].index(0, np.arange(position, position + len(parts[0])))
        for part, values in enumerate(parts, first_part):
            Entry(self._storage, g, e).write_tokens(part, index, values)

    def states(self, layer: int) -> list[Tensor]:
        """Every part of a layer's state before the span, [1, *shape] each; none at the start of a request."""
        if layer not in self._layers.states or not self.past:
            return []
        g, e = self._layers.states[layer]
        slots = self._index([self._working[g]])
        return [Entry(self._storage, g, e).read_states(part, slots) for part in range(len(self._groups[g].parts))]

    def write_states(self, layer: int, position: int, parts: list[Tensor]) -> None:
        """Store a layer's state [1, *shape] after `position` tokens wherever it is to be kept."""
        g, e = self._layers.states[layer]
        slots = self._index(self._slots[g].get(position, []))
        for part, values in enumerate(parts):
            if len(slots):
                Entry(self._storage, g, e).write_states(part, slots, values.expand(len(slots), *values.shape[1:]))

    def _index(self, slots: list[int]) -> Tensor:
        return torch.tensor(slots, dtype=torch.int64, device=self._storage.device)
