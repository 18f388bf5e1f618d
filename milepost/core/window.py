"""KV rows of sliding-window layers: a pool of its own, whose rows are freed behind the window.

A sequence at position n reads the last `reach` rows before n and no others. So a checkpoint at n can be resumed only
where these rows still live; they belong to it as its state does, and both come and go together:

    rows of a sequence        ………… low ……… n − reach ……… n ……… high
                              freed │ let go at commit │ live │ being written
    rows of its checkpoints          [m − reach, m)   [n − reach, n)

Windows overlap: one row may belong to several checkpoints and to running sequences. It is free when nobody names it.
A model without such layers has a reach of 0, and everything here is empty.
"""

from dataclasses import dataclass

import numpy as np

from milepost.core.pool import NO_ROWS, Rows


@dataclass(frozen=True, slots=True)
class Windows:
    """`reach`: positions that a window layer sees, its own included. `rows`: size of their pool."""

    rows: int = 0
    reach: int = 0


class WindowPool:
    """Rows 1 … `size`, each counted twice: by how many checkpoints it is kept, by how many leases it is used.

    A lease is a running sequence, its snapshot, or a pin on a checkpoint: rows in use can't be had by evicting.
    """

    def __init__(self, windows: Windows) -> None:
        self.size = windows.rows
        self.reach = windows.reach
        self._stack: Rows = np.arange(self.size, 0, -1, dtype=np.int32)
        self._kept = np.zeros(self.size + 1, np.int32)
        self._used = np.zeros(self.size + 1, np.int32)
        self.free = self.size
        self.evictable = 0  # kept by checkpoints, used by nobody

    @property
    def room(self) -> int:
        """Rows that are free, or would be if all checkpoints that nobody uses went."""
        return self.free + self.evictable

    def take(self, count: int) -> Rows:
        """`count` free rows, in use by the caller, who has made sure that there are enough."""
        assert 0 <= count <= self.free, f"{count} of {self.free} free window rows"
        self.free -= count
        taken = self._stack[self.free : self.free + count][::-1].copy()
        self._used[taken] = 1
        return taken

    def use(self, rows: Rows) -> None:
        """One more lease on `rows`, all of which are kept or used already."""
        if rows.size:
            self.evictable -= self.spare(rows)
            self._used[rows] += 1

    def unuse(self, rows: Rows) -> None:
        """A lease lets go of `rows`."""
        if rows.size:
            self._used[rows] -= 1
            idle = rows[self._used[rows] == 0]
            kept = self._kept[idle] > 0
            self.evictable += int(kept.sum())
            self._put_back(idle[~kept])

    def keep(self, rows: Rows) -> None:
        """A checkpoint names `rows`, which are in use by whoever publishes it."""
        if rows.size:
            assert (self._used[rows] > 0).all(), "a checkpoint of rows that nobody holds"
            self._kept[rows] += 1

    def unkeep(self, rows: Rows) -> None:
        """A checkpoint that named `rows` has gone."""
        if rows.size:
            self._kept[rows] -= 1
            idle = rows[(self._kept[rows] == 0) & (self._used[rows] == 0)]
            self.evictable -= idle.size
            self._put_back(idle)

    def spare(self, rows: Rows) -> int:
        """How many of a checkpoint's `rows` nobody uses."""
        return int(np.count_nonzero(self._used[rows] == 0))

    def counts(self) -> tuple[Rows, Rows]:
        """(kept, used) int32 [size + 1]. For the audit."""
        return self._kept, self._used

    def _put_back(self, rows: Rows) -> None:
        self._stack[self.free : self.free + rows.size] = rows[::-1]
        self.free += rows.size


class Window:
    """The window rows of a running sequence: one for each position from `low` to `high`."""

    __slots__ = ("_pool", "_rows", "high", "low")

    def __init__(self, pool: WindowPool) -> None:
        self._pool = pool
        self._rows = NO_ROWS  # int32 [high − low]
        self.low = self.high = 0

    def resume(self, rows: Rows, position: int) -> None:
        """Begin at `position` with the rows before it, which a checkpoint keeps."""
        self._pool.use(rows)
        self._rows, self.low, self.high = rows, position - rows.size, position

    def missing(self, stop: int) -> int:
        """Rows still to be taken for the positions below `stop`."""
        return max(0, stop - self.high) if self._pool.reach else 0

    def extend(self, rows: Rows) -> None:
        """Rows taken for the next positions."""
        self._rows = np.concatenate((self._rows, rows))
        self.high += rows.size

    def before(self, position: int) -> Rows:
        """The rows that a state at `position` needs: of at most `reach` positions before it."""
        return self._span(max(0, position - self._pool.reach), position) if self._pool.reach else NO_ROWS

    def until(self, stop: int) -> Rows:
        """The rows of all positions from `low` to `stop`."""
        return self._span(self.low, stop) if self._pool.reach else NO_ROWS

    def move(self, position: int) -> None:
        """All before `position` is consumed: what no later position sees is let go."""
        low = position - self._pool.reach
        if self._pool.reach and low > self.low:
            self._pool.unuse(self._span(self.low, low))
            self._rows = self._rows[low - self.low :]
            self.low = low

    def close(self) -> None:
        """The sequence ends: all its rows are let go."""
        self._pool.unuse(self._rows)
        self._rows, self.low, self.high = NO_ROWS, 0, 0

    def _span(self, start: int, stop: int) -> Rows:
        assert self.low <= start <= stop <= self.high, f"{start}..{stop} of {self.low}..{self.high}"
        return self._rows[start - self.low : stop - self.low]
