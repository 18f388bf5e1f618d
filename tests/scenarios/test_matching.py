"""Where a prompt may be resumed: splits and forks, grids, levels and chunks, pages (scenarios 1, 2, 11 and 12)."""

from dataclasses import replace

import pytest

from milepost.core.stats import Loss
from tests.scenarios.world import A, B, D, E, F, X, either, figures


@figures(exact=(8191, 8191), extra_buffer=(8128, 8128))
def test_s01_identical_prompt_three_times(world, strategy, expected):
    """The second run leaves a fork state for the third; its finish neither prunes nor marks it."""
    matched, third = expected
    w = world(strategy, slots=16, rows=65_536)
    first, second = w.ask(A * 8192, 16), w.ask(A * 8192, 16)
    assert (first.resume, second.resume) == (0, 0)
    assert (second.reuse.kv_depth, second.reuse.lost) == (matched, matched)
    assert w.counters.lost_reuse_tokens_total == matched
    assert third in w.unmarked(A * 8192) and w.marked() == []
    assert w.counters.checkpoints_pruned_total == 0
    assert w.ask(A * 8192, 16).resume == third
    assert w.ask(A * 8192, 16).resume == third <= 8191


@pytest.mark.parametrize(("level", "second"), [(2, 0), (3, 4096)])
@figures(exact=8291, extra_buffer=8256)
def test_s02_fork_in_the_middle_of_an_edge(world, strategy, expected, level, second):
    """The split that the second request makes does not cost the first its end state."""
    w = world(strategy, slots=16, rows=65_536, level=level)
    first = w.ask(A * 4096 + B * 4096, 100)
    assert len(first.context) == 8291
    assert w.ask(A * 4096 + D * 1000, 100).resume == second
    assert w.ask(A * 4096 + E * 1000, 100).resume == 4096
    assert w.ask(first.context + F * 100, 100).resume == expected
    assert first.resume == 0


@figures(exact=(4096, 4096), extra_buffer=(0, 0))
def test_s04_states_left_by_pressure(world, strategy, expected):
    """No state of A survives, so nothing is reused: `exact` keeps the KV and forks there, SGLang's drops it too."""
    matched, third = expected
    w = world(strategy, slots=6, rows=1_000_000)
    w.ask(A * 4096, 32)
    for number in range(6):
        w.ask(X(number) * 3000, 32)
    assert w.unmarked(A * 4096) == w.marked(A * 4096) == []
    second = w.ask(A * 4096 + B * 100, 32)
    assert (second.resume, second.reuse.kv_depth) == (0, matched)
    assert w.ask(A * 4096 + D * 100, 32).resume == third


@figures(exact=Loss.NEVER, extra_buffer=Loss.STATE_PRESSURE)
def test_s04_states_dropped_by_a_hook(world, strategy, expected):
    """KV without a state is never resumed; it says where the next state belongs.

    The lost state lay at 4096 under `extra_buffer`, and under `exact` at 4127, where this prompt never looks.
    """
    w = world(strategy, slots=6, rows=1_000_000)
    first = w.ask(A * 4096, 32)
    w.drop_states(first.context)
    second = w.ask(A * 4096 + B * 100, 32)
    assert (second.resume, second.reuse.kv_depth, second.reuse.loss) == (0, 4096, expected)
    assert w.ask(A * 4096 + D * 100, 32).resume == 4096


@pytest.mark.parametrize(
    ("strategy", "page", "expected"), [("exact", 1, 5007), ("extra_buffer", 512, 4608), ("extra_buffer", 64, 4992)]
)
def test_s05_state_grid_and_page_grid_differ(world, strategy, page, expected):
    """A state is used only at its own depth: the tags fail when one of 4992 stands on a node of 4608."""
    w = world(strategy, slots=16, rows=65_536, level=3, chunk=4096, page_size=page, mamba_track_interval=512)
    w.ask(A * 5007)
    assert w.ask(A * 5007 + B * 50).resume == expected


