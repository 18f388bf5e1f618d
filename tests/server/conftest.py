"""A scripted engine of a few lines, and two ways to reach a server around it: in process, and on a socket."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import httpx
import pytest

import milepost
from milepost.core import tokens
from milepost.core.request import Finish, Request
from milepost.engine.facade import Delta, Usage
from milepost.engine.text import Text, TextStream
from milepost.errors import PromptTooLong, Unavailable
from milepost.server.app import create_app
from milepost.server.protocol import ServerSettings
from milepost.server.run import ReadyServer, config, listen

TEXT = Text.load(Path(milepost.__file__).parent / "demo")


class FakeEngine:
    """Plays `script(request)`: an int is a token, a float a pause in seconds, an exception is raised.

    Without a script each request gets the tokens of `answer`.
    """

    def __init__(self, answer: str = "In the beginning") -> None:
        self.script: Callable[[Request], list[object]] = lambda _: tokens.unpack(TEXT.encode(answer)).tolist()
        self.requests: list[Request] = []
        self.stops: list[tuple[str, ...]] = []
        self.open: set[str] = set()
        self.aborted: list[str] = []
        self.alive = True
        self.cached = 3
        self.room = 10_000

    def validate(self, request: Request) -> None:
        size = tokens.length(request.prompt)
        if size > self.room:
            raise PromptTooLong(f"the prompt has {size} tokens, the pool {self.room} rows", "prompt")

    async def stream(self, request: Request, stops: tuple[str, ...] = ()) -> AsyncIterator[Delta]:
        if not self.alive:
            raise Unavailable("the engine has stopped")
        self.requests.append(request)
        self.stops.append(stops)
        self.open.add(request.id)
        finished = False
        try:
            for delta in self._play(request, TextStream(TEXT, stops)):
                if isinstance(delta, float):
                    await asyncio.sleep(delta)
                    continue
                await asyncio.sleep(0)
                finished = delta.finish is not None
                yield delta
        finally:
            self.open.discard(request.id)
            if not finished:
                self.aborted.append(request.id)

    def _play(self, request: Request, text: TextStream):
        made = 0
        reason = Finish.LENGTH
        ending = ""
        for item in self.script(request):
            if isinstance(item, Exception):
                raise item
            if isinstance(item, float):
                yield item
                continue
            made += 1
            words = text.push(item)
            if item in request.sampling.stop_ids or text.stopped:
                reason, ending = Finish.STOP, words
                break
            yield Delta(words, (item,))
            if made == request.sampling.max_new:
                break
        usage = Usage(tokens.length(request.prompt), made, self.cached)
        yield Delta(ending + text.flush(), (), reason, usage)

    def info(self) -> dict[str, object]:
        return {"rows": self.room, "strategy": "exact"}

    def gauges(self) -> dict[str, float]:
        if not self.alive:
            raise Unavailable("the engine has stopped")
        return {
            "rows_free": 7.0,
            "evicted_tokens_total": 5.0,
            'tier_rows{tier="host"}': 1.0,
            'tier_rows{tier="storage"}': 2.0,
            "prompt_tokens_total": 99.0,
        }

    async def flush(self) -> bool:
        return not self.open


@pytest.fixture
def text() -> Text:
    return TEXT


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def settings() -> ServerSettings:
    return ServerSettings("demo", context_length=1000, aliases=("org/demo",))


@pytest.fixture
def app(engine, settings):
    return create_app(engine, TEXT, settings)


@pytest.fixture
def call(app):
    """Send one request in process: `call("POST", path, json=…)`."""

    def send(method: str, path: str, **more) -> httpx.Response:
        async def once() -> httpx.Response:
            transport = httpx.ASGITransport(app, raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
                return await client.request(method, path, **more)

        return asyncio.run(once())

    return send


@pytest.fixture
def chat(call):
    """A chat of one message, with more fields."""

    def send(**fields) -> httpx.Response:
        body = {"messages": [{"role": "user", "content": "Hello"}], **fields}
        return call("POST", "/v1/chat/completions", json=body)

    return send


@pytest.fixture
def complete(call):
    def send(**fields) -> httpx.Response:
        return call("POST", "/v1/completions", json={"prompt": "Hello", **fields})

    return send


@contextlib.contextmanager
def serving(app):
    """The app on a real socket, in a thread; yields the port."""
    listener = listen("127.0.0.1", 0)
    server = ReadyServer(config(app), "127.0.0.1")
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join(10)
        listener.close()
        assert not thread.is_alive(), "the server didn't stop"


@pytest.fixture
def port(app):
    with serving(app) as port:
        yield port
