"""The planner: candidates fit the memory, judgement is by the worst seed, advice says what a user needs."""

import json
from dataclasses import replace

import numpy as np
import pytest

from milepost.core import models
from milepost.core.checkpoint import Reason
from milepost.core.geometry import Formats, Layout, measure
from milepost.core.sizing import GIB, Costs, Wish, size
from milepost.core.window import Windows
from milepost.sim.advice import advise
from milepost.sim.cost import ConstantSpeed
from milepost.sim.lanes import LaneRules
from milepost.sim.planner import (
    STRATEGIES,
    Candidate,
    Judged,
    Outcome,
    Search,
    Traffic,
    candidates,
    front,
    pick,
    replay,
    shortlist,
)
from milepost.sim.trace import Blocks, Trace, Turn

BUDGET = int(62.4472 * 2**30)


def costs() -> Costs:
    shape = measure(models.find("glm-5.3-flash"), Layout(tp=2), Formats("float32", "bfloat16", "fp8_e4m3"))
    return Costs(shape, 5, 64)


def agents(sessions: int, turns: int, first: int = 400, more: int = 60) -> Trace:
    """Sessions of growing prompts, in blocks of 64."""
    made = []
    for name in range(sessions):
        for turn in range(turns):
            blocks = first + more * turn
            identity = Blocks(((0, blocks),), 64, name)
            made.append(Turn(name, turn, blocks * 64, 200, identity, 60.0 * turn, 30.0 if turn else 0.0))
    return Trace("agents", tuple(made))


def outcome(candidate: Candidate, tps: float, hit: float = 0.5, ttft: float = 1.0) -> Outcome:
    return Outcome(candidate, 0, 1, hit, tps, 1.0, 1, {}, {}, {}, {"ttft_p90": ttft})


def made(name: str, slots: int, tps: list[float], hits: list[float] | None = None, ttft: float = 1.0) -> Judged:
    candidate = Candidate(name, "2", 1, slots, 1000, 0.3, 8)
    hits = hits or [0.5] * len(tps)
    return Judged(candidate, tuple(outcome(candidate, t, h, ttft) for t, h in zip(tps, hits, strict=True)))


