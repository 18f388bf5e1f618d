"""`milepost size`: what a boot will print, before the boot; or which flags a wish needs.

Gathers flags, model and memory into a `Setup` (milepost.cli.size_report turns that into answers and prints them).
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from milepost import config as cfg
from milepost.cli.flags import CACHE_FLAGS, Int, Number, Size, flags, pick
from milepost.cli.size_report import Setting, Setup, log_answers, print_answers, print_models, size_answers
from milepost.core import geometry as geo
from milepost.core import gpus, models, sizing
from milepost.core.geometry import Formats, Layout, Model
from milepost.errors import ConfigError, MilepostError
from milepost.sim import bootlog

WEIGHT_DTYPES = {"bfloat16": 2.0, "bf16": 2.0, "fp8": 1.0, "nvfp4": 0.56}
"""Bytes of a parameter; nvfp4 with its scales, estimated."""

STRATEGY_OF_SLOTS = {5: "extra_buffer", 4: "extra_buffer_lazy", 3: "no_buffer"}
"""Which of SGLang's strategies reserves so many slots, with the overlap scheduler."""

MODEL_FLAGS = [
    click.option("--model", metavar="NAME", help="A known model; see --list-models."),
    click.option("--config", type=click.Path(path_type=Path), help="A config.json, or the folder that holds it."),
    click.option("--list-models", is_flag=True, help="Show the known models and their bytes."),
    click.option("--tp", "--tp-size", type=Int(2), default=1, help="Tensor parallelism."),
    click.option("--pp", "--pp-size", type=Int(1), default=1, help="Pipeline parallelism."),
    click.option("--dp-size", type=Int(1), default=1, help="Ranks of DP attention; they divide --tp."),
    click.option("--dcp-size", type=Int(1), default=1, help="Ranks of decode context parallelism."),
    click.option("--kv-cache-dtype", metavar="NAME", default="auto", help="auto, fp8, fp4, bf16, …"),
    click.option("--kv-layout", metavar="plain|scaled", default="plain", help="Of a latent: fp8 with scales or not."),
    click.option("--index-pool", type=Int(4), help="Tokens that share a key of a sparse index [the model's]."),
    click.option("--mamba-ssm-dtype", metavar="NAME", help="Of recurrent states [the model's, or float32]."),
    click.option("--mamba-conv-dtype", metavar="NAME", default="bfloat16", help="Of convolution windows."),
    click.option("--slot-bytes", type=Int(73809920), help="Bytes of a slot, if known better."),
    click.option("--row-bytes", type=Int(5995), help="Bytes of a KV row, if known better."),
]
MEMORY_FLAGS = [
    click.option("--rest-memory", type=Size("62GiB"), metavar="SIZE", help="Left for both pools on a rank."),
    click.option("--gpu", metavar="NAME", help=f"{', '.join(gpus.GPUS)}."),
    click.option("--gpu-memory", type=Size("80GiB"), metavar="SIZE", help="Instead of --gpu."),
    click.option("--weights", type=Size("70GiB"), metavar="SIZE", help="Of one rank [estimated]."),
    click.option("--weights-dtype", metavar="NAME", help=f"For an estimate: {', '.join(WEIGHT_DTYPES)}."),
]
MORE_FLAGS = [
    click.option("--context-length", type=Int(131072), help="Tokens a request may reach [the model's]."),
    click.option("--speculative-num-draft-tokens", type=Int(4), help="Draft tokens a step."),
    click.option("--speculative-draft-layers", type=Int(1), help="KV layers of an EAGLE or MTP draft [1]."),
    click.option("--draft-row-bytes", type=Int(1024), help="KV bytes of a token in a draft model of its own."),
    click.option("--enable-linear-replayssm-spec", is_flag=True, help="No draft states are kept."),
    click.option("--slot-extra-bytes", type=Int(0), default=0, help="More bytes a slot, such as a ring."),
    click.option("--fixed-state-bytes", type=Int(0), default=0, help="More bytes in all."),
    click.option("--disaggregation-mode", metavar="null|prefill|decode", default="null", help="Role of the server."),
    click.option("--hicache-ratio", type=Number(2.0), help="Host pools : device pools."),
    click.option("--hicache-size", type=Number(32.0), help="Host memory of a rank, in 10^9 bytes."),
    click.option("--hicache-mamba-size", type=Number(8.0), help="Of that for states [as on the device]."),
]
ASK_FLAGS = [
    click.option("--context", type=Int(32768), help="Tokens of a session, prompt and answers."),
    click.option("--concurrency", type=Int(16), help="Inverse: requests that run at once."),
    click.option("--sessions", type=Int(48), default=0, help="Inverse: idle sessions to keep besides."),
    click.option("--boot-log", type=click.Path(path_type=Path), help="Read an SGLang boot log instead."),
    click.option("--json", "as_json", is_flag=True, help="Machine-readable."),
]


