"""The gated delta rule over a packed pass (Yang et al., "Gated Delta Networks", 2024).

Both forms are the model's own: the chunked one for longer spans, the recurrent one for all one-token spans at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from hybridkv.ops.mamba2 import chunk_for
from hybridkv.ops.recurrence import packed_recurrence
from hybridkv.ops.spans import Entry, StatePlan

CHUNK = 64


def packed_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    options: Mapping[str, Any],
    chunked: Callable[..., Any],
    recurrent: Callable[..., Any],
    plan: StatePlan,
    entry: Entry,
    part: int,
) -> Tensor:
    """Run every span from its own state and leave the new states in their pages.

    Args:
        query: [1, tokens, key heads, key dim], packed order; key alike.
        key: what the state is read and written by.
        value: [1, tokens, value heads, value dim].
        g: log decay, [1, tokens, value heads], or [1, tokens, value heads, key dim] where each channel has its own
            (Kimi Team, "Kimi Linear", 2025).
        beta: [1, tokens, value heads], how much of a value is written.
        options: further keywords of both functions.
        chunked: the module's own chunked form, called with `initial_state` and `output_final_state`.
        recurrent: the module's own recurrent form, called alike.
        plan: of the layer's group.
        entry: the layer's pages; the state is [value heads, key dim, value dim].
        part: which part of the entry is the state.

    Returns:
        [1, tokens, value heads, value dim]
    """

    def step(state: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v, decay, rate = (values[0, : plan.singles].unsqueeze(1) for values in (query, key, value, g, beta))
        out, state = recurrent(q, k, v, g=decay, beta=rate, initial_state=state, output_final_state=True, **options)
        return out.transpose(0, 1), state

    def scan(start: int, stop: int, state: Tensor | None) -> tuple[Tensor, Tensor]:
        q, k, v, decay, rate = (values[:, start:stop] for values in (query, key, value, g, beta))
        out, state = chunked(
            q,
            k,
            v,
            g=decay,
            beta=rate,
            chunk_size=chunk_for(stop - start, CHUNK),
            initial_state=state,
            output_final_state=True,
            **options,
        )
        return out, state

    return packed_recurrence(plan, entry, part, 1, step, scan)
