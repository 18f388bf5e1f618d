"""Speed of replays: a closed loop of 48 sessions, and a whole trace in open loop at a quarter, half and all of it.

    python bench/replay.py ../shared/traces/weka-claude-code/sessions.jsonl.gz [--json]

CPU seconds of one process. The open loop runs sessions side by side from time 0 with their recorded gaps; pools are
those of 192 slots and 8.8 M rows. Time per request should not grow with the number of requests.
"""

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path

from milepost.sim.cost import ConstantSpeed
from milepost.sim.formats.detect import read
from milepost.sim.lanes import LaneRules
from milepost.sim.planner import Candidate, Traffic, replay
from milepost.sim.trace import Trace

CANDIDATE = Candidate("exact", "2", 1, 192, 8_808_448, 0.27, 192)
COST = ConstantSpeed(60_000, 0.02)


def timed(traffic: Traffic) -> dict[str, float]:
    began = time.process_time()
    outcome = replay(CANDIDATE, traffic, 0)
    seconds = time.process_time() - began
    return {
        "requests": outcome.requests,
        "cpu_s": round(seconds, 2),
        "us_per_request": round(seconds / outcome.requests * 1e6, 1),
        "hit_rate": round(outcome.hit_rate, 4),
    }


def part(trace: Trace, share: float) -> Trace:
    """The first sessions of a trace."""
    names = list(dict.fromkeys(turn.session for turn in trace.turns))
    kept = set(names[: int(len(names) * share)])
    return replace(trace, turns=tuple(turn for turn in trace.turns if turn.session in kept))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("trace", type=Path)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    began = time.process_time()
    trace = read(args.trace)
    rows = {"read": {"requests": len(trace.turns), "cpu_s": round(time.process_time() - began, 2)}}
    rows["48 lanes, 1 h"] = timed(Traffic(trace, COST, LaneRules(48)))
    for share in (0.25, 0.5, 1.0):
        rows[f"open loop, {share:.0%} of the sessions"] = timed(Traffic(part(trace, share), COST))
    if args.json:
        print(json.dumps(rows))
        return
    for name, row in rows.items():
        print(f"{name:36}", "  ".join(f"{key} {value:,}" for key, value in row.items()))


if __name__ == "__main__":
    main()
