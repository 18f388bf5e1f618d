"""A brute-force model of the prefix cache: flat dicts keyed by whole prefixes, every question answered by search.

It shares no code with `milepost.core` but the names of reasons. Prefixes are tuples of (namespace, token, …). A
node is a prefix at which something was published or split; its parent is the longest other node it begins with.
"""

from dataclasses import dataclass, field

Prefix = tuple


@dataclass
class Oracle:
    rows: int
    slots: int
    cap: int | None
    lazy: bool
    whole_leaf: bool
    spared: frozenset
    nodes: list = field(default_factory=list)  # order of row victims: coldest first
    stranded: list = field(default_factory=list)  # unpinned leaves without a state, longest such first
    states: dict = field(default_factory=dict)  # prefix -> reason, coldest first
    marked: list = field(default_factory=list)
    leases: dict = field(default_factory=dict)  # owner -> [prefix of KV, prefix of the pinned state or None]
    private_rows: dict = field(default_factory=dict)
    private_slots: dict = field(default_factory=dict)
    windows: int = 0  # size of the window pool
    reach: int = 0
    kept: dict = field(default_factory=dict)  # prefix of a state -> names of the window rows before it
    private_windows: dict = field(default_factory=dict)  # owner -> {position: name}; a name is a number ever used
    named: int = 0

    # Questions

    def match(self, key: Prefix) -> tuple[int, int]:
        depth = max((common(key, node) for node in self.nodes), default=1)
        resume = max((len(p) for p in self.states if p == key[: len(p)]), default=1)
        return max(resume, 1) - 1, max(depth, 1) - 1

    def parent(self, prefix: Prefix) -> Prefix:
        return max((n for n in self.nodes if n != prefix and n == prefix[: len(n)]), key=len, default=prefix[:1])

    def children(self, prefix: Prefix) -> list:
        return [n for n in self.nodes if n != prefix and self.parent(n) == prefix]

    def pins(self, prefix: Prefix) -> int:
        return sum(1 for kv, _ in self.leases.values() if kv[: len(prefix)] == prefix)

    def state_pins(self, prefix: Prefix) -> int:
        return sum(1 for _, state in self.leases.values() if state == prefix)

    def free_rows(self) -> int:
        cached = sum(len(n) - len(self.parent(n)) for n in self.nodes)
        return self.rows - cached - sum(self.private_rows.values())

    def free_slots(self) -> int:
        return self.slots - len(self.states) - sum(self.private_slots.values())

    def used_windows(self) -> set:
        """Window rows that running requests and pinned states hold."""
        used = {name for window in self.private_windows.values() for name in window.values()}
        return used.union(*(self.kept[p] for p in self.states if self.state_pins(p)))

    def free_windows(self) -> int:
        return self.windows - len(self.used_windows().union(*self.kept.values()))

    def spare_windows(self) -> int:
        """Window rows that nothing but unpinned states holds."""
        return len(set().union(*self.kept.values()) - self.used_windows())

    # Deeds

    def acquire(self, owner: int, prefix: Prefix) -> None:
        self.private_rows[owner] = self.private_slots[owner] = 0
        names = self.kept.get(prefix, [])
        depth = len(prefix) - 1
        self.private_windows[owner] = dict(zip(range(depth - len(names), depth), names, strict=True))
        self.leases[owner] = [prefix, prefix if len(prefix) > 1 else None]
        if len(prefix) > 1:
            self.use(prefix)
        self.settle()

    def use(self, prefix: Prefix) -> None:
        self.states[prefix] = self.states.pop(prefix)
        if prefix in self.marked:
            self.marked.remove(prefix)
            self.marked.append(prefix)

    def publish(self, owner: int, prefix: Prefix, reason: object | None) -> None:
        before = self.leases[owner][0]
        deepest = max((prefix[: common(prefix, n)] for n in self.nodes), key=len, default=prefix[:1])
        for node in (deepest, prefix):
            if node not in self.nodes and len(node) > 1:
                self.nodes.append(node)
        above = self.parent(prefix)
        if len(self.children(above)) > 1 and prefix != deepest and above in self.marked:
            self.marked.remove(above)
        self.private_rows[owner] -= len(prefix) - len(before)
        self.leases[owner][0] = prefix
        if reason is not None:
            self.private_slots[owner] -= 1
            if prefix not in self.states:
                depth = len(prefix) - 1
                mine = self.private_windows[owner]
                self.kept[prefix] = [mine[i] for i in range(max(0, depth - self.reach), depth) if self.reach]
            self.states[prefix] = min(reason, self.states.pop(prefix, reason))
            if prefix in self.marked:
                self.marked.remove(prefix)
            if self.whole_leaf:
                self.leases[owner][1] = prefix
        self.settle()

    def release(self, owner: int) -> None:
        kv, _ = self.leases.pop(owner)
        node = kv
        while len(node) > 1:
            if self.pins(node) == 0:
                self.nodes.remove(node)
                self.nodes.append(node)
            node = self.parent(node)
        self.settle()

    def apply_cap(self, tail: Prefix) -> None:
        if self.cap is None:
            return
        holders = sorted((p for p in self.states if p == tail[: len(p)] and p not in self.marked), key=len)
        excess = len(holders) - self.cap
        for prefix in holders:
            spare = prefix == tail or self.states[prefix] in self.spared
            if excess <= 0 or spare or self.state_pins(prefix) or len(self.children(prefix)) != 1:
                continue
            excess -= 1
            if self.lazy:
                self.marked.append(prefix)
            else:
                self.drop_state(prefix)
                self.settle()

    def take_rows(self, owner: int, count: int) -> bool:
        evictable = sum(len(n) - len(self.parent(n)) for n in self.nodes if not self.pins(n))
        if self.free_rows() + evictable < count:
            return False
        while self.free_rows() < count:
            leaves = [n for n in self.nodes if not self.pins(n) and not self.children(n)]
            self.drop_leaf(self.stranded[0] if self.stranded and not self.whole_leaf else leaves[0])
            self.settle(coldest=True)
        self.private_rows[owner] += count
        return True

    def settle(self, coldest: bool = False) -> None:
        """After a deed: who has become stranded, and who no longer is. A branch begun is finished first."""
        now = [n for n in self.nodes if n not in self.states and not self.pins(n) and not self.children(n)]
        new = [n for n in now if n not in self.stranded]
        old = [n for n in self.stranded if n in now]
        self.stranded = new + old if coldest else old + new

    def take_slot(self, owner: int) -> bool:
        if self.free_slots() == 0:
            free = [p for p in [*self.marked, *self.states] if not self.state_pins(p)]
            if not free:
                return False
            self.evict_state(free[0])
        self.private_slots[owner] += 1
        return True

    def evict_state(self, prefix: Prefix) -> None:
        self.drop_state(prefix)
        self.settle()
        if self.whole_leaf and not self.children(prefix) and not self.pins(prefix):
            self.drop_leaf(prefix)
            self.settle(coldest=True)

    def take_window(self, owner: int, start: int, stop: int) -> bool:
        """Window rows for the positions from `start` to `stop`."""
        if self.free_windows() + self.spare_windows() < stop - start:
            return False
        while self.free_windows() < stop - start:
            used = self.used_windows()
            order = [p for p in [*self.marked, *self.states] if not self.state_pins(p) and set(self.kept[p]) - used]
            self.evict_state(order[0])
        for position in range(start, stop):
            self.named += 1
            self.private_windows[owner][position] = self.named
        return True

    def take_over(self, owner: int) -> None:
        self.drop_state(self.leases[owner][1])
        self.leases[owner][1] = None
        self.private_slots[owner] += 1
        self.settle()

    def drop_state(self, prefix: Prefix) -> None:
        del self.states[prefix]
        del self.kept[prefix]
        if prefix in self.marked:
            self.marked.remove(prefix)

    def drop_leaf(self, prefix: Prefix) -> None:
        if prefix in self.states:
            self.drop_state(prefix)
        self.nodes.remove(prefix)


def common(a: Prefix, b: Prefix) -> int:
    size = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        size += 1
    return size
