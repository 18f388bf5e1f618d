"""What the tree once held and had to drop: ids only, so that a miss can be told from news.

A dropped leaf leaves its edge behind, hanging from the node it hung from. The memory is bounded in tokens; the
oldest edges are forgotten first. Nothing here is ever reused: it only explains.
"""

from collections import OrderedDict

from milepost.core.tokens import WIDTH, Packed, common, length
from milepost.core.tree import Node

LIMIT = 4_000_000
"""Tokens remembered, 4 bytes each."""


class Ghost:
    """The edge of a node that was dropped, what it hangs from, and the ghosts below it."""

    __slots__ = ("above", "below", "edge")

    def __init__(self, edge: Packed, above: "Node | Ghost", below: "Ghosts") -> None:
        self.edge = edge
        self.above = above
        self.below = below
        for ghost in below.values():
            ghost.above = self


Ghosts = dict[Packed, Ghost]


class History:
    """Ghosts by the live node from which they hang."""

    def __init__(self, page: int, limit: int = LIMIT) -> None:
        self._first = page * WIDTH
        self._limit = limit
        self.tokens = 0
        self._hanging: dict[Node, Ghosts] = {}
        self._order: OrderedDict[Ghost, None] = OrderedDict()

    def dropped(self, leaf: Node, parent: Node) -> list[Node]:
        """`leaf` has gone from below `parent`: its edge and the ghosts below it stay behind.

        Returns nodes from which nothing hangs any more, because the oldest edges had to be forgotten.
        """
        self.revived(leaf, parent)
        ghost = Ghost(leaf.edge, parent, self._hanging.pop(leaf, {}))
        self._hanging.setdefault(parent, {})[leaf.edge[: self._first]] = ghost
        self._order[ghost] = None
        self.tokens += length(leaf.edge)
        bare = []
        while self.tokens > self._limit:
            bare += self._forget(next(iter(self._order)))
        return bare

    def revived(self, leaf: Node, parent: Node) -> None:
        """`leaf` is new below `parent`: what was remembered of that way is superseded."""
        ghost = self._hanging.get(parent, {}).get(leaf.edge[: self._first])
        if ghost is not None:
            self._forget(ghost)

    def hangs_from(self, node: Node) -> bool:
        return node in self._hanging

    def clear(self) -> None:
        self._hanging.clear()
        self._order.clear()
        self.tokens = 0

    def seen(self, node: Node, key: Packed) -> tuple[int, bool]:
        """How far `key`, which passes through `node`, was known once, and whether that way went on differently."""
        ghosts, at = self._hanging.get(node, {}), node.end
        while True:
            ghost = ghosts.get(key[at * WIDTH : at * WIDTH + self._first])
            if ghost is None:
                return at, bool(ghosts) and at < length(key)
            shared = common(ghost.edge, key, at)
            at += shared
            if shared < length(ghost.edge):
                return at, at < length(key)
            ghosts = ghost.below

    def _forget(self, ghost: Ghost) -> list[Node]:
        """Forget a ghost and all below it; the live node it hung from, if nothing hangs from that any more."""
        for below in list(ghost.below.values()):
            self._forget(below)
        del self._order[ghost]
        self.tokens -= length(ghost.edge)
        first, above = ghost.edge[: self._first], ghost.above
        if isinstance(above, Ghost):
            del above.below[first]
            return []
        hanging = self._hanging[above]
        del hanging[first]
        if hanging:
            return []
        del self._hanging[above]
        return [above]
