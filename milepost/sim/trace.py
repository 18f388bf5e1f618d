"""Request traces: who asked for what, and when.

Here: the segments format, a JSON object a line, sorted by arrival:

    session, turn   whose request it is
    arrival         seconds from the start
    segments        [[segment id, length], …]: the prompt. Prompts share tokens exactly where they share ids from
                    the start
    output          [segment id, length], and output_len in tokens

A segment's tokens are a function of its id and the index alone.
"""

import gzip
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from milepost.core.tokens import Tokens
from milepost.errors import TraceError
from milepost.sim.executor import scramble

Segment = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a trace."""

    session: str | int
    turn: int
    arrival: float
    segments: tuple[Segment, ...]
    output: Segment
    output_len: int

    @property
    def prompt_len(self) -> int:
        return sum(length for _, length in self.segments)


def read(path: Path) -> list[Turn]:
    """All requests of a file, which may be gzipped. Raises `TraceError` with file and line."""
    turns = []
    for number, line in _lines(path):
        try:
            turns.append(_turn(json.loads(line)))
        except (ValueError, KeyError, TypeError) as error:
            what = f"no {error}" if isinstance(error, KeyError) else str(error)
            raise TraceError(f"{path}:{number}: {what}") from error
    if not turns:
        raise TraceError(f"{path}: no requests in it")
    return turns


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    try:
        with open(path, "rb") as file:
            zipped = file.read(2) == b"\x1f\x8b"
        with gzip.open(path, "rt") if zipped else open(path) as text:
            for number, line in enumerate(text, 1):
                if line.strip():
                    yield number, line
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise TraceError(f"{path}: {getattr(error, 'strerror', None) or error}") from error


def _turn(record: dict[str, object]) -> Turn:
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
    return Turn(session, turn, float(arrival), prompt, _segment(record["output"]), output_len)


def _segment(pair: object) -> Segment:
    match pair:
        case [str(name), int(length)] if length > 0:
            return name, length
    raise ValueError(f"{pair!r} is not [segment id, length]")


class Vocabulary:
    """The tokens of segments, each made once."""

    def __init__(self) -> None:
        self._made: dict[str, Tokens] = {}

    def segment(self, name: str, length: int) -> Tokens:
        made = self._made.get(name)
        if made is None or made.size < length:
            base = np.uint64(zlib.crc32(name.encode())) << np.uint64(32)
            mixed = scramble(base + np.arange(length, dtype=np.uint64))
            made = self._made[name] = (mixed >> np.uint64(33)).astype(np.int32)
        return made[:length]

    def prompt(self, turn: Turn) -> Tokens:
        return np.concatenate([self.segment(*segment) for segment in turn.segments])

    def output(self, turn: Turn) -> Tokens:
        return self.segment(turn.output[0], turn.output_len)