@figures(exact=4106, extra_buffer=4096)
def test_s31_last_chunk_shorter_than_the_grid(world, strategy, expected):
    """A last chunk of 10 tokens loses no checkpoint. (The way over the host waits for tiers.)"""
    w = world(strategy, chunk=4096)
    w.ask(A * 4106)
    assert w.ask(A * 4106 + B * 20).resume == expected


@figures(
    exact=(4096, 6000, [2048, 4096, 6144, 8192, 10_000, 10_048, 10_064]),
    extra_buffer=(4096, 5952, [2048, 4096, 6144, 8192, 9984, 10_048]),
)
def test_s32_level_3(world, strategy, expected):
    """Chunk ends, decode intervals and the request's end each leave a state."""
    second, third, left = expected
    w = world(strategy, slots=32, level=3)
    w.ask(A * 10_000, 65)
    assert w.unmarked() == left
    assert w.resumes([A * 6000 + B * 100, A * 6000 + D * 100], 65) == [second, third]


@figures(exact=(0, 6000, [6000, 10_064]), extra_buffer=(0, 5952, [5952, 10_048]))
def test_s32_level_2(world, strategy, expected):
    """Level 2 keeps the fork and the end of a path; nothing else stays unmarked, or stays."""
    second, third, left = expected
    w = world(strategy, slots=32)
    first = w.ask(A * 10_000, 65)
    assert w.resumes([A * 6000 + B * 100, A * 6000 + D * 100], 65) == [second, third]
    assert w.unmarked(first.context) == left
    assert len(w.unmarked()) == 4 and w.marked() == []


@figures(exact=10_000, extra_buffer=9984)
def test_s32_prefill_worker(world, strategy, expected):
    """A worker that only prefills keeps prompt ends in place of request ends."""
    w = world(strategy, slots=32, checkpoint_at="fork,prompt-end")
    w.ask(A * 10_000)
    assert w.ask(A * 10_000 + B * 100).resume == expected


@figures(exact=[0, 0, 29, 63, 64], extra_buffer=[0, 0, 0, 64, 64])
def test_s34_shorter_than_a_page_and_exactly_a_page(world, strategy, expected):
    """Each prompt forks where the one before it ended. The end of the test evicts everything."""
    w = world(strategy)
    assert w.resumes([A * 29, A * 63, A * 64, A * 65, A * 128 + B * 1], 8) == expected
    assert all(len(node.edge) > 0 for node in w.scheduler.cache.tree.nodes())


@figures(exact=1500, extra_buffer=1472)
def test_s35_minimum_cacheable_length(world, strategy, expected):
    """The second request makes the fork state that the other six resume from."""
    w = world(strategy)
    assert w.resumes([A * 1500 + B(i) * 300 for i in range(8)]) == [0, 0] + [expected] * 6
    assert w.counters.below_minimum_requests_total == 0


def test_s35_prompts_below_a_wide_grid(world):
    """With a unified block of 2096 no prompt of 1800 tokens is ever reused, and each is counted as too short."""
    w = world("extra_buffer", rows=2096 * 64, chunk=2096, change=lambda s: replace(s, page=2096, grid=2096))
    assert w.resumes([A * 1500 + B(i) * 300 for i in range(8)]) == [0] * 8
    assert w.counters.below_minimum_requests_total == 8


@figures(exact=5000, extra_buffer=4992)
def test_s38_prefill_mixed_with_decodes(world, strategy, expected):
    """Eight others decode in the same steps; all texts are checked against their prefixes, at each end."""
    w = world(strategy, slots=either(strategy, 32, 64))
    crowd = [w.start(X(i) * 20, 2000) for i in range(8)]
    w.tick()
    found = []
    for i in range(9):
        number = w.start(A * 5000 + B(i) * 100, 32)
        while number not in w.ends:
            plan = w.tick()
            assert len(plan.chunks) == 9
        found.append(w.answer(number).resume)
    assert found == [0, 0] + [expected] * 7
    for number in crowd:
        assert w.cancel(number)
