"""Request traces in one normalised form: who asked for what, when, and what prompts share.

A `Turn` says how long prompt and answer are and, if the trace knows, which tokens they are made of:

    Segments   named pieces of exact length; prompts share tokens exactly where they share pieces from the start
    Blocks     ids of blocks of `block` tokens, run-length coded; an id stands for its block *and all before it*
    None       lengths only: no hit rate can be told from such a trace

Times are seconds. `arrival` counts from the start of the trace; `think` is the wait after the end of the turn before it
in the same session. A session may hang from another (a subagent): it starts `think` seconds after turn `after`
of its parent has ended, and the parent's next turn waits for it if it gates.
"""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from milepost.core.tokens import Tokens
from milepost.errors import TraceError
from milepost.sim.executor import scramble

SessionId = str | int
Run = tuple[int, int]
"""(first id, count): the ids first … first + count − 1."""


def expand(runs: Sequence[Run]) -> Tokens:
    """int32 [sum of the counts]."""
    if not runs:
        return np.empty(0, np.int32)
    return np.concatenate([np.arange(start, start + count, dtype=np.int32) for start, count in runs])


@dataclass(frozen=True, slots=True)
class Segments:
    """`prompt` and `output` as (name, tokens)."""

    prompt: tuple[tuple[str, int], ...]
    output: tuple[str, int]


@dataclass(frozen=True, slots=True)
class Blocks:
    """The full blocks of a prompt: floor(prompt / block) ids in runs (a block fewer where a format rounds).

    `space` names the id space: ids of two spaces never mean the same tokens. Some traces know more: `tail` is the id
    of the partial last block, `answer` are the blocks that prompt and answer together complete after the prompt's.
    """

    runs: tuple[Run, ...]
    block: int
    space: SessionId = ""
    tail: int | None = None
    answer: tuple[Run, ...] = ()

    def ids(self) -> Tokens:
        """int32 [blocks]."""
        return expand(self.runs)


@dataclass(frozen=True, slots=True)
class Link:
    """Where a subagent's session hangs: at turn `after` of session `parent`; `gates`: that session waits for it."""

    parent: SessionId
    after: int
    gates: bool = True


@dataclass(frozen=True, slots=True)
class Turn:
    """One request. Lengths in tokens; `turn` counts from 0 in its session; `took`: seconds at the recorded server."""

    session: SessionId
    turn: int
    prompt_len: int
    output_len: int
    identity: Segments | Blocks | None = None
    arrival: float | None = None
    think: float | None = None
    link: Link | None = None
    took: float | None = None


@dataclass(frozen=True, slots=True)
class Trace:
    """Turns in file order. `notes` are what a reader has to tell the user, a line each."""

    name: str
    turns: tuple[Turn, ...]
    notes: tuple[str, ...] = ()

    @property
    def has_identity(self) -> bool:
        return all(turn.identity is not None for turn in self.turns)

    @property
    def block(self) -> int | None:
        """Tokens of a block where prompts come in blocks; None for other traces."""
        sizes = {turn.identity.block for turn in self.turns if isinstance(turn.identity, Blocks)}
        return sizes.pop() if len(sizes) == 1 else None


class Material(Protocol):
    """The units that a replay feeds to the core: single tokens, or whole blocks.

    `grain` is tokens a unit. Both methods return int32 [units]; an answer has at least one, of which all but the
    last are fed.
    """

    grain: int

    def add(self, turns: Sequence[Turn]) -> None:
        """More turns that may follow each other."""

    def prompt(self, turn: Turn) -> Tokens: ...

    def output(self, turn: Turn) -> Tokens: ...


class SegmentMaterial:
    """Tokens of named segments, each a function of its name and the index alone. Made once."""

    grain = 1

    def __init__(self) -> None:
        self._made: dict[str, Tokens] = {}

    def add(self, turns: Sequence[Turn]) -> None:
        """Nothing to learn: a turn names all its pieces."""

    def prompt(self, turn: Turn) -> Tokens:
        assert isinstance(turn.identity, Segments)
        return np.concatenate([self.segment(*segment) for segment in turn.identity.prompt])

    def output(self, turn: Turn) -> Tokens:
        assert isinstance(turn.identity, Segments)
        return self.segment(turn.identity.output[0], turn.output_len)

    def segment(self, name: str, length: int) -> Tokens:
        made = self._made.get(name)
        if made is None or made.size < length:
            base = np.uint64(zlib.crc32(name.encode())) << np.uint64(32)
            mixed = scramble(base + np.arange(length, dtype=np.uint64))
            made = self._made[name] = (mixed >> np.uint64(33)).astype(np.int32)
        return made[:length]


