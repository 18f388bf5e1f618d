"""Flags that several commands share, and what turns them into frozen configs."""

import re
from collections.abc import Callable
from dataclasses import fields
from fractions import Fraction
from typing import Any

import click

from milepost.errors import ConfigError
from milepost.sim.lanes import LaneRules


class Int(click.ParamType):
    """An integer whose refusal names the flag, the value, what is allowed and what works, in one line."""

    name = "integer"

    def __init__(self, works: int) -> None:
        self.works = works

    def convert(self, value: Any, param: click.Parameter | None, _context: click.Context | None) -> int:
        try:
            return int(value)
        except ValueError:
            flag = param.opts[0] if param else "flag"
            raise ConfigError(flag, value, "must be a whole number", self.works) from None


class Number(click.ParamType):
    """A number whose refusal names the flag, the value, what is allowed and what works, in one line."""

    name = "number"

    def __init__(self, works: float) -> None:
        self.works = works

    def convert(self, value: Any, param: click.Parameter | None, _context: click.Context | None) -> float:
        try:
            return float(value)
        except ValueError:
            flag = param.opts[0] if param else "flag"
            raise ConfigError(flag, value, "must be a number", self.works) from None


UNITS = {"": 1, "B": 1, **{f"{prefix}iB": 1024**i for i, prefix in enumerate("KMGT", 1)}}
UNITS |= {f"{prefix}B": 1000**i for i, prefix in enumerate("KMGT", 1)}


class Size(click.ParamType):
    """Bytes: a number and a unit, binary (GiB) or decimal (GB)."""

    name = "size"

    def __init__(self, works: str) -> None:
        self.works = works

    def convert(self, value: Any, param: click.Parameter | None, _context: click.Context | None) -> int:
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?i?B?)", str(value).strip())
        if match is None or match[2] not in UNITS:
            flag = param.opts[0] if param else "flag"
            allowed = "must be a number with a unit: B, MiB, GiB, or the decimal MB, GB"
            raise ConfigError(flag, value, allowed, self.works)
        return int(Fraction(match[1]) * UNITS[match[2]])


CACHE_FLAGS = [
    click.option("--max-running-requests", type=Int(64), help="Requests that run at once."),
    click.option("--chunked-prefill-size", type=Int(2048), default=2048, help="Prefill tokens a step."),
    click.option("--max-mamba-cache-size", type=Int(64), help="State slots, checkpoints included."),
    click.option("--max-total-tokens", type=Int(65536), help="KV rows, at most."),
    click.option("--mamba-full-memory-ratio", type=Number(0.9), help="State pool : KV pool [0.9, or the model's]."),
    click.option("--swa-full-tokens-ratio", type=Number(0.8), help="Window rows : KV rows [0.8, or the model's]."),
    click.option("--mem-fraction-static", type=Number(0.85), help="Part of the memory for weights and both pools."),
    click.option("--memory-budget", type=Size("4GiB"), metavar="SIZE", help="Bytes for both pools."),
    click.option(
        "--hybrid-cache-checkpoints-level",
        type=Int(2),
        default=2,
        help="2: forks and request ends; 3: also chunk ends and decode intervals.",
    ),
    click.option("--checkpoint-at", metavar="NAMES", help="Reasons by name instead of a level: fork,finish,…"),
    click.option("--mamba-max-states-per-path", type=Int(1), help="Soft cap per path (deprecated); -1: none."),
    click.option("--mamba-path-cap", metavar="lazy|eager", help="Mark the excess, or free it at once."),
    click.option("--mamba-track-interval", type=Int(256), default=256, help="Decoded tokens between checkpoints."),
    click.option("--mamba-radix-cache-strategy", metavar="NAME", help="exact (default) or one of SGLang's."),
    click.option("--disable-overlap-schedule", is_flag=True, help="Count slots as without overlap."),
    click.option("--page-size", type=Int(64), help="KV page of SGLang's strategies."),
    click.option("--disable-radix-cache", is_flag=True, help="No prefix cache."),
    click.option("--strict-reuse", is_flag=True, help="Reuse only where cached equals cold bit for bit."),
]


LANE_FLAGS = [
    click.option("--lanes", type=Int(48), help="Closed loop: so many sessions are alive at once [open loop]."),
    click.option(
        "--seconds", type=Number(3600), default=3600.0, show_default=True, help="Virtual time of a closed loop."
    ),
    click.option(
        "--idle-cap", type=Number(300), default=300.0, show_default=True, help="Longest pause of a session, s."
    ),
    click.option("--system-idle-cap", type=Number(10), help="Longest time in which nothing at all runs, s [no cap]."),
    click.option(
        "--start-window",
        metavar="LOW,HIGH",
        default="0.25,0.75",
        show_default=True,
        help="Part of its duration in which a lane's first session begins; none: at its first turn.",
    ),
]
"""How sessions are replayed in closed loop; `lane_rules` reads them."""


def lane_rules(values: dict[str, Any], seed: int = 0) -> LaneRules | None:
    """The rules of a closed loop, or None in open loop. Raises `ConfigError`."""
    for name, least in (("lanes", 1), ("seconds", 1), ("idle_cap", 0), ("system_idle_cap", 0)):
        if values[name] is not None and values[name] < least:
            raise ConfigError(f"--{name.replace('_', '-')}", values[name], f"must be at least {least}", max(least, 48))
    if values["lanes"] is None:
        return None
    idle = values["system_idle_cap"]
    window = _window(values["start_window"])
    return LaneRules(values["lanes"], seed, values["idle_cap"], window, idle=float("inf") if idle is None else idle)


def _window(text: str) -> tuple[float, float] | None:
    if text == "none":
        return None
    match = re.fullmatch(r"(\d*\.?\d+),(\d*\.?\d+)", text.replace(" ", ""))
    if match is None or not 0 <= float(match[1]) <= float(match[2]) <= 1:
        raise ConfigError("--start-window", text, "must be none, or two numbers within 0 … 1", "0.25,0.75")
    return float(match[1]), float(match[2])


def flags(options: list[Callable[..., Any]]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def add(command: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed(options):
            command = option(command)
        return command

    return add


def pick(kind: type[Any], values: dict[str, Any]) -> Any:
    """A config of `kind` from those values that are its fields."""
    return kind(**{field.name: values[field.name] for field in fields(kind) if field.name in values})
