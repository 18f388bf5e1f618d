"""What is counted, how often, and for whom (scenario 41)."""

import pytest

from milepost.core.stats import Loss
from tests.scenarios.world import A, B, D, World, Z, either, figures


@pytest.fixture
def lossy(world, strategy) -> World:
    """A*4096 and A*8192 are cached, then the state at 8192 is gone and its KV stays."""
    w = world(strategy, chunk=1024, running=1, mamba_max_states_per_path=either(strategy, 1, -1))
    w.ask(A * 4096)
    w.ask(A * 8192)
    assert w.marked() == either(strategy, [4096], [])
    w.drop_states(A * 8192, at=8192)
    return w


def losses(w: World) -> tuple[int, int, int]:
    counters = w.counters
    return (
        counters.lost_reuse_tokens_total,
        counters.lost_reuse_requests_total,
        counters.below_minimum_requests_total,
    )


@figures(exact=1, extra_buffer=64)
def test_s41_lost_reuse_is_counted_once(lossy, expected):
    """Per request, at its admission: not each time that the queue looks at it, not once per chunk."""
    assert losses(lossy) == (0, 0, 0)
    lossy.start(Z * 1000, 4)
    waiting = lossy.start(A * 8192 + B * 100)
    for _ in range(3):
        lossy.tick()
        assert lossy.sequence(waiting).slot is None
    lossy.drain()
    first = lossy.answer(waiting)
    assert (first.resume, first.reuse.lost, first.reuse.loss) == (4096, 4096, Loss.STATE_PRESSURE)
    assert losses(lossy) == (4096, 1, 0)
    assert lossy.ask(A * 8192 + D * 100).resume == 8192
    lossy.ask(B * 3000)
    assert losses(lossy) == (4096, 1, 0)
    lossy.ask(A * expected)
    assert losses(lossy) == (4096, 1, 1)
