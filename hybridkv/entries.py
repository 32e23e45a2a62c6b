"""Cache entries, what one layer stores, and how they become layer groups."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from hybridkv.errors import ConfigError
from hybridkv.rules import FullAttention, Holds, Rule, group_kind, make_rule

ITEM_BYTES: Mapping[str, int] = {
    "float64": 8, "float32": 4, "bfloat16": 2, "float16": 2,
    "float8_e4m3fn": 1, "float8_e5m2": 1, "uint8": 1, "int8": 1,
}  # fmt: skip

LATENT = "latent"
"""Name of the first part of an entry that its layer expands into keys and values."""


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor of an entry: per token for attention kinds, per state for state kinds.

    Attributes:
        name: "k", "v", "latent", "rope", "conv", "recurrent", or what the family calls it.
        shape: without the token axis, e.g. (kv_heads, head_dim) or (channels, kernel - 1).
        dtype: "bfloat16", "float32", ...
    """

    name: str
    shape: tuple[int, ...]
    dtype: str

    def __post_init__(self) -> None:
        if self.dtype not in ITEM_BYTES:
            raise ConfigError(f"unknown dtype {self.dtype!r}; known are {', '.join(ITEM_BYTES)}")
        if not self.shape or min(self.shape) < 1:
            raise ConfigError(f"part {self.name!r} has the shape {self.shape}; every size must be at least 1")

    @property
    def item_bytes(self) -> int:
        return ITEM_BYTES[self.dtype]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.item_bytes


@dataclass(frozen=True, slots=True)
class CacheEntry:
    """What one layer keeps between tokens.

    Attributes:
        layer: index of the layer in the model.
        kind: a registered group kind, e.g. "full_attention".
        parts: the tensors, in order.
        params: parameters of the kind's rule, e.g. (("window", 1024),).
        index: tells apart two entries of one kind in one layer.
    """

    layer: int
    kind: str
    parts: tuple[Part, ...]
    params: tuple[tuple[str, int], ...] = ()
    index: int = 0


class EntryRef(NamedTuple):
    """Where an entry comes from: a layer, and which of its entries of the kind."""

    layer: int
    number: int


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Entries with one kind, shape, dtype and window: they share a page table and a rule.

    Attributes:
        name: unique in its layout, e.g. "sliding_attention_1024".
        page_tokens: tokens a page holds for every layer of the group; 0 for a state page.
        entries: the layers served, ascending.
    """

    name: str
    kind: str
    parts: tuple[Part, ...]
    params: tuple[tuple[str, int], ...]
    page_tokens: int
    entries: tuple[EntryRef, ...]
    rule: Rule = field(compare=False, repr=False)

    @property
    def holds(self) -> Holds:
        return group_kind(self.kind).holds

    @property
    def is_state(self) -> bool:
        return not self.page_tokens

    @property
    def keeps_all(self) -> bool:
        """Whether nothing ever slides out, so that a sequence need not look."""
        return isinstance(self.rule, FullAttention)

    @property
    def is_latent(self) -> bool:
        """Whether its layers store what they expand into keys and values each time they attend."""
        return self.parts[0].name == LATENT

    @property
    def layers(self) -> int:
        return len(self.entries)

    @property
    def entry_bytes(self) -> int:
        """Bytes of one token (or of the state) in one layer."""
        return sum(part.nbytes for part in self.parts)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all layers of the group, without padding."""
        return self.entry_bytes * self.layers * max(self.page_tokens, 1)

    def with_entries(self, name: str, entries: Iterable[EntryRef]) -> LayerGroup:
        """The same kind of group over other layers (a split of this one)."""
        return replace(self, name=name, entries=tuple(entries))


def attention_parts(kv_heads: int, key_dim: int, dtype: str, value_dim: int | None = None) -> tuple[Part, ...]:
    """K and V of one token: (kv_heads, dim) each."""
    return Part("k", (kv_heads, key_dim), dtype), Part("v", (kv_heads, value_dim or key_dim), dtype)


def latent_parts(rank: int, rope_dim: int, dtype: str) -> tuple[Part, ...]:
    """One token of multi-head latent attention: the compressed keys and values (1, rank), and the part of the key that
    carries the position (1, rope_dim), which all heads share."""
    return Part(LATENT, (1, rank), dtype), Part("rope", (1, rope_dim), dtype)


def group_entries(entries: Iterable[CacheEntry], page_tokens: int | Mapping[str, int] = 16) -> tuple[LayerGroup, ...]:
    """Gather entries into layer groups, in order of first appearance.

    Args:
        entries: what every layer stores.
        page_tokens: tokens per attention page, one number or one per kind.

    Raises:
        ConfigError: no entries, a page size that is no whole number of at least 1, or an entry named twice.
        UnknownGroupKind: an entry of a kind, or a page size for a kind, that nobody registered.
    """
    gathered: dict[tuple[object, ...], list[CacheEntry]] = {}
    seen: set[tuple[int, str, int]] = set()
    for entry in entries:
        if (entry.layer, entry.kind, entry.index) in seen:
            raise ConfigError(f"layer {entry.layer} declares {entry.kind!r} number {entry.index} twice")
        seen.add((entry.layer, entry.kind, entry.index))
        gathered.setdefault((entry.kind, entry.parts, entry.params), []).append(entry)
    if not gathered:
        raise ConfigError("the model declares no cache entries; there is nothing to manage")
    if isinstance(page_tokens, Mapping):
        for kind in page_tokens:
            group_kind(kind)
    groups: list[LayerGroup] = []
    for members in gathered.values():
        first = members[0]
        groups.append(
            LayerGroup(
                name=_unique_name(first, groups),
                kind=first.kind,
                parts=first.parts,
                params=first.params,
                page_tokens=_page_tokens(first.kind, page_tokens),
                entries=tuple(sorted(EntryRef(entry.layer, entry.index) for entry in members)),
                rule=make_rule(first.kind, dict(first.params)),
            )
        )
    return tuple(groups)


def _page_tokens(kind: str, page_tokens: int | Mapping[str, int]) -> int:
    if group_kind(kind).holds == "state":
        return 0
    size = page_tokens.get(kind, 16) if isinstance(page_tokens, Mapping) else page_tokens
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise ConfigError(f"a page of {kind!r} must hold at least 1 token, a whole number; got {size!r}")
    return size


def _unique_name(entry: CacheEntry, groups: list[LayerGroup]) -> str:
    name = "_".join([entry.kind, *(str(value) for _, value in entry.params)])
    taken = {group.name for group in groups}
    if name not in taken:
        return name
    return next(f"{name}.{i}" for i in range(2, len(groups) + 3) if f"{name}.{i}" not in taken)
