"""Rows of trace files, each with file and line in every error: JSON lines, whole JSON files and CSV, gzipped or not.

Knows no format: it reads objects and checks single fields.
"""

import csv
import gzip
import json
import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, TypeVar

from milepost.errors import TraceError

T = TypeVar("T")

MOST = 2**40
"""Counts are below this: more is nonsense."""


@dataclass(frozen=True, slots=True)
class Row:
    """One record of a trace and where it stands. Getters raise when their field is missing or null."""

    place: str
    record: Mapping[str, Any]

    def error(self, what: str) -> TraceError:
        return TraceError(f"{self.place}: {what}")

    def __contains__(self, name: str) -> bool:
        """Null counts as missing."""
        return self.record.get(name) is not None

    def get(self, name: str, kind: type[T], what: str) -> T:
        """A field of that type; `what` says what is needed."""
        value = self.record.get(name)
        if value is None:
            raise self.error(f"no {name!r}")
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise self.error(f"{name} is {short(value)}: {what} is needed")
        return value

    def count(self, name: str, least: int = 0, default: int | None = None) -> int:
        """A whole number of at least `least`; strings and whole floats count."""
        if default is not None and name not in self:
            return default
        value = self.number(name)
        if value != int(value) or not least <= value < MOST:
            raise self.error(f"{name} is {short(self.record[name])}: a whole number of at least {least} is needed")
        return int(value)

    def number(self, name: str) -> float:
        """A finite number, also one written as a string."""
        value = self.record.get(name)
        if value is None:
            raise self.error(f"no {name!r}")
        try:
            found = float("nan") if isinstance(value, bool) else float(value)
        except (TypeError, ValueError, OverflowError):
            found = float("nan")
        if not math.isfinite(found):
            raise self.error(f"{name} is {short(value)}: a number is needed")
        return found

    def seconds(self, name: str, per_second: float = 1.0) -> float | None:
        """A time in seconds, where the row has one; `per_second`: units of the field in one."""
        return self.number(name) / per_second if name in self else None

    def id(self, name: str) -> str | int:
        """A name: a string or a whole number."""
        value = self.record.get(name)
        if value is None:
            raise self.error(f"no {name!r}")
        if not isinstance(value, str | int) or isinstance(value, bool):
            raise self.error(f"{name} is {short(value)}: a string or a whole number is needed")
        return value

    def list(self, name: str) -> list[Any]:
        return self.get(name, list, "a list")

    def child(self, name: str) -> "Row":
        """A field that is an object."""
        return Row(f"{self.place}: {name}", self.get(name, dict, "an object"))

    def inside(self, name: str, index: int, value: object) -> "Row":
        """An object in a list of this row."""
        if not isinstance(value, dict):
            raise self.error(f"{name}[{index}] is {short(value)}: an object is needed")
        return Row(f"{self.place}: {name}[{index}]", value)


def short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"


def rows(path: Path) -> Iterator[Row]:
    """The records of a file: JSON lines, one JSON object over several lines, or CSV with a header."""
    numbered = lines(path)
    first = next(numbered, None)
    if first is None:
        raise TraceError(f"{path}: no requests in it")
    every = chain([first], numbered)
    if not first[1].lstrip().startswith(("{", "[")):
        yield from _table(path, every)
    elif _whole(first[1]):
        for number, line in every:
            yield _object(f"{path}:{number}", line)
    else:
        yield _object(f"{path}:{first[0]}", "".join(line for _, line in every))


def _whole(line: str) -> bool:
    """Is the line JSON by itself? A line that ends inside an object may be the begin of one over many lines."""
    try:
        json.loads(line)
    except ValueError:
        return False
    return True


def _object(place: str, text: str) -> Row:
    try:
        record = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise TraceError(f"{place}: {error}") from error
    if not isinstance(record, dict):
        raise TraceError(f"{place}: an object is needed, not {type(record).__name__}")
    return Row(place, record)


def _table(path: Path, numbered: Iterable[tuple[int, str]]) -> Iterator[Row]:
    """CSV whose first line names the columns; keys are lower-case."""
    numbers: list[int] = []

    def texts() -> Iterator[str]:
        for number, line in numbered:
            numbers.append(number)
            yield line

    try:
        table = csv.reader(texts())
        header = [name.strip().lower().lstrip("\ufeff") for name in next(table)]
        for values in table:
            place = f"{path}:{numbers[-1]}"
            if len(values) != len(header):
                raise TraceError(f"{place}: {len(values)} values for {len(header)} columns")
            yield Row(place, {name: value.strip() or None for name, value in zip(header, values, strict=True)})
    except csv.Error as error:
        raise TraceError(f"{path}:{numbers[-1] if numbers else 1}: {error}") from error


def lines(path: Path) -> Iterator[tuple[int, str]]:
    """The lines that are not blank, numbered from 1."""
    try:
        with open(path, "rb") as file:
            zipped = file.read(2) == b"\x1f\x8b"
        with gzip.open(path, "rt", encoding="utf-8") if zipped else open(path, encoding="utf-8") as text:
            for number, line in enumerate(text, 1):
                if line.strip():
                    yield number, line
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
        raise TraceError(f"{path}: {getattr(error, 'strerror', None) or error}") from error


def in_order(found: list[T], time: Callable[[T], float | None]) -> tuple[list[T], list[str]]:
    """Sorted by time where every row has one and they are not in order, and a note that says so."""
    times = [time(one) for one in found]
    known = [t for t in times if t is not None]
    if len(known) < len(found) or all(a <= b for a, b in pairwise(known)):
        return found, []
    order = sorted(range(len(found)), key=known.__getitem__)
    return [found[i] for i in order], ["the rows were not in order of time; they were sorted"]


def save(path: Path, records: Iterable[Mapping[str, Any]]) -> int:
    """A JSON line per record, gzipped when the name ends in .gz. Returns how many."""
    written = 0
    try:
        with (
            gzip.open(path, "wt", encoding="utf-8")
            if path.suffix == ".gz"
            else open(path, "w", encoding="utf-8") as out
        ):
            for record in records:
                out.write(json.dumps(record, separators=(",", ":"), ensure_ascii=False) + "\n")
                written += 1
    except OSError as error:
        raise TraceError(f"{path}: can't be written ({error.strerror})") from error
    return written
