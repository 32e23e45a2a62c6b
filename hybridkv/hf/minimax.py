"""The cache of MiniMax over pages. The model insists on a class of its own, which needs two mends.

Where the first layer is a linear one, the stock class sizes masks and positions by a layer that has no tokens, so a
continued sequence is silently wrong. And an index past its states is an error, where the model means "none yet".
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.models.minimax.modeling_minimax import MiniMaxCache

from hybridkv.hf.span_cache import as_heads, token_rows
from hybridkv.hf.span_pages import SpanPages


class MiniMaxSpanCache(MiniMaxCache):
    """Keys, values and states of one request, filled from its pages."""

    def __init__(self, config: Any, pages: SpanPages) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.attended: set[int] = set()
        self._pages = pages
        self._length = pages.past
        self._linear = [kind == "linear_attention" for kind in config.layer_types]
        self._states: dict[int, Tensor] = {}
        for layer in range(len(self._linear)):
            if tokens := pages.tokens(layer):
                super().update(as_heads(tokens[0]), as_heads(tokens[1]), layer)
            if states := pages.states(layer):
                self._states[layer] = states[0]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store keys and values [1, heads, tokens, size]; returns all the layer may attend to."""
        self._pages.write_tokens(layer_idx, 0, self._length, [token_rows(key_states), token_rows(value_states)])
        self.attended.add(layer_idx)
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def keep_states(self, position: int) -> set[int]:
        """Store the states after `position` tokens; the layers that had one."""
        for layer, state in self._states.items():
            self._pages.write_states(layer, position, [state])
        self._length = position
        return set(self._states)

    def set_linear_cache(self, layer_idx: int, linear_cache: Tensor) -> None:
        self._states[layer_idx] = linear_cache

    def get_linear_cache(self, layer_idx: int) -> Tensor | None:
        return self._states.get(layer_idx)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._length

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return self._length

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self._length + query_length, 0

    def __len__(self) -> int:
        return len(self._linear)

    @property
    def is_linear(self) -> list[bool]:
        return self._linear

    @property
    def is_sliding(self) -> list[bool]:
        return [False] * len(self._linear)

    @property
    def is_dummy(self) -> list[bool]:
        return [False] * len(self._linear)
