"""A recurrence over the spans of a packed pass: where states come from, where they go, and where a span is cut.

A checkpoint inside a span costs no extra pass: the span is cut there, the state is carried across, and the one in
between also goes to the checkpoint's page.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from hybridkv.ops.spans import StatePlan


class States(Protocol):
    """The states of one layer, or of one head of it, by slot (int64 [n])."""

    def read_states(self, part: int, slots: Tensor, /) -> Tensor:
        """A copy of the states in `slots`: [n, ...]."""
        ...

    def write_states(self, part: int, slots: Tensor, values: Tensor, /) -> None:
        """Store `values` [n, ...] in `slots`, all different."""
        ...


Step = Callable[[Tensor], tuple[Tensor, Tensor]]
"""The states of all one-token spans [singles, ...] -> their outputs, and their new states."""

Scan = Callable[[int, int, Tensor | None], tuple[Tensor, Tensor]]
"""Packed tokens [start, stop) of one request and the state before them [1, ...] (None: zeros) -> outputs, new state."""


def packed_recurrence(plan: StatePlan, entry: States, part: int, dim: int, step: Step, scan: Scan) -> Tensor:
    """Run a recurrence over all spans and leave its states in their pages.

    Args:
        plan: of the layer's group.
        entry: the pages of the layer, or of a head of it.
        part: which part of the entry is this state.
        dim: the token dimension of the outputs.
        step: advances all one-token spans at once.
        scan: advances one span.

    Returns:
        The outputs of all tokens, packed order.
    """
    outputs: list[Tensor] = []
    if plan.singles:
        output, states = step(single_states(plan, entry, part))
        outputs.append(output)
        save_singles(plan, entry, part, states)
    for chunk in plan.chunks:
        state = None if chunk.slot is None else entry.read_states(part, chunk.slot)
        start = chunk.start
        for stop, slots in chunk.cuts:
            output, state = scan(start, stop, state)
            outputs.append(output)
            entry.write_states(part, slots, state.expand(len(slots), *state.shape[1:]))
            start = stop
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim)


def single_states(plan: StatePlan, entry: States, part: int) -> Tensor:
    """The states of the one-token spans [singles, ...]; zeros where a sequence begins."""
    states = entry.read_states(part, plan.slots)
    if plan.fresh is not None:
        states.index_fill_(0, plan.fresh, 0)
    return states


def save_singles(plan: StatePlan, entry: States, part: int, states: Tensor) -> None:
    """Store the new states [singles, ...] of the one-token spans, and again where a checkpoint is due."""
    entry.write_states(part, plan.slots, states)
    if plan.saves is not None:
        which, slots = plan.saves
        entry.write_states(part, slots, states.index_select(0, which))
