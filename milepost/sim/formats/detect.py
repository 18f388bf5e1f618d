"""Reads a trace of any known format, told by its content."""

from pathlib import Path

from milepost.sim.formats import segments
from milepost.sim.formats.lines import parse_lines
from milepost.sim.trace import Trace


def read(path: Path) -> Trace:
    """Raises `TraceError`, with file and line where there is one."""
    return Trace(path.name, tuple(parse_lines(path, segments.parse)))
