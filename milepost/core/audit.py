"""The audit: every derived fact recomputed from the tree and the pools, all violations reported together.

Too slow to run in production, fast enough to run after every step of every test. Numbers in the messages are
those of the invariants in docs/design.md.
"""

from collections import Counter, defaultdict

import numpy as np

from milepost.core.cache import PrefixCache
from milepost.core.pool import FREE, NO_ROWS, TREE, Owner, Rows, Slot
from milepost.core.scheduler import Scheduler
from milepost.core.sequence import Sequence, Status
from milepost.core.tokens import WIDTH, length
from milepost.core.tree import Node


def audit(scheduler: Scheduler) -> list[str]:
    """All violated invariants of a scheduler between two steps; empty when it is sound."""
    cache = scheduler.cache
    nodes = cache.tree.nodes()
    found: list[str] = []
    found += _structure(cache, nodes)
    found += _pins(scheduler, nodes)
    found += _ownership(scheduler, nodes)
    found += _windows(scheduler, nodes)
    found += _orders(cache, nodes)
    found += _sequences(scheduler)
    return found


def check(scheduler: Scheduler) -> None:
    """Raise one AssertionError that lists all violations."""
    found = audit(scheduler)
    assert not found, "\n".join(["the audit found:", *found])


def _structure(cache: PrefixCache, nodes: list[Node]) -> list[str]:
    found = []
    page = cache.tree.page
    for node in nodes:
        parent, rows = node.parent, node.kv.device
        if parent is None or parent.children.get(node.edge[: page * WIDTH]) is not node:
            found.append(f"2: {node} is not the child of its parent")
            continue
        if not 0 < length(node.edge) == node.end - parent.end or length(node.edge) % page:
            found.append(f"2: {node} has an edge of {length(node.edge)} below {parent.end}")
        if rows is None or rows.size != length(node.edge):
            found.append(f"3: {node} has no KV row for each token of its edge")
    for name, root in cache.tree.roots.items():
        if root.note != name or root.end or root.state.device is not None:
            found.append(f"2: the root of {name!r} is no root")
        if not (root.children or root.kv.pins or cache.history.hangs_from(root)):
            found.append(f"2: the empty namespace {name!r} is still there")
    return found


def _pins(scheduler: Scheduler, nodes: list[Node]) -> list[str]:
    kv: Counter[Node] = Counter()
    state: Counter[Node] = Counter()
    for sequence in scheduler.running():
        lease = sequence.lease
        if lease is None:
            continue
        node: Node | None = lease.node
        while node is not None:
            kv[node] += 1
            node = node.parent
        if lease.state is not None:
            state[lease.state] += 1
    everything = [*nodes, *scheduler.cache.tree.roots.values()]
    found = [f"6: {n} has {n.kv.pins} KV pins, leases hold {kv[n]}" for n in everything if n.kv.pins != kv[n]]
    found += [f"6: {n} has {n.state.pins} state pins" for n in everything if n.state.pins != state[n]]
    gone = set(kv) - set(everything)
    found += [f"6: a lease holds {n}, which is not in the tree" for n in gone]
    pinned = sum(1 for n in nodes if n.state.pins)
    if pinned != scheduler.cache.victims.pinned_states:
        found.append(f"6: {pinned} states are pinned, {scheduler.cache.victims.pinned_states} are counted")
    return found


def _ownership(scheduler: Scheduler, nodes: list[Node]) -> list[str]:
    """Invariant 1: each id has the owner that uses it, and nobody owns what he doesn't use."""
    rows = scheduler.cache.rows
    row_uses: dict[Owner, list[Rows]] = defaultdict(list)
    slot_uses: dict[Owner, list[Slot]] = defaultdict(list)
    for node in nodes:
        if node.kv.device is not None:
            row_uses[TREE].append(node.kv.device)
        if node.state.device is not None:
            slot_uses[TREE].append(node.state.device)
    for sequence in scheduler.running():
        assert sequence.lease is not None
        row_uses[sequence.number].append(sequence.rows[sequence.lease.node.end : sequence.held])
        held = [sequence.slot, *sequence.tracking]
        slot_uses[sequence.number] += [slot for slot in held if slot is not None]
    found = []
    counted = rows.owners()
    for owner, parts in row_uses.items():
        used = np.concatenate(parts)
        if used.size and not rows.owned(used, owner):
            found.append(f"1: rows used by {owner} belong to somebody else, or twice to it")
        if counted.pop(owner, 0) != used.size:
            found.append(f"1: {owner} owns another number of rows than the {used.size} it uses")
    if counted.pop(FREE, 0) != rows.free:
        found.append("1: the free rows are not as many as the stack holds")
    found += [f"1: {owner} owns {count} rows and is gone" for owner, count in counted.items()]
    return found + _slot_ownership(scheduler, slot_uses)


