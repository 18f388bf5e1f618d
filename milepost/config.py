"""Flags, read once, validated once, frozen.

The flags that `serve` and `replay` share are in `CacheConfig`; what they mean for the core (a `SlotStrategy` and
a `CheckpointPolicy`) is worked out by `resolve`. A bad value ends here, before anything is loaded, with one line
that names the flag, the value, what is allowed, and a value that works.
"""

from dataclasses import dataclass, replace
from pathlib import Path

from milepost.core import checkpoint as cp
from milepost.core.checkpoint import CHOICES, LEVELS, Cap, CheckpointPolicy, Reason, SlotStrategy
from milepost.core.geometry import Defaults
from milepost.errors import ConfigError

STRATEGIES = ("exact", "extra_buffer", "extra_buffer_lazy", "no_buffer", "auto")


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """What decides about pools, checkpoints and slots. None: not set by the user."""

    max_running_requests: int | None = None
    chunked_prefill_size: int = 2048
    max_mamba_cache_size: int | None = None
    max_total_tokens: int | None = None
    mamba_full_memory_ratio: float | None = None
    swa_full_tokens_ratio: float | None = None
    mem_fraction_static: float | None = None
    memory_budget: int | None = None
    hybrid_cache_checkpoints_level: int = 2
    checkpoint_at: str | None = None
    mamba_max_states_per_path: int | None = None
    mamba_path_cap: str | None = None
    mamba_track_interval: int = 256
    mamba_radix_cache_strategy: str | None = None
    disable_overlap_schedule: bool = False
    page_size: int | None = None
    disable_radix_cache: bool = False
    strict_reuse: bool = False


@dataclass(frozen=True, slots=True)
class ServeConfig:
    """What decides about the model and the server."""

    model_path: Path | None = None
    served_model_name: str | None = None
    host: str = "127.0.0.1"
    port: int = 30000
    device: str = "cpu"
    dtype: str = "auto"
    mamba_ssm_dtype: str | None = None
    context_length: int | None = None
    enable_cache_report: bool = True
    enable_metrics: bool = True
    keep_message_end: bool = False
    record_trace: str | None = None
    record_block: int = 64


@dataclass(frozen=True, slots=True)
class Resolved:
    """What the core needs to know, and what the user should (`notes`, a line each)."""

    strategy: SlotStrategy
    policy: CheckpointPolicy
    notes: tuple[str, ...] = ()


