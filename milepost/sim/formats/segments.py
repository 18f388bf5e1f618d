"""The segments format: a JSON object a line, sorted by arrival.

session, turn   whose request it is
arrival         seconds from the start
segments        [[segment id, length], …]: the prompt
output          [segment id, length], and output_len in tokens
"""

from milepost.sim.trace import Segments, Turn


def parse(record: object) -> Turn:
    """One line. Raises ValueError, KeyError or TypeError saying what is wrong with it."""
    if not isinstance(record, dict):
        raise TypeError(f"an object is needed, not {type(record).__name__}")
    session, arrival, turn, segments = (record[k] for k in ("session", "arrival", "turn", "segments"))
    if not isinstance(session, str | int) or not isinstance(turn, int):
        raise TypeError("session must be a string or a number, turn a number")
    if not isinstance(arrival, int | float) or not isinstance(segments, list):
        raise TypeError("arrival must be seconds, segments a list")
    output_len = record["output_len"]
    if not isinstance(output_len, int) or output_len < 1:
        raise ValueError(f"output_len is {output_len}: at least 1 token is needed")
    prompt = tuple(_segment(s) for s in segments)
    if not prompt:
        raise ValueError("segments is empty")
    identity = Segments(prompt, _segment(record["output"]))
    return Turn(session, turn, sum(n for _, n in prompt), output_len, identity, arrival=float(arrival))


def _segment(pair: object) -> tuple[str, int]:
    match pair:
        case [str(name), int(length)] if length > 0:
            return name, length
    raise ValueError(f"{pair!r} is not [segment id, length]")