def _windows(scheduler: Scheduler, nodes: list[Node]) -> list[str]:
    """Each window row is counted by those who name it, and each state has the window before it."""
    pool = scheduler.cache.windows
    kept, used = np.zeros(pool.size + 1, np.int32), np.zeros(pool.size + 1, np.int32)
    found = []
    for node in nodes:
        if node.window.size != (min(pool.reach, node.end) if node.state.device is not None else 0):
            found.append(f"4: {node} has {node.window.size} rows of a window")
        np.add.at(kept, node.window, 1)
        if node.state.pins:
            np.add.at(used, node.window, 1)
    for sequence in scheduler.running():
        window, snapshot = sequence.window, sequence.snapshot
        named = [window.until(window.high), snapshot.window if snapshot is not None else NO_ROWS]
        for rows in named:
            np.add.at(used, rows, 1)
        if pool.reach and (window.high != sequence.computed or window.low > max(0, window.high - pool.reach)):
            found.append(f"7: sequence {sequence.number} at {sequence.computed} holds {window.low}..{window.high}")
    if not np.array_equal(kept, pool.counts()[0]) or not np.array_equal(used, pool.counts()[1]):
        found.append("1: window rows are named by others than are counted")
    if pool.free != int(((kept == 0) & (used == 0))[1:].sum()):
        found.append("1: the free window rows are not as many as the stack holds")
    if pool.evictable != int(((kept > 0) & (used == 0)).sum()):
        found.append(f"1: {pool.evictable} window rows are said to be evictable")
    return found


def _slot_ownership(scheduler: Scheduler, uses: dict[Owner, list[Slot]]) -> list[str]:
    slots = scheduler.cache.slots
    found = []
    counted = slots.owners()
    for owner, used in uses.items():
        if len(set(used)) != len(used) or any(slots.owner(s) != owner for s in used):
            found.append(f"1: slots used by {owner} belong to somebody else, or twice to it")
        if counted.pop(owner, 0) != len(used):
            found.append(f"1: {owner} owns another number of slots than the {len(used)} it uses")
    if counted.pop(FREE, 0) != slots.free:
        found.append("1: the free slots are not as many as the stack holds")
    found += [f"1: {owner} owns {count} slots and is gone" for owner, count in counted.items()]
    return found


def _orders(cache: PrefixCache, nodes: list[Node]) -> list[str]:
    victims = cache.victims
    rows = [n for n in nodes if n.kv.pins == 0]
    stranded = [n for n in rows if not n.children and n.state.device is None]
    states = [n for n in nodes if n.state.device is not None]
    listed = victims.listing()
    found = []
    if set(rows) != set(listed.rows) or sum(length(n.edge) for n in rows) != victims.rows:
        found.append("6: the order of row victims does not hold just the unpinned nodes")
    if set(stranded) != set(listed.stranded):
        found.append("6: the stranded leaves are not just the unpinned leaves without a state")
    if set(states) != set(listed.states) or not set(listed.marked) <= set(states):
        found.append("4: the order of states does not hold just the nodes with a state")
    place = {node: i for i, node in enumerate(listed.rows)}
    for node in rows:
        if node.parent in place and place[node.parent] < place[node]:
            found.append(f"3: {node.parent} is colder than its child {node}")
    return found


def _sequences(scheduler: Scheduler) -> list[str]:
    found = []
    running, waiting = scheduler.running(), scheduler.waiting()
    for sequence in running:
        lease = sequence.lease
        if lease is None or sequence.slot is None or sequence.status is not Status.RUNNING:
            found.append(f"8: sequence {sequence.number} runs without lease or slot")
            continue
        if not lease.node.end <= sequence.computed <= sequence.known or sequence.computed > sequence.held:
            found.append(f"7: sequence {sequence.number} has computed {sequence.computed} of {sequence.known}")
        if lease.node.end and not np.array_equal(
            scheduler.cache.path_rows(lease.node), sequence.rows[: lease.node.end]
        ):
            found.append(f"6: sequence {sequence.number} does not use the rows of its path")
        if _key(lease.node) != sequence.key(lease.node.end):
            found.append(f"6: sequence {sequence.number} leases another prefix than its own")
    if len(running) > scheduler.running_limit:
        found.append(f"12: {len(running)} sequences run, the limit is {scheduler.running_limit}")
    for sequence in waiting:
        if sequence.lease is not None or sequence.slot is not None or sequence.held or sequence.tracking:
            found.append(f"8: sequence {sequence.number} waits and holds something")
    if len(running) + len(waiting) != len(scheduler.sequences):
        found.append("8: a sequence is neither running nor waiting")
    return found + _reuses([*running, *waiting])


def _reuses(sequences: list[Sequence]) -> list[str]:
    found = []
    for sequence in sequences:
        reuse = sequence.reuse
        if reuse is not None and not reuse.resume <= reuse.kv_depth <= reuse.seen <= reuse.prompt - 1:
            found.append(f"7: sequence {sequence.number}: {reuse}")
    return found


def _key(node: Node) -> bytes:
    parts = []
    while node.parent is not None:
        parts.append(node.edge)
        node = node.parent
    return b"".join(reversed(parts))
