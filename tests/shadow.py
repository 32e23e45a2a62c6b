"""A storage that knows what it should hold, and a serving loop over it: the oracle of the manager's tests.

Every token row and every state holds a number that stands for the whole prefix behind it. A forward pass writes the
numbers that the sequence's own tokens imply and first reads back every row that its groups' rules ask for. So a page
of another prefix, a stale state, a missed copy or an early overwrite is read as the wrong number, where it happens.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hybridkv.errors import OutOfPages
from hybridkv.layout import Layout
from hybridkv.manager import GroupManager
from hybridkv.pool import PageCopy
from hybridkv.rules import Rule, SlidingAttention
from hybridkv.sequence import Sequence


class ShadowStorage:
    """What every slot holds. The bytes of a slab are shared: writing as one group destroys what another left there."""

    def __init__(self, layout: Layout) -> None:
        self._per_slab = [plan.per_slab for plan in layout.plans]
        self._rows = [max(group.page_tokens, 1) for group in layout.groups]
        self._owner = [-1] * layout.slabs
        self._held: list[dict[tuple[int, int], int]] = [{} for _ in range(layout.slabs)]

    def write(self, group: int, slot: int, row: int, content: int) -> None:
        self._slab_of(group, slot)[slot, row] = content

    def read(self, group: int, slot: int, row: int = 0) -> int | None:
        slab = slot // self._per_slab[group]
        return self._held[slab].get((slot, row)) if self._owner[slab] == group else None

    def copy(self, copy: PageCopy) -> None:
        for row in range(self._rows[copy.group]):
            content = self.read(copy.group, copy.src, row)
            target = self._slab_of(copy.group, copy.dst)
            if content is None:
                target.pop((copy.dst, row), None)
            else:
                target[copy.dst, row] = content

    def poison(self, group: int, slots: Iterable[int]) -> None:
        for slot in slots:
            held = self._slab_of(group, slot)
            for row in range(self._rows[group]):
                held.pop((slot, row), None)

    def _slab_of(self, group: int, slot: int) -> dict[tuple[int, int], int]:
        slab = slot // self._per_slab[group]
        if self._owner[slab] != group:
            self._owner[slab] = group
            self._held[slab].clear()
        return self._held[slab]


@dataclass(eq=False)
class Request:
    """A sequence and what its tokens imply.

    `contents[p]` stands for the first p tokens with everything that belongs to the key. `images` counts only for the
    prompt it came with. `ran` says that a forward pass ran that was not committed; `ahead` says that
    it may hold pages of a reservation that was not used up.
    """

    seq: Sequence
    contents: list[int]
    images: dict[int, str]
    ran: bool = False
    ahead: bool = False
    fed: list[int] = field(default_factory=list)


class Server:
    """Serves requests from a manager and a shadow storage, and checks every read."""

    def __init__(self, manager: GroupManager) -> None:
        self.manager = manager
        self.storage = ShadowStorage(manager.layout)
        self.live: list[Request] = []
        self.refused = 0
        self._numbers: dict[Hashable, int] = {}
        self._contents_of: dict[bytes, tuple[int, ...]] = {}
        self._has_states = any(group.is_state for group in manager.groups)

    def open(
        self,
        tokens: list[int],
        *,
        salt: str | None = None,
        adapter: str | None = None,
        images: tuple[tuple[int, str], ...] = (),
        breakpoints: tuple[int, ...] = (),
        cache: bool = True,
    ) -> Request:
        manager = self.manager
        before = manager.usage()
        seq = manager.open(tokens, salt=salt, adapter=adapter, images=images, breakpoints=breakpoints, cache=cache)
        assert cache or manager.usage() == before, "a request without cache looked something up"
        request = Request(seq, [self._number("root", salt, adapter)], dict(images))
        self._extend(request, tokens)
        assert 0 <= seq.hit_tokens == seq.length < len(tokens) == seq.known
        assert seq.hit_tokens == brute_force_hit(manager, seq)
        self.live.append(request)
        return request

    def reserve(self, request: Request, n: int) -> bool:
        """Whether there was room; the request is fed known tokens first and then drafts."""
        unfinished = request.seq.reserved > 0
        try:
            self.manager.reserve(request.seq, n)
        except OutOfPages as error:
            self.refuse(error)
            return False
        self._feed(request, n)
        request.ahead |= unfinished
        return True

    def refuse(self, error: OutOfPages) -> None:
        layout = self.manager.layout
        self.refused += 1
        assert error.live == self.manager.usage().live_bytes
        assert error.live + error.requested > layout.pool_bytes - len(layout.groups) * layout.slab_bytes

    def forward(self, requests: Iterable[Request]) -> None:
        """Copies, poison, and one pass over the reserved tokens of these requests."""
        self.run_copies()
        requests = list(requests)
        for request in requests:
            self._read(request)
        for request in requests:
            self._write(request)
            request.ran = True

    def commit(self, request: Request, n: int) -> None:
        seq = request.seq
        fresh = request.fed[seq.known - seq.length :][: max(seq.length + n - seq.known, 0)]
        self._extend(request, fresh)
        request.ahead |= n < seq.reserved
        self.manager.commit(seq, n, token_ids=fresh or None)
        self._committed(request)

    def draft(self, request: Request, firm: int, drafts: int) -> int:
        """How many of the drafts there was room for; known tokens come first, and are firm."""
        unfinished = request.seq.reserved > 0
        before = self.manager.usage()
        snapshots = [other.seq.snapshot for other in self.live]
        granted = self.manager.reserve_drafts(request.seq, firm, drafts)
        assert 0 <= granted <= drafts
        assert snapshots == [other.seq.snapshot for other in self.live]
        if granted:
            self._feed(request, firm + granted)
            request.ahead |= unfinished
        else:
            assert self.manager.usage().cached_bytes >= before.cached_bytes
        return granted

    def verify(self, request: Request, firm: int, right: int) -> None:
        """End a step with drafts, of which the first `right` count."""
        seq = request.seq
        start, known, reserved = seq.length, seq.known, seq.reserved
        self.manager.commit_drafts(seq, request.fed[: firm + right])
        kept = firm + right if not self._has_states or firm + right == reserved else firm
        assert seq.length == start + kept
        self._extend(request, request.fed[known - start :][: max(seq.length - known, 0)])
        assert seq.tokens[start : seq.length].tolist() == request.fed[:kept]
        request.ahead |= right > kept - firm
        self._committed(request)

    def step(self, wants: Iterable[tuple[Request, int]]) -> list[Request]:
        """Reserve, compute and commit; requests without room are left out."""
        admitted = [request for request, n in wants if self.reserve(request, n)]
        self.forward(admitted)
        for request in admitted:
            self.commit(request, request.seq.reserved)
        return admitted

    def decode(self, requests: list[Request], tokens: list[int]) -> bool:
        """One batched decode step; False, and nothing computed, if there is no room for all."""
        for request in requests:
            request.ahead |= request.seq.reserved > 0
        try:
            self.manager.reserve_decode([request.seq for request in requests])
        except OutOfPages as error:
            self.refuse(error)
            return False
        for request, token in zip(requests, tokens, strict=True):
            known = request.seq.known > request.seq.length
            request.fed = [request.seq.tokens[request.seq.length] if known else token]
            if not known:
                self._extend(request, [token])
        self.forward(requests)
        self.manager.commit_decode([r.seq for r in requests], [r.fed[0] for r in requests])
        for request in requests:
            self._committed(request)
        return True

    def fork(self, request: Request) -> Request:
        child = Request(self.manager.fork(request.seq), request.contents[:], dict(request.images), ahead=request.ahead)
        self.live.append(child)
        return child

    def truncate(self, request: Request, n: int) -> None:
        length = self.manager.truncate(request.seq, n)
        assert length <= n
        assert request.seq.length == length
        assert request.seq.known == n
        del request.contents[n + 1 :]
        request.images = {at: digest for at, digest in request.images.items() if at < n}
        request.ran = request.ahead = False

    def close(self, request: Request, *, cache: bool) -> None:
        self.manager.close(request.seq, cache=cache)
        self.live.remove(request)

    def run_copies(self) -> None:
        for copy in self.manager.take_copies():
            self.storage.copy(copy)
        for g in range(len(self.manager.groups)):
            self.storage.poison(g, self.manager.free_slots(g).tolist())
        self.check_published()

    def check_published(self) -> None:
        """Every cached or shared page holds what its digest promises to the next request that hits it."""
        ledger = self.manager._ledger
        for g, group in enumerate(self.manager.groups):
            for page in np.flatnonzero(ledger.index.row_of[g] >= 0).tolist():
                digest = ledger.index._digests[int(ledger.index.row_of[g][page])]
                assert digest is not None
                expected = self._contents_of[digest][-max(group.page_tokens, 1) :]
                slot = int(ledger.pool.groups[g].slot[page])
                found = tuple(self.storage.read(g, slot, row) for row in range(len(expected)))
                assert found == expected, f"{group.name}: a published page holds another prefix"

    def _feed(self, request: Request, n: int) -> None:
        seq = request.seq
        known = seq.tokens[seq.length : seq.length + n].tolist()
        request.fed = [*known, *(2 + (seq.length + i) % 3 for i in range(n - len(known)))]

    def _extend(self, request: Request, tokens: Iterable[int]) -> None:
        for token in tokens:
            at = len(request.contents) - 1
            request.contents.append(self._number(request.contents[-1], token, request.images.get(at)))

    def _number(self, *key: Any) -> int:
        return self._numbers.setdefault(key, len(self._numbers))

    def _implied(self, request: Request) -> list[int]:
        """Contents up to the end of the reservation, drafts included."""
        seq = request.seq
        contents = request.contents[: seq.length + seq.reserved + 1]
        for token in request.fed[len(contents) - 1 - seq.length :]:
            contents.append(self._number(contents[-1], token, request.images.get(len(contents) - 1)))
        return contents

    def _read(self, request: Request) -> None:
        seq, manager = request.seq, self.manager
        for g, group in enumerate(manager.groups):
            if group.is_state:
                slot = manager.state_pages(seq, g).slot
                if seq.length:
                    found = self.storage.read(g, slot)
                    assert found == request.contents[seq.length], f"{group.name}: the working state is another one"
                continue
            table = dict(zip(*(part.tolist() for part in manager.token_pages(seq, g)), strict=True))
            self._check_bound(request, g, len(table))
            for p in needed_tokens(group.rule, seq.length, seq.reserved):
                index, row = divmod(p, group.page_tokens)
                assert index in table, f"{group.name}: page {index} is gone"
                found = self.storage.read(g, table[index], row)
                assert found == request.contents[p + 1], f"{group.name}: token {p} is of another prefix"

    def _check_bound(self, request: Request, g: int, held: int) -> None:
        group, seq = self.manager.groups[g], request.seq
        if isinstance(group.rule, SlidingAttention) and not request.ahead:
            tokens = min(group.rule.window - 1, seq.length) + seq.reserved
            # Tokens that start in the middle of a page touch one more.
            assert (held - 2) * group.page_tokens < tokens, f"{group.name}: holds more than window, chunk and one page"

    def _write(self, request: Request) -> None:
        seq, manager, implied = request.seq, self.manager, self._implied(request)
        end = seq.length + seq.reserved
        for g, group in enumerate(manager.groups):
            if group.is_state:
                places = manager.state_pages(seq, g)
                for at, target in places.checkpoints:
                    assert seq.length < at <= end
                    self.storage.write(g, target, 0, implied[at])
                self.storage.write(g, places.end, 0, implied[end])
                continue
            table = dict(zip(*(part.tolist() for part in manager.token_pages(seq, g)), strict=True))
            for p in range(seq.length, end):
                index, row = divmod(p, group.page_tokens)
                self.storage.write(g, table[index], row, implied[p + 1])

    def _committed(self, request: Request) -> None:
        request.ran = False
        unit = self.manager.unit_tokens
        for i, digest in enumerate(request.seq.digests[: request.seq.units]):
            contents = tuple(request.contents[1 : (i + 1) * unit + 1])
            assert self._contents_of.setdefault(digest, contents) == contents, "two prefixes share a digest"


def needed_tokens(rule: Rule, length: int, reserved: int) -> list[int]:
    """Computed tokens that any of the next `reserved` tokens looks at."""
    wanted: set[int] = set()
    for ahead in range(length, length + reserved):
        for start, stop in rule.needed(np.array([ahead], np.int64)):
            wanted.update(range(int(start[0]), min(int(stop[0]), length)))
    return sorted(wanted)


def brute_force_hit(manager: GroupManager, seq: Sequence) -> int:
    """The longest prefix a new prompt can resume after: token by token, over the pages published now."""
    index, unit = manager._ledger.index, manager.unit_tokens
    rows = [index._rows.get(digest, -1) for digest in seq.digests]
    matched = [*rows, -1].index(-1)

    def cached(g: int, end: int) -> bool:
        """Whether the page of a group that ends after so many tokens is published."""
        return bool(index.page_at[g][rows[end // unit - 1]] >= 0)

    for units in range(min(matched, (seq.known - 1) // unit), 0, -1):
        tokens = units * unit
        for g, group in enumerate(manager.groups):
            size = group.page_tokens or unit
            if tokens % size:
                break
            needed = needed_tokens(group.rule, tokens, 1)
            if not all(cached(g, (p // size + 1) * size) for p in needed):
                break
        else:
            return tokens
    return 0
