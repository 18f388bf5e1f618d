"""From engine deltas to HTTP: merging the choices of one request, server-sent events, and hanging up.

A client that leaves aborts its request: `attend` watches the connection beside the work and cancels the
work, and every engine iterator is closed on the way out, finished or not.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import aclosing, suppress
from typing import Any, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from milepost.core.request import Request
from milepost.engine.facade import Delta, Engine, Usage
from milepost.errors import RequestError, Unavailable
from milepost.server.errors import ClientGone, error_body, shape
from milepost.server.metrics import Meter
from milepost.server.protocol import Job

T = TypeVar("T")
Events = AsyncGenerator[tuple[int, Delta], None]

log = logging.getLogger(__name__)


async def attend(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Do `work`, unless the client hangs up first: then cancel it, wait for its end, raise `ClientGone`.

    The body has been read, so the only message that can still come is the disconnect.
    """
    answer = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({answer, gone}, return_when=asyncio.FIRST_COMPLETED)
        if answer.done():
            return answer.result()
        raise ClientGone
    finally:
        answer.cancel()
        gone.cancel()
        await asyncio.gather(answer, gone, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def follow(engine: Engine, request: Request, stops: tuple[str, ...], meter: Meter) -> AsyncGenerator[Delta, None]:
    """The deltas of one engine request. The engine is first asked when the first delta is."""
    finished = False
    try:
        async with aclosing(engine.stream(request, stops)) as deltas:  # type: ignore[type-var]
            async for delta in deltas:
                meter.delta(delta)
                finished = delta.finish is not None
                yield delta
        if not finished:
            raise Unavailable("the engine ended the answer early")
    except Exception:
        meter.end("error")
        raise
    finally:
        meter.end("abort")  # counted only where neither a finish nor an error was


async def merge(sources: Sequence[Callable[[], AsyncGenerator[Delta, None]]]) -> Events:
    """Deltas of all choices as they come, each with its index. Closing it closes every source."""
    if len(sources) == 1:  # the common case needs neither a queue nor a task
        async with aclosing(sources[0]()) as deltas:
            async for delta in deltas:
                yield 0, delta
        return
    arrived: asyncio.Queue[tuple[int, Delta] | Exception | None] = asyncio.Queue()

    async def pump(index: int) -> None:
        try:
            async with aclosing(sources[index]()) as deltas:
                async for delta in deltas:
                    arrived.put_nowait((index, delta))
            arrived.put_nowait(None)
        except Exception as error:  # it belongs to whoever reads the queue
            arrived.put_nowait(error)

    pumps = [asyncio.ensure_future(pump(index)) for index in range(len(sources))]
    try:
        running = len(pumps)
        while running:
            item = await arrived.get()
            if item is None:
                running -= 1
            elif isinstance(item, Exception):
                raise item
            else:
                yield item
    finally:
        for task in pumps:
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


def count_usage(usages: dict[int, Usage], choices: int, cache_report: bool) -> dict[str, Any]:
    """OpenAI's usage object. A prompt counts once, whatever its number of choices.

    So does its reuse: that of the prompt's first choice, for the others may reuse what that one computed.
    """
    prompts = [usage for index, usage in usages.items() if index % choices == 0]
    prompt_tokens = sum(usage.prompt_tokens for usage in prompts)
    completion_tokens = sum(usage.completion_tokens for usage in usages.values())
    result: dict[str, Any] = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }
    if cache_report:
        result["prompt_tokens_details"] = {"cached_tokens": sum(usage.cached_tokens for usage in prompts)}
    return result


async def collect(job: Job, events: Events, model: str, cache_report: bool) -> dict[str, Any]:
    """The whole answer as one object."""
    texts = [[echo] for echo in job.echoes]
    reasons: dict[int, str] = {}
    usages: dict[int, Usage] = {}
    async with aclosing(events):
        async for index, delta in events:
            texts[index].append(delta.text)
            if delta.finish is not None:
                assert delta.usage is not None, "the last delta carries the usage"
                reasons[index], usages[index] = delta.finish.value, delta.usage
    choices = []
    for index, parts in enumerate(texts):
        text = "".join(parts)
        said = {"message": {"role": "assistant", "content": text}} if job.chat else {"text": text}
        choices.append({"index": index, **said, "logprobs": None, "finish_reason": reasons[index]})
    return {
        "id": job.id,
        "object": "chat.completion" if job.chat else "text_completion",
        "created": job.created,
        "model": model,
        "choices": choices,
        "usage": count_usage(usages, job.choices, cache_report),
    }


