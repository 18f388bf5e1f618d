"""Block ids: from lists to runs and back, checked against lengths, numbered so that an id stands for its prefix."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from milepost.core.tokens import Tokens
from milepost.errors import TraceError
from milepost.sim.formats.lines import Row, short
from milepost.sim.trace import Blocks, Run, Segments, SessionId, Trace, Turn, expand

COMMON_SIZES = (16, 32, 64, 128, 256, 512, 1024, 2048)


def encode(ids: Sequence[int] | NDArray[np.integer]) -> tuple[Run, ...]:
    """Run-length coded."""
    array = np.asarray(ids, np.int64)
    if not array.size:
        return ()
    starts = np.concatenate([[0], np.flatnonzero(np.diff(array) != 1) + 1])
    counts = np.diff(starts, append=array.size)
    return tuple(zip(array[starts].tolist(), counts.tolist(), strict=True))


def size(runs: Sequence[Run]) -> int:
    return sum(count for _, count in runs)


def head(runs: Sequence[Run], count: int) -> tuple[Run, ...]:
    """The first `count` ids."""
    kept: list[Run] = []
    for start, length in runs:
        if count <= 0:
            break
        kept.append((start, min(length, count)))
        count -= length
    return tuple(kept)


def id_list(row: Row, name: str) -> list[int]:
    ids = row.list(name)
    for i, one in enumerate(ids):
        if type(one) is not int:
            raise row.error(f"{name}[{i}] is {short(one)}: a whole number is needed")
    return ids


def run_list(row: Row, name: str) -> tuple[Run, ...]:
    """A field of [start, n] pairs."""
    runs = []
    for i, pair in enumerate(row.list(name)):
        match pair:
            case [int(start), int(count)] if start >= 0 and count > 0 and start + count <= 2**31:
                runs.append((start, count))
            case _:
                raise row.error(f"{name}[{i}] is {short(pair)}: [first id, count] is needed, ids below 2^31")
    return tuple(runs)


def check(row: Row, ids: int, length: int, block: int, shorter: int = 0) -> int:
    """How many of the ids name full blocks. The last may name a partial one; `shorter`: how many may be missing."""
    full = length // block
    if full - shorter <= ids <= full:
        return ids
    if ids == full + 1 and length % block:
        return full
    fits = [b for b in COMMON_SIZES if ids in (length // b, -(-length // b))]
    hint = f"; for example --block {fits[0]}" if fits else ""
    expected = f"{full} or {full + 1}" if length % block else str(full)
    raise row.error(f"{ids} ids for {length} tokens don't fit blocks of {block}, which make {expected}{hint}")


class Numbers:
    """Compact ids in order of first occurrence. A block is known by its raw id *and* the block before it.

    So a number stands for a whole prefix even where a file's own ids name contents only.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[int, object], int] = {}

    def of(self, raw: Sequence[object], before: int = -1) -> list[int]:
        """The numbers of blocks that follow the one numbered `before` (-1: none)."""
        known, found = self._known, []
        for one in raw:
            before = known.setdefault((before, one), len(known))
            found.append(before)
        return found

    def blocks(
        self, raw: Sequence[object], full: int, block: int, answer: Sequence[object] = (), space: SessionId = ""
    ) -> Blocks:
        """`full` of the raw ids are full blocks; one more may be the partial tail."""
        ids = self.of(raw)
        after = self.of(answer, ids[full - 1] if full else -1)
        tail = ids[full] if len(ids) > full else None
        return Blocks(encode(ids[:full]), block, space, tail, encode(after))


def infer_sessions(turns: Sequence[Turn]) -> list[Turn]:
    """A turn joins the session whose latest prompt's full blocks its own begin with; else it opens one."""
    latest: dict[int, tuple[int, int]] = {}  # id of a session's last full block → session, turn
    sessions, found = 0, []
    for turn in turns:
        assert isinstance(turn.identity, Blocks)
        ids = turn.identity.ids()
        owner = None
        for one in reversed(ids[:-1].tolist()):
            owner = latest.pop(one, None)
            if owner is not None:
                break
        session, number = owner if owner is not None else (sessions, -1)
        sessions += owner is None
        if ids.size:
            latest[int(ids[-1])] = (session, number + 1)
        found.append(replace(turn, session=session, turn=number + 1))
    return found


