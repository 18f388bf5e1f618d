"""`milepost trace`: what a trace says, in another format, or made up."""

import json
import sys
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from milepost.cli.flags import Int, flags
from milepost.errors import ConfigError
from milepost.sim import reuse, workload
from milepost.sim.formats import detect
from milepost.sim.trace import Trace

FILE = click.Path(path_type=Path)
READ_FLAGS = [
    click.option("--block", type=Int(512), help="Tokens of a block where the trace doesn't say [the format's]."),
    click.option("--infer-sessions", is_flag=True, help="A prompt that begins with all of another continues it."),
    click.option("--share-prefix", is_flag=True, help="WEKA: tools and system prompts are common to all sessions."),
]


@click.group()
def trace() -> None:
    """Look at request traces, convert them, or make some up."""


@trace.command()
@click.argument("source", metavar="TRACE", type=FILE)
@flags(READ_FLAGS)
@click.option("--every", type=Int(8192), multiple=True, default=(8192,), help="Checkpoint every N tokens [8192].")
@click.option("--json", "as_json", is_flag=True, help="The figures as JSON on standard output.")
def stats(source: Path, every: tuple[int, ...], as_json: bool, **options: Any) -> None:
    """Lengths, times, and the share of prompts that an endless cache could reuse."""
    for n in every:
        if n < 1:
            raise ConfigError("--every", n, "must be at least 1", 8192)
    figures = reuse.figures(detect.read(source, **options), every)
    if as_json:
        click.echo(json.dumps(figures, indent=2))
    else:
        _show(source.name, figures)


@trace.command()
@click.argument("source", metavar="IN", type=FILE)
@click.argument("target", metavar="OUT", type=FILE)
@click.option("--to", required=True, metavar="FORMAT", help=f"{', '.join(detect.WRITERS)}.")
@click.option("--to-block", type=Int(64), help="Tokens of a block in OUT, for a trace that has none [64].")
@flags(READ_FLAGS)
@click.option("--force", is_flag=True, help="Overwrite OUT.")
def convert(source: Path, target: Path, to: str, to_block: int | None, force: bool, **options: Any) -> None:
    """Write a trace in another format; gzipped where OUT ends in .gz."""
    _may_write(target, force)
    if to_block is not None and to_block < 1:
        raise ConfigError("--to-block", to_block, "must be at least 1", 64)
    _write(detect.read(source, **options), target, to, to_block)


@trace.command()
@click.argument("kind", metavar="|".join(workload.KINDS))
@click.argument("target", metavar="OUT", type=FILE)
@click.option("--seed", type=Int(0), default=0, show_default=True)
@click.option("--set", "given", multiple=True, metavar="NAME=VALUE", help="A parameter, such as sessions=32.")
@click.option("--to", default="segments", show_default=True, metavar="FORMAT")
@click.option("--force", is_flag=True, help="Overwrite OUT.")
def generate(kind: str, target: Path, seed: int, given: tuple[str, ...], to: str, force: bool) -> None:
    """Make up a workload: chats, agents with a shared prefix, late forks, or many idle sessions."""
    _may_write(target, force)
    if seed < 0:
        raise ConfigError("--seed", seed, "must be at least 0", 0)
    pairs = dict(pair.partition("=")[::2] for pair in given)
    _write(workload.workload(kind, pairs).make(seed), target, to, None)


def _may_write(target: Path, force: bool) -> None:
    if target.exists() and not force:
        raise ConfigError("OUT", target, "exists; --force overwrites it", target.with_name("new-" + target.name))


def _write(made: Trace, target: Path, to: str, block: int | None) -> None:
    lost = detect.write(made, target, to, block)
    for note in (*made.notes, *lost):
        click.echo(note, err=True)
    click.echo(f"{target}: {len(made.turns):,} requests, {to}", err=True)


LABELS = {
    "prompt": "prompt tokens",
    "output": "output tokens",
    "turns": "turns a session",
    "longest_of_session": "longest prompt of a session",
    "new_tokens": "new tokens a turn",
    "think_s": "think time (s)",
    "took_s": "time at the recorded server (s)",
}
POSITIONS = {
    "any_block": "any block (attention alone)",
    "ends": "ends of earlier prompts",
    "ends_and_forks": "ends and forks",
}


def _show(name: str, figures: dict[str, Any]) -> None:
    console = Console(file=sys.stdout)
    span = f"{figures['span_s']:,.0f} s" if figures["span_s"] is not None else "no arrivals"
    block = f", blocks of {figures['block']} tokens" if figures["block"] else ""
    children = f" and {figures['subagents']:,} subagents" if figures["subagents"] else ""
    counts = f"{figures['requests']:,} requests, {figures['sessions']:,} sessions{children}, {span}{block}"
    console.print(f"[b]{name}[/b]: {counts}", highlight=False)
    table = Table()
    table.add_column("")
    for column in ("mean", *(f"p{p}" for p in reuse.PERCENTS), "max"):
        table.add_column(column, justify="right")
    for key, label in LABELS.items():
        if figures[key] is not None:
            table.add_row(label, *(f"{value:,.0f}" for value in figures[key].values()))
    console.print(table)
    if figures["reusable"] is not None:
        shares = Table()
        shares.add_column("reusable in an endless cache, checkpoints at")
        shares.add_column("of prompt tokens", justify="right")
        for key, rate in figures["reusable"].items():
            label = POSITIONS.get(key) or f"… and every {int(key.rsplit('_', 1)[1]):,} tokens"
            shares.add_row(label, f"{rate:.1%}")
        console.print(shares)
    for note in figures["notes"]:
        console.print(f"note: {note}", highlight=False)
