"""The prefix cache: which prefixes can be resumed, who uses them, and what goes when room is needed.

It owns the tree and decides about ids in both pools; it never sees a byte of KV or state. Its verbs:

    match      how deep KV reaches and how deep one may resume. Reads only
    acquire    a lease on a match: what it uses stays until it is released
    publish    give rows, and perhaps a state, to the tree; the lease moves along
    release    replay the receipt
    take_*     rows or a slot for a sequence, evicting what nobody pins (reclaim)

A model with sliding-window layers has a third pool (`core.window`): a checkpoint then is a state and the window before
it, which come and go together, so that whoever finds a state finds all that resuming needs.

The rows of a running sequence, as `publish` cuts them:

    0 ………………… lease.node.end ………………………… computed ……… held
    │  tree's, pinned     │   the sequence's own   │ taken, not written │
                          └─ publish(stop) ──┐
    existing nodes here: the sequence adopts their rows and gives its own back;
    the rest becomes a new leaf
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from milepost.core.checkpoint import SPARED, Cap, CheckpointPolicy, Reason, SlotStrategy
from milepost.core.evict import Victims
from milepost.core.history import History
from milepost.core.pool import NO_ROWS, TREE, Owner, RowPool, Rows, Slot, SlotPool
from milepost.core.stats import Counters, Loss, PoolUse
from milepost.core.tokens import WIDTH, Packed, common, cut, length
from milepost.core.tree import Node, RadixTree
from milepost.core.window import WindowPool, Windows


@dataclass(frozen=True, slots=True)
class Match:
    """KV of the prompt is cached up to `kv_depth`; it can be resumed at `resume`, the end of `node`.

    `loss` says why `resume` is short of `kv_depth`. `deepest` is the last node that the prompt passes through.
    """

    namespace: str
    node: Node
    deepest: Node
    resume: int
    kv_depth: int
    loss: Loss | None


class Snapshot(NamedTuple):
    """A state copied out at `position` and not yet published, with the rows of its window, which are in use."""

    position: int
    slot: Slot
    reason: Reason
    window: Rows = NO_ROWS


class Lease:
    """A running sequence's receipt: KV is pinned from the root to `node`, and the state of `state` if not None."""

    __slots__ = ("node", "owner", "state")

    def __init__(self, owner: Owner, node: Node, state: Node | None) -> None:
        self.owner = owner
        self.node = node
        self.state = state