@click.command()
@flags(MODEL_FLAGS)
@flags(MEMORY_FLAGS)
@flags(CACHE_FLAGS)
@flags(MORE_FLAGS)
@flags(ASK_FLAGS)
@click.pass_context
def size(ctx: click.Context, as_json: bool, **values: Any) -> None:
    """Size both pools of a hybrid model before a boot.

    \b
    milepost size --model glm-5.3-flash --tp 2 --gpu h200 --weights 78GiB --kv-cache-dtype fp8
    milepost size --config MODEL_FOLDER --gpu-memory 80GiB --context 32768 --concurrency 16 --sessions 100
    milepost size --boot-log server.log
    """
    if values["list_models"]:
        print_models()
        return
    given = {name: "user" for name in values if ctx.get_parameter_source(name) is not ParameterSource.DEFAULT}
    if values["boot_log"] is not None:
        answers = _from_log(values, given)
    else:
        answers = size_answers(setup(values, given, chosen_model(values)))
    if as_json:
        click.echo(json.dumps(answers, indent=2))
    else:
        print_answers(answers)


def chosen_model(values: dict[str, Any]) -> Model:
    name, path = values["model"], values["config"]
    if (name is None) == (path is None):
        flag, value = ("--config", path) if path is not None else ("--model", "(not set)")
        works = "glm-5.3-flash" if path is None else "MODEL_FOLDER/config.json"
        raise ConfigError(flag, value, "give one of --model and --config", works)
    return models.find(name) if name is not None else models.read_config(*_config(path))


def _config(path: Path) -> tuple[dict[str, Any], str]:
    file = path / "config.json" if path.is_dir() else path
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError("--config", path, f"can't be read as JSON ({error})", "MODEL_FOLDER/config.json") from None
    if not isinstance(raw, dict):
        raise ConfigError("--config", path, "must hold a JSON object", "MODEL_FOLDER/config.json")
    return raw, file.resolve().parent.name


def setup(values: dict[str, Any], given: dict[str, str], model: Model, rest: int | None = None) -> Setup:
    """Everything that the answers need. `rest`: bytes for both pools if they are known already."""
    cache, resolved, notes = _cache(values, model)
    layout = Layout(values["tp"], values["pp"], values["dp_size"], values["dcp_size"])
    formats = _formats(values, model)
    costs = _costs(values, cache, resolved, geo.measure(model, layout, formats))
    costs = replace(costs, attn_dp=layout.attn_dp, dcp=layout.dcp, draft_row=_draft_row(values, costs.footprint))
    notes += [*model.notes, *resolved.notes]
    if layout.pp > 1 and not model.ordered:
        notes.append("the order of this model's layers is not known: stages are cut from an even spread; use --config")
    if not model.context and values["context_length"] is None:
        notes.append("the model's context length is not known: the running limit of the KV pool is the lowest estimate")
    memory, sources = (rest, {}) if rest is not None else _memory(values, model, notes)
    wish = _wish(values, cache, model)
    settings = _settings(values, given, model, cache, resolved)
    settings += [Setting(name, *found) for name, found in sources.items()]
    return Setup(
        model,
        layout,
        formats,
        costs,
        wish,
        memory,
        "none" if cache.disable_radix_cache else resolved.strategy.name,
        cfg.held_slots(resolved),
        tuple(settings),
        tuple(notes),
        _demand(values),
        values["context"],
        _host(values),
    )


