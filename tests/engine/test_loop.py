"""The loop thread on a simulated model: streams, stop strings, aborts, flush, and death."""

import asyncio
from collections.abc import Callable

import pytest

from milepost.core.audit import audit
from milepost.core.checkpoint import EXACT, CheckpointPolicy
from milepost.core.plan import Chunk, Plan, Result
from milepost.core.request import Finish, Request, Sampling
from milepost.core.scheduler import Limits, Scheduler
from milepost.engine.facade import Delta
from milepost.engine.loop import EngineLoop
from milepost.engine.text import Text
from milepost.errors import PromptTooLong, Unavailable
from milepost.sim.executor import Memory, SimExecutor
from tests.engine.world import DEMO

TEXT = Text.load(DEMO)
VERSE = TEXT.encode("And it came to pass, that the king said unto the people, Go up.")
WORDS = tuple(int(t) for t in memoryview(VERSE).cast("i"))


def speak(chunk: Chunk, _digest: int) -> tuple[int, ...]:
    """The words of the verse, one after the other, from the first."""
    at = chunk.tokens.size - len(chunk.request.prompt) // 4
    return (WORDS[at % len(WORDS)],)


def engine(draw: Callable[[Chunk, int], tuple[int, ...]] = speak) -> tuple[EngineLoop, Scheduler]:
    scheduler = Scheduler(500, 6, Limits(4, 64, 400), EXACT, CheckpointPolicy())
    loop = EngineLoop(scheduler, SimExecutor(draw, memory=Memory(501, 6)), TEXT, {"strategy": "exact"})
    loop.start()
    return loop, scheduler


def request(tokens: int = 5, max_new: int | None = 8, stop_ids: frozenset[int] = frozenset()) -> Request:
    prompt = TEXT.encode("x" * tokens)
    return Request("r", prompt, Sampling(max_new=max_new, stop_ids=stop_ids))


async def collect(loop: EngineLoop, asked: Request, stops: tuple[str, ...] = ()) -> list[Delta]:
    return [delta async for delta in loop.stream(asked, stops)]


def text(deltas: list[Delta]) -> str:
    return "".join(delta.text for delta in deltas)


def run(main: Callable[[EngineLoop, Scheduler], object], **options: object) -> None:
    loop, scheduler = engine(**options)  # type: ignore[arg-type]
    try:
        asyncio.run(main(loop, scheduler))  # type: ignore[arg-type]
    finally:
        loop.close()


def test_a_stream_ends_once_with_its_usage():
    async def main(loop, _scheduler):
        deltas = await collect(loop, request(max_new=8))
        assert [d.finish for d in deltas[:-1]] == [None] * (len(deltas) - 1)
        assert deltas[-1].finish is Finish.LENGTH and deltas[-1].usage.completion_tokens == 8
        assert text(deltas) == TEXT.decode(VERSE[: 8 * 4])
        assert sum(len(d.tokens) for d in deltas) == 8

    run(main)


def test_a_stop_string_ends_the_request_and_is_not_sent():
    async def main(loop, scheduler):
        deltas = await collect(loop, request(max_new=60), stops=("king", "people"))
        assert text(deltas) == "And it came to pass, that the "
        assert deltas[-1].finish is Finish.STOP
        assert scheduler.stats().rows.held == 0 and not audit(scheduler)

    run(main)


def test_a_stop_id_ends_the_request_and_is_not_text():
    async def main(loop, _scheduler):
        deltas = await collect(loop, request(max_new=60, stop_ids=frozenset({WORDS[3]})))
        assert deltas[-1].finish is Finish.STOP and text(deltas) == TEXT.decode(VERSE[: 3 * 4])
        assert deltas[-1].usage.completion_tokens == 4, "the stop id was drawn and counts"

    run(main)


def test_closing_a_stream_aborts_the_request():
    async def main(loop, scheduler):
        stream = loop.stream(request(max_new=None))
        await anext(stream)
        await stream.aclose()
        for _ in range(200):
            if not scheduler.busy:
                break
            await asyncio.sleep(0.005)
        assert scheduler.counters.aborted_total == 1 and not audit(scheduler)
        assert text(await collect(loop, request(max_new=4))), "the engine lives on"

    run(main)


def test_many_at_once_each_get_their_own():
    async def main(loop, _scheduler):
        answers = await asyncio.gather(*(collect(loop, request(tokens=3 + i, max_new=2 + i)) for i in range(12)))
        for i, deltas in enumerate(answers):
            assert deltas[-1].usage.completion_tokens == 2 + i
            assert text(deltas) == TEXT.decode(VERSE[: (2 + i) * 4])

    run(main)


def test_a_refusal_reaches_its_sender_and_nobody_else():
    async def main(loop, _scheduler):
        with pytest.raises(PromptTooLong):
            loop.validate(request(max_new=500))
        with pytest.raises(PromptTooLong):
            await collect(loop, request(max_new=500))
        assert (await collect(loop, request()))[-1].finish is Finish.LENGTH

    run(main)


def test_flush_is_refused_while_something_runs():
    async def main(loop, scheduler):
        stream = loop.stream(request(max_new=None))
        await anext(stream)
        assert await loop.flush() is False
        await stream.aclose()
        await collect(loop, request(max_new=1))
        assert await loop.flush() is True and scheduler.stats().rows.free == 500

    run(main)


class Broken(SimExecutor):
    def run(self, plan: Plan) -> Result:
        if plan.step > 3:
            raise RuntimeError("a wire came loose")
        return super().run(plan)


def test_death_is_told_to_all_and_nothing_is_served_any_more(caplog):
    scheduler = Scheduler(500, 6, Limits(4, 64, 400), EXACT, CheckpointPolicy())
    loop = EngineLoop(scheduler, Broken(speak, memory=Memory(501, 6)), TEXT, {})

    async def main() -> None:
        loop.start()
        outcomes = await asyncio.gather(
            *(collect(loop, request(max_new=None)) for _ in range(6)), return_exceptions=True
        )
        assert all(isinstance(o, Unavailable) and "a wire came loose" in str(o) for o in outcomes)
        for late in (loop.gauges, lambda: loop.validate(request())):
            with pytest.raises(Unavailable):
                late()
        with pytest.raises(Unavailable):
            await collect(loop, request())

    asyncio.run(main())
    loop.close()
    assert "the engine has stopped on a bug" in caplog.text
