"""A trial before a model type that nobody described is served: its logits over pages against those of its own pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from hybridkv.entries import LayerGroup
from hybridkv.errors import PoolTooSmall, UnsupportedModel
from hybridkv.hf.step import LayerMap, Span
from hybridkv.manager import GroupManager
from hybridkv.storage import PoolStorage

CHUNKS = (17, 1, 22, 1)
"""Tokens of each pass of a trial: no whole pages, and past the sizes at which most mistakes would hide."""

_TOLERANCES = {torch.float32: 0.01, torch.float64: 0.01}
_COARSE = 0.2


class Pass(Protocol):
    """A way to compute the spans of a step over pages."""

    def logits(self, manager: GroupManager, storage: PoolStorage, spans: Sequence[Span]) -> Tensor:
        """Compute the spans' tokens; [rows, vocab] of the wanted ones, in the order given."""
        ...


def prove(
    model: nn.Module,
    groups: Sequence[LayerGroup],
    make: Callable[[LayerMap], Pass],
    vocab_size: int,
    unit_tokens: int,
) -> None:
    """Compute a few dozen tokens over the pages of a small pool, in chunks, and at once by the model alone.

    Args:
        model: with whatever hooks the passes need.
        groups: its layer groups.
        make: how the model is run over pages, given where its layers keep things.
        vocab_size: token ids of the trial lie below it.
        unit_tokens: hash granularity that fits the groups' pages.

    Raises:
        UnsupportedModel: the logits differ by more than rounding explains.
    """
    ids = np.random.default_rng(0).integers(0, vocab_size, sum(CHUNKS))
    device = next(model.parameters()).device
    with torch.no_grad():
        expected = model(input_ids=torch.from_numpy(ids).to(device)[None], use_cache=False).logits[0]
        found = _paged_logits(_small_manager(groups, unit_tokens, len(ids)), make, ids, device)
    error = float((found - expected).float().abs().mean() / expected.float().std().clamp_min(1e-12))
    # Not "error > limit": a NaN must fail too.
    if not error <= _TOLERANCES.get(expected.dtype, _COARSE):
        config: Any = model.config
        kinds = ", ".join(sorted({group.kind for group in groups}))
        raise UnsupportedModel(
            f"model type {getattr(config, 'model_type', '?')!r} has no description in hybridkv_models, and over pages "
            f"the logits of its {kinds} layers are off by {error:.2g} standard deviations in a trial of {len(ids)} "
            "tokens: it computes something from its past that a cache does not show. Run its own generate()"
        )


def _paged_logits(
    manager: GroupManager, make: Callable[[LayerMap], Pass], ids: NDArray[np.int64], device: torch.device
) -> Tensor:
    storage = PoolStorage(manager.layout, device)
    run = make(LayerMap(manager.groups))
    seq = manager.open(ids)
    rows = []
    for count in CHUNKS:
        manager.reserve(seq, count)
        storage.apply(manager.take_copies())
        rows.append(run.logits(manager, storage, [Span(seq, ids[seq.length : seq.length + count], count)]))
        manager.commit(seq, count)
    return torch.cat(rows)


def _small_manager(groups: Sequence[LayerGroup], unit_tokens: int, tokens: int) -> GroupManager:
    size = 1 << 20
    while True:
        try:
            manager = GroupManager(groups, size, unit_tokens=unit_tokens)
        except PoolTooSmall:
            size *= 2
            continue
        if manager.tokens_that_fit() >= 2 * tokens:
            return manager
        size *= 2
