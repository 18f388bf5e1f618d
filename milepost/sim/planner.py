"""Which split, strategy, level and cap to run: candidates replayed over the same traffic, over several seeds.

A *candidate* is a set of flags with the pools that they give in the memory at hand. Its *outcomes*, one a seed, come
from the same scheduler and cache as the engine's. The search is plain: all candidates with one seed, then the best of
them and their neighbours with all seeds. A candidate is judged by its worst seed first: memory splits are
bistable, and a mean hides that.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from typing import Any

import numpy as np

from milepost.core import checkpoint as cp
from milepost.core.checkpoint import CHOICES, CheckpointPolicy, Reason, SlotStrategy
from milepost.core.scheduler import Limits
from milepost.core.sizing import Costs, Wish, size
from milepost.core.window import Windows
from milepost.errors import ConfigError
from milepost.sim.cost import Cost, Drafted
from milepost.sim.lanes import LaneRules, Lanes
from milepost.sim.replay import Arrivals, Replay, Served, latencies, missed_by_reason
from milepost.sim.timeline import Timeline
from milepost.sim.trace import Trace, Turn, material
from milepost.sim.units import scheduler_in

STRATEGIES: dict[str, SlotStrategy] = {
    "exact": cp.EXACT,
    "extra_buffer": cp.extra_buffer(64),
    "extra_buffer_lazy": cp.extra_buffer_lazy(64),
}
ENDLESS = 1 << 40
_SHORT = {"--swa-full-tokens-ratio": "windows"}
"""What flags are called in names, where the last word of the flag does not say it."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """Flags, and the pools they give. `at`: a level, or reasons by name; `cap` None: no cap per path.

    Slots and rows are of one rank. `extra`: further flags that the pools follow from. `speedup`: tokens that a decode
    step yields on average, above 1 with drafts.
    """

    strategy: str
    at: str
    cap: int | None
    slots: int
    rows: int
    ratio: float
    limit: int
    extra: tuple[tuple[str, str], ...] = ()
    speedup: float = 1.0
    windows: Windows = Windows()

    @property
    def name(self) -> str:
        at = f"level {self.at}" if self.at in ("2", "3") else f"at {self.at}"
        cap = "no cap" if self.cap is None else f"cap {self.cap}"
        extra = "".join(f" {_SHORT.get(flag, flag.split('-')[-1])} {value}," for flag, value in self.extra)
        return f"{self.strategy}, {at}, {cap},{extra} {self.slots} slots"

    @property
    def pools(self) -> tuple[int, int, Windows]:
        """As `scheduler_in` takes them."""
        return self.slots, self.rows, self.windows

    @property
    def kind(self) -> tuple[object, ...]:
        return self.strategy, self.at, self.cap, *(value for _, value in self.extra)

    @property
    def reasons(self) -> frozenset[Reason]:
        if self.at in ("2", "3"):
            return CheckpointPolicy.level(int(self.at), windows=self.windows.reach > 0).reasons
        return frozenset(CHOICES[name] for name in self.at.split(","))

    def flags(self) -> dict[str, object]:
        """To paste, behind `milepost serve` or SGLang's launch command: the same names."""
        at = "--hybrid-cache-checkpoints-level" if self.at in ("2", "3") else "--checkpoint-at"
        page = STRATEGIES[self.strategy].page
        return {
            "--mamba-radix-cache-strategy": self.strategy,
            **({"--page-size": page} if page > 1 else {}),
            at: self.at,
            "--mamba-max-states-per-path": -1 if self.cap is None else self.cap,
            "--max-mamba-cache-size": self.slots,
            "--max-running-requests": self.limit,
            **dict(self.extra),
        }


@dataclass(frozen=True, slots=True)
class Traffic:
    """What is replayed: lanes of sessions for so many virtual seconds, or, without rules, the arrivals."""

    trace: Trace
    cost: Cost
    rules: LaneRules | None = None
    seconds: float = 3600.0
    chunk: int = 8192
    interval: int = 256


@dataclass(frozen=True, slots=True)
class Outcome:
    """One replay of a candidate. Rates in tokens a second of virtual time; `figures` are latencies."""

    candidate: Candidate
    seed: int
    requests: int
    hit_rate: float
    output_tps: float
    running: float
    peak_running: int
    waited: dict[str, float]
    missed: dict[str, int]
    counters: dict[str, int]
    figures: dict[str, Any]
    samples: list[tuple[float, ...]] = field(default_factory=list)
    lost: list[tuple[str, int, str]] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "candidate": self.candidate.name}


