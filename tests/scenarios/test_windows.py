"""Sliding-window and linear attention in one model: three pools, one hit length (scenarios 10)."""

import pytest

from milepost.core.stats import Loss
from milepost.core.window import Windows
from tests.scenarios.world import BOTH, A, B, D, World

W = 512
POOL = Windows(16_384, W)


def three_parts(world, strategy: str, windows: Windows = POOL) -> World:
    cap = {"mamba_max_states_per_path": -1} if strategy == "extra_buffer" else {}
    w: World = world(strategy, rows=65_536, chunk=1024, windows=windows, **cap)
    w.ask(A * 4096)
    return w


def needed_elsewhere(w: World) -> None:
    """Somebody takes every window row that can be had, and gives them back."""
    pool = w.scheduler.cache.windows
    rows = w.scheduler.cache.take_window(pool.room)
    assert rows is not None and rows.size == pool.size
    pool.unuse(rows)
    w.audit()


DEEDS = {
    "a1": needed_elsewhere,
    "a2": lambda w: w.drop_windows(A * 4096, since=3072),
    "b1": lambda w: w.drop_states(A * 4096),
    "b2": lambda w: (w.drop_states(A * 4096, at=4096), w.drop_states(A * 4096, at=3072)),
    "c": World.audit,
}


@BOTH
@pytest.mark.parametrize(("case", "hit"), [("a1", 0), ("a2", 3072), ("b1", 0), ("b2", 2048), ("c", 4096)])
def test_s29_three_parts_one_hit_length(world, strategy, case, hit):
    """The hit is the deepest position with KV, a state and the 512 window rows before it."""
    w = three_parts(world, strategy)
    assert sorted(w.unmarked() + w.marked()) == [1024, 2048, 3072, 4096]
    assert w.marked() == ([1024, 2048, 3072] if strategy == "exact" else [])
    assert w.window_rows(A * 4096) == 4 * W, "between the windows of its checkpoints a path keeps none"
    DEEDS[case](w)
    answer = w.ask(A * 4096 + B * 100)
    assert answer.resume == hit
    leaf_gone = case == "a1" and strategy == "extra_buffer"  # there a leaf goes with its state
    assert answer.reuse.kv_depth == (3072 if leaf_gone else 4096)
    loss = {"a1": Loss.WINDOW_PRESSURE, "a2": Loss.WINDOW_PRESSURE, "c": None}
    assert answer.reuse.loss == loss.get(case, Loss.STATE_PRESSURE)


@BOTH
def test_s29_three_pools_three_sums(world, strategy):
    """While a request runs it holds its window and no more; what it leaves is what its checkpoints need."""
    w = three_parts(world, strategy)
    number = w.start(A * 4096 + B * 2000, 40)
    w.tick(6)
    stats = w.stats
    assert stats.windows.size == stats.windows.free + stats.windows.evictable + stats.windows.held
    sequence = w.sequence(number)
    assert sequence.window.high - sequence.window.low == W
    w.drain()
    path = w.answer(number).context
    assert w.window_rows(path) == len(
        {row for end in w.unmarked(path) + w.marked(path) for row in range(end - W, end)}
    ), "overlapping windows share their rows"
    assert w.stats.windows.held == 0 and w.stats.windows.evictable == w.window_rows(path)


@BOTH
def test_s29_a_short_prefix_needs_no_whole_window(world, strategy):
    """Before position 512 the window is all there is."""
    w = three_parts(world, strategy)
    w.ask(D * 256)
    assert w.window_rows(D * 256) == 256
    assert w.ask(D * 256 + B * 500).resume == 256


@BOTH
def test_s29_window_pressure_takes_the_coldest_checkpoints(world, strategy):
    """A window pool of a few windows: chats go on, each evicts others, nobody dies, texts stay right."""
    w = three_parts(world, strategy, Windows(6 * W, W))
    for chat in (B, D, A):
        for length in (1500, 2500):
            w.ask(chat * length, 8)
    assert w.counters.states_evicted_total > 0
    assert w.ask(A * 2500 + B * 10).resume >= 2048
    assert w.counters.preempted_total == 0
