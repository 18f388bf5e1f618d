"""From judged candidates to advice: what to run, why, and what to beware of. Plain data in, plain data out."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from milepost.sim.cost import Band
from milepost.sim.planner import DEFAULT_RATIO, Judged, Traffic, front, longest, pick

SGLANG = ("extra_buffer", "extra_buffer_lazy")
MILEPOST = ("exact",)


def advise(judged: Sequence[Judged], traffic: Traffic, context: int, notes: Sequence[str]) -> dict[str, Any]:
    """Everything that a plan says, as JSON values. `notes` come from the model and the sizes."""
    best, band = max(j.mean for j in judged), traffic.cost.band()
    picked = {"milepost": pick(judged, MILEPOST), "sglang": pick(judged, SGLANG)}
    before = baseline(judged)
    edge = {id(j) for j in front(judged)}
    return {
        "trace": traffic.trace.name,
        "seeds": len(judged[0].outcomes),
        "recommended": {
            "flags": {name: flag_line(j) for name, j in picked.items()},
            **{name: summary(j, best, band) for name, j in picked.items()},
        },
        "baseline": summary(before, best, band) if before else None,
        "why": why(picked["milepost"], before),
        "warnings": warnings(judged, picked, traffic, context, notes),
        "candidates": [
            {**summary(j, best, band), "pareto": id(j) in edge} for j in sorted(judged, key=lambda j: -j.worst)
        ],
    }


def flag_line(judged: Judged) -> str:
    return " ".join(f"{flag} {value}" for flag, value in judged.candidate.flags().items())


def baseline(judged: Sequence[Judged]) -> Judged | None:
    """SGLang's default: ratio 0.9, `extra_buffer`, level 2."""
    own = [j for j in judged if j.candidate.ratio == DEFAULT_RATIO and j.candidate.strategy == "extra_buffer"]
    return min(own, key=lambda j: j.candidate.at) if own else None


def summary(judged: Judged, best: float, band: Band) -> dict[str, Any]:
    """One candidate over its seeds. `best`: the highest mean throughput of all; `band`: of computed times."""
    candidate = judged.candidate
    return {
        "name": candidate.name,
        "flags": candidate.flags(),
        "state_slots": candidate.slots,
        "kv_tokens": candidate.rows,
        "ratio": candidate.ratio,
        "hit_rate_mean": float(np.mean(judged.hit_rates)),
        "hit_rate_worst": min(judged.hit_rates),
        "hit_rates": judged.hit_rates,
        "output_tps_mean": judged.mean,
        "output_tps_worst": judged.worst,
        "output_tps": judged.throughputs,
        "ttft_p90": judged.ttft,
        "ttft_p90_band": band.of(judged.ttft),
        "running_mean": float(np.mean([o.running for o in judged.outcomes])),
        "running_peak": max(o.peak_running for o in judged.outcomes),
        "collapsed_share": judged.collapsed(best),
        "checkpoints_published": _mean(judged, "checkpoints_published_total"),
        "binds": binds(judged),
    }


def binds(judged: Judged) -> str:
    """What stands between this candidate and more reuse: the main reason for misses, and what requests waited for."""
    missed: dict[str, int] = {}
    waited: dict[str, float] = {}
    for outcome in judged.outcomes:
        for reason, tokens in outcome.missed.items():
            missed[reason] = missed.get(reason, 0) + tokens
        for reason, seconds in outcome.waited.items():
            waited[reason] = waited.get(reason, 0.0) + seconds
    total = sum(missed.values())
    parts = []
    if total:
        reason = max(missed, key=lambda r: missed[r])
        parts.append(f"{missed[reason] / total:.0%} of missed tokens: {reason}")
    if waited:
        reason = max(waited, key=lambda r: waited[r])
        parts.append(f"requests waited {waited[reason] / len(judged.outcomes):,.0f} s for the {reason}")
    return "; ".join(parts) or "nothing"


def why(chosen: Judged, before: Judged | None) -> list[str]:
    """The choice in sentences, against SGLang's default split."""
    c = chosen.candidate
    lines = [
        f"{c.slots} state slots and {c.rows:,} KV tokens: hit rate {_range(chosen.hit_rates)}, "
        f"{_range(chosen.throughputs, 0)} output tokens/s over {len(chosen.outcomes)} seeds.",
        f"What it misses: {binds(chosen)}.",
    ]
    if before is not None:
        b = before.candidate
        lines.append(
            f"The default ratio {DEFAULT_RATIO} gives {b.slots} slots and {b.rows:,} KV tokens: hit rate "
            f"{_range(before.hit_rates)}, {_range(before.throughputs, 0)} output tokens/s. "
            f"What it misses: {binds(before)}."
        )
    return lines


def warnings(
    judged: Sequence[Judged], picked: dict[str, Judged], traffic: Traffic, context: int, notes: Sequence[str]
) -> list[str]:
    """What to beware of, a line each."""
    found = []
    best = max(j.mean for j in judged)
    for name, chosen in picked.items():
        near = [j for j in neighbours(chosen, judged) if j.collapsed(best) > 0]
        found += [
            f"cliff near ({name}): {j.candidate.name} collapses in {j.collapsed(best):.0%} of the seeds" for j in near
        ]
    shaky = [j for j in judged if 0 < j.collapsed(best) < 1]
    if shaky:
        names = "; ".join(f"{j.candidate.name} ({_range(j.hit_rates)})" for j in shaky)
        found.append(f"bistable between seeds: {names}")
    if context and longest(traffic.trace.turns) > context:
        found.append(f"the longest request has {longest(traffic.trace.turns):,} tokens; the model allows {context:,}")
    return [*found, *traffic.trace.notes, *notes]


def neighbours(chosen: Judged, judged: Sequence[Judged]) -> list[Judged]:
    """The candidates of the same kind with the next larger and the next smaller split."""
    line = sorted((j for j in judged if j.candidate.kind == chosen.candidate.kind), key=lambda j: j.candidate.slots)
    place = line.index(chosen)
    return [*line[max(0, place - 1) : place], *line[place + 1 : place + 2]]


def _range(values: Sequence[float], digits: int = 2) -> str:
    low, high = f"{min(values):,.{digits}f}", f"{max(values):,.{digits}f}"
    return low if low == high else f"{low} … {high}"


def _mean(judged: Judged, counter: str) -> float:
    return float(np.mean([outcome.counters[counter] for outcome in judged.outcomes]))
