"""The real executor under a bare scheduler: texts, margins of the two best logits, audit after each step."""

from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import numpy as np
import torch

import milepost
from milepost.core.audit import check
from milepost.core.checkpoint import EXACT, CheckpointPolicy, SlotStrategy
from milepost.core.request import Request, Sampling
from milepost.core.scheduler import Event, Limits, Scheduler
from milepost.core.tokens import pack, unpack
from milepost.core.window import Windows
from milepost.engine.executor import TorchExecutor
from milepost.engine.text import Text
from milepost.model import Decoder, Memory, load_decoder

DEMO = Path(milepost.__file__).parent / "demo"


@cache
def demo_decoder(dtype: torch.dtype = torch.float32) -> Decoder:
    return load_decoder(DEMO, dtype=dtype)


@cache
def demo_tokens() -> np.ndarray:
    """About 6,000 tokens of running text."""
    text = (DEMO / "README.md").read_text() + (Path(milepost.__file__).parent.parent / "LICENSE").read_text()
    return unpack(Text.load(DEMO).encode(text))


@dataclass
class World:
    """One server's worth of core and memory around a decoder."""

    rows: int = 60_000
    slots: int = 64
    policy: CheckpointPolicy = field(default_factory=CheckpointPolicy)
    strategy: SlotStrategy = EXACT
    limits: Limits = field(default_factory=lambda: Limits(8, 512, 32_768))
    strict: bool = False
    decoder: Decoder = field(default_factory=demo_decoder)
    window_rows: int = 2_000

    def __post_init__(self) -> None:
        page = self.strategy.page
        config, dtype = self.decoder.config, self.decoder.dtype
        windows = Windows(self.window_rows, config.window.reach) if config.window else Windows()
        self.scheduler = Scheduler(self.rows, self.slots, self.limits, self.strategy, self.policy, windows)
        self.memory = Memory(config, self.slots, self.rows + page - 1, window_rows=windows.rows, kv_dtype=dtype)
        self.executor = TorchExecutor(self.decoder, self.memory, strict=self.strict)
        self.texts: dict[int, list[int]] = {}
        self.margins: dict[int, list[float]] = {}
        self.logits: dict[int, list[torch.Tensor]] = {}
        self.ends: dict[int, Event] = {}

    def submit(self, prompt: np.ndarray, max_new: int, **fields: object) -> int:
        request = Request("r", pack(prompt), Sampling(max_new=max_new), **fields)  # type: ignore[arg-type]
        number = self.scheduler.submit(request)
        self.texts[number], self.margins[number], self.logits[number] = [], [], []
        return number

    def step(self) -> None:
        plan = self.scheduler.plan()
        seen: list[torch.Tensor] = []
        forward = self.decoder.forward

        def watched(*args, **kwargs):
            seen.append(forward(*args, **kwargs))
            return seen[-1]

        self.executor.decoder = _Watched(watched)
        result = self.executor.run(plan)
        sampling = [chunk.sequence for chunk in plan.chunks if chunk.samples]
        for number, row in zip(sampling, seen[0] if seen else [], strict=True):
            best = row.topk(2).values
            self.margins[number].append(float(best[0] - best[1]))
            self.logits[number].append(row.clone())
        for event in self.scheduler.commit(result):
            self.texts[event.sequence] += event.tokens
            if event.finish is not None:
                self.ends[event.sequence] = event
        check(self.scheduler)

    def drain(self) -> None:
        while self.scheduler.busy:
            self.step()

    def run(self, prompts: list[np.ndarray], max_new: int, at_once: int = 1) -> list[int]:
        """All prompts, `at_once` of them together; their numbers in order."""
        numbers = []
        for first in range(0, len(prompts), at_once):
            numbers += [self.submit(prompt, max_new) for prompt in prompts[first : first + at_once]]
            self.drain()
        return numbers

    def cached(self, number: int) -> int:
        reuse = self.ends[number].reuse
        assert reuse is not None
        return reuse.resume


class _Watched:
    """A decoder whose logits are looked at on their way."""

    def __init__(self, forward) -> None:
        self.forward = forward