def replay(candidate: Candidate, traffic: Traffic, seed: int, sample: float = 0.0) -> Outcome:
    """One run. `sample`: seconds between samples of the pools over time; 0 keeps none."""
    stuff = material(traffic.trace)
    policy = CheckpointPolicy(candidate.reasons, traffic.interval, candidate.cap)
    strategy = cp.with_cap(STRATEGIES[candidate.strategy], None, policy)
    limits = Limits(candidate.limit, traffic.chunk, ENDLESS)
    scheduler = scheduler_in(stuff.grain, candidate.pools, limits, strategy, policy)
    timeline = Timeline(sample or float("inf"))
    cost = traffic.cost if candidate.speedup == 1.0 else Drafted(traffic.cost, candidate.speedup)
    run = Replay(scheduler, stuff, cost, timeline=timeline)
    if traffic.rules is None:
        served = list(run.run(Arrivals(traffic.trace.turns)))
    else:
        lanes = Lanes(traffic.trace, replace(traffic.rules, seed=seed), stuff)
        served = [one for one in run.run(lanes, traffic.seconds, traffic.rules.idle) if not lanes.is_warm_up(one.turn)]
    return _outcome(candidate, seed, served, run, timeline)


def _outcome(candidate: Candidate, seed: int, served: list[Served], run: Replay, timeline: Timeline) -> Outcome:
    prompt = sum(s.turn.prompt_len for s in served)
    output = sum(s.turn.output_len for s in served if s.finish is not None)
    return Outcome(
        candidate,
        seed,
        len(served),
        sum(s.cached for s in served) / prompt if prompt else 0.0,
        output / run.now if run.now else 0.0,
        timeline.mean_running,
        timeline.peak_running,
        timeline.waited,
        missed_by_reason(served),
        run.scheduler.counters.as_dict(),
        latencies(served),
        _in_tokens(timeline, run.material.grain),
        _losers(served),
    )


def _in_tokens(timeline: Timeline, grain: int) -> list[tuple[float, ...]]:
    """The samples, with rows in tokens; none where none were asked for."""
    if timeline.every == float("inf"):
        return []
    return [(*s[:4], *(rows * grain for rows in s[4:7]), *s[7:]) for s in timeline.samples]


def _losers(served: Sequence[Served], most: int = 12) -> list[tuple[str, int, str]]:
    """Sessions that lost most: (session, tokens, main reason)."""
    lost: dict[str, dict[str, int]] = {}
    for one in served:
        if one.missed and one.reuse is not None and one.reuse.loss is not None:
            reasons = lost.setdefault(str(one.turn.session), {})
            reasons[one.reuse.loss.value] = reasons.get(one.reuse.loss.value, 0) + one.missed
    ranked = sorted(lost.items(), key=lambda item: -sum(item[1].values()))[:most]
    return [(session, sum(reasons.values()), max(reasons, key=lambda r: reasons[r])) for session, reasons in ranked]


# Search


RATIOS = (0.05, 0.1, 0.2, 0.3, 0.45, 0.65, 0.9, 1.4)
"""Splits to try: state pool : KV pool."""

Kind = tuple[str, str, int | None]

KINDS: tuple[Kind, ...] = (
    ("exact", "2", 1),
    ("exact", "fork,finish,prompt-end", 1),
    ("exact", "3", None),
    ("extra_buffer", "2", 1),
    ("extra_buffer", "3", 1),
    ("extra_buffer_lazy", "2", 1),
    ("extra_buffer_lazy", "3", 1),
)
"""Strategy, level or reasons, and cap of the candidates."""


WINDOW_RATIOS = (0.1, 0.3, 0.8)
"""Window rows : KV rows to try where the model has sliding-window layers."""


def candidates(budget: int, costs: Costs, wish: Wish, kinds: Sequence[Kind] = KINDS) -> list[Candidate]:
    """Every kind at every split that leaves room for a request; what `costs` says of strategies is set for each."""
    found = []
    window_ratios = WINDOW_RATIOS if costs.footprint.window_row else (wish.window_ratio,)
    for (name, at, cap), ratio, windows in product(kinds, RATIOS, window_ratios):
        strategy = STRATEGIES[name]
        own = replace(costs, reserved=strategy.reserved, page=strategy.page, windows=strategy.windows)
        try:
            pools = size(budget, own, replace(wish, ratio=ratio, slots=None, window_ratio=windows))
        except ConfigError:
            continue
        extra = (("--swa-full-tokens-ratio", f"{windows:g}"),) if costs.footprint.window_row else ()
        found.append(
            Candidate(name, at, cap, pools.slots, pools.rows, ratio, pools.limit, extra, windows=pools.windows)
        )
    return found