class BlockMaterial:
    """One unit a block. A prompt has its full blocks; an answer those that it completes, ending on a block.

    What an answer's blocks are is told by the trace, or by the session's next prompt where it repeats this one; else
    they are new. So the state at a request's end lies at floor(consumed tokens / block) blocks.
    """

    def __init__(self, turns: Sequence[Turn], block: int) -> None:
        self.grain = block
        self._next: dict[tuple[SessionId, int], Turn] = {}
        self.add(turns)
        self._spaces: dict[SessionId, int] = {}
        self._fresh = 0

    def add(self, turns: Sequence[Turn]) -> None:
        """More turns that may follow each other."""
        self._next |= {(turn.session, turn.turn - 1): turn for turn in turns}

    def prompt(self, turn: Turn) -> Tokens:
        ids = self._ids(turn)
        return ids if ids.size else self.new(1)

    def output(self, turn: Turn) -> Tokens:
        assert isinstance(turn.identity, Blocks)
        start = max(1, turn.prompt_len // self.grain)
        end = max(start, (turn.prompt_len + turn.output_len - 1) // self.grain)
        known, following = self._behind(turn, start)
        if start < following <= end:
            end = following - 1
        count = end - start + 1
        return np.concatenate([known[:count], self.new(max(0, count - known.size))])

    def known(self, turn: Turn) -> Tokens:
        """All ids that are known of a prompt and its answer, from position 0 on."""
        prompt = self._ids(turn)
        return np.concatenate([prompt, self._behind(turn, prompt.size)[0]]) if prompt.size else prompt

    def _behind(self, turn: Turn, start: int) -> tuple[Tokens, int]:
        """The answer's blocks as far as they are known, and how many the next prompt has if it repeats this one.

        A next prompt without a full block beyond this answer could not resume at its end, because a match leaves the
        last unit to be computed; with tokens it could. So the answer then ends a block earlier. 0: it doesn't repeat.
        """
        assert isinstance(turn.identity, Blocks)
        known, following = np.empty(0, np.int32), 0
        after = self._next.get((turn.session, turn.turn))
        if after is not None:
            prompt, ids = self._ids(turn), self._ids(after)
            if prompt.size == start and np.array_equal(ids[:start], prompt):
                known, following = ids[start:], ids.size
        if turn.identity.answer and turn.prompt_len >= self.grain:
            known = self._mapped(expand(turn.identity.answer), turn.identity.space)
        return known, following

    def _ids(self, turn: Turn) -> Tokens:
        """Ids that differ between spaces: each space gets a range of its own, as wide as its ids reach."""
        assert isinstance(turn.identity, Blocks) and turn.identity.block == self.grain
        return self._mapped(turn.identity.ids(), turn.identity.space)

    def _mapped(self, ids: Tokens, space: SessionId) -> Tokens:
        if space == "":
            return ids
        base = self._spaces.setdefault(space, len(self._spaces))
        mixed = scramble((np.uint64(base) << np.uint64(32)) + ids.astype(np.uint64))
        return (mixed >> np.uint64(33)).astype(np.int32)

    def new(self, count: int) -> Tokens:
        """Ids that stand nowhere else."""
        self._fresh += count
        base = np.uint64(0xFFFFFFFF) << np.uint64(32)
        mixed = scramble(base + np.arange(self._fresh - count, self._fresh, dtype=np.uint64))
        return (mixed >> np.uint64(33)).astype(np.int32)


class TokenMaterial:
    """Blocks spelled out in tokens, each a function of its block's id and its place in it; what has no id is new.

    Exact to the token where the trace is, and as many times slower than `BlockMaterial` as a block has tokens.
    """

    grain = 1

    def __init__(self, turns: Sequence[Turn], block: int) -> None:
        self._blocks = BlockMaterial(turns, block)
        self._block = block
        self._last: tuple[Turn, Tokens] | None = None

    def add(self, turns: Sequence[Turn]) -> None:
        """More turns that may follow each other."""
        self._blocks.add(turns)

    def prompt(self, turn: Turn) -> Tokens:
        return self._whole(turn)[: max(1, turn.prompt_len)]

    def output(self, turn: Turn) -> Tokens:
        return self._whole(turn)[max(1, turn.prompt_len) :]

    def _whole(self, turn: Turn) -> Tokens:
        """Prompt and answer. The block that holds the end of the one and the start of the other is known as a whole."""
        if self._last is None or self._last[0] is not turn:
            ids = self._blocks.known(turn)
            size = max(1, turn.prompt_len) + max(1, turn.output_len)
            inside = np.tile(np.arange(self._block, dtype=np.uint64), ids.size)
            told = (
                scramble((np.repeat(ids, self._block).astype(np.uint64) << np.uint64(20)) + inside) >> np.uint64(33)
            ).astype(np.int32)[:size]
            self._last = turn, np.concatenate([told, self._blocks.new(size - told.size)])
        return self._last[1]


def material(trace: Trace, grain: int | None = None) -> Material:
    """What to feed to the core. `grain` in tokens: the trace's block [default], or 1 to spell blocks out.

    Raises `TraceError` for a trace that doesn't say what prompts share, and for a grain that it can't be told in.
    """
    if not trace.has_identity:
        raise TraceError(f"{trace.name}: it has lengths only, no reuse information; a hit rate can't be told from it")
    block = trace.block
    if grain not in (None, 1, block):
        allowed = "1" if block is None else f"1 or {block}"
        raise TraceError(f"{trace.name}: a grain of {grain} tokens is not possible; possible is {allowed}")
    if block is None:
        return SegmentMaterial()
    return TokenMaterial(trace.turns, block) if grain == 1 else BlockMaterial(trace.turns, block)
