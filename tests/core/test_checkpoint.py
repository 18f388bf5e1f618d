"""Which positions get a state: levels, reasons, grids, forks, intervals, and how the flags name them."""

import pytest

from milepost.config import CacheConfig, resolve
from milepost.core.checkpoint import (
    LEVELS,
    CheckpointPolicy,
    Reason,
    Stretch,
    exact_marks,
    extra_buffer,
    extra_buffer_lazy,
    rolling_marks,
)
from milepost.errors import ConfigError

LEVEL_2, LEVEL_3 = CheckpointPolicy.level(2, 64), CheckpointPolicy.level(3, 64)


def test_levels_are_sets_of_reasons():
    assert LEVELS[2] == {Reason.FORK, Reason.FINISH}
    assert LEVELS[3] == LEVELS[2] | {Reason.CHUNK, Reason.INTERVAL}
    assert (LEVEL_2.states_per_path, LEVEL_3.states_per_path) == (1, None)


def test_models_with_windows_keep_chunk_checkpoints_at_level_2():
    policy = resolve(CacheConfig(), windows=True).policy
    assert policy.reasons == {Reason.FORK, Reason.FINISH, Reason.CHUNK} and policy.states_per_path == 1


@pytest.mark.parametrize(
    ("stretch", "policy", "grid", "expected"),
    [
        (Stretch(0, 2048, 5000, True), LEVEL_2, 1, []),
        (Stretch(0, 2048, 5000, True), LEVEL_3, 1, [(2048, Reason.CHUNK)]),
        (Stretch(0, 2048, 5000, True, fork=700), LEVEL_2, 1, [(700, Reason.FORK)]),
        (Stretch(0, 2048, 5000, True, fork=2048), LEVEL_3, 1, [(2048, Reason.FORK)]),
        (Stretch(700, 2048, 5000, True, fork=700), LEVEL_2, 1, []),
        (Stretch(0, 2048, 2048, True, keep=(100, 2044)), LEVEL_2, 1, [(100, Reason.ASKED), (2044, Reason.ASKED)]),
        (Stretch(0, 2048, 2048, True, fork=700), LEVEL_2, 64, [(640, Reason.FORK)]),
        (Stretch(5063, 5064, 5000, False), LEVEL_3, 1, []),
        (Stretch(5055, 5056, 5000, False), LEVEL_3, 1, [(5056, Reason.INTERVAL)]),
        (Stretch(5000, 5200, 5000, False), LEVEL_3, 1, [(p, Reason.INTERVAL) for p in (5056, 5120, 5184)]),
    ],
)
def test_exact_marks(stretch, policy, grid, expected):
    assert exact_marks(stretch, policy, grid) == expected


@pytest.mark.parametrize(
    ("stretch", "expected"),
    [
        (Stretch(0, 2048, 5000, True), [(2048, Reason.CHUNK)]),
        (Stretch(4096, 5000, 5000, True), [(4992, Reason.CHUNK)]),
        (Stretch(70, 170, 5000, True), [(134, Reason.CHUNK)]),  # counted from the chunk's start
        (Stretch(0, 63, 5000, True), []),
        (Stretch(0, 2048, 5000, True, fork=640), [(640, Reason.FORK)]),  # takes the chunk end's place
        (Stretch(70, 2048, 5000, True, fork=640), [(2054 - 64, Reason.CHUNK)]),  # off this chunk's grid: lost
        (Stretch(5000, 5200, 5000, False), [(5184, Reason.INTERVAL)]),  # only the last one is kept
    ],
)
def test_rolling_marks_as_the_release_takes_them(stretch, expected):
    assert rolling_marks(stretch, LEVEL_3, 64) == expected


@pytest.mark.parametrize(
    ("strategy", "reserved", "tracking", "grid"),
    [
        (extra_buffer(1), 5, 2, 64),
        (extra_buffer(64), 5, 2, 64),
        (extra_buffer(64, overlap=False), 4, 1, 64),
        (extra_buffer_lazy(64), 4, 1, 64),
        (extra_buffer(512), 5, 2, 512),
        (extra_buffer(48), 5, 2, 192),
    ],
)
def test_strategies_reserve_and_hold_what_the_release_does(strategy, reserved, tracking, grid):
    assert (strategy.reserved, strategy.tracking, strategy.grid) == (reserved, tracking, grid)


def test_reasons_by_name_replace_the_levels():
    policy = resolve(CacheConfig(checkpoint_at="fork, finish,prompt-end")).policy
    assert policy.reasons == {Reason.FORK, Reason.FINISH, Reason.PROMPT_END} and policy.states_per_path == 1


def test_strict_reuse_keeps_prompt_ends_instead_of_decoded_ends():
    resolved = resolve(CacheConfig(strict_reuse=True, hybrid_cache_checkpoints_level=3))
    assert resolved.policy.reasons == {Reason.FORK, Reason.PROMPT_END, Reason.CHUNK}
    assert resolved.strategy.grid == 64 and resolved.strategy.prefilled_only


def test_the_deprecated_cap_is_said_once_and_still_works():
    resolved = resolve(CacheConfig(mamba_max_states_per_path=3, hybrid_cache_checkpoints_level=3))
    assert resolved.policy.states_per_path == 3
    assert [note for note in resolved.notes if "deprecated" in note] == [
        "--mamba-max-states-per-path is deprecated; it still sets the soft cap per path"
    ]
    assert resolve(CacheConfig(mamba_max_states_per_path=-1)).policy.states_per_path is None


@pytest.mark.parametrize(
    ("flags", "flag", "works"),
    [
        ({"checkpoint_at": "fork,ends"}, "--checkpoint-at", "fork,finish"),
        ({"checkpoint_at": ""}, "--checkpoint-at", "fork,finish"),
        ({"mamba_path_cap": "never"}, "--mamba-path-cap", "lazy"),
        ({"page_size": 64}, "--page-size", "1"),
        ({"mamba_radix_cache_strategy": "extra"}, "--mamba-radix-cache-strategy", "exact"),
        (
            {"mamba_radix_cache_strategy": "extra_buffer_lazy", "disable_overlap_schedule": True},
            "--mamba-radix-cache-strategy",
            "extra_buffer",
        ),
        ({"strict_reuse": True, "mamba_radix_cache_strategy": "no_buffer"}, "--mamba-radix-cache-strategy", "exact"),
        ({"strict_reuse": True, "chunked_prefill_size": 100}, "--chunked-prefill-size", "128"),
        ({"chunked_prefill_size": 0}, "--chunked-prefill-size", "2048"),
        ({"max_running_requests": 0}, "--max-running-requests", "64"),
    ],
)
def test_a_refusal_names_flag_value_and_what_works(flags, flag, works):
    with pytest.raises(ConfigError) as error:
        resolve(CacheConfig(**flags))
    line = str(error.value)
    assert line.startswith(f"{flag} ") and line.endswith(f"for example {flag} {works}") and "\n" not in line
