"""`milepost plan`: from a trace, a model and a memory to the flags to run."""

import json
import os
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.panel import Panel
from rich.table import Column, Table

from milepost.cli.bar import bar
from milepost.cli.flags import CACHE_FLAGS, LANE_FLAGS, Int, Number, flags, lane_rules
from milepost.cli.size import MEMORY_FLAGS, MODEL_FLAGS, MORE_FLAGS, chosen_model, setup
from milepost.cli.size_report import Setup
from milepost.core.sizing import Wish
from milepost.errors import ConfigError, MissingExtra
from milepost.sim import bootlog
from milepost.sim.advice import advise, binds
from milepost.sim.cost import ConstantSpeed, Cost
from milepost.sim.formats.detect import read
from milepost.sim.planner import Candidate, Judged, Search, Traffic, candidates, replay
from milepost.sim.workload import workload

PLAN_FLAGS = [
    click.option("--workload", metavar="KIND", help="A made workload instead of a trace: chat, agents, forks or idle."),
    click.option("--seeds", type=Int(5), default=5, show_default=True, help="Replays of each setting that matters."),
    click.option("--prefill-tps", type=Number(15000), help="Prefill tokens a second, if known."),
    click.option("--decode-ms", type=Number(20), help="Milliseconds of a decode step, if known."),
    click.option("--also-state-dtype", metavar="NAME", help="Try states in this dtype too: bfloat16, say."),
    click.option("--also-draft-tokens", type=Int(4), help="Try so many draft tokens too; needs --draft-speedup."),
    click.option("--draft-speedup", type=Number(1.8), help="Tokens that a step with drafts yields on average."),
    click.option("--speed-of", metavar="GPU", help="Speeds of this GPU, where --rest-memory is given [--gpu]."),
    click.option("--workers", type=Int(2), default=os.cpu_count() or 1, show_default=True, help="Processes."),
    click.option("--report", type=click.Path(path_type=Path), help="Write an HTML page, and a PNG beside it."),
    click.option("--check", type=click.Path(path_type=Path), help="Compare with the log of a first boot."),
    click.option("--json", "as_json", is_flag=True, help="Everything as JSON on standard output."),
]


@click.command()
@click.argument("trace", type=click.Path(path_type=Path), required=False)
@flags(LANE_FLAGS)
@flags(PLAN_FLAGS)
@flags(MODEL_FLAGS)
@flags(MEMORY_FLAGS)
@flags(CACHE_FLAGS)
@flags(MORE_FLAGS)
@click.pass_context
def plan(ctx: click.Context, trace: Path | None, **values: Any) -> None:
    """Search the memory split, strategy, level and cap for a trace, and say why.

    \b
    milepost plan sessions.jsonl.gz --lanes 48 --model glm-5.3-flash --tp 2 --rest-memory 62.45GiB \\
        --kv-cache-dtype fp8 --prefill-tps 15000 --decode-ms 20 --report plan.html
    """
    _check_numbers(values)
    if values["report"]:
        _check_plotting()
    ask = {**values, "concurrency": None, "sessions": 0, "context": None}
    sizes = setup(ask, _given(ctx), chosen_model(values))
    traffic = _traffic(trace, values, sizes)
    wish = replace(sizes.wish, slots=None, tokens=None)
    tried = candidates(sizes.budget, sizes.costs, wish)
    tried += _others(ctx, ask, wish, sizes.budget)
    if not tried:
        raise ConfigError("--rest-memory", sizes.budget, "leaves no room for one request in any split", "62GiB")
    judged = _search(Search(traffic, values["seeds"], values["workers"]), tried)
    notes = list(sizes.notes)
    if values["check"]:
        notes += _compare(values["check"], sizes)
    advice = advise(judged, traffic, sizes.wish.context, notes)
    advice = _titles(advice, sizes, values)
    if values["report"]:
        _report(values["report"], advice, judged, traffic)
    if values["as_json"]:
        click.echo(json.dumps(advice, indent=2))
    else:
        _show(advice)


