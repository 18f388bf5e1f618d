"""Generated workloads: seeded, of the promised shape, and fit for both loops."""

from dataclasses import replace
from itertools import pairwise

import pytest

from milepost.errors import TraceError
from milepost.sim.reuse import shares
from milepost.sim.trace import material
from milepost.sim.workload import AGENTS, CHAT, FORKS, IDLE, KINDS, workload


@pytest.mark.parametrize("kind", KINDS)
def test_same_seed_same_trace_and_another_seed_another(kind):
    plan = workload(kind)
    assert plan.make(3) == plan.make(3) and plan.make(3).turns != plan.make(4).turns
    assert f"seed 3; sessions {plan.sessions}," in plan.make(3).notes[0]


@pytest.mark.parametrize("kind", KINDS)
def test_turns_are_whole(kind):
    """In order of arrival, counted from 0 in each session, as long as their segments, with times for both loops."""
    trace = replace(KINDS[kind], sessions=6).make(1)
    arrivals = [turn.arrival for turn in trace.turns]
    assert arrivals == sorted(arrivals) and all(turn.think is not None for turn in trace.turns)
    numbers = {}
    for turn in trace.turns:
        assert turn.turn == numbers.get(turn.session, 0)
        numbers[turn.session] = turn.turn + 1
        assert turn.prompt_len == sum(n for _, n in turn.identity.prompt) and turn.output_len == turn.identity.output[1]
    assert len(numbers) == 6
    feed = material(trace)
    assert all(feed.prompt(turn).size == turn.prompt_len for turn in trace.turns)


def test_a_conversation_repeats_prompt_and_answer():
    turns = [t for t in CHAT.make(0).turns if t.session == 5]
    assert len(turns) > 2
    for before, after in pairwise(turns):
        whole = (*before.identity.prompt, before.identity.output)
        assert after.identity.prompt[: len(whole)] == whole
        assert after.arrival == pytest.approx(before.arrival + CHAT.service + after.think, abs=0.01)


def test_agents_share_their_prefix_and_little_else():
    """48 × 20 prompts of about 56k tokens, of which 92 % repeat an earlier prompt: the shape of the synthetic set."""
    trace = AGENTS.make(0)
    assert len(trace.turns) == 960
    assert {turn.identity.prompt[0] for turn in trace.turns} == {("system", 8100)}
    found = shares(trace.turns)
    assert found.prompt / 960 == pytest.approx(55_000, rel=0.05)
    assert found.rates()["any_block"] == pytest.approx(0.918, abs=0.005)


def test_forks_need_more_than_ends():
    trace = FORKS.make(0)
    assert len(trace.turns) == 20 * (3 + 9 + 9)
    rates = shares(trace.turns).rates()
    assert rates["any_block"] - rates["ends"] > 0.08 and rates["ends_and_forks"] - rates["ends"] > 0.04


def test_idle_sessions_are_many_more_than_run():
    trace = IDLE.make(0)
    middle = max(turn.arrival for turn in trace.turns) / 3
    spans = {}
    for turn in trace.turns:
        first, _ = spans.get(turn.session, (turn.arrival, 0))
        spans[turn.session] = (first, turn.arrival)
    alive = sum(first <= middle <= last for first, last in spans.values())
    running = sum(turn.arrival <= middle < turn.arrival + IDLE.service for turn in trace.turns)
    assert alive > 50 * max(1, running) or (alive > 200 and running < 10)


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({"session": "3"}, "chat has sessions, turns"),
        ({"sessions": "0"}, "a whole number from 1"),
        ({"sessions": "2.5"}, "a whole number from 1"),
        ({"spread": "1.5"}, "0 … 1"),
        ({"think": "soon"}, "must be 0 … 1e\\+09"),
    ],
)
def test_wrong_parameters_are_refused(values, complaint):
    with pytest.raises(TraceError, match=complaint):
        workload("chat", values)


def test_parameters_by_name():
    assert workload("chat", {"sessions": "3", "think": "7.5"}) == replace(CHAT, sessions=3, think=7.5)
    with pytest.raises(TraceError, match="must be one of chat, agents, forks, idle"):
        workload("games")
