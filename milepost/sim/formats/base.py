"""What a trace format is to the reader: a name, a test, a parser, and maybe a writer."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from milepost.sim.formats.lines import Row
from milepost.sim.trace import Trace, Turn

LENGTHS_ONLY = "lengths only: this trace has no reuse information, so no hit rate can be told from it"
DEFAULT_BLOCK = 64
"""Tokens of a block where a trace without blocks is written in a format that has them."""


@dataclass(frozen=True, slots=True)
class Options:
    """What the user may say about a trace. A format refuses what has no meaning for it."""

    block: int | None = None
    infer_sessions: bool = False
    share_prefix: bool = False


@dataclass(frozen=True, slots=True)
class Parsed:
    turns: list[Turn]
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Written:
    """`records` are made as they are asked for; `notes` say what the format can't hold; `meta` goes to a sidecar."""

    records: Iterator[Mapping[str, Any]]
    notes: tuple[str, ...] = ()
    meta: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Format:
    """`matches` sees the first record of a file. `takes`: the options with a meaning. `folder`: may be many files."""

    name: str
    matches: Callable[[Mapping[str, Any]], bool]
    parse: Callable[[Iterable[Row], Options], Parsed]
    write: Callable[[Trace, int | None], Written] | None = None
    takes: frozenset[str] = frozenset()
    folder: bool = False
