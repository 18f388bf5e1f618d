"""The loop thread: plan, run, commit; text out, requests in.

    event loop thread(s)                       this thread
    stream() ──── inbox: submit, abort ──────► between two steps
             ◄─── one call per step and loop ─ deltas of the step

The scheduler is touched by this thread only, between steps. An exception here is a bug: the engine is then dead,
every stream is told so, and nothing is served from a cache that may be wrong.
"""

import asyncio
import contextlib
import logging
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

from milepost.core.plan import Executor, Result
from milepost.core.pool import Owner
from milepost.core.request import Request
from milepost.core.scheduler import Event, Scheduler
from milepost.engine.facade import Delta, Usage
from milepost.engine.text import Text, TextStream
from milepost.errors import RequestError, Unavailable

log = logging.getLogger("milepost.engine")

Outcome = Delta | RequestError

Deed = Callable[[str | None], None]
"""Something to do between two steps. Its argument is None, or why the engine can't do it any more."""


class _Stream:
    """One request on its way: where its deltas go, and the text not yet sent."""

    def __init__(self, request: Request, text: TextStream) -> None:
        self.request = request
        self.text = text
        self.loop = asyncio.get_running_loop()
        self.deltas: asyncio.Queue[Outcome] = asyncio.Queue()
        self.number: Owner | None = None
        self.piece = ""  # the text of this step


