"""Fidelity: SGLang 0.5.23's own cache, measured request by request, against the `extra_buffer` strategy."""

import json
import re

import pytest

from milepost.cli.replay import build
from milepost.config import CacheConfig
from milepost.sim.formats.detect import read
from milepost.sim.replay import Replay
from milepost.sim.trace import SegmentMaterial
from tests.shared import shared

RUNS = [
    "agent_kv1263104_slots696_cap1_chunk8192",
    "agent_kv1263104_slots696_capinf_chunk8192",
    "fork_kv315776_slots40_cap1_chunk8192",
    "fork_kv315776_slots40_capinf_chunk2048",
    "mini_kv262144_slots24_capinf_chunk2048",
]


def test_all_runs_are_listed():
    folder = shared("golden/sglang-0.5.23")
    assert {path.stem for path in folder.glob("*.jsonl")} == set(RUNS)


CASES = [(run, False) for run in RUNS] + [(run, True) for run in RUNS if not run.startswith("agent")]
"""The audit after each step of 960 long requests would take a minute; that of fork and mini does the same work."""


@pytest.mark.parametrize(("run", "audited"), CASES)
def test_each_request_reuses_what_sglang_reused(run, audited):
    golden = shared(f"golden/sglang-0.5.23/{run}.jsonl")
    trace, rows, slots, cap, chunk = re.fullmatch(r"(\w+)_kv(\d+)_slots(\d+)_cap(\w+)_chunk(\d+)", run).groups()
    flags = CacheConfig(
        mamba_radix_cache_strategy="extra_buffer",
        hybrid_cache_checkpoints_level=3,
        page_size=64,
        max_total_tokens=int(rows),
        max_mamba_cache_size=int(slots),
        chunked_prefill_size=int(chunk),
        mamba_max_states_per_path=None if cap == "inf" else int(cap),
    )
    turns = read(shared(f"traces/synthetic/{trace}.jsonl.gz")).turns
    replay = Replay(build(flags), SegmentMaterial(), audited=audited)
    ours = [(s.turn.session, s.turn.turn, s.turn.prompt_len, s.cached) for s in replay.sequential(turns)]
    records = [json.loads(line) for line in golden.read_text().splitlines()]
    theirs = [(r["session"], r["turn"], r["prompt"], r["cached"]) for r in records]
    assert ours == theirs
