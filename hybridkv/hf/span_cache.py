"""A cache of transformers, filled from one request's pages, that stores what a forward pass adds to it.

Unlike in a packed pass the model gets the layer objects it knows, with the masks and positions that follow from them,
so that it may do with its past whatever it does. All columns of a convolution are kept, as transformers keeps them.
"""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import LinearAttentionLayer

from hybridkv.hf.span_pages import SpanPages


class SpanCache(Protocol):
    """What a pass over one span needs of a cache, beside being one of transformers."""

    attended: set[int]
    """Layers that handed over all parts of their tokens."""

    def keep_states(self, position: int) -> set[int]:
        """Store the states after `position` tokens, the end of a forward pass; the layers that had one."""
        ...


class DynamicSpanCache(DynamicCache):
    """A `DynamicCache` with the layers the config names."""

    def __init__(self, config: Any, pages: SpanPages) -> None:
        super().__init__(config=config)
        self.attended: set[int] = set()
        self._pages = pages
        self._length = pages.past
        for layer, stored in enumerate(self.layers):
            self._fill_tokens(stored, pages.tokens(layer))
            _fill_states(stored, pages.states(layer))

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store keys and values [1, heads, tokens, size]; returns all the layer may attend to."""
        self._pages.write_tokens(layer_idx, 0, self._length, [token_rows(key_states), token_rows(value_states)])
        self.attended.add(layer_idx)
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def update_indexer(self, indexer_key_states: Tensor, layer_idx: int) -> Tensor:
        """Store index keys [1, tokens, size], the third part of a token; returns those of all tokens."""
        self._pages.write_tokens(layer_idx, 2, self._length, [indexer_key_states[0]])
        return super().update_indexer(indexer_key_states, layer_idx)

    def keep_states(self, position: int) -> set[int]:
        """Store the states after `position` tokens, the end of a forward pass; the layers that had one."""
        kept = set()
        for layer, stored in enumerate(self.layers):
            parts = _stored_states(stored)
            if parts:
                self._pages.write_states(layer, position, parts)
                kept.add(layer)
        self._length = position
        return kept

    def _fill_tokens(self, stored: Any, parts: list[Tensor]) -> None:
        if not parts:
            return
        keys, values, *index = parts
        if len(keys):
            stored.update(as_heads(keys), as_heads(values))
        if hasattr(stored, "cumulative_length"):
            stored.cumulative_length = self._pages.past
        for each in index:
            stored.update_indexer(each[None])


def token_rows(states: Tensor) -> Tensor:
    """[1, heads, tokens, size] as [tokens, heads, size]."""
    return states[0].transpose(0, 1)


def as_heads(rows: Tensor) -> Tensor:
    """[tokens, heads, size] as [1, heads, tokens, size]."""
    return rows.transpose(0, 1)[None]


def _stored_states(stored: Any) -> list[Tensor]:
    if not isinstance(stored, LinearAttentionLayer):
        return []
    found = (*stored.conv_states.values(), *stored.recurrent_states.values())
    return [state for state in found if state is not None]


def _fill_states(stored: Any, parts: list[Tensor]) -> None:
    """Convolutions first, then recurrent states, as `_stored_states` lists them; the config says how many there are."""
    if not parts:
        return
    convolutions = min(stored.number_of_states, len(parts))
    for i, state in enumerate(parts):
        if i < convolutions:
            LinearAttentionLayer.lazy_initialization(stored, conv_states=state, state_idx=i)
            stored.conv_states[i].copy_(state)
        else:
            LinearAttentionLayer.lazy_initialization(stored, recurrent_states=state, state_idx=i - convolutions)
            stored.recurrent_states[i - convolutions].copy_(state)
    stored.has_previous_state = dict.fromkeys(stored.has_previous_state, True)
