"""Pools of ids: who owns which KV row, who owns which state slot, at any time.

A pool hands out numbers, never bytes. Each id has exactly one owner (invariant 1), and every move names the
owner it takes from, so a double free or a use after free fails at the call that does it. Id 0 (with pages: the
whole page 0) is the dummy target for padding and is never handed out.

    owner  0   free
    owner −1   the prefix tree
    owner  n   sequence number n (n ≥ 1)

Free ids are kept as a stack: the same calls give the same ids.
"""

from collections.abc import Sequence
from typing import NewType

import numpy as np
from numpy.typing import NDArray

Owner = NewType("Owner", int)
FREE = Owner(0)
TREE = Owner(-1)

Slot = NewType("Slot", int)
Rows = NDArray[np.int32]
NO_ROWS: Rows = np.empty(0, np.int32)


class RowPool:
    """KV rows, handed out in whole pages of `page` consecutive rows (1 by default, so that nothing is rounded).

    `size` is in rows and a multiple of `page`; ids run from `page` to `size + page − 1`. All methods take and
    return int32 arrays that hold whole pages.
    """

    def __init__(self, size: int, page: int = 1) -> None:
        assert size >= page >= 1 and size % page == 0, f"{size} rows are not whole pages of {page}"
        self.size = size
        self.page = page
        pages = size // page
        self._stack: Rows = np.arange(pages, 0, -1, dtype=np.int32)
        self._top = pages
        self._owner = np.zeros(pages + 1, np.int32)
        self._inside = np.arange(page, dtype=np.int32)

    @property
    def free(self) -> int:
        return self._top * self.page

    def take(self, count: int, owner: Owner) -> Rows:
        """`count` free rows (whole pages) for `owner`. The caller has made sure that there are enough."""
        pages = count // self.page
        assert pages * self.page == count and 0 <= pages <= self._top, f"{count} of {self.free} free rows"
        self._top -= pages
        taken = self._stack[self._top : self._top + pages][::-1].copy()
        self._owner[taken] = owner
        if self.page == 1:
            return taken
        return (taken[:, None] * np.int32(self.page) + self._inside).ravel()

    def take_each(self, owners: Sequence[Owner]) -> Rows:
        """One page for each owner, int32 [owners, page]: the same as one `take` after the other."""
        assert len(owners) <= self._top, f"{len(owners)} pages of {self.free} free rows"
        self._top -= len(owners)
        taken = self._stack[self._top : self._top + len(owners)][::-1]
        self._owner[taken] = owners
        return taken[:, None] * np.int32(self.page) + self._inside

    def give(self, rows: Rows, owner: Owner) -> None:
        """`owner` gives `rows` back."""
        pages = self._pages(rows)
        self._check(pages, owner)
        self._owner[pages] = FREE
        self._stack[self._top : self._top + pages.size] = pages[::-1]
        self._top += pages.size

    def move(self, rows: Rows, source: Owner, target: Owner) -> None:
        """Ownership of `rows` passes from `source` to `target`."""
        pages = self._pages(rows)
        self._check(pages, source)
        self._owner[pages] = target

    def owners(self) -> dict[Owner, int]:
        """Rows per owner, free ones included. For the audit and the reports."""
        counts = np.bincount(self._owner[1:] - TREE)
        return {Owner(int(i) + TREE): int(counts[i]) * self.page for i in np.flatnonzero(counts)}

    def owned(self, rows: Rows, owner: Owner) -> bool:
        """Whether `owner` has all of `rows` and no row is named twice."""
        pages = self._pages(rows)
        named = np.zeros(self._owner.size, bool)
        named[pages] = True
        return bool((self._owner[pages] == owner).all()) and int(named.sum()) == pages.size

    def _pages(self, rows: Rows) -> Rows:
        if self.page == 1:
            return rows
        assert rows.size % self.page == 0, f"{rows.size} rows are not whole pages of {self.page}"
        return rows[:: self.page] // self.page

    def _check(self, pages: Rows, owner: Owner) -> None:
        assert owner != FREE and bool((self._owner[pages] == owner).all()), f"rows not owned by {owner}"


class SlotPool:
    """State slots 1 … `size`."""

    def __init__(self, size: int) -> None:
        assert size >= 1
        self.size = size
        self._stack = [Slot(i) for i in range(size, 0, -1)]
        self._owner = [FREE] * (size + 1)

    @property
    def free(self) -> int:
        return len(self._stack)

    def take(self, owner: Owner) -> Slot:
        """One free slot for `owner`. The caller has made sure that there is one."""
        assert self._stack, "no free slot"
        slot = self._stack.pop()
        assert self._owner[slot] == FREE and owner != FREE
        self._owner[slot] = owner
        return slot

    def give(self, slot: Slot, owner: Owner) -> None:
        """`owner` gives `slot` back."""
        self.move(slot, owner, FREE)
        self._stack.append(slot)

    def move(self, slot: Slot, source: Owner, target: Owner) -> None:
        """Ownership of `slot` passes from `source` to `target`."""
        assert slot >= 1 and self._owner[slot] == source != FREE, (
            f"slot {slot} belongs to {self._owner[slot]}, not to {source}"
        )
        self._owner[slot] = target

    def owner(self, slot: Slot) -> Owner:
        return self._owner[slot]

    def owners(self) -> dict[Owner, int]:
        """Slots per owner, free ones included. For the audit and the reports."""
        counts: dict[Owner, int] = {}
        for owner in self._owner[1:]:
            counts[owner] = counts.get(owner, 0) + 1
        return counts
