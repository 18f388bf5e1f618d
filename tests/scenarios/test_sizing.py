"""Start-up: who caps concurrency, which flags are refused and how, what is derived (scenarios 13, 35, 43 and 44).

All starts happen in one process of their own, which is stopped where weights would load.
"""

import json
import os
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="a start reaches for torch")

import milepost
from milepost.boot import Booted, boot
from milepost.config import CacheConfig, ServeConfig, resolve, with_model
from milepost.core import sizing
from milepost.core.geometry import Defaults, Formats, Layout, measure
from milepost.core.models import read_config
from milepost.errors import ConfigError
from tests.scenarios.world import BOTH, A, B, X, either, figures

DEMO = Path(milepost.__file__).parent / "demo"

# Starts


@dataclass(frozen=True)
class Start:
    """How `milepost serve` with some flags went: it got as far as the weights, or it ended with a code and lines."""

    loads: bool
    code: int
    lines: list[str]


SCRIPT = """
import contextlib, io, json, sys
import milepost.boot, milepost.cli

class Weights(Exception):
    pass

def load_decoder(*_args, **_more):
    raise Weights

milepost.boot.load_decoder = load_decoder
starts = []
for flags in json.load(sys.stdin):
    sys.argv = ["milepost", "serve", *flags]
    errors, code, loads = io.StringIO(), 0, False
    with contextlib.redirect_stderr(errors):
        try:
            milepost.cli.main()
        except Weights:
            loads = True
        except SystemExit as end:
            code = end.code
    starts.append([loads, code, errors.getvalue().splitlines()])
json.dump(starts, sys.stdout)
"""

CAP, LEVEL = "--mamba-max-states-per-path", "--hybrid-cache-checkpoints-level"
SLOTS, RATIO, STRATEGY = "--max-mamba-cache-size", "--mamba-full-memory-ratio", "--mamba-radix-cache-strategy"
INTERVAL = "--mamba-track-interval"
OWN = {"exact": [STRATEGY, "exact"], "extra_buffer": [STRATEGY, "extra_buffer", "--page-size", "64"]}
ROWS = {
    "cap 0": [CAP, "0"],
    "cap -2": [CAP, "-2"],
    "cap -1": [CAP, "-1"],
    "level 0": [LEVEL, "0"],
    "level 1": [LEVEL, "1"],
    "level 4": [LEVEL, "4"],
    "level x": [LEVEL, "x"],
    "ratio 0": [RATIO, "0"],
    "ratio -1": [RATIO, "-1"],
    "slots 0": [SLOTS, "0"],
    **{f"slots {count}": [SLOTS, str(count)] for count in range(1, 6)},
    "interval 100": [INTERVAL, "100"],
    "cache off": ["--disable-radix-cache"],
    "not hybrid": ["--model-path", "{plain}"],
    "no flags": [],
}
NAMES = [(strategy, row) for strategy in OWN for row in ROWS]


@pytest.fixture(scope="module")
def starts(tmp_path_factory) -> dict[tuple[str, str], Start]:
    plain = tmp_path_factory.mktemp("plain")
    for file in DEMO.glob("*.json"):
        (plain / file.name).write_bytes(file.read_bytes())
    shape = json.loads((DEMO / "config.json").read_text())
    shape["layer_types"] = ["full_attention"] * len(shape["layer_types"])
    (plain / "config.json").write_text(json.dumps(shape))
    flags = [[flag.format(plain=plain) for flag in OWN[strategy] + ROWS[row]] for strategy, row in NAMES]
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        input=json.dumps(flags),
        capture_output=True,
        text=True,
        timeout=60,
        cwd=Path(milepost.__file__).parents[1],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert result.returncode == 0, result.stderr
    return {name: Start(*start) for name, start in zip(NAMES, json.loads(result.stdout), strict=True)}


@figures(exact=["cap -1", *(f"slots {i}" for i in range(1, 6)), "interval 100"], extra_buffer=["cap -1", "slots 5"])
def test_s43_what_starts(starts, strategy, expected):
    """Of all rows just these start, and none of them waits for a flag that the user did not set."""
    begun = [row for row in ROWS if starts[strategy, row].loads]
    assert begun == [*expected, "no flags"]
    assert starts[strategy, "no flags"].lines == []