def _cache(values: dict[str, Any], model: Model) -> tuple[cfg.CacheConfig, cfg.Resolved, list[str]]:
    """Flags after role, layout and model have had their say, in that order; the user's always win."""
    cache, notes = pick(cfg.CacheConfig, values), []
    role, strategy = values["disaggregation_mode"], values["mamba_radix_cache_strategy"]
    if role not in ("null", "prefill", "decode"):
        raise ConfigError("--disaggregation-mode", role, "must be null, prefill or decode", "decode")
    if strategy is not None and strategy not in cfg.STRATEGIES:
        cfg.resolve(cache)
    if role == "decode":
        cache = replace(cache, disable_radix_cache=True, mamba_radix_cache_strategy=None)
        notes.append("decode role: no prefix cache, so one slot per request, whatever the strategy")
    elif role == "prefill" and strategy == "extra_buffer_lazy":
        raise ConfigError("--mamba-radix-cache-strategy", strategy, "is not possible in a PD role", "extra_buffer")
    if values["pp"] > 1 and not cache.disable_overlap_schedule:
        if strategy == "extra_buffer_lazy":
            allowed = f"needs the overlap schedule, which --pp {values['pp']} turns off"
            raise ConfigError("--mamba-radix-cache-strategy", strategy, allowed, "extra_buffer")
        cache = replace(cache, disable_overlap_schedule=True)
        notes.append("pipeline parallelism turns the overlap schedule off")
    cache = cfg.with_model(cache, model.defaults, model.hybrid)
    if role == "prefill" and cache.mamba_radix_cache_strategy == "extra_buffer_lazy":
        cache = replace(cache, mamba_radix_cache_strategy="extra_buffer")
    return cache, cfg.resolve(cache), notes


def _formats(values: dict[str, Any], model: Model) -> Formats:
    state, conv = values["mamba_ssm_dtype"] or model.state_dtype, values["mamba_conv_dtype"]
    for flag, name in (("--mamba-ssm-dtype", state), ("--mamba-conv-dtype", conv)):
        if name not in geo.STATE_DTYPES:
            raise ConfigError(flag, name, f"must be one of {', '.join(geo.STATE_DTYPES)}", "bfloat16")
    layout, pool = values["kv_layout"], values["index_pool"]
    if layout not in ("plain", "scaled"):
        raise ConfigError("--kv-layout", layout, "must be plain or scaled", "scaled")
    if pool is not None and pool < 1:
        raise ConfigError("--index-pool", pool, "must be at least 1", 4)
    return Formats(state, conv, geo.kv_dtype(values["kv_cache_dtype"]), layout == "scaled", pool)


def _costs(
    values: dict[str, Any], cache: cfg.CacheConfig, resolved: cfg.Resolved, footprint: geo.Footprint
) -> sizing.Costs:
    for flag in ("slot_bytes", "row_bytes", "speculative_num_draft_tokens"):
        if values[flag] is not None and values[flag] < 1:
            raise ConfigError(f"--{flag.replace('_', '-')}", values[flag], "must be at least 1", 4)
    for flag in ("slot_extra_bytes", "fixed_state_bytes", "speculative_draft_layers", "draft_row_bytes"):
        if (values[flag] or 0) < 0:
            raise ConfigError(f"--{flag.replace('_', '-')}", values[flag], "must not be negative", 0)
    steps = values["speculative_num_draft_tokens"] or 0
    if steps > cache.mamba_track_interval:
        allowed = f"must be at least --speculative-num-draft-tokens {steps}"
        raise ConfigError("--mamba-track-interval", cache.mamba_track_interval, allowed, 256)
    kept = not values["enable_linear_replayssm_spec"] and values["disaggregation_mode"] != "prefill"
    return sizing.Costs(
        geo.with_bytes(footprint, values["slot_bytes"], values["row_bytes"]),
        resolved.strategy.reserved,
        resolved.strategy.page,
        drafts=steps if kept else 0,
        extra_slot=values["slot_extra_bytes"],
        fixed=values["fixed_state_bytes"],
    )


