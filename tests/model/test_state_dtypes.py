"""`--mamba-ssm-dtype`: a state stored narrower is computed in float32 and rounded when it is stored, and only then.

So a run with narrow states must equal, to the bit where the arithmetic is the same, one with float32 states whose
states a test rounds after each step. Beyond that it should be useful: logits stay near those of float32 states. Each
store moves a state by at most the dtype's unit of rounding, logits are of order one, and a few dozen stores add up.
"""

import json
from pathlib import Path

import pytest
import torch

from milepost.boot import DEMO, boot
from milepost.config import CacheConfig, ServeConfig
from milepost.core import models
from milepost.core.geometry import Formats, Layout, measure
from milepost.model import load_model_config
from tests.model.oracle import Driver, random_tokens, worst

UNIT = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
SHARED = 100  # tokens


class Rounding(Driver):
    """Keeps states in float32, rounded to `dtype` after each step."""

    dtype = torch.float32

    def run(self, *parts, strict=False):
        logits = super().run(*parts, strict=strict)
        self.memory.temporal.copy_(self.memory.temporal.to(self.dtype))
        return logits


def journey(driver: Driver) -> torch.Tensor:
    """Prefill in chunks with a mark, decode; resume at the mark and go on: the logits of all of that."""
    tokens, others = random_tokens(5, 150), random_tokens(6, 150)
    others[:SHARED] = tokens[:SHARED]
    first, kept = driver.sequence(tokens), driver.slot()
    parts = [driver.feed(first, [48, 32]), *driver.run(first.take(40, marks=((SHARED, kept),)))]
    parts.append(driver.feed(first, [1] * 30))
    second = driver.resumed(others, first, SHARED, kept)
    return torch.cat([*parts, driver.feed(second, [20] + [1] * 20)])


def of_tokens(a: torch.Tensor, b: torch.Tensor) -> float:
    """The typical token's largest difference. A router's near tie may send a few tokens to another expert."""
    return float((a - b).abs().amax(-1).median())


@pytest.fixture(scope="module")
def wide(golden, decoders):
    """Logits with float32 states, by kernels."""
    return {name: journey(Driver(decoders(golden.folder, kernels=name))) for name in ("numba", "torch")}


@pytest.mark.parametrize("dtype", UNIT, ids=str)
def test_narrow_states(golden, decoders, wide, dtype):
    narrow = {}
    for name, exact in wide.items():
        decoder = decoders(golden.folder, kernels=name)
        driver, rounding = Driver(decoder, state_dtype=dtype), Rounding(decoder)
        rounding.dtype = dtype
        narrow[name], expected = journey(driver), journey(rounding)
        if name == "torch":
            assert torch.equal(narrow[name], expected)
        assert of_tokens(narrow[name], expected) < UNIT[dtype] / 10  # compiled code may contract other products
        assert of_tokens(narrow[name], exact) < 4 * UNIT[dtype]
        if driver.memory.temporal.numel():
            assert worst(narrow[name], exact) > UNIT[dtype] / 10, "the states are as wide as before"
        else:
            assert torch.equal(narrow[name], exact)  # windows only: they have the dtype of the weights
        assert driver.memory.slot_bytes == _planned(golden.folder, dtype)
    assert of_tokens(*narrow.values()) < UNIT[dtype] / 10


def _planned(folder: Path, dtype: torch.dtype) -> int:
    """Bytes of a slot as the planner has them."""
    shape = models.read_config(json.loads((folder / "config.json").read_text()))
    return measure(shape, Layout(), Formats(str(dtype).removeprefix("torch."), "float32", "float32")).slot


@pytest.mark.parametrize("dtype", UNIT, ids=str)
def test_strict_reuse_with_narrow_states(golden, decoders, dtype):
    """Cold equals resumed bit for bit: strict mode stores the state at each multiple of 64 either way."""
    driver = Driver(decoders(golden.folder), state_dtype=dtype)
    tokens, kept = random_tokens(1, 180), driver.slot()
    first = driver.sequence(tokens)
    expected = torch.cat([*driver.run(first.take(170), strict=True), driver.feed(first, [1] * 10, strict=True)])
    marked = driver.sequence(tokens)
    driver.run(marked.take(150, marks=((128, kept),)), strict=True)
    second = driver.resumed(tokens, marked, 128, kept)
    resumed = torch.cat([*driver.run(second.take(42), strict=True), driver.feed(second, [1] * 10, strict=True)])
    assert torch.equal(resumed, expected[128:])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_flag(dtype):
    """Boot compares what it allocates with what it planned; here with the embedded model's formula."""
    booted = boot(ServeConfig(mamba_ssm_dtype=dtype), CacheConfig(max_mamba_cache_size=4, max_total_tokens=512))
    spec, layers = load_model_config(DEMO).linear, len(load_model_config(DEMO).linear_layers)
    state, windows = spec.value_heads * spec.key_dim * spec.value_dim, (spec.kernel - 1) * spec.channels
    size = getattr(torch, dtype).itemsize
    assert booted.engine.info()["slot_bytes"] == layers * (state * size + windows * 2)