class PrefixCache:
    def __init__(
        self,
        rows: RowPool,
        slots: SlotPool,
        strategy: SlotStrategy,
        policy: CheckpointPolicy,
        windows: Windows = Windows(),  # noqa: B008 - frozen
    ) -> None:
        assert rows.page == strategy.page
        self.rows = rows
        self.slots = slots
        self.windows = WindowPool(windows)
        self.strategy = strategy
        self.policy = policy
        self.tree = RadixTree(strategy.page)
        self.victims = Victims(stranded_first=not strategy.whole_leaf)
        self.history = History(strategy.page)
        self.counters = Counters()

    # Reading

    def match(self, key: Packed, namespace: str = "") -> Match:
        """The best place to resume `key`. The tree is not changed, not even its order of use."""
        limit = length(key) // self.tree.page * self.tree.page
        root = self.tree.roots.get(namespace)
        if root is None:
            root = Node(b"", 0, None, None)
            return Match(namespace, root, root, 0, 0, None)
        walk = self.tree.walk(root, key, limit)
        node, loss = walk.node, None
        while node.state.device is None and node.parent is not None:
            if loss is None and isinstance(node.note, Loss):
                loss = node.note
            node = node.parent
        depth = walk.depth
        why = (loss or Loss.NEVER) if depth > node.end else None
        return Match(namespace, node, walk.node, node.end, depth, why)

    def agreement(self, match: Match, key: Packed) -> tuple[int, bool]:
        """How many ids of `key` agree with what is or was cached on its path, and whether that goes on differently.

        Counted in single tokens even where KV comes in pages.
        """
        deepest = match.deepest
        first = key[deepest.end * WIDTH : (deepest.end + 1) * WIDTH]
        if self.tree.page == 1:
            alike = [deepest.children[first]] if first in deepest.children else []
        else:
            alike = [child for child in deepest.children.values() if child.edge[:WIDTH] == first]
        live = deepest.end + max((common(child.edge, key, deepest.end) for child in alike), default=0)
        seen, went_on = self.history.seen(deepest, key)
        if live >= seen:
            return live, live < length(key) and (bool(deepest.children) or (went_on and live == seen))
        return seen, went_on

    def room(self, match: Match) -> tuple[int, int]:
        """Rows and slots that could be had once `match` is acquired: what is free and what would be evicted.

        The matched checkpoint itself counts as a slot where it may be taken over.
        """
        own, node = 0, match.node
        while node.parent is not None:
            own += length(node.edge) if node.kv.pins == 0 else 0
            node = node.parent
        pinned_now = int(match.resume > 0 and match.node.state.pins == 0 and self.strategy.whole_leaf)
        return self.rows.free + self.victims.rows - own, self.slots.free + self.victims.states - pinned_now

    def path_rows(self, node: Node) -> Rows:
        """The rows of all positions up to the end of `node`."""
        rows = np.empty(node.end, np.int32)
        while node.parent is not None:
            assert node.kv.device is not None
            rows[node.start : node.end] = node.kv.device
            node = node.parent
        return rows

    def use(self) -> tuple[PoolUse, PoolUse, PoolUse]:
        """The pools of states, rows and windows as they are."""
        victims, windows = self.victims, self.windows
        return (
            PoolUse(self.slots.size, self.slots.free, victims.states, victims.marked),
            PoolUse(self.rows.size, self.rows.free, victims.rows),
            PoolUse(windows.size, windows.free, windows.evictable),
        )

    # Leases

    def acquire(self, match: Match, owner: Owner) -> Lease:
        """Pin what `match` found. Its state counts as used now."""
        node = match.node if match.resume else self.tree.root(match.namespace)
        lease = Lease(owner, node, None)
        self._pin_path(node, None)
        if match.resume:
            lease.state = match.node
            self._pin_state(match.node)
            self.victims.touch_state(match.node)
        return lease

    def restored(self, lease: Lease) -> None:
        """The matched state has been copied. Only strategies that say so keep it pinned any longer."""
        if lease.state is not None and not self.strategy.whole_leaf:
            self._unpin_state(lease.state)
            lease.state = None

    def release(self, lease: Lease) -> None:
        """Everything the lease pinned is let go, once."""
        if lease.state is not None:
            self._unpin_state(lease.state)
            lease.state = None
        node = lease.node
        self._unpin_rows(node)
        while node.parent is not None:
            node = node.parent
            self._unpin_rows(node)
        self._tidy(node)

    # Publishing

    def publish(self, lease: Lease, key: Packed, rows: Rows, checkpoint: Snapshot | None) -> Node:
        """Give the KV of `key`, and a state that has consumed exactly `key`, to the tree.

        `rows` are those of the sequence and hold at least `key`; where the tree has rows already they are
        replaced by the tree's. A slot passes to the tree, or back to the pool if the tree has that state. The
        lease is moved to the node of `key`, which is returned.
        """
        stop = length(key)
        assert checkpoint is None or checkpoint.position == stop
        assert lease.node.end <= stop and stop % self.tree.page == 0
        walk = self.tree.walk(lease.node, key, stop)
        node = walk.node if walk.partial is None else self._split(walk.partial, walk.shared)
        self._adopt(lease, node, rows)
        if node.end < stop:
            own = rows[node.end : stop].copy()
            self.rows.move(own, lease.owner, TREE)
            parent, node = node, self.tree.graft(node, cut(key, node.end, stop), own)
            self.history.revived(node, parent)
            if len(parent.children) > 1:
                self.victims.unmark(parent)
            self.victims.reconsider(parent)
            self.victims.add_rows(node)
        self._pin_path(node, lease.node)
        lease.node = node
        if checkpoint is not None:
            self._store(node, lease, checkpoint)
            if self.strategy.cap is Cap.RELEASE:
                self.cap(node)
            if self.strategy.whole_leaf:
                self._follow(lease, node)
        return node

    def cap(self, tail: Node) -> None:
        """Apply the soft cap to the path that ends at `tail`: mark or free the excess, shallowest first.

        Spared are the tail, forks, positions asked for, pinned states, and device leaves.
        """
        limit = self.policy.states_per_path
        if limit is None:
            return
        holders: list[Node] = []
        node: Node | None = tail
        while node is not None:
            if node.state.device is not None and not self.victims.is_marked(node):
                holders.append(node)
            node = node.parent
        excess = len(holders) - limit
        spared = frozenset() if self.strategy.cap is Cap.RELEASE else SPARED
        for node in reversed(holders):
            if excess <= 0:
                break
            if node is tail or node.note in spared or node.state.pins or len(node.children) != 1:
                continue
            excess -= 1
            if self.strategy.cap is Cap.LAZY:
                self.victims.mark(node)
                self.counters.checkpoints_marked_total += 1
            else:
                self.drop_state(node, Loss.CAP)
                self.counters.checkpoints_pruned_total += 1

    # Taking and dropping

    def take_rows(self, count: int, owner: Owner) -> Rows | None:
        """`count` rows, evicting as many leaves as it takes; None, and nothing evicted, if that is not enough."""
        if self.rows.free + self.victims.rows < count:
            return None
        while self.rows.free < count:
            self._drop_leaf(self.victims.row_victim())
        return self.rows.take(count, owner)

    def take_slot(self, owner: Owner) -> Slot | None:
        """A slot, evicting one checkpoint if none is free; None if all are in use."""
        if self.slots.free == 0:
            if self.victims.states == 0:
                return None
            self._evict_state(self.victims.state_victim(), Loss.STATE_PRESSURE)
        return self.slots.take(owner)

    def take_window(self, count: int) -> Rows | None:
        """`count` window rows, evicting checkpoints whose windows have some; None, and nothing evicted, if too few."""
        windows = self.windows
        if windows.room < count:
            return None
        while windows.free < count:
            node = self.victims.state_victim(lambda holder: windows.spare(holder.window) > 0)
            self._evict_state(node, Loss.WINDOW_PRESSURE)
        return windows.take(count)

    def take_over(self, lease: Lease) -> Slot:
        """No slot is left but the matched checkpoint's: it becomes the sequence's working slot, without a copy."""
        node = lease.state
        assert node is not None and node.state.device is not None and node.state.pins == 1
        self._unpin_state(node)
        lease.state = None
        slot = node.state.device
        self.slots.move(slot, TREE, lease.owner)
        self._lose_state(node, Loss.STATE_PRESSURE)
        self.counters.states_evicted_total += 1
        return slot

    def drop_state(self, node: Node, why: Loss) -> None:
        """The checkpoint of `node` goes, its KV stays: a tombstone."""
        slot = node.state.device
        assert slot is not None and node.state.pins == 0
        self.slots.give(slot, TREE)
        self._lose_state(node, why)

    def flush(self) -> None:
        """Drop all that nobody pins, and forget it."""
        while self.victims.rows:
            self._drop_leaf(self.victims.row_victim())
        self.history.clear()
        for root in list(self.tree.roots.values()):
            self._tidy(root)

    # Inside

    def _tidy(self, node: Node) -> None:
        """Forget a namespace that holds nothing, that nobody uses, and of which nothing is remembered."""
        if node.parent is None and not (node.children or node.kv.pins or self.history.hangs_from(node)):
            assert isinstance(node.note, str)
            del self.tree.roots[node.note]

    def _split(self, lower: Node, shared: int) -> Node:
        self.victims.shrink(lower, shared)
        upper = self.tree.split(lower, shared)
        if upper.kv.pins == 0:
            self.victims.add_rows(upper)
        return upper

    def _adopt(self, lease: Lease, node: Node, rows: Rows) -> None:
        """The sequence takes over the tree's rows from the lease's node down to `node`."""
        while node is not lease.node:
            own = rows[node.start : node.end]
            self.rows.give(own.copy(), lease.owner)
            assert node.kv.device is not None and node.parent is not None
            own[:] = node.kv.device
            node = node.parent

    def _store(self, node: Node, lease: Lease, checkpoint: Snapshot) -> None:
        if node.state.device is None:
            self.slots.move(checkpoint.slot, lease.owner, TREE)
            self.windows.keep(checkpoint.window)
            node.state.device = checkpoint.slot
            node.window = checkpoint.window.copy()  # else a view would keep all that its sequence held
            node.note = checkpoint.reason
            self.counters.checkpoints_published_total += 1
        else:
            assert isinstance(node.note, Reason)
            self.slots.give(checkpoint.slot, lease.owner)
            node.note = min(node.note, checkpoint.reason)
            self.counters.checkpoints_duplicate_total += 1
        self.victims.touch_state(node)
        self.victims.unmark(node)
        self.victims.reconsider(node)

    def _follow(self, lease: Lease, node: Node) -> None:
        """The lease's pinned state becomes that of `node`, the last on its path."""
        if lease.state is not None:
            self._unpin_state(lease.state)
        self._pin_state(node)
        lease.state = node

    def _evict_state(self, node: Node, why: Loss) -> None:
        """Drop the checkpoint of `node`; under `whole_leaf` a leaf goes with it."""
        self.drop_state(node, why)
        self.counters.states_evicted_total += 1
        if self.strategy.whole_leaf and node.parent is not None and _is_bare(node):
            self._drop_leaf(node)

    def _lose_state(self, node: Node, why: Loss) -> None:
        self.victims.forget_state(node)
        self.windows.unkeep(node.window)
        node.state.device = None
        node.window = NO_ROWS
        node.note = why
        self.victims.reconsider(node)

    def _drop_leaf(self, leaf: Node) -> None:
        """A leaf goes with all it holds. Under `whole_leaf`, ancestors left bare by it go too."""
        if leaf.state.device is not None:
            self.drop_state(leaf, Loss.KV_PRESSURE)
        rows = leaf.kv.device
        assert rows is not None and leaf.kv.pins == 0
        self.rows.give(rows, TREE)
        self.counters.kv_tokens_evicted_total += rows.size
        self.victims.remove_rows(leaf)
        parent = self.tree.prune(leaf)
        for node in [*self.history.dropped(leaf, parent), parent]:
            self._tidy(node)
        if parent.parent is None:
            return
        self.victims.reconsider(parent, coldest=True)

    def _pin_path(self, node: Node | None, above: Node | None) -> None:
        """Pin KV from `node` up to, not including, `above`."""
        while node is not above:
            assert node is not None
            if node.kv.pins == 0 and node.parent is not None:
                self.victims.remove_rows(node)
            node.kv.pins += 1
            node = node.parent

    def _unpin_rows(self, node: Node) -> None:
        assert node.kv.pins > 0
        node.kv.pins -= 1
        if node.kv.pins == 0 and node.parent is not None:
            self.victims.add_rows(node)

    def _pin_state(self, node: Node) -> None:
        if node.state.pins == 0:
            self.victims.pinned_states += 1
            self.windows.use(node.window)
        node.state.pins += 1

    def _unpin_state(self, node: Node) -> None:
        assert node.state.pins > 0
        node.state.pins -= 1
        if node.state.pins == 0:
            self.victims.pinned_states -= 1
            self.windows.unuse(node.window)


def _is_bare(node: Node) -> bool:
    """A leaf with neither state nor pins."""
    return not node.children and node.state.device is None and node.kv.pins == 0
