"""Replay against the real manager: hits as counted by hand, losses under the right group, requests that overlap."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from hybridkv.errors import ConfigError
from hybridkv.manager import GroupManager
from hybridkv.retention import Victims
from hybridkv.sim.caches import ManagerCache
from hybridkv.sim.generators import generated
from hybridkv.sim.replay import Service, replay
from hybridkv.sim.requests import Request, Trace, bytes_per_token, summarize
from hybridkv.sim.runs import POLICIES, Options, pool_size, simulate, simulate_unbounded
from tests.manager_cases import STATE, decode, hybrid, tokens_only
from tests.strategies import attention, compute, groups_of, state

GROUPS = groups_of(attention(), attention("sliding_attention", window=9), state())
SMALL = Options(checkpoint_interval=64, unit_tokens=4)
CHAT = "chat:users=5,turns=4,systems=1,system=40,question=13,answer=18"


def request(tokens: list[int], output: int = 0, arrival: float = 0.0) -> Request:
    return Request(arrival, np.array(tokens, np.uint32), np.arange(900, 900 + output, dtype=np.uint32))


def longest_known(trace: Trace, unit: int) -> list[int]:
    """For every request, the whole units at its head that an earlier one computed, short of its last token."""
    computed: list[np.ndarray] = []
    best = []
    for one in trace:
        most = 0
        for other in computed:
            n = min(len(one.tokens) - 1, len(other))
            differ = np.flatnonzero(one.tokens[:n] != other[:n])
            most = max(most, int(differ[0]) if len(differ) else n)
        best.append(most // unit * unit)
        computed.append(np.concatenate((one.tokens, one.output[:-1])))
    return best


def test_a_resend_hits_all_but_its_last_unit() -> None:
    text = list(range(41))
    counts = replay(ManagerCache(hybrid()), [request(text), request(text), request([*text, 99])], Service())
    assert counts.hits == (0, 40, 40)
    assert (counts.requests, counts.prompt_tokens, counts.hit_tokens) == (3, 124, 80)
    assert counts.computed_tokens == 124 - 80
    assert counts.hit_rate == 80 / 124


@pytest.mark.parametrize("chunk", [7, 2048])
@pytest.mark.parametrize("workload", [CHAT, "tree:problems=2,problem=50,thought=9", "noise:requests=9,length=60"])
def test_token_groups_hit_all_that_was_computed_before(workload: str, chunk: int) -> None:
    trace = generated(workload)
    counts = replay(ManagerCache(tokens_only(20_000)), trace, Service(chunk_tokens=chunk))
    assert list(counts.hits) == longest_known(trace, 4)
    assert counts.counters == (0, 0, 0)
    fed = sum(len(one.tokens) + max(len(one.output) - 1, 0) for one in trace)
    assert counts.computed_tokens + counts.hit_tokens == fed


@pytest.mark.parametrize("policy", POLICIES)
def test_a_large_pool_has_the_hits_of_an_unbounded_one_and_a_small_one_explains_what_it_lost(policy: str) -> None:
    trace = generated(CHAT)
    summary = summarize(trace)
    best = simulate_unbounded(trace, GROUPS, summary, policy, SMALL)
    assert best.counters.evicted_pages == 0
    assert 0 < best.hit_tokens <= sum(longest_known(trace, 4))
    large = simulate(trace, GROUPS, 2**22, policy, SMALL, unbounded=best)
    assert large.hits == best.hits
    assert large.lost == {}
    assert large.unbounded_hit_rate == large.hit_rate
    small = simulate(trace, GROUPS, 6000, policy, SMALL, unbounded=best)
    assert small.refused == 0
    assert small.counters.evicted_pages > 0
    assert sum(small.lost.values()) == sum(max(b - s, 0) for b, s in zip(best.hits, small.hits, strict=True)) > 0
    assert small.unbounded_hit_tokens == small.hit_tokens + sum(small.lost.values())


def test_a_loss_counts_under_the_layers_that_lacked_a_page() -> None:
    manager = hybrid()
    text = list(range(41))

    def requests() -> Iterator[Request]:
        yield request(text)
        ledger = manager._ledger
        for point in ledger.retention.points:
            ledger.retention.drop(point.row)
        states = np.flatnonzero(ledger.index.row_of[STATE] >= 0)
        ledger.lose([Victims(STATE, states)])
        yield request(text)
        manager.evict(2**40)
        yield request(text)
        yield request(text)

    counts = replay(ManagerCache(manager), requests(), Service(), unbounded=[0, 40, 40, 40])
    assert counts.hits == (0, 0, 0, 40)
    assert counts.lost == {"linear_attention": 40, "full_attention+sliding_attention+linear_attention": 40}
    assert counts.unbounded_hit_tokens == 120


@pytest.mark.parametrize("output", [1, 2, 30, 64, 65, 200])
def test_decoding_in_strides_leaves_what_single_tokens_leave(output: int) -> None:
    text = list(range(50))
    strided, single = (hybrid(400, decode_checkpoint_interval=64) for _ in range(2))
    replay(ManagerCache(strided), [request(text, output)], Service())
    seq = single.open(np.array(text, np.uint32))
    compute(single, seq)
    decode(single, seq, output - 1)
    single.close(seq)
    assert strided.resume_points() == single.resume_points()
    assert [group.cached_pages for group in strided.usage().groups] == [
        group.cached_pages for group in single.usage().groups
    ]


def test_requests_hit_what_is_computed_when_they_arrive() -> None:
    text = list(range(41))
    timed = Service(prefill_rate=100.0, decode_rate=10.0, max_running=2, timed=True)
    together = replay(ManagerCache(hybrid()), [request(text), request(text)], timed)
    apart = replay(ManagerCache(hybrid()), [request(text), request(text, arrival=0.5)], timed)
    one_by_one = Service(prefill_rate=100.0, decode_rate=10.0, max_running=1, timed=True)
    queued = replay(ManagerCache(hybrid()), [request(text), request(text)], one_by_one)
    assert (together.hits, apart.hits, queued.hits) == ((0, 0), (0, 40), (0, 40))


@pytest.mark.parametrize("policy", ["lru", "cost"])
def test_overlapping_requests_make_room_for_each_other_and_all_end(policy: str) -> None:
    manager = GroupManager(GROUPS, 8000, unit_tokens=4, policy=policy, checkpoint_interval=64)
    trace = generated("chat:users=8,turns=3,systems=1,system=40,question=13,answer=80,rate=100")
    ended = []
    service = Service(prefill_rate=1000.0, decode_rate=50.0, max_running=6, chunk_tokens=16, timed=True)
    counts = replay(ManagerCache(manager), trace, service, progress=lambda: ended.append(len(manager.running)))
    manager.check()
    assert (counts.requests, counts.refused, len(ended)) == (24, 0, 24)
    assert max(ended) > 1
    assert counts.preemptions > 0
    assert manager.running == ()
    assert manager.usage().live_bytes == 0
    fed = sum(len(one.tokens) + len(one.output) - 1 for one in trace)
    assert counts.computed_tokens + counts.hit_tokens >= fed


def test_a_preempted_request_goes_on_from_what_is_left_of_its_prompt_and_output() -> None:
    service = Service(prefill_rate=1000.0, decode_rate=100.0, max_running=2, chunk_tokens=20, timed=True)
    pair = [request(list(range(i, i + 20)), output) for i, output in ((100, 110), (200, 150))]
    counts = replay(ManagerCache(tokens_only(39)), pair, service)
    assert (counts.requests, counts.preemptions) == (2, 1)
    fed = sum(len(one.tokens) + len(one.output) - 1 for one in pair)
    assert counts.computed_tokens == fed + counts.recomputed_tokens
    assert 0 < counts.recomputed_tokens < 40, "it had decoded more than that"


def test_a_request_that_does_not_fit_alone_is_refused_and_counts_nowhere_else() -> None:
    manager = tokens_only(8)
    most = manager.tokens_that_fit()
    long = list(range(most + 40))
    for timed in (False, True):
        counts = replay(ManagerCache(tokens_only(8)), [request(long), request(long[:20])], Service(timed=timed))
        assert (counts.requests, counts.refused, counts.prompt_tokens) == (1, 1, 20)


def test_a_replay_gives_the_same_counts_again() -> None:
    trace = generated(CHAT)
    for policy in POLICIES:
        options = Options(64, 4, service=Service(max_running=4, timed=True))
        one, two = (simulate(trace, GROUPS, 8000, policy, options) for _ in range(2))
        assert one._replace(cpu=two.cpu) == two
        assert min(one.cpu.open, one.cpu.prefill, one.cpu.decode, one.cpu.close) > 0
        assert one.unbounded_hit_rate is None


def test_a_share_is_of_the_unique_bytes_in_full_attention() -> None:
    summary = summarize(generated("noise:requests=3,length=400"))
    assert bytes_per_token(GROUPS) == 16
    assert pool_size("50%", GROUPS, summary) == summary.unique_tokens * 8
    assert pool_size("1MiB", GROUPS, summary) == 2**20
    assert bytes_per_token(groups_of(attention("sliding_attention", window=8), state())) == 16
    with pytest.raises(ConfigError, match="name the pool in bytes"):
        pool_size("5%", groups_of(state()), summary)
    with pytest.raises(ConfigError, match="unknown policy 'best'"):
        simulate(generated("noise"), GROUPS, 2**20, "best", SMALL)
    with pytest.raises(ConfigError, match="must be above 0"):
        Service(decode_rate=0.0)
