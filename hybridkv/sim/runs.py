"""Replays of one trace over several pools and policies, with the unbounded pool they are compared with."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field

from hybridkv.config import MAX_BYTES, parse_bytes
from hybridkv.entries import LayerGroup
from hybridkv.errors import ConfigError
from hybridkv.layout import plan_layout
from hybridkv.manager import GroupManager
from hybridkv.sim.caches import Cache, ManagerCache
from hybridkv.sim.pages import DECODE_INTERVAL, PagesCache
from hybridkv.sim.replay import Service, replay
from hybridkv.sim.requests import Summary, Trace, bytes_per_token
from hybridkv.sim.results import Replay

BASELINE = "pages"
POLICIES = ("lru", "cost", BASELINE)

_PERCENT = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*%", re.ASCII)


@dataclass(frozen=True, slots=True)
class Options:
    """What all replays of a comparison share.

    Attributes:
        checkpoint_interval: tokens between resume points inside a long prompt, None for none.
        unit_tokens: hash granularity.
        hash: of the manager's digests.
        service: how requests overlap.
    """

    checkpoint_interval: int | None = 4096
    unit_tokens: int = 16
    hash: str = "sha256"
    service: Service = field(default_factory=Service)


def pool_size(text: str, groups: tuple[LayerGroup, ...], summary: Summary) -> int:
    """Bytes of a pool written as a size, or as a share such as "15%" of the trace's unique bytes: its unique tokens
    times the bytes a token keeps for good, in full-attention layers where the model has any.

    Raises:
        ConfigError: text that is neither.
    """
    match = _PERCENT.fullmatch(text.strip())
    if match is None:
        return parse_bytes(text)
    nbytes = round(summary.unique_tokens * bytes_per_token(groups) * float(match[1]) / 100)
    if not 0 < nbytes <= MAX_BYTES:
        raise ConfigError(f"a pool of {text} of the trace's unique bytes is {nbytes:,} bytes; that cannot be")
    return nbytes


def simulate(
    trace: Trace,
    groups: tuple[LayerGroup, ...],
    pool_bytes: int,
    policy: str,
    options: Options,
    *,
    unbounded: Replay | None = None,
    progress: Callable[[], object] = lambda: None,
) -> Replay:
    """One replay.

    Args:
        trace: the requests.
        groups: the layer groups of a model.
        pool_bytes: the budget.
        policy: "lru" or "cost" of the manager, or "pages" for the baseline.
        options: the rest.
        unbounded: the replay of the same trace by `simulate_unbounded`.
        progress: called at the end of every request.

    Raises:
        ConfigError: an unknown policy, a pool that is too small, or options that cannot be.
    """
    cache = _cache(groups, pool_bytes, policy, options)
    return replay(cache, trace, options.service, unbounded.hits if unbounded else None, progress)


def simulate_unbounded(
    trace: Trace,
    groups: tuple[LayerGroup, ...],
    summary: Summary,
    policy: str,
    options: Options,
    progress: Callable[[], object] = lambda: None,
) -> Replay:
    """The replay in a pool that holds whatever the trace can leave behind, so that nothing is ever evicted.

    Raises:
        ConfigError: options that cannot be.
    """
    cache = _cache(groups, _room(groups, summary, options), policy, options)
    return replay(cache, trace, options.service, None, progress)


def _cache(groups: tuple[LayerGroup, ...], pool_bytes: int, policy: str, options: Options) -> Cache:
    if policy not in POLICIES:
        raise ConfigError(f"unknown policy {policy!r}; choose one of {', '.join(POLICIES)}")
    if policy == BASELINE:
        layout = plan_layout(groups, pool_bytes, options.unit_tokens)
        return PagesCache(layout, options.checkpoint_interval)
    return ManagerCache(
        GroupManager(
            groups,
            pool_bytes,
            unit_tokens=options.unit_tokens,
            hash=options.hash,
            policy=policy,
            checkpoint_interval=options.checkpoint_interval,
            decode_checkpoint_interval=DECODE_INTERVAL,
        )
    )


def _room(groups: tuple[LayerGroup, ...], summary: Summary, options: Options) -> int:
    """Bytes that suffice for every page the trace can make, and for all that runs."""
    running = options.service.max_running if options.service.timed else 1
    tokens = summary.unique_tokens + summary.output_tokens + running * summary.longest
    states = 6 * (summary.requests + running)
    if options.checkpoint_interval:
        states += summary.prompt_tokens // options.checkpoint_interval
    total = 0
    for group in groups:
        pages = states if group.is_state else tokens // group.page_tokens + 2 * (summary.requests + running)
        total += pages * group.page_bytes
    largest = max(group.page_bytes for group in groups)
    return total + total // 50 + 256 * largest * len(groups)
