"""From flags to a running engine: load, size the pools, allocate, put the parts together.

The lines that a boot prints come from the real pools.
"""

import json
import os
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from math import ceil
from pathlib import Path
from typing import Any

import torch

from milepost import config as cfg
from milepost.core import models, sizing
from milepost.core.geometry import Formats, Layout, Model, measure
from milepost.core.scheduler import Limits, Scheduler
from milepost.engine.executor import TorchExecutor
from milepost.engine.loop import EngineLoop
from milepost.engine.text import Text
from milepost.errors import ConfigError
from milepost.model import Memory, ModelConfig, load_decoder, load_model_config

DEMO = Path(__file__).parent / "demo"
DEFAULT_BUDGET = 2**30
"""Bytes for both pools when no size is given: small enough for any machine that can load a model."""

DEFAULT_FRACTION = 0.8
"""Part of a GPU's free memory for weights and both pools when no size is given."""

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
    """Everything but the HTTP server. Bad flags, and memory that is too small, end before weights load."""
    cfg.resolve(cache)
    folder = serve.model_path or DEMO
    device = check_device(serve.device)
    if serve.dtype != "auto":
        _choice("--dtype", serve.dtype, DTYPES)
    if not folder.is_dir():
        raise ConfigError("--model-path", folder, "must be a folder with config.json and safetensors", DEMO)
    model = load_model_config(folder)
    shape = models.read_config(json.loads((folder / "config.json").read_text(encoding="utf-8")), folder.name)
    own = replace(shape.defaults, strategy=None)  # what SGLang prefers for a model; here `exact` reuses more
    cache = cfg.with_model(cache, own, shape.hybrid)
    resolved = cfg.resolve(cache, windows=shape.window is not None)
    context = _context(serve, model)
    text = Text.load(folder)
    state_dtype = _choice("--mamba-ssm-dtype", serve.mamba_ssm_dtype or shape.state_dtype, DTYPES)
    dtype_name = serve.dtype if serve.dtype != "auto" else model.dtype or "float32"
    sizes = cache.memory_budget, cache.mem_fraction_static, cache.max_mamba_cache_size, cache.max_total_tokens
    if device.type == "cuda" and sizes == (None,) * 4:
        cache = replace(cache, mem_fraction_static=DEFAULT_FRACTION)
    costs = _costs(shape, resolved, serve.mamba_ssm_dtype or shape.state_dtype, dtype_name)
    stored = 1 if model.weight_block else DTYPES.get(model.dtype or "", torch.float32).itemsize
    growth = max(1, DTYPES.get(dtype_name, torch.float32).itemsize / stored)
    pools = size(cache, costs, context, lambda fraction: _free(folder, device, growth, fraction))
    decoder = load_decoder(folder, device=device, dtype=serve.dtype)
    page = resolved.strategy.page
    memory = Memory(
        model,
        pools.slots,
        pools.rows + page - 1,
        window_rows=pools.windows.rows,
        kv_dtype=decoder.dtype,
        state_dtype=state_dtype,
        device=device,
    )
    predicted = costs.footprint.slot, costs.footprint.row, costs.footprint.window_row
    allocated = memory.slot_bytes, memory.row_bytes, memory.window_row_bytes
    assert allocated == predicted, f"{allocated}: not {predicted}"
    decoder.warm_up(memory)
    limits = Limits(pools.by_rows, cache.chunked_prefill_size, context)
    scheduler = Scheduler(pools.rows, pools.slots, limits, resolved.strategy, resolved.policy, pools.windows)
    lines = [*resolved.notes, *pools.notes, *sizing.boot_lines(costs, pools, whole_kv=True)]
    headroom = sizing.headroom_line(pools, resolved.strategy.reserved, cfg.held_slots(resolved))
    lines += [headroom] if headroom else []
    lines += _grid_lines(resolved.strategy.grid, context)
    lines += _window_lines(scheduler, cache.chunked_prefill_size)
    lines.append(f"max_total_num_tokens={pools.rows}, max_running_requests={pools.limit}, context_len={context}")
    name = serve.served_model_name or (folder.resolve().name if serve.model_path else "milepost-demo")
    info = _info(serve, cache, resolved, {"slot_bytes": memory.slot_bytes, "row_bytes": memory.row_bytes})
    info |= {"window_row_bytes": memory.window_row_bytes, "window_rows": pools.windows.rows}
    info |= {"model_type": model.model_type, "context_length": context, "dtype": str(decoder.dtype)}
    info |= {"max_mamba_cache_size": pools.slots, "max_total_tokens": pools.rows, "max_running_requests": pools.limit}
    executor = TorchExecutor(decoder, memory, strict=cache.strict_reuse)
    return Booted(EngineLoop(scheduler, executor, text, info), text, name, context, tuple(lines))


