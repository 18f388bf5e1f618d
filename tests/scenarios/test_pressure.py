"""Who waits, what is skipped, and what goes first when slots or rows run out (scenarios 3, 4, 6, 20 and 23)."""

import pytest

from tests.scenarios.world import BOTH, A, B, D, E, F, H, J, K, Q, World, X, Y, either, figures

# Pool exhaustion


class Full:
    """Scenario 7 when R4 arrives: R2 and R3 decode, R1 has passed its first chunk end, every checkpoint is pinned.

    R3 ends in the next step.
    """

    def __init__(self, world, strategy: str) -> None:
        cached = either(strategy, 5, 6)  # two of them the prompt ends of R2 and R3
        self.w = w = world(strategy, slots=either(strategy, 8, 15), rows=65_536, chunk=1024, level=3)
        self.second = w.start(J * 70, 40)
        self.third = w.start(K * 70, 1 + (cached - 2) + 2)
        w.tick()
        for number in range(cached - 2):
            w.start(X(number) * 70)
            w.tick()
        assert len(w.unmarked()) == cached
        self.first = None

    def arrive(self) -> None:
        self.first = self.w.start(A * 3000)
        self.w.tick()
        self.fourth = self.w.start(D * 500)


@pytest.fixture
def full(world, strategy):
    return Full(world, strategy)


@figures(exact=8, extra_buffer=15)
def test_s07_nothing_can_be_evicted(full, expected):
    """An optional checkpoint is skipped, a request waits; neither is an error, and nobody is retracted."""
    w = full.w
    with w.pinned_states():
        full.arrive()
        assert (w.counters.checkpoints_skipped_total, w.held) == (1, expected)
        w.tick()
        assert full.third in w.ends and w.sequence(full.fourth).slot is None
    w.drain()
    assert full.fourth in w.ends and w.counters.preempted_total == 0
    assert w.stats.states.free + w.stats.states.evictable == expected


@BOTH
def test_s07_a_waiting_request_comes_before_a_checkpoint(full):
    """R4 starts in the first pass after R3 ended; the chunk ends of R1 get what is left."""
    with full.w.pinned_states():
        full.arrive()
        full.w.tick()
        assert full.third in full.w.ends
        started = full.w.tick()
        assert full.fourth in [chunk.sequence for chunk in started.chunks]


@BOTH
def test_s07_the_wait_is_explained(full):
    """R4 waits for the state pool, whoever else computes in the meantime."""
    with full.w.pinned_states():
        full.arrive()
        full.w.tick()
        assert full.w.stats.waiting_for == "state pool"


@BOTH
def test_s08_answer_without_end(world, strategy):
    """Without max_new a prompt is prefilled once, its answer ends with the pool, and the next one starts at once."""
    w = world(strategy, slots=8, rows=16_384)
    first, second = w.start(A * 16_300, None), w.start(B * 100)
    while first not in w.ends:
        assert second not in w.ends
        w.tick()
    answer = w.answer(first)
    assert (answer.finish, len(answer.text)) == ("length", 85)
    assert (w.counters.computed_tokens_total, w.counters.preempted_total) == (16_300 + 84, 0)
    w.tick(3)
    assert second in w.ends


# Slot leaks


@figures(exact=8, extra_buffer=24)
def test_s10_cancel_in_the_gap_between_match_and_run(world, strategy, expected):
    """Pins and slots taken for a waiting request go back with its cancel; it has computed nothing to donate."""
    w = world(strategy, slots=either(strategy, 16, 40), rows=65_536, running=8)
    w.ask(A * 4096)
    for number in range(8):
        w.start(Y(number) * 100, 150)
    w.tick()
    for number in range(100):
        waiting = w.start(A * 4096 + B(number) * 100)
        w.tick()
        assert w.stats.waiting == 1
        assert w.cancel(waiting)
        assert w.held == expected
    published = w.counters.checkpoints_published_total
    w.drain()
    assert published == 1 and w.held == 0
    assert w.stats.states.free + w.stats.states.evictable == either(strategy, 16, 40)


