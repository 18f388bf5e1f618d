"""What a trace says about itself: lengths, times, and how much of its prompts an endless cache could reuse.

A request can resume only where a state was kept. For each request in file order, over the full blocks of its prompt:

    any       up to the last block that an earlier prompt has too (what attention alone would reuse)
    ends      up to the last of these at which an earlier prompt ended
    forks     … or at which an earlier request left the known prefixes above its own resume point
    every n   … or the last multiple of n tokens below `any`

A share is the sum over requests of min(position, prompt) over the sum of prompts. Counted are prompts only: what an
answer leaves in a cache counts from the next prompt that repeats it. An id stands for its whole prefix, so a look at
one array per id space answers all; no list of ids is kept.
"""

from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from milepost.errors import TraceError
from milepost.sim.formats.blocks import all_ids
from milepost.sim.trace import Blocks, Run, Segments, SessionId, Trace, Turn

KNOWN, END, FORK = np.uint8(1), np.uint8(2), np.uint8(4)
EVERY = (8192,)
PERCENTS = (10, 50, 90, 99)


@dataclass(slots=True)
class Shares:
    """Tokens, summed over requests. `every`: positions at multiples of the key besides ends and forks."""

    requests: int = 0
    prompt: int = 0
    any: int = 0
    ends: int = 0
    forks: int = 0
    every: dict[int, int] = field(default_factory=dict)

    def rates(self) -> dict[str, float]:
        """Shares of the prompt tokens, as JSON values."""
        found = {"any_block": self.any, "ends": self.ends, "ends_and_forks": self.forks}
        found |= {f"ends_forks_every_{n}": tokens for n, tokens in self.every.items()}
        return {name: tokens / self.prompt if self.prompt else 0.0 for name, tokens in found.items()}


class _Space:
    """One id space: what is known of each id."""

    def __init__(self) -> None:
        self._flags: NDArray[np.uint8] = np.zeros(1024, np.uint8)

    def flags(self, runs: Sequence[Run]) -> NDArray[np.uint8]:
        """uint8 [ids]."""
        top = max(start + count for start, count in runs)
        if top > self._flags.size:
            grown = np.zeros(max(top, 2 * self._flags.size), np.uint8)
            grown[: self._flags.size] = self._flags
            self._flags = grown
        return np.concatenate([self._flags[start : start + count] for start, count in runs])

    def learn(self, runs: Sequence[Run], fork: int) -> None:
        """A prompt's ids are known now, its last is an end; `fork`: the place of a new fork, from 1 (0: none)."""
        for start, count in runs:
            self._flags[start : start + count] |= KNOWN
            if 0 < fork <= count:
                self._flags[start + fork - 1] |= FORK
            fork -= count
        self._flags[runs[-1][0] + runs[-1][1] - 1] |= END


def shares(turns: Iterable[Turn], every: Sequence[int] = EVERY) -> Shares:
    """Each id space by itself. Raises `TraceError` for turns that don't say what prompts share."""
    total = Shares(every=dict.fromkeys(every, 0))
    spaces: dict[SessionId, _Space] = defaultdict(_Space)
    pieces = _Pieces()
    runs: Sequence[Run]
    depths: NDArray[np.int64] | None
    for turn in turns:
        match turn.identity:
            case Blocks():
                runs, depths = turn.identity.runs, None
                space, block = spaces[turn.identity.space], turn.identity.block
            case Segments():
                runs, depths = pieces.runs(turn.identity)
                space, block = spaces["segments"], 1
            case None:
                raise TraceError("it has lengths only, no reuse information; what is reusable can't be told")
        _add(total, turn.prompt_len, runs, space, block, depths)
    return total


