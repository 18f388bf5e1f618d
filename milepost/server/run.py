"""Serve an app on a socket until a signal says stop. Starts and stops nothing but the HTTP server."""

import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from starlette.types import ASGIApp

from milepost.errors import ConfigError

GRACE_SECONDS = 5  # for streams that still run when the server is told to stop
BACKLOG = 2048


def run(app: ASGIApp, host: str = "127.0.0.1", port: int = 30000) -> None:
    """Serve until SIGINT or SIGTERM, then return, so that the caller can stop its engine.

    Port 0 picks a free one. `ConfigError` when the address can't be had. Call it in the main thread.
    """
    listener = listen(host, port)
    try:
        with _signals_return():
            ReadyServer(config(app), host).run(sockets=[listener])
    except KeyboardInterrupt:
        pass  # uvicorn has shut down in order and then repeats the signal
    finally:
        listener.close()


def config(app: ASGIApp) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        lifespan="off",
        server_header=False,
        timeout_graceful_shutdown=GRACE_SECONDS,
    )


def listen(host: str, port: int) -> socket.socket:
    """A bound socket; bound here, because uvicorn would end the process when the port is taken."""
    if not 0 <= port < 65536:
        raise ConfigError("--port", port, "must be 0 … 65535", 30000)
    try:
        family, kind, number, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ConfigError("--host", host, f"is no address of this machine ({error})", "127.0.0.1") from error
    listener = socket.socket(family, kind, number)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        works = port + 1 if port < 65535 else 30000
        raise ConfigError("--port", port, f"can't be bound on {host} ({error.strerror})", works) from error
    return listener


class ReadyServer(uvicorn.Server):
    """Says in one line, once it accepts connections, how to talk to it."""

    def __init__(self, config: uvicorn.Config, host: str) -> None:
        super().__init__(config)
        self._host = host

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started and sockets:
            print(ready_line(self._host, sockets[0].getsockname()[1]), flush=True)


def ready_line(host: str, port: int) -> str:
    name = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    body = '{"messages": [{"role": "user", "content": "Hello"}]}'
    url = f"http://{name}:{port}/v1/chat/completions"
    return f"ready: curl {url} -H 'content-type: application/json' -d '{body}'"


@contextmanager
def _signals_return() -> Iterator[None]:
    """Make SIGTERM harmless once uvicorn has handled it.

    Uvicorn raises it again, which would end the process before the caller has cleaned up. (SIGINT comes back
    as KeyboardInterrupt.)
    """
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
