"""A whole server in this process: real model, real engine thread, real socket."""

import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from milepost.boot import Booted, boot
from milepost.config import CacheConfig, ServeConfig
from milepost.core.audit import audit
from milepost.core.request import Request
from milepost.core.scheduler import Scheduler
from milepost.core.tokens import unpack
from milepost.engine.facade import Delta
from milepost.server.app import create_app
from milepost.server.protocol import ServerSettings
from milepost.server.run import ReadyServer, config, listen


@dataclass
class Heard:
    """What one request sent and got, in ids."""

    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    cached: int | None = None

    @property
    def consumed(self) -> list[int]:
        """All that the model has consumed: the last token was drawn, never fed."""
        return (self.prompt + self.tokens)[:-1]


class Recorder:
    """The engine, with a record of what passes."""

    def __init__(self, booted: Booted) -> None:
        self._engine = booted.engine
        self.heard: list[Heard] = []
        for name in ("validate", "info", "gauges", "flush"):
            setattr(self, name, getattr(self._engine, name))

    async def stream(self, request: Request, stops: tuple[str, ...] = ()) -> AsyncIterator[Delta]:
        heard = Heard(unpack(request.prompt).tolist())
        self.heard.append(heard)
        source = self._engine.stream(request, stops)
        try:
            async for delta in source:
                heard.tokens += delta.tokens
                heard.cached = delta.usage.cached_tokens if delta.usage else None
                yield delta
        finally:
            await source.aclose()


@dataclass
class Live:
    url: str
    booted: Booted
    recorder: Recorder

    @property
    def scheduler(self) -> Scheduler:
        return self.booted.engine._scheduler

    def wait_idle(self, seconds: float = 20.0) -> None:
        """Until nothing runs or waits and no request is on its way in."""
        end = time.monotonic() + seconds
        while self.scheduler.busy or self.booted.engine._inbox or self.booted.engine._streams:
            assert time.monotonic() < end, "the engine does not become idle"
            time.sleep(0.005)

    def check(self) -> None:
        """Idle, sound, and nothing held."""
        self.wait_idle()
        assert not audit(self.scheduler)
        stats = self.scheduler.stats()
        assert stats.states.held == stats.rows.held == stats.windows.held == 0


@contextmanager
def serving(
    settings: dict[str, object] | None = None, model_path: Path | None = None, **flags: object
) -> Iterator[Live]:
    booted = boot(ServeConfig(model_path=model_path), CacheConfig(**flags))  # type: ignore[arg-type]
    recorder = Recorder(booted)
    app = create_app(recorder, booted.text, ServerSettings(booted.name, booted.context, **(settings or {})))
    listener = listen("127.0.0.1", 0)
    server = ReadyServer(config(app), "127.0.0.1")
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    booted.engine.start()
    thread.start()
    try:
        yield Live(f"http://127.0.0.1:{listener.getsockname()[1]}", booted, recorder)
    finally:
        server.should_exit = True
        thread.join()
        booted.engine.close()
        listener.close()
