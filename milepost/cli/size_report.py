"""What `milepost size` answers, as plain data, and how people see it.

`size_answers` and `log_answers` return the dictionary that `--json` prints: counts are of one rank unless a name says
`total`, sizes are bytes. `print_answers` shows the same numbers and computes none of its own.
"""

from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table
from rich.text import Text

from milepost.core import geometry as geo
from milepost.core import models, sizing
from milepost.core.geometry import Formats, Layout, Model
from milepost.core.sizing import human
from milepost.core.window import Windows
from milepost.sim.bootlog import BootLog, Explanation

LENGTHS = (8192, 32768, 131072)
"""Tokens of a session, for the table of what stays resident when the user names none."""

LEAVES_OUT = (
    "retained sessions",
    "more than one checkpoint per prompt (level 3: one per chunk)",
    "host tiers",
    "what a trace really repeats",
)
BINDS = {
    "state": "the state pool",
    "kv": "the KV pool",
    "windows": "the window pool",
    "max_running_requests": "--max-running-requests",
}


class Setting(NamedTuple):
    """One row of the resolved table; `source` is default, model, user or derived."""

    name: str
    value: str
    source: str


@dataclass(frozen=True, slots=True)
class Setup:
    """All that the answers follow from. `host`: ratio, bytes in all, bytes for states. `held`: slots in real use."""

    model: Model
    layout: Layout
    formats: Formats
    costs: sizing.Costs
    wish: sizing.Wish
    budget: int
    strategy: str
    held: int
    settings: tuple[Setting, ...]
    notes: tuple[str, ...]
    demand: sizing.Demand | None = None
    context: int | None = None
    host: tuple[float | None, int | None, int | None] = (None, None, None)


def size_answers(setup: Setup) -> dict[str, Any]:
    """From flags to pools; with a demand, from the demand to flags to pools. Raises `ConfigError`."""
    if setup.demand is None:
        return _answers(setup, sizing.size(setup.budget, setup.costs, setup.wish))
    answer = sizing.invert(setup.budget, setup.costs, setup.demand)
    shown = answer if answer.fits or answer.best is None else sizing.invert(setup.budget, setup.costs, answer.best)
    found = dict(shown.flags)
    slots, running = found.get("--max-mamba-cache-size"), found.get("--max-running-requests")
    ratio = found.get("--swa-full-tokens-ratio", setup.wish.window_ratio)
    wish = replace(setup.wish, slots=slots, running=running, window_ratio=ratio)
    pools = sizing.size(setup.budget, setup.costs, wish)
    shown_flags = {name: str(value) for name, value in found.items()}
    rows = [
        Setting(row.name, shown_flags[row.name], "derived") if row.name in shown_flags else row
        for row in setup.settings
    ]
    answers = _answers(replace(setup, wish=wish, settings=tuple(rows)), pools)
    answers["inverse"] = {
        "asked": asdict(setup.demand),
        "fits": answer.fits,
        "needs_bytes": answer.need,
        "have_bytes": answer.have,
        "needs_slots": answer.slots,
        "needs_kv_tokens": answer.rows,
        "flags": found,
        "same_as_ratio": round(setup.costs.states(pools.slots) / max(1, pools.rows * setup.costs.row), 4),
        "best_fit": asdict(answer.best) if answer.best else None,
        "would_fit_with": [] if answer.fits else _alternatives(setup),
    }
    return answers


def _alternatives(setup: Setup) -> list[str]:
    """Single changes that make an unfitting demand fit."""
    assert setup.demand is not None
    costs, tries = setup.costs, []
    if setup.formats.state == "float32":
        tries.append(("--mamba-ssm-dtype bfloat16", replace(setup.formats, state="bfloat16"), costs.reserved))
    if setup.formats.kv in ("bfloat16", "float16", "float32"):
        tries.append(("--kv-cache-dtype fp8", replace(setup.formats, kv="fp8_e4m3"), costs.reserved))
    if costs.reserved > 4:
        tries.append(("--mamba-radix-cache-strategy extra_buffer_lazy", setup.formats, 4))
    if costs.reserved > 1:
        tries.append(("--mamba-radix-cache-strategy exact (Milepost only)", setup.formats, 1))
    fitting = []
    for name, formats, reserved in tries:
        footprint = geo.measure(setup.model, setup.layout, formats)
        changed = replace(costs, footprint=footprint, reserved=reserved)
        if sizing.invert(setup.budget, changed, setup.demand).fits:
            fitting.append(name)
    return fitting