def _grid_lines(grid: int, context: int) -> list[str]:
    """Zero reuse by design is said, not left to be found."""
    if grid == 1:
        return []
    if context <= grid:
        return [f"the prefix cache is inert: requests of up to {context} tokens never reach the grid of {grid}"]
    return [f"minimum length that can be reused: {grid} tokens, the checkpoint grid"]


def _window_lines(scheduler: Scheduler, chunk: int) -> list[str]:
    """What a window pool that is small makes of prefills and of concurrency."""
    windows, strategy, fits, lines = scheduler.windows, scheduler.strategy, scheduler.limits.chunk, []
    if fits < chunk:
        line = f"prefill chunks are cut from {chunk} to {fits} tokens: the window pool has {windows.rows} rows"
        lines.append(line + ", and leave no checkpoint" * (fits < strategy.grid))
    beside = (windows.rows - fits + 1) // (strategy.windows * windows.reach + 1)
    if windows.reach and beside < scheduler.running_limit:
        lines.append(f"the window pool lets {beside} long requests run beside a prefill chunk of {fits} tokens")
    return lines


def _costs(shape: Model, resolved: cfg.Resolved, state_dtype: str, dtype: str) -> sizing.Costs:
    """Bytes as milepost.model allocates them: windows and KV in the dtype of the weights."""
    footprint = measure(shape, Layout(), Formats(state_dtype, dtype, dtype, own_index=True))
    strategy = resolved.strategy
    return sizing.Costs(footprint, strategy.reserved, strategy.page, windows=strategy.windows)


def size(cache: cfg.CacheConfig, costs: sizing.Costs, context: int, free: Callable[[float], int]) -> sizing.Pools:
    """The pools: of the budget, of a fraction of the memory, as pinned, or of a budget that suits any machine.

    `free(fraction)` are the bytes for both pools. Without a budget, pinned sizes are taken as they are.
    """
    wish = sizing.Wish(
        cache.mamba_full_memory_ratio or sizing.RATIO,
        cache.max_mamba_cache_size,
        cache.max_total_tokens,
        cache.max_running_requests,
        not cache.disable_radix_cache,
        context,
        cache.swa_full_tokens_ratio or sizing.WINDOW_RATIO,
        cache.chunked_prefill_size,
    )
    if cache.memory_budget is not None:
        return sizing.size(cache.memory_budget, costs, wish)
    if cache.mem_fraction_static is not None:
        return sizing.size(free(cache.mem_fraction_static), costs, replace(wish, memory_flag="--mem-fraction-static"))
    budget = DEFAULT_BUDGET
    if wish.slots is not None:
        budget = max(budget, 2 * costs.states(wish.slots))
    if wish.tokens is not None:
        pools = sizing.size(budget, costs, replace(wish, tokens=None))
        wish = replace(wish, slots=pools.slots)
        token = costs.row + wish.window_ratio * costs.footprint.window_row
        budget = max(budget, costs.states(pools.slots) + ceil(wish.tokens * token))
    return sizing.size(budget, costs, wish)


def _free(folder: Path, device: torch.device, growth: float, fraction: float) -> int:
    """Bytes for both pools when these and the weights may take `fraction` of the memory that is free now.

    The weights take `growth` times what their files do.
    """
    weights = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    return sizing.rest_memory(free_memory(device), int(weights * growth), fraction)


def free_memory(device: torch.device) -> int:
    """Bytes that are free on the device; for a CPU what the kernel calls available, within the container's limit."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    available = re.search(r"MemAvailable:\s+(\d+) kB", _text("/proc/meminfo"))
    free = int(available[1]) * 1024 if available else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit, used = _text("/sys/fs/cgroup/memory.max").strip(), _text("/sys/fs/cgroup/memory.current").strip()
    return min(free, int(limit) - int(used)) if limit.isdigit() and used.isdigit() else free


def _text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="ascii")
    except OSError:
        return ""


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
