"""`--strict-reuse`: cached equals cold, bit for bit, whatever was cached and whoever shares the batch."""

import numpy as np
import pytest
import torch

from milepost.config import CacheConfig, resolve
from milepost.core.scheduler import Limits
from tests.engine.world import World, demo_decoder, demo_tokens

ANSWER = 6


def strict_world(level: int, dtype: torch.dtype, *, off: bool = False) -> World:
    flags = CacheConfig(strict_reuse=True, disable_radix_cache=off, hybrid_cache_checkpoints_level=level)
    resolved = resolve(flags)
    return World(
        policy=resolved.policy,
        strategy=resolved.strategy,
        limits=Limits(8, 256, 32_768),
        strict=True,
        decoder=demo_decoder(dtype),
    )


def prompts() -> list[np.ndarray]:
    text = demo_tokens()
    tails = [text[3000 + 50 * i : 3000 + 50 * i + n] for i, n in enumerate((1, 63, 64, 65, 200))]
    return [np.concatenate([text[:cut], tail]) for cut, tail in zip((500, 448, 64, 700, 701), tails, strict=True)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("level", [2, 3])
def test_cached_equals_cold_bit_for_bit(level, dtype):
    cold = strict_world(level, dtype, off=True)
    expected = cold.run(prompts(), ANSWER)
    warm = strict_world(level, dtype)
    warm.run(prompts(), ANSWER)
    for at_once in (1, 5):
        again = warm.run(prompts(), ANSWER, at_once=at_once)
        assert all(warm.cached(n) % 64 == 0 and warm.cached(n) > 0 for n in again)
        for number, reference in zip(again, expected, strict=True):
            assert warm.texts[number] == cold.texts[reference]
            for ours, theirs in zip(warm.logits[number], cold.logits[reference], strict=True):
                assert torch.equal(ours, theirs)
