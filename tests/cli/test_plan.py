"""`milepost plan` as its user calls it: flags in, flags, reasons, page and JSON out; refusals in one line."""

import json

import pytest
from click.testing import CliRunner

from milepost.cli import cli
from milepost.errors import ConfigError, MilepostError
from milepost.report.lines import MOST, lines
from milepost.sim.formats.detect import write
from milepost.sim.workload import workload

MODEL = ["--model", "qwen3.5-9b", "--rest-memory", "3GiB"]
SPEED = ["--prefill-tps", "15000", "--decode-ms", "20"]
QUICK = ["--seeds", "2", "--seconds", "300", "--workers", "1"]


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    path = tmp_path_factory.mktemp("plan") / "chats.jsonl"
    small = {"sessions": "12", "turns": "4", "system": "1000", "message": "500", "answer": "60", "think": "20"}
    write(workload("chat", small).make(0), path, "segments")
    return path


def call(*args: object):
    return CliRunner().invoke(cli, ["plan", *map(str, args)], catch_exceptions=False)


def test_plan_with_report_and_json(trace, tmp_path):
    page = tmp_path / "plan.html"
    run = call(trace, "--lanes", 6, *MODEL, *SPEED, *QUICK, "--report", page, "--json")
    plan = json.loads(run.stdout)
    flags = plan["recommended"]["flags"]
    assert "--max-mamba-cache-size" in flags["milepost"] and "strategy exact" in flags["milepost"]
    assert "strategy extra_buffer" in flags["sglang"] and "--page-size 64" in flags["sglang"]
    assert all(len(c["hit_rates"]) == 2 for c in plan["candidates"])
    assert all(c["hit_rate_worst"] <= c["hit_rate_mean"] for c in plan["candidates"])
    text = page.read_text()
    assert "Plotly.newPlot" in text and 'src="http' not in text, "the page loads nothing"
    assert page.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    saved = json.loads(page.with_suffix(".json").read_text())
    assert saved["outcomes"] and saved["timelines"][0][2], "samples of both pools over time"


def test_a_plot_holds_the_fastest_kinds():
    """Kinds with equal figures count once; where there are more than a plot holds the slowest are left out."""

    def candidate(kind, slots, tps):
        return {"name": f"{kind}, {slots} slots", "state_slots": slots, "output_tps_mean": tps, "hit_rate_mean": 0.5}

    kinds = [(f"kind {n}", 100.0 + n) for n in range(MOST + 3)] + [("twin of kind 3", 103.0)]
    made = [candidate(kind, slots, tps + slots) for kind, tps in kinds for slots in (20, 10)]
    found = lines({"candidates": made})
    assert [kind for kind, _ in found] == [f"kind {n}" for n in range(MOST + 2, 2, -1)]
    assert all([c["state_slots"] for c in line] == [10, 20] for _, line in found)


def test_plan_for_people_in_open_loop(trace):
    run = call(trace, *MODEL, *SPEED, *QUICK)
    assert "Flags for Milepost" in run.stdout and "Flags for SGLang" in run.stdout


def test_states_in_another_dtype_are_tried_too(trace):
    plan = json.loads(call(trace, *MODEL, *SPEED, *QUICK, "--also-state-dtype", "bfloat16", "--json").stdout)
    dtypes = {c["flags"].get("--mamba-ssm-dtype") for c in plan["candidates"]}
    assert dtypes == {None, "bfloat16"}


def test_drafts_are_tried_with_the_speed_that_the_user_knows(trace):
    args = [*MODEL, *SPEED, *QUICK, "--lanes", 6, "--max-running-requests", 6, "--json"]
    args += ["--also-draft-tokens", "4", "--draft-speedup", "2"]
    plan = json.loads(call(trace, *args).stdout)
    drafted = [c for c in plan["candidates"] if c["flags"].get("--speculative-num-draft-tokens") == "4"]
    plain = [c for c in plan["candidates"] if "--speculative-num-draft-tokens" not in c["flags"]]
    assert max(c["output_tps_mean"] for c in drafted) > max(c["output_tps_mean"] for c in plain)
    smallest = {c["kv_tokens"] for c in plain if c["ratio"] == drafted[0]["ratio"]}
    assert all(drafted[0]["kv_tokens"] < tokens for tokens in smallest), "draft states take KV"


def test_a_first_boot_is_compared(trace, tmp_path):
    log = tmp_path / "boot.log"
    log.write_text(
        "Mamba Cache is allocated. max_mamba_cache_size: 27, conv_state size: 0.03GB, ssm_state size: 1.31GB\n"
        "KV Cache is allocated. dtype: torch.bfloat16, #tokens: 40000, K size: 0.61 GB, V size: 0.61 GB\n"
    )
    plan = json.loads(call(trace, *MODEL, *SPEED, *QUICK, "--check", log, "--json").stdout)
    assert any(line.startswith("boot log: 27 slots and 40,000 KV tokens") for line in plan["warnings"])


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--workload", "agents"], "give one of TRACE and --workload"),
        (["--lanes", "0", *SPEED], "--lanes 0: must be at least 1"),
        (["--start-window", "0.8,0.2", "--lanes", "4", *SPEED], "--start-window 0.8,0.2: must be none"),
        (["--also-draft-tokens", "4", *SPEED], "--draft-speedup (not set): is needed"),
        (["--also-draft-tokens", "4", "--draft-speedup", "2", *SPEED], "--max-running-requests (not set): must be set"),
        (["--prefill-tps", "100"], "--decode-ms (not set): is needed"),
        ([], "--gpu (not set): is needed for speeds"),
        (["--seeds", "0", *SPEED], "--seeds 0: must be at least 1"),
        ([*SPEED, "--rest-memory", "1MiB"], "no room for one request"),
    ],
)
def test_refusals(trace, args, said):
    with pytest.raises(MilepostError) as error:
        call(trace, *MODEL, *args)
    assert said in str(error.value) and "\n" not in str(error.value)


def test_lengths_alone_are_refused(tmp_path):
    path = tmp_path / "lengths.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,4808,10\n")
    with pytest.raises(ConfigError, match="no reuse information"):
        call(path, *MODEL, *SPEED)
