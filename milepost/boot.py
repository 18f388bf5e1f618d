"""From flags to a running engine: load, size the pools, allocate, put the parts together.

The lines that a boot prints come from the real pools.
"""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from milepost import config as cfg
from milepost.core import sizing
from milepost.core.scheduler import Limits, Scheduler
from milepost.engine.executor import TorchExecutor
from milepost.engine.loop import EngineLoop
from milepost.engine.text import Text
from milepost.errors import ConfigError
from milepost.model import Decoder, Memory, ModelConfig, load_decoder, load_model_config

DEMO = Path(__file__).parent / "demo"
RATIO = 0.9
DEFAULT_BUDGET = 2**30
"""Bytes for both pools when no size is given: small enough for any machine that can load a model."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class Booted:
    """`lines` are for the log; `context` is the context length in tokens."""

    engine: EngineLoop
    text: Text
    name: str
    context: int
    lines: tuple[str, ...]


def boot(serve: cfg.ServeConfig, cache: cfg.CacheConfig) -> Booted:
    """Everything but the HTTP server. Raises `ConfigError` and `ModelError` before weights load where it can."""
    resolved = cfg.resolve(cache)
    folder = serve.model_path or DEMO
    device = check_device(serve.device)
    state_dtype = _choice("--mamba-ssm-dtype", serve.mamba_ssm_dtype or "float32", DTYPES)
    if serve.dtype != "auto":
        _choice("--dtype", serve.dtype, DTYPES)
    if not folder.is_dir():
        raise ConfigError("--model-path", folder, "must be a folder with config.json and safetensors", DEMO)
    model = load_model_config(folder)
    context = _context(serve, model)
    text = Text.load(folder)
    decoder = load_decoder(folder, device=device, dtype=serve.dtype)
    pools = size(cache, model, decoder, state_dtype)
    if pools.slots < resolved.strategy.reserved:
        works = resolved.strategy.reserved * 8
        raise ConfigError("--max-mamba-cache-size", pools.slots, "the memory leaves no room for one request", works)
    strategy = resolved.strategy
    rows = pools.rows // strategy.page * strategy.page
    memory = Memory(
        model,
        pools.slots,
        rows + strategy.page - 1,
        kv_dtype=decoder.dtype,
        state_dtype=state_dtype,
        device=device,
    )
    decoder.warm_up(memory)
    limit, by_rows = sizing.running_limit(cache.max_running_requests, pools.slots, rows, context, strategy.reserved)
    limits = Limits(by_rows, cache.chunked_prefill_size, context)
    scheduler = Scheduler(rows, pools.slots, limits, strategy, resolved.policy)
    dtype = str(decoder.dtype)
    lines = [*resolved.notes]
    lines += sizing.boot_lines(pools, memory.conv_bytes, memory.temporal_bytes, memory.kv_bytes, dtype)
    if limit < by_rows:
        lines.append(sizing.clamp_line(limit, pools.slots, strategy.reserved))
    lines.append(f"max_total_num_tokens={rows}, max_running_requests={limit}, context_len={context}")
    name = serve.served_model_name or (folder.resolve().name if serve.model_path else "milepost-demo")
    info = _info(serve, cache, resolved, {"slot_bytes": memory.slot_bytes, "row_bytes": memory.row_bytes})
    info |= {"model_type": model.model_type, "context_length": context, "dtype": dtype}
    info |= {"max_mamba_cache_size": pools.slots, "max_total_tokens": rows, "max_running_requests": limit}
    executor = TorchExecutor(decoder, memory, strict=cache.strict_reuse)
    return Booted(EngineLoop(scheduler, executor, text, info), text, name, context, tuple(lines))


def size(cache: cfg.CacheConfig, model: ModelConfig, decoder: Decoder, state_dtype: torch.dtype) -> sizing.PoolSizes:
    """The pools asked for; what is not given comes out of the default budget at the default ratio."""
    one = Memory(model, 0, 0, kv_dtype=decoder.dtype, state_dtype=state_dtype)
    slots, rows = cache.max_mamba_cache_size, cache.max_total_tokens
    pools = sizing.split(DEFAULT_BUDGET, one.slot_bytes, one.row_bytes, RATIO)
    if slots is not None:
        pools = sizing.rest(max(DEFAULT_BUDGET, 2 * slots * one.slot_bytes), one.slot_bytes, one.row_bytes, slots)
    return sizing.PoolSizes(pools.slots, rows or pools.rows)


def check_device(name: str) -> torch.device:
    if name == "cpu" or (name.startswith("cuda") and torch.cuda.is_available()):
        return torch.device(name)
    allowed = "must be cpu or cuda" if not name.startswith("cuda") else "no CUDA device is available"
    raise ConfigError("--device", name, allowed, "cpu")


def _choice(flag: str, name: str, choices: dict[str, torch.dtype]) -> torch.dtype:
    if name not in choices:
        raise ConfigError(flag, name, f"must be one of {', '.join(choices)}", next(iter(choices)))
    return choices[name]


def _context(serve: cfg.ServeConfig, model: ModelConfig) -> int:
    longest = model.max_position_embeddings
    wanted = serve.context_length
    if wanted is not None and not 1 <= wanted <= longest:
        raise ConfigError("--context-length", wanted, f"must be 1 … {longest}, what the model allows", longest)
    return wanted or longest


def _info(
    serve: cfg.ServeConfig, cache: cfg.CacheConfig, resolved: cfg.Resolved, sizes: dict[str, int]
) -> dict[str, Any]:
    strategy, policy = resolved.strategy, resolved.policy
    flags = {**asdict(serve), **asdict(cache)}
    flags["model_path"] = str(serve.model_path) if serve.model_path else None
    return {
        **flags,
        **sizes,
        "strategy": strategy.name,
        "slots_per_request": strategy.reserved,
        "grid": strategy.grid,
        "checkpoint_reasons": sorted(reason.label for reason in policy.reasons),
        "states_per_path": policy.states_per_path if policy.states_per_path is not None else -1,
    }
