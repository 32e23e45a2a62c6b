"""One pass for each adapter of a step: what weights a layer has is the same for all tokens of a pass."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hybridkv.hashing import Adapter
from hybridkv.hf.adapters import Adapters
from hybridkv.hf.proof import Pass
from hybridkv.hf.step import Span
from hybridkv.manager import GroupManager
from hybridkv.storage import PoolStorage


class PassByAdapter:
    """Runs the spans of each adapter, and those of the base model, in a pass of their own."""

    def __init__(self, inner: Pass, adapters: Adapters) -> None:
        self._inner = inner
        self._adapters = adapters

    def logits(self, manager: GroupManager, storage: PoolStorage, spans: Sequence[Span]) -> Tensor:
        """Compute the spans' tokens; [rows, vocab] of the wanted ones, in the order given.

        Raises:
            UsageError: spans that were not reserved, or merged adapters that stand in the way.
            UnknownAdapter: an adapter is not loaded any more.
            UnsupportedModel: a layer computed its attention or its state by itself, so the logits would be wrong.
        """
        groups: dict[Adapter | None, list[int]] = {}
        for i, span in enumerate(spans):
            groups.setdefault(span.seq.adapter, []).append(i)
        if len(groups) < 2:
            with self._adapters.active(next(iter(groups), None)):
                return self._inner.logits(manager, storage, spans)
        rows: list[Tensor] = [torch.empty(0)] * len(spans)
        for adapter, members in groups.items():
            own = [spans[i] for i in members]
            with self._adapters.active(adapter):
                found = self._inner.logits(manager, storage, own)
            for i, part in zip(members, found.split([span.rows for span in own]), strict=True):
                rows[i] = part
        return torch.cat(rows)
