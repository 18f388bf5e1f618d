"""Sliding windows: which keys are seen, at what cost, and that no row behind a window is ever read.

The driver fills rows that it took back with NaN (`oracle.Windows`), so one that is read shows in every logit.
"""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some
from safetensors.torch import load_file, save_file

from milepost.core import models
from milepost.core.checkpoint import EXACT, NO_BUFFER, NO_CACHE, CheckpointPolicy, extra_buffer, with_cap
from milepost.core.plan import Chunk, Plan
from milepost.core.pool import Owner, Slot
from milepost.core.request import Request, Sampling
from milepost.core.scheduler import Limits
from milepost.core.tokens import pack
from milepost.engine.executor import TorchExecutor
from milepost.errors import ModelConfigError
from milepost.model import Memory, load_decoder, load_model_config, random_decoder
from milepost.model.config import AttentionSpec
from milepost.model.work import PrefillSpan
from tests.engine.world import World
from tests.model.oracle import Driver, random_tokens, reference_logits, worst
from tests.model.test_cache_by_family import ANSWER, compare, prompts

TOLERANCE = 1e-4
WINDOW = 24  # of the recipe


@pytest.fixture
def lara(goldens):
    return goldens("lara_mini")


@pytest.fixture(params=["numba", "torch"])
def decoder(request, lara, decoders):
    return decoders(lara.folder, kernels=request.param)


