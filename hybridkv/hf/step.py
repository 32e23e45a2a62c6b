"""One step: spans of many requests as one packed row, and where every layer finds its pages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from typing import NamedTuple
from weakref import ref

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from hybridkv.entries import LayerGroup
from hybridkv.errors import UnsupportedModel, UsageError
from hybridkv.manager import GroupManager
from hybridkv.ops.gathered import Gathering, plan_gathering
from hybridkv.ops.inplace import in_place_from
from hybridkv.ops.planning import PageTable, plan_tokens
from hybridkv.ops.spans import Entry, StateChunk, StatePlan, TokenPlan
from hybridkv.sequence import Sequence as Request
from hybridkv.sequence import StatePages
from hybridkv.storage import PoolStorage

Ints = NDArray[np.int64]


class Span(NamedTuple):
    """Tokens of one request for one forward pass, reserved and not yet committed.

    Attributes:
        seq: the request; the tokens follow its `length`.
        token_ids: one or more token ids.
        rows: how many logits rows are wanted: those after the span's last `rows` tokens.
    """

    seq: Request
    token_ids: ArrayLike
    rows: int = 1


class LayerMap:
    """Which group, and which entry of it, a layer of the model keeps its tokens and its state in."""

    def __init__(self, groups: Sequence[LayerGroup]) -> None:
        self.tokens: dict[int, tuple[int, int]] = {}
        self.states: dict[int, tuple[int, int]] = {}
        for g, group in enumerate(groups):
            for e, entry in enumerate(group.entries):
                kept = self.states if group.is_state else self.tokens
                if entry.number or entry.layer in kept:
                    raise UsageError(
                        f"layer {entry.layer} keeps more than one entry of a kind; none of its calls say which"
                    )
                kept[entry.layer] = g, e
        self.parts = frozenset(
            (layer, part) for layer, (g, _) in self.states.items() for part in range(len(groups[g].parts))
        )

    @property
    def layers(self) -> int:
        """One more than the last layer that keeps anything."""
        return 1 + max([*self.tokens, *self.states])


class PackedStep:
    """The plan of one packed forward pass.

    Attributes:
        input_ids: int64 [1, tokens].
        position_ids: int64 [1, tokens].
        wanted: int64 [logits rows], the packed places whose logits are wanted, in the order the spans were given.
        layer: layer that last asked the cache for anything.
        attended: layers whose attention ran over pages so far.
        advanced: (layer, part) of the states that were moved on so far.
        heads: how many heads of a layer were moved on so far, where a mixer does that one by one.
    """

    def __init__(
        self, manager: GroupManager, storage: PoolStorage, layers: LayerMap, spans: Sequence[Span], dtype: torch.dtype
    ) -> None:
        """Plan a pass over `spans`.

        Args:
            manager: knows every span's pages; all reservations of the step were made.
            storage: where the pages lie, with all copies done.
            layers: of the manager's groups.
            spans: at least one, each of another request.
            dtype: queries will have it.

        Raises:
            UsageError: no spans, an empty one, a request twice, tokens that were not reserved, or rows out of range.
        """
        device = storage.device
        tokens = [np.atleast_1d(np.asarray(span.token_ids, np.int64)) for span in spans]
        check_spans(spans, tokens)
        counts = np.array([len(ids) for ids in tokens], np.int64)
        lengths = np.array([span.seq.length for span in spans], np.int64)
        # One-token spans first, longest history first, so that every kind of layer finds its batches as slices.
        order = np.lexsort((-lengths, counts > 1))
        singles = int((counts == 1).sum())
        counts, lengths = counts[order], lengths[order]
        stops = np.cumsum(counts)
        positions = np.arange(stops[-1]) - np.repeat(stops - counts - lengths, counts)
        ends = np.empty(len(spans), np.int64)
        ends[order] = stops
        rows = np.array([span.rows for span in spans], np.int64)
        self.input_ids = _tensor(np.concatenate([tokens[i] for i in order]), device)[None]
        self.position_ids = _tensor(positions, device)[None]
        self.wanted = _tensor(np.arange(rows.sum()) + np.repeat(ends - np.cumsum(rows), rows), device)
        self.layer = -1
        self.attended: set[int] = set()
        self.advanced: set[tuple[int, int]] = set()
        self._handed: dict[int, tuple[ref[Tensor], int]] = {}
        self.heads: Counter[int] = Counter()
        self._layers = layers
        self._storage = storage
        requests = [spans[i].seq for i in order]
        self._tokens: dict[int, TokenPlan] = {}
        self._gatherings: dict[int, Gathering] = {}
        self._states: dict[int, StatePlan] = {}
        for g, group in enumerate(manager.groups):
            if group.is_state:
                pages = [manager.state_pages(request, g) for request in requests]
                self._states[g] = _plan_states(pages, lengths, counts, singles, device)
            else:
                held = [manager.token_pages(request, g) for request in requests]
                table = PageTable(held, group.page_tokens, device)
                least = in_place_from(group, device, dtype)
                plan = plan_tokens(group.rule, table, lengths, counts, singles, dtype, device, least)
                self._tokens[g] = plan
                if group.is_latent:
                    self._gatherings[g] = plan_gathering(group.rule, table, plan, lengths, counts, dtype, device)

    @property
    def shift(self) -> Tensor:
        """int64 [tokens], what turns a token's place in the pass into its position in its request."""
        return self.position_ids[0] - torch.arange(self.position_ids.shape[1], device=self.position_ids.device)

    def hand_out(self, key: Tensor, layer: int) -> None:
        """Remember that `key` is what a layer's attention is about to be given."""
        self.layer = layer
        # By identity, and weakly: keys of a pass are as large as its pages and must not outlive their layer.
        self._handed[id(key)] = ref(key), layer

    def attend(self, key: Tensor) -> int:
        """The layer whose pages an attention call with these keys reads.

        Layers that share the keys of an earlier one pass on the tensor that one was handed. Anything made anew from
        what the cache returned belongs to the layer that asked last, once.

        Raises:
            UnsupportedModel: keys that no layer was handed, and the last one that asked has attended already.
        """
        handed = self._handed.get(id(key))
        if handed is not None and handed[0]() is key:
            layer = handed[1]
        else:
            layer = self.layer
            if layer in self.attended:
                raise UnsupportedModel(
                    f"a layer after layer {layer} attends to keys that no cache update has returned, so nothing says "
                    "whose pages hold its past; run the model with its own generate()"
                )
        self.attended.add(layer)
        return layer

    def tokens_of(self, layer: int) -> tuple[TokenPlan, Entry]:
        """The plan and the pages of an attention layer."""
        g, e = _kept(self._layers.tokens, layer, "keys and values")
        return self._tokens[g], Entry(self._storage, g, e)

    def gathering_of(self, layer: int) -> Gathering | None:
        """How a layer that stores latents gets all of them back, or None for one that stores keys and values."""
        return self._gatherings.get(self._layers.tokens[layer][0])

    def states_of(self, layer: int, part: int) -> tuple[StatePlan, Entry]:
        """The plan and the pages of a recurrent layer, for whoever moves this part of its state on."""
        g, e = _kept(self._layers.states, layer, "a state")
        self.advanced.add((layer, part))
        return self._states[g], Entry(self._storage, g, e)


