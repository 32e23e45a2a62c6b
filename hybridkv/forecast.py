"""Whether running sequences could grow to given lengths together."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np

from hybridkv.holding import step_pages
from hybridkv.ledger import Ledger
from hybridkv.sequence import Sequence


def fits_grown(ledger: Ledger, wants: Seq[tuple[Sequence, int]]) -> bool:
    """Whether these distinct sequences, grown to these lengths, fit beside everything else that is live.

    What is cached counts as room, and pages that several sequences share count once. Checkpoints, copies of states
    made while decoding, and the pages that a window needs only while a chunk is computed are left out: all of these
    give way under pressure.
    """
    lengths = np.array([length for _, length in wants], np.int64)
    demand = []
    for g, group in enumerate(ledger.layout.groups):
        if group.is_state:
            pages = (seq.working[g] for seq, _ in wants)
            demand.append(sum(page < 0 or not ledger.is_writable(g, page) for page in pages))
            continue
        final = step_pages(group, np.maximum(lengths - 1, 0))
        held = np.array([len(seq.table(g).held()) for seq, _ in wants], np.int64)
        demand.append(int(np.maximum(final - held, 0).sum()))
    return ledger.pool.fits_live(demand)