@figures(exact=500, extra_buffer=448)
def test_s11_conversation_open_and_close_loop(world, strategy, expected):
    """Two hundred conversations, some closed while they talk, some closed twice: each finds the server as the first."""
    w = world(strategy, slots=32, rows=200_000)
    for i in range(1, 201):
        turn = w.start(A(i) * 500)
        assert w.drain() == 1 and w.answer(turn).resume == 0
        turn = w.start(A(i) * 500 + B(i) * 200, 50 if i % 10 == 0 else 1)
        w.tick()
        if i % 10 == 0:
            assert w.cancel(turn)
        assert w.answer(turn).resume == expected
        for _ in range(2 if i % 20 == 0 else 1):
            assert not w.cancel(turn)
        assert w.held == 0


# Eviction thrash


@figures(exact=([2099, 4199, 6299, 8399, 10_499], 251_960), extra_buffer=([2048, 4160, 6272, 8384, 10_496], 250_880))
def test_s14_round_robin_chats(world, strategy, expected):
    """Inner states go first, never the only tail of a cold chat: 40 of 40 continuations hit."""
    hits, total = expected
    w = world(strategy, slots=either(strategy, 10, 16), rows=200_000, running=2)
    said = [[] for _ in range(8)]
    found = []
    for turn in range(6):
        numbers = [w.start(said[chat] + X(10 * chat + turn) * 2000, 100) for chat in range(8)]
        w.drain()
        answers = [w.answer(number) for number in numbers]
        said = [answer.said for answer in answers]
        found.append([answer.resume for answer in answers])
    assert found == [[0] * 8] + [[hit] * 8 for hit in hits]
    assert sum(map(sum, found)) == total


@figures(exact=[0, 0] + [8192] * 48, extra_buffer=[0] + [8192] * 49)
def test_s16_hot_prefix_under_a_scan(world, strategy, expected):
    """One-off tails are evicted before the state that is used again and again."""
    w = world(strategy, slots=12, rows=400_000, running=2)
    found = w.resumes([X(i) * 4000 if i % 5 else H * 8192 + Q(i) * 50 for i in range(250)])
    assert found[::5] == expected
    assert sum(found) == sum(expected)


# Compaction


@pytest.mark.parametrize(("level", "first"), [(2, 0), (3, 6144)])
@figures(exact=[13_000, 13_500, 14_000], extra_buffer=[12_992, 13_440, 13_952])
def test_s55_compaction(world, strategy, expected, level, first):
    """The compacted chat leaves its old path where they part, and goes on from its own ends."""
    w, chat = compacted(world, strategy, level)
    assert chat == [first, *expected]
    if (strategy, level) == ("exact", 2):
        assert (w.unmarked(), w.marked()) == ([8000, 14_500, 100_000], [13_000, 13_500, 14_000])
    if (strategy, level) == ("extra_buffer", 2):
        assert (8000 in w.unmarked(), w.marked()) == (True, [])


def compacted(world, strategy, level, **sizes):
    w = world(strategy, level=level, **sizes)
    w.ask(A * 100_000)
    return w, w.resumes([A * 8000 + K * (5000 + 500 * turn) for turn in range(4)])


@figures(exact=14_500, extra_buffer=14_464)
def test_s55_old_tail_goes_before_the_live_chat(world, strategy, expected):
    """Under pressure on rows, the 92,000 tokens that were compacted go first."""
    w, _ = compacted(world, strategy, 2, rows=120_000)
    assert w.ask(X * 20_000).resume == 0
    assert w.unmarked(A * 100_000)[-1:] == [8000]
    assert w.ask(A * 8000 + K * 7000).resume == expected


def test_s55_marked_states_go_before_the_old_tail(world):
    """For a state slot, the chat's marked states go first, then the old tail; its own end stays."""
    w, _ = compacted(world, "exact", 2)
    w.resumes([X(number) * 10 for number in range(64 - 6 + 3)])
    assert (w.marked(), w.unmarked(A * 100_000)) == ([], [8000, 100_000])
    w.ask(Y * 10)
    assert w.unmarked(A * 100_000) == [8000]
    assert w.ask(A * 8000 + K * 7000).resume == 14_500


# Memory given away too early


