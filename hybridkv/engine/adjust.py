"""What requests change about their logits before anything is drawn: biases, penalties, banned tokens.

Each step is a gather and a scatter over (row, token) pairs of the rows that ask for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hybridkv.engine.sampler_state import SamplerState


def adjust(logits: Tensor, states: Sequence[SamplerState]) -> None:
    """Logit biases, repetition, presence and frequency penalties, then tokens banned by min_tokens.

    Args:
        logits: float [requests, vocab], changed in place.
        states: one per row.
    """
    if rows := [i for i, state in enumerate(states) if len(state.bias_ids)]:
        at = _pairs(rows, [states[i].bias_ids for i in rows], logits.device)
        logits[at] += _flat([states[i].biases for i in rows], logits)
    if rows := [i for i, state in enumerate(states) if state.params.repetition_penalty != 1.0]:
        at = _pairs(rows, [states[i].seen.ids for i in rows], logits.device)
        factors = column([state.params.repetition_penalty for state in states], logits)[at[0], 0]
        values = logits[at]
        logits[at] = torch.where(values < 0, values * factors, values / factors)
    if rows := [i for i, s in enumerate(states) if s.params.presence_penalty or s.params.frequency_penalty]:
        at = _pairs(rows, [states[i].generated.ids for i in rows], logits.device)
        counts = _flat([states[i].generated.counts for i in rows], logits)
        presence = column([state.params.presence_penalty for state in states], logits)[at[0], 0]
        frequency = column([state.params.frequency_penalty for state in states], logits)[at[0], 0]
        logits[at] -= presence + frequency * counts
    if rows := [i for i, state in enumerate(states) if len(state.banned)]:
        logits[_pairs(rows, [states[i].banned for i in rows], logits.device)] = -torch.inf


def column(values: Sequence[float], like: Tensor) -> Tensor:
    """[len(values), 1] in the dtype and on the device of `like`."""
    return torch.tensor(values, dtype=like.dtype, device=like.device)[:, None]


def _flat(arrays: Iterable[Any], like: Tensor) -> Tensor:
    return torch.from_numpy(np.concatenate([np.asarray(values) for values in arrays])).to(like.device, like.dtype)


def _pairs(rows: list[int], ids: list[Any], device: torch.device) -> tuple[Tensor, Tensor]:
    """Flat (row, token) index pairs."""
    sizes = [len(tokens) for tokens in ids]
    flat = np.concatenate([np.array(tokens, dtype=np.int64) for tokens in ids])
    return torch.from_numpy(np.repeat(np.array(rows), sizes)).to(device), torch.from_numpy(flat).to(device)
