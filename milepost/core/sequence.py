"""The running state of a request: its tokens, how many the model has consumed, and the ids it holds.

tokens   0 …………… computed ……… known
         │ consumed   │ to be computed next; the last one may just have been drawn
rows     0 … lease.node.end … computed … held
         │ the tree's     │ its own         │
"""

from enum import Enum

import numpy as np

from milepost.core.cache import Lease, Snapshot
from milepost.core.pool import NO_ROWS, Owner, Rows, Slot
from milepost.core.request import Request
from milepost.core.stats import Reuse
from milepost.core.tokens import Packed, Tokens, length, unpack
from milepost.core.window import Window


class Status(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    DONE = "done"


class Sequence:
    __slots__ = (
        "computed",
        "fork",
        "held",
        "known",
        "lease",
        "max_new",
        "number",
        "preempted",
        "prompt",
        "request",
        "reuse",
        "rows",
        "slot",
        "snapshot",
        "status",
        "target",
        "tokens",
        "tracking",
        "window",
    )

    def __init__(self, number: Owner, request: Request, max_new: int, window: Window) -> None:
        self.number = number
        self.request = request
        self.max_new = max_new
        self.status = Status.WAITING
        self.prompt = length(request.prompt)
        self.tokens: Tokens = unpack(request.prompt)
        self.known = self.prompt
        self.computed = 0
        self.target = self.prompt  # tokens to prefill before the next one is drawn
        self.held = 0
        self.rows: Rows = NO_ROWS
        self.window = window
        self.lease: Lease | None = None
        self.slot: Slot | None = None
        self.tracking: list[Slot] = []  # targets of rolling snapshots, the next one first
        self.snapshot: Snapshot | None = None  # the last rolling one that is not published
        self.fork = 0
        self.reuse: Reuse | None = None
        self.preempted = 0

    @property
    def generated(self) -> int:
        return self.known - self.prompt

    @property
    def decoding(self) -> bool:
        """All that is known is consumed but for the token drawn last."""
        return self.computed >= self.target

    def key(self, stop: int) -> Packed:
        """The first `stop` tokens, packed."""
        return self.tokens[:stop].tobytes()

    def append(self, tokens: tuple[int, ...]) -> None:
        self.tokens = _room(self.tokens, self.known, self.known + len(tokens))
        self.tokens[self.known : self.known + len(tokens)] = tokens
        self.known += len(tokens)

    def hold(self, rows: Rows) -> None:
        """Rows taken for the positions after those it holds already."""
        self.rows = _room(self.rows, self.held, self.held + rows.size)
        self.rows[self.held : self.held + rows.size] = rows
        self.held += rows.size


def _room(array: Tokens, used: int, needed: int) -> Tokens:
    """The array, or a larger writable copy of its first `used` entries, with room for `needed`."""
    if array.size >= needed and array.flags.writeable:
        return array
    larger = np.empty(max(needed + needed // 4, 64), np.int32)
    larger[:used] = array[:used]
    return larger