def _add(
    total: Shares, prompt: int, runs: Sequence[Run], space: _Space, block: int, depths: NDArray[np.int64] | None
) -> None:
    """One request. `depths`: int64 [ids], the tokens up to each id where these are no blocks of one size."""
    total.requests += 1
    total.prompt += prompt
    known = end = fork = 0
    if runs:
        flags = space.flags(runs)
        known = _last(flags)
        end = _last(flags[:known] & END)
        fork = _last(flags[:known] & (END | FORK))
        space.learn(runs, known if known > fork else 0)

    def tokens(place: int) -> int:
        if depths is None:
            return place * block
        return int(depths[place - 1]) if place else 0

    total.any += min(tokens(known), prompt)
    total.ends += min(tokens(end), prompt)
    total.forks += min(tokens(fork), prompt)
    for n in total.every:
        total.every[n] += min(max(tokens(fork), tokens(known) // n * n), prompt)


def _last(flags: NDArray[np.uint8]) -> int:
    """The place of the last flag, from 1; 0: there is none."""
    places = flags.nonzero()[0]
    return int(places[-1]) + 1 if places.size else 0


class _Pieces:
    """Segments as ids that stand for a whole prefix."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, str, int], int] = {}

    def runs(self, identity: Segments) -> tuple[list[Run], NDArray[np.int64]]:
        before, runs = -1, []
        for name, length in identity.prompt:
            before = self._known.setdefault((before, name, length), len(self._known))
            runs.append((before, 1))
        return runs, np.cumsum([length for _, length in identity.prompt])


def lru_hit_rate(turns: Sequence[Turn], blocks: int | None, skip: float = 0.5) -> float:
    """The share of prompt tokens that a KV-only LRU cache of that many blocks reuses; None: an endless one.

    The rule of the published curves: every id takes a block, that of a partial tail too; a hit is min(ids · block,
    prompt); only leaves are evicted, the request that runs keeps its own; counted from `skip` of the requests on.
    """
    cache: OrderedDict[int, None] = OrderedDict()
    hit = total = 0
    for i, turn in enumerate(turns):
        assert isinstance(turn.identity, Blocks) and turn.identity.space == "", "block ids of one space are needed"
        ids = all_ids(turn).tolist()
        found = next((k for k, one in enumerate(ids) if one not in cache), len(ids))
        if i >= int(len(turns) * skip):
            hit += min(found * turn.identity.block, turn.prompt_len)
            total += turn.prompt_len
        # The last block first: no block is older than those that hang from it, so the oldest is always a leaf.
        for one in reversed(ids):
            cache[one] = None
            cache.move_to_end(one)
        while blocks is not None and len(cache) > max(blocks, len(ids)):
            cache.popitem(last=False)
    return hit / total if total else 0.0


def percentile(values: Sequence[float], percent: float) -> float:
    """The element at floor(p · n) of the sorted values."""
    ordered = sorted(values)
    return ordered[min(int(percent * len(ordered) / 100), len(ordered) - 1)]


def figures(trace: Trace, every: Sequence[int] = EVERY) -> dict[str, object]:
    """Everything that `milepost trace stats` says, as JSON values. Tokens and seconds."""
    turns = trace.turns
    sessions: dict[SessionId, list[Turn]] = {}
    for turn in turns:
        sessions.setdefault(turn.session, []).append(turn)
    arrivals = [turn.arrival for turn in turns if turn.arrival is not None]
    thinks = [turn.think for turn in turns if turn.think is not None]
    roots = [known for known in sessions.values() if known[0].link is None]
    found: dict[str, object] = {
        "requests": len(turns),
        "sessions": len(roots),
        "subagents": len(sessions) - len(roots),
        "prompt_tokens": sum(turn.prompt_len for turn in turns),
        "output_tokens": sum(turn.output_len for turn in turns),
        "span_s": max(arrivals) - min(arrivals) if arrivals else None,
        "block": trace.block,
        "prompt": _spread([turn.prompt_len for turn in turns]),
        "output": _spread([turn.output_len for turn in turns]),
        "turns": _spread([len(known) for known in roots]),
        "longest_of_session": _spread([max(t.prompt_len for t in known) for known in roots]),
        "new_tokens": _spread(_new(sessions.values())),
        "think_s": _spread(thinks),
        "took_s": _spread([turn.took for turn in turns if turn.took is not None]),
        "reusable": shares(turns, every).rates() if trace.has_identity else None,
        "notes": list(trace.notes),
    }
    return found


def _new(sessions: Iterable[list[Turn]]) -> list[int]:
    """What a turn adds to prompt and answer before it; below zero where a history shrinks."""
    pairs = ((a, b) for turns in sessions for a, b in pairwise(turns))
    return [after.prompt_len - before.prompt_len - before.output_len for before, after in pairs]


def _spread(values: Sequence[float]) -> dict[str, float] | None:
    if not values:
        return None
    named = {f"p{p}": percentile(values, p) for p in PERCENTS}
    return {"mean": float(np.mean(values)), **named, "max": max(values)}
