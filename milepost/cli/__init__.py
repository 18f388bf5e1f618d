"""The command line. Each command lives in a module of its own and is imported when it is asked for."""

import importlib
import sys

import click

from milepost.errors import MilepostError

COMMANDS = {
    "serve": "Serve a model over HTTP, as OpenAI does.",
    "models": "List the model families that can be served, or say what one model keeps.",
    "size": "Size both pools of a hybrid model before a boot.",
    "plan": "Search memory split, strategy, level and cap for a trace, and say why.",
    "replay": "Replay a request trace and say how much of its prompts is reused.",
    "trace": "Look at request traces, convert them, or make some up.",
}


class Lazy(click.Group):
    """Commands by name; `milepost.cli.<name>` holds a click command of that name."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        if cmd_name not in COMMANDS:
            return None
        command = getattr(importlib.import_module(f"milepost.cli.{cmd_name}"), cmd_name)
        assert isinstance(command, click.Command)
        return command


@click.group(cls=Lazy, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(package_name="milepost")
def cli() -> None:
    """Serve hybrid language models with a prefix cache that is right."""


def main() -> None:
    """The entry point: an expected failure is one line on standard error and exit code 2."""
    try:
        cli(standalone_mode=False)
    except click.exceptions.Abort:
        sys.exit(130)
    except click.ClickException as error:
        click.echo(f"milepost: {error.format_message()}", err=True)
        sys.exit(2)
    except MilepostError as error:
        click.echo(f"milepost: {error}", err=True)
        sys.exit(2)
