"""Who goes first. Recency is an order, not a clock: ordered dicts, cold end first, hot end last.

Two orders over the same nodes. A *row victim* is a leaf whose KV nobody pins; a *state victim* is a node whose
state nobody pins. Which of them goes first is the whole policy:

    rows     stranded leaves (no checkpoint: they only locate forks), then the coldest leaf
    states   marked checkpoints (in excess of the cap per path), then the coldest

Why the cold end of the row order is always a leaf: nodes enter it when their last pin goes, a path at a time,
child before parent, and whoever pins a child pins its parent. So a parent is never colder than its children.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from milepost.core.tokens import length
from milepost.core.tree import Node


@dataclass(frozen=True, slots=True)
class Listing:
    """The orders as lists, cold end first. For the audit and the tests."""

    rows: list[Node]
    stranded: list[Node]
    states: list[Node]
    marked: list[Node]


class Victims:
    """The evictable nodes in order, and how much they hold.

    With `stranded_first` off the row order is plain LRU over leaves, as in SGLang.
    """

    def __init__(self, stranded_first: bool) -> None:
        self._rows: OrderedDict[Node, None] = OrderedDict()
        self._stranded: OrderedDict[Node, None] = OrderedDict()
        self._stranded_first = stranded_first
        self._states: OrderedDict[Node, None] = OrderedDict()
        self._marked: OrderedDict[Node, None] = OrderedDict()
        self.rows = 0
        self.pinned_states = 0

    # Rows

    def add_rows(self, node: Node) -> None:
        """The last pin of `node` has gone: it becomes the hottest."""
        assert node.kv.pins == 0 and node not in self._rows
        self._rows[node] = None
        self.rows += length(node.edge)
        self.reconsider(node)

    def remove_rows(self, node: Node) -> None:
        """`node` is pinned, or leaves the tree."""
        del self._rows[node]
        self._stranded.pop(node, None)
        self.rows -= length(node.edge)

    def shrink(self, node: Node, tokens: int) -> None:
        """The edge of `node` is about to lose `tokens` to a new node above it."""
        if node in self._rows:
            self.rows -= tokens

    def reconsider(self, node: Node, coldest: bool = False) -> None:
        """Children, state or pins of `node` have changed: is it a stranded leaf now?

        `coldest`: it became one because its child was just evicted, so its branch is the one to finish.
        """
        stranded = node in self._rows and not node.children and node.state.device is None
        if not stranded:
            self._stranded.pop(node, None)
        elif node not in self._stranded:
            self._stranded[node] = None
            self._stranded.move_to_end(node, last=not coldest)

    def row_victim(self) -> Node:
        """The leaf to drop next; there is one while `rows` is not 0."""
        if self._stranded_first and self._stranded:
            return next(iter(self._stranded))
        return next(iter(self._rows))

    # States

    @property
    def states(self) -> int:
        """Checkpoints that could be evicted now."""
        return len(self._states) - self.pinned_states

    @property
    def marked(self) -> int:
        return len(self._marked)

    def touch_state(self, node: Node) -> None:
        """The state of `node` has been stored or used."""
        self._states[node] = None
        self._states.move_to_end(node)
        if node in self._marked:
            self._marked.move_to_end(node)

    def forget_state(self, node: Node) -> None:
        del self._states[node]
        self._marked.pop(node, None)

    def mark(self, node: Node) -> None:
        """In excess of the cap: among the first to go. Marks are kept in the order of last use."""
        assert node in self._states and node not in self._marked
        self._marked[node] = None

    def unmark(self, node: Node) -> None:
        self._marked.pop(node, None)

    def is_marked(self, node: Node) -> bool:
        return node in self._marked

    def state_victim(self, worth: Callable[[Node], bool] = lambda _: True) -> Node:
        """The checkpoint to drop next, of those `worth` dropping; the caller knows that there is one."""
        for order in (self._marked, self._states):
            for node in order:
                if node.state.pins == 0 and worth(node):
                    return node
        raise AssertionError("all checkpoints are pinned")

    def listing(self) -> Listing:
        return Listing(list(self._rows), list(self._stranded), list(self._states), list(self._marked))
