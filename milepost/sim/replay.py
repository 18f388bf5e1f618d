"""A trace through the same scheduler and cache as the engine's, in virtual time.

`sequential`: one request at a time, each from start to finish before the next; arrivals are ignored. Otherwise
open loop: requests are submitted when they arrive, whatever the state of the server, and a cost function says how
long each step takes. Plans of decodes alone cover as many tokens as fit before the next arrival.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from milepost.core.audit import check
from milepost.core.plan import Chunk, Plan
from milepost.core.pool import Owner
from milepost.core.request import Finish, Request, Sampling
from milepost.core.scheduler import Event, Scheduler
from milepost.core.stats import Reuse
from milepost.core.tokens import Tokens, pack
from milepost.errors import RequestError
from milepost.sim.executor import Memory, SimExecutor
from milepost.sim.trace import Turn, Vocabulary

LONG = 1 << 30
"""More tokens than any answer has."""


@dataclass(frozen=True, slots=True)
class Cost:
    """A server of constant speed: a step takes its prefill tokens / `prefill_tps`, plus `decode_s` a decoded token."""

    prefill_tps: float = 20_000.0
    decode_s: float = 0.02

    def __call__(self, plan: Plan) -> float:
        prefill = sum(c.stop - c.start for c in plan.chunks if not c.decode)
        decode = max((c.stop - c.start for c in plan.chunks if c.decode), default=0)
        return prefill / self.prefill_tps + decode * self.decode_s

    def span(self, seconds: float) -> int:
        """Tokens that a plan of decodes alone may cover before `seconds` have passed."""
        return max(1, int(seconds / self.decode_s)) if seconds < LONG else LONG


@dataclass(slots=True)
class Served:
    """What became of one request of the trace. Times in virtual seconds; None: it never came to that."""

    turn: Turn
    reuse: Reuse | None = None
    refused: str | None = None
    finish: Finish | None = None
    first_token: float | None = None
    finished: float | None = None

    @property
    def cached(self) -> int:
        return self.reuse.resume if self.reuse else 0

    def record(self) -> dict[str, object]:
        """A line of the log."""
        why: object = self.reuse.record() if self.reuse else self.refused
        return {
            "session": self.turn.session,
            "turn": self.turn.turn,
            "prompt": self.turn.prompt_len,
            "cached": self.cached,
            "explanation": why,
        }


class Replay:
    """Feeds turns to a scheduler. `audited`: tagged memory, and the audit after each step."""

    def __init__(self, scheduler: Scheduler, cost: Cost | None = None, audited: bool = False) -> None:
        self.scheduler = scheduler
        self.cost = cost or Cost()
        self.audited = audited
        cache = scheduler.cache
        memory = Memory(cache.rows.size + cache.rows.page, cache.slots.size) if audited else None
        self._executor = SimExecutor(self._draw, self.cost, memory)
        self._vocabulary = Vocabulary()
        self._outputs: dict[Owner, Tokens] = {}
        self._served: dict[Owner, Served] = {}
        self.now = 0.0

    def sequential(self, turns: Sequence[Turn]) -> Iterator[Served]:
        """Each turn alone; yields what became of it."""
        for turn in turns:
            served = self._submit(turn)
            while self.scheduler.busy:
                self._step(LONG)
            yield served

    def arrivals(self, turns: Sequence[Turn]) -> Iterator[Served]:
        """Turns at their arrivals; yields each when its fate is known, in the order of the trace."""
        everything = [Served(turn) for turn in turns]
        order = sorted(range(len(turns)), key=lambda i: turns[i].arrival)
        shown = 0
        for place, i in enumerate(order):
            self._advance(turns[i].arrival)
            self._submit(turns[i], everything[i])
            last = place == len(order) - 1
            if last:
                self._advance(float("inf"))
            while shown < len(turns) and (everything[shown].finish or everything[shown].refused):
                yield everything[shown]
                shown += 1

    def _advance(self, until: float) -> None:
        """Step until `until` is reached or nothing is left to do."""
        while self.scheduler.busy and self.now < until:
            self._step(self.cost.span(until - self.now))
        if until != float("inf"):
            self.now = max(self.now, until)

    def _submit(self, turn: Turn, served: Served | None = None) -> Served:
        served = served or Served(turn)
        prompt = pack(self._vocabulary.prompt(turn))
        request = Request("", prompt, Sampling(max_new=turn.output_len), session=str(turn.session), arrived=self.now)
        try:
            number = self.scheduler.submit(request)
        except RequestError as error:
            served.refused = str(error)
        else:
            self._outputs[number] = self._vocabulary.output(turn)
            self._served[number] = served
        return served

    def _step(self, span: int) -> None:
        plan = self.scheduler.plan(span)
        assert not plan.idle, "nothing runs and somebody waits"
        result = self._executor.run(plan)
        self.now += result.elapsed
        for event in self.scheduler.commit(result):
            self._note(event)
        if self.audited:
            check(self.scheduler)

    def _note(self, event: Event) -> None:
        served = self._served[event.sequence]
        if served.first_token is None:
            served.first_token = self.now
        if event.finish is not None:
            served.finish, served.reuse, served.finished = event.finish, event.reuse, self.now
            del self._served[event.sequence], self._outputs[event.sequence]

    def _draw(self, chunk: Chunk, _digest: int) -> tuple[int, ...]:
        """The tokens that the trace says were generated."""
        at = chunk.tokens.size * 4 - len(chunk.request.prompt)
        return tuple(self._outputs[chunk.sequence][at // 4 : at // 4 + chunk.samples].tolist())


def summary(served: Sequence[Served], scheduler: Scheduler) -> dict[str, object]:
    """The figures of a replay, as JSON values."""
    taken = [s for s in served if s.reuse is not None]
    prompt = sum(s.turn.prompt_len for s in served)
    cached = sum(s.cached for s in served)
    return {
        "requests": len(served),
        "refused": len(served) - len(taken),
        "prompt_tokens": prompt,
        "cached_tokens": cached,
        "hit_rate": cached / prompt if prompt else 0.0,
        "missed": missed_by_reason(taken),
        "counters": scheduler.counters.as_dict(),
    }


def latencies(served: Sequence[Served]) -> dict[str, object]:
    """Time to first token and to the end in virtual seconds, of a replay with arrivals."""
    first = [s.first_token - s.turn.arrival for s in served if s.first_token is not None]
    whole = [s.finished - s.turn.arrival for s in served if s.finished is not None]
    return {
        f"{name}_p{percent}": float(np.percentile(times, percent))
        for name, times in (("ttft", first), ("e2e", whole))
        for percent in (50, 99)
        if times
    }


def missed_by_reason(served: Sequence[Served]) -> dict[str, int]:
    """Tokens that were cached once and had to be computed again, by the reason."""
    lost: dict[str, int] = {}
    for one in served:
        if one.reuse and one.reuse.loss:
            lost[one.reuse.loss.value] = lost.get(one.reuse.loss.value, 0) + one.reuse.seen - one.reuse.resume
    return lost
