"""Model checking: the prefix cache against the oracle, every decision compared after every operation.

Keys are cuts of a few shared stems, or the interesting states are never reached.
"""

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from milepost.core.cache import Match, PrefixCache, Snapshot
from milepost.core.checkpoint import EXACT, SPARED, Cap, CheckpointPolicy, Reason, extra_buffer
from milepost.core.pool import Owner, RowPool, SlotPool
from milepost.core.tokens import length, pack, unpack
from milepost.core.tree import Node
from milepost.core.window import Window, Windows
from tests.core.oracle import Oracle, common

STEMS = [
    [1, 2, 3, 4, 5, 6, 7, 8, 9, 10],
    [1, 2, 3, 4, 9, 9, 9, 8, 8, 8],
    [1, 2, 3, 4, 5, 6, 1, 1, 2, 2],
    [7, 7, 7, 1, 2, 3, 4, 5, 6, 7],
]
KEYS = st.builds(
    lambda stem, cut, tail: STEMS[stem][:cut] + tail,
    st.integers(0, len(STEMS) - 1),
    st.integers(1, 10),
    st.lists(st.integers(1, 3), max_size=3),
)
REASONS = st.sampled_from([Reason.FORK, Reason.CHUNK, Reason.INTERVAL, Reason.ASKED])


class Runner:
    """What a running sequence would keep: its lease, its rows, its working slot."""

    def __init__(self, key: list[int], namespace: str) -> None:
        self.key = key
        self.namespace = namespace
        self.rows = np.zeros(64, np.int32)
        self.held = self.computed = 0
        self.window: Window | None = None

    def prefix(self, stop: int) -> tuple:
        return (self.namespace, *self.key[:stop])