active_step: ContextVar[PackedStep | None] = ContextVar("hybridkv_step", default=None)
"""The packed pass that runs in this context, if any: attention functions and mixers have no other way to learn it."""


def _kept(known: Mapping[int, tuple[int, int]], layer: int, what: str) -> tuple[int, int]:
    found = known.get(layer)
    if found is None:
        raise UsageError(f"layer {layer} asked for {what}, which its cache entries do not mention")
    return found


def check_spans(spans: Sequence[Span], tokens: Sequence[Ints]) -> None:
    """Refuse spans that no forward pass can compute; `tokens` are their token ids as arrays.

    Raises:
        UsageError: no spans, an empty one, a request twice, tokens that were not reserved, or rows out of range.
    """
    if not spans:
        raise UsageError("a forward pass needs at least one span")
    if len({span.seq.id for span in spans}) != len(spans):
        raise UsageError("a forward pass takes one span of each request; join spans of the same request")
    for span, ids in zip(spans, tokens, strict=True):
        if not 0 < len(ids) <= span.seq.reserved or (span.seq.firm and len(ids) < span.seq.reserved):
            raise UsageError(f"a span of {len(ids)} tokens of {span.seq!r}, which has {span.seq.reserved} reserved")
        if not 0 < span.rows <= len(ids):
            raise UsageError(f"a span of {len(ids)} tokens cannot give {span.rows} rows of logits")


def _plan_states(
    pages: Sequence[StatePages], lengths: Ints, counts: Ints, singles: int, device: torch.device
) -> StatePlan:
    fresh = np.flatnonzero(lengths[:singles] == 0)
    saves = [
        (i, slot) for i in range(singles) for position, slot in pages[i].checkpoints if position == int(lengths[i]) + 1
    ]
    chunks = []
    start = singles
    for held, length, count in zip(pages[singles:], lengths[singles:].tolist(), counts[singles:].tolist(), strict=True):
        slots: dict[int, list[int]] = {start + count: [held.end]}
        for position, slot in held.checkpoints:
            if length < position <= length + count:
                slots.setdefault(start + position - length, []).append(slot)
        cuts = tuple((stop, _tensor(np.array(slots[stop], np.int64), device)) for stop in sorted(slots))
        own = _tensor(np.array([held.slot], np.int64), device) if length else None
        chunks.append(StateChunk(start, own, cuts))
        start += count
    return StatePlan(
        singles,
        _tensor(np.array([held.slot for held in pages[:singles]], np.int64), device),
        _tensor(fresh, device) if len(fresh) else None,
        tuple(_tensor(np.array(column, np.int64), device) for column in zip(*saves, strict=True)) if saves else None,  # type: ignore[arg-type]
        tuple(chunks),
    )


def _tensor(values: Ints, device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values, np.int64)).to(device)
