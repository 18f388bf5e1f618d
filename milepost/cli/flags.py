"""Flags that several commands share, and what turns them into frozen configs."""

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import click

from milepost.errors import ConfigError


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


CACHE_FLAGS = [
    click.option("--max-running-requests", type=Int(64), help="Requests that run at once."),
    click.option("--chunked-prefill-size", type=Int(2048), default=2048, help="Prefill tokens a step."),
    click.option("--max-mamba-cache-size", type=Int(64), help="State slots, checkpoints included."),
    click.option("--max-total-tokens", type=Int(65536), help="KV rows."),
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


def flags(options: list[Callable[..., Any]]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def add(command: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed(options):
            command = option(command)
        return command

    return add


def pick(kind: type[Any], values: dict[str, Any]) -> Any:
    """A config of `kind` from those values that are its fields."""
    return kind(**{field.name: values[field.name] for field in fields(kind) if field.name in values})
