"""Model checking: scheduler and cache together on tagged memory, with aborts, preemption, tiny pools.

What is demanded after every step: a clean audit, no read of memory that another prefix wrote, progress of the
oldest; at the end: every request has its one terminal event, and the text of each is the one that follows from
its prompt alone.
"""

from math import lcm

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test

from milepost.core import checkpoint as cp
from milepost.core.checkpoint import LEVELS, Cap, CheckpointPolicy, Reason, with_cap
from milepost.core.request import Finish
from milepost.core.scheduler import Limits
from milepost.core.window import Windows
from milepost.errors import RequestError
from tests.harness import Harness

STEMS = [
    [1, 2, 0, 1, 2, 2, 0, 1, 1, 2, 0, 0, 1, 2, 1, 0, 2, 2, 1, 0],
    [1, 2, 0, 1, 2, 2, 0, 0, 0, 2, 0, 1, 1, 1, 1, 2, 2, 2, 2, 2],
    [2, 2, 2, 1, 0, 1, 0, 2, 0, 1, 2, 1, 2, 0, 0, 1, 0, 1, 0, 2],
]


def small(strategy: cp.SlotStrategy, grid: int) -> cp.SlotStrategy:
    """The strategy on a grid that short sequences reach."""
    from dataclasses import replace

    return replace(strategy, grid=lcm(grid, strategy.page))


STRATEGIES = [
    cp.EXACT,
    small(cp.STRICT, 4),
    small(cp.extra_buffer(1), 4),
    small(cp.extra_buffer(4), 4),
    small(cp.extra_buffer(2, overlap=False), 4),
    small(cp.extra_buffer_lazy(2), 4),
    cp.NO_BUFFER,
]
POLICIES = st.builds(
    CheckpointPolicy,
    st.sampled_from([*LEVELS.values(), LEVELS[2] | {Reason.PROMPT_END}, frozenset()]),
    st.integers(1, 6),
    st.sampled_from([None, 1, 2]),
)


