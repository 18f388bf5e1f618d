"""The executor that owns bytes: a plan becomes copies and one ragged batch, logits become tokens."""

import time

import numpy as np

from milepost.core.plan import Chunk, Plan, Result
from milepost.engine.sampler import sample
from milepost.model import Batch, Decoder, Memory, Span


class TorchExecutor:
    """Runs plans on a decoder and its memory. `strict` computes for reuse that is equal to the bit."""

    def __init__(self, decoder: Decoder, memory: Memory, *, strict: bool = False) -> None:
        self.decoder = decoder
        self.memory = memory
        self.strict = strict

    def run(self, plan: Plan) -> Result:
        began = time.perf_counter()
        self.memory.copy_slots([(copy.source, copy.target) for copy in plan.copies])
        if plan.idle:
            return Result(plan.step)
        sampling = [chunk for chunk in plan.chunks if chunk.samples]
        logits = self.decoder.forward(_batch(plan.chunks), self.memory, strict=self.strict)
        drawn = sample(logits, [c.request.sampling for c in sampling], [c.stop for c in sampling]) if sampling else []
        tokens = {chunk.sequence: (token,) for chunk, token in zip(sampling, drawn, strict=True)}
        return Result(plan.step, tokens, elapsed=time.perf_counter() - began)

    def close(self) -> None:
        pass


def _batch(chunks: tuple[Chunk, ...]) -> Batch:
    spans, parts, wanted, total = [], [], [], 0
    for chunk in chunks:
        assert chunk.samples <= 1, "this executor decodes a token at a time"
        marks = tuple((mark.position, mark.slot) for mark in chunk.marks)
        spans.append(Span(chunk.start, chunk.stop, chunk.rows, chunk.slot, marks, chunk.window))
        parts.append(chunk.tokens[chunk.start : chunk.stop])
        total += chunk.stop - chunk.start
        if chunk.samples:
            wanted.append(total - 1)
    return Batch(np.concatenate(parts), tuple(spans), np.array(wanted, np.int64))
