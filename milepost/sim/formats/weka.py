"""WEKA session JSON, as published (`hash_ids`) and compact (`runs`): an object a session, ids local to it.

A subagent is a session of its own, linked to its parent, with ids in the parent's space. Its entry's `t` is when it
ended, as recorded by a client that waits for it: it then started `duration_ms` (or the length of its requests) before.
Where that would be before the end of the parent's turn, the client didn't wait: `t` is the start, and nothing is gated.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from milepost.errors import TraceError
from milepost.sim.formats import blocks
from milepost.sim.formats.base import DEFAULT_BLOCK, Format, Options, Parsed, Written
from milepost.sim.formats.lines import Row
from milepost.sim.trace import Blocks, Link, Run, SessionId, Trace, Turn

BLOCK = 64
SLACK = 1.0
"""Seconds: the clocks of one session agree within this."""

NOTE = "arrivals count from the start of each session, not of the trace"
COMMON_ROOM = 1 << 20
"""Ids kept for the tools and system prompts of main sessions, and as many for those of subagents."""


def parse(rows: Iterable[Row], options: Options) -> Parsed:
    turns: list[Turn] = []
    names: set[SessionId] = set()
    base = 2 * COMMON_ROOM
    scopes: set[str] = set()
    for row in rows:
        name = row.id("id")
        if name in names:
            raise row.error(f"id is {name!r}: another session has it too")
        names.add(name)
        scope = row.record.get("hash_id_scope") or "local"
        if scope not in ("local", "global"):
            raise row.error(f"hash_id_scope is {scope!r}: local or global is needed")
        if scope == "global" and options.share_prefix:
            raise row.error("--share-prefix has no meaning for ids that are shared already")
        scopes.add(scope)
        space: SessionId = name if scope == "local" and not options.share_prefix else ""
        session = _Session(row, name, row.count("block_size", 1, BLOCK), space)
        session.read()
        turns += _shared(session, base) if options.share_prefix else session.turns
        base += session.top if options.share_prefix else 0
    if base >= 2**31:
        raise TraceError("--share-prefix: the sessions have more ids than fit into 31 bits")
    notes = [NOTE] if all(t.arrival == 0 for t in turns if not t.turn and not t.link) else []
    if options.share_prefix:
        notes.append("tools and system prompts are taken as common to all sessions, from the first block on")
    elif "local" in scopes:
        notes.append("block ids are local to a session: sessions share nothing here (see --share-prefix)")
    return Parsed(turns, notes)


@dataclass(frozen=True, slots=True)
class _Sizes:
    """The prefix of tools and system prompt of one session, in blocks; `sub`: it is a subagent's."""

    prefix: int
    sub: bool


class _Session:
    """One file's turns, those of subagents at their entry's place."""

    def __init__(self, row: Row, name: SessionId, block: int, space: SessionId) -> None:
        self.turns: list[Turn] = []
        self.sizes: dict[SessionId, _Sizes] = {}
        self.top = 0
        self._row = row
        self._name = name
        self._block = block
        self._space = space
        self._subagents = 0

    def read(self) -> None:
        self._level(self._row, self._name, 0.0, None)
        if not self.turns:
            raise self._row.error("requests is empty")

    def _level(self, row: Row, session: SessionId, start: float, link: Link | None, wait: float = 0.0) -> None:
        """The requests of a session or subagent that starts at `start` of the session's clock."""
        prefix = (row.count("tool_tokens", 0, 0) + row.count("system_tokens", 0, 0)) // self._block
        self.sizes[session] = _Sizes(prefix, link is not None)
        entries = [row.inside("requests", i, entry) for i, entry in enumerate(row.list("requests"))]
        count = 0
        before: Row | None = None
        for entry in entries:
            if entry.record.get("type") == "subagent":
                self._subagent(entry, session, start, before, count - 1)
                continue
            self.turns.append(self._turn(entry, session, count, start, link, before, wait))
            count, before = count + 1, entry

    def _subagent(self, entry: Row, parent: SessionId, start: float, before: Row | None, after: int) -> None:
        if before is None:
            raise entry.error("a subagent comes before any request of its parent")
        own = [entry.inside("requests", i, one) for i, one in enumerate(entry.list("requests"))]
        if not own:
            return
        t, spawned = entry.number("t"), before.number("t")
        first = own[0].number("t")
        child_clock = 0.0 if not 0 < t - SLACK <= first else first  # newer corpora: the session's clock
        length = max(one.number("t") - child_clock + (one.seconds(_api(one)) or 0.0) for one in own)
        length = max(length, entry.seconds("duration_ms", 1e3) or 0.0)
        ended = spawned + (before.seconds(_api(before)) or 0.0)
        gates = t - length >= ended - SLACK
        if child_clock:
            gates, t = entry.record.get("status") not in ("background", "async_launched"), t + length
        begin = t - length if gates or child_clock else t
        self._subagents += 1
        name = f"{self._name}/{entry.record.get('agent_id') or f'subagent_{self._subagents:03}'}"
        if name in self.sizes:
            name = f"{name}.{self._subagents}"
        link = Link(parent, after, gates)
        offset = start + begin - child_clock
        self._level(entry, name, offset, link, max(0.0, begin - ended))

    def _turn(
        self,
        entry: Row,
        session: SessionId,
        count: int,
        start: float,
        link: Link | None,
        before: Row | None,
        wait: float,
    ) -> Turn:
        length = entry.count("in", 1)
        if "runs" in entry:
            runs = blocks.run_list(entry, "runs")
        else:
            runs = blocks.encode(blocks.id_list(entry, "hash_ids"))
        ids = blocks.size(runs)
        full = blocks.check(entry, ids, length, self._block, shorter=1)
        tail = runs[-1][0] + runs[-1][1] - 1 if ids > full else None
        runs = blocks.head(runs, full)
        self.top = max(self.top, max((first + n for first, n in runs), default=0), (tail or 0) + 1)
        identity = Blocks(runs, self._block, self._space, tail)
        t, think = entry.number("t"), entry.seconds(_think(entry))
        if before is None:
            think = wait if link else think or 0.0
        elif think is None and _api(before) in before:
            think = max(0.0, t - before.number("t") - before.number(_api(before)))
        took = entry.seconds(_api(entry))
        return Turn(session, count, length, entry.count("out"), identity, start + t, think, link, took)