@dataclass(frozen=True, slots=True)
class Judged:
    """A candidate with its outcomes over all seeds."""

    candidate: Candidate
    outcomes: tuple[Outcome, ...]

    @property
    def hit_rates(self) -> list[float]:
        return [o.hit_rate for o in self.outcomes]

    @property
    def throughputs(self) -> list[float]:
        return [o.output_tps for o in self.outcomes]

    @property
    def worst(self) -> float:
        return min(self.throughputs)

    @property
    def mean(self) -> float:
        return float(np.mean(self.throughputs))

    @property
    def ttft(self) -> float:
        """Seconds, 90th percentile, mean over seeds."""
        return float(np.mean([o.figures["ttft_p90"] or 0.0 for o in self.outcomes]))

    def collapsed(self, best: float) -> float:
        """Share of seeds whose throughput is below half of `best`."""
        return float(np.mean([t < best / 2 for t in self.throughputs]))


class Search:
    """Runs replays on all cores. `progress` is told of each that ends: (done, planned)."""

    def __init__(self, traffic: Traffic, seeds: int, workers: int) -> None:
        self.traffic = traffic
        self.seeds = seeds
        self.workers = workers

    def run(self, tried: Sequence[Candidate], keep: int = 8) -> Iterator[tuple[int, int, list[Judged]]]:
        """Yields (done, planned, judged so far); the last one holds all candidates that were given every seed."""
        planned = len(tried) + (self.seeds - 1) * min(len(tried), 2 * keep)
        with ProcessPoolExecutor(self.workers, initializer=_set, initargs=(self.traffic,)) as pool:
            first: dict[Candidate, Outcome] = {}
            for outcome in pool.map(_one, [(c, 0) for c in tried]):
                first[outcome.candidate] = outcome
                yield len(first), planned, []
            chosen = shortlist(list(first.values()), keep)
            planned = len(tried) + (self.seeds - 1) * len(chosen)
            jobs = [(c, seed) for c in chosen for seed in range(1, self.seeds)]
            more: dict[Candidate, list[Outcome]] = {c: [first[c]] for c in chosen}
            for done, outcome in enumerate(pool.map(_one, jobs), len(first) + 1):
                more[outcome.candidate].append(outcome)
                yield done, planned, []
            yield planned, planned, [Judged(c, tuple(outcomes)) for c, outcomes in more.items()]


def shortlist(outcomes: Sequence[Outcome], keep: int) -> list[Candidate]:
    """The best by throughput of Milepost's and of SGLang's strategies, for each set of extra flags; their neighbouring
    splits; and the default ratio.
    """
    ranked = sorted(outcomes, key=lambda o: -o.output_tps)
    by_kind: dict[tuple[object, ...], list[Candidate]] = {}
    for outcome in outcomes:
        by_kind.setdefault(outcome.candidate.kind, []).append(outcome.candidate)
    chosen: dict[Candidate, None] = {}
    groups: dict[tuple[bool, tuple[tuple[str, str], ...]], list[Candidate]] = {}
    for outcome in ranked:
        c = outcome.candidate
        groups.setdefault((c.strategy == "exact", c.extra), []).append(c)
    for group in groups.values():
        for c in group[: keep // 2]:
            line = sorted(by_kind[c.kind], key=lambda other: other.slots)
            place = line.index(c)
            chosen |= dict.fromkeys(line[max(0, place - 1) : place + 2])
    for outcome in outcomes:
        c = outcome.candidate
        if c.ratio == DEFAULT_RATIO and c.kind[:3] == ("extra_buffer", "2", 1):
            chosen[c] = None
    return list(chosen)


DEFAULT_RATIO = 0.9


def pick(judged: Sequence[Judged], strategies: Sequence[str]) -> Judged:
    """The best worst seed; within 2 % of it the best mean hit rate, so that a candidate near a cliff loses."""
    own = [j for j in judged if j.candidate.strategy in strategies]
    best = max(j.worst for j in own)
    near = [j for j in own if j.worst >= 0.98 * best]
    return max(near, key=lambda j: (round(float(np.mean(j.hit_rates)), 3), j.mean))


def front(judged: Sequence[Judged]) -> list[Judged]:
    """Those that nobody beats in both mean throughput and time to first token."""
    return [
        j
        for j in judged
        if not any(o.mean >= j.mean and o.ttft <= j.ttft and (o.mean, o.ttft) != (j.mean, j.ttft) for o in judged)
    ]


_traffic: Traffic | None = None


def _set(traffic: Traffic) -> None:
    """The traffic of this worker process, sent to it once."""
    global _traffic
    _traffic = traffic


def _one(job: tuple[Candidate, int]) -> Outcome:
    assert _traffic is not None
    return replay(job[0], _traffic, job[1])


def longest(turns: Sequence[Turn]) -> int:
    """Tokens of the longest request, answer included."""
    return max(turn.prompt_len + turn.output_len for turn in turns)
