"""Workloads for when there is no trace: seeded generators of the shapes that decide about pools and checkpoints.

Each is a frozen set of parameters whose `make(seed)` gives a `Trace` of segments in order of arrival. Turns carry both
an arrival, which takes `service` seconds for each answer, and the think time before them: for open and closed loops.
Lengths in tokens, times in seconds; a spread of s draws from (1 − s) … (1 + s) times the mean, evenly.
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from milepost.errors import TraceError
from milepost.sim.trace import Segments, Trace, Turn

Pieces = tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class Sessions:
    """Conversations that begin in the first `window` seconds; prompts repeat all before and add a message.

    `system` tokens are common to all. Pauses are exponential with mean `think`.
    """

    kind: str = "chat"
    sessions: int = 64
    turns: int = 8
    system: int = 600
    message: int = 180
    answer: int = 260
    think: float = 45.0
    service: float = 6.0
    window: float = 900.0
    spread: float = 0.7
    turns_spread: float = 0.7

    def make(self, seed: int = 0) -> Trace:
        chance = np.random.default_rng(seed)
        return _trace(self, seed, [turn for one in range(self.sessions) for turn in self._session(one, chance)])

    def _session(self, session: int, chance: np.random.Generator) -> Iterator[Turn]:
        at, think = float(chance.uniform(0, self.window)), 0.0
        history: Pieces = (("system", self.system),)
        for number in range(_draw(chance, self.turns, self.turns_spread)):
            name = f"{session}/{number}"
            prompt = (*history, (f"{name}/message", _draw(chance, self.message, self.spread)))
            output = (f"{name}/answer", _draw(chance, self.answer, self.spread))
            yield _turn(session, number, prompt, output, at, think)
            history, think = (*prompt, output), float(chance.exponential(self.think))
            at += self.service + think


@dataclass(frozen=True, slots=True)
class Forks:
    """Late forks, as of few-shot prompts and trees of thought: branches on `levels` levels below a long root.

    A root is a session; a level comes when the one above is answered, its requests `gap` seconds apart. Whose
    thoughts go on is drawn: `branches` of each level's requests are extended, by `branches` each.
    """

    kind: str = "forks"
    sessions: int = 20
    root: int = 6000
    levels: int = 3
    branches: int = 3
    message: int = 300
    answer: int = 300
    gap: float = 2.0
    service: float = 8.0
    window: float = 900.0
    spread: float = 0.3

    def make(self, seed: int = 0) -> Trace:
        chance = np.random.default_rng(seed)
        turns = [turn for number in range(self.sessions) for turn in self._tree(number, chance)]
        return _trace(self, seed, turns)

    def _tree(self, number: int, chance: np.random.Generator) -> Iterator[Turn]:
        at = float(chance.uniform(0, self.window))
        level: list[Pieces] = [((f"{number}/root", self.root),)]
        turn = 0
        for depth in range(self.levels):
            grown: list[Pieces] = []
            think = self.service if depth else 0.0
            for parent in level:
                for _ in range(self.branches):
                    name = f"{number}/{turn}"
                    prompt = (*parent, (f"{name}/thought", _draw(chance, self.message, self.spread)))
                    output = (f"{name}/answer", _draw(chance, self.answer, self.spread))
                    yield _turn(number, turn, prompt, output, at, think)
                    grown.append((*prompt, output))
                    turn, at, think = turn + 1, at + self.gap, 0.0
            kept = chance.permutation(len(grown))[: self.branches]
            level = [grown[i] for i in sorted(kept.tolist())]
            at += self.service


Workload = Sessions | Forks

CHAT = Sessions()
"""People who talk: a short system prompt for all, some turns, time to read and type."""

AGENTS = Sessions("agents", 48, 20, 8100, 4000, 500, think=90.0, service=10.0, spread=0.5, turns_spread=0.0)
"""Agents in a tool loop: a long prefix of tools and system prompt for all, many turns, much new text in each."""

FORKS = Forks()

IDLE = Sessions("idle", 400, 5, 1200, 2500, 350, 900.0, 10.0, 1800.0, 0.6, 0.0)
"""Many more conversations than run at once: each comes back after a long pause, to a cache that others have used."""

KINDS: dict[str, Workload] = {one.kind: one for one in (CHAT, AGENTS, FORKS, IDLE)}


def workload(kind: str, values: Mapping[str, str] | None = None) -> Workload:
    """The generator of that name with some parameters given as text. Raises `TraceError`."""
    plan = KINDS.get(kind)
    if plan is None:
        raise TraceError(f"{kind}: not a workload; must be one of {', '.join(KINDS)}; for example agents")
    known = {name: value for name, value in asdict(plan).items() if name != "kind"}
    given: dict[str, Any] = {}
    for name, text in (values or {}).items():
        if name not in known:
            raise TraceError(f"--set {name}={text}: {kind} has {', '.join(known)}; for example --set sessions=32")
        given[name] = _number(name, text, known[name])
    return replace(plan, **given)


def _number(name: str, text: str, default: int | float) -> int | float:
    """A parameter: a whole number from 1 where its default is one, else a number from 0; spreads up to 1."""
    most = 1.0 if "spread" in name else 1e9
    try:
        value = int(text) if isinstance(default, int) else float(text)
    except ValueError:
        value = -1
    if not isinstance(default, int) <= value <= most:
        allowed = f"must be {'a whole number from 1' if isinstance(default, int) else f'0 … {most:g}'}"
        raise TraceError(f"--set {name}={text}: {allowed}; for example --set {name}={default:g}")
    return value


def _turn(session: int, number: int, prompt: Pieces, output: tuple[str, int], at: float, think: float) -> Turn:
    identity = Segments(prompt, output)
    return Turn(session, number, sum(n for _, n in prompt), output[1], identity, round(at, 3), round(think, 3))


def _draw(chance: np.random.Generator, mean: int, spread: float) -> int:
    return max(1, round(mean * chance.uniform(1 - spread, 1 + spread)))


def _trace(plan: Workload, seed: int, turns: list[Turn]) -> Trace:
    ordered = tuple(sorted(turns, key=lambda turn: turn.arrival or 0.0))
    parameters = ", ".join(f"{name} {value}" for name, value in asdict(plan).items() if name != "kind")
    note = f"generated: {plan.kind}, seed {seed}; {parameters}"
    return Trace(f"{plan.kind}-{seed}", ordered, (note,))
