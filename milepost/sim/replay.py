"""A trace through the same scheduler and cache as the engine's, in virtual time.

A `Feed` says which turns come when: all at their arrivals, or each after the answer to the one before. The replay
submits them, steps the scheduler, and lets plans of decodes alone cover as many tokens as fit before the next event.
With a grain of g, the core's unit is a block of g tokens: pools and chunk are in blocks, reports in tokens.
"""

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Protocol

import numpy as np

from milepost.core.audit import check
from milepost.core.plan import Chunk, Plan
from milepost.core.pool import Owner
from milepost.core.request import Finish, Request, Sampling
from milepost.core.scheduler import Event, Scheduler
from milepost.core.stats import Reuse
from milepost.core.tokens import Tokens, length, pack
from milepost.errors import RequestError
from milepost.sim.cost import ConstantSpeed, Cost
from milepost.sim.executor import Memory, SimExecutor
from milepost.sim.timeline import Timeline
from milepost.sim.trace import Material, Turn

FOREVER = 1 << 30
"""More tokens than any answer has."""


@dataclass(slots=True)
class Served:
    """What became of one request of the trace. Times in virtual seconds; None: it never came to that."""

    turn: Turn
    sent: float
    grain: int
    reuse: Reuse | None = None
    refused: str | None = None
    finish: Finish | None = None
    first_token: float | None = None
    finished: float | None = None

    @property
    def cached(self) -> int:
        """Prompt tokens reused."""
        return min(self.reuse.resume * self.grain, self.turn.prompt_len) if self.reuse else 0

    @property
    def missed(self) -> int:
        """Prompt tokens that were cached once and had to be computed again."""
        return (self.reuse.seen - self.reuse.resume) * self.grain if self.reuse else 0

    @property
    def done(self) -> bool:
        return self.finish is not None or self.refused is not None

    def record(self) -> dict[str, object]:
        """A line of the log."""
        return {
            "session": self.turn.session,
            "turn": self.turn.turn,
            "prompt": self.turn.prompt_len,
            "cached": self.cached,
            "sent": self.sent,
            "first_token": self.first_token,
            "finished": self.finished,
            "explanation": self.reuse.record() if self.reuse else self.refused,
        }


