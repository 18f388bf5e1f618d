"""The routes. `create_app` builds a Starlette app around an engine that somebody else starts and stops.

Every failure leaves as OpenAI's error object; see `errors`. The app keeps no state between requests but
metrics.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from functools import partial
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from milepost.engine.facade import Engine
from milepost.engine.text import Text
from milepost.errors import RequestError, Unavailable
from milepost.server.errors import BodyTooLarge, ClientGone, error_body, shape
from milepost.server.metrics import CONTENT_TYPE, Meter, Metrics
from milepost.server.protocol import (
    Body,
    ChatBody,
    CompletionBody,
    Job,
    ServerSettings,
    chat_job,
    check_model,
    completion_job,
    parse,
)
from milepost.server.stream import EventStream, attend, collect, follow, merge, speak

# Nobody reads the answer to a request whose sender has gone; the status is nginx's, for logs.
CLIENT_GONE = 499

# Up to this many bytes a body is parsed and tokenized within a millisecond or so: not worth a thread.
SMALL_BODY = 16 * 1024


def create_app(engine: Engine, text: Text, settings: ServerSettings) -> Starlette:
    server = _Server(engine, text, settings)
    routes = [
        Route("/", server.index),
        Route("/health", server.health),
        Route("/get_server_info", server.server_info),
        Route("/flush_cache", server.flush_cache, methods=["POST"]),
        Route("/v1/models", server.models),
        Route("/v1/models/{name:path}", server.model),
        Route("/v1/chat/completions", server.chat, methods=["POST"]),
        Route("/v1/completions", server.completions, methods=["POST"]),
    ]
    if settings.metrics:
        routes.append(Route("/metrics", server.metrics_page))
    handlers: dict[Any, Callable[[HttpRequest, Any], Awaitable[Response]]] = {
        RequestError: server.refused,
        HTTPException: server.no_route,
        ClientGone: server.client_gone,
        ClientDisconnect: server.client_gone,
        Exception: server.broken,
    }
    app = Starlette(routes=routes, exception_handlers=handlers)
    app.router.redirect_slashes = False
    app.state.settings = settings
    return app


class _Server:
    """The handlers, and what they share."""

    def __init__(self, engine: Engine, text: Text, settings: ServerSettings) -> None:
        self.engine = engine
        self.text = text
        self.settings = settings
        self.metrics = Metrics(engine, settings.model_name)
        self.created = 0  # a model served from a folder has no date of its own

    # Generation

    async def chat(self, request: HttpRequest) -> Response:
        return await self._generate(request, ChatBody, chat_job)

    async def completions(self, request: HttpRequest) -> Response:
        return await self._generate(request, CompletionBody, completion_job)

    async def _generate(
        self, request: HttpRequest, kind: type[Body], make: Callable[[Any, Text, ServerSettings], Job]
    ) -> Response:
        began = time.perf_counter()
        raw = await _read_body(request, self.settings.body_limit)

        def prepare() -> Job:
            return make(parse(raw, kind), self.text, self.settings)

        job = prepare() if len(raw) <= SMALL_BODY else await asyncio.to_thread(prepare)
        for one in job.requests:
            self.engine.validate(one)
        sources = [partial(follow, self.engine, one, job.stops, Meter(self.metrics, began)) for one in job.requests]
        events = merge(sources)
        name, report = self.settings.model_name, self.settings.cache_report
        if job.stream:
            return EventStream(speak(job, events, name, report))
        return _json(await attend(request.receive, collect(job, events, name, report)))

    # Everything else

    async def index(self, _request: HttpRequest) -> Response:
        return PlainTextResponse(f"Milepost serves {self.settings.model_name}; try /v1/chat/completions\n")

    async def models(self, _request: HttpRequest) -> Response:
        return _json({"object": "list", "data": [self._card(self.settings.model_name)]})

    async def model(self, request: HttpRequest) -> Response:
        name = request.path_params["name"]
        check_model(name, self.settings)
        return _json(self._card(name))

    def _card(self, name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self.created,
            "owned_by": "milepost",
            "root": self.settings.model_name,
            "max_model_len": self.settings.context_length,
        }

    async def health(self, _request: HttpRequest) -> Response:
        """200 while the engine answers. `gauges` raises `Unavailable` when it doesn't."""
        self.engine.gauges()
        return _json({"status": "ok"})

    async def server_info(self, _request: HttpRequest) -> Response:
        return _json({**self.engine.info(), **asdict(self.settings)})

    async def flush_cache(self, _request: HttpRequest) -> Response:
        if await self.engine.flush():
            return _json({"success": True, "message": "the prefix cache is empty"})
        message = "requests are running or waiting; nothing was flushed"
        return self._failure(409, shape(message, "conflict_error", code="busy"))

    async def metrics_page(self, _request: HttpRequest) -> Response:
        return Response(self.metrics.page(), media_type=CONTENT_TYPE)

    # Failures

    async def refused(self, _request: HttpRequest, error: RequestError) -> Response:
        headers = {"retry-after": "1"} if isinstance(error, Unavailable) else {}
        if isinstance(error, BodyTooLarge):
            headers["connection"] = "close"  # the rest of the body is still on its way
        return self._failure(error.status, error_body(error), headers)

    async def no_route(self, request: HttpRequest, error: HTTPException) -> Response:
        message = f"{request.method} {request.url.path}: {error.detail}"
        body = shape(message, "invalid_request_error")
        return self._failure(error.status_code, body, dict(error.headers or {}))

    async def client_gone(self, _request: HttpRequest, _error: Exception) -> Response:
        return Response(status_code=CLIENT_GONE)

    async def broken(self, _request: HttpRequest, _error: Exception) -> Response:
        """A bug. Starlette raises it again after this answer, so that it reaches the log."""
        return self._failure(500, shape("internal error", "server_error"))

    def _failure(self, status: int, body: dict[str, Any], headers: dict[str, str] | None = None) -> Response:
        self.metrics.error(status)
        return _json(body, status, headers)


async def _read_body(request: HttpRequest, limit: int) -> bytes:
    """The whole body, which is not read further than `limit`."""
    declared = request.headers.get("content-length", "")
    chunks: list[bytes] = []
    size = int(declared) if declared.isdecimal() else 0
    if size <= limit:
        size = 0
        async for chunk in request.stream():
            size += len(chunk)
            if size > limit:
                break
            chunks.append(chunk)
    if size > limit:
        raise BodyTooLarge(f"the body has {size} bytes or more; at most {limit} are read")
    return b"".join(chunks)


def _json(body: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(body), status, headers, media_type="application/json")
