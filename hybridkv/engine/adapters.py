"""Requests whose adapter went away, or cannot be computed any more, end without taking others with them."""

from __future__ import annotations

from hybridkv.engine.scheduler import Scheduler
from hybridkv.hf.adapters import Adapters


def end_without_adapter(scheduler: Scheduler, adapters: Adapters) -> None:
    """End, between two steps, the requests whose adapter has a problem; it becomes their `error`."""
    requests = scheduler.requests
    broken = {key for key in {request.adapter for request in requests} if adapters.problem(key) is not None}
    for request in requests:
        if request.adapter in broken:
            request.head.error = adapters.problem(request.adapter)
            scheduler.drop(request)
