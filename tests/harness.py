"""A scheduler on tagged memory, audited after each step, whose texts are known in advance."""

import numpy as np

from milepost.core.audit import check
from milepost.core.checkpoint import EXACT, CheckpointPolicy, SlotStrategy
from milepost.core.plan import Plan
from milepost.core.request import Finish, Request, Sampling
from milepost.core.scheduler import Event, Limits, Scheduler
from milepost.core.tokens import pack, unpack
from milepost.core.window import Windows
from milepost.sim.executor import Memory, SimExecutor, digests, draw_from_prefix

VOCABULARY = 3  # small, so that generated texts run into each other


def expected(request: Request, count: int) -> list[int]:
    """The text that the simulated model gives to a request, computed from the prefix alone."""
    tokens = unpack(request.prompt).tolist()
    prompt = len(tokens)
    while len(tokens) < prompt + count:
        tokens.append(int(digests(np.array(tokens, np.int32))[-1]) % VOCABULARY)
    return tokens[prompt:]


class Harness:
    def __init__(
        self,
        rows: int,
        slots: int,
        *,
        strategy: SlotStrategy = EXACT,
        policy: CheckpointPolicy | None = None,
        limits: Limits | None = None,
        vocabulary: int = VOCABULARY,
        windows: Windows = Windows(),  # noqa: B008 - frozen
    ) -> None:
        policy = policy or CheckpointPolicy()
        limits = limits or Limits(8, 8, 10_000)
        self.scheduler = Scheduler(rows, slots, limits, strategy, policy, windows)
        memory = Memory(rows + strategy.page, slots, windows)
        self.executor = SimExecutor(draw_from_prefix(vocabulary), memory=memory)
        self.texts: dict[int, list[int]] = {}
        self.ends: dict[int, Event] = {}

    def submit(self, prompt: list[int] | np.ndarray, max_new: int | None = 1, **fields: object) -> int:
        request = Request("r", pack(prompt), Sampling(max_new=max_new), **fields)  # type: ignore[arg-type]
        number = self.scheduler.submit(request)
        self.texts[number] = []
        return number

    def step(self, span: int = 1) -> Plan:
        plan = self.scheduler.plan(span)
        oldest = self.scheduler.running()[:1]
        if oldest:
            assert any(c.sequence == oldest[0].number for c in plan.chunks), "9: the oldest does not progress"
        for event in self.scheduler.commit(self.executor.run(plan)):
            self.record(event)
        check(self.scheduler)
        return plan

    def record(self, event: Event | None) -> None:
        if event is None:
            return
        self.texts[event.sequence] += event.tokens
        if event.finish is not None:
            assert event.sequence not in self.ends, "8: two terminal events"
            self.ends[event.sequence] = event
            text = self.texts[event.sequence]
            assert text == expected(event.request, len(text)) or event.request.id == "any"

    def abort(self, number: int) -> None:
        self.record(self.scheduler.abort(number))
        check(self.scheduler)

    def drain(self, limit: int = 100_000, span: int = 1) -> int:
        steps = 0
        while self.scheduler.busy:
            plan = self.step(span)
            assert not plan.idle, f"nothing runs, {len(self.scheduler.waiting())} wait"
            steps += 1
            assert steps < limit, "it does not end"
        return steps

    def run(self, prompt: list[int] | np.ndarray, max_new: int = 1, **fields: object) -> Event:
        """One request, from start to finish, alone."""
        number = self.submit(prompt, max_new, **fields)
        self.drain(span=1_000_000)
        return self.ends[number]

    def idle_check(self) -> None:
        """With nothing running, only free and tree remain; an emptied cache leaves whole pools."""
        stats = self.scheduler.stats()
        assert stats.states.held == stats.rows.held == stats.windows.held == 0
        assert self.scheduler.flush()
        stats = self.scheduler.stats()
        assert all(pool.free == pool.size for pool in (stats.states, stats.rows, stats.windows))


def finished(event: Event) -> bool:
    return event.finish in (Finish.STOP, Finish.LENGTH)
