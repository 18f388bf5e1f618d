"""An executor without bytes: memory that remembers what was written to it, and time that is computed.

Each KV row carries the digest of the prefix that it ends, each slot the length and digest of the prefix it has
consumed. Before a chunk is computed, every row it reads and its working slot must carry what the tokens demand.
A use after free, a missed copy, a wrong resume, a write to a shared slot: all fail at the first read.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from milepost.core.plan import Chunk, Mark, Plan, Result
from milepost.core.pool import NO_ROWS, Owner, Rows
from milepost.core.tokens import Tokens
from milepost.core.window import Windows

Digests = NDArray[np.uint64]

Draw = Callable[[Chunk, int], tuple[int, ...]]
"""`draw(chunk, digest)`: the `chunk.samples` tokens that follow a prefix of that digest (0 without tags)."""

Cost = Callable[[Plan], float]
"""Seconds that a plan takes."""


def digests(tokens: Tokens, start: int = 0, before: int = 0) -> Digests:
    """The digest of each prefix that ends at one of `tokens`, which stand at positions `start` and following.

    A sum of hashes of (token, position): wrong order, wrong depth or a wrong token give another sum, and all
    prefixes of a sequence cost one cumulative sum.
    """
    positions = np.arange(start, start + tokens.size, dtype=np.uint64)
    mixed = scramble(tokens.astype(np.uint64) ^ (positions << np.uint64(32)))
    mixed[:1] += np.uint64(before)
    return np.cumsum(mixed, dtype=np.uint64)


def scramble(values: Digests) -> Digests:
    """A bijective scrambling of 64 bits: multiply and shift, three times."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def draw_from_prefix(vocabulary: int) -> Draw:
    """A "model": the next token is a function of the whole prefix, so texts don't depend on the schedule."""

    def draw(chunk: Chunk, digest: int) -> tuple[int, ...]:
        position, drawn = chunk.tokens.size, []
        for _ in range(chunk.samples):
            token = digest % vocabulary
            drawn.append(token)
            digest = int(digests(np.array([token], np.int32), position, digest)[0])
            position += 1
        return tuple(drawn)

    return draw


class Memory:
    """What was written where. Slot 0 and row 0 take anything and can't be read."""

    def __init__(self, rows: int, slots: int, windows: Windows = Windows()) -> None:  # noqa: B008 - frozen
        self.rows = np.zeros(rows, np.uint64)
        self.windows = np.zeros(windows.rows + 1, np.uint64)
        self.reach = windows.reach
        self.slots: list[tuple[int, int] | None] = [None] * (slots + 1)

    def check(self, chunk: Chunk, known: Digests) -> None:
        """What the chunk is about to read is what its tokens demand."""
        start = chunk.start
        wrong = np.flatnonzero(self.rows[chunk.rows[:start]] != known[:start])
        assert wrong.size == 0, f"sequence {chunk.sequence}: KV row of position {wrong[0]} is another prefix's"
        if self.reach:
            first = chunk.stop - chunk.window.size
            assert first <= max(0, start - self.reach), f"sequence {chunk.sequence}: window from {first}"
            wrong = np.flatnonzero(self.windows[chunk.window[: start - first]] != known[first:start])
            assert wrong.size == 0, f"sequence {chunk.sequence}: window row of {first + wrong[0]} is another prefix's"
        if start:
            demanded = (start, int(known[start - 1]))
            found = self.slots[chunk.slot]
            assert found == demanded, f"sequence {chunk.sequence}: the state at {start} is {found}, not {demanded}"

    def write(self, chunk: Chunk, prefix: Digests) -> None:
        """`prefix` holds the digests of positions 0 … stop−1."""
        self.rows[chunk.rows[chunk.start :]] = prefix[chunk.start :]
        if self.reach:
            self.windows[written_window(chunk)] = prefix[chunk.start :]
        for mark in chunk.marks:
            self.slots[mark.slot] = (mark.position, int(prefix[mark.position - 1]))
        self.slots[chunk.slot] = (chunk.stop, int(prefix[-1]))


class SimExecutor:
    """Runs plans in virtual time. Without `memory` nothing is checked and nothing but time is kept."""

    def __init__(self, draw: Draw, cost: Cost | None = None, memory: Memory | None = None) -> None:
        self._draw = draw
        self._cost = cost
        self._memory = memory

    def run(self, plan: Plan) -> Result:
        memory = self._memory
        tokens: dict[Owner, tuple[int, ...]] = {}
        if memory is not None:
            check_writes(plan)
            for copy in plan.copies:
                memory.slots[copy.target] = memory.slots[copy.source]
        for chunk in plan.chunks:
            known = digests(chunk.tokens) if memory is not None else None
            drawn: tuple[int, ...] = ()
            if chunk.samples:
                drawn = self._draw(chunk, int(known[-1]) if known is not None else 0)
                assert len(drawn) == chunk.samples
                tokens[chunk.sequence] = drawn
            if memory is not None and known is not None:
                memory.check(chunk, known)
                more = digests(np.array(drawn[:-1], np.int32), known.size, int(known[-1]))
                memory.write(chunk, np.concatenate([known, more])[: chunk.stop])
        return Result(plan.step, tokens, elapsed=self._cost(plan) if self._cost else 0.0)

    def close(self) -> None:
        pass


def written_window(chunk: Chunk) -> Rows:
    """The window rows that the chunk writes."""
    return chunk.window[chunk.window.size - (chunk.stop - chunk.start) :] if chunk.window.size else chunk.window


def check_writes(plan: Plan) -> None:
    """Invariant 5: no row and no slot is written twice in a plan, and no copied-from slot is written."""
    slots = [chunk.slot for chunk in plan.chunks]
    marks: list[Mark] = [mark for chunk in plan.chunks for mark in chunk.marks]
    slots += [mark.slot for mark in marks]
    assert len(set(slots)) == len(slots), "a slot is written twice in one plan"
    assert not {copy.source for copy in plan.copies} & set(slots), "a slot is both copied from and written"
    for rows in ([chunk.rows[chunk.start :] for chunk in plan.chunks], [written_window(c) for c in plan.chunks]):
        written = np.concatenate(rows) if rows else NO_ROWS
        assert np.unique(written).size == written.size, "a row is written twice in one plan"
    for chunk in plan.chunks:
        assert 0 <= chunk.start < chunk.stop == chunk.rows.size
        positions = [mark.position for mark in chunk.marks]
        assert positions == sorted(set(positions)) and all(chunk.start < p <= chunk.stop for p in positions)
