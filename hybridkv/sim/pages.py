"""The baseline: one LRU list over the pages of all groups, which does not know what a page is good for alone.

It stands for managers that evict page by page. It is idealised, so that only the order of eviction differs:

* Pages have the sizes of the manager's layout, but the pool is one number of bytes: no slabs, nothing unusable.
* A hit is what every group can resume after, by the same rules as the manager's; at most the prompt without its last
  token. The pages needed there are held, so they become the most recent when they are let go of.
* States are kept at every `checkpoint_interval`, at the last boundary before the prompt's last token, and at the last
  multiple of 64 tokens reached while decoding. There are no junctions and no resume points.
* A page that no running request holds is appended to the list: when it slides out of a window, when a state is
  passed, and at the end of a request, group after group, the tail of each before its head.
* Room is made by dropping pages from the front of the list, whatever group they are of, until the bytes suffice.
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np

from hybridkv import boundaries
from hybridkv.audit import Counters
from hybridkv.errors import OutOfPages
from hybridkv.hashing import unit_digests
from hybridkv.layout import Layout
from hybridkv.rules import page_ranges, resumable
from hybridkv.sim.caches import Held
from hybridkv.sim.requests import Tokens

_SEED = bytes(16)
_HASH = "xxh3_128"
DECODE_INTERVAL = 64


class PagesCache:
    """Pages by what they hold, in one LRU list.

    Args:
        layout: the groups, the sizes of their pages and the bytes of the pool.
        checkpoint_interval: tokens between states kept inside a prompt, rounded up to boundaries; None for none.
    """

    def __init__(self, layout: Layout, checkpoint_interval: int | None = 4096) -> None:
        self.layout = layout
        self.interval = boundaries.interval("checkpoint_interval", checkpoint_interval, layout.boundary_tokens)
        self.refs: list[dict[bytes, int]] = [{} for _ in layout.plans]
        self.idle: OrderedDict[tuple[int, bytes], None] = OrderedDict()
        self.live = [0] * len(layout.plans)
        self.cached = [0] * len(layout.plans)
        self.evicted = 0
        self.strides = [plan.stride for plan in layout.plans]

    def open(self, tokens: Tokens) -> PagesLease:
        return PagesLease(self, tokens)

    def held(self) -> dict[str, Held]:
        rows: dict[str, Held] = {}
        for g, group in enumerate(self.layout.groups):
            live, cached = rows.get(group.kind, Held(0, 0))
            rows[group.kind] = Held(
                live + self.live[g] * self.strides[g],
                cached + self.cached[g] * self.strides[g],
            )
        return rows

    def counters(self) -> Counters:
        return Counters(self.evicted, 0, 0)

    def has(self, group: int, digest: bytes) -> bool:
        return digest in self.refs[group] or (group, digest) in self.idle

    def take(self, demand: list[int]) -> None:
        """Room for so many pages of each group, at the cost of the front of the list; or OutOfPages and no change."""
        asked, live, cached = (_bytes(counts, self.strides) for counts in (demand, self.live, self.cached))
        pool = self.layout.pool_bytes
        if live + asked > pool:
            raise OutOfPages(
                f"{asked:,} bytes of pages were asked for, running requests hold {live:,} of the pool's {pool:,}",
                requested=asked,
                live=live,
                pool=pool,
            )
        while live + asked + cached > pool:
            (g, _), _ = self.idle.popitem(last=False)
            self.cached[g] -= 1
            cached -= self.strides[g]
            self.evicted += 1
        for g, count in enumerate(demand):
            self.live[g] += count

    def hold(self, group: int, digest: bytes) -> None:
        """One more request holds a page that is cached or live."""
        if (group, digest) in self.idle:
            del self.idle[group, digest]
            self.cached[group] -= 1
            self.live[group] += 1
        self.refs[group][digest] = self.refs[group].get(digest, 0) + 1

    def publish(self, group: int, digest: bytes) -> None:
        """A page just taken holds this now; if there is such a page already, that one is held instead."""
        if self.has(group, digest):
            self.live[group] -= 1
            self.hold(group, digest)
        else:
            self.refs[group][digest] = 1

    def release(self, group: int, digest: bytes | None) -> None:
        """A request lets go of a page: of one without a name for good, of the others to the end of the list."""
        if digest is None:
            self.live[group] -= 1
            return
        self.refs[group][digest] -= 1
        if not self.refs[group][digest]:
            del self.refs[group][digest]
            self.idle[group, digest] = None
            self.live[group] -= 1
            self.cached[group] += 1


class PagesLease:
    """One request over a `PagesCache`."""

    def __init__(self, cache: PagesCache, tokens: Tokens) -> None:
        self._cache = cache
        self._unit = cache.layout.unit_tokens
        self._tokens = tokens
        self._prompt = len(tokens)
        self._digests = unit_digests(_SEED, self._whole(len(tokens)), self._unit, None, _HASH)
        self.hit_tokens = self.length = self._hit()
        self._tables: list[dict[int, bytes | None]] = [{} for _ in cache.layout.plans]
        for g, group in enumerate(cache.layout.groups):
            for page in self._needed(g, self.length):
                digest = self._digest(g, page)
                cache.hold(g, digest)
                if group.is_state:
                    cache.release(g, digest)
                else:
                    self._tables[g][page] = digest
        last = (len(tokens) - 1) // cache.layout.boundary_tokens * cache.layout.boundary_tokens
        between = range(cache.interval, len(tokens), cache.interval) if cache.interval else ()
        self._plan = sorted({at for at in (*between, last) if at > self.length})

    def compute(self, n: int, fresh: Tokens) -> None:
        cache, end = self._cache, self.length + n
        self._sweep()
        saved = [at for at in self._plan if at <= end]
        demand = [
            (0 if self._tables[g] else 1) + len(saved)
            if group.is_state
            else -(-end // group.page_tokens) - -(-self.length // group.page_tokens)
            for g, group in enumerate(cache.layout.groups)
        ]
        cache.take(demand)
        if len(fresh):
            self._tokens = np.concatenate((self._tokens, fresh))
        self._name_units(end)
        for g, group in enumerate(cache.layout.groups):
            table = self._tables[g]
            if group.is_state:
                table[0] = None
                for at in saved:
                    self._save(g, at)
                continue
            table.update(dict.fromkeys(range(-(-self.length // group.page_tokens), -(-end // group.page_tokens))))
            for page in range(self.length // group.page_tokens, end // group.page_tokens):
                table[page] = self._digest(g, page)
                cache.publish(g, self._digest(g, page))
        self._plan = self._plan[len(saved) :]
        self.length = end
        self._sweep()

    def close(self, keep: bool) -> None:
        cache = self._cache
        last = self.length - self.length % DECODE_INTERVAL
        groups = cache.layout.groups
        if keep and last > self._prompt and last % cache.layout.boundary_tokens == 0:
            states = [int(group.is_state) for group in groups]
            # The working state is the page that stays; it makes room for itself.
            for g in np.flatnonzero(states).tolist():
                cache.release(g, self._tables[g].pop(0))
            cache.take(states)
            for g in np.flatnonzero(states).tolist():
                self._save(g, last)
        for g, table in enumerate(self._tables):
            for page in sorted(table, reverse=True):
                cache.release(g, table[page])
            table.clear()

    def missing(self, tokens: int) -> tuple[str, ...]:
        groups = self._cache.layout.groups
        kinds = [
            group.kind
            for g, group in enumerate(groups)
            if any(not self._cache.has(g, self._digest(g, page)) for page in self._needed(g, tokens))
        ]
        return tuple(dict.fromkeys(kinds))

    def _hit(self) -> int:
        most = (len(self._tokens) - 1) // self._unit
        lengths = np.arange(most + 1, dtype=np.int64) * self._unit
        ok = np.ones(most + 1, np.bool_)
        for g, group in enumerate(self._cache.layout.groups):
            size = group.page_tokens or self._unit
            ends = self._digests[size // self._unit - 1 : most : size // self._unit]
            present = np.array([self._cache.has(g, digest) for digest in ends], np.bool_)
            ok &= resumable(group.rule, lengths, size, present)
        return int(lengths[np.flatnonzero(ok)[-1]])

    def _needed(self, g: int, tokens: int) -> list[int]:
        group = self._cache.layout.groups[g]
        ranges = page_ranges(group.rule, np.array([tokens], np.int64), group.page_tokens or self._unit)
        return [page for start, stop in ranges for page in range(int(start[0]), int(stop[0]))]

    def _digest(self, g: int, page: int) -> bytes:
        size = (self._cache.layout.groups[g].page_tokens or self._unit) // self._unit
        return self._digests[(page + 1) * size - 1]

    def _save(self, g: int, at: int) -> None:
        digest = self._digests[at // self._unit - 1]
        self._cache.publish(g, digest)
        self._cache.release(g, digest)

    def _sweep(self) -> None:
        for g, group in enumerate(self._cache.layout.groups):
            if group.is_state or group.keeps_all:
                continue
            needed = {*self._needed(g, self.length), self.length // group.page_tokens}
            for page in [page for page in self._tables[g] if page not in needed]:
                self._cache.release(g, self._tables[g].pop(page))

    def _name_units(self, end: int) -> None:
        known = len(self._digests)
        if end // self._unit > known:
            tokens = self._whole(end)[known * self._unit :]
            previous = self._digests[-1] if known else _SEED
            self._digests += unit_digests(previous, tokens, self._unit, None, _HASH, known)

    def _whole(self, tokens: int) -> Tokens:
        return self._tokens[: tokens // self._unit * self._unit]


def _bytes(counts: list[int], strides: list[int]) -> int:
    return sum(count * stride for count, stride in zip(counts, strides, strict=True))