def _api(entry: Row) -> str:
    return "api" if "api" in entry else "api_time"


def _think(entry: Row) -> str:
    return "think" if "think" in entry else "think_time"


def _shared(session: _Session, base: int) -> Iterator[Turn]:
    """Ids moved to `base`, but those of the tools and system prompt, of first requests: these become common."""
    common: list[tuple[int, int, int]] = []  # first, count, becomes
    for turn in session.turns:
        assert isinstance(turn.identity, Blocks)
        sizes = session.sizes[turn.session]
        if not turn.turn:
            at = COMMON_ROOM if sizes.sub else 0
            for first, count in blocks.head(turn.identity.runs, sizes.prefix):
                known = [s for s in common if s[0] < first + count and first < s[0] + s[1]]
                if not known:
                    common.append((first, count, at))
                at += count
        runs = tuple(_moved(turn.identity.runs, common, base))
        tail = turn.identity.tail
        moved = Blocks(runs, turn.identity.block, "", None if tail is None else base + tail)
        yield Turn(
            turn.session,
            turn.turn,
            turn.prompt_len,
            turn.output_len,
            moved,
            turn.arrival,
            turn.think,
            turn.link,
            turn.took,
        )


def _moved(runs: Iterable[Run], common: list[tuple[int, int, int]], base: int) -> Iterator[Run]:
    for first, count in runs:
        while count:
            here = next((s for s in common if s[0] <= first < s[0] + s[1]), None)
            if here is not None:
                take = min(count, here[0] + here[1] - first)
                yield here[2] + first - here[0], take
            else:
                take = min([s[0] - first for s in common if s[0] > first] + [count])
                take = min(take, count)
                yield base + first, take
            first, count = first + take, count - take


def write(trace: Trace, block: int | None) -> Written:
    """The compact form. A trace of one id space for all sessions is marked global."""
    size = block or trace.block or DEFAULT_BLOCK
    if trace.block != size:
        raise TraceError(
            f"{trace.name}: weka needs block ids of {size} tokens; convert it to mooncake first (--block {size})"
        )
    if any(turn.arrival is None and turn.think is None for turn in trace.turns):
        raise TraceError(f"{trace.name}: some turns have no times")
    notes = ["sizes of tools and system prompts are not known: 0 is written"]
    return Written(_records(trace, size), tuple(notes))


def _records(trace: Trace, size: int) -> Iterator[Mapping[str, Any]]:
    sessions: dict[SessionId, list[Turn]] = {}
    children: dict[SessionId, list[list[Turn]]] = {}
    for turn in trace.turns:
        known = sessions.setdefault(turn.session, [])
        if not known and turn.link:
            children.setdefault(turn.link.parent, []).append(known)
        known.append(turn)
    scope = "global" if all(isinstance(t.identity, Blocks) and t.identity.space == "" for t in trace.turns) else "local"
    head = {"block_size": size, "hash_id_scope": scope, "tool_tokens": 0, "system_tokens": 0}
    for name, turns in sessions.items():
        if turns[0].link is None:
            yield {"id": str(name), **head, "requests": _requests(turns, children, _clock(turns), 0.0)}


def _clock(turns: list[Turn]) -> list[float]:
    """When each turn started; where a trace has waits only, the answers before take no time."""
    times: list[float] = []
    for turn in turns:
        before = times[-1] if times else 0.0
        times.append(turn.arrival if turn.arrival is not None else before + (turn.think or 0.0))
    return times


def _requests(
    turns: list[Turn], children: Mapping[SessionId, list[list[Turn]]], times: list[float], start: float
) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for turn, time in zip(turns, times, strict=True):
        assert isinstance(turn.identity, Blocks)
        runs = turn.identity.runs + (((turn.identity.tail, 1),) if turn.identity.tail is not None else ())
        record = {"t": round(time - start, 3), "in": turn.prompt_len, "out": turn.output_len, "runs": runs}
        if turn.took is not None:
            record["api"] = turn.took
        if turn.think is not None:
            record["think"] = turn.think if turn.turn else 0.0
        found.append({**record, "type": "n", "stop": ""})
        for child in children.get(turn.session, []):
            if child[0].link and child[0].link.after == turn.turn:
                clock = _clock(child)
                length = max(t - clock[0] + (one.took or 0.0) for t, one in zip(clock, child, strict=True))
                at = clock[0] - start + (length if child[0].link.gates else 0.0)
                entry = {"t": round(at, 3), "type": "subagent", "tool_tokens": 0, "system_tokens": 0}
                found.append({**entry, "requests": _requests(child, children, clock, clock[0])})
    return found


FORMAT = Format(
    "weka",
    lambda record: "requests" in record and "id" in record,
    parse,
    write,
    frozenset({"share_prefix"}),
    folder=True,
)
