"""From bytes to pools: how a budget is split, how many requests may run, and the lines that a boot prints.

Sizes are in bytes; every "GB" of the boot lines is 2^30 bytes, as in SGLang (docs/design.md, sizing).
"""

from dataclasses import dataclass

GIB = 2**30


@dataclass(frozen=True, slots=True)
class PoolSizes:
    """Usable slots and rows; the dummies come on top."""

    slots: int
    rows: int


def split(budget: int, slot_bytes: int, row_bytes: int, ratio: float, page: int = 1) -> PoolSizes:
    """Divide `budget` so that state pool : KV pool = `ratio`. The dummy slot is charged, the dummy page is not."""
    slots = int((budget * ratio / (1 + ratio) - slot_bytes) // slot_bytes)
    return rest(budget, slot_bytes, row_bytes, max(slots, 0), page)


def rest(budget: int, slot_bytes: int, row_bytes: int, slots: int, page: int = 1) -> PoolSizes:
    """`slots` are given; rows get what is left of `budget`, in whole pages."""
    left = budget - (slots + 1) * slot_bytes
    return PoolSizes(slots, max(0, left // row_bytes // page * page))


def running_limit(wanted: int | None, slots: int, rows: int, context: int, reserved: int) -> tuple[int, int]:
    """How many requests may run at once: (limit, limit by the KV pool alone).

    Unless `wanted` is given it is estimated from the KV pool as int(rows / context · 512), within 2048 … 4096;
    never more than half the rows, nor than the slots allow at `reserved` slots a request.
    """
    estimate = min(max(int(rows / context * 512), 2048), 4096)
    by_rows = max(1, min(wanted or estimate, rows // 2))
    return min(by_rows, slots // reserved), by_rows


def boot_lines(pools: PoolSizes, conv_bytes: int, temporal_bytes: int, kv_bytes: int, kv_dtype: str) -> list[str]:
    """The two lines on the pools; sizes include the dummies."""
    return [
        f"Mamba Cache is allocated. max_mamba_cache_size: {pools.slots}, "
        f"conv_state size: {conv_bytes / GIB:.2f}GB, ssm_state size: {temporal_bytes / GIB:.2f}GB",
        f"KV Cache is allocated. dtype: {kv_dtype}, #tokens: {pools.rows}, KV size: {kv_bytes / GIB:.2f} GB",
    ]


def clamp_line(limit: int, slots: int, reserved: int) -> str:
    """The third line, for when the state pool and not the KV pool limits concurrency."""
    return (
        f"max_running_requests is capped to {limit} by the mamba state cache "
        f"(max_mamba_cache_size={slots}, {reserved} state slots per request)"
    )
