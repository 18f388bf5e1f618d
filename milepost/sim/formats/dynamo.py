"""Dynamo request trace v1: events of one or several shards; requests with rolling hashes of their blocks.

Sessions come from `agent_context`, in all rows or in none. The wait before a turn counts from the end of the one
before, tools included. A child session hangs at the parent's last request that had started when its own first came.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from milepost.errors import TraceError
from milepost.sim.formats import blocks
from milepost.sim.formats.base import Format, Options, Parsed
from milepost.sim.formats.lines import Row
from milepost.sim.trace import Link, SessionId, Turn

SCHEMA = "dynamo.request.trace.v1"
EVENTS = ("request_end", "request_payload", "tool_start", "tool_end", "tool_error")


@dataclass(frozen=True, slots=True)
class _Call:
    """One finished request."""

    row: Row
    replay: Row
    received: float
    took: float | None
    session: str | None
    parent: str | None


def parse(rows: Iterable[Row], _options: Options) -> Parsed:
    calls, skipped = [], 0
    for row in rows:
        event = _event(row)
        if event.record.get("schema") != SCHEMA:
            raise row.error(f"schema is {event.record.get('schema')!r}: {SCHEMA!r} is needed")
        kind = event.get("event_type", str, "a name")
        if kind not in EVENTS:
            raise row.error(f"event_type is {kind!r}: one of {', '.join(EVENTS)} is needed")
        if kind == "request_end":
            call = _call(event)
            skipped += call is None
            calls += [call] if call else []
    if not calls:
        raise TraceError("no finished request with replay hashes in it")
    calls.sort(key=lambda call: call.received)
    if len({call.session is None for call in calls}) > 1:
        raise calls[0].row.error("some requests have an agent_context and some have none; all or none are needed")
    sizes = {call.replay.count("trace_block_size", 1) for call in calls}
    if len(sizes) > 1:
        raise calls[0].row.error(f"trace_block_size differs between requests: {sorted(sizes)}")
    notes = [f"{skipped} finished requests have no replay hashes and were left out"] if skipped else []
    return Parsed(_turns(calls, sizes.pop()), notes)


def _event(row: Row) -> Row:
    return row.child("event") if "event" in row else row


def _call(event: Row) -> _Call | None:
    request = event.child("request")
    if "replay" not in request:
        return None
    context = event.record.get("agent_context") or {}
    if not isinstance(context, Mapping):
        raise event.error("agent_context: an object is needed")
    session, parent = context.get("session_id"), context.get("parent_session_id")
    return _Call(
        request,
        request.child("replay"),
        request.number("request_received_ms") / 1e3,
        request.seconds("total_time_ms", 1e3),
        None if session is None else str(session),
        None if parent is None else str(parent),
    )


def _turns(calls: list[_Call], block: int) -> list[Turn]:
    numbers, start = blocks.Numbers(), calls[0].received
    turns: list[Turn] = []
    seen: dict[SessionId, list[_Call]] = defaultdict(list)
    links: dict[SessionId, tuple[Link, float]] = {}
    for i, call in enumerate(calls):
        session: SessionId = i if call.session is None else call.session
        before = seen[session]
        if not before and call.parent is not None and seen.get(call.parent):
            parent = seen[call.parent]
            ended = parent[-1].received + (parent[-1].took or 0.0)
            links[session] = Link(call.parent, len(parent) - 1), max(0.0, call.received - ended)
        length = call.replay.count("input_length", 1)
        ids = blocks.id_list(call.replay, "input_sequence_hashes")
        full = blocks.check(call.replay, len(ids), length, block)
        link, think = links.get(session, (None, 0.0))
        if before:
            done = before[-1].received + (before[-1].took or 0.0)
            think = max(0.0, call.received - done)
        identity = numbers.blocks(ids, full, block)
        output = call.row.count("output_tokens")
        arrival = call.received - start
        turns.append(Turn(session, len(before), length, output, identity, arrival, think, link, call.took))
        before.append(call)
    return turns


def matches(record: Mapping[str, Any]) -> bool:
    event = record.get("event", record)
    return isinstance(event, Mapping) and str(event.get("schema", "")).startswith("dynamo.request.trace")


FORMAT = Format("dynamo", matches, parse, folder=True)