class EngineLoop:
    """Implements `facade.Engine` over a scheduler and an executor. `start` it, and `close` it."""

    def __init__(self, scheduler: Scheduler, executor: Executor, text: Text, info: dict[str, Any]) -> None:
        self._scheduler = scheduler
        self._executor = executor
        self._text = text
        self._info = info
        self._streams: dict[Owner, _Stream] = {}
        self._inbox: deque[Deed] = deque()
        self._wake = threading.Condition()
        self._closing = False
        self._error: str | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    # Called from event loops

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """End all requests and the thread."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        if self._thread.is_alive():
            self._thread.join()
        self._executor.close()

    def validate(self, request: Request) -> None:
        self._alive()
        self._scheduler.max_new(request)

    async def stream(self, request: Request, stops: tuple[str, ...] = ()) -> AsyncIterator[Delta]:
        self._alive()
        stream = _Stream(request, TextStream(self._text, stops))
        self._post(lambda dead: self._submit(stream, dead))
        done = False
        try:
            while not done:
                outcome = await stream.deltas.get()
                if isinstance(outcome, RequestError):
                    done = True
                    raise outcome
                done = outcome.finish is not None
                yield outcome
        finally:
            if not done:
                self._post(lambda dead: self._abort(stream, dead))

    def info(self) -> dict[str, Any]:
        stats = self._scheduler.stats()
        return {**self._info, "running": stats.running, "waiting": stats.waiting}

    def gauges(self) -> dict[str, float]:
        self._alive()
        stats = self._scheduler.stats()
        gauges: dict[str, float] = {
            "running_requests": stats.running,
            "waiting_requests": stats.waiting,
            "running_limit": stats.running_limit,
            "reserved_slots": stats.reserved_slots * stats.running,
            "checkpoint_grid": self._scheduler.strategy.grid,
            "waiting_for_state_pool": stats.waiting_for == "state pool",
            "waiting_for_kv_pool": stats.waiting_for == "kv pool",
            "waiting_for_window_pool": stats.waiting_for == "window pool",
            "waiting_for_running_limit": stats.waiting_for == "running limit",
        }
        for unit, pool in (("state_slots", stats.states), ("kv_rows", stats.rows), ("window_rows", stats.windows)):
            gauges[unit] = pool.size
            gauges[f"{unit}_free"] = pool.free
            gauges[f"{unit}_evictable"] = pool.evictable
            gauges[f"{unit}_held"] = pool.held
        gauges["state_slots_marked"] = stats.states.marked
        return {**gauges, **self._scheduler.counters.as_dict()}

    async def flush(self) -> bool:
        self._alive()
        loop = asyncio.get_running_loop()
        done: asyncio.Future[bool] = loop.create_future()

        def flush(dead: str | None) -> None:
            flushed = dead is None and self._scheduler.flush()
            loop.call_soon_threadsafe(lambda: done.cancelled() or done.set_result(flushed))

        self._post(flush)
        return await done

    def _alive(self) -> None:
        if self._error is not None:
            raise Unavailable(self._error)

    def _post(self, deed: Deed) -> None:
        """Have the loop thread do something between two steps; done here, in vain, when it has ended."""
        with self._wake:
            dead = self._error
            if dead is None:
                self._inbox.append(deed)
                self._wake.notify()
        if dead is not None:
            deed(dead)

    # In the loop thread

    def _run(self) -> None:
        try:
            while self._attend():
                self._step()
            self._die("the server is shutting down")
        except BaseException as error:
            log.exception("the engine has stopped on a bug")
            self._die(f"the engine has stopped: {type(error).__name__}: {error}")

    def _attend(self) -> bool:
        """Do what was asked for; wait while there is nothing to do; False when closing."""
        while True:
            while self._inbox:
                self._inbox.popleft()(None)
            with self._wake:
                if self._closing:
                    return False
                if self._scheduler.busy:
                    return True
                if not self._inbox:
                    self._wake.wait()

    def _step(self) -> None:
        plan = self._scheduler.plan()
        result = self._read(self._executor.run(plan))
        self._deliver(self._scheduler.commit(result))

    def _read(self, result: Result) -> Result:
        """Turn the drawn tokens into text, and say whose text is complete."""
        stopped = set()
        for number, tokens in result.tokens.items():
            stream = self._streams[number]
            stop_ids = stream.request.sampling.stop_ids
            stream.piece = "".join(stream.text.push(token) for token in tokens if token not in stop_ids)
            if stream.text.stopped:
                stopped.add(number)
        return replace(result, stopped=frozenset(stopped)) if stopped else result

    def _deliver(self, events: list[Event]) -> None:
        """Send the deltas of a step, with one call to each event loop."""
        letters: dict[asyncio.AbstractEventLoop, list[tuple[_Stream, Outcome]]] = {}
        for event in events:
            stream = self._streams[event.sequence]
            piece, stream.piece, usage = stream.piece, "", None
            if event.finish is not None:
                del self._streams[event.sequence]
                piece += "" if stream.text.stopped else stream.text.flush()
                usage = _usage(event)
                log.info("request %s: %s, %s", event.request.id, event.finish.value, event.reuse)
            delta = Delta(piece, event.tokens, event.finish, usage)
            letters.setdefault(stream.loop, []).append((stream, delta))
        for loop, batch in letters.items():
            _send(loop, batch)

    def _submit(self, stream: _Stream, dead: str | None) -> None:
        try:
            if dead is not None:
                raise Unavailable(dead)
            stream.number = self._scheduler.submit(stream.request)
        except RequestError as error:
            _send(stream.loop, [(stream, error)])
        else:
            self._streams[stream.number] = stream

    def _abort(self, stream: _Stream, dead: str | None) -> None:
        if dead is None and stream.number is not None and self._scheduler.abort(stream.number) is not None:
            del self._streams[stream.number]

    def _die(self, reason: str) -> None:
        """No more steps: whoever waits is told, whoever comes is refused."""
        with self._wake:
            self._error = reason
            inbox, self._inbox = self._inbox, deque()
        for deed in inbox:
            deed(reason)
        for stream in self._streams.values():
            _send(stream.loop, [(stream, Unavailable(reason))])
        self._streams.clear()


def _usage(event: Event) -> Usage:
    assert event.reuse is not None
    return Usage(event.reuse.prompt, event.generated, event.reuse.resume)


def _send(loop: asyncio.AbstractEventLoop, batch: list[tuple[_Stream, Outcome]]) -> None:
    def put() -> None:
        for stream, outcome in batch:
            stream.deltas.put_nowait(outcome)

    with contextlib.suppress(RuntimeError):  # the event loop is closed: nobody is left to be told
        loop.call_soon_threadsafe(put)
