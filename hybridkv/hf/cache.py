"""The cache a model sees during a packed pass: it stores keys and values in pages and hides every state.

Layers that ask for a state get None, as on a first pass, and so hand all their inputs to the functions that
`mixers` wraps; those know the spans. Masks are never built, because the attention function knows them too.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import Cache

from hybridkv.hf.step import PackedStep
from hybridkv.ops.attention import KEY, VALUE


class PackedCache(Cache):
    """Standard cache calls of one packed pass, turned into page writes."""

    def __init__(self, step: PackedStep, layers: int, states: frozenset[int], tokens: frozenset[int]) -> None:
        super().__init__(layers=[])
        self._step = step
        self._linear = [layer in states and layer not in tokens for layer in range(layers)]
        self._dummy = [layer not in states and layer not in tokens for layer in range(layers)]

    def __repr__(self) -> str:
        return f"PackedCache({len(self)} layers)"

    def __len__(self) -> int:
        return len(self._linear)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write the pass's keys and values [1, kv heads, tokens, dim] to their pages; returns them unchanged.

        Latents of a layer that expands them come back with those of all its spans' pasts, end to end.
        """
        plan, entry = self._step.tokens_of(layer_idx)
        entry.write_tokens(KEY, plan.own, key_states[0].transpose(0, 1))
        entry.write_tokens(VALUE, plan.own, value_states[0].transpose(0, 1))
        gathering = self._step.gathering_of(layer_idx)
        if gathering is not None and gathering.index is not None:
            key_states, value_states = (
                entry.read_tokens(part, gathering.index).to(key_states.dtype).transpose(0, 1)[None]
                for part in (KEY, VALUE)
            )
        self._step.hand_out(key_states, layer_idx)
        return key_states, value_states

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> None:
        self._step.layer = layer_idx

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> None:
        self._step.layer = layer_idx

    def update_conv_state(self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any) -> Tensor:
        self._step.layer = layer_idx
        return conv_states

    def update_recurrent_state(  # type: ignore[override]
        self, recurrent_states: Tensor | None, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> Tensor | None:
        return recurrent_states

    def get_seq_length(self, layer_idx: int | None = None) -> Any:
        """0 of the pass as a whole; of a layer, what turns places in the pass into positions: int64 [tokens].

        Layers that scale by position add their past to `arange(tokens)`, which must give every token's own position.
        """
        return 0 if layer_idx is None else self._step.shift

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return query_length, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        return False

    def is_recording_past(self, layer_idx: int) -> bool:
        return False

    @property
    def is_compileable(self) -> bool:
        return False

    @property
    def is_initialized(self) -> bool:
        return True

    @property
    def is_sliding(self) -> list[bool]:
        return [False] * len(self)

    @property
    def is_linear(self) -> list[bool]:
        return self._linear

    @property
    def is_dummy(self) -> list[bool]:
        return self._dummy
