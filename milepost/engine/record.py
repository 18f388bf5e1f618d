"""Records what the engine serves as a trace without text: Mooncake JSONL, a row per finished request.

Prompts become ids of blocks of `block` tokens. An id stands for the block and all before it, of one namespace: it
numbers a keyed digest whose key, the salt, is drawn for each file and never stored. Sessions are digests too. What
answers complete is recorded like prompts, so a replay knows what the next turn repeats. Aborted requests leave no row.
"""

import hashlib
import json
import logging
import secrets
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from milepost.core.request import Request
from milepost.core.tokens import Packed, cut, length, pack
from milepost.engine.facade import Delta, Engine
from milepost.errors import ConfigError

log = logging.getLogger("milepost.record")

VERSION = 1
BLOCK = 64
SIDECAR = ".meta.json"


def check(path: Path, block: int) -> None:
    """Raises `ConfigError` where a recording can't begin. To be asked before anything is loaded."""
    if block < 1:
        raise ConfigError("--record-block", block, "must be at least 1", BLOCK)
    if path.exists():
        other = path.with_stem(path.stem + "-2")
        raise ConfigError("--record-trace", path, "exists already, and a recording overwrites nothing", other)
    if not path.parent.is_dir():
        raise ConfigError("--record-trace", path, f"needs the folder {path.parent}", path.name)


class TraceFile:
    """The file and its sidecar. Knows tokens only; safe to use from any thread."""

    def __init__(self, path: Path, model: str, block: int = BLOCK, salt: bytes | None = None) -> None:
        check(path, block)
        self._path = path
        self._block = block
        self._salt = salt or secrets.token_bytes(32)
        self._ids: dict[bytes, int] = {}
        self._lock = threading.Lock()
        self._rows = 0
        meta = {
            "format": "mooncake",
            "version": VERSION,
            "block_size": block,
            "model": model,
            "salt_fingerprint": hashlib.blake2b(self._salt, digest_size=8).hexdigest(),
        }
        try:
            self._file = path.open("x", encoding="utf-8")
            path.with_name(path.name + SIDECAR).write_text(json.dumps(meta, indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError("--record-trace", path, f"can't be written ({error.strerror})", "trace.jsonl") from error

    def write(self, request: Request, answer: list[int], began: float, took: float) -> None:
        """One finished request; times in seconds. A disk that fails ends the recording, not the service."""
        with self._lock:
            if self._file.closed:
                return
            row = json.dumps(self._row(request, answer, began, took), separators=(",", ":"))
            try:
                self._file.write(row + "\n")
                self._file.flush()
            except OSError as error:
                log.error("%s: the recording ends here: %s", self._path, error)
                self.abandon()

    def close(self) -> None:
        with self._lock:
            self._file.close()

    def abandon(self) -> None:
        """Close, whatever the disk says."""
        try:
            self._file.close()
        except OSError:
            log.debug("%s: what was buffered is lost", self._path)

    def _row(self, request: Request, answer: list[int], began: float, took: float) -> dict[str, Any]:
        prompt = length(request.prompt)
        full = prompt // self._block
        before = self._digest(request.namespace.encode(), b"namespace")
        digests = self._chain(request.prompt, before)
        last = digests[full - 1] if full else before
        rest = cut(request.prompt, full * self._block, prompt) + pack(answer)
        whole = length(rest) // self._block * self._block
        row: dict[str, Any] = {"session_id": self._session(request)}
        row |= {"timestamp": round(began * 1e3, 3), "took_ms": round(took * 1e3, 3)}
        row |= {"input_length": prompt, "output_length": len(answer)}
        row["hash_ids"] = self._numbers(digests)
        row["output_hash_ids"] = self._numbers(self._chain(cut(rest, 0, whole), last))
        self._rows += 1
        return row

    def _session(self, request: Request) -> str:
        """What clients call a session may be a name of somebody."""
        if not request.session:
            return f"r{self._rows}"
        return "s" + self._digest(request.session.encode(), b"session").hex()

    def _chain(self, tokens: Packed, before: bytes) -> list[bytes]:
        """A digest per block, the partial last one included; each stands for all before it."""
        digests = []
        for start in range(0, length(tokens), self._block):
            before = self._digest(before + cut(tokens, start, start + self._block))
            digests.append(before)
        return digests

    def _digest(self, content: bytes, use: bytes = b"") -> bytes:
        return hashlib.blake2b(content, digest_size=8, key=self._salt, person=use).digest()

    def _numbers(self, digests: list[bytes]) -> list[int]:
        """In order of first occurrence."""
        return [self._ids.setdefault(one, len(self._ids)) for one in digests]


class RecordingEngine:
    """An `Engine` that passes everything on and writes down what has finished."""

    def __init__(self, engine: Engine, file: TraceFile, clock: Callable[[], float] = time.monotonic) -> None:
        self._engine = engine
        self._file = file
        self._clock = clock
        self._start: float | None = None

    async def stream(self, request: Request, stops: tuple[str, ...] = ()) -> AsyncIterator[Delta]:
        now = self._clock()
        if self._start is None:
            self._start = now
        began, tokens = now - self._start, list[int]()
        source = self._engine.stream(request, stops)
        try:
            async for delta in source:
                tokens += delta.tokens
                if delta.finish is not None:
                    self._file.write(request, tokens, began, self._clock() - now)
                yield delta
        finally:
            await source.aclose()  # type: ignore[attr-defined]

    def validate(self, request: Request) -> None:
        self._engine.validate(request)

    def info(self) -> dict[str, Any]:
        return self._engine.info()

    def gauges(self) -> dict[str, float]:
        return self._engine.gauges()

    async def flush(self) -> bool:
        return await self._engine.flush()
