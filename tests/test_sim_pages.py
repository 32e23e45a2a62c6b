"""The baseline: one list of pages, where a page is as good as any other."""

from __future__ import annotations

import numpy as np
import pytest

from hybridkv.errors import OutOfPages
from hybridkv.layout import plan_layout
from hybridkv.manager import GroupManager
from hybridkv.sim.caches import ManagerCache
from hybridkv.sim.generators import generated
from hybridkv.sim.pages import PagesCache
from hybridkv.sim.replay import Service, replay
from tests.strategies import attention, groups_of, state

TOKENS = groups_of(attention(), attention("sliding_attention", window=9))
HYBRID = groups_of(attention(), attention("sliding_attention", window=9), state())
TEXT = np.arange(41, dtype=np.uint32)
NONE = np.zeros(0, np.uint32)


def pages(groups: object = HYBRID, nbytes: int = 2**16, interval: int | None = None) -> PagesCache:
    return PagesCache(plan_layout(groups, nbytes, 4), interval)  # type: ignore[arg-type]


def serve(cache: PagesCache, tokens: np.ndarray) -> int:
    lease = cache.open(tokens)
    lease.compute(len(tokens) - lease.length, NONE)
    lease.close(keep=True)
    return int(lease.hit_tokens)


def hit(cache: PagesCache, tokens: np.ndarray) -> int:
    lease = cache.open(tokens)
    lease.close(keep=True)
    return int(lease.hit_tokens)


@pytest.mark.parametrize("group", [0, 1, 2])
def test_one_evicted_page_loses_the_whole_hit_with_everything_else_still_cached(group: int) -> None:
    cache = pages()
    serve(cache, TEXT)
    assert hit(cache, TEXT) == 40
    digest = cache.open(TEXT)._digest(group, cache.open(TEXT)._needed(group, 40)[0])
    fresh = pages()
    serve(fresh, TEXT)
    del fresh.idle[group, digest]
    lease = fresh.open(TEXT)
    assert lease.hit_tokens == 0
    assert lease.missing(40) == (HYBRID[group].kind,)


def test_without_states_and_evictions_it_hits_what_the_manager_hits() -> None:
    trace = generated("chat:users=4,turns=4,systems=1,system=40,question=13,answer=70")
    manager = ManagerCache(GroupManager(TOKENS, 2**20, unit_tokens=4))
    service = Service(chunk_tokens=24)
    assert replay(pages(TOKENS, 2**20), trace, service).hits == replay(manager, trace, service).hits


def test_states_are_kept_at_the_interval_at_the_end_of_the_prompt_and_of_the_output() -> None:
    cache = pages(interval=16)
    lease = cache.open(TEXT)
    lease.compute(len(TEXT), NONE)
    lease.compute(64 - 41, np.arange(100, 123, dtype=np.uint32))
    lease.compute(3, np.arange(123, 126, dtype=np.uint32))
    lease.close(keep=True)
    said = np.concatenate((TEXT, np.arange(100, 130, dtype=np.uint32)))
    assert [hit(cache, said[:n]) for n in (16, 17, 40, 41, 64, 65, 70)] == [0, 16, 32, 40, 40, 64, 64]


def test_a_state_that_was_passed_by_a_hit_is_not_there() -> None:
    cache = pages(interval=16)
    serve(cache, TEXT)
    passed = cache.open(TEXT)._digest(2, 3)
    fresh = pages(interval=16)
    serve(fresh, TEXT)
    del fresh.idle[2, passed]
    assert serve(fresh, np.append(TEXT, np.uint32(9))) == 40
    assert hit(fresh, TEXT[:17]) == 0
    assert hit(fresh, TEXT[:33]) == 32


def test_what_is_shared_counts_once_and_nothing_is_live_when_all_are_closed() -> None:
    cache = pages()
    one, two = cache.open(TEXT), cache.open(TEXT)
    for lease in (one, two):
        lease.compute(len(TEXT), NONE)
    assert cache.live[0] == 10 + 2, "ten whole pages together, and a half-full one each"
    one.close(keep=True)
    two.close(keep=False)
    assert cache.live == [0, 0, 0]
    counted = [sum(g == group for g, _ in cache.idle) for group in range(3)]
    assert counted == cache.cached
    assert cache.held()["full_attention"] == (0, 10 * cache.strides[0])


def test_the_oldest_request_goes_first_and_of_it_the_tail_before_the_head() -> None:
    cache = pages(groups_of(attention()), 20 * 64)
    other = TEXT + 100
    serve(cache, TEXT[:40])
    serve(cache, other[:40])
    assert cache.evicted == 0
    serve(cache, np.arange(500, 508, dtype=np.uint32))
    assert cache.evicted == 2
    assert hit(cache, TEXT) == 32
    assert hit(cache, other) == 40


def test_what_does_not_fit_beside_running_requests_is_refused_and_changes_nothing() -> None:
    cache = pages(groups_of(attention()), 12 * 64)
    serve(cache, TEXT[:8])
    lease = cache.open(TEXT + 100)
    lease.compute(40, NONE)
    before = (list(cache.live), list(cache.cached), cache.evicted)
    with pytest.raises(OutOfPages, match="running requests hold 640"):
        cache.open(TEXT + 200).compute(12, NONE)
    assert (cache.live, cache.cached, cache.evicted) == before