class Chunks:
    """Encodes the events of one stream; all but the text is encoded once, for this is paid per token."""

    def __init__(self, job: Job, model: str) -> None:
        kind = "chat.completion.chunk" if job.chat else "text_completion"
        head = {"id": job.id, "object": kind, "created": job.created, "model": model}
        self._head = b"data: " + msgspec.json.encode(head)[:-1]
        self._usage = b',"usage":null' if job.include_usage else b""
        self._chat = job.chat
        before = b'"delta":{"content":' if job.chat else b'"text":'
        after = b"}" if job.chat else b""
        self._before = [self._choice(index) + before for index in range(len(job.requests))]
        self._after = after + b',"logprobs":null,"finish_reason":null}]' + self._usage + b"}\n\n"

    def _choice(self, index: int) -> bytes:
        return self._head + b',"choices":[{"index":%d,' % index

    def role(self, index: int) -> bytes:
        opening = b'"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]'
        return self._choice(index) + opening + self._usage + b"}\n\n"

    def text(self, index: int, text: str) -> bytes:
        return self._before[index] + msgspec.json.encode(text) + self._after

    def finish(self, index: int, reason: str) -> bytes:
        empty = b'"delta":{}' if self._chat else b'"text":""'
        ending = b',"logprobs":null,"finish_reason":%s}]' % msgspec.json.encode(reason)
        return self._choice(index) + empty + ending + self._usage + b"}\n\n"

    def usage(self, usage: dict[str, Any]) -> bytes:
        return self._head + b',"choices":[],"usage":' + msgspec.json.encode(usage) + b"}\n\n"


DONE = b"data: [DONE]\n\n"


async def speak(job: Job, events: Events, model: str, cache_report: bool) -> AsyncGenerator[bytes, None]:
    """The answer as server-sent events. The first one is only made once the engine has said something."""
    chunks = Chunks(job, model)
    opened: set[int] = set()
    usages: dict[int, Usage] = {}
    async with aclosing(events):
        async for index, delta in events:
            text = delta.text
            if index not in opened:
                opened.add(index)
                text = job.echoes[index] + text
                if job.chat:
                    yield chunks.role(index)
            if text:
                yield chunks.text(index, text)
            if delta.finish is not None:
                assert delta.usage is not None, "the last delta carries the usage"
                usages[index] = delta.usage
                yield chunks.finish(index, delta.finish.value)
    if job.include_usage:
        yield chunks.usage(count_usage(usages, job.choices, cache_report))
    yield DONE


class EventStream(Response):
    """Sends server-sent events as they come.

    A `RequestError` before the first event leaves as an exception, and so becomes a proper status. After it,
    the status is gone: the error is an event of its own, and no `[DONE]` follows, for the answer isn't whole.
    """

    def __init__(self, events: AsyncGenerator[bytes, None]) -> None:
        self._events = events
        self.background = None
        self.status_code = 200
        self.media_type = "text/event-stream"
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        with suppress(ClientGone):
            await attend(receive, self._send_all(send))

    async def _send_all(self, send: Send) -> None:
        async with aclosing(self._events) as events:
            first = await anext(events)
            headers = [(name, value) for name, value in self.raw_headers if name != b"content-length"]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await _send(send, first)
            try:
                async for event in events:
                    await _send(send, event)
            except RequestError as error:
                await _send(send, _error_event(error_body(error)))
            except Exception:
                log.exception("a stream failed")
                await _send(send, _error_event(shape("internal error", "server_error")))
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _send(send: Send, event: bytes) -> None:
    await send({"type": "http.response.body", "body": event, "more_body": True})


def _error_event(body: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(body) + b"\n\n"
