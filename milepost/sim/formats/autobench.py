"""SGLang Autobench JSONL: prompts as token ids, text, several user turns, or messages; times in ms.

Written are token ids, a function of block or segment ids alone, so that equal ids give equal tokens.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from milepost.sim.formats import blocks, text
from milepost.sim.formats.aiperf import check_filler
from milepost.sim.formats.base import Format, Options, Parsed, Written
from milepost.sim.formats.lines import Row, in_order, short
from milepost.sim.formats.mooncake import millis
from milepost.sim.trace import SegmentMaterial, Segments, SessionId, Trace, Turn

OUTPUTS = ("output_len", "max_tokens", "max_completion_tokens", "completion_tokens")


def parse(rows: Iterable[Row], _options: Options) -> Parsed:
    found, notes = in_order(list(rows), lambda row: row.seconds("timestamp"))
    turns: list[Turn] = []
    count: dict[SessionId, int] = defaultdict(int)
    for i, row in enumerate(found):
        session = row.id("routing_key") if "routing_key" in row else i
        output = text.output_length(row, OUTPUTS, notes)
        history: text.Pieces = ()
        for pieces in _prompts(row, notes):
            number = count[session]
            count[session] += 1
            identity = Segments(history + pieces, (f"{session}/{number}/answer", max(1, output)))
            history = (*identity.prompt, identity.output)
            length = sum(n for _, n in identity.prompt)
            first = len(identity.prompt) == len(pieces)
            arrival = row.seconds("timestamp", 1e3) if first else None
            turns.append(Turn(session, number, length, output, identity, arrival, None if first else 0.0))
    return Parsed(turns, notes)


def _prompts(row: Row, notes: list[str]) -> list[text.Pieces]:
    """The pieces of each turn of a row, without the history."""
    match row.record.get("prompt"):
        case [int(), *_] as tokens if all(type(one) is int for one in tokens):
            return [text.token_pieces(tokens)]
        case str(prompt) if prompt:
            found = [text.text_pieces(prompt)]
        case [str(), *_] as prompts if all(isinstance(one, str) and one for one in prompts):
            found = [text.text_pieces(one) for one in prompts]
        case [dict(), *_] as messages:
            found = [text.message_pieces(row, "prompt", messages)]
        case None if "messages" in row:
            found = [text.message_pieces(row, "messages", row.record["messages"])]
        case None:
            raise row.error("no 'prompt'")
        case other:
            raise row.error(f"prompt is {short(other)}: token ids, text, texts or messages are needed")
    if text.NOTE not in notes:
        notes.append(text.NOTE)
    if not all(found):
        raise row.error("the prompt is empty")
    return found


def write(trace: Trace, block: int | None) -> Written:
    check_filler(trace, block)
    notes = ["prompts are token ids made of block or segment ids; waits between turns are not kept"]
    return Written(_records(trace), tuple(notes))


def _records(trace: Trace) -> Iterator[Mapping[str, Any]]:
    material, following = SegmentMaterial(), blocks.continued(trace)
    for turn in trace.turns:
        yield {
            "prompt": (
                text.filler(turn, material, following.get((turn.session, turn.turn))) + text.FIRST_TOKEN
            ).tolist(),
            "prompt_len": turn.prompt_len,
            "output_len": turn.output_len,
            **({} if turn.arrival is None else {"timestamp": millis(turn.arrival)}),
            "routing_key": str(turn.session),
        }


def matches(record: Mapping[str, Any]) -> bool:
    return "prompt" in record or "messages" in record


FORMAT = Format("autobench", matches, parse, write)
