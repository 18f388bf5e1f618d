"""Mooncake JSONL: ids of blocks that stand for the block and all before it; a row a request.

The block size is not in the file: it is an option, or comes from the sidecar FILE.meta.json, or is 512. Rows of one
`session_id` are turns in order; without it each row is a session of its own. Milepost's own are
`output_hash_ids`, the blocks that prompt and answer complete together, and `took_ms`, the time to the answer's end.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from milepost.errors import TraceError
from milepost.sim.formats import blocks, text
from milepost.sim.formats.base import DEFAULT_BLOCK, LENGTHS_ONLY, Format, Options, Parsed, Written
from milepost.sim.formats.lines import Row, in_order
from milepost.sim.trace import Blocks, Segments, SessionId, Trace, Turn

BLOCK = 512
INPUTS = ("input_length", "text_input", "messages", "payload")
VERSION = 1


TIMES = ("timestamp", "delay", "delay_ms")


def matches(record: Mapping[str, Any]) -> bool:
    if not any(name in record for name in TIMES):
        return False
    return "input_length" in record or "text_input" in record or "payload" in record or _chat(record)


def _chat(record: Mapping[str, Any]) -> bool:
    """Messages alone don't tell this format from Autobench's."""
    return "messages" in record and ("output_length" in record or "message_mode" in record)


def parse(rows: Iterable[Row], options: Options) -> Parsed:
    reader = _Reader(options.block or BLOCK)
    found, notes = in_order(list(rows), lambda row: row.seconds("timestamp"))
    turns = [reader.turn(row) for row in found]
    known = sum(turn.identity is not None for turn in turns)
    if known not in (0, len(turns)):
        raise found[0].error(
            f"{len(turns) - known} rows of this file have no hash_ids and {known} have; all or none are needed"
        )
    if not known:
        notes.append(LENGTHS_ONLY)
    if options.infer_sessions:
        if any("session_id" in row for row in found) or not isinstance(turns[0].identity, Blocks):
            raise found[0].error("--infer-sessions needs hash_ids and rows without session_id")
        turns = blocks.infer_sessions(turns)
        count = len({turn.session for turn in turns})
        notes.append(f"{count} sessions were inferred: a prompt continues the one that it begins with")
    return Parsed(turns, notes + reader.notes)


class _Reader:
    """Rows to turns; what earlier rows of a session said."""

    def __init__(self, block: int) -> None:
        self.notes: list[str] = []
        self._block = block
        self._numbers = blocks.Numbers()
        self._rows = 0
        self._turns: dict[SessionId, int] = defaultdict(int)
        self._history: dict[SessionId, text.Pieces] = {}
        self._ended: dict[SessionId, float] = {}

    def turn(self, row: Row) -> Turn:
        session = row.id("session_id") if "session_id" in row else self._rows
        self._rows += 1
        number = self._turns[session]
        self._turns[session] += 1
        arrival, think = self._times(row)
        took = row.seconds("took_ms", 1e3)
        if arrival is not None and session in self._ended:
            think = max(0.0, arrival - self._ended[session])
        if arrival is not None and took is not None:
            self._ended[session] = arrival + took
        given = [name for name in INPUTS if name in row]
        if len(given) != 1:
            raise row.error(f"exactly one of {', '.join(INPUTS)} is needed; it has {', '.join(given) or 'none'}")
        if given != ["input_length"]:
            if "hash_ids" in row:
                raise row.error("hash_ids goes only with input_length")
            output = text.output_length(row, ["output_length"], self.notes)
            identity = self._text(row, given[0], session, number, output)
            return Turn(
                session, number, sum(n for _, n in identity.prompt), output, identity, arrival, think, None, took
            )
        length, output = row.count("input_length", 1), row.count("output_length")
        found = self._ids(row, length, output)
        return Turn(session, number, length, output, found, arrival, think, None, took)

    def _times(self, row: Row) -> tuple[float | None, float | None]:
        arrival = row.seconds("timestamp", 1e3)
        delays = [row.seconds(name, 1e3) for name in ("delay", "delay_ms") if name in row]
        if len(delays) + (arrival is not None) != 1:
            raise row.error("exactly one of timestamp and delay is needed" if delays else "no 'timestamp'")
        return arrival, delays[0] if delays else None

    def _ids(self, row: Row, length: int, output: int) -> Blocks | None:
        if "hash_ids" not in row:
            return None
        ids = blocks.id_list(row, "hash_ids")
        full = blocks.check(row, len(ids), length, self._block)
        answer = blocks.id_list(row, "output_hash_ids") if "output_hash_ids" in row else []
        most = (length + output) // self._block - length // self._block
        if len(answer) > most:
            raise row.error(f"output_hash_ids has {len(answer)} ids; the answer completes {most} blocks")
        return self._numbers.blocks(ids, full, self._block, answer)

    def _text(self, row: Row, name: str, session: SessionId, number: int, output: int) -> Segments:
        if text.NOTE not in self.notes:
            self.notes.append(text.NOTE)
        answer = (f"{session}/{number}/answer", max(1, output))
        new = self._pieces(row, name)
        mode = row.record.get("message_mode") or "history"
        if mode not in ("history", "delta"):
            raise row.error(f"message_mode is {mode!r}: history or delta is needed")
        prompt = self._history.get(session, ()) + new if mode == "delta" else new
        if not prompt:
            raise row.error(f"{name} is empty")
        self._history[session] = (*prompt, answer)
        return Segments(prompt, answer)

    def _pieces(self, row: Row, name: str) -> text.Pieces:
        if name == "text_input":
            return text.text_pieces(row.get(name, str, "a text"))
        if name == "messages":
            return text.message_pieces(row, name, row.record[name])
        payload = row.child(name)
        if "messages" in payload:
            return text.message_pieces(payload, "messages", payload.record["messages"])
        return text.text_pieces(payload.get("prompt", str, "a text, or messages,"))


def write(trace: Trace, block: int | None) -> Written:
    """Compact ids in order of first occurrence, one for each partial tail; the block size goes to the sidecar."""
    size = block or trace.block or DEFAULT_BLOCK
    if trace.block not in (None, size):
        raise TraceError(f"{trace.name}: its blocks have {trace.block} tokens; they can't be cut to {size}")
    notes = ["links of subagents are not kept"] if any(turn.link for turn in trace.turns) else []
    if any(turn.think is not None and turn.turn and turn.arrival is not None for turn in trace.turns):
        notes.append("later turns of a session keep the wait before them (delay), not their arrival")
    meta = {"format": "mooncake", "version": VERSION, "block_size": size, "source": trace.name}
    return Written(_records(trace, size), tuple(notes), meta)


def _records(trace: Trace, size: int) -> Iterator[Mapping[str, Any]]:
    sessions = len({turn.session for turn in trace.turns}) < len(trace.turns)
    for turn, ids, answer in blocks.numbered(trace, size):
        record: dict[str, Any] = {"session_id": turn.session} if sessions else {}
        if turn.think is not None and (turn.turn or turn.arrival is None):
            record["delay"] = millis(turn.think)
        else:
            record["timestamp"] = millis(turn.arrival or 0.0)
        record |= {"input_length": max(1, turn.prompt_len), "output_length": turn.output_len}
        if turn.took is not None:
            record["took_ms"] = millis(turn.took)
        if turn.identity is not None:
            record["hash_ids"] = ids
        if answer:
            record["output_hash_ids"] = answer
        yield record


def millis(seconds: float) -> float:
    """A whole number where it is one."""
    value = round(seconds * 1e3, 3)
    return int(value) if value == int(value) else value


FORMAT = Format("mooncake", matches, parse, write, frozenset({"block", "infer_sessions"}))
