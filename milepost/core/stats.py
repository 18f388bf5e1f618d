"""What happened, in numbers and reasons. Frozen snapshots for outside, plain counters inside."""

from dataclasses import asdict, dataclass, field, fields
from enum import StrEnum


class Loss(StrEnum):
    """Why reuse ended above the position up to which KV is cached, or why nothing is cached there."""

    NEVER = "never checkpointed here"
    STATE_PRESSURE = "evicted under state pressure"
    KV_PRESSURE = "evicted under KV pressure"
    WINDOW_PRESSURE = "evicted under window pressure"
    CAP = "pruned by the cap per path"
    SHORT = "below the minimum length"


@dataclass(frozen=True, slots=True)
class Reuse:
    """Why a request was reused as far as it was, and no further. Positions in tokens.

    `resume` ≤ `kv_depth` ≤ `seen` ≤ prompt − 1. `resume` is the hit: a state and all KV up to it were there.
    `kv_depth`: KV of the prompt is cached up to here. `seen`: the same ids were cached up to here once.
    `diverged_at`: the first position at which the prompt differs from what is cached on its path, None when
    the cached path simply ends (or the prompt does).
    """

    prompt: int
    seen: int
    kv_depth: int
    resume: int
    loss: Loss | None
    diverged_at: int | None

    @property
    def lost(self) -> int:
        """Tokens whose KV is cached and that have to be computed again for want of a state."""
        return self.kv_depth - self.resume

    def __str__(self) -> str:
        parts = [f"reused {self.resume} of {self.prompt}"]
        if self.diverged_at is not None:
            parts.append(f"history changed at {self.diverged_at}")
        if self.lost:
            parts.append(f"KV matched to {self.kv_depth}")
        if self.loss is not None:
            parts.append(self.loss.value)
        return ", ".join(parts)

    def record(self) -> dict[str, object]:
        """As JSON values, for logs."""
        return {**asdict(self), "lost": self.lost, "why": str(self)}


@dataclass(slots=True)
class Counters:
    """Totals since the start. They only grow; each name is a metric."""

    requests_total: int = 0
    finished_total: int = 0
    aborted_total: int = 0
    preempted_total: int = 0
    prompt_tokens_total: int = 0
    cached_tokens_total: int = 0
    lost_reuse_tokens_total: int = 0
    lost_reuse_requests_total: int = 0
    below_minimum_requests_total: int = 0
    generated_tokens_total: int = 0
    computed_tokens_total: int = 0
    checkpoints_published_total: int = 0
    checkpoints_duplicate_total: int = 0
    checkpoints_skipped_total: int = 0
    checkpoints_marked_total: int = 0
    checkpoints_pruned_total: int = 0
    states_evicted_total: int = 0
    kv_tokens_evicted_total: int = 0
    steps_total: int = 0
    misses: dict[Loss, int] = field(default_factory=dict)
    """Tokens that were cached once, at most up to `seen`, and had to be computed again, by the reason."""

    def admitted(self, reuse: Reuse) -> None:
        """A request starts for the first time."""
        self.prompt_tokens_total += reuse.prompt
        self.cached_tokens_total += reuse.resume
        self.lost_reuse_tokens_total += reuse.lost
        self.lost_reuse_requests_total += reuse.lost > 0
        self.below_minimum_requests_total += reuse.loss is Loss.SHORT
        if reuse.loss is not None:
            self.misses[reuse.loss] = self.misses.get(reuse.loss, 0) + reuse.seen - reuse.resume

    def as_dict(self) -> dict[str, int]:
        """By name; the misses as `missed_tokens_total`, with the reason as a label."""
        plain = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "misses"}
        return plain | {f'missed_tokens_total{{reason="{loss.value}"}}': self.misses.get(loss, 0) for loss in Loss}


@dataclass(frozen=True, slots=True)
class PoolUse:
    """One pool at one moment: `size` = `free` + `evictable` + `held`; `marked` are among the evictable."""

    size: int
    free: int
    evictable: int
    marked: int = 0

    @property
    def held(self) -> int:
        """In use by running requests: working and snapshot slots, pinned checkpoints, pinned and private rows."""
        return self.size - self.free - self.evictable


@dataclass(frozen=True, slots=True)
class Stats:
    """The scheduler and its pools at one moment. `waiting_for` names what the head of the queue waits for."""

    states: PoolUse
    rows: PoolUse
    windows: PoolUse
    running: int
    waiting: int
    running_limit: int
    reserved_slots: int
    waiting_for: str
