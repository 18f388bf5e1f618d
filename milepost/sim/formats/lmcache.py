"""LMCache agent blocks: runs of 16-token blocks (64 characters) of three workloads, recorded one session after another.

Token counts are estimates, and times are those of the recording. A workload is an id space of its own.
"""

from collections import defaultdict
from collections.abc import Iterable

from milepost.sim.formats import blocks
from milepost.sim.formats.base import Format, Options, Parsed
from milepost.sim.formats.lines import Row
from milepost.sim.trace import Blocks, SessionId, Turn

BLOCK = 16
NOTES = (
    "token counts are estimates (characters / 4, some 0), times those of the recording, not a service's arrivals",
    "each workload is a recording of its own: times begin anew, and nothing is shared between them",
)


def parse(rows: Iterable[Row], _options: Options) -> Parsed:
    turns: list[Turn] = []
    count: dict[SessionId, int] = defaultdict(int)
    for row in rows:
        workload = row.id("workload")
        session = f"{workload}/{row.id('session')}"
        length = row.count("input_length")
        runs = blocks.run_list(row, "runs")
        full = blocks.check(row, blocks.size(runs), length, BLOCK, shorter=1)
        identity = Blocks(blocks.head(runs, full), BLOCK, workload)
        arrival = row.number("timestamp") / 1e3
        turns.append(Turn(session, count[session], length, row.count("output_length"), identity, arrival))
        count[session] += 1
    return Parsed(turns, list(NOTES))


FORMAT = Format("lmcache", lambda record: "workload" in record and "runs" in record, parse)
