"""Any history of calls on a manager, with every invariant checked after each and every read checked for content.

The `Server` of tests/shadow.py is the oracle: it runs copies, poisons free slots, and compares each row and state that
a forward pass reads, and every published page, with what the tokens imply.
"""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from hybridkv.manager import GroupManager
from hybridkv.retention import Victims
from tests.shadow import Request, Server
from tests.strategies import examples, managers, prompts

MOST_RUNNING = 6
some = st.integers(0, 2**16)


class ManagerMachine(RuleBasedStateMachine):
    """A serving loop that does everything a caller may do, in any order."""

    server: Server

    @initialize(manager=managers())
    def start(self, manager: GroupManager) -> None:
        self.server = Server(manager)
        self.has_states = any(group.is_state for group in manager.groups)

    @property
    def ready(self) -> list[Request]:
        """Requests that are not in the middle of a step that ran."""
        return [request for request in self.server.live if not request.ran]

    @precondition(lambda self: len(self.server.live) < MOST_RUNNING)
    @rule(
        tokens=prompts(),
        salt=st.sampled_from([None, None, "a", "b"]),
        adapter=st.sampled_from([None, None, "a", "b"]),
        image=st.none() | st.tuples(some, st.sampled_from("xy")),
        breakpoint=st.none() | some,
        cache=st.sampled_from([True, True, False]),
    )
    def open(
        self,
        tokens: list[int],
        salt: str | None,
        adapter: str | None,
        image: tuple[int, str] | None,
        breakpoint: int | None,
        cache: bool,
    ) -> None:
        self.server.open(
            tokens,
            salt=salt,
            adapter=adapter,
            images=((image[0] % len(tokens), image[1]),) if image else (),
            breakpoints=() if breakpoint is None else (breakpoint % (len(tokens) + 1),),
            cache=cache,
        )

    @precondition(lambda self: self.ready)
    @rule(picks=st.lists(st.tuples(some, st.sampled_from([1, 2, 3, 5, 8, 100])), min_size=1, max_size=4))
    def prefill(self, picks: list[tuple[int, int]]) -> None:
        """A batch of chunks; past its known tokens a request computes one or two that were sampled."""
        wants = {}
        for pick, n in picks:
            request = self.ready[pick % len(self.ready)]
            rest = request.seq.known - request.seq.length
            wants[request] = min(n, rest) if rest else min(n, 2)
        self.server.step(wants.items())

    @precondition(lambda self: self.ready)
    @rule(pick=some, steps=st.integers(1, 12), token=st.integers(0, 1))
    def decode(self, pick: int, steps: int, token: int) -> None:
        """A few batched decode steps over some of the requests."""
        batch = [request for i, request in enumerate(self.ready) if pick >> i & 1]
        for _ in range(steps if batch else 0):
            if not self.server.decode(batch, [token] * len(batch)):
                break

    @precondition(lambda self: self.ready)
    @rule(pick=some, n=st.integers(1, 9), runs=st.booleans(), accepted=st.none() | some)
    def speculate(self, pick: int, n: int, runs: bool, accepted: int | None) -> None:
        """A step that is given up before or after its forward pass, or committed in part where nothing forbids it."""
        request = self.ready[pick % len(self.ready)]
        if self.server.reserve(request, n) and runs:
            self.server.forward([request])
            if accepted is not None and not self.has_states:
                self.server.commit(request, 1 + accepted % n)

    @precondition(lambda self: self.ready)
    @rule(pick=some, drafts=st.integers(1, 9), right=st.none() | st.just(9) | some, runs=st.booleans())
    def draft(self, pick: int, drafts: int, right: int | None, runs: bool) -> None:
        """A step with guesses behind the known tokens; some are right, or the step is given up halfway."""
        request = self.ready[pick % len(self.ready)]
        firm = max(1, request.seq.known - request.seq.length)
        granted = self.server.draft(request, firm, drafts)
        if granted and runs:
            self.server.forward([request])
            if right is not None:
                self.server.verify(request, firm, min(granted, right) if right == 9 else right % (granted + 1))

    @precondition(lambda self: 0 < len(self.server.live) < MOST_RUNNING)
    @rule(pick=some)
    def fork(self, pick: int) -> None:
        idle = [request for request in self.server.live if not request.seq.reserved]
        if idle:
            self.server.fork(idle[pick % len(idle)])

    @precondition(lambda self: self.server.live)
    @rule(pick=some, back=st.integers(0, 5) | some)
    def truncate(self, pick: int, back: int) -> None:
        request = self.server.live[pick % len(self.server.live)]
        length = request.seq.length
        self.server.truncate(request, length - back % (length + 1))

    @precondition(lambda self: self.server.live)
    @rule(pick=some, cache=st.booleans())
    def close(self, pick: int, cache: bool) -> None:
        self.server.close(self.server.live[pick % len(self.server.live)], cache=cache)

    @rule(share=st.sampled_from([1, 50, 8, 2]))
    def evict(self, share: int) -> None:
        before = self.server.manager.usage()
        freed = self.server.manager.evict(max(1, before.pool_bytes // share))
        after = self.server.manager.usage()
        assert after.cached_bytes == before.cached_bytes - freed
        assert after.live_bytes == before.live_bytes

    @rule(pick=some)
    def lose_a_page(self, pick: int) -> None:
        """Any one cached page, whoever needs it."""
        ledger = self.server.manager._ledger
        cached = [
            (g, page)
            for g, pages in enumerate(ledger.pool.groups)
            for page in ((pages.refs == 0) & (pages.slot >= 0)).nonzero()[0]
        ]
        if cached:
            g, page = cached[pick % len(cached)]
            ledger.retention.drop_needing(g, int(page))
            ledger.lose([Victims(g, page.reshape(1))])

    @rule()
    def run_copies(self) -> None:
        self.server.run_copies()

    @precondition(lambda self: hasattr(self, "server"))
    @invariant()
    def every_invariant_holds(self) -> None:
        self.server.manager.check()

    def teardown(self) -> None:
        if hasattr(self, "server"):
            for request in list(self.server.live):
                self.server.close(request, cache=bool(request.seq.id % 2))
            self.server.manager.check()
            self.server.run_copies()
            usage = self.server.manager.usage()
            assert usage.live_bytes == 0, "a request leaked a page"
            assert usage.cached_bytes + usage.free_bytes == usage.pool_bytes


def test_any_history_of_calls() -> None:
    run_state_machine_as_test(ManagerMachine, settings=settings(max_examples=examples(0.6), stateful_step_count=40))
