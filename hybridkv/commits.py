"""Counting reserved tokens as computed: all of them, a part, one each of a batch, or those drafts that were right."""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Seq

import numpy as np
from numpy.typing import ArrayLike

from hybridkv import publication, reservation
from hybridkv.errors import TokenOutOfRange, UsageError
from hybridkv.hashing import checked_tokens
from hybridkv.ledger import Ledger
from hybridkv.sequence import Sequence, as_tokens


class Commits:
    """What the manager's commit methods do.

    Args:
        ledger: the books.
        algorithm: of the digests.
        interval: tokens between copies of a decoding sequence's states, or None.
    """

    def __init__(self, ledger: Ledger, algorithm: str, interval: int | None) -> None:
        self._ledger = ledger
        self._algorithm = algorithm
        self._interval = interval

    def some(self, seq: Sequence, n: int, token_ids: ArrayLike | None) -> None:
        """The next `n` tokens; see `GroupManager.commit`."""
        if seq.firm:
            raise UsageError(f"{seq!r} is reserved with drafts; commit_drafts() says which of them were right")
        if not 0 < n <= seq.reserved:
            raise UsageError(f"cannot commit {n} tokens: {seq.reserved} are reserved")
        if n < seq.reserved and self._ledger.states:
            raise UsageError(
                f"cannot commit {n} of {seq.reserved} reserved tokens: the states have advanced past them; "
                "truncate() goes back to a checkpoint; reserve what you commit, or use reserve_drafts()"
            )
        fresh = max(seq.length + n - seq.known, 0)
        given = checked_tokens([] if token_ids is None else np.atleast_1d(np.asarray(token_ids)))
        if len(given) != fresh:
            raise UsageError(
                f"commit needs the ids of {fresh} new tokens, got {len(given)}: {seq.known} tokens are known and "
                f"{seq.length + n} will be computed"
            )
        if fresh:
            seq.tokens.extend(as_tokens(given))
        self._advance(seq, n)
        if n > 1:
            reservation.sweep(self._ledger, [seq])

    def decode(self, seqs: Seq[Sequence], token_ids: Seq[int]) -> None:
        """One token of each sequence; see `GroupManager.commit_decode`."""
        if len(seqs) != len(token_ids):
            raise UsageError(f"got {len(token_ids)} token ids for {len(seqs)} sequences")
        for seq in seqs:
            if seq.reserved != 1:
                raise UsageError(f"{seq!r} is reserved for {seq.reserved} tokens; a decode step commits exactly 1")
        try:
            fed = array("I", token_ids)
        except (TypeError, OverflowError) as error:
            raise TokenOutOfRange(f"token ids must be integers in [0, 2**32), got {list(token_ids)}") from error
        unit = self._ledger.layout.unit_tokens
        for seq, token in zip(seqs, fed, strict=True):
            if len(seq.tokens) == seq.length:
                seq.tokens.append(token)
            if (seq.length + 1) % unit:
                seq.length += 1
                seq.reserved = 0
            else:
                self._advance(seq, 1)

    def drafts(self, seq: Sequence, token_ids: ArrayLike) -> None:
        """The firm tokens and the drafts behind them that were right; see `GroupManager.commit_drafts`."""
        if not seq.firm:
            raise UsageError(f"{seq!r} is not reserved with drafts; use commit()")
        given = checked_tokens(np.atleast_1d(np.asarray(token_ids)))
        right = len(given)
        if not seq.firm <= right <= seq.reserved:
            raise UsageError(
                f"{right} tokens cannot be right: {seq.firm} are certain and {seq.reserved} were computed for {seq!r}"
            )
        known = seq.tokens[seq.length : seq.length + right]
        if known.tolist() != given[: len(known)].tolist():
            raise UsageError(f"{seq!r} knows other tokens than those that are said to be right")
        kept = right if right == seq.reserved or not self._ledger.states else seq.firm
        end = seq.length + right
        if kept == seq.reserved:
            reservation.adopt_spare(self._ledger, seq)
        else:
            reservation.drop_spare(self._ledger, seq)
        if kept > len(known):
            seq.tokens.extend(as_tokens(given[len(known) : kept]))
        seq.firm = 0
        self._advance(seq, kept)
        reservation.shrink(self._ledger, seq, end)
        reservation.sweep(self._ledger, [seq])

    def _advance(self, seq: Sequence, n: int) -> None:
        publication.advance(self._ledger, seq, n, self._algorithm)
        interval = self._interval
        if interval and seq.length > seq.prompt_tokens and seq.length % interval == 0 and not seq.private:
            reservation.snapshot(self._ledger, seq)
