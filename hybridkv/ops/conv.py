"""The short causal convolution in front of a recurrence, resumable.

Its state is the last K - 1 inputs, so a checkpoint in the middle of a span is a slice of the span.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hybridkv.ops.recurrence import save_singles, single_states
from hybridkv.ops.spans import Entry, StatePlan


def packed_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: Callable[[Tensor], Tensor] | None,
    plan: StatePlan,
    entry: Entry,
    part: int,
) -> Tensor:
    """Convolve every span with its own past and leave the new states in their pages.

    Args:
        x: [1, channels, tokens], packed order.
        weight: [channels, K].
        bias: [channels] or None.
        activation: applied to the result.
        plan: of the layer's group.
        entry: the layer's pages; the state is [channels, K - 1].
        part: which part of the entry is the state.

    Returns:
        [1, channels, tokens] in the dtype of x.
    """
    channels, width = weight.shape
    past = width - 1
    wide = torch.promote_types(weight.dtype, torch.float32)
    taps = weight.t().to(wide).contiguous()
    outputs: list[Tensor] = []
    if plan.singles:
        states = single_states(plan, entry, part).to(x.dtype)
        window = torch.cat([states, x[0, :, : plan.singles].t().unsqueeze(-1)], -1)
        save_singles(plan, entry, part, window[..., 1:])
        outputs.append((window.to(wide) * weight).sum(-1))
    for chunk in plan.chunks:
        stop = chunk.cuts[-1][0]
        state = x.new_zeros(1, channels, past) if chunk.slot is None else entry.read_states(part, chunk.slot)
        rows = torch.cat([state[0].t().to(x.dtype), x[0, :, chunk.start : stop].t()])
        for cut, slots in chunk.cuts:
            tail = rows[cut - chunk.start : cut - chunk.start + past].t()
            entry.write_states(part, slots, tail.expand(len(slots), channels, past))
        outputs.append(_convolve(rows.to(wide), taps))
    output = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    output = (output if bias is None else output + bias).to(weight.dtype)
    return (output if activation is None else activation(output)).to(x.dtype).t().unsqueeze(0)


def _convolve(rows: Tensor, taps: Tensor) -> Tensor:
    """[K - 1 + tokens, channels] and [K, channels] -> [tokens, channels].

    Token by token, as mixers have their inputs: a convolution along the last dimension would first turn them round.
    """
    tokens = len(rows) - len(taps) + 1
    output = rows[:tokens] * taps[0]
    for i in range(1, len(taps)):
        output.addcmul_(rows[i : i + tokens], taps[i])
    return output
