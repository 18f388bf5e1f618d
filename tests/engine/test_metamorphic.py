"""Greedy text does not depend on what the cache, the schedule or the pools do.

In fp32, on 50 prompts of 1 to 3,000 tokens that share stems. Where a text parts from the cold one, the two best
logits of the cold run must be closer than rounding (1e-3) at that step, and such cases must be few: anything else
is a wrong state.
"""

from functools import cache

import numpy as np
import pytest

from milepost.core.checkpoint import NO_CACHE, CheckpointPolicy, extra_buffer, with_cap
from milepost.core.scheduler import Limits
from tests.engine.world import World, demo_tokens

ANSWER = 12
ROUNDING = 1e-3


@cache
def prompts() -> list[np.ndarray]:
    """Cuts of five stems at lengths spread evenly in the logarithm, each with a tail of its own."""
    chance = np.random.default_rng(7)
    text = demo_tokens()
    stems = [np.roll(text, -int(chance.integers(0, text.size))) for _ in range(5)]
    lengths = np.unique(np.geomspace(1, 3000, 50).astype(int))
    extra = [int(n) for n in chance.integers(20, 1200, 50 - lengths.size)]
    made = []
    for i, length in enumerate([*lengths, *extra]):
        tail = chance.integers(3, 4096, min(int(length), 5 if i % 3 else 0))
        made.append(np.concatenate([stems[i % 5][: int(length) - tail.size], tail]).astype(np.int32))
    order = chance.permutation(len(made))
    assert len(made) == 50 and min(map(len, made)) == 1 and max(map(len, made)) == 3000
    return [made[i] for i in order]


@cache
def cold() -> tuple[list[list[int]], list[list[float]]]:
    """Texts and margins with the cache off, one request at a time."""
    world = World(policy=NO_CACHE)
    numbers = world.run(prompts(), ANSWER)
    assert all(world.cached(n) == 0 for n in numbers)
    return [world.texts[n] for n in numbers], [world.margins[n] for n in numbers]


def compare(world: World, numbers: list[int]) -> None:
    texts, margins = cold()
    parted = 0
    for number, text, margin in zip(numbers, texts, margins, strict=True):
        other = world.texts[number]
        assert len(other) == ANSWER
        if other != text:
            step = next(i for i in range(ANSWER) if other[i] != text[i])
            assert margin[step] < ROUNDING, f"a wrong state: parted at {step}, the margin was {margin[step]:.4f}"
            parted += 1
    assert parted <= 2, f"{parted} of 50 texts parted by rounding"


@pytest.mark.parametrize("chunk", [16, 64, 512])
@pytest.mark.parametrize("level", [2, 3])
def test_cache_on_alone(level, chunk):
    """One request at a time; with the largest chunk also a second visit."""
    world = World(policy=CheckpointPolicy.level(level, 5), limits=Limits(8, chunk, 32_768), slots=400)
    first = world.run(prompts(), ANSWER)
    compare(world, first)
    if chunk == 512:
        again = world.run(prompts(), ANSWER)
        compare(world, again)
        assert sum(map(world.cached, again)) > sum(map(world.cached, first)) > 0


@pytest.mark.parametrize("level", [2, 3])
def test_eight_at_once(level):
    world = World(policy=CheckpointPolicy.level(level, 5), limits=Limits(8, 64, 32_768))
    numbers = world.run(prompts(), ANSWER, at_once=8)
    compare(world, numbers)
    assert sum(world.cached(n) for n in numbers) > 0


def test_cache_off_eight_at_once():
    world = World(policy=NO_CACHE)
    compare(world, world.run(prompts(), ANSWER, at_once=8))


@pytest.mark.parametrize("level", [2, 3])
def test_preemption(level):
    """A pool so small that running requests are preempted, and come back."""
    world = World(rows=3_011, slots=9, policy=CheckpointPolicy.level(level, 4), limits=Limits(8, 256, 32_768))
    for i in range(8):
        world.submit(demo_tokens()[i * 340 : i * 340 + 365], 40)
    world.drain()
    assert world.scheduler.counters.preempted_total > 0
    numbers = [world.submit(prompt, ANSWER) for prompt in prompts()]
    world.drain()
    compare(world, numbers)


@pytest.mark.parametrize("page", [1, 64])
def test_compatibility_strategy(page):
    """`extra_buffer`: snapshots on a grid, donation by exchange, pages; the same texts."""
    policy = CheckpointPolicy.level(3, 64)
    world = World(
        rows=64_000 // page * page, policy=policy, strategy=with_cap(extra_buffer(page), None, policy), slots=80
    )
    compare(world, world.run(prompts(), ANSWER, at_once=8))
    again = world.run(prompts(), ANSWER, at_once=8)
    compare(world, again)
    assert sum(world.cached(n) for n in again) > 0
