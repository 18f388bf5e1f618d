"""A scheduler whose unit is a block of `grain` tokens: pools, chunk, grid, page and interval counted in blocks."""

from dataclasses import replace
from math import lcm

from milepost.core.checkpoint import CheckpointPolicy, SlotStrategy
from milepost.core.scheduler import Limits, Scheduler
from milepost.core.window import Windows


def scheduler_in(
    grain: int, pools: tuple[int, int, Windows], limits: Limits, strategy: SlotStrategy, policy: CheckpointPolicy
) -> Scheduler:
    """All arguments in tokens; `pools` are (slots, KV rows, windows). What is smaller than a block becomes one.

    A decoded block stands for `grain` steps, so beside prefills decodes take part in every `grain`-th plan only.
    """
    slots, rows, windows = pools
    reach = -(-windows.reach // grain)
    page = max(1, strategy.page // grain)
    strategy = replace(strategy, page=page, grid=lcm(max(1, strategy.grid // grain), page))
    policy = replace(policy, interval=max(1, policy.interval // grain))
    chunk = max(strategy.grid, limits.chunk // grain) if grain > 1 else limits.chunk
    limits = replace(limits, chunk=chunk, context=max(1, limits.context // grain), decode_every=grain)
    if reach:
        windows = Windows(max(windows.rows // grain, strategy.windows * reach + 1), reach)
    return Scheduler(rows // grain // page * page, slots, limits, strategy, policy, windows)
