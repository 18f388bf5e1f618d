"""What the tree once held: explains misses, is bounded, and forgets namespaces."""

from milepost.core.checkpoint import CheckpointPolicy
from milepost.core.history import History
from milepost.core.scheduler import Limits
from milepost.core.stats import Loss
from milepost.core.tokens import pack
from milepost.core.tree import Node
from tests.harness import Harness


def stream(name: int, count: int) -> list[int]:
    return [name * 1000 + i for i in range(count)]


def test_a_miss_after_kv_eviction_says_so():
    harness = Harness(rows=100, slots=8, limits=Limits(4, 64, 1000))
    a = stream(1, 60)
    harness.run(a)
    harness.run(stream(2, 90))
    reuse = harness.run([*a[:40], 7, 7]).reuse
    assert (reuse.seen, reuse.kv_depth, reuse.resume) == (40, 0, 0)
    assert reuse.loss is Loss.KV_PRESSURE and reuse.diverged_at == 40
    assert harness.scheduler.counters.misses == {Loss.KV_PRESSURE: 40}


def test_news_is_no_miss():
    harness = Harness(rows=100, slots=8)
    harness.run(stream(1, 20))
    reuse = harness.run(stream(2, 20)).reuse
    assert (reuse.seen, reuse.loss, reuse.diverged_at) == (0, None, 0)


def test_a_state_lost_to_pressure_says_so():
    harness = Harness(rows=1000, slots=2, policy=CheckpointPolicy.level(2), limits=Limits(4, 64, 1000))
    a = stream(1, 60)
    harness.run(a)
    harness.run(stream(2, 60))
    harness.run(stream(3, 60))
    reuse = harness.run([*a, 7]).reuse
    assert (reuse.kv_depth, reuse.resume, reuse.lost) == (60, 0, 60)
    assert reuse.loss is Loss.STATE_PRESSURE


def node(edge: list[int], parent: Node | None) -> Node:
    return Node(pack(edge), (parent.end if parent else 0) + len(edge), parent, None)


def test_ghosts_nest_are_superseded_and_are_forgotten_oldest_first():
    root = node([], None)
    history = History(page=1, limit=6)
    upper = node([1, 2], root)
    lower = node([3, 4], upper)
    history.dropped(lower, upper)
    history.dropped(upper, root)
    assert history.seen(root, pack([1, 2, 3, 4, 5])) == (4, False)
    assert history.seen(root, pack([1, 2, 3, 9])) == (3, True)
    assert history.seen(root, pack([8])) == (0, True)
    history.dropped(node([5, 6, 7], root), root)  # 7 tokens: the oldest edge, [3, 4], goes
    assert history.seen(root, pack([1, 2, 3, 4, 5])) == (2, False)
    history.revived(node([1, 2, 3], root), root)
    assert history.seen(root, pack([1, 2])) == (0, True)
    assert history.tokens == 3
    assert history.dropped(node([1] * 7, root), root) == [root]
    assert not history.hangs_from(root) and history.tokens == 0
