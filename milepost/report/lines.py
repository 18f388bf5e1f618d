"""The lines of both plots: candidates that differ in their split alone belong together."""

from typing import Any

COLOURS = ("#1b6ca8", "#d1495b", "#2e8b57", "#edae49", "#7b5ea7", "#5c6b73", "#00a3a3")
MOST = len(COLOURS)
"""Lines that a plot can hold: each needs a colour of its own."""


def lines(plan: dict[str, Any]) -> list[tuple[str, list[dict[str, Any]]]]:
    """(kind of flags, its candidates by slots): the `MOST` kinds whose best candidate is fastest, in that order.

    Of kinds with equal figures the first stands for all: levels that keep the same states, for example.
    """
    kinds: dict[str, list[dict[str, Any]]] = {}
    for candidate in plan["candidates"]:
        kinds.setdefault(candidate["name"].rsplit(",", 1)[0], []).append(candidate)
    distinct: dict[tuple[object, ...], tuple[str, list[dict[str, Any]]]] = {}
    for kind, line in sorted(kinds.items()):
        line.sort(key=lambda c: int(c["state_slots"]))
        figures = tuple((c["state_slots"], c["output_tps_mean"], c["hit_rate_mean"]) for c in line)
        distinct.setdefault(figures, (kind, line))
    ranked = sorted(distinct.values(), key=lambda named: -max(c["output_tps_mean"] for c in named[1]))
    return ranked[:MOST]
