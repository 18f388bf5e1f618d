"""Files of JSON lines, plain or gzipped, with file and line in every error."""

import gzip
import json
from collections.abc import Callable, Iterator
from pathlib import Path

from milepost.errors import TraceError
from milepost.sim.trace import Turn


def parse_lines(path: Path, parse: Callable[[object], Turn]) -> list[Turn]:
    """Each line through `parse`. Raises `TraceError` with file and line."""
    turns = []
    for number, line in lines(path):
        try:
            turns.append(parse(json.loads(line)))
        except (ValueError, KeyError, TypeError) as error:
            what = f"no {error}" if isinstance(error, KeyError) else str(error)
            raise TraceError(f"{path}:{number}: {what}") from error
    if not turns:
        raise TraceError(f"{path}: no requests in it")
    return turns


def lines(path: Path) -> Iterator[tuple[int, str]]:
    """The lines that are not blank, numbered from 1."""
    try:
        with open(path, "rb") as file:
            zipped = file.read(2) == b"\x1f\x8b"
        with gzip.open(path, "rt") if zipped else open(path) as text:
            for number, line in enumerate(text, 1):
                if line.strip():
                    yield number, line
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise TraceError(f"{path}: {getattr(error, 'strerror', None) or error}") from error
