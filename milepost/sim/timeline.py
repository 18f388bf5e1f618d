"""What a replay looked like over time: both pools, the queue, and who made it wait."""

from dataclasses import dataclass, field

from milepost.core.scheduler import Scheduler


@dataclass(slots=True)
class Timeline:
    """Samples at least `every` virtual seconds apart, and seconds weighted means over the whole run.

    Each sample: time, slots held / kept as checkpoints / free, rows held / cached / free, requests running / waiting.
    """

    every: float
    samples: list[tuple[float, ...]] = field(default_factory=list)
    waited: dict[str, float] = field(default_factory=dict)
    running_seconds: float = 0.0
    total_seconds: float = 0.0
    peak_running: int = 0

    def note(self, now: float, elapsed: float, scheduler: Scheduler) -> None:
        """A step of `elapsed` seconds has ended at `now`."""
        stats = scheduler.stats()
        self.total_seconds += elapsed
        self.running_seconds += elapsed * stats.running
        self.peak_running = max(self.peak_running, stats.running)
        if stats.waiting_for:
            self.waited[stats.waiting_for] = self.waited.get(stats.waiting_for, 0.0) + elapsed
        if not self.samples or now - self.samples[-1][0] >= self.every:
            states, rows = stats.states, stats.rows
            slots = (states.held, states.evictable, states.free)
            self.samples.append((now, *slots, rows.held, rows.evictable, rows.free, stats.running, stats.waiting))

    @property
    def mean_running(self) -> float:
        return self.running_seconds / self.total_seconds if self.total_seconds else 0.0

    def summary(self) -> dict[str, object]:
        """Means and peaks, and the seconds in which the head of the queue waited, by what it waited for."""
        return {"running_mean": self.mean_running, "running_peak": self.peak_running, "waited_s": dict(self.waited)}
