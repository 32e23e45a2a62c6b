"""Forward passes one request at a time, for models whose layers cannot share one with other requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hybridkv.errors import UnsupportedModel
from hybridkv.hf.span_cache import DynamicSpanCache, SpanCache
from hybridkv.hf.span_pages import SpanPages
from hybridkv.hf.step import LayerMap, Span, check_spans
from hybridkv.manager import GroupManager
from hybridkv.storage import PoolStorage

MakeCache = Callable[[Any, SpanPages], SpanCache]


class SinglePass:
    """Runs a model over the spans of a step, one after the other, with the model's own attention and masks.

    A span is cut where states are to be kept, so a checkpoint inside it costs a pass more.
    """

    def __init__(self, model: nn.Module, layers: LayerMap) -> None:
        self._model = model
        self._layers = layers
        self._make_cache = _cache_class(model)

    def logits(self, manager: GroupManager, storage: PoolStorage, spans: Sequence[Span]) -> Tensor:
        """Compute the spans' tokens; [rows, vocab] of the wanted ones, in the order given.

        Raises:
            UsageError: spans that were not reserved.
            UnsupportedModel: a layer stored nothing, so the logits would be wrong.
        """
        tokens = [np.atleast_1d(np.asarray(span.token_ids, np.int64)) for span in spans]
        check_spans(spans, tokens)
        rows = []
        for span, ids in zip(spans, tokens, strict=True):
            pages = SpanPages(manager, storage, self._layers, span.seq, len(ids))
            rows.append(self._span(pages, torch.from_numpy(ids).to(storage.device), span.rows))
        return torch.cat(rows)

    def _span(self, pages: SpanPages, ids: Tensor, wanted: int) -> Tensor:
        cache = self._make_cache(self._model.config, pages)
        rows: list[Tensor] = []
        start = pages.past
        for stop in pages.cuts:
            positions = torch.arange(start, stop, device=ids.device)[None]
            keep = min(stop - start, wanted - (pages.end - stop))
            output = self._model(
                input_ids=ids[None, start - pages.past : stop - pages.past],
                position_ids=positions,
                cache=cache,
                use_cache=True,
                logits_to_keep=max(keep, 1),
                return_dict=True,
            )
            self._check_served(cache.attended, cache.keep_states(stop))
            if keep > 0:
                rows.append(output.logits[0])
            start = stop
        return torch.cat(rows)

    def _check_served(self, attended: set[int], kept: set[int]) -> None:
        """A layer that stores nothing has its past elsewhere, or none.

        Raises:
            UnsupportedModel: there is one.
        """
        missing = sorted((self._layers.tokens.keys() - attended) | (self._layers.states.keys() - kept))
        if missing:
            config: Any = self._model.config
            raise UnsupportedModel(
                f"model type {getattr(config, 'model_type', '?')!r}: layer {missing[0]} stored nothing in the cache it "
                "was given, so it would lose its past. Load the model with the modeling code of transformers "
                "(trust_remote_code=False), or run its own generate()"
            )


def _cache_class(model: nn.Module) -> MakeCache:
    config: Any = model.config
    if config.model_type == "minimax":
        # Imported here because it loads the modeling code of one model.
        from hybridkv.hf.minimax import MiniMaxSpanCache

        return MiniMaxSpanCache
    return DynamicSpanCache
