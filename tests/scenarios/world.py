"""What the scenarios are written in: streams of tokens, figures by strategy, and a world that runs requests.

`A * 4096 + B * 100` reads as in the scenarios: the first 4096 tokens of stream A, then 100 of stream B. Streams
differ from the first token on, and what the simulated model says lies in a range of its own, so no stream is ever
continued by chance.

A `World` is a scheduler over tagged memory that is audited after each step: a resume at a wrong depth, a state of
another prefix or a row that was freed fails at the first read, whatever a test looks at. Its text is compared with
the text that the prefix alone demands, so "text equals cold" is part of every request.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from zlib import crc32

import numpy as np
import pytest

from milepost.config import CacheConfig, resolve
from milepost.core.audit import audit
from milepost.core.cache import Lease
from milepost.core.checkpoint import SlotStrategy
from milepost.core.plan import Chunk, Executor, Plan
from milepost.core.pool import Owner
from milepost.core.request import Finish, Request, Sampling
from milepost.core.scheduler import Event, Limits, Scheduler
from milepost.core.sequence import Sequence
from milepost.core.stats import Counters, Loss, Reuse, Stats
from milepost.core.tokens import pack, unpack
from milepost.core.tree import Node
from milepost.core.window import Windows
from milepost.sim.executor import Memory, SimExecutor, digests

Tokens = list[int]

ROWS = 262_144
SLOTS = 64
INTERVAL = 64
PAGE = 64  # of the compatibility strategies
AUDITED = 20_000  # rows in use up to which each step is audited; the audit sorts them all
SELDOM = 100  # steps between two audits of a fuller world
OWN = 2**30  # tokens of streams lie below, tokens of the simulated model from here on


@dataclass(frozen=True)
class Stream:
    """An endless text without repetition. `stream * n` are its first n tokens, `stream(i)` is another one."""

    name: str
    vocabulary: int = OWN

    def __call__(self, number: int) -> "Stream":
        return Stream(f"{self.name}{number}", self.vocabulary)

    def __mul__(self, count: int) -> Tokens:
        tokens = np.random.default_rng(crc32(self.name.encode())).integers(3, self.vocabulary, count)
        return list(tokens.tolist())


A, B, D, E, F, H, J, K, P, Q, T, X, Y, Z = map(Stream, "ABDEFHJKPQTXYZ")


def figures(**by_strategy: object) -> pytest.MarkDecorator:
    """A test once per strategy, with the scenario's figures for it as `expected`."""
    cases = [pytest.param(name, value, id=name) for name, value in by_strategy.items()]
    return pytest.mark.parametrize(("strategy", "expected"), cases)


BOTH = pytest.mark.parametrize("strategy", ["exact", "extra_buffer"])


def either(strategy: str, exact: int, extra_buffer: int) -> int:
    """The scenarios' "N = a / b"."""
    return exact if strategy == "exact" else extra_buffer


@dataclass(frozen=True)
class Answer:
    """A request that has ended. `context` is prompt + fed tokens, `said` prompt + all sampled ones."""

    prompt: Tokens
    text: Tokens
    finish: Finish
    reuse: Reuse

    @property
    def resume(self) -> int:
        return self.reuse.resume

    @property
    def context(self) -> Tokens:
        return self.said[:-1]

    @property
    def said(self) -> Tokens:
        return self.prompt + self.text


def continue_from(position: int, digest: int, count: int, own: int) -> Tokens:
    """What the simulated model says after a prefix: ids from `own` to 2 · `own`, functions of the whole prefix."""
    said = []
    for place in range(position, position + count):
        token = own + digest % own
        said.append(token)
        digest = int(digests(np.array([token], np.int32), place, digest)[0])
    return said


