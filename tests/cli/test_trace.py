"""`milepost trace`: what people and programs see."""

import json

import pytest
from click.testing import CliRunner

from milepost.cli import cli
from milepost.errors import MilepostError

ROWS = [
    {"timestamp": 0, "input_length": 1100, "output_length": 600, "hash_ids": [0, 1, 2]},
    {"timestamp": 4000, "input_length": 1800, "output_length": 10, "hash_ids": [0, 1, 3, 4]},
    {"timestamp": 9000, "input_length": 1030, "output_length": 10, "hash_ids": [0, 5, 6]},
]
POOLS = ["--max-total-tokens", "65536", "--max-mamba-cache-size", "16"]


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


def run(*args):
    return CliRunner().invoke(cli, [str(arg) for arg in args], catch_exceptions=False)


def refused(*args):
    with pytest.raises(MilepostError) as error:
        run(*args)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_stats_as_json(source):
    found = json.loads(run("trace", "stats", source, "--json", "--every", 512).stdout)
    assert (found["requests"], found["sessions"], found["span_s"], found["block"]) == (3, 3, 9.0, 512)
    assert found["prompt"]["p50"] == 1100 and found["prompt"]["max"] == 1800
    prompt = 1100 + 1800 + 1030
    assert found["reusable"] == {
        "any_block": pytest.approx((1024 + 512) / prompt),
        "ends": pytest.approx(1024 / prompt),
        "ends_and_forks": pytest.approx(1024 / prompt),
        "ends_forks_every_512": pytest.approx((1024 + 512) / prompt),
    }


def test_stats_for_people(source):
    shown = run("trace", "stats", source, "--infer-sessions").stdout
    assert "3 requests, 2 sessions, 9 s, blocks of 512 tokens" in shown
    assert "ends of earlier prompts" in shown and "26.1%" in shown and "note: 2 sessions were inferred" in shown


def test_lengths_only_show_no_share(tmp_path):
    path = tmp_path / "l.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,4808,10\n")
    shown = run("trace", "stats", path).stdout
    assert "reusable" not in shown and "no reuse information" in " ".join(shown.split())
    assert json.loads(run("trace", "stats", path, "--json").stdout)["reusable"] is None
    assert "no reuse information" in refused("replay", path, *POOLS)


@pytest.mark.parametrize("to", ["mooncake", "weka", "segments", "aiperf", "autobench"])
def test_convert_keeps_the_shares(source, tmp_path, to):
    out = tmp_path / "out.jsonl.gz"
    done = run("trace", "convert", source, out, "--to", to)
    assert "3 requests" in done.stderr
    before, after = (json.loads(run("trace", "stats", path, "--json").stdout) for path in (source, out))
    assert after["prompt_tokens"] == before["prompt_tokens"]
    assert after["reusable"]["any_block"] == pytest.approx(before["reusable"]["any_block"])
    if to in ("mooncake", "weka"):
        assert after["reusable"] == pytest.approx(before["reusable"])


def test_convert_refusals(source, tmp_path):
    out = tmp_path / "out"
    assert "must be one of aiperf" in refused("trace", "convert", source, out, "--to", "csv")
    assert "can't be cut to 64" in refused("trace", "convert", source, out, "--to", "mooncake", "--to-block", 64)
    assert f"{source}:1: 3 ids for 1100" in refused("trace", "convert", source, out, "--to", "weka", "--block", 64)
    assert "no meaning" in refused("trace", "convert", source, out, "--to", "weka", "--share-prefix")
    assert "--to-block 0" in refused("trace", "convert", source, out, "--to", "weka", "--to-block", 0)
    assert not out.exists()
    out.write_text("mine")
    assert "--force" in refused("trace", "convert", source, out, "--to", "weka")
    assert out.read_text() == "mine"
    run("trace", "convert", source, out, "--to", "weka", "--force")
    assert out.read_text() != "mine"


def test_generate_and_replay(tmp_path):
    out = tmp_path / "made.jsonl"
    args = ["--set", "sessions=4", "--set", "turns=3", "--set", "turns_spread=0"]
    done = run("trace", "generate", "chat", out, "--seed", 5, *args)
    assert "seed 5" in done.stderr and "12 requests" in done.stderr
    figures = json.loads(run("replay", out, *POOLS, "--json").stdout)
    assert figures["requests"] == 12 and figures["hit_rate"] > 0.4
    assert "must be one of chat" in refused("trace", "generate", "games", tmp_path / "x")
    assert "--seed -1" in refused("trace", "generate", "chat", tmp_path / "x", "--seed", -1)


def test_replay_with_windows(tmp_path):
    """A third pool that is roomy changes nothing; a small one costs reuse, and the reason is named."""
    out = tmp_path / "made.jsonl"
    run("trace", "generate", "chat", out, "--set", "sessions=4", "--set", "turns=3", "--set", "turns_spread=0")
    shown = []
    for ratio in (None, "1", "0.02"):
        more = [] if ratio is None else ["--sliding-window", "512", "--swa-full-tokens-ratio", ratio]
        shown.append(json.loads(run("replay", out, *POOLS, *more, "--sequential", "--json").stdout))
    plain, roomy, tight = (figures["hit_rate"] for figures in shown)
    assert roomy >= plain > tight
    pressed = [figures["missed"].get("evicted under window pressure", 0) for figures in shown]
    assert pressed[:2] == [0, 0] and pressed[2] > 0
    assert "--sliding-window 0: must be at least 1" in refused("replay", out, *POOLS, "--sliding-window", "0")
    tiny = refused("replay", out, *POOLS, "--sliding-window", "512", "--swa-full-tokens-ratio", "0.0001")
    assert "--swa-full-tokens-ratio 0.0001: leaves" in tiny and "more than 512 are needed" in tiny


def test_replay_reads_block_traces(source):
    """The second request leaves a state where it left the first; a fourth finds it."""
    with source.open("a") as file:
        file.write(json.dumps({**ROWS[1], "timestamp": 12000, "hash_ids": [0, 1, 8, 9]}) + "\n")
    figures = json.loads(run("replay", source, *POOLS, "--sequential", "--audit", "--json").stdout)
    assert (figures["requests"], figures["prompt_tokens"], figures["cached_tokens"]) == (4, 5730, 1024)
