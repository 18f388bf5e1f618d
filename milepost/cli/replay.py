"""`milepost replay`: a trace through the scheduler and the cache, without a model."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from milepost.cli.bar import bar
from milepost.cli.flags import CACHE_FLAGS, LANE_FLAGS, Int, flags, lane_rules, pick
from milepost.config import CacheConfig, resolve
from milepost.core.scheduler import Limits, Scheduler
from milepost.core.sizing import WINDOW_RATIO
from milepost.core.window import Windows
from milepost.errors import ConfigError
from milepost.sim.cost import ConstantSpeed
from milepost.sim.formats.detect import read
from milepost.sim.lanes import Lanes
from milepost.sim.replay import Arrivals, Replay, Served, latencies, summary
from milepost.sim.timeline import Timeline
from milepost.sim.trace import Trace, material
from milepost.sim.units import scheduler_in

ENDLESS = 1 << 40


@click.command()
@click.argument("trace", type=click.Path(path_type=Path))
@flags(CACHE_FLAGS)
@click.option("--sequential", is_flag=True, help="One request at a time, in the order of the trace.")
@click.option("--prefill-tps", type=float, default=20_000.0, show_default=True, help="Prefill tokens a second.")
@click.option("--decode-ms", type=float, default=20.0, show_default=True, help="Milliseconds of a decode step.")
@flags(LANE_FLAGS)
@click.option("--seed", type=Int(0), default=0, help="Draws sessions and where they start, in closed loop.")
@click.option("--grain", type=Int(64), help="Tokens of a unit: the trace's block [default], or 1.")
@click.option("--audit", is_flag=True, help="Tagged memory, and the audit after each step (slow).")
@click.option("--log", type=click.Path(path_type=Path), help="A JSON line per request, in the order of the trace.")
@click.option("--sliding-window", type=Int(512), help="Positions that window layers see, if the model has some.")
@click.option("--json", "as_json", is_flag=True, help="The figures as JSON on standard output.")
def replay(trace: Path, **values: Any) -> None:
    """Replay a request trace and say how much of its prompts is reused, and why no more."""
    cache = pick(CacheConfig, values)
    resolve(cache)
    cost = _cost(values)
    source = read(trace)
    for note in source.notes:
        click.echo(note, err=True)
    stuff = material(source, values["grain"])
    timeline = Timeline(float("inf"))
    run = Replay(build(cache, stuff.grain, values["sliding_window"]), stuff, cost, values["audit"], timeline)
    served = _run(run, source, values)
    if values["log"]:
        _write(values["log"], served)
    figures = summary(served, run.scheduler, stuff.grain)
    if not values["sequential"]:
        figures |= latencies(served) | timeline.summary()
        figures["output_tps"] = figures["output_tokens"] / run.now if run.now else 0.0
    if values["as_json"]:
        click.echo(json.dumps(figures, indent=2))
    else:
        _show(trace, figures)


def _cost(values: dict[str, Any]) -> ConstantSpeed:
    for flag, name in (("--prefill-tps", "prefill_tps"), ("--decode-ms", "decode_ms")):
        if values[name] <= 0:
            raise ConfigError(flag, values[name], "must be above 0", 20)
    lane_rules(values)
    if values["lanes"] is not None and values["sequential"]:
        raise ConfigError("--lanes", values["lanes"], "does not go with --sequential; leave one out", 48)
    return ConstantSpeed(values["prefill_tps"], values["decode_ms"] / 1e3)


def build(cache: CacheConfig, grain: int = 1, window: int | None = None) -> Scheduler:
    """A scheduler with the pools that the flags give, in units of `grain` tokens.

    `window`: positions that the sliding-window layers see; None where there are none.
    """
    resolved = resolve(cache, windows=window is not None)
    for note in resolved.notes:
        click.echo(note, err=True)
    rows, slots = cache.max_total_tokens, cache.max_mamba_cache_size
    if rows is None:
        raise ConfigError("--max-total-tokens", "(not given)", "is needed: the KV rows to replay with", 1_000_000)
    if slots is None:
        raise ConfigError("--max-mamba-cache-size", "(not given)", "is needed: the state slots to replay with", 128)
    limits = Limits(cache.max_running_requests or ENDLESS, cache.chunked_prefill_size, ENDLESS)
    windows = _windows(cache, resolved.strategy.windows, window, rows)
    return scheduler_in(grain, (slots, rows, windows), limits, resolved.strategy, resolved.policy)


def _windows(cache: CacheConfig, held: int, window: int | None, rows: int) -> Windows:
    """The third pool: its rows are a part of the KV rows, and more than a request may hold."""
    if window is None:
        return Windows()
    if window < 1:
        raise ConfigError("--sliding-window", window, "must be at least 1", 512)
    ratio = cache.swa_full_tokens_ratio or WINDOW_RATIO
    windows = Windows(int(rows * ratio), window)
    if windows.rows <= held * window:
        allowed = f"leaves {windows.rows} window rows; more than {held * window} are needed"
        raise ConfigError("--swa-full-tokens-ratio", ratio, allowed, f"1 (and {2 * held * window} KV rows)")
    return windows


def _run(replay: Replay, source: Trace, values: dict[str, Any]) -> list[Served]:
    """Requests in the order of the trace; those of a closed loop, warm-up left out, in the order of their ends."""
    turns = source.turns
    if values["lanes"] is not None:
        rules = lane_rules(values, values["seed"])
        assert rules is not None
        lanes = Lanes(source, rules, replay.material)
        ended = _watched(replay.run(lanes, values["seconds"], rules.idle), None)
        return [one for one in ended if not lanes.is_warm_up(one.turn)]
    ended = _watched(replay.sequential(turns) if values["sequential"] else replay.run(Arrivals(turns)), len(turns))
    place = {id(turn): i for i, turn in enumerate(turns)}
    return sorted(ended, key=lambda one: place[id(one.turn)])


def _watched(served: Iterator[Served], total: int | None) -> list[Served]:
    with bar("replay") as progress:
        return list(progress.track(served, total=total, description="replay"))


def _write(path: Path, served: list[Served]) -> None:
    try:
        with open(path, "w") as file:
            file.writelines(json.dumps(one.record()) + "\n" for one in served)
    except OSError as error:
        raise ConfigError("--log", path, f"can't be written ({error.strerror})", "replay.jsonl") from error


def _show(trace: Path, figures: dict[str, Any]) -> None:
    table = Table(title=f"{trace.name}: {figures['hit_rate']:.1%} of prompt tokens reused", show_header=False)
    lost, counters, waited = figures.pop("missed"), figures.pop("counters"), figures.pop("waited_s", {})
    for name, value in figures.items():
        shown = f"{value:,}" if isinstance(value, int) else f"{value:,.4f}" if value is not None else "-"
        table.add_row(name.replace("_", " "), shown)
    for reason, seconds in waited.items():
        table.add_row(f"seconds with somebody waiting for: {reason}", f"{seconds:,.1f}")
    for reason, tokens in lost.items():
        table.add_row(f"missed: {reason}", f"{tokens:,}")
    for name, value in counters.items():
        if value and "{" not in name and not any(name.startswith(known) for known in figures):
            table.add_row(name.removesuffix("_total").replace("_", " "), f"{value:,}")
    Console(file=sys.stdout).print(table)
