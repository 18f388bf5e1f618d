"""A batch made ready for the layers: everything that all layers share, computed once per forward pass.

Tokens are reordered: first those of prefill spans (longest span first), then one per decode span, then padding rows:

    rows of every GEMM     | span 0 ........ | span 1 .. | ... | d0 d1 d2 ... | padding |
                           0                             prefill.count        total      padded total

The linear layers see the prefill part as kernel chunks of at most CHUNK tokens, cut at marks, each padded to `width`;
the padding has decay 1 and beta 0, so it changes no state. The convolution sees it as one array in which each span is
preceded by its window of kernel - 1 inputs (`ext`).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import pairwise
from operator import attrgetter
from typing import Any

import numpy as np
import torch

from milepost.model.batch import Batch, Span
from milepost.model.config import ATTENTION, WINDOW, ModelConfig

CHUNK = 64  # tokens of one chunk of the delta rule's matrix form
_NARROWEST = 16  # short spans are padded to a multiple of this rather than to CHUNK
_FEWEST_QUERIES = 64  # of a part of a span, where windows are shorter
_MASK_LIMIT = 1 << 22  # elements of one boolean mask; longer products are cut by queries

_ROWS = {ATTENTION: attrgetter("rows"), WINDOW: attrgetter("window")}  # of a span, up to its last position

Tensor = torch.Tensor


@dataclass
class DecodeWork:
    """Sequences that consume one token each; arrays are for compiled kernels, tensors for the others."""

    slots: np.ndarray  # int64 [batch]

    @property
    def count(self) -> int:
        return len(self.slots)

    def slots_on(self, device: torch.device) -> Tensor:
        return torch.from_numpy(self.slots).to(device)


@dataclass
class DecodeRows:
    """The KV rows that these sequences see, of each its token's own last, and the angles of these tokens."""

    rows: np.ndarray  # int32, all sequences' rows one after the other
    offsets: np.ndarray  # int64 [batch + 1], borders in `rows`
    cos: Tensor  # float32 [batch, rotary dim / 2]
    sin: Tensor
    _padded: tuple[Tensor, Tensor] | None = field(default=None, init=False)

    @property
    def count(self) -> int:
        return len(self.offsets) - 1

    def last_rows(self, device: torch.device) -> Tensor:
        """int64 [batch]: where each sequence's new KV goes."""
        return torch.from_numpy(self.rows[self.offsets[1:] - 1].astype(np.int64)).to(device)

    def padded_rows(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """(rows int64 [batch, longest] padded with the dummy, visible bool of the same shape); kept for all layers."""
        if self._padded is None:
            lengths = np.diff(self.offsets)
            visible = np.arange(lengths.max())[None] < lengths[:, None]
            rows = np.zeros(visible.shape, np.int64)
            rows[visible] = self.rows
            self._padded = torch.from_numpy(rows).to(device), torch.from_numpy(visible).to(device)
        return self._padded


@dataclass
class PrefillSpan:
    """One prefill span as attention layers of one kind see it: query i sees `reach` keys, the last its own.

    Its keys are those of `before` tokens that came before, as far as it sees, and its own.
    """

    first: int  # its first row in the reordered tokens
    length: int  # its rows, padding included (only strict mode pads)
    before: int
    reach: int
    gather: Tensor | None  # int64 [before + length] KV rows (padding: the dummy), or None: nothing before, none padded
    device: torch.device

    def parts(self) -> Iterator[tuple[slice, slice, Tensor | None]]:
        """Some queries, the keys that they see, and which of them each one sees (None: those up to its own).

        In parts of a size that keeps masks small, and of a window's four fifths of what is computed visible.
        """
        if self.gather is None and self.length <= self.reach:
            yield slice(None), slice(None), None
            return
        block = max(self.reach // 4, _FEWEST_QUERIES)
        step = max(1, min(block, _MASK_LIMIT // min(self.before + self.length, self.reach + block)))
        for first in range(0, self.length, step):
            last = min(first + step, self.length)
            before = min(self.before + first, self.reach - 1)
            keys = slice(self.before + first - before, self.before + last)
            yield slice(first, last), keys, self._mask(last - first, before)

    @cached_property
    def _mask(self) -> Callable[[int, int], Tensor]:
        """(queries, keys before the first of them) -> bool [queries, keys]; the last few are kept, for other layers."""

        reach, device = self.reach, self.device

        def make(queries: int, before: int) -> Tensor:
            ones = torch.ones((queries, before + queries), dtype=torch.bool, device=device)
            return ones.tril_(before).triu_(before - reach + 1)

        return lru_cache(3)(make)  # a window's first, middle and last parts


@dataclass
class PrefillWork:
    """The prefill part as the linear layers see it: its chunk layout (see the module)."""

    count: int  # rows, padding included
    spans: tuple[slice, ...]  # the rows of each, padding included
    slots: Tensor  # int64 [spans]
    resumed: Tensor  # bool [spans]: False where the state begins as zeros
    ext_length: int
    ext_tokens: Tensor  # int64 [count]: place of each row in ext
    ext_windows: Tensor  # int64 [spans, kernel - 1]: places of the windows
    ext_ends: Tensor  # int64 [spans, kernel - 1]: places of the windows after the span
    chunks: Tensor  # int64 [chunks, width]: place in the convolved ext of each chunk's tokens (padding: any)
    real: Tensor  # float32 [chunks, width]: 1 for tokens, 0 for padding
    chunk_rows: Tensor  # int64 [chunks, width]: the same tokens' rows in the reordered batch
    unchunk: Tensor  # int64 [count]: where each row lies in the flattened chunks (padding rows: any)
    waves: tuple[int, ...]  # chunks are numbered by waves: first the first one of each span, then the second ones, ...
    marks: dict[int, list[tuple[int, int]]]  # wave -> (span, target slot): marks inside a span, at a chunk's end
    ext_marks: Tensor  # int64 [marks, kernel - 1]: places of the windows at these marks
    mark_slots: Tensor  # int64 [marks]: their target slots


@dataclass
class View:
    """The batch as attention layers of one kind see it: rows of their pool, and the angles by which they turn.

    Prefill rows come first, `count` of them; `source` and `target` say which of them go to which KV rows.
    """

    count: int
    spans: tuple[PrefillSpan, ...]
    source: Tensor  # int64 [written]
    target: Tensor
    decode: DecodeRows | None
    cos: Tensor  # float32 [padded total, rotary dim / 2]
    sin: Tensor


@dataclass
class Work:
    """A whole batch, ready for the layers."""

    tokens: Tensor  # int64 [padded total]
    prefill: PrefillWork | None
    decode: DecodeWork | None
    views: Mapping[str, View]  # for each kind of attention that the model has
    place: np.ndarray  # int64 [total]: where the batch's i-th token went
    copies: tuple[tuple[int, int], ...]  # (working slot, target slot): marks at the end of a span
    fixed_rows: int | None  # strict mode: every GEMM has exactly this many rows
    choice: Any = field(default=None, init=False)  # what the last indexed layer saw, for those that share it


def prepare(
    batch: Batch,
    config: ModelConfig,
    frequencies: Mapping[str, Tensor],
    device: torch.device,
    *,
    decode: bool = True,
    fixed_rows: int | None = None,
) -> Work:
    """Order and index a batch. `frequencies` float32 [rotary dim / 2] for each kind of attention, on `device`.

    fixed_rows pads to that many rows (strict mode). In strict mode a batch is either one prefill span or decode
    spans, and `decode` says which, so that a block of one token can be treated as either.
    """
    first = np.cumsum([0, *(span.length for span in batch.spans)])
    steps = [i for i, span in enumerate(batch.spans) if decode and span.length == 1 and span.start > 0]
    others = sorted(set(range(len(batch.spans))) - set(steps), key=lambda i: -_chunk_count(batch.spans[i]))
    order = [np.arange(first[i], first[i + 1]) for i in (*others, *steps)]
    order = order[0] if len(order) == 1 else np.concatenate(order)
    total = len(order)
    size = total if fixed_rows is None else fixed_rows
    assert size >= total
    tokens, positions, place = np.zeros(size, np.int64), np.zeros(size, np.float32), np.empty(total, np.int64)
    tokens[:total] = batch.tokens[order]
    place[order] = np.arange(total)
    spans = [batch.spans[i] for i in (*others, *steps)]
    if len(steps) == len(spans):
        positions[:total] = [span.start for span in spans]
    else:
        positions[:total] = np.concatenate([np.arange(span.start, span.stop) for span in spans])
    parts = spans[: len(others)], spans[len(others) :]
    column = torch.from_numpy(positions).to(device)[:, None]
    return Work(
        tokens=torch.from_numpy(tokens).to(device),
        prefill=_prefill(parts[0], config.state.taps + 1, device, fixed_rows) if others else None,
        decode=DecodeWork(np.array([span.slot for span in parts[1]], np.int64)) if steps else None,
        views={kind: _view(config, kind, parts, column * turn, fixed_rows) for kind, turn in frequencies.items()},
        place=place,
        copies=tuple((span.slot, slot) for span in spans for at, slot in span.marks if at == span.stop),
        fixed_rows=fixed_rows,
    )


def _view(
    config: ModelConfig, kind: str, parts: tuple[list[Span], list[Span]], angles: Tensor, fixed_rows: int | None
) -> View:
    """What one kind of attention sees of the spans of prefill and of decode; with `fixed_rows` as in `_prefill`.

    Which rows are read follows from positions alone, however many of those behind a window a span names.
    """
    prefill, steps = parts
    reach, rows_of, device = config.attentions[kind].reach, _ROWS[kind], angles.device
    for span in (*prefill, *steps):
        assert len(rows_of(span)) >= span.length + min(span.start, reach), f"too few rows of the {kind} pool: {span}"
    first = np.cumsum([0, *(fixed_rows or span.length for span in prefill)])
    spans = []
    for begin, end, span in zip(first[:-1], first[1:], prefill, strict=True):
        length, before, gather = int(end - begin), min(span.start, reach - 1), None
        if before or length > span.length:
            rows = np.zeros(before + length, np.int64)
            seen = before + span.length
            rows[:seen] = rows_of(span)[-seen:]
            gather = torch.from_numpy(rows).to(device)
        spans.append(PrefillSpan(int(begin), length, before, reach, gather, device))

    def indexes(arrays: list[np.ndarray]) -> Tensor:
        return torch.from_numpy(np.concatenate([np.empty(0, np.int64), *arrays])).to(device)

    decode, cos, sin = None, angles.cos(), angles.sin()
    if steps:
        # Copying the rows costs 4 bytes per position and step; reading their KV costs hundreds per layer.
        seen = [rows_of(span)[-min(span.stop, reach) :] for span in steps]
        own = slice(first[-1], first[-1] + len(steps))
        offsets = np.cumsum([0, *map(len, seen)], dtype=np.int64)
        decode = DecodeRows(np.concatenate(seen, dtype=np.int32), offsets, cos[own], sin[own])
    return View(
        count=int(first[-1]),
        spans=tuple(spans),
        source=indexes([begin + np.arange(span.length) for begin, span in zip(first[:-1], prefill, strict=True)]),
        target=indexes([rows_of(span)[-span.length :] for span in prefill]),
        decode=decode,
        cos=cos,
        sin=sin,
    )


def _cuts(span: Span) -> list[int]:
    """Ends of the span's kernel chunks, relative to its start: each mark, and no chunk longer than CHUNK."""
    cuts, at = [], 0
    for border in (*(position - span.start for position, _ in span.marks), span.length):
        while at < border:
            at = min(at + CHUNK, border)
            cuts.append(at)
    return cuts


def _chunk_count(span: Span) -> int:
    return len(_cuts(span))


def _prefill(spans: Sequence[Span], kernel: int, device: torch.device, fixed_rows: int | None) -> PrefillWork:
    """The layout of the prefill part; with `fixed_rows` there is one span, padded to that many rows."""
    assert fixed_rows is None or len(spans) == 1
    lengths = [fixed_rows or span.length for span in spans]
    first = np.cumsum([0, *lengths])
    # Each span's window of kernel - 1 inputs stands before it, so span s is shifted by s + 1 windows in ext.
    shift = (np.arange(len(spans)) + 1) * (kernel - 1)
    before = np.arange(-(kernel - 1), 0)
    cuts = [[0, *_cuts(span)] for span in spans]
    longest = max(stop - start for borders in cuts for start, stop in pairwise(borders))
    width = CHUNK if fixed_rows else -(-longest // _NARROWEST) * _NARROWEST
    chunk_rows, chunk_ext, real, waves = [], [], [], []
    unchunk = np.zeros(first[-1], np.int64)
    marks: dict[int, list[tuple[int, int]]] = {}
    mark_ext, mark_slots = [], []
    inside = np.arange(width)
    for wave in range(len(cuts[0]) - 1):
        waves.append(sum(len(borders) > wave + 1 for borders in cuts))
        for s in range(waves[-1]):
            start, stop = cuts[s][wave : wave + 2]
            unchunk[first[s] + start : first[s] + stop] = len(chunk_rows) * width + inside[: stop - start]
            rows = np.minimum(inside + start, stop - 1) + first[s]
            chunk_rows.append(rows)
            # A token's oldest input stands kernel - 1 places before the token itself.
            chunk_ext.append(rows + shift[s] - (kernel - 1))
            real.append(inside < stop - start)
            for position, slot in spans[s].marks:
                if position - spans[s].start == stop and position < spans[s].stop:
                    marks.setdefault(wave, []).append((s, slot))
                    mark_ext.append(first[s] + shift[s] + stop + before)
                    mark_slots.append(slot)
    ends_ext = [first[s] + shift[s] + span.length + before for s, span in enumerate(spans)]

    def indexes(arrays: Sequence[np.ndarray] | np.ndarray) -> Tensor:
        return torch.from_numpy(np.asarray(arrays, np.int64)).to(device)

    return PrefillWork(
        count=int(first[-1]),
        spans=tuple(slice(int(start), int(stop)) for start, stop in pairwise(first)),
        slots=indexes([span.slot for span in spans]),
        resumed=torch.tensor([span.start > 0 for span in spans], device=device),
        ext_length=int(first[-1] + len(spans) * (kernel - 1)),
        ext_tokens=indexes(np.concatenate([np.arange(first[s], first[s + 1]) + shift[s] for s in range(len(spans))])),
        ext_windows=indexes([first[s] + shift[s] + before for s in range(len(spans))]),
        ext_ends=indexes(ends_ext),
        chunks=indexes(chunk_ext),
        real=torch.from_numpy(np.asarray(real, np.float32)).to(device),
        chunk_rows=indexes(chunk_rows),
        unchunk=indexes(unchunk),
        waves=tuple(waves),
        marks=marks,
        ext_marks=indexes(np.reshape(mark_ext, (len(mark_ext), kernel - 1))),
        mark_slots=indexes(mark_slots),
    )
