"""`milepost replay`: a trace through the scheduler and the cache, without a model."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from milepost.cli.flags import CACHE_FLAGS, flags, pick
from milepost.config import CacheConfig, resolve
from milepost.core.scheduler import Limits, Scheduler
from milepost.errors import ConfigError
from milepost.sim.cost import ConstantSpeed
from milepost.sim.formats.detect import read
from milepost.sim.replay import Arrivals, Replay, Served, latencies, summary
from milepost.sim.trace import Turn, material

ENDLESS = 1 << 40


@click.command()
@click.argument("trace", type=click.Path(path_type=Path))
@flags(CACHE_FLAGS)
@click.option("--sequential", is_flag=True, help="One request at a time, in the order of the trace.")
@click.option("--prefill-tps", type=float, default=20_000.0, show_default=True, help="Prefill tokens a second.")
@click.option("--decode-ms", type=float, default=20.0, show_default=True, help="Milliseconds of a decode step.")
@click.option("--audit", is_flag=True, help="Tagged memory, and the audit after each step (slow).")
@click.option("--log", type=click.Path(path_type=Path), help="A JSON line per request, in the order of the trace.")
@click.option("--json", "as_json", is_flag=True, help="The figures as JSON on standard output.")
def replay(trace: Path, **values: Any) -> None:
    """Replay a request trace and say how much of its prompts is reused, and why no more."""
    scheduler = build(pick(CacheConfig, values))
    for flag, name in (("--prefill-tps", "prefill_tps"), ("--decode-ms", "decode_ms")):
        if values[name] <= 0:
            raise ConfigError(flag, values[name], "must be above 0", 20)
    source = read(trace)
    for note in source.notes:
        click.echo(note, err=True)
    cost = ConstantSpeed(values["prefill_tps"], values["decode_ms"] / 1e3)
    served = _run(Replay(scheduler, material(source), cost, values["audit"]), source.turns, values["sequential"])
    if values["log"]:
        _write(values["log"], served)
    figures = summary(served, scheduler)
    if not values["sequential"]:
        figures |= latencies(served)
    if values["as_json"]:
        click.echo(json.dumps(figures, indent=2))
    else:
        _show(trace, figures)


def build(cache: CacheConfig) -> Scheduler:
    """A scheduler with the pools that the flags give."""
    resolved = resolve(cache)
    for note in resolved.notes:
        click.echo(note, err=True)
    rows, slots = cache.max_total_tokens, cache.max_mamba_cache_size
    if rows is None:
        raise ConfigError("--max-total-tokens", "(not given)", "is needed: the KV rows to replay with", 1_000_000)
    if slots is None:
        raise ConfigError("--max-mamba-cache-size", "(not given)", "is needed: the state slots to replay with", 128)
    page = resolved.strategy.page
    limits = Limits(cache.max_running_requests or ENDLESS, cache.chunked_prefill_size, ENDLESS)
    return Scheduler(rows // page * page, slots, limits, resolved.strategy, resolved.policy)


def _run(replay: Replay, turns: Sequence[Turn], sequential: bool) -> list[Served]:
    columns = [TextColumn("replay"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()]
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("replay", total=len(turns))
        served = []
        for one in replay.sequential(turns) if sequential else replay.run(Arrivals(turns)):
            served.append(one)
            progress.update(task, completed=len(served))
    place = {id(turn): i for i, turn in enumerate(turns)}
    return sorted(served, key=lambda one: place[id(one.turn)])


def _write(path: Path, served: list[Served]) -> None:
    try:
        with open(path, "w") as file:
            file.writelines(json.dumps(one.record()) + "\n" for one in served)
    except OSError as error:
        raise ConfigError("--log", path, f"can't be written ({error.strerror})", "replay.jsonl") from error


def _show(trace: Path, figures: dict[str, Any]) -> None:
    table = Table(title=f"{trace.name}: {figures['hit_rate']:.1%} of prompt tokens reused", show_header=False)
    lost, counters = figures.pop("missed"), figures.pop("counters")
    for name, value in figures.items():
        table.add_row(name.replace("_", " "), f"{value:,}" if isinstance(value, int) else f"{value:.4f}")
    for reason, tokens in lost.items():
        table.add_row(f"missed: {reason}", f"{tokens:,}")
    for name, value in counters.items():
        if value and "{" not in name and not any(name.startswith(known) for known in figures):
            table.add_row(name.removesuffix("_total").replace("_", " "), f"{value:,}")
    Console(file=sys.stdout).print(table)
