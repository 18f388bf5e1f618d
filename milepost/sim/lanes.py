"""Closed loop: N lanes, each with one live session tree; a turn is sent after the answer to the one before.

The rules are those of agentic replays (docs/planning.md):

* A lane plays a session from the trace; when the whole tree has drained it takes the next one (`recycle`), or stops.
* The first session of each lane starts in the middle: at a moment drawn from a window of its recorded duration. The
  turn before that moment is warm-up: it is sent with its whole prompt and counts in no figure.
* A turn follows the end of the one before by the recorded pause, shortened to `idle_cap` seconds.
* A subagent starts when the turn that it hangs from has ended; the parent's next turn waits for those that gate it
  (its recorded pause contains that wait, so the pause counts from the end of the parent's turn).
* The first play of a session has the trace's ids. Each further play has ids of its own, so that two plays of a session
  never share a prefix, but for pieces that several sessions share, such as a system prompt.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from milepost.errors import TraceError
from milepost.sim.replay import Served
from milepost.sim.trace import Blocks, Material, Segments, SessionId, Trace, Turn


@dataclass(frozen=True, slots=True)
class LaneRules:
    """`start`: the window of the recorded duration in which first sessions begin; None: at their first turn.

    `idle`: the longest time in seconds in which nothing at all runs; what is to come then moves up.
    """

    lanes: int
    seed: int = 0
    idle_cap: float = 300.0
    start: tuple[float, float] | None = (0.25, 0.75)
    recycle: bool = True
    idle: float = float("inf")


@dataclass(frozen=True, slots=True)
class Tree:
    """A root session and all that hang from it, as recorded. `hanging`: child sessions by (parent, turn)."""

    root: SessionId
    sessions: dict[SessionId, tuple[Turn, ...]]
    hanging: dict[tuple[SessionId, int], tuple[SessionId, ...]]


def trees(trace: Trace) -> list[Tree]:
    """The session trees of a trace, in the order in which their roots appear."""
    sessions: dict[SessionId, list[Turn]] = {}
    for turn in trace.turns:
        sessions.setdefault(turn.session, []).append(turn)
    roots: dict[SessionId, SessionId] = {}

    def root_of(session: SessionId) -> SessionId:
        link = sessions[session][0].link
        if session not in roots:
            if link is not None and link.parent not in sessions:
                raise TraceError(f"{trace.name}: session {session} hangs from {link.parent}, which is not in the trace")
            roots[session] = session if link is None else root_of(link.parent)
        return roots[session]

    members: dict[SessionId, list[SessionId]] = {}
    for session in sessions:
        members.setdefault(root_of(session), []).append(session)
    return [_tree(root, {s: tuple(sessions[s]) for s in names}) for root, names in members.items()]


def _tree(root: SessionId, sessions: dict[SessionId, tuple[Turn, ...]]) -> Tree:
    hanging: dict[tuple[SessionId, int], list[SessionId]] = {}
    for session, turns in sessions.items():
        link = turns[0].link
        if link is not None:
            hanging.setdefault((link.parent, link.after), []).append(session)
    return Tree(root, sessions, {place: tuple(names) for place, names in hanging.items()})


class _Play:
    """One play of a tree on a lane: which session stands where, and for how many children it waits."""

    def __init__(self, tree: Tree, number: int, lane: int, shared: frozenset[str] | None) -> None:
        self.tree = tree
        self.lane = lane
        self.number = number
        self.shared = shared  # names that several sessions use; None in a first play, which keeps all names
        self.alive = 1
        self.gated: dict[SessionId, int] = {}
        self.held: dict[
            SessionId, tuple[float, Turn]
        ] = {}  # next turn of a parent behind its gates, and when it is due

    def turn(self, recorded: Turn) -> Turn:
        """A recorded turn with the names and ids of this play."""
        identity, shared = recorded.identity, self.shared
        if shared is not None and isinstance(identity, Blocks):
            identity = replace(identity, space=f"{self.number}|{identity.space}")
        elif shared is not None and isinstance(identity, Segments):
            prompt = tuple(
                (name if name in shared else f"{self.number}|{name}", size) for name, size in identity.prompt
            )
            identity = Segments(prompt, (f"{self.number}|{identity.output[0]}", identity.output[1]))
        return replace(recorded, session=f"{self.number}|{recorded.session}", identity=identity)


class Lanes:
    """A `Feed`. Turns carry the play's number in their session; `is_warm_up` tells what counts in no figure."""

    def __init__(self, trace: Trace, rules: LaneRules, material: Material) -> None:
        self.rules = rules
        self._trees = trees(trace)
        self._material = material
        self._chance = np.random.default_rng(rules.seed)
        self._order = self._shuffled()
        self._plays: dict[str, tuple[_Play, SessionId]] = {}
        self._warm_up: set[tuple[SessionId, int]] = set()
        self._number = 0
        self._played: set[SessionId] = set()
        self._shared = _shared_names(trace)

    def is_warm_up(self, turn: Turn) -> bool:
        return (turn.session, turn.turn) in self._warm_up

    def first(self) -> Sequence[tuple[float, Turn]]:
        events: list[tuple[float, Turn]] = []
        for lane in range(self.rules.lanes):
            events += self._begin(lane, 0.0, fresh=True)
        return events

    def after(self, served: Served, now: float) -> Sequence[tuple[float, Turn]]:
        name = str(served.turn.session)
        play, session = self._plays[name]
        events: list[tuple[float, Turn]] = []
        for child in play.tree.hanging.get((session, served.turn.turn), ()):
            first = play.tree.sessions[child][0]
            play.alive += 1
            if first.link is not None and first.link.gates:
                play.gated[session] = play.gated.get(session, 0) + 1
            events.append(self._send(play, child, 0, now + self._pause(first)))
        turns = play.tree.sessions[session]
        if served.turn.turn + 1 < len(turns) and served.refused is None:
            following = turns[served.turn.turn + 1]
            due = now + self._pause(following)
            if play.gated.get(session):
                play.held[session] = (due, following)
            else:
                events.append(self._send(play, session, following.turn, due))
            return events
        return [*events, *self._end(play, session, now)]

    def _end(self, play: _Play, session: SessionId, now: float) -> list[tuple[float, Turn]]:
        """A session is through: its parent may go on; with the last of the tree the lane takes another."""
        play.alive -= 1
        link = play.tree.sessions[session][0].link
        if link is not None and link.gates and play.gated.get(link.parent):
            play.gated[link.parent] -= 1
            if not play.gated[link.parent] and link.parent in play.held:
                due, following = play.held.pop(link.parent)
                return [self._send(play, link.parent, following.turn, max(now, due))]
        if play.alive or not self.rules.recycle:
            return []
        return self._begin(play.lane, now, fresh=False)

    def _begin(self, lane: int, now: float, fresh: bool) -> list[tuple[float, Turn]]:
        tree = next(self._order)
        self._number += 1
        again = tree.root in self._played
        self._played.add(tree.root)
        play = _Play(tree, self._number, lane, self._shared if again else None)
        for session, turns in tree.sessions.items():
            self._plays[f"{play.number}|{session}"] = play, session
            self._material.add([play.turn(turn) for turn in turns])
        at = self._start(tree) if fresh and self.rules.start else 0
        sent = self._send(play, tree.root, at, now)
        if at:
            self._warm_up.add((sent[1].session, sent[1].turn))
        return [sent]

    def _start(self, tree: Tree) -> int:
        """The last turn of the root before a moment drawn from the window; at least one more follows."""
        assert self.rules.start is not None
        turns = tree.sessions[tree.root]
        starts = np.array([turn.arrival or 0.0 for turn in turns])
        low, high = self.rules.start
        moment = starts[-1] * float(self._chance.uniform(low, high))
        place = int(np.searchsorted(starts, moment, side="right")) - 1
        return max(0, min(place, len(turns) - 2))

    def _send(self, play: _Play, session: SessionId, place: int, when: float) -> tuple[float, Turn]:
        return when, play.turn(play.tree.sessions[session][place])

    def _pause(self, turn: Turn) -> float:
        return min(turn.think or 0.0, self.rules.idle_cap)

    def _shuffled(self) -> Iterator[Tree]:
        """All trees in a random order, again and again."""
        while True:
            for place in self._chance.permutation(len(self._trees)):
                yield self._trees[int(place)]


def _shared_names(trace: Trace) -> frozenset[str]:
    """Names of prompt pieces that more than one session uses."""
    users: dict[str, SessionId] = {}
    shared: set[str] = set()
    for turn in trace.turns:
        if isinstance(turn.identity, Segments):
            for name, _ in turn.identity.prompt:
                if users.setdefault(name, turn.session) != turn.session:
                    shared.add(name)
    return frozenset(shared)
