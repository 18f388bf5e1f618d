"""Greedy text does not depend on what cache, schedule and pools do, for every family (tests/engine/test_metamorphic.py
does the same for the embedded model at length).

Each family answers the same prompts cold and alone, and then in every other way that there is. All logits on the way
must agree with the cold ones as far as the texts do. Texts may part only where the two best logits of the cold run lie
closer than two roundings. A router that chose another expert in a near tie would move logits by more than rounding; in
these prompts the nearest tie is 9e-6 of a score wide, some ten times what rounding moves scores by.
"""

from dataclasses import dataclass
from functools import cache

import numpy as np
import pytest

from milepost.core.checkpoint import (
    EXACT,
    NO_BUFFER,
    NO_CACHE,
    CheckpointPolicy,
    SlotStrategy,
    extra_buffer,
    extra_buffer_lazy,
    with_cap,
)
from milepost.core.scheduler import Limits
from tests.engine.world import World
from tests.model.oracle import VOCAB, worst

ANSWER = 8
ROUNDING = 1e-4  # of a logit; what the tests demand against transformers too
TWO, THREE = (CheckpointPolicy.level(level, 5) for level in (2, 3))
GRID = CheckpointPolicy.level(3, 64)  # for strategies that track at multiples of 64


@dataclass(frozen=True)
class Way:
    """How the prompts are run: `at_once` of them together, all of them `visits` times; `reused`: tokens, at least."""

    policy: CheckpointPolicy
    strategy: SlotStrategy = EXACT
    chunk: int = 48
    rows: int = 4_096
    slots: int = 60
    at_once: int = 1
    visits: int = 1
    reused: int = 0
    preempted: int = 0

    def world(self, decoder) -> World:
        return World(
            self.rows,
            self.slots,
            self.policy,
            with_cap(self.strategy, None, self.policy),
            Limits(8, self.chunk, 4_096),
            decoder=decoder,
        )


WAYS = {
    "off, together": Way(NO_CACHE, at_once=8),
    "level 2, chunks of 16": Way(TWO, chunk=16, reused=300),
    "level 3, chunks of 64": Way(THREE, chunk=64, reused=300),
    "level 2, twice": Way(TWO, chunk=512, visits=2, reused=600),
    "level 3, together, twice": Way(THREE, at_once=8, visits=2, reused=600),
    "level 2, few rows": Way(TWO, rows=220, slots=5, at_once=8, visits=2, reused=300, preempted=1),
    "level 3, few rows": Way(THREE, rows=220, slots=9, at_once=8, visits=2, reused=300, preempted=1),
    "extra_buffer": Way(GRID, extra_buffer(1), chunk=128, at_once=8, visits=2, reused=600),
    "extra_buffer, pages": Way(GRID, extra_buffer(64), chunk=128, at_once=8, visits=2, reused=600),
    "extra_buffer_lazy": Way(GRID, extra_buffer_lazy(1), chunk=128, at_once=8, visits=2, reused=600),
    "no_buffer": Way(THREE, NO_BUFFER, at_once=3, visits=2, reused=600),
}


@cache
def prompts() -> list[np.ndarray]:
    """Cuts of one stem, on and off the kernel's grid, most with tails of their own."""
    chance = np.random.default_rng(0)
    stem = chance.integers(3, VOCAB, 200)
    cuts = ((1, 0), (50, 9), (120, 9), (120, 9), (199, 1), (64, 9), (64, 0), (128, 70))
    return [np.concatenate([stem[:cut], chance.integers(3, VOCAB, tail)]).astype(np.int32) for cut, tail in cuts]


@pytest.fixture(scope="session")
def cold(golden, decoders):
    """A world in which the prompts were run alone with the cache off."""
    world = World(policy=NO_CACHE, decoder=decoders(golden.folder), rows=4_096, slots=8)
    world.run(prompts(), ANSWER)
    return world


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_texts_equal_cold_ones(cold, way):
    world = way.world(cold.decoder)
    for _ in range(way.visits):
        numbers = world.run(prompts(), ANSWER, way.at_once)
        for reference, number in enumerate(numbers, next(iter(cold.texts))):
            compare(cold, reference, world, number)
    assert sum(map(world.cached, numbers)) >= way.reused
    assert world.scheduler.counters.preempted_total >= way.preempted


def compare(cold: World, reference: int, world: World, number: int) -> None:
    expected, text = cold.texts[reference], world.texts[number]
    assert len(text) == len(expected) == ANSWER
    parted = next((i for i in range(ANSWER) if text[i] != expected[i]), ANSWER)
    for ours, theirs in zip(world.logits[number][: parted + 1], cold.logits[reference], strict=False):
        assert worst(ours, theirs) < ROUNDING, "a wrong state"
    assert parted == ANSWER or cold.margins[reference][parted] < 2 * ROUNDING