def _others(ctx: click.Context, ask: dict[str, Any], wish: Wish, budget: int) -> list[Candidate]:
    """Candidates with what the user wants to be tried besides: states in another dtype, draft tokens."""
    found, tries = [], []
    if ask["also_state_dtype"]:
        tries.append(("mamba_ssm_dtype", ask["also_state_dtype"], 1.0))
    if (ask["also_draft_tokens"] is None) != (ask["draft_speedup"] is None):
        flag, works = ("--draft-speedup", 1.8) if ask["draft_speedup"] is None else ("--also-draft-tokens", 4)
        raise ConfigError(flag, "(not set)", "is needed with the other one: no acceptance is modelled", works)
    if ask["also_draft_tokens"]:
        if ask["max_running_requests"] is None:
            allowed = "must be set with --also-draft-tokens: so many draft states are kept"
            raise ConfigError("--max-running-requests", "(not set)", allowed, ask["lanes"] or 16)
        if ask["draft_speedup"] < 1:
            raise ConfigError("--draft-speedup", ask["draft_speedup"], "must be at least 1", 1.8)
        tries.append(("speculative_num_draft_tokens", ask["also_draft_tokens"], ask["draft_speedup"]))
    for name, value, speedup in tries:
        costs = setup({**ask, name: value}, _given(ctx), chosen_model(ask)).costs
        extra = ((f"--{name.replace('_', '-')}", str(value)),)
        found += [replace(one, extra=one.extra + extra, speedup=speedup) for one in candidates(budget, costs, wish)]
    return found


def _given(ctx: click.Context) -> dict[str, str]:
    default = click.core.ParameterSource.DEFAULT
    return {name: "user" for name in ctx.params if ctx.get_parameter_source(name) is not default}


def _check_numbers(values: dict[str, Any]) -> None:
    least = {"seeds": 1, "workers": 1}
    for name, low in least.items():
        if values[name] is not None and values[name] < low:
            raise ConfigError(f"--{name.replace('_', '-')}", values[name], f"must be at least {low}", max(low, 5))
    for name in ("prefill_tps", "decode_ms"):
        if values[name] is not None and values[name] <= 0:
            raise ConfigError(f"--{name.replace('_', '-')}", values[name], "must be above 0", 20)


def _check_plotting() -> None:
    """Asked for before the replays, which take minutes."""
    try:
        import milepost.report.page
        import milepost.report.picture  # noqa: F401
    except ModuleNotFoundError as error:
        raise MissingExtra("--report", str(error.name).split(".")[0], "plan") from None


def _traffic(path: Path | None, values: dict[str, Any], sizes: Setup) -> Traffic:
    kind = values["workload"]
    if (path is None) == (kind is None):
        raise ConfigError("TRACE", path or "(not given)", "give one of TRACE and --workload", "--workload agents")
    trace = read(path) if path is not None else workload(kind).make(0)
    if not trace.has_identity:
        raise ConfigError("TRACE", path, "has lengths only, no reuse information", "a trace with block ids")
    rules = lane_rules(values)
    return Traffic(
        trace,
        _cost(values, sizes),
        rules,
        values["seconds"],
        values["chunked_prefill_size"],
        values["mamba_track_interval"],
    )


def _cost(values: dict[str, Any], sizes: Setup) -> Cost:
    """Measured speeds if both are given; else a roofline of the model on the GPU."""
    prefill, decode = values["prefill_tps"], values["decode_ms"]
    if prefill is not None and decode is not None:
        return ConstantSpeed(prefill, decode / 1e3)
    if prefill is not None or decode is not None:
        missing = "--decode-ms" if decode is None else "--prefill-tps"
        raise ConfigError(missing, "(not set)", "is needed with the other one", 20 if decode is None else 15000)
    gpu = values["speed_of"] or values["gpu"]
    if gpu is None:
        allowed = "is needed for speeds, or --speed-of, or --prefill-tps and --decode-ms"
        raise ConfigError("--gpu", "(not set)", allowed, "h200")
    from milepost.sim.roofline import roofline

    weights = values["weights_dtype"] or "bfloat16"
    return roofline(sizes.model, gpu, sizes.layout, sizes.formats, weights)


