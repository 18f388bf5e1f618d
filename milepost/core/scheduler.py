"""Which sequence computes what in the next step: continuous batching over two pools, or three.

    submit(request) → number          plan() → Plan             abort(number) → Event
                                      commit(Result) → [Event]

One plan holds the decodes of all running sequences, prefill chunks up to a token budget, and newly admitted
sequences, oldest first. Only running sequences may preempt, and only the youngest is preempted, so the oldest
progresses in every plan (invariant 9). A plan is a function of the calls made before it (invariant 10);
no clock is asked.

Marks get their slots last, when all that must have one has it: a checkpoint is optional, a working slot is not.
"""

from collections import deque
from dataclasses import dataclass, replace

from milepost.core.cache import Match, PrefixCache, Snapshot
from milepost.core.checkpoint import Cap, CheckpointPolicy, Ending, Reason, Second, SlotStrategy, Stretch
from milepost.core.plan import Chunk, Copy, Mark, Plan, Result
from milepost.core.pool import Owner, RowPool, SlotPool
from milepost.core.request import Finish, Request
from milepost.core.sequence import Sequence, Status
from milepost.core.stats import Counters, Loss, Reuse, Stats
from milepost.core.tokens import length
from milepost.core.tree import Node
from milepost.core.window import Window, Windows
from milepost.errors import InvalidRequest, PromptTooLong


@dataclass(frozen=True, slots=True)
class Limits:
    """`max_running` sequences at once; `chunk` prefill tokens a step; `context` tokens a sequence may reach.

    `decode_every`: beside prefills, decodes take part in every n-th plan only. 1 in an engine; where the unit is a
    block of n tokens (replays), a decode of one unit stands for n steps, so it has to wait for n chunks.
    """

    max_running: int
    chunk: int
    context: int
    decode_every: int = 1


@dataclass(frozen=True, slots=True)
class Event:
    """News of one request. Its last event, exactly one, carries `finish` and, if it ever ran, `reuse`.

    `generated` counts all its tokens so far.
    """

    sequence: Owner
    request: Request
    tokens: tuple[int, ...] = ()
    finish: Finish | None = None
    reuse: Reuse | None = None
    generated: int = 0