def test_candidates_fit_the_memory_and_leave_room_for_a_request():
    found = candidates(BUDGET, costs(), Wish(context=1_048_576))
    assert len(found) > 30
    for c in found:
        used = costs().states(c.slots) + c.rows * costs().row
        assert BUDGET - costs().slot - 64 * costs().row < used <= BUDGET
        assert c.limit >= 1
    documented = [c for c in found if c.strategy == "extra_buffer" and c.ratio == 0.9]
    assert {(c.slots, c.rows // 1000) for c in documented} == {(429, 5890)}


def test_the_worst_seed_decides():
    steady = made("exact", 10, [90.0, 91.0])
    shaky = made("exact", 20, [150.0, 20.0])
    assert pick([shaky, steady], ["exact"]) is steady


def test_within_two_percent_the_better_hit_rate_decides():
    one = made("exact", 10, [100.0], [0.7])
    other = made("exact", 20, [99.0], [0.9])
    assert pick([one, other], ["exact"]) is other


def test_front_holds_what_nobody_beats():
    fast, slow, beaten = (
        made("exact", 1, [50.0], ttft=1.0),
        made("exact", 2, [90.0], ttft=5.0),
        made("exact", 3, [40.0], ttft=2.0),
    )
    assert front([fast, slow, beaten]) == [fast, slow]


def test_shortlist_takes_the_best_of_both_families_and_the_default():
    outcomes = [outcome(Candidate("exact", "2", 1, s, 1, 0.1, 1), s) for s in range(1, 9)]
    outcomes += [
        outcome(Candidate("extra_buffer", "2", 1, s, 1, 0.9 if s == 1 else 0.1, 1), s / 10) for s in range(1, 9)
    ]
    chosen = shortlist(outcomes, 4)
    assert {(c.strategy, c.slots) for c in chosen} == {
        ("exact", 6),
        ("exact", 7),
        ("exact", 8),
        ("extra_buffer", 6),
        ("extra_buffer", 7),
        ("extra_buffer", 8),
        ("extra_buffer", 1),
    }


def traffic() -> Traffic:
    return Traffic(agents(30, 8), ConstantSpeed(15_000, 0.02), LaneRules(12, recycle=True), seconds=600.0)


def test_replay_is_repeatable_and_seeds_differ():
    candidate = Candidate("exact", "2", 1, 40, 900_000, 0.3, 40)
    one, two, other = (replay(candidate, traffic(), seed) for seed in (1, 1, 2))
    assert one == two != other
    assert 0.5 < one.hit_rate < 1 and one.output_tps > 0


def test_too_few_rows_cost_reuse_and_the_reason_is_named():
    roomy = Candidate("exact", "2", 1, 40, 900_000, 0.3, 40)
    tight = replace(roomy, rows=200_000)
    good, bad = replay(roomy, traffic(), 0), replay(tight, traffic(), 0)
    assert bad.hit_rate < good.hit_rate / 2
    assert max(bad.missed, key=bad.missed.get) == "evicted under KV pressure"
    assert bad.lost and bad.lost[0][2] == "evicted under KV pressure"


def test_too_few_slots_cost_reuse_and_the_reason_is_named():
    tight = Candidate("exact", "2", 1, 6, 900_000, 0.3, 6)
    bad = replay(tight, traffic(), 0)
    assert bad.missed["evicted under state pressure"] > bad.missed.get("evicted under KV pressure", 0)
    assert replay(replace(tight, slots=1, limit=1), traffic(), 0).waited["state pool"] > 0


def test_candidates_of_a_model_with_windows():
    """Window ratios are tried too, what is pasted gives the pools that were replayed, level 2 keeps chunk ends."""
    lara = Costs(measure(models.find("lara-4-mini"), Layout(), Formats()), 1)
    found = candidates(8 * GIB, lara, Wish(context=131_072))
    flag = "--swa-full-tokens-ratio"
    assert {c.flags()[flag] for c in found} == {"0.1", "0.3", "0.8"}
    assert len({c.name for c in found}) == len(found)
    for c in found:
        strategy = STRATEGIES[c.strategy]
        own = replace(lara, reserved=strategy.reserved, page=strategy.page, windows=strategy.windows)
        wish = Wish(slots=c.slots, running=c.limit, window_ratio=float(c.flags()[flag]))
        pools = size(8 * GIB, own, wish)
        assert (pools.slots, pools.rows, pools.windows) == c.pools and c.windows.reach == 512
        assert Reason.CHUNK in c.reasons or "," in c.at


def test_too_few_windows_cost_reuse_and_the_reason_is_named():
    roomy = Candidate("exact", "2", 1, 200, 900_000, 0.3, 40, windows=Windows(400_000, 512))
    tight = replace(roomy, windows=Windows(12_000, 512))
    good, bad = replay(roomy, traffic(), 0), replay(tight, traffic(), 0)
    assert good.missed.get("evicted under window pressure", 0) == 0
    assert bad.missed["evicted under window pressure"] > bad.missed.get("evicted under state pressure", 0)
    assert bad.waited["window pool"] > 0


def test_advice_from_a_search():
    tried = [Candidate("exact", "2", 1, 40, rows, 0.3, 40) for rows in (200_000, 500_000, 900_000)]
    tried += [
        Candidate("extra_buffer", "2", 1, 60, rows, ratio, 12) for rows, ratio in ((400_000, 0.9), (800_000, 0.3))
    ]
    *_, (done, planned, judged) = Search(traffic(), 2, 2).run(tried, keep=4)
    assert done == planned == len(tried) + len(judged)
    advice = json.loads(json.dumps(advise(judged, traffic(), 20_000, ["a note"])))
    best = advice["recommended"]["milepost"]
    assert best["kv_tokens"] == 900_000
    assert "--max-mamba-cache-size 40" in advice["recommended"]["flags"]["milepost"]
    assert "--mamba-radix-cache-strategy extra_buffer" in advice["recommended"]["flags"]["sglang"]
    assert advice["baseline"]["ratio"] == 0.9
    assert any("the model allows 20,000" in line for line in advice["warnings"]) and "a note" in advice["warnings"]
    for candidate in advice["candidates"]:
        assert candidate["hit_rate_mean"] == pytest.approx(np.mean(candidate["hit_rates"]))
        assert candidate["hit_rate_worst"] == min(candidate["hit_rates"]) and len(candidate["hit_rates"]) == 2