def _draft_row(values: dict[str, Any], footprint: geo.Footprint) -> int:
    """KV of a token in the draft: its own, or layers like the model's."""
    if values["draft_row_bytes"] is not None:
        return int(values["draft_row_bytes"])
    layers = values["speculative_draft_layers"]
    if layers is None:
        layers = 1 if values["speculative_num_draft_tokens"] else 0
    return int(layers) * footprint.layer_row


def _wish(values: dict[str, Any], cache: cfg.CacheConfig, model: Model) -> sizing.Wish:
    return sizing.Wish(
        cache.mamba_full_memory_ratio or sizing.RATIO,
        cache.max_mamba_cache_size,
        cache.max_total_tokens,
        cache.max_running_requests,
        not cache.disable_radix_cache,
        values["context_length"] or model.context,
        cache.swa_full_tokens_ratio or sizing.WINDOW_RATIO,
        cache.chunked_prefill_size,
        "--memory-budget" if values["memory_budget"] else "--rest-memory" if values["rest_memory"] else "--gpu-memory",
    )


def _memory(values: dict[str, Any], model: Model, notes: list[str]) -> tuple[int, dict[str, tuple[str, str]]]:
    """Bytes for both pools of a rank, and where they come from."""
    given = [flag for flag in ("rest_memory", "memory_budget") if values[flag] is not None]
    if len(given) == 2:
        raise ConfigError("--memory-budget", values["memory_budget"], "does not go with --rest-memory", "4GiB")
    if given:
        flag = f"--{given[0].replace('_', '-')}"
        if values[given[0]] < 1:
            raise ConfigError(flag, values[given[0]], "must be above 0", "62GiB")
        for other in ("gpu", "gpu_memory", "weights", "weights_dtype", "mem_fraction_static"):
            if values[other] is not None:
                name = f"--{other.replace('_', '-')}"
                raise ConfigError(name, values[other], f"has no meaning with {flag}; leave one out", values[other])
        return values[given[0]], {"memory for both pools": (sizing.human(values[given[0]]), "user")}
    if values["gpu"] is None and values["gpu_memory"] is None:
        allowed = "must be set, or --gpu or --gpu-memory"
        raise ConfigError("--rest-memory", "(not set)", allowed, "62GiB")
    memory = values["gpu_memory"] if values["gpu_memory"] is not None else gpus.memory(values["gpu"])
    weights, source = _weights(values, model, notes)
    fraction, chosen = values["mem_fraction_static"], "user"
    if fraction is None:
        ranks = values["tp"] * values["pp"]
        fraction, chosen = sizing.default_fraction(memory, values["chunked_prefill_size"], ranks), "derived"
        notes.append("--mem-fraction-static is derived from SGLang's rule; what captured graphs take is not counted")
    if weights >= memory:
        raise _too_heavy(values, memory, weights)
    rest = sizing.rest_memory(memory, weights, fraction)
    return rest, {
        "GPU memory": (sizing.human(memory), "user"),
        "weights of a rank": (sizing.human(weights), source),
        "--mem-fraction-static": (f"{fraction:g}", chosen),
        "memory for both pools": (sizing.human(rest), "derived"),
    }


