"""The one tensor behind the pool: typed views of its pages, page copies, and poison.

Nothing here knows who owns a page. The manager hands out slots, the storage turns them into memory:

    token page slot s of a group, layer entry e, part p:  [page_tokens, *shape] at byte  s * stride + offsets[e][p]
    state page slot s of a group, layer entry e, part p:  [*shape]              at byte  s * stride + offsets[e][p]

In poison mode every byte nobody has written is 0xFF, which is NaN in float32, bfloat16, float16 and both float8 types:
whoever reads a page he neither wrote nor hit sees it in the output.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hybridkv.entries import Part
from hybridkv.errors import ConfigError
from hybridkv.layout import GroupPlan, Layout
from hybridkv.pool import PageCopy

Slots = NDArray[np.int64]

_COPY_BYTES = 64 << 20
"""Most bytes one batch of page copies holds outside the pool."""


class TokenIndex:
    """Where tokens lie in the pages of one group: a slot and a row for each.

    Attributes:
        slots: int64 [n].
        rows: int64 [n], each below the group's page_tokens.
    """

    __slots__ = ("_flat", "_pairs", "rows", "slots")

    def __init__(self, slots: Tensor, rows: Tensor) -> None:
        self.slots = slots
        self.rows = rows
        self._flat: dict[int, Tensor] = {}
        self._pairs: dict[tuple[int, int], Tensor] = {}

    def flat(self, per_slot: int) -> Tensor:
        """Row numbers where consecutive slots are `per_slot` rows apart, computed once for all layers of a group."""
        index = self._flat.get(per_slot)
        if index is None:
            index = self._flat[per_slot] = self.slots * per_slot + self.rows
        return index

    def pairs(self, per_slot: int, apart: int) -> Tensor:
        """`flat`, and after it the same rows `apart` rows further on, [2n]."""
        index = self._pairs.get((per_slot, apart))
        if index is None:
            rows = self.flat(per_slot)
            index = self._pairs[per_slot, apart] = torch.cat((rows, rows + apart))
        return index


class View(NamedTuple):
    """One part of one entry.

    `pages` is [slots, page_tokens, *shape] or [slots, *shape]. `rows` is the same memory as [rows, items of one token
    or state], which torch indexes at the speed of a copy; slot s begins at row s * per_slot. None where pages are not
    a whole number of tokens apart. `apart` is where the rows of the entry's next part begin, counted in rows from those
    of this one, if it has rows of the same width and dtype, else None; `rows` reaches over them too.
    """

    pages: Tensor
    rows: Tensor | None
    per_slot: int
    apart: int | None = None


class PoolStorage:
    """The pool's memory on one device, read and written by slot.

    Args:
        layout: where the pages lie.
        device: of the one tensor.
        poison: fill the pool with NaN bytes, and let `poison()` do so for released pages.

    Raises:
        ConfigError: a layout whose strides or offsets are not aligned to the items they hold.
    """

    def __init__(self, layout: Layout, device: torch.device | str = "cpu", *, poison: bool = False) -> None:
        self.layout = layout
        self.device = torch.device(device)
        self.poisoned = poison
        # Made under the caller's inference_mode(), it could not be written outside of it.
        with torch.inference_mode(False):
            self._pool = torch.empty(layout.pool_bytes, dtype=torch.uint8, device=self.device)
            if poison:
                self._pool.fill_(0xFF)
            self._views = tuple(
                tuple(
                    tuple(self._view(g, plan, entry, index) for index in range(len(plan.group.parts)))
                    for entry in range(plan.group.layers)
                )
                for g, plan in enumerate(layout.plans)
            )
            self._bytes = tuple(self._page_rows(g, plan) for g, plan in enumerate(layout.plans))

    def views(self, g: int, entry: int) -> tuple[View, ...]:
        """The parts of one layer's entry."""
        return self._views[g][entry]

    def part(self, g: int, entry: int, part: int) -> Tensor:
        """A strided view over the whole pool: [slots, page_tokens, *shape], or [slots, *shape] for a state group."""
        return self._views[g][entry][part].pages

    def read_tokens(self, g: int, entry: int, part: int, index: TokenIndex) -> Tensor:
        """A copy of the tokens at `index`: [n, *shape]."""
        view = self._views[g][entry][part]
        if view.rows is None:
            return view.pages[index.slots, index.rows]
        rows = view.rows.index_select(0, index.flat(view.per_slot))
        return rows.view(-1, *view.pages.shape[2:])

    def write_tokens(self, g: int, entry: int, part: int, index: TokenIndex, values: Tensor) -> None:
        """Store `values` [n, *shape] at `index`, converted to the part's dtype."""
        view = self._views[g][entry][part]
        values = values.detach().to(view.pages.dtype)
        if view.rows is None:
            view.pages[index.slots, index.rows] = values
        else:
            view.rows.index_copy_(0, index.flat(view.per_slot), values.reshape(-1, view.rows.shape[1]))

    def read_states(self, g: int, entry: int, part: int, slots: Tensor) -> Tensor:
        """A copy of the states in `slots` (int64 [n]): [n, *shape]."""
        view = self._views[g][entry][part]
        return _flat(view).index_select(0, slots).view(-1, *view.pages.shape[1:])

    def write_states(self, g: int, entry: int, part: int, slots: Tensor, values: Tensor) -> None:
        """Store `values` [n, *shape] in `slots` (int64 [n], all different), converted to the part's dtype."""
        rows = _flat(self._views[g][entry][part])
        rows.index_copy_(0, slots, values.detach().to(rows.dtype).reshape(len(slots), -1))

    def apply(self, copies: Sequence[PageCopy]) -> None:
        """Run page copies with the effect of running them one by one in order.

        Copies of one group run together as long as none reads or writes what another of them wrote. A change of
        group ends the batch, since a slab may pass from one group to another between two copies.
        """
        for g, sources, targets in _batches(copies, self._batch_limits()):
            pages = self._bytes[g]
            if len(sources) == 1:
                pages[targets[0]].copy_(pages[sources[0]])
            else:
                pages[self.index(targets)] = pages[self.index(sources)]

    def poison(self, g: int, slots: Iterable[int] | Slots) -> None:
        """Fill pages with NaN bytes; nothing happens without poison mode."""
        if self.poisoned:
            index = self.index(slots)
            if index.numel():
                self._bytes[g].index_fill_(0, index, -1)

    def index(self, numbers: Iterable[int] | Slots) -> Tensor:
        """Slot numbers as an int64 tensor on the pool's device."""
        array = numbers if isinstance(numbers, np.ndarray) else np.fromiter(numbers, np.int64)
        return torch.from_numpy(np.ascontiguousarray(array, dtype=np.int64)).to(self.device)

    def _batch_limits(self) -> tuple[int, ...]:
        return tuple(max(1, _COPY_BYTES // plan.stride) for plan in self.layout.plans)

    def _view(self, g: int, plan: GroupPlan, entry: int, index: int) -> View:
        part = plan.group.parts[index]
        dtype, item = _dtype(part), part.item_bytes
        offset = plan.offsets[entry][index]
        if plan.stride % item or offset % item:
            raise ConfigError(
                f"group {plan.group.name!r} keeps {part.name!r} ({part.dtype}) at byte {offset} of pages {plan.stride} "
                f"bytes apart; both must be multiples of {item}"
            )
        typed = self._pool[: self._pool.numel() // item * item].view(dtype)
        slots, start, stride, width = self.layout.slots(g), offset // item, plan.stride // item, math.prod(part.shape)
        shape = part.shape if plan.group.is_state else (plan.group.page_tokens, *part.shape)
        pages = typed.as_strided((slots, *shape), (stride, *_contiguous(shape)), start)
        if plan.group.is_state:
            return View(pages, typed.as_strided((slots, width), (stride, 1), start), 1)
        if stride % width:
            return View(pages, None, 0)
        per_slot, apart = stride // width, _apart(plan, entry, index)
        rows = (slots - 1) * per_slot + plan.group.page_tokens + (apart or 0)
        return View(pages, typed.as_strided((rows, width), (width, 1), start), per_slot, apart)

    def _page_rows(self, g: int, plan: GroupPlan) -> Tensor:
        """Whole pages as [slots, items], in the widest integers that fit, because copies move items one by one."""
        size = max(
            offset + part.nbytes * max(plan.group.page_tokens, 1)
            for row in plan.offsets
            for offset, part in zip(row, plan.group.parts, strict=True)
        )
        dtype, item = (torch.int64, 8) if plan.stride % 8 == 0 else (torch.int8, 1)
        typed = self._pool[: self._pool.numel() // item * item].view(dtype)
        stride = plan.stride // item
        return typed.as_strided((self.layout.slots(g), min(-(-size // item), stride)), (stride, 1), 0)


def _batches(copies: Sequence[PageCopy], limits: Sequence[int]) -> Iterator[tuple[int, list[int], list[int]]]:
    group, sources, targets, written = -1, list[int](), list[int](), set[int]()
    for copy in copies:
        full = len(sources) >= limits[copy.group]
        if sources and (copy.group != group or copy.src in written or copy.dst in written or full):
            yield group, sources, targets
            sources, targets, written = [], [], set()
        group = copy.group
        sources.append(copy.src)
        targets.append(copy.dst)
        written.add(copy.dst)
    if sources:
        yield group, sources, targets


def _apart(plan: GroupPlan, entry: int, index: int) -> int | None:
    """Rows between a part and the next one of its entry, if the two can be read as one."""
    parts, offsets = plan.group.parts, plan.offsets[entry]
    if index + 1 == len(parts) or (parts[index].shape, parts[index].dtype) != (
        parts[index + 1].shape,
        parts[index + 1].dtype,
    ):
        return None
    apart, rest = divmod(offsets[index + 1] - offsets[index], parts[index].nbytes)
    return apart if apart > 0 and not rest else None


def _flat(view: View) -> Tensor:
    return view.pages.flatten(1) if view.rows is None else view.rows


def _contiguous(shape: Sequence[int]) -> list[int]:
    return [math.prod(shape[i + 1 :]) for i in range(len(shape))]


def _dtype(part: Part) -> torch.dtype:
    dtype = getattr(torch, part.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise ConfigError(f"this torch has no dtype {part.dtype!r}")
    return dtype
