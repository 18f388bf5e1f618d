"""Closed-loop replay: lanes, pauses, subagents, recycling, warm-up, id spaces."""

from collections.abc import Sequence
from itertools import pairwise

import pytest

from milepost.core.checkpoint import EXACT, CheckpointPolicy
from milepost.core.scheduler import Limits, Scheduler
from milepost.errors import TraceError
from milepost.sim.cost import ConstantSpeed
from milepost.sim.lanes import LaneRules, Lanes, trees
from milepost.sim.replay import Replay, Served
from milepost.sim.trace import BlockMaterial, Blocks, Link, SegmentMaterial, Segments, Trace, Turn

BLOCK = 64
COST = ConstantSpeed(6400.0, 0.001)  # ten milliseconds a block of prefill, 64 a block of decode


def session(name: str, turns: int, think: float = 5.0, link: Link | None = None) -> list[Turn]:
    """Each turn repeats the one before, its answer of a block, and a block more."""
    made = []
    for turn in range(turns):
        blocks = 4 + 2 * turn
        identity = Blocks(((0, blocks),), BLOCK, name)
        made.append(Turn(name, turn, blocks * BLOCK, BLOCK + 1, identity, 10.0 * turn, think if turn else 0.0, link))
    return made


def play(turns: Sequence[Turn], rules: LaneRules, seconds: float = float("inf")) -> tuple[list[Served], Lanes]:
    material = BlockMaterial((), BLOCK)
    lanes = Lanes(Trace("made", tuple(turns)), rules, material)
    scheduler = Scheduler(4_000, 40, Limits(100, 64, 1 << 30), EXACT, CheckpointPolicy())
    return list(Replay(scheduler, material, COST, audited=True).run(lanes, seconds)), lanes


def test_a_turn_follows_the_end_of_the_one_before_by_its_pause():
    served, _ = play(session("a", 3), LaneRules(1, start=None, recycle=False))
    assert [s.turn.turn for s in served] == [0, 1, 2]
    for before, after in pairwise(served):
        assert after.sent == pytest.approx(before.finished + 5.0)
        assert after.cached == before.turn.prompt_len + BLOCK, "all that was consumed, answer included"


def test_pauses_are_capped():
    served, _ = play(session("a", 3, think=900.0), LaneRules(1, start=None, recycle=False, idle_cap=7.0))
    assert served[2].sent - served[1].finished == pytest.approx(7.0)


def test_time_in_which_nothing_runs_is_shortened():
    """The pauses of the session stay as recorded while another lane works; a silent system moves on."""
    material = BlockMaterial((), BLOCK)
    lanes = Lanes(
        Trace("made", tuple(session("a", 3, think=900.0))),
        LaneRules(1, start=None, recycle=False, idle_cap=1e9),
        material,
    )
    scheduler = Scheduler(4_000, 40, Limits(100, 64, 1 << 30), EXACT, CheckpointPolicy())
    served = list(Replay(scheduler, material, COST, audited=True).run(lanes, idle=10.0))
    for before, after in pairwise(served):
        assert after.sent == pytest.approx(before.finished + 10.0)


def test_lanes_run_side_by_side_and_take_the_next_session():
    turns = [turn for name in "abcd" for turn in session(name, 2)]
    served, _ = play(turns, LaneRules(2, start=None), seconds=12.0)
    first = [s for s in served if s.turn.turn == 0]
    assert [s.sent for s in first][:2] == [0.0, 0.0]
    assert len(first) >= 4 and len({s.turn.session for s in first}) == len(first)
    assert all(s.sent < 12.0 for s in served), "nothing new starts after the end"


def test_two_plays_of_a_session_share_nothing():
    served, _ = play(session("a", 2), LaneRules(1, start=None), seconds=30.0)
    starts = [s for s in served if s.turn.turn == 0]
    assert len(starts) > 2 and all(s.cached == 0 for s in starts)


def test_a_first_session_starts_in_the_middle_and_its_first_turn_is_warm_up():
    turns = [turn for name in "abcdef" for turn in session(name, 20)]
    served, lanes = play(turns, LaneRules(6, seed=1, start=(0.25, 0.75), recycle=False))
    warm = [s for s in served if lanes.is_warm_up(s.turn)]
    assert len(warm) == 6 and all(s.sent == 0.0 for s in warm)
    assert all(0.25 * 19 - 1 <= s.turn.turn <= 0.75 * 19 for s in warm)
    assert {s.turn.turn for s in warm} != {warm[0].turn.turn}, "each lane draws its own moment"
    counted = [s for s in served if not lanes.is_warm_up(s.turn)]
    assert all(s.cached > 0 for s in counted), "the warm-up has left the prefix"


def test_a_parent_waits_for_the_subagents_that_gate_it():
    turns = session("a", 3)
    turns += session("gate", 3, think=20.0, link=Link("a", after=0))
    turns += session("free", 3, think=300.0, link=Link("a", after=0, gates=False))
    served, _ = play(turns, LaneRules(1, start=None, recycle=False))
    ends = {(str(s.turn.session).split("|")[1], s.turn.turn): s for s in served}
    assert ends["gate", 0].sent == pytest.approx(ends["a", 0].finished)
    assert ends["a", 1].sent == pytest.approx(ends["gate", 2].finished), "its pause has long passed"
    assert ends["a", 2].sent == pytest.approx(ends["a", 1].finished + 5.0)
    assert ends["free", 2].finished > ends["a", 2].finished


def test_a_lane_takes_the_next_session_when_the_whole_tree_has_drained():
    turns = session("a", 1) + session("free", 2, think=50.0, link=Link("a", after=0, gates=False))
    served, _ = play(turns, LaneRules(1, start=None), seconds=60.0)
    plays = sorted({int(str(s.turn.session).split("|")[0]) for s in served})
    begun = [next(s.sent for s in served if str(s.turn.session) == f"{number}|a") for number in plays]
    assert plays == [1, 2] and begun[1] >= 50.0


def test_same_seed_same_run():
    turns = [turn for name in "abcdef" for turn in session(name, 9)]

    def once(seed: int) -> list[tuple[object, float | None]]:
        return [(s.turn.session, s.finished) for s in play(turns, LaneRules(3, seed=seed), seconds=60.0)[0]]

    assert once(4) == once(4) != once(5)


def test_a_parent_that_is_missing_is_named():
    with pytest.raises(TraceError, match="hangs from b"):
        trees(Trace("made", tuple(session("a", 1, link=Link("b", 0)))))


def test_pieces_that_sessions_share_stay_shared_in_every_play():
    """A system prompt is found by each play; what belongs to one session is not."""
    turns = []
    for name in "ab":
        prompt = (("system", 640), (f"{name} asks", 128))
        turns.append(Turn(name, 0, 768, 10, Segments(prompt, (f"{name} answers", 10)), 0.0))
    trace = Trace("made", tuple(turns))
    material = SegmentMaterial()
    scheduler = Scheduler(50_000, 60, Limits(10, 2048, 1 << 30), EXACT, CheckpointPolicy())
    lanes = Lanes(trace, LaneRules(1, start=None), material)
    served = list(Replay(scheduler, material, COST, audited=True).run(lanes, 3.0))
    assert len(served) > 6
    assert [s.cached for s in served[2:]] == [640] * (len(served) - 2), "the second visit has made the fork"