class Feed(Protocol):
    """Which turns come when, as (time, turn)."""

    def first(self) -> Sequence[tuple[float, Turn]]: ...

    def after(self, served: Served, now: float) -> Sequence[tuple[float, Turn]]:
        """What follows the end (or refusal) of a request."""


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Open loop: every turn at its arrival, whatever the state of the server."""

    turns: Sequence[Turn]

    def first(self) -> Sequence[tuple[float, Turn]]:
        return [(turn.arrival or 0.0, turn) for turn in self.turns]

    def after(self, _served: Served, _now: float) -> Sequence[tuple[float, Turn]]:
        return ()


class Replay:
    """One server in virtual time. `audited`: tagged memory, and the audit after each step."""

    def __init__(
        self,
        scheduler: Scheduler,
        material: Material,
        cost: Cost | None = None,
        audited: bool = False,
        timeline: Timeline | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.material = material
        self.cost = cost or ConstantSpeed()
        self.audited = audited
        self.timeline = timeline
        cache = scheduler.cache
        memory = Memory(cache.rows.size + cache.rows.page, cache.slots.size, scheduler.windows) if audited else None
        self._executor = SimExecutor(self._draw, self._seconds, memory)
        self._outputs: dict[Owner, Tokens] = {}
        self._served: dict[Owner, Served] = {}
        self._finished: list[Served] = []
        self.now = 0.0

    def sequential(self, turns: Sequence[Turn]) -> Iterator[Served]:
        """Each turn from start to finish before the next; arrivals are ignored."""
        for turn in turns:
            served = self._submit(turn)
            while self.scheduler.busy:
                self._step(FOREVER)
            self._finished.clear()
            yield served

    def run(self, feed: Feed, until: float = float("inf"), idle: float = float("inf")) -> Iterator[Served]:
        """All that the feed brings before `until`, in the order in which it ends. What runs then drains.

        Time in which nothing runs and nothing is due is shortened to `idle` seconds: all that is to come moves up.
        """
        order = count()
        events = [(time, next(order), turn) for time, turn in feed.first()]
        heapq.heapify(events)
        while events or self.scheduler.busy:
            due = events[0][0] if events else float("inf")
            if not self.scheduler.busy and due > self.now + idle:
                early = due - self.now - idle
                events = [(time - early, place, turn) for time, place, turn in events]
                due -= early
            if due <= self.now or not self.scheduler.busy:
                if due >= until:
                    events.clear()
                    continue
                self.now = max(self.now, due)
                served = self._submit(heapq.heappop(events)[2])
                if served.refused is not None:
                    self._finished.append(served)
            else:
                self._step(self._span(due - self.now))
            for served in self._finished:
                for time, turn in feed.after(served, self.now):
                    heapq.heappush(events, (time, next(order), turn))
                yield served
            self._finished.clear()

    def _span(self, seconds: float) -> int:
        """Units that a plan of decodes alone may cover before `seconds` have passed."""
        running = self.scheduler.running()
        if seconds >= FOREVER or not running:
            return FOREVER
        grain = self.material.grain
        step = self.cost.seconds([], [s.known * grain for s in running], grain)
        return max(1, int(seconds / step)) if step > 0 else FOREVER

    def _submit(self, turn: Turn) -> Served:
        served = Served(turn, self.now, self.material.grain)
        output = self.material.output(turn)
        request = Request(
            "",
            pack(self.material.prompt(turn)),
            Sampling(max_new=output.size),
            session=str(turn.session),
            arrived=self.now,
        )
        try:
            number = self.scheduler.submit(request)
        except RequestError as error:
            served.refused = str(error)
        else:
            self._outputs[number] = output
            self._served[number] = served
        return served

    def _step(self, span: int) -> None:
        plan = self.scheduler.plan(span)
        assert not plan.idle, "nothing runs and somebody waits"
        result = self._executor.run(plan)
        self.now += result.elapsed
        for event in self.scheduler.commit(result):
            self._note(event)
        if self.timeline is not None:
            self.timeline.note(self.now, result.elapsed, self.scheduler)
        if self.audited:
            check(self.scheduler)

    def _note(self, event: Event) -> None:
        served = self._served[event.sequence]
        if served.first_token is None:
            served.first_token = self.now
        if event.finish is not None:
            served.finish, served.reuse, served.finished = event.finish, event.reuse, self.now
            self._finished.append(served)
            del self._served[event.sequence], self._outputs[event.sequence]

    def _seconds(self, plan: Plan) -> float:
        grain = self.material.grain
        prefill = [(c.start * grain, c.stop * grain) for c in plan.chunks if not c.decode]
        decodes = [c for c in plan.chunks if c.decode]
        span = max((c.stop - c.start for c in decodes), default=0)
        return self.cost.seconds(prefill, [c.start * grain for c in decodes], span * grain)

    def _draw(self, chunk: Chunk, _digest: int) -> tuple[int, ...]:
        """What the trace says was generated."""
        at = chunk.tokens.size - length(chunk.request.prompt)
        return tuple(self._outputs[chunk.sequence][at : at + chunk.samples].tolist())


def summary(served: Sequence[Served], scheduler: Scheduler, grain: int = 1) -> dict[str, object]:
    """The figures of a replay, as JSON values. Tokens, whatever the grain."""
    counters = scheduler.counters.as_dict()
    prompt = sum(s.turn.prompt_len for s in served)
    cached = sum(s.cached for s in served)
    return {
        "requests": len(served),
        "refused": sum(s.refused is not None for s in served),
        "prompt_tokens": prompt,
        "cached_tokens": cached,
        "hit_rate": cached / prompt if prompt else 0.0,
        "continuations": sum(s.turn.turn > 0 for s in served),
        "continuation_hits": sum(s.turn.turn > 0 and s.cached > 0 for s in served),
        "output_tokens": sum(s.turn.output_len for s in served if s.finish is not None),
        "missed": missed_by_reason(served),
        "counters": {name: count * grain if "tokens" in name else count for name, count in counters.items()},
    }


def latencies(served: Sequence[Served]) -> dict[str, object]:
    """Seconds to the first token and to the end, and seconds per token after the first; percentiles."""
    done = [s for s in served if s.first_token is not None and s.finished is not None]
    figures: dict[str, object] = {}
    for name, times in (
        ("ttft", [s.first_token - s.sent for s in done if s.first_token is not None]),
        ("e2e", [s.finished - s.sent for s in done if s.finished is not None]),
        ("tpot", [_tpot(s) for s in done if s.turn.output_len > 1]),
    ):
        for percent in (50, 90, 99):
            figures[f"{name}_p{percent}"] = float(np.percentile(times, percent)) if times else None
    return figures


def _tpot(served: Served) -> float:
    assert served.finished is not None and served.first_token is not None
    return (served.finished - served.first_token) / (served.turn.output_len - 1)


def missed_by_reason(served: Sequence[Served]) -> dict[str, int]:
    """Tokens that were cached once and had to be computed again, by the reason."""
    lost: dict[str, int] = {}
    for one in served:
        if one.reuse and one.reuse.loss:
            lost[one.reuse.loss.value] = lost.get(one.reuse.loss.value, 0) + one.missed
    return lost
