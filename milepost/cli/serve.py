"""`milepost serve`: a model over HTTP."""

import logging
from pathlib import Path
from typing import Any

import click

from milepost.cli.flags import CACHE_FLAGS, Int, flags, pick
from milepost.config import CacheConfig, ServeConfig, resolve
from milepost.engine.record import RecordingEngine, TraceFile, check
from milepost.errors import MissingExtra

SERVE_FLAGS = [
    click.option("--model-path", type=click.Path(path_type=Path), help="A Hugging Face folder [embedded model]."),
    click.option("--served-model-name", help="The name that clients use [name of the folder]."),
    click.option("--host", default="127.0.0.1", show_default=True),
    click.option("--port", type=Int(30000), default=30000, show_default=True, help="0: a free one."),
    click.option("--device", default="cpu", show_default=True, metavar="cpu|cuda"),
    click.option("--dtype", default="auto", show_default=True, metavar="auto|float32|bfloat16"),
    click.option("--mamba-ssm-dtype", metavar="float32|bfloat16|float16", help="Of recurrent states [float32]."),
    click.option("--context-length", type=Int(4096), help="Tokens a request may reach [the model's]."),
    click.option("--enable-cache-report/--disable-cache-report", default=True, show_default=True),
    click.option("--keep-message-end", is_flag=True, help="A checkpoint before the header of each answer."),
    click.option("--enable-metrics/--disable-metrics", default=True, show_default=True),
    click.option("--record-trace", metavar="FILE", help="Write each finished request, hashed, for replay and plan."),
    click.option("--record-block", type=Int(64), default=64, show_default=True, help="Tokens of a recorded block."),
]


@click.command()
@flags(SERVE_FLAGS)
@flags(CACHE_FLAGS)
@click.option("--log-level", default="warning", metavar="info|warning", help="info: a line per request.")
def serve(log_level: str, **values: Any) -> None:
    """Serve a model over HTTP, as OpenAI does."""
    logging.basicConfig(level=log_level.upper(), format="%(asctime)s %(message)s")
    config = pick(ServeConfig, values)
    cache = pick(CacheConfig, values)
    resolve(cache)  # bad flags end here, before torch is even imported
    record = Path(config.record_trace) if config.record_trace else None
    if record is not None:
        check(record, config.record_block)
    try:
        from milepost.boot import boot
        from milepost.server.app import create_app
        from milepost.server.protocol import ServerSettings
        from milepost.server.run import run
    except ModuleNotFoundError as error:
        raise MissingExtra("serve", error.name, "serve") from None

    booted = boot(config, cache)
    for line in booted.lines:
        click.echo(line, err=True)
    settings = ServerSettings(
        booted.name,
        booted.context,
        cache_report=config.enable_cache_report,
        metrics=config.enable_metrics,
        keep_message_end=config.keep_message_end,
    )
    file = TraceFile(record, booted.name, config.record_block) if record is not None else None
    engine = RecordingEngine(booted.engine, file) if file is not None else booted.engine
    booted.engine.start()
    try:
        run(create_app(engine, booted.text, settings), config.host, config.port)
    finally:
        booted.engine.close()
        if file is not None:
            file.close()
