"""The sampler: greedy, filters, and chance that depends on seed and position alone."""

from collections import Counter

import numpy as np
import pytest
import torch

from milepost.core.request import Sampling
from milepost.engine.sampler import chance, sample

PROBABILITIES = [0.4, 0.3, 0.2, 0.06, 0.04]
LOGITS = torch.tensor(PROBABILITIES).log()


def draws(sampling: Sampling, count: int = 4000) -> Counter[int]:
    """Tokens at `count` positions of one request."""
    return Counter(sample(LOGITS.expand(count, -1), [sampling] * count, range(count)))


def test_greedy_takes_the_best():
    logits = torch.tensor([[0.1, 3.0, 2.0], [5.0, -1.0, 4.9]])
    assert sample(logits, [Sampling(), Sampling(temperature=1.0, top_k=1)], [3, 9]) == [1, 0]


def test_plain_sampling_follows_the_probabilities():
    found = draws(Sampling(temperature=1.0, seed=7))
    assert [found[i] / 4000 for i in range(5)] == pytest.approx(PROBABILITIES, abs=0.03)


def test_temperature_sharpens():
    found = draws(Sampling(temperature=0.5, seed=7))
    squared = np.square(PROBABILITIES) / np.square(PROBABILITIES).sum()
    assert [found[i] / 4000 for i in range(5)] == pytest.approx(squared.tolist(), abs=0.03)


@pytest.mark.parametrize(
    ("filters", "left"),
    [
        ({"top_k": 2}, {0, 1}),
        ({"top_p": 0.69}, {0, 1}),  # 0.4 + 0.3 reach it
        ({"top_p": 0.71}, {0, 1, 2}),
        ({"min_p": 0.49}, {0, 1, 2}),  # about half of the best: 0.2
        ({"min_p": 0.51}, {0, 1}),
        ({"top_k": 3, "top_p": 0.5}, {0, 1}),
        ({"top_p": 1e-9}, {0}),
        ({"top_k": 99}, {0, 1, 2, 3, 4}),
    ],
)
def test_filters_leave_what_they_should(filters, left):
    found = draws(Sampling(temperature=1.0, seed=3, **filters))
    assert set(found) == left
    mass = sum(PROBABILITIES[i] for i in left)
    assert [found[i] / 4000 for i in sorted(left)] == pytest.approx(
        [PROBABILITIES[i] / mass for i in sorted(left)], abs=0.03
    )


def test_a_token_does_not_depend_on_its_batch_mates():
    sampling = Sampling(temperature=0.9, top_p=0.9, seed=11)
    mates = [Sampling(), Sampling(temperature=2.0, seed=1), sampling, Sampling(temperature=0.1, seed=5)]
    rows = torch.stack([LOGITS, LOGITS.flip(0), LOGITS, LOGITS])
    for position in range(50):
        (alone,) = sample(LOGITS[None], [sampling], [position])
        assert sample(rows, mates, [9, 8, position, 7])[2] == alone


def test_seeds_and_positions_give_other_numbers():
    numbers = {chance(seed, position) for seed in range(20) for position in range(20)}
    assert len(numbers) == 400 and all(0 <= n < 1 for n in numbers)
    assert np.mean(list(numbers)) == pytest.approx(0.5, abs=0.05)
    assert chance(2**63 - 1, 5) == chance(2**63 - 1, 5)
