"""What must hold between server and engine whatever kind of iterator the engine gives."""

import asyncio
import time

from milepost.core.request import Finish, Request
from milepost.engine.facade import Delta, Usage
from milepost.server.metrics import Meter, Metrics
from milepost.server.stream import follow, merge


class Iterator:
    """An engine's stream that isn't a generator: nobody closes it unless told to."""

    def __init__(self, deltas: list[Delta]) -> None:
        self.deltas = list(deltas)
        self.closed = 0

    def __aiter__(self):
        return self

    async def __anext__(self) -> Delta:
        await asyncio.sleep(0)
        if not self.deltas:
            raise StopAsyncIteration
        return self.deltas.pop(0)

    async def aclose(self) -> None:
        self.closed += 1


class Engine:
    def __init__(self, deltas: list[Delta]) -> None:
        self.deltas = deltas
        self.streams: list[Iterator] = []

    def stream(self, _request, _stops):
        self.streams.append(Iterator(self.deltas))
        return self.streams[-1]

    def gauges(self) -> dict[str, float]:
        return {}


TALK = [Delta("a", (5,)), Delta("b", (6,)), Delta("", (), Finish.LENGTH, Usage(1, 2, 0))]


def sources(engine: Engine, count: int):
    metrics = Metrics(engine, "demo")
    return [lambda: follow(engine, Request("x", b""), (), Meter(metrics, time.perf_counter())) for _ in range(count)]


def test_streams_are_closed_when_the_reader_leaves_between_two_deltas():
    async def scenario(count: int) -> list[int]:
        engine = Engine(TALK)
        events = merge(sources(engine, count))
        await anext(events)
        await events.aclose()
        return [stream.closed for stream in engine.streams]

    assert asyncio.run(scenario(1)) == [1]
    assert asyncio.run(scenario(3)) == [1, 1, 1]


def test_streams_are_closed_after_their_end():
    async def scenario(count: int) -> list[int]:
        engine = Engine(TALK)
        said = [item async for item in merge(sources(engine, count))]
        assert len(said) == count * len(TALK)
        return [stream.closed for stream in engine.streams]

    assert asyncio.run(scenario(1)) == [1]
    assert asyncio.run(scenario(3)) == [1, 1, 1]


def test_nothing_is_submitted_for_a_reader_that_never_reads():
    async def scenario() -> int:
        engine = Engine(TALK)
        await merge(sources(engine, 2)).aclose()
        return len(engine.streams)

    assert asyncio.run(scenario()) == 0
