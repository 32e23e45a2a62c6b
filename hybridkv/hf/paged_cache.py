"""A cache for people who keep their own loop: standard semantics, but keys, values and states live in the pool.

    with hybridkv.paged_cache(model, memory="1GiB") as cache:
        model.generate(input_ids, cache=cache, max_new_tokens=64)

The batch rows are requests of a manager, as long as the cache is; the model builds its own masks and attends as it
always does. There is no prefix sharing, because a cache never sees token ids.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache

from hybridkv.errors import UnsupportedModel, UsageError
from hybridkv.hf.adapters import base_model
from hybridkv.hf.checks import is_single
from hybridkv.hf.lease import Lease
from hybridkv.hf.mixers import CONV, RECURRENT
from hybridkv.hf.rows import BatchRows
from hybridkv.hf.runner import ModelRunner, build_manager
from hybridkv.ops.attention import KEY, VALUE
from hybridkv.ops.spans import Entry

_KINDS = ("full_attention", "sliding_attention", "linear_attention")


def paged_cache(
    model: nn.Module,
    *,
    memory: int | str = "1GiB",
    runner: ModelRunner | None = None,
    page_tokens: int | Mapping[str, int] = 16,
) -> PagedCache:
    """A cache for `model.generate(..., cache=)` or `model(..., cache=)`.

    Args:
        model: a transformers causal language model in eval mode, on one device.
        memory: the pool, an int of bytes or "1GiB", if it is to have one of its own.
        runner: share this runner's pool instead; it must be the same model's. The two take turns: neither may run
            while the other does.
        page_tokens: tokens per attention page of an own pool, one number or one per kind.

    Raises:
        UnsupportedModel: the model cannot be served.
        ConfigError: a setting that cannot work; PoolTooSmall where the pool has no room for one slab per group.
        UsageError: `runner` runs another model, or is closed.
    """
    config: Any = getattr(model, "config", None)
    if is_single(model):
        raise UnsupportedModel(
            f"model type {config.model_type!r} runs on a cache of its own, which generate() cannot be given; serve it "
            "with hybridkv.wrap()"
        )
    if runner is None:
        # Nothing is ever resumed from a checkpoint here, so none is made.
        manager = build_manager(
            model, memory, page_tokens=page_tokens, checkpoint_interval=None, decode_checkpoint_interval=None
        )
        return PagedCache(ModelRunner(model, manager), owns_runner=True)
    if runner.model is not base_model(model):
        raise UsageError(f"the runner runs another model, a {type(runner.model).__name__}")
    return PagedCache(runner)


class PagedCache(Cache):
    """Standard cache calls over the pool.

    A step begins with the first layer that hands over tokens, and is committed when a layer comes by again. Rows all
    have the same length, left padding included, as in a DynamicCache.
    """

    def __init__(self, runner: ModelRunner, *, owns_runner: bool = False) -> None:
        super().__init__(layers=[])
        self._groups = runner.manager.groups
        if other := sorted({group.kind for group in self._groups} - set(_KINDS)):
            raise UnsupportedModel(
                f"a paged cache cannot hold {', '.join(other)} layers with a model's own masks; use hybridkv.wrap()"
            )
        self._runner = runner
        self._tokens, self._states = runner.layers.tokens, runner.layers.states
        self._rows = BatchRows(runner)
        self._lease = Lease(runner, self._rows.held, owned=owns_runner)
        self._served: set[tuple[str, int]] = set()
        self._lent: dict[tuple[int, int], Tensor] = {}

    def __repr__(self) -> str:
        return f"PagedCache({len(self._rows)} rows of {self._rows.length} tokens)"

    def __len__(self) -> int:
        return self._runner.layer_count

    def __enter__(self) -> PagedCache:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # Keys, values and states

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store keys and values [batch, kv heads, tokens, dim] of new tokens; returns what they may attend to.

        Raises:
            OutOfPages: the pool has no room for the new tokens.
            UsageError: another batch size than before, or a closed cache, runner or engine.
        """
        self._serve("tokens", layer_idx, key_states)
        g, e = self._tokens[layer_idx]
        entry = Entry(self._runner.storage, g, e)
        for part, values in ((KEY, key_states), (VALUE, value_states)):
            entry.write_tokens(part, self._rows.own(g), values.transpose(1, 2).flatten(0, 1))
        if self._rows.past == 0:
            return key_states, value_states
        keys, seen = (
            entry.read_tokens(part, self._rows.visible(g)).to(key_states.dtype).unflatten(0, (len(self._rows), -1))
            for part in (KEY, VALUE)
        )
        return keys.transpose(1, 2), seen.transpose(1, 2)

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """A copy of the columns kept; what the caller does to it in place is stored when the next layer asks."""
        self._return_lent()
        self._next_step("state", layer_idx)
        return self._lend_state(layer_idx, CONV)

    def update_conv_state(self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any) -> Tensor:
        """Store the end of the new inputs [batch, channels, tokens]; returns them behind the columns kept before."""
        self._lent.pop((layer_idx, CONV), None)
        before = self._read_state(layer_idx, CONV)
        self._serve("state", layer_idx, conv_states)
        full = conv_states if before is None else torch.cat([before.to(conv_states.dtype), conv_states], -1)
        columns = self._shape(layer_idx, CONV)[-1]
        kept = nn.functional.pad(full, (max(columns - full.shape[-1], 0), 0))[..., -columns:]
        self._write_state(layer_idx, CONV, kept)
        return full

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """A copy of the state; what the caller does to it in place is stored when the next layer asks."""
        return self._lend_state(layer_idx, RECURRENT)

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> Tensor:
        self._lent.pop((layer_idx, RECURRENT), None)
        if not self._rows.pending:
            # Mixers that change the columns in place hand no inputs over, and do so for one token only.
            self._rows.begin(recurrent_states.shape[0], 1)
        self._served.add(("state", layer_idx))
        self._write_state(layer_idx, RECURRENT, recurrent_states)
        return recurrent_states

    def scan_state(self, layer: int, batch: int) -> Tensor:
        """The state [batch, (heads,) channels, N] that Mamba-1 scans of the coming tokens start from."""
        self._return_lent()
        self._next_step("state", layer)
        state = self._read_state(layer, RECURRENT)
        if state is None:
            state = torch.zeros(batch, *self._shape(layer, RECURRENT), device=self._runner.storage.device)
        return state

    # Sizes

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens every row has, padding included; of a layer that is yet to come in this step, those before it."""
        coming = layer_idx in self._tokens and ("tokens", layer_idx) not in self._served
        return self._rows.past if coming else self._rows.length

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return self._rows.length

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Number of keys that `update` will return for a layer, and the position of the first."""
        if layer_idx not in self._tokens:
            layer_idx = min(self._tokens, default=-1)
        first = self._rows.first(self._tokens[layer_idx][0]) if self._tokens else 0
        return self._rows.length - first + query_length, first

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        return self._rows.past > 0

    def is_recording_past(self, layer_idx: int) -> bool:
        """True: it keeps mixers off their in-place convolution, which would change a copy."""
        return True

    @property
    def batch_size(self) -> int:
        return len(self._rows)

    @property
    def is_compileable(self) -> bool:
        return False

    @property
    def is_initialized(self) -> bool:
        return self._rows.length > 0

    @property
    def is_croppable(self) -> bool:
        return all(group.kind == "full_attention" for group in self._groups)

    @property
    def is_sliding(self) -> list[bool]:
        return [self._kind(layer) == "sliding_attention" for layer in range(len(self))]

    @property
    def is_linear(self) -> list[bool]:
        """Layers with a state and nothing else. None where all of them are: `generate` would not ask for the length
        then, and feed a longer prompt from its start again."""
        return [bool(self._tokens) and self._kind(layer) == "linear_attention" for layer in range(len(self))]

    @property
    def is_dummy(self) -> list[bool]:
        return [self._kind(layer) is None for layer in range(len(self))]

    # Whole rows

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last `-tokens_to_remove` tokens of every row.

        Raises:
            UsageError: a positive number, more than there are, states in the model, or a window already let go of.
        """
        if tokens_to_remove > 0:
            raise UsageError(f"crop takes minus the number of tokens to remove, got {tokens_to_remove}")
        length = self._rows.length + tokens_to_remove
        if length < 0:
            raise UsageError(f"cannot remove {-tokens_to_remove} of {self._rows.length} tokens")
        self._finish()
        if length == 0:
            self._rows.clear()
        elif tokens_to_remove:
            self._rows.cut(length)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row; the copies share pages until one of them writes there."""
        self._select([row for row in range(len(self._rows)) for _ in range(repeats)])

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows at `indices`, in that order."""
        self._select(torch.arange(len(self._rows))[indices.cpu()].tolist())

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Beam search: row i becomes a copy of row beam_idx[i]."""
        self._select(beam_idx.tolist())

    def activate_past_recording(self) -> None:
        """Nothing to record where all layers are full attention.

        Raises:
            UsageError: states or windows, which cannot be rolled back.
        """
        if not self.is_croppable:
            kinds = ", ".join(sorted({group.kind for group in self._groups} - {"full_attention"}))
            raise UsageError(f"a paged cache cannot roll back {kinds} layers; decode without an assistant")

    def reset(self) -> None:
        """Forget everything and free the pages; the cache can be used again."""
        self._lent.clear()
        self._served.clear()
        self._rows.clear()

    def close(self) -> None:
        """Free the pages and give the model its own functions back. Calling it again changes nothing."""
        if not self._lease.ended:
            self.reset()
            self._lease.end()

    # Steps

    def _serve(self, what: str, layer: int, new: Tensor) -> None:
        """Have a step under way for the new tokens, new[:, :, token]: the current one, or the next."""
        self._next_step(what, layer)
        if not self._rows.pending:
            self._rows.begin(new.shape[0], new.shape[2])
        self._served.add((what, layer))

    def _next_step(self, what: str, layer: int) -> None:
        """End the step under way if it has served this layer before."""
        self._lease.check()
        if (what, layer) in self._served:
            self._finish()

    def _finish(self) -> None:
        self._return_lent()
        self._rows.finish()
        self._served.clear()

    def _return_lent(self) -> None:
        if self._rows.pending:
            for (layer, part), state in self._lent.items():
                self._write_state(layer, part, state)
        self._lent.clear()

    def _select(self, indices: list[int]) -> None:
        self._finish()
        self._rows.select(indices)

    def _read_state(self, layer: int, part: int) -> Tensor | None:
        if self._rows.past == 0:
            return None
        g, e = self._states[layer]
        return self._runner.storage.read_states(g, e, part, self._rows.working(g))

    def _lend_state(self, layer: int, part: int) -> Tensor | None:
        state = self._read_state(layer, part)
        if state is not None:
            self._lent[layer, part] = state
        return state

    def _write_state(self, layer: int, part: int, states: Tensor) -> None:
        g, e = self._states[layer]
        self._runner.storage.write_states(g, e, part, self._rows.working(g), states)

    def _shape(self, layer: int, part: int) -> tuple[int, ...]:
        return self._groups[self._states[layer][0]].parts[part].shape

    def _kind(self, layer: int) -> str | None:
        """The kind of a layer's tokens, else of its state, or None."""
        found = self._tokens.get(layer) or self._states.get(layer)
        return None if found is None else self._groups[found[0]].kind