def resolve(config: CacheConfig, windows: bool = False) -> Resolved:
    """Validate the flags against each other and turn them into core data. Raises `ConfigError`.

    `windows`: the model has sliding-window layers.
    """
    strategy = _strategy(config)
    policy = _policy(config, strategy, windows)
    if config.mamba_path_cap is not None and config.mamba_path_cap not in ("lazy", "eager"):
        raise ConfigError("--mamba-path-cap", config.mamba_path_cap, "must be lazy or eager", "lazy")
    cap = Cap(config.mamba_path_cap) if config.mamba_path_cap else None
    strategy = cp.with_cap(strategy, cap, policy)
    _positive("--max-running-requests", config.max_running_requests, 64)
    _positive("--max-total-tokens", config.max_total_tokens, 65536)
    slots = config.max_mamba_cache_size
    if slots is not None and slots < strategy.reserved:
        raise ConfigError(
            "--max-mamba-cache-size",
            slots,
            f"must be at least {strategy.reserved}, the slots of one running request ({strategy.name})",
            strategy.reserved * 8,
        )
    _sizes(config)
    rows = config.max_total_tokens
    if rows is not None and rows < strategy.page:
        raise ConfigError("--max-total-tokens", rows, f"must hold a page of {strategy.page}", strategy.page * 1024)
    chunk = config.chunked_prefill_size
    _positive("--chunked-prefill-size", chunk, 2048)
    if config.strict_reuse and chunk % strategy.grid:
        allowed = f"must be a multiple of {strategy.grid} with --strict-reuse"
        raise ConfigError("--chunked-prefill-size", chunk, allowed, -(-chunk // strategy.grid) * strategy.grid)
    return Resolved(strategy, policy, tuple(_notes(config, strategy)))


def with_model(config: CacheConfig, defaults: Defaults, hybrid: bool = True) -> CacheConfig:
    """The flags with what the model sets unless the user did: ratios and the slot strategy.

    A strategy that the flags rule out (strict reuse, no prefix cache, no overlap) is not put in.
    Raises `ConfigError` where the user asks for a strategy that the architecture lacks.
    """
    ratio, windows, strategy = defaults.ratio, defaults.window_ratio, config.mamba_radix_cache_strategy
    if strategy is not None and not hybrid:
        allowed = "has no meaning for a model without recurrent states; leave it out"
        raise ConfigError("--mamba-radix-cache-strategy", strategy, allowed, "exact (and a hybrid model)")
    if config.mamba_full_memory_ratio is None and ratio is not None:
        config = replace(config, mamba_full_memory_ratio=ratio)
    if config.swa_full_tokens_ratio is None and windows is not None:
        config = replace(config, swa_full_tokens_ratio=windows)
    if not defaults.extra_buffer and strategy in ("extra_buffer", "extra_buffer_lazy"):
        allowed = "needs snapshots inside a prefill, which this architecture lacks in SGLang"
        raise ConfigError("--mamba-radix-cache-strategy", strategy, allowed, "no_buffer")
    if not defaults.extra_buffer and strategy == "auto":
        return replace(config, mamba_radix_cache_strategy="no_buffer", disable_overlap_schedule=True)
    if strategy is None and defaults.strategy and not (config.strict_reuse or config.disable_radix_cache):
        lazy = defaults.strategy == "extra_buffer_lazy" and config.disable_overlap_schedule
        return replace(config, mamba_radix_cache_strategy="extra_buffer" if lazy else defaults.strategy)
    return config


def held_slots(resolved: Resolved) -> int:
    """Slots that a running request really holds: the working one, tracking ones, and a pinned checkpoint of chunks."""
    strategy = resolved.strategy
    pinned = strategy.rolling and Reason.CHUNK in resolved.policy.reasons
    return min(strategy.reserved, 1 + strategy.tracking + pinned)


def _sizes(config: CacheConfig) -> None:
    """The flags that divide memory."""
    ratio, windows, fraction = config.mamba_full_memory_ratio, config.swa_full_tokens_ratio, config.mem_fraction_static
    if ratio is not None and not 0 < ratio < float("inf"):
        raise ConfigError("--mamba-full-memory-ratio", ratio, "must be above 0", 0.9)
    if windows is not None and not 0 < windows <= 1:
        raise ConfigError("--swa-full-tokens-ratio", windows, "must be above 0 and at most 1", 0.8)
    if fraction is not None and not 0 < fraction < 1:
        raise ConfigError("--mem-fraction-static", fraction, "must be between 0 and 1", 0.85)
    if config.memory_budget is not None and config.memory_budget < 1:
        raise ConfigError("--memory-budget", config.memory_budget, "must be above 0", "4GiB")
    if config.memory_budget is not None and fraction is not None:
        raise ConfigError("--mem-fraction-static", fraction, "does not go with --memory-budget; leave one out", 0.85)


def _notes(config: CacheConfig, strategy: SlotStrategy) -> list[str]:
    notes = []
    if config.mamba_max_states_per_path is not None:
        notes.append("--mamba-max-states-per-path is deprecated; it still sets the soft cap per path")
    if config.chunked_prefill_size < strategy.grid:
        notes.append(
            f"--chunked-prefill-size {config.chunked_prefill_size} is below the checkpoint grid of "
            f"{strategy.grid}: prefills leave no checkpoint"
        )
    return notes


def _strategy(config: CacheConfig) -> SlotStrategy:
    name = config.mamba_radix_cache_strategy
    page = config.page_size or 1
    _positive("--page-size", config.page_size, 64)
    if name is not None and name not in STRATEGIES:
        raise ConfigError("--mamba-radix-cache-strategy", name, f"must be one of {', '.join(STRATEGIES)}", "exact")
    if config.disable_radix_cache:
        if name is not None:
            allowed = "has no meaning with --disable-radix-cache; leave one of them out"
            raise ConfigError("--mamba-radix-cache-strategy", name, allowed, "exact (and the cache on)")
        return cp.STRICT if config.strict_reuse else cp.EXACT
    if name == "auto":
        name = "no_buffer" if config.disable_overlap_schedule and page == 1 else "extra_buffer"
    if name in (None, "exact"):
        if page != 1:
            raise ConfigError("--page-size", page, "must be 1 with exact, which has no pages", 1)
        return cp.STRICT if config.strict_reuse else cp.EXACT
    if config.strict_reuse:
        allowed = "does not go with --strict-reuse, which needs exact"
        raise ConfigError("--mamba-radix-cache-strategy", name, allowed, "exact")
    if name == "no_buffer":
        if page != 1:
            raise ConfigError("--page-size", page, "must be 1 with no_buffer", 1)
        return cp.NO_BUFFER
    if name == "extra_buffer_lazy":
        if config.disable_overlap_schedule:
            allowed = "needs the overlap schedule; leave --disable-overlap-schedule out"
            raise ConfigError("--mamba-radix-cache-strategy", name, allowed, "extra_buffer")
        return cp.extra_buffer_lazy(page)
    return cp.extra_buffer(page, overlap=not config.disable_overlap_schedule)


def _policy(config: CacheConfig, strategy: SlotStrategy, windows: bool) -> CheckpointPolicy:
    level, interval = config.hybrid_cache_checkpoints_level, config.mamba_track_interval
    if level not in LEVELS:
        raise ConfigError("--hybrid-cache-checkpoints-level", level, "must be 2 or 3", 2)
    _positive("--mamba-track-interval", interval, 256)
    if interval % strategy.page:
        works = max(1, interval // strategy.page) * strategy.page
        raise ConfigError(
            "--mamba-track-interval", interval, f"must be a multiple of the page of {strategy.page}", works
        )
    policy = CheckpointPolicy.level(level, interval, windows)
    if config.checkpoint_at is not None:
        policy = replace(policy, reasons=_reasons(config.checkpoint_at))
    cap = config.mamba_max_states_per_path
    if cap is not None:
        if cap == 0 or cap < -1:
            allowed = "must be -1 (no cap) or at least 1"
            raise ConfigError("--mamba-max-states-per-path", cap, allowed, 1)
        policy = replace(policy, states_per_path=None if cap == -1 else cap)
    if config.disable_radix_cache:
        return cp.NO_CACHE
    if strategy.prefilled_only:
        reasons = {cp.STRICT_REASONS.get(reason, reason) for reason in policy.reasons}
        policy = replace(policy, reasons=frozenset(reasons))
    return policy


def _reasons(names: str) -> frozenset[Reason]:
    chosen = [name.strip() for name in names.split(",") if name.strip()]
    unknown = [name for name in chosen if name not in CHOICES]
    if unknown or not chosen:
        allowed = f"must be names out of {', '.join(CHOICES)}, separated by commas"
        raise ConfigError("--checkpoint-at", names, allowed, "fork,finish")
    return frozenset(CHOICES[name] for name in chosen)


def _positive(flag: str, value: int | None, works: int) -> None:
    if value is not None and value < 1:
        raise ConfigError(flag, value, "must be at least 1", works)
