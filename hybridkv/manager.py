"""The group manager: prefix look-up over all groups, all-or-nothing reservation, publication.

The life of a request: `open` finds and holds the longest prefix every group can resume after; `reserve` takes pages
for the next tokens in all groups or changes nothing; the forward pass runs; `commit` publishes what is complete and
lets go of what slid out; `close` keeps the end of the generation as a resume point.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from collections.abc import Sequence as Seq

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hybridkv import audit, boundaries, publication, reservation
from hybridkv.commits import Commits
from hybridkv.config import parse_bytes
from hybridkv.entries import LayerGroup
from hybridkv.errors import UsageError
from hybridkv.forecast import fits_grown
from hybridkv.hashing import Adapter, Image, Salt, digest_size
from hybridkv.holding import tokens_that_fit
from hybridkv.layout import plan_layout
from hybridkv.ledger import Ledger
from hybridkv.lookup import release_pages
from hybridkv.opening import Opening
from hybridkv.pool import PageCopy
from hybridkv.retention import policy_named
from hybridkv.sequence import Sequence, StatePages, TokenPages


class GroupManager:
    """Pages for every layer group of one model, from one pool. Integers only; it touches no tensor."""

    def __init__(
        self,
        groups: Seq[LayerGroup],
        pool_bytes: int | str,
        *,
        unit_tokens: int = 16,
        hash: str = "sha256",
        policy: str = "lru",
        checkpoint_interval: int | None = 4096,
        decode_checkpoint_interval: int | None = 64,
        model: str = "",
        dtype: str = "",
    ) -> None:
        """Plan the pool.

        Args:
            groups: from `layer_groups` or `group_entries`. State groups may be split by layers: use `self.groups`.
            pool_bytes: the budget, an int or "16GiB".
            unit_tokens: hash granularity; every boundary is a multiple of it.
            hash: "sha256", or "xxh3_128", whose collisions return another prompt's cache.
            policy: "lru" or "cost": which resume point is lost first.
            checkpoint_interval: tokens between resume points made inside a long prompt, rounded up to boundaries; None
                for none.
            decode_checkpoint_interval: tokens between copies of a decoding request's states; None for none.
            model: identity of the weights; requests of different models never share.
            dtype: of the computation; it enters the digests with the dtypes of the pages.

        Raises:
            ConfigError: a setting that cannot work.
            PoolTooSmall: no room for one slab per group.
        """
        digest_size(hash)
        self.layout = plan_layout(groups, parse_bytes(pool_bytes), unit_tokens)
        self.groups = self.layout.groups
        self.unit_tokens = unit_tokens
        step = self.layout.boundary_tokens
        self.checkpoint_interval = boundaries.interval("checkpoint_interval", checkpoint_interval, step)
        self.decode_checkpoint_interval = boundaries.interval(
            "decode_checkpoint_interval", decode_checkpoint_interval, step
        )
        self.hash = hash
        self._ledger = Ledger(self.layout, policy_named(policy))
        self._opening = Opening(self._ledger, hash, self.checkpoint_interval, model=model, dtype=dtype)
        self._commits = Commits(self._ledger, hash, self.decode_checkpoint_interval)
        self._open: dict[int, Sequence] = {}
        self._next_id = 0

    @property
    def running(self) -> tuple[Sequence, ...]:
        """Sequences that are open."""
        return tuple(self._open.values())

    def open(
        self,
        token_ids: ArrayLike,
        *,
        salt: Salt | None = None,
        adapter: Adapter | None = None,
        images: Iterable[Image] = (),
        breakpoints: Iterable[int] = (),
        cache: bool = True,
        most_hit: int | None = None,
    ) -> Sequence:
        """Start a request: find the prefix hit and hold its pages. `seq.hit_tokens` says how long it is.

        Args:
            token_ids: the prompt, at least one token, each id in [0, 2**32).
            salt: requests share cache only with requests of the same salt.
            adapter: LoRA adapter, a name or (name, revision); also part of the key.
            images: (token offset, content digest) of multimodal input.
            breakpoints: prefix lengths in tokens at which another prompt is likely to part from this one, such as
                the end of the system prompt; a resume point is made at each, rounded down to a boundary.
            cache: False looks nothing up and publishes nothing: the request shares no page with any other, and a
                page is free again as soon as the request lets go of it.
            most_hit: hit at most this many tokens, for a caller that needs the rest computed; None is no limit.

        Raises:
            EmptyPrompt, TokenOutOfRange, RequestError: the request can never be served as it is.
        """
        seq = self._opening.open(
            self._next_id,
            token_ids,
            salt=salt,
            adapter=adapter,
            images=images,
            breakpoints=breakpoints,
            cache=cache,
            most_hit=most_hit,
        )
        self._next_id += 1
        self._open[seq.id] = seq
        return seq

    def hit_tokens(self, token_ids: ArrayLike, *, salt: Salt | None = None, adapter: Adapter | None = None) -> int:
        """How much of this prompt `open` would find computed now. It holds nothing and counts as no use.

        Raises:
            TokenOutOfRange: an id outside [0, 2**32).
        """
        return self._opening.hit_tokens(token_ids, salt=salt, adapter=adapter)

    def fits_grown(self, wants: Seq[tuple[Sequence, int]]) -> bool:
        """Whether these open, distinct sequences could grow to these lengths together, beside all that is live.

        Cached pages count as room and shared pages once; checkpoints and copies of states, which give way, not at all.
        """
        return fits_grown(self._ledger, wants)

    def reserve(self, seq: Sequence, n: int, *, keep: Collection[Sequence] = ()) -> None:
        """Take pages for the next `n` tokens in every group.

        Pages the sequence no longer needs are let go of first, also where the reservation then fails. After the
        forward pass has run, only `commit`, `truncate` and `close` are right: states have advanced.

        Args:
            keep: sequences whose copy of the states is not given up to make room.

        Raises:
            OutOfPages: they do not fit beside what other running requests hold; nothing was taken or evicted.
            UsageError: a closed sequence, or `n` below 1.
        """
        self.reserve_all([seq], n, keep=keep)

    def reserve_all(self, seqs: Seq[Sequence], n: int, *, keep: Collection[Sequence] = ()) -> None:
        """`reserve` the next `n` tokens of each of these distinct sequences, or nothing for any of them."""
        for seq in seqs:
            self._require_open(seq)
        reservation.reserve(self._ledger, self._open, [(seq, n) for seq in seqs], keep)

    def reserve_decode(self, seqs: Seq[Sequence], *, keep: Collection[Sequence] = ()) -> None:
        """Take pages for one more token of each of these distinct sequences.

        Raises:
            OutOfPages: they do not all fit; nothing was changed for any of them.
        """
        if short := [seq for seq in seqs if seq.length >= seq.capacity]:
            self.reserve_all(short, 1, keep=keep)
        reservation.begin_decode(self._ledger, seqs)

    def reserve_drafts(self, seq: Sequence, firm: int, drafts: int) -> int:
        """Take pages for the next `firm` tokens, which are certain, and for guesses behind them.

        Guesses take free and cached pages, never what a request holds.

        Returns:
            For how many of the guesses there is room; if 0, nothing was taken, for the `firm` tokens neither.

        Raises:
            UsageError: a closed sequence, or a number below 1.
        """
        self._require_open(seq)
        return reservation.reserve_drafts(self._ledger, seq, firm, drafts, self.decode_checkpoint_interval)

    def commit(self, seq: Sequence, n: int, token_ids: ArrayLike | None = None) -> None:
        """The next `n` tokens are computed: publish full pages and checkpoints, release what slid out.

        Args:
            seq: the sequence that was reserved for.
            n: at most what was reserved; exactly that where the model has states, which cannot go back.
            token_ids: the ids of the tokens past those known so far.

        Raises:
            UsageError: more than was reserved, less where there are states, or ids missing or too many.
        """
        self._require_open(seq)
        self._commits.some(seq, n, token_ids)

    def commit_decode(self, seqs: Seq[Sequence], token_ids: Seq[int]) -> None:
        """One token of each sequence is computed; `token_ids[i]` is the token sequence i was fed.

        Raises:
            UsageError: a sequence that is not reserved for exactly one token, or lists of different lengths.
            TokenOutOfRange: an id that is no uint32. In either case nothing was committed.
        """
        self._commits.decode(seqs, token_ids)

    def commit_drafts(self, seq: Sequence, token_ids: ArrayLike) -> None:
        """End a step that `reserve_drafts` began: only what was right is ever published.

        Args:
            seq: the sequence that was reserved for.
            token_ids: the firm tokens and, behind them, the guesses that turned out right.

        A state cannot go back: where there are states and a guess was wrong, only the firm tokens count as computed.
        `seq.length` tells; the right guesses are firm tokens of the next step.

        Raises:
            UsageError: no reservation with drafts, fewer ids than are firm, or more than were reserved.
        """
        self._require_open(seq)
        self._commits.drafts(seq, token_ids)

    def add_breakpoint(self, seq: Sequence, tokens: int) -> None:
        """Make a resume point at this prefix length too, rounded down to a boundary, once the sequence gets there.

        Nothing happens if it is past that length already, or was opened without cache.

        Raises:
            RequestError: the length lies outside the tokens known so far.
            UsageError: a closed sequence.
        """
        self._require_open(seq)
        (tokens,) = boundaries.checked_breakpoints([tokens], seq.known)
        if seq.private:
            return
        seq.plan = boundaries.planned([*seq.plan, tokens], self.layout.boundary_tokens, seq.length)
        seq.capacity = 0

    def fork(self, seq: Sequence) -> Sequence:
        """A second sequence with the same tokens; pages are shared until one of the two writes to them.

        Raises:
            UsageError: between a reservation and its commit, or on a closed sequence.
        """
        self._require_open(seq)
        if seq.reserved:
            raise UsageError(f"cannot fork {seq!r} between a reservation and its commit")
        child = publication.fork(self._ledger, seq, self._next_id)
        self._next_id += 1
        self._open[child.id] = child
        return child

    def truncate(self, seq: Sequence, n: int) -> int:
        """Go back to `n` tokens, or to the longest shorter prefix every group can still resume after.

        Token groups go back exactly while they hold the pages; states only to a checkpoint. Tokens up to `n` stay
        known, so what lies between is recomputed by the next `reserve` and `commit`.

        Returns:
            The new length, at most `n`.

        Raises:
            UsageError: `n` is negative or past the computed length.
        """
        self._require_open(seq)
        if not 0 <= n <= seq.length:
            raise UsageError(f"cannot truncate to {n} tokens: {seq.length} are computed")
        return publication.truncate(self._ledger, seq, n)

    def close(self, seq: Sequence, cache: bool = True) -> None:
        """End a request. With `cache`, its end becomes a resume point; without, what only it made is freed.

        Closing with an open reservation is safe: nothing of the unfinished step is published.
        """
        self._require_open(seq)
        if cache:
            publication.keep_end(self._ledger, seq)
        release_pages(self._ledger, seq, keep=cache)
        self._ledger.index.unhold(int(seq.rows[seq.units - 1]) if seq.units else -1)
        seq.closed = True
        seq.reserved = seq.capacity = seq.firm = 0
        del self._open[seq.id]

    def token_pages(self, seq: Sequence, group: int) -> TokenPages:
        """Pages and slots of a token group; read it after every reservation of the step was made."""
        return reservation.token_pages(self._ledger, seq, group)

    def state_pages(self, seq: Sequence, group: int) -> StatePages:
        """Working slot and checkpoint slots of a state group, for the reserved tokens.

        Raises:
            UsageError: nothing was reserved yet, so there is no working state.
        """
        return reservation.state_pages(self._ledger, seq, group)

    def take_copies(self) -> list[PageCopy]:
        """Page copies to run, in order, before the next forward pass; the list is handed over once."""
        return self._ledger.take_copies()

    def free_slots(self, group: int) -> NDArray[np.int64]:
        """Slots nobody owns, once the copies have run (poison mode fills them with NaN)."""
        return self._ledger.pool.free_slots(group)

    def tokens_that_fit(self) -> int:
        """The longest single request that an otherwise empty pool can hold, computed one token at a time."""
        return tokens_that_fit(self.layout)

    def evict(self, nbytes: int) -> int:
        """Drop about `nbytes` of cached pages, least valuable first; returns the bytes dropped."""
        return self._ledger.evict(nbytes)

    def resume_points(self) -> tuple[int, ...]:
        """Prefix lengths, in tokens, of the resume points kept now, ascending."""
        return tuple(sorted(point.tokens for point in self._ledger.retention.points))

    def usage(self) -> audit.Usage:
        """Bytes and pages by group and by state."""
        return audit.usage(self._ledger)

    def counters(self) -> audit.Counters:
        """Evictions and moves so far."""
        return audit.counters(self._ledger)

    def missing_groups(self, seq: Sequence, tokens: int) -> tuple[int, ...]:
        """Numbers of the groups that keep a new request from resuming after this many of the tokens of `seq`.

        Raises:
            UsageError: no multiple of `layout.boundary_tokens` within the whole units known of `seq`.
        """
        return audit.missing_groups(self._ledger, seq.digests, tokens)

    def check(self) -> None:
        """Walk every invariant of pool, index, resume points and sequences.

        Raises:
            IntegrityError: one does not hold, which is a bug.
        """
        audit.check(self._ledger, self._open.values())

    def _require_open(self, seq: Sequence) -> None:
        if seq.closed or self._open.get(seq.id) is not seq:
            raise UsageError(f"{seq!r} is closed or belongs to another manager")