class CacheMachine(RuleBasedStateMachine):
    strategy = EXACT
    sizes = (24, 4)
    cap = 1
    windows = Windows()

    def __init__(self) -> None:
        super().__init__()
        rows, slots = self.sizes
        policy = CheckpointPolicy(states_per_path=self.cap)
        self.cache = PrefixCache(RowPool(rows), SlotPool(slots), self.strategy, policy, self.windows)
        lazy = self.strategy.cap is Cap.LAZY
        self.oracle = Oracle(rows, slots, self.cap, lazy, self.strategy.whole_leaf, SPARED)
        self.oracle.windows, self.oracle.reach = self.windows.rows, self.windows.reach
        self.runners: dict[int, Runner] = {}
        self.number = 0

    def pick(self, index: int) -> tuple[int, Runner]:
        return list(self.runners.items())[index % len(self.runners)]

    @rule(key=KEYS, namespace=st.sampled_from(["", "", "other"]))
    def probe(self, key: list[int], namespace: str) -> None:
        match = self.cache.match(pack(key), namespace)
        assert (match.resume, match.kv_depth) == self.oracle.match((namespace, *key))

    @rule(key=KEYS, namespace=st.sampled_from(["", "", "other"]))
    def start(self, key: list[int], namespace: str) -> None:
        match: Match = self.cache.match(pack(key[:-1]), namespace)
        resume, depth = self.oracle.match((namespace, *key[:-1]))
        assert (match.resume, match.kv_depth) == (resume, depth)
        if self.cache.room(match)[1] < 1:
            return
        self.number += 1
        owner, runner = self.number, Runner(key, namespace)
        runner.lease = self.cache.acquire(match, Owner(owner))
        self.oracle.acquire(owner, runner.prefix(resume))
        runner.window = Window(self.cache.windows)
        runner.window.resume(match.node.window, resume)
        runner.slot = self.cache.take_slot(Owner(owner))
        assert (runner.slot is not None) == self.oracle.take_slot(owner)
        if runner.slot is None:
            runner.slot = self.cache.take_over(runner.lease)
            self.oracle.take_over(owner)
        runner.held = runner.computed = resume
        runner.rows[:resume] = self.cache.path_rows(runner.lease.node)
        self.runners[owner] = runner

    @precondition(lambda self: self.runners)
    @rule(index=st.integers(0, 99), more=st.integers(1, 6), extra=st.lists(st.integers(1, 3), max_size=2))
    def grow(self, index: int, more: int, extra: list[int]) -> None:
        owner, runner = self.pick(index)
        stop = min(runner.computed + more, len(runner.key))
        if stop == len(runner.key):
            runner.key = runner.key + extra
        count = stop - runner.held
        if count <= 0 or stop > 60 or not self.grow_window(owner, runner, stop):
            return
        rows = self.cache.take_rows(count, Owner(owner))
        assert (rows is not None) == self.oracle.take_rows(owner, count)
        if rows is not None:
            runner.rows[runner.held : stop] = rows
            runner.held = runner.computed = stop

    def grow_window(self, owner: int, runner: Runner, stop: int) -> bool:
        """What lies behind the window of the next position is let go, then rows up to `stop` are taken."""
        runner.window.move(runner.computed)
        mine = self.oracle.private_windows[owner]
        for position in [p for p in mine if p < runner.computed - self.windows.reach]:
            del mine[position]
        high = runner.window.high
        if not runner.window.missing(stop):
            return True
        rows = self.cache.take_window(stop - high)
        assert (rows is not None) == self.oracle.take_window(owner, high, stop)
        if rows is not None:
            runner.window.extend(rows)
        return rows is not None

    @rule(key=KEYS, namespace=st.sampled_from(["", "", "other"]))
    def serve(self, key: list[int], namespace: str) -> None:
        """A request from start to finish: the interesting trees are made of many."""
        before = self.number
        self.start(key, namespace)
        if self.number > before:
            last = len(self.runners) - 1
            self.grow(last, len(key), [])
            self.restored(last)
            self.leave(last, True, True)

    @precondition(lambda self: self.runners)
    @rule(index=st.integers(0, 99), back=st.integers(0, 3), reason=REASONS)
    def checkpoint(self, index: int, back: int, reason: Reason) -> None:
        owner, runner = self.pick(index)
        stop = runner.computed - back
        if stop <= runner.lease.node.end or 0 < runner.window.low > stop - self.windows.reach:
            return
        slot = self.cache.take_slot(Owner(owner))
        assert (slot is not None) == self.oracle.take_slot(owner)
        if slot is not None:
            self.publish(owner, runner, stop, Snapshot(stop, slot, reason, runner.window.before(stop)))

    def publish(self, owner: int, runner: Runner, stop: int, checkpoint: Snapshot | None) -> Node:
        node = self.cache.publish(runner.lease, pack(runner.key[:stop]), runner.rows, checkpoint)
        self.oracle.publish(owner, runner.prefix(stop), checkpoint.reason if checkpoint else None)
        assert node.end == stop
        return node

    @precondition(lambda self: self.runners)
    @rule(index=st.integers(0, 99))
    def restored(self, index: int) -> None:
        owner, runner = self.pick(index)
        self.cache.restored(runner.lease)
        if not self.strategy.whole_leaf:
            self.oracle.leases[owner][1] = None

    @precondition(lambda self: self.runners)
    @rule(index=st.integers(0, 99), finished=st.booleans(), donate=st.booleans())
    def leave(self, index: int, finished: bool, donate: bool) -> None:
        owner, runner = self.pick(index)
        tail = None
        slots = [runner.slot]
        if donate and runner.computed:
            stop, window = runner.computed, runner.window.before(runner.computed)
            tail = self.publish(owner, runner, stop, Snapshot(stop, slots.pop(), Reason.FINISH, window))
        own = runner.rows[runner.lease.node.end : runner.held].copy()
        self.cache.rows.give(own, Owner(owner))
        for slot in slots:
            self.cache.slots.give(slot, Owner(owner))
        runner.window.close()
        self.cache.release(runner.lease)
        self.oracle.private_windows.pop(owner)
        self.oracle.private_rows.pop(owner, None)
        self.oracle.private_slots.pop(owner, None)
        self.oracle.release(owner)
        if finished and tail is not None:
            self.cache.cap(tail)
            self.oracle.apply_cap(runner.prefix(runner.computed))
        del self.runners[owner]

    @invariant()
    def same_as_oracle(self) -> None:
        cache, oracle = self.cache, self.oracle
        nodes = {_prefix(node): node for node in cache.tree.nodes()}
        assert set(nodes) == set(oracle.nodes)
        listing = cache.victims.listing()
        unpinned = [n for n in oracle.nodes if not oracle.pins(n)]
        assert [_prefix(n) for n in listing.rows] == unpinned
        assert [_prefix(n) for n in listing.states] == list(oracle.states)
        assert [_prefix(n) for n in listing.marked] == oracle.marked
        if not self.strategy.whole_leaf:
            assert [_prefix(n) for n in listing.stranded] == oracle.stranded
        for prefix, node in nodes.items():
            assert node.kv.pins == oracle.pins(prefix)
            assert node.state.pins == oracle.state_pins(prefix)
            assert (node.state.device is not None) == (prefix in oracle.states)
            if prefix in oracle.states:
                assert node.note == oracle.states[prefix]
        assert cache.rows.free == oracle.free_rows()
        assert cache.slots.free == oracle.free_slots()
        assert cache.windows.free == oracle.free_windows()
        assert cache.windows.evictable == oracle.spare_windows()
        assert cache.rows.free + cache.victims.rows + self._held_rows() == cache.rows.size

    def _held_rows(self) -> int:
        pinned = sum(length(n.edge) for n in self.cache.tree.nodes() if n.kv.pins)
        return pinned + sum(r.held - r.lease.node.end for r in self.runners.values())

    @invariant()
    def paths_agree(self) -> None:
        """A runner's rows are those of its path, and no two owners share a row."""
        used = [n.kv.device for n in self.cache.tree.nodes()]
        for runner in self.runners.values():
            end = runner.lease.node.end
            assert np.array_equal(self.cache.path_rows(runner.lease.node), runner.rows[:end])
            assert common(_prefix(runner.lease.node), runner.prefix(end)) == end + 1
            used.append(runner.rows[end : runner.held])
        if used:
            rows = np.concatenate(used)
            assert np.unique(rows).size == rows.size

    @invariant()
    def windows_agree(self) -> None:
        """Core's rows and the oracle's names are the same partition: one row for each name, one name for each row."""
        pairs = set()
        for node in self.cache.tree.nodes():
            pairs |= set(zip(node.window.tolist(), self.oracle.kept.get(_prefix(node), []), strict=True))
        for owner, runner in self.runners.items():
            rows = runner.window.until(runner.window.high).tolist()
            pairs |= set(zip(rows, self.oracle.private_windows[owner].values(), strict=True))
        assert len(pairs) == len({row for row, _ in pairs}) == len({name for _, name in pairs})

    def teardown(self) -> None:
        while self.runners:
            self.leave(0, True, True)
        self.cache.flush()
        assert self.cache.rows.free == self.cache.rows.size
        assert self.cache.slots.free == self.cache.slots.size
        assert self.cache.windows.free == self.cache.windows.size
        assert not self.cache.tree.roots


def _prefix(node: Node) -> tuple:
    tokens: list[int] = []
    while node.parent is not None:
        tokens = [*unpack(node.edge).tolist(), *tokens]
        node = node.parent
    return (node.note, *tokens)


@pytest.mark.parametrize(
    ("strategy", "sizes", "cap", "windows"),
    [
        (EXACT, (24, 4), 1, Windows()),
        (EXACT, (90, 10), 1, Windows()),
        (EXACT, (60, 5), None, Windows()),
        (EXACT, (18, 8), 2, Windows()),
        (extra_buffer(1), (24, 5), 1, Windows()),
        (EXACT, (90, 12), 1, Windows(14, 3)),
        (EXACT, (40, 6), None, Windows(24, 4)),
        (extra_buffer(1), (60, 12), 1, Windows(18, 3)),
    ],
    ids=["tight", "roomy", "no-cap", "few-rows", "whole-leaf", "few-windows", "windows", "whole-leaf-windows"],
)
def test_cache_against_oracle(strategy, sizes, cap, windows):
    fields = {"strategy": strategy, "sizes": sizes, "cap": cap, "windows": windows}
    machine = type("Machine", (CacheMachine,), fields)
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=150,
            stateful_step_count=40,
            deadline=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )
