"""The short causal convolution in front of a recurrence, resumable.

Its state is the last K - 1 inputs, so a checkpoint in the middle of a span is a slice of the span.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

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
    outputs: list[Tensor] = []
    if plan.singles:
        states = single_states(plan, entry, part).to(x.dtype)
        window = torch.cat([states, x[0, :, : plan.singles].t().unsqueeze(-1)], -1)
        save_singles(plan, entry, part, window[..., 1:])
        single = (window.to(wide) * weight).sum(-1)
        outputs.append((single if bias is None else single + bias).to(weight.dtype).t().unsqueeze(0))
    for chunk in plan.chunks:
        stop = chunk.cuts[-1][0]
        state = x.new_zeros(1, channels, past) if chunk.slot is None else entry.read_states(part, chunk.slot)
        padded = torch.cat([state.to(x.dtype), x[:, :, chunk.start : stop]], -1)
        for cut, slots in chunk.cuts:
            tail = padded[..., cut - chunk.start : cut - chunk.start + past]
            entry.write_states(part, slots, tail.expand(len(slots), channels, past))
        outputs.append(functional.conv1d(padded.to(weight.dtype), weight.unsqueeze(1), bias, groups=channels))
    output = outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1)
    return (output if activation is None else activation(output)).to(x.dtype)