def log_answers(setup: Setup, log: BootLog, found: list[Explanation]) -> dict[str, Any]:
    """The same answers from the bytes that a boot log shows: exact ones where a geometry explains every digit."""
    best = found[0]
    footprint, draft_row = best.footprint, 0
    if not best.exact:
        states = log.slots + 1
        footprint = replace(
            footprint,
            temporal=log.temporal.bytes // states,
            column=log.conv.bytes // states // max(1, footprint.taps),
            row=sum(log.row_bytes) // 2,
        )
    if log.draft_kv:
        draft_row = sum(size.bytes for size in log.draft_kv) // log.tokens
    costs = replace(
        setup.costs,
        footprint=footprint,
        draft_row=draft_row,
        drafts=best.draft_steps,
        reserved=log.reserved or setup.costs.reserved,
        page=log.page or setup.costs.page,
    )
    limit, by_rows = sizing.running_limit(
        setup.wish.running, log.slots, log.tokens * costs.dcp, setup.wish.context, costs.reserved
    )
    limit = log.limit or limit
    drafting = limit + 1 if best.draft_steps else 0
    windows = Windows(log.window_tokens, footprint.window_size) if log.window_tokens else Windows()
    pools = sizing.Pools(log.slots, log.tokens, limit, max(limit, by_rows), windows, drafting)
    budget = costs.states(pools.slots) + pools.rows * costs.row
    budget = budget + costs.draft_states(limit) if best.exact else log.rest
    setup = replace(setup, costs=costs, budget=budget, notes=(*setup.notes, *log.notes))
    if setup.demand is not None:
        answers = size_answers(setup)
    else:
        answers = _answers(setup, pools)
    answers["log"] = {
        "rank": log.rank,
        "slot_bytes_between": log.slot_bytes,
        "row_bytes_between": log.row_bytes,
        "rest_bytes": log.rest,
        "explained_by": [one.text for one in found if one.exact],
        "nearest": None if best.exact else best.text,
        "differences": list(best.differences),
    }
    return answers


def _answers(setup: Setup, pools: sizing.Pools) -> dict[str, Any]:
    costs, footprint = setup.costs, setup.costs.footprint
    limits = sizing.caps(costs, pools, setup.wish, setup.context)
    state_bytes, kv_bytes = costs.states(pools.slots), pools.rows * costs.row
    window_bytes = pools.windows.rows * footprint.window_row
    draft_bytes = costs.draft_states(pools.draft_requests - 1) if pools.draft_requests else 0
    return {
        "model": setup.model.name,
        "layout": asdict(setup.layout),
        "strategy": setup.strategy,
        "slot_bytes": costs.slot,
        "conv_bytes": footprint.conv,
        "temporal_bytes": footprint.temporal,
        "row_bytes": costs.row,
        "window_row_bytes": footprint.window_row,
        "draft_row_bytes": costs.draft_row,
        "exchange_rate": round(costs.slot / costs.row, 1) if costs.row else None,
        "rest_bytes": setup.budget,
        "state_slots": pools.slots,
        "kv_tokens": pools.rows,
        "kv_tokens_total": pools.rows * costs.dcp * costs.attn_dp,
        "window_tokens": pools.windows.rows if footprint.window_row else None,
        "state_pool_bytes": state_bytes,
        "kv_pool_bytes": kv_bytes,
        "window_pool_bytes": window_bytes,
        "draft_state_bytes": draft_bytes,
        "unused_bytes": setup.budget - state_bytes - kv_bytes - window_bytes - draft_bytes,
        "slots_per_request": costs.reserved,
        "slots_held_per_request": setup.held,
        "reserved_headroom": max(0, pools.slots - pools.limit * setup.held),
        "max_running_requests": pools.limit,
        "max_running_requests_total": pools.limit * costs.attn_dp,
        "caps": limits,
        "binds": sizing.binds(limits),
        "boot_lines": sizing.boot_lines(costs, pools),
        "sessions": _sessions(setup, pools),
        "balanced_ratio": _balanced(setup, pools),
        "host": _host(setup, pools),
        "settings": [setting._asdict() for setting in setup.settings],
        "notes": [*setup.notes, *pools.notes],
    }