class SchedulerMachine(RuleBasedStateMachine):
    harness: Harness | None = None

    @precondition(lambda self: self.harness is None)
    @rule(
        strategy=st.sampled_from(STRATEGIES),
        policy=POLICIES,
        cap=st.sampled_from([None, Cap.LAZY, Cap.EAGER]),
        pages=st.integers(2, 16),
        requests=st.integers(1, 4),
        extra=st.integers(0, 3),
        chunk=st.sampled_from([4, 8, 12]),
        reach=st.sampled_from([0, 0, 1, 3, 7]),
        more=st.sampled_from([1, 2, 5, 9, 20, 60]),
    )
    def boot(self, strategy, policy, cap, pages, requests, extra, chunk, reach, more):
        strategy = with_cap(strategy, cap, policy)
        self.harness = Harness(
            pages * 4,
            requests * strategy.reserved + extra,
            strategy=strategy,
            policy=policy,
            limits=Limits(3, chunk, 60),
            windows=Windows(strategy.windows * reach + more, reach) if reach else Windows(),
        )

    def submit(self, prompt, max_new, namespace="", keep=()):
        try:
            self.harness.submit(prompt, max_new, namespace=namespace, keep=keep)
        except RequestError as error:
            assert str(self.harness.scheduler.cache.rows.size // self.harness.scheduler.strategy.page) in str(error)

    @precondition(lambda self: self.harness)
    @rule(
        stem=st.sampled_from(STEMS),
        cut=st.integers(1, 20),
        tail=st.lists(st.integers(0, 2), max_size=3),
        max_new=st.integers(1, 12),
        namespace=st.sampled_from(["", "", "b"]),
        keep=st.sampled_from([(), (), (3,), (2, 9)]),
    )
    def new(self, stem, cut, tail, max_new, namespace, keep):
        self.submit(stem[:cut] + tail, max_new, namespace, keep)

    @precondition(lambda self: self.harness and self.harness.ends)
    @rule(index=st.integers(0, 99), extra=st.lists(st.integers(0, 2), min_size=1, max_size=4))
    def next_turn(self, index, extra):
        event = list(self.harness.ends.values())[index % len(self.harness.ends)]
        context = [*event.request.prompt[::4], *self.harness.texts[event.sequence]]
        self.submit(context + extra, 3, event.request.namespace)

    @precondition(lambda self: self.harness)
    @rule(span=st.sampled_from([1, 1, 4, 100]), times=st.integers(1, 4))
    def step(self, span, times):
        for _ in range(times):
            self.harness.step(span)

    @precondition(lambda self: self.harness and self.harness.scheduler.sequences)
    @rule(index=st.integers(0, 99))
    def abort(self, index):
        numbers = list(self.harness.scheduler.sequences)
        self.harness.abort(numbers[index % len(numbers)])

    @precondition(lambda self: self.harness and self.harness.scheduler.running())
    @rule(index=st.integers(0, 99))
    def preempt(self, index):
        running = self.harness.scheduler.running()
        self.harness.scheduler.preempt(running[index % len(running)])

    def teardown(self):
        if self.harness is None:
            return
        self.harness.drain(2_000)
        assert set(self.harness.ends) == set(self.harness.texts), "a request without an end"
        aborted = sum(event.finish is Finish.ABORT for event in self.harness.ends.values())
        assert aborted == self.harness.scheduler.counters.aborted_total
        self.harness.idle_check()


def test_scheduler_on_tagged_memory():
    run_state_machine_as_test(
        SchedulerMachine,
        settings=settings(
            max_examples=250,
            stateful_step_count=40,
            deadline=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda s: f"{s.name}-{s.page}-{s.grid}")
@pytest.mark.parametrize("level", [2, 3])
def test_exhaustion_sweep(strategy, level):
    """Pools of 1, 2, 3 … units: everyone finishes or is refused with a reason, nobody hangs."""
    for slots in range(strategy.reserved, strategy.reserved + 6):
        for pages in range(1, 14):
            harness = Harness(
                pages * strategy.page,
                slots,
                strategy=strategy,
                policy=CheckpointPolicy.level(level, 4),
                limits=Limits(4, 8, 100),
            )
            for stem in STEMS * 2:
                for cut in (3, 9, 17):
                    try:
                        harness.submit(stem[:cut], 6)
                    except RequestError as error:
                        assert str(pages) in str(error)
            harness.drain(3_000)
            assert set(harness.ends) == set(harness.texts)
            harness.idle_check()


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda s: f"{s.name}-{s.page}-{s.grid}")
@pytest.mark.parametrize("reach", [1, 5])
def test_exhaustion_sweep_over_three_pools(strategy, reach):
    """The least window pool and up, with little and with enough of the others."""
    for slots in (strategy.reserved, 2 * strategy.reserved + 1, 4 * strategy.reserved):
        for pages in (24 // strategy.page, 60 // strategy.page):
            for more in (1, 2, 3, 5, 8, 13, 21, 34):
                harness = Harness(
                    pages * strategy.page,
                    slots,
                    strategy=strategy,
                    policy=CheckpointPolicy.level(2, 4, windows=True),
                    limits=Limits(4, 8, 100),
                    windows=Windows(strategy.windows * reach + more, reach),
                )
                for stem in STEMS:
                    for cut in (3, 9, 17):
                        harness.submit(stem[:cut], 6)
                harness.drain(3_000)
                assert set(harness.ends) == set(harness.texts)
                harness.idle_check()


@pytest.mark.parametrize("more", [1, 2, 5, 9, 14, 23])
def test_windows_that_do_not_fit_together_take_turns(more):
    """Where window rows alone are scarce, a request starts only if all that run can go on to their ends."""
    harness = Harness(rows=1_000, slots=30, limits=Limits(9, 8, 1_000), windows=Windows(5 + more, 5))
    sizes = (13, 2, 40, 1, 9, 26, 4, 11)
    numbers = [harness.submit([n % 3] * size, 7) for n, size in enumerate(sizes)]
    harness.drain()
    numbers += [harness.submit([n % 3] * size + [n % 2], 7) for n, size in enumerate(sizes)]
    harness.drain()
    assert harness.scheduler.counters.preempted_total == 0
    assert set(harness.ends) == set(numbers)


def test_prompts_that_do_not_fit_together_take_turns():
    """A fresh request waits for room for its whole prompt, besides what running prefills still have to take.

    On a grid a step's budget is not always used up, so the third request could start behind the second's prefill.
    """
    harness = Harness(rows=100, slots=8, limits=Limits(4, 10, 1_000), strategy=small(cp.STRICT, 4))
    numbers = [harness.submit([n] * size, max_new) for n, size, max_new in ((0, 13, 4), (1, 70, 10), (2, 70, 1))]
    harness.drain()
    assert harness.scheduler.counters.preempted_total == 0
    assert list(harness.ends) == numbers
