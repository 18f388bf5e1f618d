"""The segments format: a JSON object a line, sorted by arrival.

session, turn   whose request it is
arrival         seconds from the start; or null with think, seconds after the answer before
segments        [[segment id, length], …]: the prompt
output          [segment id, length], and output_len in tokens
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from milepost.errors import TraceError
from milepost.sim.formats import blocks
from milepost.sim.formats.base import Format, Options, Parsed, Written
from milepost.sim.formats.lines import Row
from milepost.sim.trace import Blocks, Segments, Trace, Turn

MOST_PIECES = 20_000_000


def parse(rows: Iterable[Row], _options: Options) -> Parsed:
    return Parsed([_turn(row) for row in rows])


def _turn(row: Row) -> Turn:
    session, turn = row.id("session"), row.count("turn")
    arrival, think = row.seconds("arrival"), row.seconds("think")
    if arrival is None and think is None:
        raise row.error("no 'arrival'")
    output_len = row.get("output_len", int, "a number of tokens")
    if output_len < 1:
        raise row.error(f"output_len is {output_len}: at least 1 token is needed")
    prompt = tuple(_segment(row, pair) for pair in row.list("segments"))
    if not prompt:
        raise row.error("segments is empty")
    identity = Segments(prompt, _segment(row, row.list("output")))
    return Turn(session, turn, sum(n for _, n in prompt), output_len, identity, arrival, think)


def _segment(row: Row, pair: object) -> tuple[str, int]:
    match pair:
        case [str(name), int(length)] if length > 0:
            return name, length
    raise row.error(f"{pair!r} is not [segment id, length]")


def write(trace: Trace, block: int | None) -> Written:
    """Blocks become a segment each, a partial tail the beginning of the next block where that is known."""
    if block is not None:
        raise TraceError(f"{trace.name}: segments have no block size; leave --block out")
    if not trace.has_identity:
        raise TraceError(f"{trace.name}: it has lengths only; segments say what prompts share")
    pieces = sum(t.prompt_len // t.identity.block for t in trace.turns if isinstance(t.identity, Blocks))
    if pieces > MOST_PIECES:
        raise TraceError(f"{trace.name}: {pieces:,} blocks would be a segment each; write mooncake or weka instead")
    notes = ["links of subagents are not kept"] if any(t.link for t in trace.turns) else []
    return Written(_records(trace), tuple(notes))


def _records(trace: Trace) -> Iterator[Mapping[str, Any]]:
    following = blocks.continued(trace)
    for turn in trace.turns:
        identity = as_segments(turn, following.get((turn.session, turn.turn)))
        yield {
            "session": turn.session,
            "turn": turn.turn,
            "arrival": turn.arrival,
            **({} if turn.think is None else {"think": turn.think}),
            "segments": identity.prompt,
            "output": identity.output,
            "output_len": max(1, turn.output_len),
        }


def as_segments(turn: Turn, following: int | None) -> Segments:
    """`following`: the block that the partial tail begins; a segment's beginning is the same for every length."""
    if isinstance(turn.identity, Segments):
        return turn.identity
    assert isinstance(turn.identity, Blocks)
    block, space = turn.identity.block, turn.identity.space
    pieces = [(f"{space}/{one}", block) for one in turn.identity.ids().tolist()]
    rest = turn.prompt_len - len(pieces) * block
    if rest:
        name = f"{turn.session}/{turn.turn}/tail" if following is None else f"{space}/{following}"
        pieces.append((name, rest))
    return Segments(tuple(pieces), (f"{turn.session}/{turn.turn}/answer", max(1, turn.output_len)))


FORMAT = Format("segments", lambda record: "segments" in record, parse, write)