REFUSED = {
    "cap 0": (CAP, "0", "-1 (no cap) or at least 1"),
    "cap -2": (CAP, "-2", "-1 (no cap) or at least 1"),
    "level 0": (LEVEL, "0", "2 or 3"),
    "level 1": (LEVEL, "1", "2 or 3"),
    "level 4": (LEVEL, "4", "2 or 3"),
    "level x": (LEVEL, "x", "whole number"),
    "ratio 0": (RATIO, "0", "above 0"),
    "ratio -1": (RATIO, "-1", "above 0"),
    "slots 0": (SLOTS, "0", "at least"),
    "cache off": (STRATEGY, "", "no meaning with --disable-radix-cache"),
    "not hybrid": (STRATEGY, "", "no meaning for a model without recurrent states"),
}
GRID_ROWS = {
    "interval 100": (INTERVAL, "100", "a multiple of the page of 64"),
    **{f"slots {i}": (SLOTS, str(i), "at least 5") for i in range(1, 5)},
}
REFUSALS = [(strategy, row, said) for strategy in OWN for row, said in REFUSED.items()]
REFUSALS += [("extra_buffer", row, said) for row, said in GRID_ROWS.items()]


@pytest.mark.parametrize(("strategy", "row", "said"), REFUSALS, ids=lambda value: value if type(value) is str else "")
def test_s43_how_a_refusal_reads(starts, strategy, row, said):
    """Before weights load, exit code not 0, one line: flag, value, allowed values, a value that works."""
    start = starts[strategy, row]
    flag, value, allowed = said
    assert not start.loads and start.code != 0
    (line,) = start.lines
    shown = f"{flag} {value or strategy}"
    assert line.startswith(f"milepost: {shown}") and allowed in line and f"for example {flag} " in line


@BOTH
def test_s43_one_request_at_a_time(world, strategy):
    """With the slots of one request the next one waits; the end state is kept all the same.

    `exact` has a single slot then: the two chunk ends of each run are skipped, and the last request takes the
    matched checkpoint over.
    """
    w = world(strategy, slots=either(strategy, 1, 5), level=3)
    w.start(A * 4096), w.start(B * 4096)
    while w.scheduler.busy:
        w.tick()
        assert w.stats.running <= 1
    if strategy == "exact":
        assert (w.counters.checkpoints_skipped_total, w.unmarked()) == (4, [4096])
    assert w.ask(B * 4096 + A * 5).resume == 4096


# Who caps concurrency


def boot_report(strategy: str, slots: int) -> list[str]:
    """The lines of a start of the embedded model with these slots."""
    reserved = either(strategy, 1, 5)
    costs = demo_costs(reserved)
    wish = sizing.Wish(slots=slots, tokens=65_536, context=32_768)
    return sizing.boot_lines(costs, sizing.size(2**30, costs, wish))


def demo_costs(reserved: int) -> sizing.Costs:
    shape = read_config(json.loads((DEMO / "config.json").read_text()), "demo")
    footprint = measure(shape, Layout(), Formats("float32", "bfloat16", "bfloat16"))
    return sizing.Costs(footprint, reserved, either("exact" if reserved == 1 else "extra_buffer", 1, 64))


TWELVE = [
    ("exact", 40, 2, 40, 12, 12),
    ("exact", 8, 2, 8, 8, 8),
    ("extra_buffer", 40, 2, 8, 8, 24),
    ("extra_buffer", 40, 3, 8, 8, 32),
]


@pytest.mark.parametrize(("strategy", "slots", "level", "limit", "running", "held"), TWELVE)
def test_s13_who_caps_concurrency(world, strategy, slots, level, limit, running, held):
    """Twelve requests at once: the announced limit, the slots reserved for it and those in use."""
    (line,) = [line for line in boot_report(strategy, slots) if "capped" in line]
    reserved = either(strategy, 1, 5)
    assert f"capped to {limit} by the mamba state cache (max_mamba_cache_size={slots}, {reserved} " in line
    w = world(strategy, slots=slots, level=level)
    for number in range(12):
        w.start(X(number) * 64, 30)
    w.tick(2)
    assert (w.stats.running_limit, w.stats.running, w.stats.waiting) == (limit, running, 12 - running)
    assert w.held == held
    assert w.stats.waiting_for == ("state pool" if running < 12 else "")
    assert w.stats.running * w.stats.reserved_slots - w.held == {24: 16, 32: 8}.get(held, 0)