def _too_heavy(values: dict[str, Any], memory: int, weights: int) -> ConfigError:
    """The weights of a rank are larger than its memory."""
    allowed = f"the weights take {sizing.human(weights)} of the {sizing.human(memory)} of a rank"
    if values["weights"] is not None:
        return ConfigError("--weights", sizing.human(weights), allowed, sizing.human(memory // 2))
    works = values["tp"]
    while weights * values["tp"] / works > 0.8 * memory:
        works *= 2
    return ConfigError("--tp", values["tp"], allowed, works)


def _weights(values: dict[str, Any], model: Model, notes: list[str]) -> tuple[int, str]:
    """Bytes of the weights of one rank: given, from the checkpoint beside the config, or parameters times dtype."""
    if values["weights"] is not None:
        return values["weights"], "user"
    ranks = values["tp"] * values["pp"]
    total = _checkpoint(values["config"]) if values["weights_dtype"] is None else 0
    if not total:
        name = values["weights_dtype"] or "bfloat16"
        if name not in WEIGHT_DTYPES:
            raise ConfigError("--weights-dtype", name, f"must be one of {', '.join(WEIGHT_DTYPES)}", "fp8")
        if not model.params:
            raise ConfigError("--weights", "(not set)", "must be set: the number of parameters is not known", "70GiB")
        total = int(model.params * WEIGHT_DTYPES[name])
        notes.append(f"weights are estimated as {model.params:g} parameters in {name}; parts stay unquantised")
    if ranks > 1:
        notes.append(f"weights are divided evenly over {ranks} ranks; replicated parts make a rank's share larger")
    return -(-total // ranks), "derived"


def _checkpoint(path: Path | None) -> int:
    """Bytes of the safetensors beside a config, by their index if there is one; 0 without any."""
    if path is None:
        return 0
    folder = path if path.is_dir() else path.parent
    index = folder / "model.safetensors.index.json"
    if index.exists():
        try:
            return int(json.loads(index.read_text(encoding="utf-8"))["metadata"]["total_size"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            allowed = f"{index.name} has no total size ({error!r}); use --weights"
            raise ConfigError("--config", path, allowed, f"{path} --weights 70GiB") from None
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def _demand(values: dict[str, Any]) -> sizing.Demand | None:
    running, context, sessions = values["concurrency"], values["context"], values["sessions"]
    for flag, value, least in (("--concurrency", running, 1), ("--context", context, 1), ("--sessions", sessions, 0)):
        if value is not None and value < least:
            raise ConfigError(flag, value, f"must be at least {least}", max(least, 16))
    if running is None:
        if sessions:
            raise ConfigError("--concurrency", "(not set)", "must be set with --sessions", 16)
        return None
    if context is None:
        raise ConfigError("--context", "(not set)", "must be set with --concurrency", 32768)
    for flag in ("max_mamba_cache_size", "max_total_tokens", "max_running_requests"):
        if values[flag] is not None:
            name = f"--{flag.replace('_', '-')}"
            raise ConfigError(name, values[flag], "is what --concurrency asks for; leave one out", values[flag])
    return sizing.Demand(running, context, sessions, values["chunked_prefill_size"])


def _host(values: dict[str, Any]) -> tuple[float | None, int | None, int | None]:
    """Ratio, bytes in all, bytes for states."""
    ratio, total, states = values["hicache_ratio"], values["hicache_size"], values["hicache_mamba_size"]
    flags = ("--hicache-ratio", ratio, 2), ("--hicache-size", total, 32), ("--hicache-mamba-size", states, 8)
    for flag, value, works in flags:
        if value is not None and value <= 0:
            raise ConfigError(flag, f"{value:g}", "must be above 0", works)
    if states is not None and total is None:
        allowed = "needs --hicache-size, of which it is a part"
        raise ConfigError("--hicache-mamba-size", f"{states:g}", allowed, "8 --hicache-size 32")
    if states is not None and states > total:
        allowed = f"must be at most the whole host budget (--hicache-size {total:g})"
        raise ConfigError("--hicache-mamba-size", f"{states:g}", allowed, f"{total / 2:g}")
    return ratio, None if total is None else int(total * 1e9), None if states is None else int(states * 1e9)


def _settings(
    values: dict[str, Any], given: dict[str, str], model: Model, cache: cfg.CacheConfig, resolved: cfg.Resolved
) -> list[Setting]:
    """The resolved table: default, model, user or derived."""

    def source(name: str, model_set: bool = False, derived: bool = False) -> str:
        return given.get(name) or ("derived" if derived else "model" if model_set else "default")

    defaults = model.defaults
    role = values["disaggregation_mode"] == "decode"
    strategy = "derived" if role else source("mamba_radix_cache_strategy", defaults.strategy is not None)
    ratio = cache.mamba_full_memory_ratio or sizing.RATIO
    dtype = values["mamba_ssm_dtype"] or model.state_dtype
    overlap = source("disable_overlap_schedule", derived=values["pp"] > 1)
    rows = [
        ("--mamba-full-memory-ratio", ratio, source("mamba_full_memory_ratio", defaults.ratio is not None)),
        ("--mamba-radix-cache-strategy", "none" if cache.disable_radix_cache else resolved.strategy.name, strategy),
        ("slots per request", resolved.strategy.reserved, "derived"),
        ("--max-mamba-cache-size", cache.max_mamba_cache_size, source("max_mamba_cache_size")),
        ("--max-total-tokens", cache.max_total_tokens, source("max_total_tokens")),
        ("--max-running-requests", cache.max_running_requests, source("max_running_requests")),
        ("--page-size", resolved.strategy.page, source("page_size")),
        ("--mamba-ssm-dtype", dtype, source("mamba_ssm_dtype", model.state_dtype != "float32")),
        ("--kv-cache-dtype", geo.kv_dtype(values["kv_cache_dtype"]), source("kv_cache_dtype")),
        (
            "--context-length",
            values["context_length"] or model.context or None,
            source("context_length", model.context > 0),
        ),
        ("overlap schedule", "off" if cache.disable_overlap_schedule else "on", overlap),
    ]
    if values["speculative_num_draft_tokens"]:
        layers = values["speculative_draft_layers"]
        where = source("speculative_draft_layers", derived=True)
        rows.append(("--speculative-draft-layers", 1 if layers is None else layers, where))
    if model.window is not None:
        windows = cache.swa_full_tokens_ratio or sizing.WINDOW_RATIO
        where = source("swa_full_tokens_ratio", defaults.window_ratio is not None)
        rows.append(("--swa-full-tokens-ratio", windows, where))
    return [Setting(name, str(value) if value is not None else "(not set)", where) for name, value, where in rows]


def _from_log(values: dict[str, Any], given: dict[str, str]) -> dict[str, Any]:
    """Answers from measured bytes. Without a model all known ones are tried."""
    path = values["boot_log"]
    try:
        log = bootlog.read(path.read_text(encoding="utf-8", errors="replace"))
    except OSError as error:
        raise ConfigError("--boot-log", path, f"can't be read ({error.strerror})", "server.log") from None
    except ConfigError:
        raise
    except MilepostError as error:
        raise ConfigError("--boot-log", path, str(error), "server.log") from None
    named = values["model"] is not None or values["config"] is not None
    candidates = [chosen_model(values)] if named else list(models.TABLE.values())
    layout = Layout(values["tp"], values["pp"], values["dp_size"], values["dcp_size"])
    if "kv_cache_dtype" not in given and log.kv_dtype:
        values = {**values, "kv_cache_dtype": log.kv_dtype}
    fixed = {"tp", "pp", "dp_size", "dcp_size"} & set(given)
    found = bootlog.explain(log, candidates, layout if fixed else None, _formats(values, candidates[0]))
    best = found[0]
    model = next(model for model in candidates if model.name == best.model)
    read = {
        "tp": best.layout.tp,
        "mamba_ssm_dtype": best.formats.state,
        "kv_cache_dtype": best.formats.kv,
        "page_size": log.page,
        "context_length": log.context,
        "mamba_full_memory_ratio": round(best.footprint.slot * (log.slots + 1) / (best.footprint.row * log.tokens), 4),
    }
    if not values["disable_radix_cache"]:  # SGLang's default, unless a line tells the slots of a request
        read["mamba_radix_cache_strategy"] = STRATEGY_OF_SLOTS.get(log.reserved or 0, "auto")
    read = {name: value for name, value in read.items() if value is not None and name not in given}
    known = {**dict.fromkeys(read, "derived"), **given}
    return log_answers(setup({**values, **read}, known, model, log.rest), log, found)
