"""Reads a trace of any known format, told by its content; writes those that have a writer."""

import json
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from milepost.errors import TraceError
from milepost.sim.formats import (
    aiperf,
    autobench,
    bailian,
    dynamo,
    lengths,
    lmcache,
    mooncake,
    ragpulse,
    segments,
    weka,
)
from milepost.sim.formats.base import Format, Options
from milepost.sim.formats.lines import Row, rows, save
from milepost.sim.trace import Trace

FORMATS: dict[str, Format] = {
    module.FORMAT.name: module.FORMAT
    for module in (segments, dynamo, weka, lmcache, ragpulse, bailian, lengths, mooncake, aiperf, autobench)
}
"""In the order in which they are tried."""
WRITERS = tuple(sorted(name for name, known in FORMATS.items() if known.write))
DATA = (".json", ".jsonl", ".csv")
SIDECAR = ".meta.json"


def read(path: Path, *, block: int | None = None, infer_sessions: bool = False, share_prefix: bool = False) -> Trace:
    """A file, or a folder of files of one format. Raises `TraceError`, with file and line where there is one.

    `block`: tokens of a block, where the format doesn't say. `infer_sessions`: a prompt that begins with the whole of
    another continues its session. `share_prefix`: tools and system prompts are common, where ids are local.
    """
    files = _files(path)
    sources = [rows(file) for file in files]
    firsts = [next(source, None) for source in sources]
    found = [(first, source) for first, source in zip(firsts, sources, strict=True) if first is not None]
    if not found:
        raise TraceError(f"{path}: no requests in it")
    kinds = {_detect(first).name: _detect(first) for first, _ in found}
    if len(kinds) > 1:
        raise TraceError(f"{path}: it holds files of several formats ({', '.join(sorted(kinds))}); give one of them")
    kind = next(iter(kinds.values()))
    if path.is_dir() and not kind.folder and len(files) > 1:
        raise TraceError(f"{path}: {kind.name} is read from one file; the folder has {len(files)}")
    options = Options(_block(files[0], block, kind), infer_sessions, share_prefix)
    for name, given in (
        ("infer_sessions", infer_sessions),
        ("share_prefix", share_prefix),
        ("block", block is not None),
    ):
        if given and name not in kind.takes:
            raise TraceError(f"{path}: --{name.replace('_', '-')} has no meaning for the {kind.name} format")
    records: Iterator[Row] = chain.from_iterable(chain([first], source) for first, source in found)
    try:
        parsed = kind.parse(records, options)
    except TraceError as error:
        if str(path) in str(error):
            raise
        raise TraceError(f"{path}: {error}") from error
    if not parsed.turns:
        raise TraceError(f"{path}: no requests in it")
    return Trace(path.name, tuple(parsed.turns), tuple(parsed.notes))


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    names = sorted(p for p in path.iterdir() if p.is_file() and not p.name.endswith(SIDECAR))
    found = [p for p in names if p.name.removesuffix(".gz").endswith(DATA)]
    if not found:
        raise TraceError(f"{path}: the folder has no {', '.join(DATA)} file, plain or .gz")
    return found


def _detect(first: Row) -> Format:
    for kind in FORMATS.values():
        if kind.matches(first.record):
            return kind
    fields = ", ".join(list(map(str, first.record))[:8]) or "none"
    wanted = "'session' with 'segments', 'input_length', 'requests', 'turns', 'text' or 'prompt'"
    raise first.error(f"no {wanted}: not a trace format that is known ({', '.join(FORMATS)}); its fields: {fields}")


def _block(file: Path, block: int | None, kind: Format) -> int | None:
    """The block size: the user's, or the sidecar's."""
    if block is not None and block < 1:
        raise TraceError(f"--block {block}: must be at least 1; for example --block 512")
    sidecar = file.with_name(file.name + SIDECAR)
    if "block" not in kind.takes or not sidecar.exists():
        return block
    try:
        said = json.loads(sidecar.read_text(encoding="utf-8"))["block_size"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TraceError(f"{sidecar}: no block_size can be read from it") from error
    if type(said) is not int or said < 1:
        raise TraceError(f"{sidecar}: block_size is {said!r}: a whole number of at least 1 is needed")
    if block not in (None, said):
        raise TraceError(f"{file}: --block {block} contradicts its sidecar, which says {said}")
    return said


def write(trace: Trace, path: Path, to: str, block: int | None = None) -> tuple[str, ...]:
    """The trace in another format; gzipped when the name ends in .gz. Returns what is lost, a line each.

    Raises `TraceError` where the format can't hold the trace.
    """
    kind = FORMATS.get(to)
    if kind is None or kind.write is None:
        raise TraceError(f"--to {to}: must be one of {', '.join(WRITERS)}; for example --to mooncake")
    written = kind.write(trace, block)
    save(path, written.records)
    if written.meta is not None:
        sidecar = path.with_name(path.name + SIDECAR)
        try:
            sidecar.write_text(json.dumps(written.meta, indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            raise TraceError(f"{sidecar}: can't be written ({error.strerror})") from error
    return written.notes
