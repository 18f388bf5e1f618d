"""`milepost models`: which families can be served, what they need, and what a model keeps of the past in bytes.

What a family is like is said by the family itself (`milepost.model.families`), bytes come from `core.geometry`. The
answers are plain data, which `--json` prints; people see the same.
"""

import json
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from milepost.core import checkpoint, geometry
from milepost.core import models as known
from milepost.core.geometry import Formats, Grouped, Layout, Model, Part, measure
from milepost.core.sizing import human
from milepost.errors import ConfigError, MissingExtra, ModelConfigError

KEEPS = {Part.STATE: "linear", Part.KV: "attention", Part.WINDOW: "window"}
WINDOWS = "Layers with a sliding window: level 2 keeps checkpoints at chunk ends, too."


@click.command()
@click.argument("model", required=False, metavar="[FOLDER|NAME]")
@click.option("--json", "as_json", is_flag=True, help="Machine-readable.")
def models(model: str | None, as_json: bool) -> None:
    """List the model families that can be served, or say what one model keeps.

    FOLDER holds a config.json; NAME is a known model's, as in `milepost size --list-models`.
    """
    answers = families() if model is None else folder(Path(model)) if Path(model).exists() else named(model)
    if as_json:
        click.echo(json.dumps(answers, indent=2))
    elif model is None:
        _show_families(answers)
    else:
        _show_model(answers)


def families() -> dict[str, Any]:
    """What holds for all, and each family with the models that stand for it."""
    loader = _loader()
    grouped: dict[int, list[str]] = {}
    for name, family in loader.FAMILIES.items():
        grouped.setdefault(id(family), []).append(name)
    rows = []
    for names in grouped.values():
        family = loader.FAMILIES[names[0]]
        about = family.about
        rows.append(
            {
                "model_types": names,
                "linear": about.linear,
                "attention": about.attention,
                "mlp": about.mlp,
                "only": {field: list(values) for field, values in family.only.items()},
                "needs": list(about.needs),
                "published": [figures(known.TABLE[name], Formats()) for name in about.published],
            }
        )
    everywhere = {field: list(values) for field, values in loader.EVERYWHERE.items()}
    return {"everywhere": everywhere, "strict_grid": checkpoint.STRICT.grid, "families": rows}


def named(name: str) -> dict[str, Any]:
    """A known model: bytes as listed, and the model_types whose example it is, if any."""
    try:
        model = known.find(name)
    except ConfigError:
        allowed = f"must be a folder with a config.json, or one of {', '.join(known.TABLE)}"
        raise ConfigError("models", name, allowed, "qwen3.5-9b") from None
    stands_for = [kind for kind, family in _loader().FAMILIES.items() if model.name in family.about.published]
    return {**figures(model, Formats()), "model_types": stands_for}


def folder(path: Path) -> dict[str, Any]:
    """A model folder, in the dtypes in which it would be served. Raises ModelConfigError where it can't be."""
    config = _loader().load_model_config(path)
    file = path / "config.json" if path.is_dir() else path
    model = known.read_config(json.loads(file.read_text(encoding="utf-8")), file.resolve().parent.name)
    dtype = config.dtype or "float32"
    if dtype not in geometry.STATE_DTYPES:
        raise ModelConfigError(f"config field dtype is {dtype!r}; supported: {', '.join(geometry.STATE_DTYPES)}")
    parts = {"linear": config.linear and config.linear.state}
    parts |= {kind: attention.kv for kind, attention in config.attentions.items()}
    return {
        **figures(model, Formats(model.state_dtype, dtype, dtype, own_index=True)),
        "model_types": [config.model_type],
        "context": config.max_position_embeddings,
        "mlps": dict(Counter(layer.mlp for layer in config.layers)),
        "float8_block": config.weight_block,
        "keeps": {
            kind: {name: shape for name, shape in asdict(part).items() if shape not in (0, (0,))}
            for kind, part in parts.items()
            if part is not None
        },
    }


def figures(model: Model, formats: Formats) -> dict[str, Any]:
    """Layers by kind and bytes by part, of the whole model on one rank."""
    footprint = measure(model, Layout(), formats)
    index = model.count(Part.KV) * geometry.index_bytes(model, formats)
    keys = round((footprint.row - index) * footprint.key_share)
    parts = {"keys": keys, "values": footprint.row - index - keys, "index": index}
    if not isinstance(model.attention, Grouped):
        parts = {"latent": footprint.row - index, "index": index}
    return {
        "model": model.name,
        "linear": model.recurrence.family if model.recurrence else None,
        "layers": dict(Counter(_kind(layer) for layer in model.layers)),
        "dtypes": {"state": formats.state, "conv": formats.conv, "kv": formats.kv},
        "slot_bytes": footprint.slot,
        "slot_parts": {"state": footprint.temporal, "conv": footprint.conv},
        "row_bytes": footprint.row,
        "row_parts": {name: size for name, size in parts.items() if size},
        "window_row_bytes": footprint.window_row,
        "window_tokens": footprint.window_size,
        "notes": list(model.notes),
    }