@given(
    length=some.integers(1, 300),
    start=some.integers(0, 200),
    reach=some.integers(1, 150),
    gathered=some.booleans(),
)
def test_each_query_sees_its_window_at_bounded_cost(length, start, reach, gathered):
    before = min(start, reach - 1)
    gather = torch.zeros(before + length, dtype=torch.int64) if gathered or before else None
    span = PrefillSpan(0, length, before, reach, gather, torch.device("cpu"))
    seen = torch.zeros(length, before + length, dtype=torch.bool)
    cost = 0
    for queries, keys, mask in span.parts():
        part = seen[queries, keys]
        part |= torch.ones_like(part).tril() if mask is None else mask
        cost += part.numel()
    i, j = torch.arange(length)[:, None] + before, torch.arange(before + length)[None]
    assert torch.equal(seen, (j <= i) & (j > i - reach))
    assert cost <= length * (reach + max(reach // 4, 64))


def test_a_long_decode(decoder, lara):
    """Far more steps than the window pool has rows beyond the prompt's."""
    tokens = random_tokens(40, 190)
    driver = Driver(decoder, window_rows=60)
    logits = driver.feed(driver.sequence(tokens), [30] + [1] * 160)
    assert worst(logits, reference_logits(lara.reference, tokens)) < TOLERANCE


def test_resume_at_any_position_from_the_rows_of_one_window(decoder, lara):
    tokens = random_tokens(41, 140)
    expected = reference_logits(lara.reference, tokens)
    for position in range(1, 130):
        driver = Driver(decoder, rows=400, slots=3)
        first, kept = driver.sequence(tokens), driver.slot()
        driver.run(first.take(position, marks=((position, kept),)))
        again = driver.resumed(tokens, first, position, kept)
        first.leave()
        for pool in driver.memory.kv["window"]:
            assert int(pool[0, 1:, 0, 0].isfinite().sum()) == min(position, WINDOW)
        assert worst(driver.feed(again, [7, 1, 1]), expected[position : position + 9]) < TOLERANCE


def test_many_sequences_share_a_small_pool(decoder, lara):
    """Rows given back by one are taken by others, in one batch after the other."""
    driver = Driver(decoder, window_rows=420)
    sequences = [driver.sequence(random_tokens(50 + i, 130)) for i in range(6)]
    expected = [reference_logits(lara.reference, sequence.tokens) for sequence in sequences]
    got = [[] for _ in sequences]
    for size in (5, 1, 20, 1, 1, 40, 1, 25, 1, 1):
        parts = [sequence.take(size + i % 2 * 3) for i, sequence in enumerate(sequences)]
        for pieces, logits in zip(got, driver.run(*parts), strict=True):
            pieces.append(logits)
    for sequence, pieces, logits in zip(sequences, got, expected, strict=True):
        assert worst(torch.cat(pieces), logits[: sequence.at]) < TOLERANCE


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_strict_bits_do_not_depend_on_how_many_rows_are_given(lara, decoders, dtype):
    """Nor on whether the state came from a span that began before."""
    tokens = random_tokens(42, 230)
    got = []
    for spare, sizes in ((0, [230]), (0, [64, 128, 38]), (50, [128, 64, 38]), (500, [192, 38])):
        driver = Driver(decoders(lara.folder, dtype=dtype))
        driver.windows.spare = spare
        sequence = driver.sequence(tokens)
        logits = driver.feed(sequence, sizes, strict=True)
        live = [sequence.window[position] for position in range(230 - WINDOW, 230)]
        got.append((logits, *(pool[:, live].clone() for pool in driver.memory.kv["window"])))
    for other in got[1:]:
        assert all(torch.equal(a, b) for a, b in zip(got[0], other, strict=True))


def test_too_few_rows_are_a_bug(decoder):
    driver = Driver(decoder)
    sequence = driver.sequence(random_tokens(43, 90))
    driver.run(sequence.take(60))
    tokens, span = sequence.take(5)
    with pytest.raises(AssertionError, match="too few rows of the window pool"):
        driver.run((tokens, replace(span, window=span.window[1:])))


def test_windows_of_another_shape_than_full_attention(lara):
    """Heads, sizes and rotary of their own: all at once, in pieces and step by step come to the same."""
    config = load_model_config(lara.folder)
    other = AttentionSpec(4, 1, 32, rotary_dim=8, rope_theta=500.0, gated=False, reach=10)
    decoder = random_decoder(replace(config, window=other), kernels="torch")
    driver = Driver(decoder)
    assert driver.memory.window_keys.shape[2:] == (1, 32)
    assert driver.memory.keys.shape[2:] == (2, 16)
    tokens = random_tokens(44, 100)
    whole = driver.feed(driver.sequence(tokens), [100])
    assert worst(driver.feed(driver.sequence(tokens), [33, 7] + [1] * 60), whole) < TOLERANCE
    # It is the window that limits what is seen: the same weights with a longer one give something else.
    longer = random_decoder(replace(config, window=replace(other, reach=11)), kernels="torch")
    wider = Driver(longer)
    difference = (wider.feed(wider.sequence(tokens), [100]) - whole).abs().amax(1)
    assert difference[:10].max() < TOLERANCE < difference[10:].min()


def test_a_plans_window_rows_reach_the_memory(decoder):
    """Plan in, token out: a prompt, then a step that sees its last rows only."""
    tokens = random_tokens(45, 50)
    driver = Driver(decoder)
    expected = [int(logits.argmax()) for logits in driver.feed(driver.sequence(tokens), [49, 1])[[48, 49]]]
    memory = Memory(decoder.config, 2, 60, window_rows=60, kv_dtype=torch.float32)
    executor = TorchExecutor(decoder, memory)
    rows, window = (np.arange(1, 61, dtype=np.int32) for _ in range(2))
    request = Request("r", pack(tokens), Sampling())
    for step, (start, stop) in enumerate(((0, 49), (49, 50))):
        first = max(0, start - WINDOW)
        fields = {"samples": 1, "window": window[first:stop]}
        chunk = Chunk(Owner(1), request, start, stop, tokens, rows[:stop], Slot(1), **fields)
        assert executor.run(Plan(step, (), (chunk,))).tokens == {1: (expected[step],)}
        memory.window_keys[:, 1 : stop - WINDOW + 1] = torch.nan
    assert memory.window_keys[:, 51:].count_nonzero() == 0


@pytest.mark.parametrize("strategy", [EXACT, NO_BUFFER, extra_buffer(1)], ids=lambda strategy: strategy.name)
@pytest.mark.parametrize("more", [10, 70])
def test_texts_on_a_pool_of_few_windows(lara, decoders, strategy, more):
    """Chunks are cut, checkpoints go, requests take turns; what they say stays what it is alone without a cache."""
    cold = World(policy=NO_CACHE, decoder=decoders(lara.folder), rows=4_096, slots=8)
    cold.run(prompts(), ANSWER)
    policy = CheckpointPolicy.level(2, 64, windows=True)
    pools = {"rows": 4_096, "slots": 40, "window_rows": strategy.windows * WINDOW + more}
    world = World(
        policy=policy,
        strategy=with_cap(strategy, None, policy),
        limits=Limits(8, 128, 4_096),
        decoder=cold.decoder,
        **pools,
    )
    for _ in range(2):
        numbers = world.run(prompts(), ANSWER, at_once=8)
        for reference, number in enumerate(numbers, next(iter(cold.texts))):
            compare(cold, reference, world, number)
    counters = world.scheduler.counters
    assert world.scheduler.limits.chunk == min(128, more)
    assert counters.states_evicted_total > 0 or world.scheduler.limits.chunk < strategy.grid
    assert not (strategy is EXACT and counters.preempted_total)


def test_projections_stored_one_by_one(lara, tmp_path):
    """transformers saves as checkpoints are published, one projection; its own modules have four, and another name."""
    tensors = load_file(lara.folder / "model.safetensors")
    state = {name: tensor for name, tensor in lara.reference.state_dict().items() if ".linear_attn." in name}
    assert not set(state) <= set(tensors)
    apart = {name: tensor for name, tensor in tensors.items() if ".linear_attn." not in name}
    save_file({**apart, **state}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((lara.folder / "config.json").read_text())
    tokens = random_tokens(46, 80)
    logits = []
    for folder in (lara.folder, tmp_path):
        driver = Driver(load_decoder(folder, dtype=torch.float32, kernels="torch"))
        logits.append(driver.feed(driver.sequence(tokens), [80]))
    assert torch.equal(*logits)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"sliding_window": None}, ["sliding_window", "None", "at least 1"]),
        ({"sliding_window": 0}, ["sliding_window", "0", "at least 1"]),
        ({"layer_types": ["chunked_attention"] * 6}, ["layer_types", "chunked_attention", "sliding_attention"]),
        ({"linear_num_value_heads": None}, ["linear_num_value_heads"]),
        ({"attention_bias": True}, ["attention_bias"]),
        ({"use_sliding_window": True}, ["use_sliding_window", "not known"]),
        ({"rope_parameters": {"rope_type": "yarn"}}, ["rope_parameters", "yarn"]),
    ],
)
def test_a_config_that_is_not_supported(lara, changes, words):
    raw = json.loads((lara.folder / "config.json").read_text())
    with pytest.raises(ModelConfigError) as error:
        load_model_config({**raw, **changes})
    assert all(word in str(error.value) for word in words), str(error.value)


def test_what_a_config_says(lara):
    raw = json.loads((lara.folder / "config.json").read_text())
    config = load_model_config(raw)
    assert (config.linear_layers, config.window_layers, config.attention_layers) == ((0, 4), (1, 3), (2, 5))
    assert (config.window.reach, config.window.rotary_dim, config.attention.rotary_dim) == (WINDOW, 16, 0)
    # Without a list it is the released period of five.
    config = load_model_config({**raw, "layer_types": None, "num_hidden_layers": 8})
    assert (config.linear_layers, config.window_layers, config.attention_layers) == ((0, 2, 5, 7), (1, 4, 6), (3,))
    shape = models.read_config({**raw, "layer_types": None, "num_hidden_layers": 8})
    assert [i for i, part in enumerate(shape.layers) if models.Part.WINDOW in part] == [1, 4, 6]
    assert shape.window_size == WINDOW


def test_the_planner_knows_windows_only_where_they_are_served(goldens):
    raw = json.loads((goldens("qwen3_5_text").folder / "config.json").read_text())
    with pytest.raises(ModelConfigError, match="sliding_attention"):
        models.read_config({**raw, "layer_types": ["sliding_attention"] * 5})
