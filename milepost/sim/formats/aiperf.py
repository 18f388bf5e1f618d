"""AIPerf single_turn and multi_turn JSONL: prompts as text, times in ms.

single_turn: a request a row, whole by itself; rows of one `session_id` are turns. multi_turn: a conversation a row,
whose history accumulates, answers included. Images, audio and video are not counted. Written is single_turn with
filler text.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from milepost.errors import TraceError
from milepost.sim.formats import blocks, text
from milepost.sim.formats.base import Format, Options, Parsed, Written
from milepost.sim.formats.lines import Row, in_order, short
from milepost.sim.formats.mooncake import millis
from milepost.sim.trace import SegmentMaterial, Segments, SessionId, Trace, Turn

MEDIA = ("image", "images", "audio", "audios", "video", "videos")
MOST_TOKENS = 250_000_000
"""Of a trace that is written as filler: about a gigabyte."""


def matches(record: Mapping[str, Any]) -> bool:
    return isinstance(record.get("turns"), list) or "text" in record or "texts" in record


def parse(rows: Iterable[Row], _options: Options) -> Parsed:
    notes = [text.NOTE]
    found, unsorted = in_order(list(rows), lambda row: None if "turns" in row else row.seconds("timestamp"))
    turns: list[Turn] = []
    count: dict[SessionId, int] = defaultdict(int)
    for i, row in enumerate(found):
        session = row.id("session_id") if "session_id" in row else i
        if "turns" in row:
            turns += _conversation(row, session, notes)
        else:
            turns.append(_turn(row, session, count[session], (), notes))
            count[session] += 1
    return Parsed(turns, notes + unsorted)


def _conversation(row: Row, session: SessionId, notes: list[str]) -> Iterator[Turn]:
    history: text.Pieces = ()
    turns = [row.inside("turns", i, one) for i, one in enumerate(row.list("turns"))]
    if turns and turns[0].record.get("role") == "system":
        history = _pieces(turns.pop(0), notes)
    if not turns:
        raise row.error("turns is empty")
    for number, one in enumerate(turns):
        turn = _turn(one, session, number, history, notes)
        assert isinstance(turn.identity, Segments)
        history = (*turn.identity.prompt, turn.identity.output)
        yield turn


def _turn(row: Row, session: SessionId, number: int, history: text.Pieces, notes: list[str]) -> Turn:
    prompt = history + _pieces(row, notes)
    if not prompt:
        raise row.error("no text in it")
    if "timestamp" in row and "delay" in row:
        raise row.error("exactly one of timestamp and delay is needed")
    output = text.output_length(row, ["output_length"], notes)
    identity = Segments(prompt, (f"{session}/{number}/answer", max(1, output)))
    length = sum(n for _, n in prompt)
    return Turn(session, number, length, output, identity, row.seconds("timestamp", 1e3), row.seconds("delay", 1e3))


def _pieces(row: Row, notes: list[str]) -> text.Pieces:
    if any(name in row for name in MEDIA) and (note := "images, audio and video are not counted") not in notes:
        notes.append(note)
    if "text" in row:
        return text.text_pieces(row.get("text", str, "a text"))
    found: text.Pieces = ()
    for one in row.list("texts") if "texts" in row else []:
        for part in one.get("contents", [None]) if isinstance(one, Mapping) else [one]:
            if not isinstance(part, str):
                raise row.error(f"texts has {short(part)}: texts are needed")
            found += text.text_pieces(part)
    return found


def write(trace: Trace, block: int | None) -> Written:
    check_filler(trace, block)
    notes = ["prompts are filler text: it is equal where prompts are equal, and has four characters a token"]
    return Written(_records(trace), tuple(notes))


def check_filler(trace: Trace, block: int | None) -> None:
    """Raises `TraceError` where a trace can't be written as text or token ids."""
    if block is not None:
        raise TraceError(f"{trace.name}: filler has no block size; leave --block out")
    if not trace.has_identity:
        raise TraceError(f"{trace.name}: it has lengths only; text would claim to know what prompts share")
    tokens = sum(turn.prompt_len for turn in trace.turns)
    if tokens > MOST_TOKENS:
        raise TraceError(f"{trace.name}: {tokens:,} prompt tokens are too many for filler; at most {MOST_TOKENS:,}")


def _records(trace: Trace) -> Iterator[Mapping[str, Any]]:
    material, following = SegmentMaterial(), blocks.continued(trace)
    for turn in trace.turns:
        wait = turn.think is not None and (turn.turn or turn.arrival is None)
        yield {
            "session_id": str(turn.session),
            **({"delay": millis(turn.think or 0.0)} if wait else {"timestamp": millis(turn.arrival or 0.0)}),
            "text": text.words(text.filler(turn, material, following.get((turn.session, turn.turn)))),
            "output_length": turn.output_len,
        }


FORMAT = Format("aiperf", matches, parse, write)