class Excess:
    """Scenario 61 after R3: the world, the contexts of X, R1 and R2, and the prompt of R3."""

    def __init__(self, world, strategy: str, cap: str | None) -> None:
        self.w: World = world(strategy, slots=either(strategy, 6, 10), rows=65_536, mamba_path_cap=cap)
        self.x = self.w.ask(X * 1000, 100).context
        first = self.w.ask(A * 2000, 100)
        self.one = first.context
        second = self.w.ask(self.one + B * 500, 100)
        self.two = second.context
        self.prompt = self.two + D * 500
        third = self.w.ask(self.prompt, 100)
        self.resumes = [first.resume, second.resume, third.resume]

    def ask(self, prompt: list[int]) -> int:
        return self.w.ask(prompt, 100).resume

    def edited(self) -> int:
        """Case b."""
        return self.ask(self.two + E * 300)

    def others(self, count: int) -> None:
        for number in range(1, count + 1):
            self.ask(Y(number) * 1000)


KINDS = pytest.mark.parametrize(
    ("strategy", "cap"), [("exact", None), ("exact", "eager"), ("extra_buffer", None)], ids=["lazy", "eager", "release"]
)


@pytest.fixture
def excess(world, strategy, cap):
    return Excess(world, strategy, cap)


def by_kind(strategy: str, cap: str | None, lazy, eager, compatible):
    return lazy if (strategy, cap) == ("exact", None) else eager if strategy == "exact" else compatible


@KINDS
def test_s61_three_turns(excess, strategy, cap):
    """The lazy cap marks what is in excess and frees nothing while a slot is free; the others prune."""
    w = excess.w
    assert excess.resumes == by_kind(strategy, cap, [0, 2099, 2698], [0, 2099, 2698], [0, 2048, 2688])
    assert w.unmarked() == by_kind(strategy, cap, [1099, 3297], [1099, 3297], [1088, 3264])
    assert w.marked() == by_kind(strategy, cap, [2099, 2698], [], [])
    assert w.stats.states.free == by_kind(strategy, cap, 2, 4, 8)
    assert w.counters.checkpoints_pruned_total == by_kind(strategy, cap, 0, 2, 2)


@KINDS
def test_s61_a_last_turn_again(excess, strategy, cap):
    """A regenerated last turn resumes at the end of the turn before it, where that was only marked."""
    answer = excess.w.ask(excess.prompt, 100)
    assert answer.resume == by_kind(strategy, cap, 2698, 0, 0)
    assert answer.reuse.kv_depth == by_kind(strategy, cap, 3197, 3197, 3136)


@KINDS
def test_s61_b_last_turn_edited(excess, strategy, cap):
    """So does an edited one, which makes that state a fork: it loses its mark."""
    answer = excess.w.ask(excess.two + E * 300, 100)
    assert answer.resume == by_kind(strategy, cap, 2698, 0, 0)
    assert answer.reuse.kv_depth == by_kind(strategy, cap, 2698, 2698, 2688)
    assert excess.w.marked() == by_kind(strategy, cap, [2099], [], [])


@KINDS
def test_s61_c_marked_states_go_first(excess, strategy, cap):
    """No unmarked state goes while a marked one is left, however old: X is older than both."""
    w = excess.w
    excess.others(2)
    assert w.marked() == by_kind(strategy, cap, [2099, 2698], [], [])
    assert excess.ask(Y(1) * 500 + F * 100) == 0
    assert w.marked() == []
    assert excess.ask(excess.x + Q * 50) == by_kind(strategy, cap, 1099, 1099, 1088)


@KINDS
def test_s61_d_fork_state_outlives_them(excess, strategy, cap):
    """Once nothing is marked the oldest goes; the edited turn's fork stays."""
    w = excess.w
    excess.edited()
    excess.others(1)
    assert w.marked() == by_kind(strategy, cap, [2099], [], [])
    excess.ask(Y(2) * 1000)
    assert w.marked() == []
    excess.ask(Y(3) * 1000)
    assert w.unmarked(excess.x) == by_kind(strategy, cap, [], [], [1088])
    assert excess.ask(excess.two + J * 300) == by_kind(strategy, cap, 2698, 2698, 2688)
