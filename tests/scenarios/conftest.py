"""Worlds that are checked when their scenario is over."""

import pytest

from tests.scenarios.world import World


@pytest.fixture
def world():
    """`world(strategy, …)` makes a world; at the end of the test each one is drained and must balance."""
    made: list[World] = []

    def make(*args: object, kind: type[World] = World, **more: object) -> World:
        made.append(kind(*args, **more))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for each in made:
        each.close()
