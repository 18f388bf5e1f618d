"""Reuse statistics: by hand on small traces, and the published tables on the shared sets."""

import pytest

from milepost.errors import TraceError
from milepost.sim.formats.detect import read
from milepost.sim.reuse import figures, lru_hit_rate, percentile, shares
from milepost.sim.trace import Blocks, Segments, Trace, Turn
from tests.shared import shared


def turn(runs, length, space="", block=10, tail=None, session=0, number=0, output=1):
    return Turn(session, number, length, output, Blocks(tuple(runs), block, space, tail), 0.0)


def test_where_a_request_can_resume():
    turns = [
        turn([(0, 4)], 45),  # nothing known
        turn([(0, 3), (10, 2)], 50),  # 3 known, no end among them: a fork at 3 for later ones
        turn([(0, 3), (20, 1)], 42),  # resumes at the fork
        turn([(0, 4), (30, 1)], 51),  # the end of the first
        turn([(0, 1), (40, 1)], 20),  # 1 known, no end or fork
    ]
    found = shares(turns, every=(20,))
    assert (found.requests, found.prompt) == (5, 45 + 50 + 42 + 51 + 20)
    assert found.any == 0 + 30 + 30 + 40 + 10
    assert found.ends == 0 + 0 + 0 + 40 + 0
    assert found.forks == 0 + 0 + 30 + 40 + 0
    assert found.every == {20: 0 + 20 + 30 + 40 + 0}
    assert found.rates()["any_block"] == pytest.approx(110 / 208)


def test_a_fork_serves_later_requests_only():
    repeats = [turn([(0, 4)], 40), turn([(0, 2), (9, 1)], 30), turn([(0, 2), (8, 1)], 30), turn([(0, 2)], 20)]
    found = shares(repeats)
    assert found.forks == 0 + 0 + 20 + 20 and found.ends == 0


def test_spaces_are_apart_and_short_prompts_have_no_block():
    found = shares([turn([(0, 2)], 20, "a"), turn([(0, 2)], 20, "b"), turn([], 7, "a"), turn([(0, 2)], 29, "a")])
    assert found.any == found.ends == 20


def test_segments_count_by_their_lengths():
    def chat(*names):
        return Turn(0, 0, 10 * len(names), 1, Segments(tuple((name, 10) for name in names), ("o", 1)), 0.0)

    found = shares([chat("s", "a"), chat("s", "b"), chat("s", "c"), chat("x", "a"), chat("s", "a", "d")])
    assert (found.any, found.ends, found.forks) == (0 + 10 + 10 + 0 + 20, 20, 0 + 0 + 10 + 0 + 20)


def test_lengths_alone_have_no_share():
    lengths = Trace("l", (Turn(0, 0, 10, 5, None, 0.0),))
    with pytest.raises(TraceError, match="no reuse information"):
        shares(lengths.turns)
    assert figures(lengths)["reusable"] is None


def test_lru_evicts_leaves_and_keeps_the_running_request():
    turns = [turn([(0, 3)], 30), turn([(10, 2)], 20), turn([(0, 3)], 30)]
    assert lru_hit_rate(turns, None, skip=0.0) == 30 / 80
    # Four blocks: the second prompt takes two, so the first keeps its two blocks nearest the root.
    assert lru_hit_rate(turns, 4, skip=0.0) == 20 / 80
    assert lru_hit_rate(turns, 1, skip=0.0) == 0.0
    assert lru_hit_rate(turns, 4, skip=0.5) == 20 / 50  # floor(3 · 0.5): from the second on
    assert lru_hit_rate([turn([(0, 1)], 13, tail=7)] * 2, None, skip=0.5) == 1.0  # the tail counts, up to the prompt


def test_percentile_is_an_element():
    assert [percentile([4, 1, 3, 2], p) for p in (0, 25, 50, 99)] == [1, 2, 3, 4]


def test_figures():
    turns = [
        turn([(0, 2)], 20, session="a", output=5),
        turn([(9, 1)], 10, session="b"),
        turn([(0, 2)], 23, session="a", number=1),
    ]
    found = figures(Trace("t", tuple(turns), ("a note",)))
    assert (found["requests"], found["sessions"], found["prompt_tokens"], found["block"]) == (3, 2, 53, 10)
    assert found["new_tokens"]["p50"] == -2 and found["turns"]["max"] == 2 and found["think_s"] is None
    assert found["reusable"]["ends"] == 20 / 53 and found["notes"] == ["a note"]


# The published tables


@pytest.fixture(scope="module")
def weka():
    return read(shared("traces/weka-claude-code/sessions.jsonl.gz")).turns


def percents(turns):
    found = shares(turns)
    return found.prompt, *(round(100 * rate, 3) for rate in found.rates().values())


def test_weka(weka):
    assert percents(weka) == (6_037_445_403, 96.316, 95.671, 95.833, 96.236)


def test_weka_top_level(weka):
    top = [t for t in weka if t.link is None]
    assert percents(top) == (6_006_837_305, 96.363, 95.727, 95.883, 96.284)
    found = figures(Trace("top", tuple(top)))
    assert [found["turns"][p] for p in ("p10", "p50", "p90")] == [7, 45, 156]
    assert [found["prompt"][p] for p in ("p50", "p90", "p99")] == [104_644, 235_882, 500_022]
    assert [found["new_tokens"][p] for p in ("p10", "p50", "p90")] == [-8, 272, 2_809]
    assert found["longest_of_session"]["p50"] == 147_766 and found["took_s"]["p50"] == pytest.approx(6.1, abs=0.05)
    assert [found["think_s"][p] for p in ("p50", "p90")] == [10, pytest.approx(166, abs=1)]
    every = figures(Trace("all", tuple(weka)))
    assert round(every["prompt"]["mean"]) == 122_379
    assert (round(every["output"]["mean"]), every["output"]["p50"]) == (440, 216)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("conversation", (144_793_823, 37.338, 34.971, 35.860, 36.593)),
        ("synthetic", (61_194_628, 65.043, 50.880, 58.197, 64.168)),
    ],
)
def test_mooncake(name, expected):
    assert percents(read(shared(f"traces/mooncake-fast25/{name}_trace.jsonl.gz")).turns) == expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("miniswe", (2_418_721, 93.587, 93.587, 93.587, 93.587)),
        ("magagent", (1_475_506, 83.729, 76.724, 78.498, 79.588)),
        ("taubench", (78_233, 82.339, 82.257, 82.277, 82.277)),
    ],
)
def test_lmcache(name, expected):
    turns = read(shared("traces/lmcache-agent/agent_blocks.jsonl.gz")).turns
    assert percents([t for t in turns if t.identity.space == name]) == expected


def test_ragpulse():
    assert percents(read(shared("traces/ragpulse")).turns)[1] == 31.43


def test_kv_only_curve_on_mooncake_conversation():
    """Budgets of 16, 64, 256 and 1,024 GiB at 14,155,776 bytes a block, and an endless one."""
    turns = read(shared("traces/mooncake-fast25/conversation_trace.jsonl.gz")).turns
    budgets = [gib * 2**30 // 14_155_776 for gib in (16, 64, 256, 1024)]
    assert budgets == [1_213, 4_854, 19_418, 77_672]
    rates = [round(100 * lru_hit_rate(turns, blocks), 2) for blocks in [*budgets, None]]
    assert rates == [4.85, 10.96, 29.89, 38.72, 39.81]
