"""How long a step takes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Band:
    """Factors on computed seconds between which measured ones lie."""

    low: float
    high: float

    def of(self, seconds: float) -> tuple[float, float]:
        return self.low * seconds, self.high * seconds


class Cost(Protocol):
    """Seconds of a step; all arguments in tokens.

    `prefill`: (start, stop) of each stretch of prompt that the step computes. `contexts`: the length of each
    sequence that decodes in it, by `tokens` tokens each.
    """

    def seconds(self, prefill: Sequence[tuple[int, int]], contexts: Sequence[int], tokens: int) -> float: ...

    def band(self) -> Band:
        """How far measured seconds lie from these."""


@dataclass(frozen=True, slots=True)
class ConstantSpeed:
    """A server known by two figures: prefill tokens a second, and seconds of a decode step."""

    prefill_tps: float = 20_000.0
    decode_s: float = 0.02

    def seconds(self, prefill: Sequence[tuple[int, int]], contexts: Sequence[int], tokens: int) -> float:
        work = sum(stop - start for start, stop in prefill) / self.prefill_tps
        return work + (self.decode_s * tokens if contexts else 0.0)

    def band(self) -> Band:
        """The figures are the user's own and their error is not known; in a run they vary by a tenth at least."""
        return Band(0.9, 1.1)


@dataclass(frozen=True, slots=True)
class Drafted:
    """`cost` with speculative decoding: a step yields `speedup` tokens on average, as far as the user knows."""

    cost: Cost
    speedup: float

    def seconds(self, prefill: Sequence[tuple[int, int]], contexts: Sequence[int], tokens: int) -> float:
        steps = max(1, round(tokens / self.speedup)) if tokens else 0
        return self.cost.seconds(prefill, contexts, steps)

    def band(self) -> Band:
        return self.cost.band()
