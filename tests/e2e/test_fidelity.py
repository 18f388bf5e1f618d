"""The engine and the simulator decide alike: a real server's run, replayed without a model, gives the same plans."""

import asyncio
import random
from dataclasses import dataclass, field

import httpx

from milepost.core.plan import Plan, Result
from milepost.core.pool import Owner
from milepost.core.request import Request
from milepost.core.scheduler import Event, Scheduler
from milepost.sim.executor import Memory, SimExecutor
from tests.e2e.live import serving


@dataclass
class Recorded:
    """What a scheduler was told, in order, and what it decided."""

    scheduler: Scheduler
    calls: list[tuple[str, object]] = field(default_factory=list)
    digests: list[str] = field(default_factory=list)
    ends: list[tuple[int, int]] = field(default_factory=list)

    def __getattr__(self, name: str) -> object:
        return getattr(self.scheduler, name)

    def submit(self, request: Request) -> Owner:
        number = self.scheduler.submit(request)
        self.calls.append(("submit", request))
        return number

    def abort(self, number: Owner) -> Event | None:
        self.calls.append(("abort", number))
        return self.scheduler.abort(number)

    def plan(self) -> Plan:
        plan = self.scheduler.plan()
        self.digests.append(plan.digest())
        return plan

    def commit(self, result: Result) -> list[Event]:
        self.calls.append(("step", result))
        events = self.scheduler.commit(result)
        self.ends += [(e.sequence, e.reuse.resume) for e in events if e.finish and e.reuse]
        return events


async def talk(url: str) -> None:
    chance = random.Random(5)
    stem = [chance.randrange(3, 4096) for _ in range(300)]
    async with httpx.AsyncClient(base_url=url, timeout=60) as http:

        async def one() -> None:
            await asyncio.sleep(chance.random())
            prompt = stem[: chance.randrange(10, 300)] + [chance.randrange(3, 4096) for _ in range(20)]
            body = {"prompt": prompt, "max_tokens": chance.randrange(1, 30), "temperature": 1.0, "stop": "the"}
            try:
                async with asyncio.timeout(0.05 if chance.random() < 0.2 else 60):
                    await http.post("/v1/completions", json=body)
            except TimeoutError:
                pass

        await asyncio.gather(*(one() for _ in range(120)))


def test_recorded_run_gives_equal_plans_and_equal_reuse():
    flags = {"max_mamba_cache_size": 9, "max_total_tokens": 2_500, "chunked_prefill_size": 128}
    with serving(hybrid_cache_checkpoints_level=3, mamba_track_interval=8, **flags) as live:
        original = live.scheduler
        recorded = live.booted.engine._scheduler = Recorded(original)
        asyncio.run(talk(live.url))
        live.wait_idle()
        limits, strategy, policy = original.limits, original.strategy, original.policy
    again = Scheduler(2_500, 9, limits, strategy, policy)
    results: list[Result] = [call[1] for call in recorded.calls if call[0] == "step"]
    drawn = iter(results)
    current: Result | None = None
    executor = SimExecutor(lambda chunk, _: current.tokens[chunk.sequence], memory=Memory(2_501, 9))
    digests, ends = [], []
    for kind, what in recorded.calls:
        if kind == "submit":
            again.submit(what)
        elif kind == "abort":
            again.abort(what)
        else:
            plan = again.plan()
            digests.append(plan.digest())
            current = next(drawn)
            assert executor.run(plan).tokens == current.tokens
            ends += [(e.sequence, e.reuse.resume) for e in again.commit(current) if e.finish and e.reuse]
    assert digests == recorded.digests and len(digests) > 100
    assert ends == recorded.ends and sum(resume for _, resume in ends) > 0
    assert any(kind == "abort" for kind, _ in recorded.calls)