class World:
    """A server without HTTP. Sizes are N (`slots`), M (`rows`), C (`chunk`) and R (`running`) of the scenarios.

    `flags` are fields of `CacheConfig`; `change` may alter the strategy that comes out of them.
    """

    own = OWN

    def __init__(
        self,
        strategy: str | None = "exact",
        *,
        slots: int = SLOTS,
        rows: int = ROWS,
        chunk: int = 2048,
        running: int = 1000,
        level: int = 2,
        windows: Windows = Windows(),  # noqa: B008 - frozen
        change: Callable[[SlotStrategy], SlotStrategy] = lambda strategy: strategy,
        **flags: object,
    ) -> None:
        if (strategy or "").startswith("extra_buffer"):
            flags.setdefault("page_size", PAGE)
        flags.setdefault("mamba_track_interval", INTERVAL)
        config = CacheConfig(
            chunked_prefill_size=chunk,
            hybrid_cache_checkpoints_level=level,
            mamba_radix_cache_strategy=strategy,
            **flags,  # type: ignore[arg-type]
        )
        resolved = resolve(config, windows=windows.reach > 0)
        self.strategy = change(resolved.strategy)
        self.rows = rows // self.strategy.page * self.strategy.page
        limits = Limits(running, chunk, 10**6)
        self.scheduler = Scheduler(self.rows, slots, limits, self.strategy, resolved.policy, windows)
        self.executor = self.make_executor(slots)
        self.prompts: dict[Owner, Tokens] = {}
        self.texts: dict[Owner, Tokens] = {}
        self.scripts: dict[Owner, Tokens] = {}
        self.ends: dict[Owner, Event] = {}
        self._leases: list[Lease] = []

    # What the simulated model is

    def make_executor(self, slots: int) -> Executor:
        return SimExecutor(self.draw, memory=Memory(self.rows + self.strategy.page, slots, self.scheduler.windows))

    def draw(self, chunk: Chunk, digest: int) -> tuple[int, ...]:
        script = self.scripts.get(chunk.sequence)
        if script is None:
            return tuple(continue_from(chunk.tokens.size, digest, chunk.samples, self.own))
        said = chunk.tokens.size - len(self.prompts[chunk.sequence])
        return tuple(script[said : said + chunk.samples])

    def say(self, prompt: Tokens, count: int) -> Tokens:
        """The answer to a prompt, on any server."""
        return continue_from(len(prompt), int(digests(np.array(prompt, np.int32))[-1]), count, self.own)

    def check_text(self, number: Owner, text: Tokens) -> None:
        demanded = self.scripts.get(number) or self.say(self.prompts[number], len(text))
        assert text == demanded[: len(text)], f"the text of request {number} is not that of its prefix"

    # Requests

    def start(
        self,
        prompt: Tokens,
        gen: int | None = 1,
        *,
        script: Tokens | None = None,
        keep: tuple[int, ...] = (),
    ) -> Owner:
        """Queue a request. A `script` is what the model will say to it."""
        sampling = Sampling(max_new=gen if script is None else len(script))
        number = self.scheduler.submit(Request("r", pack(prompt), sampling, keep=keep))
        self.prompts[number], self.texts[number] = prompt, []
        if script is not None:
            self.scripts[number] = script
        return number

    def ask(self, prompt: Tokens, gen: int | None = 1, **more: object) -> Answer:
        """One request, and whatever else is there, to the end."""
        number = self.start(prompt, gen, **more)  # type: ignore[arg-type]
        self.drain()
        return self.answer(number)

    def resumes(self, prompts: list[Tokens], gen: int = 1) -> list[int]:
        """How much each of these requests reuses, one after another."""
        return [self.ask(prompt, gen).resume for prompt in prompts]

    def answer(self, number: Owner) -> Answer:
        end = self.ends[number]
        assert end.finish is not None and end.reuse is not None
        return Answer(self.prompts[number], self.texts[number], end.finish, end.reuse)

    def cancel(self, number: Owner) -> bool:
        """False if it has ended already."""
        event = self.scheduler.abort(number)
        if event is None:
            return False
        self._record(event)
        self.audit()
        return True

    def sequence(self, number: Owner) -> Sequence:
        return self.scheduler.sequences[number]

    # Time

    def tick(self, count: int = 1, span: int = 1) -> Plan:
        """That many steps; the last plan."""
        for _ in range(count):
            plan = self.scheduler.plan(span)
            for event in self.scheduler.commit(self.executor.run(plan)):
                self._record(event)
            if self.rows - self.scheduler.cache.rows.free <= AUDITED or plan.step % SELDOM == 0:
                self.audit()
        return plan

    def drain(self) -> int:
        """Steps until nothing runs or waits; each has to do something."""
        steps = 0
        while self.scheduler.busy:
            plan = self.tick(span=1_000_000)
            assert not plan.idle, f"nothing runs, {len(self.scheduler.waiting())} wait: {self.stats.waiting_for}"
            steps += 1
        return steps

    def _record(self, event: Event) -> None:
        number = event.sequence
        self.texts[number] += event.tokens
        if event.finish is not None:
            assert number not in self.ends, "two terminal events"
            self.ends[number] = event
            self.check_text(number, self.texts[number])

    def audit(self) -> None:
        """Nothing is wrong. Pins that the test itself took are the one thing that no sequence can answer for."""
        found = [line for line in audit(self.scheduler) if not (self._leases and line.startswith("6: "))]
        assert not found, "\n".join(["the audit found:", *found])

    # Looking

    @property
    def counters(self) -> Counters:
        return self.scheduler.counters

    @property
    def stats(self) -> Stats:
        return self.scheduler.stats()

    @property
    def held(self) -> int:
        return self.stats.states.held

    def unmarked(self, path: Tokens | None = None) -> list[int]:
        """The positions of unmarked checkpoints, in the tree or on a path, shallowest first."""
        return sorted(node.end for node in self._holders(path) if not self.scheduler.cache.victims.is_marked(node))

    def marked(self, path: Tokens | None = None) -> list[int]:
        return sorted(node.end for node in self._holders(path) if self.scheduler.cache.victims.is_marked(node))

    def _holders(self, path: Tokens | None) -> list[Node]:
        cache = self.scheduler.cache
        if path is None:
            return [node for node in cache.tree.nodes() if node.state.device is not None]
        walk = cache.tree.walk(cache.tree.root(""), pack(path), len(path) // self.strategy.page * self.strategy.page)
        node, holders = walk.node, []
        while node.parent is not None:
            if node.state.device is not None:
                holders.append(node)
            node = node.parent
        return holders

    # Hooks of the tests

    def drop_windows(self, path: Tokens, since: int) -> None:
        """Window rows of positions from `since` on are needed elsewhere: who keeps them on this path loses them."""
        for node in [node for node in self._holders(path) if node.end > since]:
            self.scheduler.cache.drop_state(node, Loss.WINDOW_PRESSURE)
        self.audit()

    def window_rows(self, path: Tokens) -> int:
        """Window rows that the checkpoints on a path keep."""
        return len({row for node in self._holders(path) for row in node.window.tolist()})

    def drop_states(self, path: Tokens, at: int | None = None) -> None:
        """The checkpoints on a path (or the one at a position of it) are gone, their KV stays."""
        dropped = [node for node in self._holders(path) if at in (None, node.end)]
        assert dropped, "no checkpoint to drop"
        for node in dropped:
            self.scheduler.cache.drop_state(node, Loss.STATE_PRESSURE)
        self.audit()

    @contextmanager
    def pinned_states(self) -> Iterator[int]:
        """All checkpoints in the tree are pinned, as by a reader that never ends; yields how many there are."""
        cache = self.scheduler.cache
        holders = self._holders(None)
        for number, node in enumerate(holders):
            key = []
            above: Node | None = node
            while above is not None:
                key.insert(0, unpack(above.edge))
                above = above.parent
            match = cache.match(pack(np.concatenate(key)))
            assert match.node is node
            self._leases.append(cache.acquire(match, Owner(10**6 + number)))
        try:
            yield len(holders)
        finally:
            for lease in self._leases:
                cache.release(lease)
            self._leases.clear()
            self.audit()

    def close(self) -> None:
        """What every scenario ends with: nothing is held when idle, and an emptied cache leaves whole pools."""
        self.drain()
        self.audit()
        for pool in (self.stats.states, self.stats.rows, self.stats.windows):
            assert pool.held == 0 and pool.free + pool.evictable == pool.size
        assert self.scheduler.flush()
        assert self.stats.states.free == self.stats.states.size and self.stats.rows.free == self.rows
        assert self.stats.windows.free == self.stats.windows.size
        assert not self.scheduler.cache.tree.nodes()
