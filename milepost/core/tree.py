"""The radix tree over packed tokens: walk, split, graft, prune. Structure only.

    root ──"system prompt"── node(8100) ──"turn 1"── node(9000) ── …
                                 └──"another turn"── node(8800)

A node stands for the prefix that ends at its `end`; its `edge` is the part below its parent. It carries two
payloads: the KV rows of its edge, and at most one recurrent state, which has consumed exactly `end` tokens (with
it, where the model has sliding windows, the window rows before `end`).
What may be evicted, pinned or resumed is decided in `cache`; nothing here looks at a payload except to cut the
rows of an edge in two.

`page` is the unit of edges: 1 (any position) or, for strategies with paged KV, a number of tokens; children are
found by their first page. A namespace has a root of its own, so its prefixes can't be shared.
"""

from dataclasses import dataclass
from typing import Generic, TypeVar

from milepost.core.pool import NO_ROWS, Rows, Slot
from milepost.core.tokens import WIDTH, Packed, common, cut, length

T = TypeVar("T")


class Payload(Generic[T]):
    """What a node holds of one kind: the ids on the device, and how many leases need them to stay."""

    __slots__ = ("device", "pins")

    def __init__(self, device: T | None = None, pins: int = 0) -> None:
        self.device = device
        self.pins = pins


class Node:
    """A prefix. Identity matters: leases and orders refer to the object."""

    __slots__ = ("children", "edge", "end", "kv", "note", "parent", "state", "window")

    def __init__(self, edge: Packed, end: int, parent: "Node | None", rows: Rows | None) -> None:
        self.edge = edge
        self.end = end
        self.parent = parent
        self.children: dict[Packed, Node] = {}
        self.kv: Payload[Rows] = Payload(rows)
        self.state: Payload[Slot] = Payload()
        self.window: Rows = NO_ROWS
        self.note: object = None  # why the state is here, or why it is gone; written and read by `cache`

    @property
    def start(self) -> int:
        return self.end - length(self.edge)

    def __repr__(self) -> str:
        kind = "root" if self.parent is None else f"{self.start}..{self.end}"
        return f"<Node {kind} slot={self.state.device} pins={self.kv.pins}/{self.state.pins}>"


@dataclass(frozen=True, slots=True)
class Walk:
    """Where a walk ended: at `node`, and `shared` tokens further inside the edge of `partial` if that is a node."""

    node: Node
    partial: Node | None
    shared: int

    @property
    def depth(self) -> int:
        return self.node.end + self.shared


class RadixTree:
    def __init__(self, page: int = 1) -> None:
        self.page = page
        self.roots: dict[str, Node] = {}

    def root(self, namespace: str) -> Node:
        """The root of a namespace, made when it is first needed. Its note is the namespace."""
        root = self.roots.get(namespace)
        if root is None:
            root = self.roots[namespace] = Node(b"", 0, None, None)
            root.note = namespace
        return root

    def walk(self, node: Node, key: Packed, limit: int) -> Walk:
        """Follow `key` downwards from `node` (which `key` passes through), not beyond `limit` tokens. Reads only.

        `shared` is rounded down to whole pages.
        """
        page = self.page
        at = node.end
        while at < limit:
            child = node.children.get(key[at * WIDTH : (at + page) * WIDTH])
            if child is None:
                break
            if child.end <= limit and key.startswith(child.edge, at * WIDTH):
                node, at = child, child.end
                continue
            shared = min(common(child.edge, key, at), limit - at) // page * page
            return Walk(node, child, shared) if shared else Walk(node, None, 0)
        return Walk(node, None, 0)

    def split(self, lower: Node, shared: int) -> Node:
        """Cut the edge of `lower` after `shared` tokens and return the new node above it.

        `lower` keeps identity, end, state and pins. The new node has no state, and its KV is pinned by all
        who pin `lower`, because they pin their whole path.
        """
        upper_parent, rows = lower.parent, lower.kv.device
        assert upper_parent is not None and rows is not None
        assert 0 < shared < length(lower.edge) and shared % self.page == 0
        upper = Node(cut(lower.edge, 0, shared), lower.start + shared, upper_parent, rows[:shared].copy())
        upper.kv.pins = lower.kv.pins
        upper_parent.children[self._first(lower.edge)] = upper
        lower.edge = cut(lower.edge, shared, length(lower.edge))
        lower.kv.device = rows[shared:].copy()
        lower.parent = upper
        upper.children[self._first(lower.edge)] = lower
        return upper

    def graft(self, parent: Node, edge: Packed, rows: Rows) -> Node:
        """A new leaf below `parent`."""
        first = self._first(edge)
        assert first not in parent.children, "two children with the same first tokens"
        assert length(edge) == rows.size > 0 and rows.size % self.page == 0
        leaf = Node(edge, parent.end + rows.size, parent, rows)
        parent.children[first] = leaf
        return leaf

    def prune(self, leaf: Node) -> Node:
        """Take a leaf out and return its parent."""
        parent = leaf.parent
        assert parent is not None and not leaf.children
        removed = parent.children.pop(self._first(leaf.edge))
        assert removed is leaf
        leaf.parent = None
        return parent

    def nodes(self) -> list[Node]:
        """All nodes but the roots, parents before children."""
        found: list[Node] = []
        front = list(self.roots.values())
        while front:
            children = list(front.pop().children.values())
            found += children
            front += children
        return found

    def _first(self, edge: Packed) -> Packed:
        return edge[: self.page * WIDTH]
