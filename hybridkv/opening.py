"""From a prompt to a sequence: its key, its prefix hit, and where it will make resume points."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import numpy as np
from numpy.typing import ArrayLike

from hybridkv.boundaries import checked_breakpoints, planned
from hybridkv.errors import EmptyPrompt, RequestError
from hybridkv.hashing import Adapter, Image, Salt, chain_seed, checked_tokens, image_extras, layout_identity
from hybridkv.ledger import Ledger
from hybridkv.lookup import find_hit, hold_prefix
from hybridkv.sequence import Sequence, as_tokens


class Opening:
    """What the manager's `open` and `hit_tokens` do.

    Args:
        ledger: the books.
        algorithm: of the digests.
        interval: tokens between resume points inside a long prompt, or None.
        model: identity of the weights.
        dtype: of the computation.
    """

    def __init__(self, ledger: Ledger, algorithm: str, interval: int | None, *, model: str, dtype: str) -> None:
        self._ledger = ledger
        self._algorithm = algorithm
        self._interval = interval
        layout = ledger.layout
        self._seed = partial(
            chain_seed,
            algorithm=algorithm,
            model=model,
            dtype=dtype,
            groups=layout_identity(layout.groups),
            unit_tokens=layout.unit_tokens,
        )

    def open(
        self,
        id: int,
        token_ids: ArrayLike,
        *,
        salt: Salt | None,
        adapter: Adapter | None,
        images: Iterable[Image],
        breakpoints: Iterable[int],
        cache: bool,
        most_hit: int | None,
    ) -> Sequence:
        """A new sequence that holds the pages of its hit; see `GroupManager.open`."""
        ids = checked_tokens(token_ids)
        if not len(ids):
            raise EmptyPrompt("the prompt has no tokens; a request needs at least one")
        layout = self._ledger.layout
        seed = self._seed(adapter=adapter, salt=salt)
        seq = Sequence(id, as_tokens(ids), seed, len(layout.groups), private=not cache)
        seq.adapter = adapter
        images, length = tuple(images), seq.known
        extras = image_extras(images, layout.unit_tokens)
        if images and (last_image := max(image[0] for image in images)) >= length:
            raise RequestError(f"an image starts at token {last_image}, past the prompt's {length} tokens")
        wanted = {length - 1, *checked_breakpoints(breakpoints, length)}
        if seq.private:
            hold_prefix(self._ledger, seq, np.zeros(0, np.int64))
            return seq
        if self._interval:
            wanted.update(range(self._interval, length - 1, self._interval))
        found = find_hit(self._ledger, seed, seq.token_ids(), extras, self._algorithm, most_hit)
        seq.images, seq.extras, seq.digests = images, extras, found.digests
        hold_prefix(self._ledger, seq, found.rows)
        seq.hit_tokens = seq.length
        # Where the known prefix ends, another request went its own way: a third one may come.
        wanted.add(found.matched * layout.unit_tokens)
        seq.plan = planned(wanted, layout.boundary_tokens, seq.length)
        return seq

    def hit_tokens(self, token_ids: ArrayLike, *, salt: Salt | None, adapter: Adapter | None) -> int:
        """Tokens of a prompt that are computed already; see `GroupManager.hit_tokens`."""
        seed = self._seed(adapter=adapter, salt=salt)
        found = find_hit(self._ledger, seed, checked_tokens(token_ids), {}, self._algorithm)
        return len(found.rows) * self._ledger.layout.unit_tokens
