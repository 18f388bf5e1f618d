"""Where a state is kept, as data: reasons, levels, the cap per path, and the slot strategies.

A *reason* says why a position deserves a checkpoint. A *level* is a named set of reasons. A *slot strategy* says
how many slots a running request takes, at which positions a state can be named at all, and what happens to the
states of a request that ends. Everything here is a pure function or frozen data.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from enum import Enum, IntEnum, StrEnum
from math import gcd, lcm

KERNEL_CHUNK = 64
"""Tokens of one block of the chunk-wise scan. States inside a prefill are exact to the bit only between blocks."""


class Reason(IntEnum):
    """Why a state is kept. Where several apply to one position, the first in this order is recorded."""

    FORK = 1  # a request left a cached path here
    ASKED = 2  # the request named the position
    PROMPT_END = 3
    FINISH = 4  # all that a request has consumed at its end
    CHUNK = 5  # the end of a prefill chunk
    INTERVAL = 6  # every so many decoded tokens

    @property
    def label(self) -> str:
        return self.name.lower().replace("_", "-")


SPARED = frozenset({Reason.FORK, Reason.ASKED, Reason.PROMPT_END})
"""Reasons that the cap per path never touches."""

CHOICES = {r.label: r for r in Reason if r is not Reason.ASKED}
LEVELS: dict[int, frozenset[Reason]] = {
    2: frozenset({Reason.FORK, Reason.FINISH}),
    3: frozenset({Reason.FORK, Reason.FINISH, Reason.CHUNK, Reason.INTERVAL}),
}


@dataclass(frozen=True, slots=True)
class CheckpointPolicy:
    """`interval` in decoded tokens; `states_per_path` is the soft cap, None for no cap."""

    reasons: frozenset[Reason] = LEVELS[2]
    interval: int = 256
    states_per_path: int | None = 1

    @staticmethod
    def level(level: int, interval: int = 256, windows: bool = False) -> "CheckpointPolicy":
        """A level's reasons and cap. Models with sliding `windows` keep chunk checkpoints at level 2 too."""
        reasons = LEVELS[level] | ({Reason.CHUNK} if windows else set())
        return CheckpointPolicy(reasons, interval, 1 if level == 2 else None)


NO_CACHE = CheckpointPolicy(frozenset(), 256, None)
"""The policy of a server without a prefix cache: nothing is published, so nothing is ever found."""


class Cap(StrEnum):
    """What happens to checkpoints in excess of the cap, and when.

    LAZY and EAGER look at the path of a request that has finished and dropped its pins: the excess is marked as
    first victims, or freed. RELEASE frees too, but as SGLang 0.5.23 does where every chunk is published: at each
    publish, before the pins move on, and a fork is known by its children only.
    """

    LAZY = "lazy"
    EAGER = "eager"
    RELEASE = "release"


class Ending(Enum):
    """What a request that ends leaves to the tree."""

    WORKING = "its working state, however it ends"
    WORKING_AT_FINISH = "its working state when it finishes, nothing when it is cut short"
    SNAPSHOT = "its last snapshot when it finishes, nothing when it is cut short"


class Second(Enum):
    """Where a rolling strategy gets the slot for the next snapshot while the last one is still needed."""

    HELD = "it holds enough tracking slots"
    IF_FREE = "taken when one is free, without evicting; else the only snapshot is given up"


@dataclass(frozen=True, slots=True)
class Stretch:
    """The part of a sequence that one step computes, as far as marks are concerned. Positions in tokens.

    `fork` is 0 when there is none; `keep` are the positions that the request asked for.
    """

    start: int
    stop: int
    prompt: int
    prefill: bool
    fork: int = 0
    keep: tuple[int, ...] = ()


Wanted = tuple[int, Reason]
Marker = Callable[[Stretch, CheckpointPolicy, int], list[Wanted]]


def exact_marks(stretch: Stretch, policy: CheckpointPolicy, grid: int) -> list[Wanted]:
    """All positions in (start, stop] at which a state is wanted, ascending, rounded down to the grid."""
    wanted: dict[int, Reason] = {}

    def want(position: int, reason: Reason) -> None:
        position -= position % grid
        if stretch.start < position <= stretch.stop:
            wanted[position] = min(reason, wanted.get(position, reason))

    if Reason.FORK in policy.reasons:
        want(stretch.fork, Reason.FORK)
    for position in stretch.keep:
        want(position, Reason.ASKED)
    if Reason.PROMPT_END in policy.reasons:
        want(stretch.prompt, Reason.PROMPT_END)
    if stretch.prefill:
        if Reason.CHUNK in policy.reasons:
            want(stretch.stop, Reason.CHUNK)
    elif Reason.INTERVAL in policy.reasons:
        for position in multiples(stretch.start, stretch.stop, lcm(grid, policy.interval)):
            want(position, Reason.INTERVAL)
    return sorted(wanted.items())


