"""What a paged cache holds of a model and of a pool, given back when it is closed or garbage collected."""

from __future__ import annotations

import weakref

from hybridkv.errors import UsageError
from hybridkv.hf.mixers import MixerHooks
from hybridkv.hf.resume import ScanHooks
from hybridkv.hf.runner import ModelRunner
from hybridkv.sequence import Sequence as Request


class Lease:
    """Hooks on a runner's model, and the rows of one cache in its pool.

    Args:
        runner: whose model and pool they are.
        rows: the cache's requests, always in this one list.
        owned: the runner is the cache's own and ends with it.

    Raises:
        UsageError: the runner is closed.
    """

    def __init__(self, runner: ModelRunner, rows: list[Request], *, owned: bool) -> None:
        if runner.closed:
            raise UsageError("the runner is closed; make a new one, or leave it out")
        scans = ScanHooks(runner.model)
        # What the finalizer holds must not lead to the model, because the model may lead to the cache.
        hooks: list[ScanHooks | MixerHooks] = [scans, runner.hooks] if owned else [scans]
        self._runner = runner
        self._finalizer = weakref.finalize(self, _give_back, hooks, rows, runner.abandoned)
        self._finalizer.atexit = False

    @property
    def ended(self) -> bool:
        return not self._finalizer.alive

    def check(self) -> None:
        """Refuse to go on where nobody would continue the layers' states any more.

        Raises:
            UsageError: the lease has ended, or the runner is closed.
        """
        if self.ended:
            raise UsageError("this cache is closed; make a new one with hybridkv.paged_cache(model)")
        if self._runner.closed:
            raise UsageError(
                "the engine or runner whose pool this cache shares is closed; make a new cache, with "
                "hybridkv.paged_cache(model) or from an open engine"
            )

    def end(self) -> None:
        """Give the model its own functions back. Calling it again changes nothing."""
        self._finalizer()


def _give_back(hooks: list[ScanHooks | MixerHooks], rows: list[Request], abandoned: list[Request]) -> None:
    # Garbage collection may come in the middle of the manager's work, so rows only queue up to be closed.
    abandoned.extend(rows)
    for hook in hooks:
        hook.close()