@pytest.mark.parametrize(("level", "headroom"), [(2, 16), (3, 8)])
def test_s13_the_report_names_the_headroom(level, headroom):
    """Forty slots are reserved for eight requests that hold 24 (32 at level 3): the report says what the rest is."""
    flags = replace(WIDE, max_mamba_cache_size=40, hybrid_cache_checkpoints_level=level, page_size=64)
    assert any("reserved" in line and f" {headroom} " in line for line in started(flags).lines)


@figures(exact=4, extra_buffer=20)
@pytest.mark.parametrize("retained", [1, 6, 50])
def test_s13_slots_for_a_demand(strategy, expected, retained):
    """Four requests and r checkpoints kept for later take 4 + r (20 + r) slots; the rest of the bytes is KV."""
    costs, budget = demo_costs(either(strategy, 1, 5)), 200 * 2**30
    answer = sizing.invert(budget, costs, sizing.Demand(4, 200_000, retained))
    assert answer.fits and answer.slots == expected + retained
    wish = sizing.Wish(slots=answer.slots, running=4, context=200_000)
    pools = sizing.size(budget, costs, wish)
    assert (pools.slots, pools.limit) == (expected + retained, 4)
    assert 0 <= budget - costs.states(pools.slots) - pools.rows * costs.row < (costs.page + 1) * costs.row


# What is said about a wide grid


WIDE = CacheConfig(
    max_mamba_cache_size=8,
    max_total_tokens=8192,
    mamba_radix_cache_strategy="extra_buffer",
    page_size=2048,
    mamba_track_interval=2048,
)


def started(cache: CacheConfig = WIDE, context: int = 4096) -> Booted:
    """A real start of the embedded model; its loop has not begun."""
    return boot(ServeConfig(dtype="float32", context_length=context), cache)


def test_s35_the_boot_report_names_the_minimum():
    """Shorter prompts than the grid are never reused: zero reuse by design is said, not left to be found."""
    assert any("2048" in line and "minimum" in line for line in started().lines)


def test_s35_a_metric_names_the_minimum():
    """The same for whoever only scrapes."""
    assert 2048 in started().engine.gauges().values()


def test_s35_a_start_that_can_never_reuse_warns():
    """With requests of 2000 tokens at most and a grid of 2048, caching is inert."""
    assert any("inert" in line for line in started(context=2000).lines)


@figures(exact=1, extra_buffer=2048)
def test_s35_the_info_gives_the_grid(strategy, expected):
    """What the server tells of its settings has the grid that is really used."""
    cache = WIDE if strategy == "extra_buffer" else CacheConfig(max_mamba_cache_size=8, max_total_tokens=8192)
    assert started(cache).engine.info()["grid"] == expected


# Order of resolution


def test_s44_without_the_prefix_cache_one_slot_is_enough():
    """Nothing is kept, so nothing is reserved beside the working slot."""
    assert resolve(CacheConfig(disable_radix_cache=True)).strategy.reserved == 1


def test_s44_the_default_needs_no_snapshot():
    """`exact` holds no slot but the working one: its end state is the working state on any platform."""
    strategy = resolve(CacheConfig()).strategy
    assert (strategy.name, strategy.reserved, strategy.tracking) == ("exact", 1, 0)


def test_s44_missing_kernels_refuse_and_never_replace():
    """Where snapshots inside a prefill can't be taken, asking for them is refused with the reason; others go on."""
    lacking = Defaults(extra_buffer=False)
    with pytest.raises(ConfigError, match="--mamba-radix-cache-strategy extra_buffer: needs snapshots"):
        with_model(CacheConfig(mamba_radix_cache_strategy="extra_buffer"), lacking)
    assert resolve(with_model(CacheConfig(), lacking)).strategy.name == "exact"