class Scheduler:
    def __init__(
        self,
        rows: int,
        slots: int,
        limits: Limits,
        strategy: SlotStrategy,
        policy: CheckpointPolicy,
        windows: Windows = Windows(),  # noqa: B008 - frozen
    ) -> None:
        self.strategy = strategy
        self.policy = policy
        self.windows = windows
        spare = windows.rows - strategy.windows * windows.reach
        assert spare > 0 or not windows.reach, f"{windows} are fewer than the windows of one request and a row"
        self.limits = replace(limits, chunk=min(limits.chunk, spare)) if windows.reach else limits
        self.cache = PrefixCache(RowPool(rows, strategy.page), SlotPool(slots), strategy, policy, windows)
        self.state_limit = slots // strategy.reserved
        assert self.state_limit >= 1, f"{slots} slots are fewer than the {strategy.reserved} of one request"
        self.running_limit = min(limits.max_running, self.state_limit)
        self.sequences: dict[Owner, Sequence] = {}
        self._waiting: deque[Sequence] = deque()
        self._running: dict[Owner, Sequence] = {}  # oldest admission first
        self._waiting_for = ""
        self._numbers = 0
        self._step = 0
        self._credit = 0
        self._plan: Plan | None = None

    # Requests

    def max_new(self, request: Request) -> int:
        """How many tokens the request may get; raises when it can never be served."""
        prompt, wanted = length(request.prompt), request.sampling.max_new
        pool = self.cache.rows
        if prompt == 0:
            raise InvalidRequest("the prompt is empty: at least 1 token is needed", "prompt")
        if wanted is not None and wanted < 1:
            raise InvalidRequest(f"max_tokens is {wanted}: at least 1 is needed", "max_tokens")
        if prompt + (wanted or 1) > self.limits.context:
            raise PromptTooLong(
                f"{prompt} prompt tokens and {wanted or 1} to generate make {prompt + (wanted or 1)}; "
                f"the context length is {self.limits.context}"
            )
        needed = self._pages(prompt + (wanted or 1) - 1)
        if needed > pool.size:
            unit = "rows" if pool.page == 1 else f"pages of {pool.page} rows"
            raise PromptTooLong(
                f"{prompt} prompt tokens and {(wanted or 1) - 1} fed answer tokens need {needed // pool.page} "
                f"KV {unit}; the pool has {pool.size // pool.page}"
            )
        return wanted or min(self.limits.context - prompt, pool.size - prompt + 1)

    def submit(self, request: Request) -> Owner:
        """Queue a request. Raises `RequestError` if it can never be served; nothing is kept then."""
        max_new = self.max_new(request)
        self._numbers += 1
        number = Owner(self._numbers)
        self.sequences[number] = sequence = Sequence(number, request, max_new, Window(self.cache.windows))
        self._waiting.append(sequence)
        self.counters.requests_total += 1
        return number

    def abort(self, number: Owner) -> Event | None:
        """End a request early; None if it has ended already. Not while a plan runs."""
        assert self._plan is None, "abort between plan and commit"
        sequence = self.sequences.get(number)
        if sequence is None:
            return None
        if sequence.status is Status.WAITING:
            self._waiting.remove(sequence)
        else:
            self._leave(sequence, finished=False)
        self.counters.aborted_total += 1
        return self._end(sequence, (), Finish.ABORT)

    # Plan

    def plan(self, span: int = 1) -> Plan:
        """The next step. `span` > 1 lets a plan of decodes alone cover up to that many tokens a sequence."""
        assert self._plan is None, "plan before the last one was committed"
        self._step += 1
        budget = self.limits.chunk
        self._credit += 1
        decodes = self._credit >= self.limits.decode_every
        chunks, preempted = self._continue(budget, decodes)
        budget -= sum(c.stop - c.start for c in chunks if not c.decode)
        copies: list[Copy] = []
        if not preempted:
            self._admit(budget, chunks, copies)
        if not chunks and not decodes:
            decodes = True
            chunks, _ = self._continue(0, decodes)
        self._credit = 0 if decodes else self._credit
        if span > 1 and chunks and all(c.decode for c in chunks):
            chunks = self._stretch(chunks, span)
        self._plan = Plan(self._step, tuple(copies), tuple(self._with_marks(c) for c in chunks))
        return self._plan

    def _continue(self, budget: int, decodes: bool) -> tuple[list[Chunk], bool]:
        """The chunks of running sequences, oldest first, and whether some had to be preempted for them."""
        chunks: list[Chunk] = []
        before = len(self._running)
        if decodes:
            self._grow_decodes()
        for sequence in list(self._running.values()):
            if sequence.status is not Status.RUNNING or (sequence.decoding and not decodes):
                continue
            stop = self._stop(sequence, budget)
            if stop == sequence.computed or not self._grow(sequence, stop):
                continue
            chunk = self._chunk(sequence, stop)
            budget -= 0 if chunk.decode else stop - chunk.start
            chunks.append(chunk)
        return chunks, len(self._running) < before

    def _stop(self, sequence: Sequence, budget: int) -> int:
        """How far the next chunk goes: one token in decode, else up to the budget, cut on the strategy's grid.

        A chunk that can't reach a grid point waits for a step with more budget, or with the whole budget is
        left as it is: then the grid is wider than the chunk, and no state is kept there.
        """
        start = sequence.computed
        if sequence.decoding:
            return start + 1
        stop = min(sequence.target, start + budget)
        if stop == sequence.target:
            return stop
        aligned = stop - stop % self.strategy.grid
        if aligned > start:
            return aligned
        return stop if budget == self.limits.chunk else start

    def _grow(self, sequence: Sequence, stop: int) -> bool:
        """Rows up to `stop`, preempting the youngest until there are; False if that was `sequence` itself."""
        while not self._take(sequence, stop):
            youngest = next(reversed(self._running.values()))
            self.preempt(youngest)
            if youngest is sequence:
                return False
        return True

    def _take(self, sequence: Sequence, stop: int) -> bool:
        """Rows of KV and of windows up to `stop`, where they can be had."""
        cache = self.cache
        if sequence.held < stop:
            rows = cache.take_rows(self._pages(stop) - sequence.held, sequence.number)
            if rows is None:
                return False
            sequence.hold(rows)
        missing = sequence.window.missing(stop)
        if missing:
            window = cache.take_window(missing)
            if window is None:
                return False
            sequence.window.extend(window)
        return True

    def _grow_decodes(self) -> None:
        """The next page for all decodes that need one, at once, if so many are free: the common case, made cheap."""
        short = [s for s in self._running.values() if s.decoding and s.held == s.computed]
        if len(short) * self.strategy.page <= self.cache.rows.free:
            for sequence, rows in zip(short, self.cache.rows.take_each([s.number for s in short]), strict=True):
                sequence.hold(rows)

    def preempt(self, sequence: Sequence) -> None:
        """Back to the head of the queue, leaving its prefix to the tree as any end does."""
        self._leave(sequence, finished=False)
        sequence.status = Status.WAITING
        sequence.preempted += 1
        self.counters.preempted_total += 1
        self._waiting.appendleft(sequence)

    def _admit(self, budget: int, chunks: list[Chunk], copies: list[Copy]) -> None:
        """Start waiting sequences, first come first served, while budget, slots and rows last."""
        self._waiting_for = ""
        while self._waiting:
            sequence = self._waiting[0]
            match = self.cache.match(sequence.key(sequence.known - 1), sequence.request.namespace)
            self._waiting_for = self._obstacle(sequence, match)
            if self._waiting_for or budget <= 0:
                return
            self._waiting.popleft()
            self._start(sequence, match)
            stop = self._stop(sequence, budget)
            assert sequence.lease is not None and sequence.slot is not None
            if sequence.lease.state is not None:
                source = match.node.state.device
                assert source is not None
                copies.append(Copy(source, sequence.slot))
            if stop > sequence.computed:
                grown = self._grow(sequence, stop)
                assert grown, "admitted without room"
                chunks.append(self._chunk(sequence, stop))
                budget -= stop - match.resume

    def _obstacle(self, sequence: Sequence, match: Match) -> str:
        """What keeps the head of the queue from starting; empty if nothing does.

        A fresh sequence needs room for its prompt besides what running prefills still have to take. One that
        was preempted comes back only when all it may still need fits.
        """
        if len(self._running) >= self.running_limit:
            return "state pool" if self.state_limit <= self.limits.max_running else "running limit"
        rows, slots = self.cache.room(match)
        if slots < 1 + self.strategy.tracking:
            return "state pool"
        if self.windows.rows < self._window_rows(sequence):
            return "window pool"
        promised = sum(max(0, self._pages(s.target) - s.held) for s in self._running.values())
        whole = sequence.prompt + sequence.max_new - 1 if sequence.preempted else sequence.known
        return "kv pool" if rows - promised < self._pages(whole) - match.resume else ""

    def _window_rows(self, sequence: Sequence) -> int:
        """Window rows with which all that run, and `sequence`, can go on to their ends: windows, decodes, a chunk.

        What they share now does not count: they may part.
        """
        reach, count = self.windows.reach, self.strategy.windows
        if not reach:
            return 0
        ends = [s.prompt + s.max_new for s in (*self._running.values(), sequence)]
        return sum(count * min(reach, end) for end in ends) + len(self._running) + self.limits.chunk

    def _start(self, sequence: Sequence, match: Match) -> None:
        cache = self.cache
        sequence.lease = cache.acquire(match, sequence.number)
        sequence.window.resume(match.node.window, match.resume)
        sequence.slot = cache.take_slot(sequence.number) or cache.take_over(sequence.lease)
        tracking = [cache.take_slot(sequence.number) for _ in range(self.strategy.tracking)]
        sequence.tracking = [slot for slot in tracking if slot is not None]
        assert len(sequence.tracking) == self.strategy.tracking
        sequence.held = 0
        sequence.hold(cache.path_rows(sequence.lease.node))
        sequence.computed = match.resume
        sequence.target = sequence.known
        fork = match.kv_depth - match.kv_depth % self.strategy.grid
        sequence.fork = fork if fork > match.resume and self.strategy.forks else 0
        sequence.status = Status.RUNNING
        self._running[sequence.number] = sequence
        if sequence.reuse is None:
            sequence.reuse = self._explain(sequence, match)

    def _explain(self, sequence: Sequence, match: Match) -> Reuse:
        """Counted once per request, at its first admission."""
        seen, differs = self.cache.agreement(match, sequence.key(sequence.known - 1))
        loss = match.loss
        if loss is None and seen > match.kv_depth:
            loss = Loss.KV_PRESSURE
        if sequence.prompt <= self.strategy.grid and not match.resume:
            loss = Loss.SHORT
        reuse = Reuse(sequence.prompt, seen, match.kv_depth, match.resume, loss, seen if differs else None)
        self.counters.admitted(reuse)
        return reuse

    def _chunk(self, sequence: Sequence, stop: int) -> Chunk:
        assert sequence.slot is not None and sequence.held >= stop
        return Chunk(
            sequence.number,
            sequence.request,
            sequence.computed,
            stop,
            sequence.tokens[: sequence.known],
            sequence.rows[:stop],
            sequence.slot,
            samples=int(stop == sequence.known),
            decode=sequence.decoding,
            window=sequence.window.until(stop),
        )

    def _stretch(self, chunks: list[Chunk], span: int) -> list[Chunk]:
        """Let a plan of single decodes cover up to `span` tokens, as far as nothing ends and the rows last."""
        sequences = [self.sequences[c.sequence] for c in chunks]
        span = min(span, *(s.max_new - s.generated for s in sequences))
        rows, windows = self.cache.rows.free + self.cache.victims.rows, self.cache.windows.room
        while (
            sum(self._pages(s.computed + span) - s.held for s in sequences) > rows
            or sum(s.window.missing(s.computed + span) for s in sequences) > windows
        ):
            span //= 2
        if span <= 1:
            return chunks
        longer = []
        for sequence in sequences:
            stop = sequence.computed + span
            grown = self._grow(sequence, stop)
            assert grown
            chunk = self._chunk(sequence, stop)
            longer.append(replace(chunk, samples=span))
        return longer

    def _with_marks(self, chunk: Chunk) -> Chunk:
        """Add the states wanted inside the chunk, as far as slots can be had."""
        sequence = self.sequences[chunk.sequence]
        stretch = Stretch(
            chunk.start, chunk.stop, sequence.prompt, not chunk.decode, sequence.fork, sequence.request.keep
        )
        wanted = self.strategy.marks(stretch, self.policy, self.strategy.grid) if self.policy.reasons else []
        marks = []
        for position, reason in wanted:
            if self.strategy.rolling:
                if chunk.decode and self.strategy.second is Second.IF_FREE and self.cache.slots.free:
                    sequence.tracking.insert(0, self.cache.slots.take(sequence.number))
                marks.append(Mark(position, sequence.tracking[0], reason))
                continue
            slot = self.cache.take_slot(sequence.number)
            if slot is None:
                self.counters.checkpoints_skipped_total += 1
            else:
                marks.append(Mark(position, slot, reason))
        return replace(chunk, marks=tuple(marks)) if marks else chunk

    # Commit

    def commit(self, result: Result) -> list[Event]:
        """Take over what the executor has done: positions, states, tokens; publish; finish what is finished."""
        plan, self._plan = self._plan, None
        assert plan is not None and result.step == plan.step, "a result without its plan"
        self.counters.steps_total += 1
        events = []
        for chunk in plan.chunks:
            sequence = self.sequences[chunk.sequence]
            assert sequence.lease is not None
            self.cache.restored(sequence.lease)
            sequence.computed = chunk.stop
            self.counters.computed_tokens_total += chunk.stop - chunk.start
            tokens = result.tokens.get(chunk.sequence, ())
            assert len(tokens) == chunk.samples
            sequence.append(tokens)
            for mark in chunk.marks:
                self._keep(
                    sequence, Snapshot(mark.position, mark.slot, mark.reason, sequence.window.before(mark.position))
                )
            sequence.window.move(chunk.stop)
            if tokens:
                events.append(self._advance(sequence, tokens, chunk.sequence in result.stopped))
        return events

    def _keep(self, sequence: Sequence, mark: Snapshot) -> None:
        """A state was written at a mark: publish it, or keep it as the rolling snapshot."""
        assert sequence.lease is not None
        if self.strategy.rolling:
            sequence.tracking.append(sequence.tracking.pop(0))
            if len(sequence.tracking) > self.strategy.tracking:
                self.cache.slots.give(sequence.tracking.pop(0), sequence.number)
            self._roll(sequence, mark)
            wanted = mark.reason in self.policy.reasons or mark.reason is Reason.ASKED
            if not wanted or mark.reason is Reason.INTERVAL:
                return
            fresh = self.cache.take_slot(sequence.number) if self._slot_to_spare() else None
            if fresh is None:
                self.counters.checkpoints_skipped_total += 1
                return
            sequence.tracking[sequence.tracking.index(mark.slot)] = fresh
        self.cache.publish(sequence.lease, sequence.key(mark.position), sequence.rows, mark)
        self._roll(sequence, None)

    def _roll(self, sequence: Sequence, snapshot: Snapshot | None) -> None:
        """The rolling snapshot gives way to the next, or to none."""
        if snapshot is not None:
            self.cache.windows.use(snapshot.window)
        if sequence.snapshot is not None:
            self.cache.windows.unuse(sequence.snapshot.window)
        sequence.snapshot = snapshot

    def _slot_to_spare(self) -> bool:
        """Whether a checkpoint may take a slot: not the one with which the head of the queue could start."""
        if not self._waiting or len(self._running) >= self.running_limit:
            return True
        cache = self.cache
        return cache.slots.free + cache.victims.states > 1 + self.strategy.tracking

    def _advance(self, sequence: Sequence, tokens: tuple[int, ...], stopped: bool) -> Event:
        """Tokens were drawn: report them, and the end if they make one."""
        self.counters.generated_tokens_total += len(tokens)
        finish = None
        if stopped or tokens[-1] in sequence.request.sampling.stop_ids:
            finish = Finish.STOP
        elif sequence.generated >= sequence.max_new:
            finish = Finish.LENGTH
        if finish is None:
            return Event(sequence.number, sequence.request, tokens, generated=sequence.generated)
        self._leave(sequence, finished=True)
        self.counters.finished_total += 1
        return self._end(sequence, tokens, finish)

    # Ends

    def _leave(self, sequence: Sequence, finished: bool) -> None:
        """The one way to let go of memory: publish what is whole, give back the rest, release the lease."""
        cache, lease, number = self.cache, sequence.lease, sequence.number
        assert lease is not None and sequence.slot is not None
        tail = self._bequeath(sequence, finished)
        cache.rows.give(sequence.rows[lease.node.end : sequence.held].copy(), number)
        sequence.window.close()
        self._roll(sequence, None)
        for slot in (sequence.slot, *sequence.tracking):
            if slot is not None:
                cache.slots.give(slot, number)
        cache.release(lease)
        if tail is not None and finished and self.strategy.cap is not Cap.RELEASE:
            cache.cap(tail)
        sequence.lease = sequence.slot = None
        sequence.tracking = []
        sequence.held = sequence.computed = 0
        del self._running[number]

    def _bequeath(self, sequence: Sequence, finished: bool) -> Node | None:
        """Publish what the end of a sequence leaves to the tree; the node of its last state, if there is one."""
        strategy, lease = self.strategy, sequence.lease
        assert lease is not None
        if not self.policy.reasons or not (finished or strategy.ending is Ending.WORKING):
            return None
        if strategy.ending is Ending.SNAPSHOT:
            mark = sequence.snapshot
            if mark is None or Reason.FINISH not in self.policy.reasons:
                return lease.node if lease.node.state.device is not None else None
            sequence.tracking.remove(mark.slot)
            tail = mark._replace(reason=Reason.FINISH)
            return self.cache.publish(lease, sequence.key(mark.position), sequence.rows, tail)
        stop = min(sequence.computed, sequence.prompt) if strategy.prefilled_only else sequence.computed
        if stop == 0 or stop < lease.node.end:
            return None
        donated = None
        whole = stop == sequence.computed and stop % strategy.grid == 0
        if whole and Reason.FINISH in self.policy.reasons:
            assert sequence.slot is not None
            window = sequence.window.before(stop)
            donated, sequence.slot = Snapshot(stop, sequence.slot, Reason.FINISH, window), None
        return self.cache.publish(lease, sequence.key(stop), sequence.rows, donated)

    def _end(self, sequence: Sequence, tokens: tuple[int, ...], finish: Finish) -> Event:
        sequence.status = Status.DONE
        del self.sequences[sequence.number]
        return Event(sequence.number, sequence.request, tokens, finish, sequence.reuse, sequence.generated)

    # Reports

    @property
    def counters(self) -> Counters:
        return self.cache.counters

    @property
    def busy(self) -> bool:
        return bool(self._running or self._waiting)

    def running(self) -> list[Sequence]:
        return list(self._running.values())

    def waiting(self) -> list[Sequence]:
        return list(self._waiting)

    def stats(self) -> Stats:
        states, rows, windows = self.cache.use()
        return Stats(
            states,
            rows,
            windows,
            len(self._running),
            len(self._waiting),
            self.running_limit,
            self.strategy.reserved,
            self._waiting_for,
        )

    def flush(self) -> bool:
        """Empty the cache; refused while something runs or waits."""
        if self.busy:
            return False
        self.cache.flush()
        return True

    def _pages(self, tokens: int) -> int:
        """Rows that hold `tokens`: whole pages."""
        page = self.strategy.page
        return -(-tokens // page) * page