def continued(trace: Trace) -> dict[tuple[SessionId, int], int]:
    """The block that a turn's partial tail begins, where the session's next prompt repeats the turn's and goes on."""
    found: dict[tuple[SessionId, int], int] = {}
    latest: dict[SessionId, Turn] = {}
    for turn in trace.turns:
        before = latest.get(turn.session)
        latest[turn.session] = turn
        if before is None or not isinstance(before.identity, Blocks) or not isinstance(turn.identity, Blocks):
            continue
        full = size(before.identity.runs)
        if size(turn.identity.runs) > full and turn.identity.space == before.identity.space:
            runs = head(turn.identity.runs, full + 1)
            if _same(head(runs, full), before.identity.runs):
                found[before.session, before.turn] = runs[-1][0] + runs[-1][1] - 1
    return found


def _same(a: Sequence[Run], b: Sequence[Run]) -> bool:
    return tuple(a) == tuple(b) or np.array_equal(expand(a), expand(b))


def numbered(trace: Trace, block: int) -> Iterator[tuple[Turn, list[int], list[int]]]:
    """Each turn with the compact ids of its prompt, one for the partial tail too, and of its answer's blocks.

    A trace of segments is cut into blocks. Raises `TraceError` for another block size than the trace's.
    """
    if trace.block not in (None, block):
        raise TraceError(f"{trace.name}: its blocks have {trace.block} tokens; they can't be cut to {block}")
    cut = _Cut(block)
    spaces = _Spaces()
    for turn in trace.turns:
        match turn.identity:
            case Segments():
                yield turn, cut.prompt(turn.identity), []
            case Blocks():
                identity = turn.identity
                ids = spaces.of(identity.ids(), identity.space).tolist()
                missing = -(-turn.prompt_len // block) - len(ids)
                if identity.tail is not None and missing == 1:
                    ids += spaces.of(np.array([identity.tail]), identity.space).tolist()
                else:
                    ids += [spaces.fresh() for _ in range(missing)]
                answer = np.concatenate([np.arange(s, s + n) for s, n in identity.answer] or [np.empty(0, np.int64)])
                yield turn, ids, spaces.of(answer, identity.space).tolist()
            case None:
                yield turn, [], []


class _Spaces:
    """Compact ids over all spaces, in order of first occurrence."""

    def __init__(self) -> None:
        self._next = 0
        self._tables: dict[SessionId, NDArray[np.int64]] = {}

    def fresh(self) -> int:
        self._next += 1
        return self._next - 1

    def of(self, ids: NDArray[np.integer], space: SessionId) -> NDArray[np.int64]:
        table = self._tables.get(space, np.empty(0, np.int64))
        top = int(ids.max(initial=-1)) + 1
        if top > table.size:
            table = np.concatenate([table, np.full(max(top, 2 * table.size) - table.size, -1)])
            self._tables[space] = table
        new = ids[table[ids] < 0]
        table[new] = self._next + np.arange(new.size)
        self._next += new.size
        found: NDArray[np.int64] = table[ids]
        return found


class _Cut:
    """Segments cut into blocks of equal length: equal from the start means equal numbers."""

    def __init__(self, block: int) -> None:
        self._block = block
        self._numbers = Numbers()

    def prompt(self, segments: Segments) -> list[int]:
        parts: list[tuple[tuple[str, int, int], ...]] = []
        open_: list[tuple[str, int, int]] = []
        room = self._block
        for name, length in segments.prompt:
            at = 0
            while at < length:
                take = min(room, length - at)
                open_.append((name, at, take))
                at, room = at + take, room - take
                if not room:
                    parts.append(tuple(open_))
                    open_, room = [], self._block
        if open_:
            parts.append(tuple(open_))
        return self._numbers.of(parts)


def all_ids(turn: Turn) -> Tokens:
    """The ids of the full blocks and of the partial tail where it has one."""
    assert isinstance(turn.identity, Blocks)
    ids = turn.identity.ids()
    tail = turn.identity.tail
    return ids if tail is None else np.append(ids, np.int32(tail))