def rolling_marks(stretch: Stretch, policy: CheckpointPolicy, grid: int) -> list[Wanted]:
    """At most one snapshot per forward, as SGLang 0.5.23 takes them (semantics: prefill 6.3, decode 6.6).

    In prefill the position is counted from the start of the chunk, and a fork (or a position asked for) inside
    the chunk takes the place of the chunk's end. In decode it is the last multiple of the track grid.
    """
    start, stop = stretch.start, stretch.stop
    if not stretch.prefill:
        crossed = list(multiples(start, stop, lcm(grid, policy.interval)))
        return [(crossed[-1], Reason.INTERVAL)] if crossed else []
    if stop - start < grid:
        return []
    end = start + (stop - start) // grid * grid
    asked = [(stretch.fork, Reason.FORK)] if Reason.FORK in policy.reasons else []
    asked += [(position, Reason.ASKED) for position in stretch.keep]
    for position, reason in asked:
        position -= position % grid
        if start < position <= end and (position - start) % gcd(grid, KERNEL_CHUNK) == 0:
            return [(position, reason)]
    at_prompt_end = Reason.PROMPT_END in policy.reasons and stop >= stretch.prompt > start
    return [(end, Reason.PROMPT_END if at_prompt_end else Reason.CHUNK)]


def multiples(start: int, stop: int, step: int) -> Iterable[int]:
    """The multiples of `step` in (start, stop]."""
    return range(start - start % step + step, stop + 1, step)


@dataclass(frozen=True, slots=True)
class SlotStrategy:
    """How a running request uses slots.

    `reserved`: slots per running request that sizing and the running limit count. `tracking`: slots that it
    holds besides the working one, targets of rolling snapshots; `second` says where one more comes from.
    `grid`: states are named at its multiples only. `page`: unit of KV rows and of tree edges.
    `whole_leaf`: a leaf that loses its state loses its KV too, and a running request keeps the last state on its
    path pinned. `forks`: fork checkpoints are possible. `prefilled_only`: nothing computed by decode steps is
    published.
    """

    name: str
    reserved: int
    tracking: int
    grid: int
    page: int
    ending: Ending
    cap: Cap
    marks: Marker
    whole_leaf: bool = False
    prefilled_only: bool = False
    forks: bool = True
    second: Second = Second.HELD

    @property
    def rolling(self) -> bool:
        return self.tracking > 0

    @property
    def windows(self) -> int:
        """Windows of window layers that a request may hold: its own, its last checkpoint's, its last snapshot's."""
        return 1 + self.whole_leaf + self.rolling


EXACT = SlotStrategy("exact", 1, 0, 1, 1, Ending.WORKING, Cap.LAZY, exact_marks)
"""One slot per running request: the working state is the state at the request's exact end, so it is donated."""

STRICT = replace(EXACT, grid=KERNEL_CHUNK, prefilled_only=True)
"""`exact` for bit-equal reuse: states on the kernel's grid and from prefill only."""

STRICT_REASONS = {Reason.FINISH: Reason.PROMPT_END, Reason.INTERVAL: Reason.PROMPT_END}
"""Decoded states are not bit-equal to prefilled ones, so strict reuse keeps the prompt's end in their place."""


def extra_buffer(page: int, overlap: bool = True) -> SlotStrategy:
    """SGLang's default: a working slot and two tracking slots (one without overlap), snapshots on a grid."""
    tracking = 2 if overlap else 1
    grid = lcm(max(KERNEL_CHUNK, page), page)
    return SlotStrategy(
        "extra_buffer", 3 + tracking, tracking, grid, page, Ending.SNAPSHOT, Cap.EAGER, rolling_marks, True
    )


def extra_buffer_lazy(page: int) -> SlotStrategy:
    """`extra_buffer` with one tracking slot, and a second one only while a decode snapshot is taken."""
    return replace(extra_buffer(page), name="extra_buffer_lazy", reserved=4, tracking=1, second=Second.IF_FREE)


NO_BUFFER = SlotStrategy(
    "no_buffer", 3, 0, 1, 1, Ending.WORKING_AT_FINISH, Cap.EAGER, exact_marks, whole_leaf=True, forks=False
)
"""Copies of the working state at chunk ends and at the finish; no fork checkpoints; overlap is off."""


def with_cap(strategy: SlotStrategy, cap: Cap | None, policy: CheckpointPolicy) -> SlotStrategy:
    """The strategy with the cap asked for, or its own.

    A rolling one that publishes chunks prunes as SGLang does.
    """
    cap = cap or strategy.cap
    if cap is Cap.EAGER and strategy.rolling and Reason.CHUNK in policy.reasons:
        cap = Cap.RELEASE
    return replace(strategy, cap=cap)
