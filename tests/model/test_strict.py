"""Strict mode: what is resumed equals what is computed cold, bit for bit. Hence torch.equal throughout."""

import numpy as np
import pytest
import torch

from milepost.model import Batch
from tests.model.oracle import FAMILIES, Driver, random_tokens, reference_logits, worst

# In bfloat16 one family for each kind of kernel: all that compiles once more for it.
NARROW = ("glm5_next", "kimi_linear", "lara_mini", "nemotron_h", "qwen3_5_moe_text", "qwen3_5_text")
DRIVEN = [(family, "float32") for family in sorted(FAMILIES)] + [(family, "bfloat16") for family in NARROW]


@pytest.fixture(params=DRIVEN, ids="-".join)
def driver(request, goldens, decoders):
    family, dtype = request.param
    return Driver(decoders(goldens(family).folder, dtype=getattr(torch, dtype)), rows=3000, slots=30)


def strict(driver, *parts):
    return driver.run(*parts, strict=True)


def states(driver, slot):
    return driver.memory.conv[:, slot].clone(), driver.memory.temporal[:, slot].clone()


def same_states(driver, a, b):
    return all(torch.equal(x, y) for x, y in zip(states(driver, a), states(driver, b), strict=True))


def cold(driver, tokens, prompt):
    """Prefill `prompt` tokens in one span, then decode the rest one by one, alone."""
    sequence = driver.sequence(tokens)
    sizes = [prompt] + [1] * (len(tokens) - prompt)
    return torch.cat([strict(driver, sequence.take(size))[0] for size in sizes]), sequence


@pytest.mark.parametrize("position", [64, 128])
def test_resumed_equals_cold(driver, position):
    tokens = random_tokens(1, 214)
    expected, alone = cold(driver, tokens, 200)
    # Another sequence shares `position` tokens and leaves a checkpoint there.
    others = random_tokens(2, 170)
    others[:position] = tokens[:position]
    first = driver.sequence(others)
    kept = driver.slot()
    strict(driver, first.take(170, marks=((position, kept),)))
    again = driver.resumed(tokens, first, position, kept)
    first.leave()
    # It resumes amid batch mates that prefill and decode.
    mates = [driver.sequence(random_tokens(10 + i, 100)) for i in range(11)]
    strict(driver, *(mate.take(20 + i) for i, mate in enumerate(mates)))
    pieces = strict(driver, mates[0].take(40), again.take(200 - position), *(mate.take(1) for mate in mates[1:]))
    got = [pieces[1]]
    for step in range(14):
        at = step % 12  # its place among the decoding rows changes, and so do groups of eight
        parts = [mate.take(1) for mate in mates]
        parts.insert(at, again.take(1))
        got.append(strict(driver, *parts)[at])
    assert torch.equal(torch.cat(got), expected[position:])
    assert same_states(driver, again.slot, alone.slot)
    for pool in (driver.memory.keys, driver.memory.values):
        assert torch.equal(pool[:, again.rows], pool[:, alone.rows])


def test_chunking_on_the_grid_changes_nothing(driver):
    tokens = random_tokens(3, 300)
    expected, alone = cold(driver, tokens, 300)
    chunked = driver.sequence(tokens)
    got = torch.cat([strict(driver, chunked.take(size))[0] for size in (128, 64, 108)])
    assert torch.equal(got, expected)
    assert same_states(driver, chunked.slot, alone.slot)


def test_a_token_depends_only_on_those_before_it(driver):
    """A prompt that ends inside a block computes the same as a longer one: its KV may serve both."""
    tokens = random_tokens(4, 192)
    long, short = driver.sequence(tokens), driver.sequence(tokens[:101])
    expected = strict(driver, long.take(192))[0]
    assert torch.equal(strict(driver, short.take(101))[0], expected[:101])
    assert torch.equal(driver.memory.keys[:, short.rows], driver.memory.keys[:, long.rows[:101]])


def test_the_first_token_of_a_block_alone(driver):
    """65 = 64 + 1: a block of one token is computed the same way whether or not its span began before it."""
    tokens = random_tokens(5, 65)
    expected, _ = cold(driver, tokens, 65)
    kept, first = driver.slot(), driver.sequence(tokens)
    strict(driver, first.take(64, marks=((64, kept),)))
    again = driver.resumed(tokens, first, 64, kept)
    assert torch.equal(strict(driver, again.take(1))[0], expected[64:])


def test_strict_is_still_the_same_model(golden, decoders):
    driver = Driver(decoders(golden.folder))
    tokens = random_tokens(26, 180)
    logits, _ = cold(driver, tokens, 150)
    assert worst(logits, reference_logits(golden.reference, tokens)) < 1e-4


def test_only_wanted_logits_are_returned(goldens, decoders):
    driver = Driver(decoders(goldens("qwen3_5_text").folder))
    tokens = random_tokens(7, 130)
    expected, _ = cold(driver, tokens, 130)
    part = driver.sequence(tokens).take(130)
    logits = driver.decoder.forward(Batch(part[0], (part[1],), np.array([129, 5])), driver.memory, strict=True)
    assert torch.equal(logits, expected[[129, 5]])


def test_a_mark_off_the_grid_is_a_bug(goldens, decoders):
    driver = Driver(decoders(goldens("qwen3_5_text").folder))
    part = driver.sequence(random_tokens(8, 100)).take(100, marks=((70, driver.slot()),))
    with pytest.raises(AssertionError, match="multiples of 64"):
        strict(driver, part)
