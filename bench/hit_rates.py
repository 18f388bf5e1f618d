"""Hit rates at equal memory: `exact` at level 2 against SGLang's strategy, both with a static split of the memory.

    python bench/hit_rates.py TRACE [TRACE …] [--json]

A budget B is in KV tokens; a state slot costs R of them. A split r gives floor(B·r/(1+r)/R) slots and B/(1+r) rows. One
request at a time, chunks of 8,192. "sglang" is `extra_buffer` at level 3 with one state per path and r = 0.9.
"""

import argparse
import json
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table

from milepost.cli.replay import build
from milepost.config import CacheConfig
from milepost.sim.formats.detect import read
from milepost.sim.replay import Replay
from milepost.sim.trace import SegmentMaterial

BUDGETS = {"agent": (1_200_000, 2_400_000, 4_800_000), "fork": (300_000, 600_000, 1_200_000)}
EXCHANGE = (12_000, 1_632)
SPLITS = (0.1, 0.25, 0.47, 0.7, 0.9)
EXACT = CacheConfig(chunked_prefill_size=8_192)
SGLANG = replace(
    EXACT,
    mamba_radix_cache_strategy="extra_buffer",
    hybrid_cache_checkpoints_level=3,
    page_size=64,
    mamba_max_states_per_path=1,
)

Job = tuple[Path, str, int, int, float]


def rate(job: Job) -> float | None:
    """The hit rate of one cell; None where a running request doesn't fit."""
    trace, strategy, budget, exchange, split = job
    flags = EXACT if strategy == "exact" else SGLANG
    slots = int(budget * split / (1 + split) / exchange)
    rows = int(budget / (1 + split)) // 64 * 64
    if slots < (1 if strategy == "exact" else 5):
        return None
    turns = read(trace).turns
    scheduler = build(replace(flags, max_mamba_cache_size=slots, max_total_tokens=rows))
    served = list(Replay(scheduler, SegmentMaterial()).sequential(turns))
    return sum(s.cached for s in served) / sum(s.turn.prompt_len for s in served)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("traces", type=Path, nargs="+")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    cells = [(t, r, b) for t in args.traces for r in EXCHANGE for b in BUDGETS[t.name.split(".")[0]]]
    jobs = [(t, "exact", b, r, s) for t, r, b in cells for s in SPLITS]
    jobs += [(t, "sglang", b, r, 0.9) for t, r, b in cells]
    with ProcessPoolExecutor() as pool:
        rates = dict(zip(jobs, track(pool.map(rate, jobs), total=len(jobs), disable=args.json), strict=True))
    if args.json:
        print(json.dumps([[str(j[0]), *j[1:], value] for j, value in rates.items()]))
        return
    table = Table("trace", "R", "B", "sglang 0.9", "exact 0.9", *(f"exact {s}" for s in SPLITS[:-1]), "best")
    for trace, exchange, budget in cells:
        ours = {s: rates[trace, "exact", budget, exchange, s] for s in SPLITS}
        theirs = rates[trace, "sglang", budget, exchange, 0.9]
        row = [theirs, ours[0.9], *(ours[s] for s in SPLITS[:-1]), max(v for v in ours.values() if v is not None)]
        shown = [f"{100 * v:.1f}" if v is not None else "-" for v in row]
        table.add_row(trace.name.split(".")[0], f"{exchange:,}", f"{budget:,}", *shown)
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