def _search(search: Search, tried: list[Candidate]) -> list[Judged]:
    with bar("replays") as progress:
        task = progress.add_task("replays", total=None)
        judged: list[Judged] = []
        for done, planned, found in search.run(tried):
            progress.update(task, completed=done, total=planned)
            judged = found
    return judged


def _compare(path: Path, sizes: Setup) -> list[str]:
    """What a first boot printed against what was planned with."""
    try:
        log = bootlog.read(path.read_text(encoding="utf-8", errors="replace"))
    except OSError as error:
        raise ConfigError("--check", path, f"can't be read ({error.strerror})", "server.log") from None
    off = (log.rest - sizes.budget) / sizes.budget
    line = f"boot log: {log.slots} slots and {log.tokens:,} KV tokens of {log.rest / 2**30:.2f} GiB"
    if abs(off) < 0.02:
        return [f"{line}: as planned with"]
    return [f"{line}: {off:+.0%} of the memory planned with; plan again with --rest-memory {log.rest / 2**30:.2f}GiB"]


def _titles(advice: dict[str, Any], sizes: Setup, values: dict[str, Any]) -> dict[str, Any]:
    memory = f"{sizes.budget / 2**30:.2f} GiB for both pools"
    load = f"{values['lanes']} sessions in closed loop" if values["lanes"] else "arrivals as recorded"
    subtitle = f"{memory} a rank; {load}; {advice['seeds']} seeds; latencies are a band, not a promise"
    return {"title": f"{sizes.model.name} on {advice['trace']}", "subtitle": subtitle, "budget": sizes.budget, **advice}


def _report(path: Path, advice: dict[str, Any], judged: list[Judged], traffic: Traffic) -> None:
    """The page, a PNG and the JSON beside it."""
    from milepost.report import page, picture

    names = [advice["recommended"]["milepost"]["name"], advice["recommended"]["sglang"]["name"]]
    names += [advice["baseline"]["name"]] if advice["baseline"] else []
    by_name = {j.candidate.name: j for j in judged}
    chosen = list(dict.fromkeys(names))
    runs = {name: replay(by_name[name].candidate, traffic, 0, sample=traffic.seconds / 400) for name in chosen}
    full = {
        **advice,
        "timelines": [(name, binds(by_name[name]), runs[name].samples) for name in chosen],
        "lost": [(name, runs[name].lost) for name in chosen],
    }
    try:
        page.write(path, full)
        picture.write(path.with_suffix(".png"), full)
        outcomes = [asdict(outcome) for one in judged for outcome in one.outcomes]
        path.with_suffix(".json").write_text(json.dumps({**full, "outcomes": outcomes}, default=str))
    except OSError as error:
        raise ConfigError("--report", path, f"can't be written ({error.strerror})", "plan.html") from None
    click.echo(f"wrote {path}, {path.with_suffix('.png')} and {path.with_suffix('.json')}", err=True)


def _show(advice: dict[str, Any]) -> None:
    console = Console(file=sys.stdout, width=None if sys.stdout.isatty() else 140)
    for key, title in (("milepost", "Milepost"), ("sglang", "SGLang")):
        console.print(Panel(advice["recommended"]["flags"][key], title=f"Flags for {title}", expand=False))
    for line in advice["why"]:
        console.print(f"  {line}")
    for line in advice["warnings"]:
        console.print(f"[yellow]! {line}[/]")
    table = Table(
        Column("setting", no_wrap=True),
        "KV tokens",
        "hit mean",
        "worst",
        "tok/s mean",
        "worst",
        "TTFT p90 (s)",
        "collapsed",
    )
    for c in advice["candidates"]:
        table.add_row(
            c["name"],
            f"{c['kv_tokens']:,}",
            f"{c['hit_rate_mean']:.3f}",
            f"{c['hit_rate_worst']:.3f}",
            f"{c['output_tps_mean']:,.1f}",
            f"{c['output_tps_worst']:,.1f}",
            "{:,.1f}–{:,.1f}".format(*c["ttft_p90_band"]),
            f"{c['collapsed_share']:.0%}",
        )
    console.print(table)
