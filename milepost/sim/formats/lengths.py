"""CSV of lengths: Azure LLM, BurstGPT, or plain columns. Arrivals and sizes only; nothing tells what prompts share."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any

from milepost.sim.formats.base import LENGTHS_ONLY, Format, Options, Parsed
from milepost.sim.formats.lines import Row, in_order, short
from milepost.sim.trace import SessionId, Turn

ARRIVALS = ("timestamp", "arrival", "arrived_at")
INPUTS = ("contexttokens", "request tokens", "input_tokens", "input_length")
OUTPUTS = ("generatedtokens", "response tokens", "output_tokens", "output_length")
SESSIONS = ("session id", "session_id")


def parse(rows: Iterable[Row], _options: Options) -> Parsed:
    found = [(row, _time(row)) for row in rows]
    found, notes = in_order(found, lambda pair: pair[1])
    start = 0.0 if found and _plain(found[0][0]) else min((time for _, time in found), default=0.0)
    turns: list[Turn] = []
    count: dict[SessionId, int] = defaultdict(int)
    failed = 0
    for i, (row, time) in enumerate(found):
        output = row.count(_column(row, OUTPUTS))
        if output == 0 and "response tokens" in row.record:
            failed += 1
            continue
        named = [name for name in SESSIONS if name in row]
        session: SessionId = row.id(named[0]) if named else i
        length = row.count(_column(row, INPUTS), 1)
        turns.append(Turn(session, count[session], length, output, None, time - start))
        count[session] += 1
    if failed:
        notes.append(f"{failed} failed requests (no response tokens) were left out")
    return Parsed(turns, [LENGTHS_ONLY, *notes])


def _column(row: Row, names: tuple[str, ...]) -> str:
    for name in names:
        if name in row.record:
            return name
    raise row.error(f"no {names[0]!r}")


def _plain(row: Row) -> bool:
    """Are times seconds, from the start of the trace?"""
    try:
        row.number(_column(row, ARRIVALS))
    except Exception:
        return False
    return True


def _time(row: Row) -> float:
    name = _column(row, ARRIVALS)
    value = row.get(name, str, "a time")
    try:
        return float(value)
    except ValueError:
        pass
    try:
        whole, _, fraction = value.partition(".")
        digits = fraction[: len(fraction) - len(fraction.lstrip("0123456789"))]
        zone = fraction[len(digits) :] or "+00:00"
        return datetime.fromisoformat(whole + zone.replace("Z", "+00:00")).timestamp() + float(f"0.{digits or 0}")
    except ValueError:
        raise row.error(f"{name} is {short(value)}: seconds or YYYY-MM-DD HH:MM:SS.f is needed") from None


def matches(record: Mapping[str, Any]) -> bool:
    table = all(value is None or isinstance(value, str) for value in record.values())
    return table and all(any(name in record for name in names) for names in (ARRIVALS, INPUTS, OUTPUTS))


FORMAT = Format("lengths", matches, parse)