def _sessions(setup: Setup, pools: sizing.Pools) -> list[dict[str, int]]:
    """For each length: bytes of a running request and of an idle session, and how many stay."""
    costs = setup.costs
    lengths = [setup.context] if setup.context is not None else LENGTHS
    return [
        {
            "context": length,
            "running_request_bytes": sizing.session_bytes(costs, length, True),
            "idle_session_bytes": sizing.session_bytes(costs, length, False),
            "running_at_once": min(pools.limit, pools.rows * costs.dcp // length),
            "resident_sessions": sizing.resident(costs, pools, length),
        }
        for length in lengths
    ]


def _balanced(setup: Setup, pools: sizing.Pools) -> dict[str, Any] | None:
    """r* of the mean request length, and why it may be wrong to use."""
    costs, context = setup.costs, setup.context
    if context is None or not costs.row or not costs.slot:
        return None
    ratio = sizing.balanced_ratio(costs, context, setup.budget, max(0, pools.draft_requests - 1))
    advice = []
    state = setup.budget * ratio / (1 + ratio)
    if ratio < 0.15 or state < costs.states(costs.reserved) or costs.dcp > 1:
        advice.append("pin --max-mamba-cache-size instead of using this ratio")
    return {"ratio": round(ratio, 4), "context": context, "leaves_out": list(LEAVES_OUT), "advice": advice}


def _host(setup: Setup, pools: sizing.Pools) -> dict[str, int] | None:
    ratio, total, states = setup.host
    if total is not None:
        host = sizing.host_by_size(setup.costs, pools, total, states)
    elif ratio is not None:
        host = sizing.host_by_ratio(setup.costs, pools, ratio)
    else:
        return None
    return {"host_states": host.states, "host_kv_tokens": host.rows, "host_bytes": host.bytes}


# --- for people -----------------------------------------------------------------------------------------------


def print_models() -> None:
    """The table of known models: bytes of the whole model with float32 states and bfloat16 KV."""
    table = Table("model", "linear", "full", "family", "slot B", "KV B/token", box=None)
    for model in models.TABLE.values():
        footprint = geo.measure(model, Layout(), Formats())
        family = model.recurrence.family if model.recurrence else ""
        counts = [str(model.count(part)) for part in (geo.Part.STATE, geo.Part.KV)]
        table.add_row(model.name, *counts, family, f"{footprint.slot:,}", f"{footprint.row:,}")
    console = Console(highlight=False)
    console.print(table)
    for model in models.TABLE.values():
        for note in model.notes:
            console.print(f"{model.name}: {note}", soft_wrap=True, markup=False, style="yellow")


def print_answers(answers: dict[str, Any]) -> None:
    """The same numbers for people."""
    console = Console(highlight=False)
    console.print(Text(_title(answers), style="bold"))
    console.print(_pools_table(answers))
    console.print(_bar(answers, min(console.width, 100)))
    console.print()
    for line in answers["boot_lines"]:
        console.print(line, soft_wrap=True, markup=False)
    console.print()
    for line in [*_who_binds(answers), *_log_lines(answers), *_inverse_lines(answers), *_more_lines(answers)]:
        console.print(line, soft_wrap=True, markup=False)
    console.print()
    console.print(_sessions_table(answers))
    console.print(_settings_table(answers))
    for note in answers["notes"]:
        console.print(f"note: {note}", soft_wrap=True, markup=False, style="yellow")


def _title(answers: dict[str, Any]) -> str:
    names = {"tp": "TP", "pp": "PP", "attn_dp": "DP attention", "dcp": "DCP"}
    layout = ", ".join(f"{names[key]} {value}" for key, value in answers["layout"].items() if value > 1 or key == "tp")
    return f"{answers['model']}, {layout}: {human(answers['rest_bytes'])} for both pools on each rank"


def _pools_table(answers: dict[str, Any]) -> Table:
    table = Table("pool", "holds", "bytes each", "in all", box=None)
    slots = f"{answers['state_slots']:,} slots and a dummy"
    table.add_row("state", slots, f"{answers['slot_bytes']:,}", human(answers["state_pool_bytes"]))
    if answers["draft_state_bytes"]:
        table.add_row("draft states", "", "", human(answers["draft_state_bytes"]))
    tokens = f"{answers['kv_tokens']:,} tokens"
    table.add_row("KV", tokens, f"{answers['row_bytes']:,}", human(answers["kv_pool_bytes"]))
    if answers["window_tokens"] is not None:
        tokens = f"{answers['window_tokens']:,} tokens"
        table.add_row("windows", tokens, f"{answers['window_row_bytes']:,}", human(answers["window_pool_bytes"]))
    return table


def _bar(answers: dict[str, Any], width: int) -> Text:
    """Both pools to scale."""
    parts = [
        ("state", answers["state_pool_bytes"] + answers["draft_state_bytes"], "█", "cyan"),
        ("KV", answers["kv_pool_bytes"], "▒", "green"),
        *([("windows", answers["window_pool_bytes"], "░", "yellow")] * (answers["window_pool_bytes"] > 0)),
    ]
    total = max(1, sum(size for _, size, _, _ in parts))
    legend = "  " + " : ".join(f"{name} {size / total:.0%}" for name, size, _, _ in parts)
    bar = Text()
    for _name, size, letter, style in parts:
        bar.append(letter * round(size / total * (width - len(legend) - 3)), style=style)
    return bar.append(legend)


def _who_binds(answers: dict[str, Any]) -> list[str]:
    caps, binds = answers["caps"], answers["binds"]
    shown = ", ".join(f"{BINDS[name]} {count:,}" for name, count in caps.items())
    subject = BINDS[binds][0].upper() + BINDS[binds][1:]
    lines = [f"{subject} binds at {caps[binds]:,} running requests on a rank ({shown})."]
    if binds == "windows":
        lines.append("Raise --swa-full-tokens-ratio, or lower --chunked-prefill-size: a chunk takes window rows too.")
    if binds == "state":
        lines.append(
            "Concurrency-bound: raise --mamba-full-memory-ratio or pin more slots, store states in bfloat16, "
            "or reserve fewer slots per request."
        )
    elif binds == "kv":
        lines.append(
            "KV-bound: lower the ratio, but only if states for running requests and kept checkpoints still fit; "
            "else shrink KV (--kv-cache-dtype fp8)."
        )
    if answers["reserved_headroom"] and answers["slots_held_per_request"] < answers["slots_per_request"]:
        lines.append(
            f"Each request reserves {answers['slots_per_request']} slots and holds "
            f"{answers['slots_held_per_request']}: {answers['reserved_headroom']} slots are headroom at the limit, "
            "of use for checkpoints only."
        )
    if answers["exchange_rate"] is not None:
        lines.append(f"Exchange rate: one slot costs as much as {answers['exchange_rate']:,.0f} tokens of KV.")
    return lines


def _log_lines(answers: dict[str, Any]) -> list[str]:
    log = answers.get("log")
    if log is None:
        return []
    slot, row = log["slot_bytes_between"], log["row_bytes_between"]
    rank = f" (rank {log['rank']})" if log["rank"] else ""
    lines = [
        f"Measured{rank}: slot {slot[0]:,} … {slot[1]:,} B, KV row {row[0]:,} … {row[1]:,} B, "
        f"memory for the pools {human(log['rest_bytes'])}."
    ]
    lines += [f"Explained to every printed digit by: {text}." for text in log["explained_by"]]
    if log["nearest"]:
        lines.append(f"No geometry explains all digits. Nearest: {log['nearest']}; the measured bytes are used.")
    return lines + [f"  differs: {text}" for text in log["differences"]]


def _inverse_lines(answers: dict[str, Any]) -> list[str]:
    inverse = answers.get("inverse")
    if inverse is None:
        return []
    asked = _demand(inverse["asked"])
    size = f"needs {human(inverse['needs_bytes'])}, have {human(inverse['have_bytes'])}"
    chosen = " ".join(f"{flag} {value}" for flag, value in inverse["flags"].items())
    ratio = f"(as a ratio: {inverse['same_as_ratio']:g})"
    if inverse["fits"]:
        return [f"Fits: {asked}; {size}.", f"Set: {chosen} {ratio}"]
    lines = [f"Does not fit: {asked}; {size}."]
    if inverse["best_fit"]:
        lines += [f"Best fit: {_demand(inverse['best_fit'])}.", f"Set: {chosen} {ratio}"]
    return lines + [f"It would fit with {change}." for change in inverse["would_fit_with"]]


def _demand(asked: dict[str, int]) -> str:
    running, context, sessions = asked["running"], asked["context"], asked["sessions"]
    return f"{running:,} running requests and {sessions:,} idle sessions of {context:,} tokens"


def _more_lines(answers: dict[str, Any]) -> list[str]:
    lines, balanced, host = [], answers["balanced_ratio"], answers["host"]
    if balanced is not None:
        lines.append(
            f"Balanced ratio r* at {balanced['context']:,} tokens a request: {balanced['ratio']:.3g}. "
            f"It leaves out {', '.join(balanced['leaves_out'])}."
        )
        lines += [f"  {advice}" for advice in balanced["advice"]]
    if host is not None:
        states, tokens = host["host_states"], host["host_kv_tokens"]
        lines.append(f"Host tier: {states:,} states and {tokens:,} KV tokens in {human(host['host_bytes'])} a rank.")
    return lines


def _sessions_table(answers: dict[str, Any]) -> Table:
    names = ("tokens", "a running request costs", "an idle session costs", "run at once", "stay resident, none running")
    table = Table(*names, box=None)
    for row in answers["sessions"]:
        running, idle = human(row["running_request_bytes"]), human(row["idle_session_bytes"])
        counts = [f"{row[name]:,}" for name in ("running_at_once", "resident_sessions")]
        table.add_row(f"{row['context']:,}", running, idle, *counts)
    return table


def _settings_table(answers: dict[str, Any]) -> Table:
    table = Table("setting", "value", "from", box=None)
    for setting in answers["settings"]:
        table.add_row(setting["name"], setting["value"], setting["source"])
    return table
