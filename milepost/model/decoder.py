"""The decoder: embeddings, layers of mixer and MLP, logits. One flat forward pass over a ragged batch.

Default mode runs the whole batch at once. Strict mode trades speed for reuse that is exact by construction:

* A span is computed in blocks cut at absolute multiples of 64. Each prefill block runs alone, with every GEMM, every
  attention call and every kernel chunk padded to exactly 64 rows, so what is computed for a token is the same sequence
  of calls on the same numbers and shapes whether the span began at position 0 or was resumed at a multiple of 64.
* Blocks of one token (decode) run in groups whose GEMMs have exactly 8 rows, a size from which a row's result
  no longer depends on its neighbours; everything between the GEMMs works on each sequence alone.

A cached run then equals a cold one bit for bit, if states are resumed at multiples of 64 only, and only from states
that prefill made.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from milepost.model.batch import Batch, Span
from milepost.model.config import AttentionSpec, LatentSpec, ModelConfig
from milepost.model.kernels import Kernels
from milepost.model.linear import Linear
from milepost.model.memory import Memory
from milepost.model.parts import Half
from milepost.model.stream import Stream
from milepost.model.work import CHUNK, Work, prepare

Tensor = torch.Tensor

STRICT_DECODE_ROWS = 8


@dataclass
class Block:
    """Half a layer and how it joins the stream, which depends on the kind of stream."""

    half: Half
    join: Any


@dataclass
class Parts:
    """What a decoder is made of. `stream` begins one with the embedded tokens."""

    embedding: Tensor  # [vocab, hidden]
    blocks: list[Block]
    stream: Callable[[Tensor], Stream]
    norm: Tensor
    head: Linear
    kernels: Kernels


class Decoder:
    """A loaded model. `forward` is the only thing it does; all state lies in the Memory it is given."""

    def __init__(self, config: ModelConfig, parts: Parts) -> None:
        self.config = config
        self.device = parts.embedding.device
        self.dtype = parts.embedding.dtype
        self._embedding = parts.embedding
        self._blocks = parts.blocks
        self._stream = parts.stream
        self._norm = parts.norm
        self._head = parts.head
        self._kernels = parts.kernels
        self._frequencies = {kind: _frequencies(spec).to(self.device) for kind, spec in config.attentions.items()}

    def forward(self, batch: Batch, memory: Memory, *, strict: bool = False) -> Tensor:
        """Consume the batch's tokens: states, windows and KV in `memory` move on.

        Returns the logits of batch.wanted, float32 [len(wanted), vocab].
        """
        with torch.no_grad():
            self._kernels.enter()
            if strict:
                return self._forward_strict(batch, memory)
            work = prepare(batch, self.config, self._frequencies, self.device)
            x = self._run(work, memory)
            if len(batch.wanted) == 0:
                return self._no_logits()
            return self._logits(x[torch.from_numpy(work.place[batch.wanted]).to(self.device)])

    def warm_up(self, memory: Memory) -> None:
        """Compile what is compiled at first use, in a scratch memory of the same dtypes."""
        scratch = Memory(
            self.config,
            1,
            3,
            window_rows=3,
            kv_dtype=memory.keys.dtype,
            state_dtype=memory.temporal.dtype,
            conv_dtype=memory.conv.dtype,
            device=self.device,
        )
        tokens, wanted, rows = np.zeros(2, np.int32), np.zeros(1, np.int64), np.array([1, 2, 3], np.int32)
        self.forward(Batch(tokens, (Span(0, 2, rows[:2], 1, window=rows[:2]),), wanted), scratch)
        self.forward(Batch(tokens[:1], (Span(2, 3, rows, 1, window=rows),), wanted), scratch)

    def _run(self, work: Work, memory: Memory) -> Tensor:
        """The normed stream after the last layer, [rows of work, hidden]."""
        embedded = self._embedding[work.tokens]
        if self.config.embedding_scale != 1:
            embedded *= self.config.embedding_scale
        stream = self._stream(embedded)
        for block in self._blocks:
            x = stream.enter(block.join)
            stream.leave(block.join, x, block.half.forward(x, work, memory))
        memory.copy_slots(work.copies)
        return stream.end(self._norm)

    def _logits(self, x: Tensor) -> Tensor:
        logits = self._head(x).float()
        return logits if self.config.logit_scale == 1 else logits * self.config.logit_scale

    def _no_logits(self) -> Tensor:
        return torch.empty((0, self.config.vocab_size), device=self.device)

    def _forward_strict(self, batch: Batch, memory: Memory) -> Tensor:
        logits = torch.empty((len(batch.wanted), self.config.vocab_size), device=self.device)
        steps = []
        for block in _strict_blocks(batch):
            if block.waits:
                steps.append(block)
            else:
                self._run_strict([block], memory, batch.wanted, logits)
        for first in range(0, len(steps), STRICT_DECODE_ROWS):
            self._run_strict(steps[first : first + STRICT_DECODE_ROWS], memory, batch.wanted, logits)
        return logits

    def _run_strict(self, blocks: list["_Block"], memory: Memory, wanted: np.ndarray, logits: Tensor) -> None:
        """Run one prefill block, or up to 8 blocks of one token, and fill in their wanted logits."""
        decode = blocks[0].decode
        tokens = np.concatenate([block.tokens for block in blocks])
        part = Batch(tokens, tuple(block.span for block in blocks), np.empty(0, np.int64))
        rows = STRICT_DECODE_ROWS if decode else CHUNK
        work = prepare(part, self.config, self._frequencies, self.device, decode=decode, fixed_rows=rows)
        x = self._run(work, memory)
        # From place in the batch to place in this part; the head runs on all rows, so its shape is always the same.
        place = np.concatenate([block.first + np.arange(len(block.tokens)) for block in blocks])
        hits = [(i, int(np.nonzero(place == token)[0][0])) for i, token in enumerate(wanted) if token in place]
        if hits:
            targets, sources = torch.tensor(hits, device=self.device).unbind(1)
            logits[targets] = self._logits(x)[sources]


@dataclass(frozen=True)
class _Block:
    """A part of a span between two multiples of 64."""

    span: Span
    tokens: np.ndarray
    first: int  # index of its first token in the batch
    decode: bool  # one token, and not the first of a sequence: runs as a decode step
    waits: bool  # decode, and nothing of its span comes after it: may share a group


def _strict_blocks(batch: Batch) -> list[_Block]:
    """The blocks of all spans; those of one span in order."""
    blocks = []
    first = 0
    for span in batch.spans:
        grid = range((span.start // CHUNK + 1) * CHUNK, span.stop, CHUNK)
        borders = [span.start, *grid, span.stop]
        inner = [position for position, _ in span.marks if position not in borders]
        assert not inner, f"strict mode has states at multiples of {CHUNK} and at the end of a span, not at {inner}"
        for start, stop in pairwise(borders):
            marks = tuple((position, slot) for position, slot in span.marks if position == stop)
            begin = first + start - span.start
            tokens = batch.tokens[begin : begin + stop - start]
            decode = stop - start == 1 and start > 0
            window = span.window[: len(span.window) - (span.stop - stop)]
            block = Span(start, stop, span.rows[:stop], span.slot, marks, window)
            blocks.append(_Block(block, tokens, begin, decode, decode and stop == span.stop))
        first += span.length
    return blocks


def _frequencies(spec: AttentionSpec | LatentSpec) -> Tensor:
    """Angle per position of each rotary pair, theta^(-2j/dim), float32 [rotary dim / 2] (none without positions)."""
    return 1.0 / spec.rope_theta ** (torch.arange(0, spec.rotary_dim, 2, dtype=torch.float32) / spec.rotary_dim)
