"""The seam between deciding and acting: a `Plan` goes down, a `Result` comes up. Ids cross it, bytes never do."""

from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Protocol

from milepost.core.checkpoint import Reason
from milepost.core.pool import NO_ROWS, Owner, Rows, Slot
from milepost.core.request import Request
from milepost.core.tokens import Tokens


@dataclass(frozen=True, slots=True)
class Mark:
    """Write the state after exactly `position` tokens into `slot`."""

    position: int
    slot: Slot
    reason: Reason


@dataclass(frozen=True, slots=True)
class Copy:
    """Slot `target` becomes a copy of slot `source`. Copies run before all chunks of their plan."""

    source: Slot
    target: Slot


@dataclass(frozen=True, slots=True)
class Chunk:
    """Compute positions `start` … `stop`−1 of one sequence, updating `slot` in place.

    `tokens` int32 [known]: all that is known of the sequence, known ≥ start + 1. `rows` int32 [stop]: the KV row
    of each position; the rows from `start` on are written, all are read. A chunk that starts at 0 begins from a
    zero state. `samples` is how many tokens to draw: 0 inside a prompt, 1 at its end and in decode, k in a decode
    chunk that spans k positions (each fed with the token drawn before it: known = start + 1, stop = start + k).
    `window` int32 [stop − first]: the rows of sliding-window layers for positions `first` … `stop`−1, where at least
    the window before `start` is among them; empty where the model has no such layers.
    """

    sequence: Owner
    request: Request
    start: int
    stop: int
    tokens: Tokens
    rows: Rows
    slot: Slot
    marks: tuple[Mark, ...] = ()
    samples: int = 0
    decode: bool = False
    window: Rows = field(default_factory=lambda: NO_ROWS)


@dataclass(frozen=True, slots=True)
class Plan:
    step: int
    copies: tuple[Copy, ...]
    chunks: tuple[Chunk, ...]

    @property
    def idle(self) -> bool:
        return not self.chunks

    def digest(self) -> str:
        """A fingerprint of all that is decided: equal plans, equal digests."""
        found = blake2b(digest_size=16)
        for copy in self.copies:
            found.update(f"copy {copy.source} {copy.target};".encode())
        for chunk in self.chunks:
            marks = [(mark.position, mark.slot, mark.reason.value) for mark in chunk.marks]
            place = (chunk.sequence, chunk.start, chunk.stop, chunk.slot, chunk.samples, chunk.decode, marks)
            ids = chunk.rows.tobytes() + chunk.window.tobytes()
            found.update(repr(place).encode() + chunk.tokens.tobytes() + ids)
        return found.hexdigest()


@dataclass(frozen=True, slots=True)
class Result:
    """What a run of the plan of the same `step` produced.

    `tokens`: the tokens drawn, by sequence. `stopped`: sequences whose text is complete (a stop string), whatever
    their ids say. `elapsed` in seconds, by the executor's own clock.
    """

    step: int
    tokens: dict[Owner, tuple[int, ...]] = field(default_factory=dict)
    stopped: frozenset[Owner] = frozenset()
    elapsed: float = 0.0


class Executor(Protocol):
    """Whoever owns the bytes: `engine.executor.TorchExecutor`, or `sim.executor.SimExecutor` without any."""

    def run(self, plan: Plan) -> Result: ...

    def close(self) -> None: ...