def _kind(layer: Part) -> str:
    return " and ".join(name for part, name in KEEPS.items() if part in layer) or "neither"


def _loader() -> Any:
    """The families' package; it needs torch, as all that computes."""
    try:
        from milepost.model import families as loader
    except ModuleNotFoundError as error:
        raise MissingExtra("models", error.name, "serve") from None
    return loader


def _show_families(answers: dict[str, Any]) -> None:
    kinds = _table("model_type", "linear", "attention", "MLPs")
    sizes = _table("for example", "slot B", "KV B/token", "window B/token")
    needs = _table("needs", "")
    for row in answers["families"]:
        kinds.add_row(", ".join(row["model_types"]), row["linear"], row["attention"], row["mlp"])
        for shown in row["published"]:
            figures = (shown[name] for name in ("slot_bytes", "row_bytes", "window_row_bytes"))
            sizes.add_row(shown["model"], *(f"{figure:,}" if figure else "-" for figure in figures))
        wanted = [*_supported(row["only"]), *row["needs"]]
        if wanted:
            needs.add_row(", ".join(row["model_types"]), "; ".join(wanted))
    for column in sizes.columns[1:]:
        column.justify, column.no_wrap = "right", True
    console = Console(highlight=False)
    console.print(kinds, "", sizes, "", needs, "", sep="\n")
    console.print(f"Fields are so, or missing; in all families {'; '.join(_supported(answers['everywhere']))}.")
    console.print("Bytes: the whole model on one rank, states in float32, convolution windows and KV in bfloat16.")
    console.print(f"--strict-reuse resumes at multiples of {answers['strict_grid']} tokens.")
    console.print(WINDOWS)


def _table(*columns: str) -> Table:
    return Table(*columns, box=None, pad_edge=False)


def _supported(only: dict[str, list[Any]]) -> list[str]:
    """Fields with their values as a config.json has them."""
    return [f"{name} {' or '.join(json.dumps(value).strip(chr(34)) for value in only[name])}" for name in only]


def _show_model(answers: dict[str, Any]) -> None:
    console = Console(highlight=False)
    names = ", ".join(answers["model_types"])
    console.print(answers["model"] + f", family: {names}" * bool(names), style="bold", markup=False, soft_wrap=True)
    dtypes, layers = answers["dtypes"], answers["layers"]
    table = Table("", "", box=None, pad_edge=False, show_header=False)
    kinds = ", ".join(f"{count} {kind}" for kind, count in layers.items())
    table.add_row("layers", f"{kinds}; linear: {answers['linear']}")
    if "mlps" in answers:
        table.add_row("MLPs", ", ".join(f"{count} {kind}" for kind, count in answers["mlps"].items()))
        for kind, shapes in answers["keeps"].items():
            table.add_row(f"one {kind} layer keeps", ", ".join(f"{name} {_times(of)}" for name, of in shapes.items()))
    table.add_row("a slot", _sum(answers["slot_bytes"], answers["slot_parts"]))
    table.add_row("a KV row", _sum(answers["row_bytes"], answers["row_parts"]))
    if answers["window_row_bytes"]:
        table.add_row("a window row", f"{answers['window_row_bytes']:,} B, the last {answers['window_tokens']} tokens")
    if answers["row_bytes"]:
        table.add_row("one slot costs", f"{answers['slot_bytes'] / answers['row_bytes']:,.0f} KV rows")
    table.add_row("dtypes", f"states {dtypes['state']}, conv {dtypes['conv']}, KV {dtypes['kv']}")
    console.print(table)
    for note in [*answers["notes"], *[WINDOWS] * bool(answers["window_row_bytes"])]:
        console.print(f"note: {note}", soft_wrap=True, markup=False, style="yellow")


def _sum(total: int, parts: dict[str, int]) -> str:
    parted = " + ".join(f"{size:,} {name}" for name, size in parts.items() if size)
    return f"{total:,} B ({human(total)}) = {parted}" if parted else f"{total:,} B"


def _times(shape: Any) -> str:
    return " × ".join(f"{n:,}" for n in shape) if isinstance(shape, tuple) else f"{shape:,}"
