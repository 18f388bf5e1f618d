"""What one forward pass works on: plain data, made by the engine, read by the decoder.

A batch is ragged: any mix of prefill spans (many tokens) and decode spans (one token) with no padding.
"""

from dataclasses import dataclass, field

import numpy as np

NO_ROWS = np.empty(0, np.int32)


@dataclass(frozen=True, slots=True)
class Span:
    """One sequence's part of a batch.

    start, stop  positions: `start` tokens were consumed before, `stop` are consumed after
    rows         int32 [stop]: the KV row of each position below `stop`. All are read; the last stop - start are written
    slot         the working slot, updated in place. With start == 0 the state begins as zeros, whatever the slot holds
    marks        (position, target slot), start < position <= stop, ascending: the state after exactly `position`
                 tokens is written to the target slot
    window       int32 [stop - first]: the row in the window pool of each position first ... stop - 1, where
                 first <= start - min(start, reach of a window). Written like rows, read as far as windows reach
    """

    start: int
    stop: int
    rows: np.ndarray
    slot: int
    marks: tuple[tuple[int, int], ...] = ()
    window: np.ndarray = field(default_factory=lambda: NO_ROWS)

    def __post_init__(self) -> None:
        assert 0 <= self.start < self.stop, (self.start, self.stop)
        assert len(self.rows) == self.stop, (len(self.rows), self.stop)
        assert len(self.window) == 0 or self.length <= len(self.window) <= self.stop, (len(self.window), self.stop)
        previous = self.start
        for position, _ in self.marks:
            assert previous < position <= self.stop, (self.start, self.marks, self.stop)
            previous = position

    @property
    def length(self) -> int:
        """Tokens of this span in the batch."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Batch:
    """Spans and their tokens.

    tokens  int32 [sum of span lengths], the spans' tokens one after the other
    wanted  int64: indexes into `tokens` whose logits are wanted, in the order in which they are returned
    """

    tokens: np.ndarray
    spans: tuple[Span, ...]
    wanted: np.ndarray

    def __post_init__(self) -> None:
        assert self.spans, "an empty batch"
        assert len(self.tokens) == sum(span.length for span in self.spans), (len(self.tokens), self.spans)
