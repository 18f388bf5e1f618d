"""Replaying a trace: the format, the figures, and what the command line says."""

import gzip
import json

import pytest
from click.testing import CliRunner

from milepost.cli import cli
from milepost.cli.replay import build
from milepost.config import CacheConfig
from milepost.errors import TraceError
from milepost.sim.cost import ConstantSpeed
from milepost.sim.formats.detect import read
from milepost.sim.replay import Arrivals, Replay, summary
from milepost.sim.trace import Blocks, SegmentMaterial, Trace, Turn, material

POOLS = ["--max-total-tokens", "20000", "--max-mamba-cache-size", "16"]


def line(session, turn, arrival, segments, output, length):
    record = {"session": session, "turn": turn, "arrival": arrival, "segments": segments}
    return json.dumps({**record, "output": [output, length], "output_len": length})


CHAT = [
    line(0, 0, 0.0, [["sys", 500], ["a", 100]], "x", 10),
    line(1, 0, 0.1, [["sys", 500], ["b", 200]], "y", 10),
    line(0, 1, 5.0, [["sys", 500], ["a", 100], ["x", 10], ["c", 40]], "z", 10),
    line(1, 1, 9.0, [["sys", 500], ["d", 50]], "w", 1),
]


def server(rows=20_000, slots=16, **options):
    return Replay(build(CacheConfig(max_total_tokens=rows, max_mamba_cache_size=slots)), SegmentMaterial(), **options)


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "chat.jsonl"
    path.write_text("\n".join(CHAT) + "\n")
    return path


def test_sequential_reuse_is_exact(trace):
    """The fork at 500 is made by the second request; a turn reuses all that the one before consumed."""
    replay = Replay(
        build(CacheConfig(max_total_tokens=20_000, max_mamba_cache_size=16)), SegmentMaterial(), audited=True
    )
    served = list(replay.sequential(read(trace).turns))
    assert [s.cached for s in served] == [0, 0, 609, 500]
    assert [s.reuse.diverged_at for s in served] == [None, 500, None, 500]
    figures = summary(served, replay.scheduler)
    assert (figures["prompt_tokens"], figures["cached_tokens"]) == (600 + 700 + 650 + 550, 1109)


def test_arrivals_overlap_in_virtual_time(trace):
    """Two requests prefill together, so the second finds nothing of the first; decodes stop at arrivals."""
    replay = Replay(
        build(CacheConfig(max_total_tokens=20_000, max_mamba_cache_size=16)),
        SegmentMaterial(),
        ConstantSpeed(1000.0, 0.01),
        audited=True,
    )
    served = list(replay.run(Arrivals(read(trace).turns)))
    assert [s.cached for s in served] == [0, 0, 609, 0]
    # 600 tokens at 1,000 a second; the other prompt waits for the end of that step.
    assert served[0].first_token == pytest.approx(0.6)
    assert served[1].first_token == pytest.approx(0.6 + 0.7 + 0.01)
    assert served[2].first_token == pytest.approx(5.0 + 0.041)


def test_same_trace_same_figures(trace):
    def once():
        replay = server(2_000, 3)
        return [(s.cached, s.finished) for s in replay.run(Arrivals(read(trace).turns))]

    assert once() == once()


def test_segments_are_prefix_stable():
    """The tokens of a segment don't depend on how much of it was asked for first."""
    one, other = SegmentMaterial(), SegmentMaterial()
    assert one.segment("a", 10).tolist() == other.segment("a", 1000)[:10].tolist()
    assert one.segment("a", 1000).tolist() == other.segment("a", 1000).tolist()
    assert one.segment("b", 10).tolist() != one.segment("a", 10).tolist()


def test_command_line(trace, tmp_path):
    zipped = tmp_path / "chat.jsonl.gz"
    zipped.write_bytes(gzip.compress(trace.read_bytes()))
    log = tmp_path / "log.jsonl"
    args = ["replay", str(zipped), "--sequential", *POOLS, "--log", str(log), "--json", "--audit"]
    run = CliRunner().invoke(cli, args, catch_exceptions=False)
    figures = json.loads(run.stdout)
    assert run.exit_code == 0
    assert figures["requests"] == 4 and figures["hit_rate"] == pytest.approx(1109 / 2500)
    records = [json.loads(row) for row in log.read_text().splitlines()]
    assert [(r["session"], r["turn"], r["prompt"], r["cached"]) for r in records][2] == (0, 1, 650, 609)
    assert records[1]["explanation"]["why"] == (
        "reused 0 of 700, history changed at 500, KV matched to 500, never checkpointed here"
    )
    people = CliRunner().invoke(cli, ["replay", str(zipped), *POOLS], catch_exceptions=False)
    assert "of prompt tokens reused" in people.stdout


def test_a_prompt_that_never_fits_is_refused_and_the_replay_goes_on(trace):
    replay = server(620, 4, audited=True)
    served = {(s.turn.session, s.turn.turn): s for s in replay.run(Arrivals(read(trace).turns))}
    assert [name for name, s in served.items() if s.refused is None] == [(0, 0), (1, 1)]
    assert "709" in served[1, 0].refused and "620" in served[1, 0].refused


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("{}", ":1: no 'session'"),
        (CHAT[0] + "\n{", ":2: "),
        (line(0, 0, 0.0, [["a", 0]], "x", 1), ":1: ['a', 0] is not"),
        (line(0, 0, 0.0, [], "x", 1), ":1: segments is empty"),
        (line(0, 0, 0.0, [["a", 1]], "x", 0), "output_len is 0"),
        ("", "no requests"),
    ],
)
def test_bad_traces_name_file_and_line(tmp_path, text, complaint):
    path = tmp_path / "bad.jsonl"
    path.write_text(text)
    with pytest.raises(TraceError) as error:
        read(path)
    assert str(path) in str(error.value) and complaint in str(error.value)


def agents() -> Trace:
    """Two sessions whose prompts repeat the answers before them, in blocks of 64; the lengths are off the grid."""
    turns = []
    for name in range(2):
        for turn in range(6):
            size = 700 + 150 * turn
            turns.append(Turn(name, turn, size, 40, Blocks(((0, size // 64),), 64, name), arrival=10.0 * turn))
    return Trace("agents", tuple(turns))


@pytest.mark.parametrize("strategy", ["exact", "extra_buffer"])
def test_blocks_and_tokens_tell_the_same_story(strategy):
    """At the block's grain each request reuses what it does at single tokens, to within two blocks."""
    cached = {}
    for grain in (64, 1):
        stuff = material(agents(), grain)
        flags = CacheConfig(max_total_tokens=64_000, max_mamba_cache_size=40, mamba_radix_cache_strategy=strategy)
        replay = Replay(build(flags, grain), stuff, audited=True)
        cached[grain] = [s.cached for s in replay.sequential(agents().turns)]
    assert all(abs(block - token) <= 128 for block, token in zip(cached[64], cached[1], strict=True))
    assert min(cached[1][1:6]) > 0
    if strategy == "exact":
        assert cached[1][1:6] == [t.prompt_len + 39 for t in agents().turns[:5]], "to the token"


def test_a_grain_that_is_not_possible_is_refused():
    with pytest.raises(TraceError, match="possible is 1 or 64"):
        material(agents(), 32)
