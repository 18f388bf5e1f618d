"""How requests end, and what the next turn finds: retraction, cancels, history that changes (scenarios 17 to 22)."""

import random

import pytest

from milepost.core.request import Finish
from tests.scenarios.world import BOTH, OWN, A, B, D, E, F, H, P, Q, T, World, X, Y, Z, either, figures

# Retraction


class Retractions(World):
    """Records where each retracted request resumed: (request, position), in order."""

    def __init__(self, *args, **more) -> None:
        super().__init__(*args, **more)
        self.resumed: list[tuple[int, int]] = []
        self._retracted: set[int] = set()

    def tick(self, count=1, span=1):
        plan = super().tick(count, span=min(span, 64))
        for chunk in plan.chunks:
            if chunk.sequence in self._retracted:
                self.resumed.append((chunk.sequence, chunk.start))
                self._retracted.remove(chunk.sequence)
        self.look()
        return plan

    def look(self) -> None:
        self._retracted |= {sequence.number for sequence in self.scheduler.waiting() if sequence.preempted}


@figures(exact=1, extra_buffer=2)
def test_s47_retraction_on_a_small_pool(world, strategy, expected):
    """The youngest go, come back when their whole need fits, and start from nothing: the others took their rows.

    That the texts are those of a large pool is checked for each request at its end.
    """
    w = world(strategy, slots=either(strategy, 12, 20), rows=6000, kind=Retractions)
    numbers = [w.start(X(i) * 1000, 1000) for i in range(4)]
    w.tick(2)
    assert w.stats.running == 4
    w.drain()
    assert w.counters.preempted_total == expected
    assert sorted(w.resumed) == [(number, 0) for number in numbers[4 - expected :]]
    assert all(len(w.texts[number]) == 1000 for number in numbers)


@figures(exact=1499, extra_buffer=0)
def test_s47_one_request_retracted_by_a_hook(world, strategy, expected):
    """With room, a retracted request finds all it had computed, or nothing: KV and state together."""
    w = world(strategy, slots=either(strategy, 12, 20), kind=Retractions, rows=65_536)
    numbers = [w.start(X(i) * 1000, 1000) for i in range(4)]
    while len(w.texts[numbers[1]]) < 500:
        w.tick()
    w.scheduler.preempt(w.sequence(numbers[1]))
    w.look()
    w.audit()
    w.drain()
    assert w.resumed == [(numbers[1], expected)]
    assert all(len(w.texts[number]) == 1000 for number in numbers)


@figures(exact=1, extra_buffer=2)
def test_s47_back_only_when_the_whole_need_fits(world, strategy, expected):
    """Retracted at 1450, there is room for what it has but not for what it may still need: it is not retracted again.

    (With pages, one of the other three goes as well, as before.)
    """
    w = world(strategy, slots=either(strategy, 12, 20), rows=6000)
    numbers = [w.start(X(i) * 1000, 1000) for i in range(4)]
    while len(w.texts[numbers[3]]) < 450:
        w.tick()
    w.scheduler.preempt(w.sequence(numbers[3]))
    w.tick()
    assert w.sequence(numbers[3]).slot is None
    w.drain()
    assert w.counters.preempted_total == expected


# Cancellation


def stopped_turn(world, strategy: str, cap: int | None, sampled: int) -> tuple[World, list[int]]:
    """Scenario 49: a cached chat, and a turn cancelled in its prompt, or after some sampled tokens; what it has fed.

    The chunk is made small for the turn, so that 40 of its 100 new tokens are computed when it is cancelled.
    """
    w = world(strategy, slots=6, mamba_max_states_per_path=cap)
    w.ask(H * 20_000)
    limits = w.scheduler.limits
    if not sampled:
        w.scheduler.limits = type(limits)(limits.max_running, 20_040 - max(w.unmarked()), limits.context)
    turn = w.start(H * 20_000 + Q * 100, 1000)
    w.tick(max(1, sampled))
    assert len(w.texts[turn]) == sampled
    context = (H * 20_000 + Q * 100 + w.texts[turn])[: w.sequence(turn).computed]
    assert w.cancel(turn) and w.held == 0
    w.scheduler.limits = limits
    return w, context


@figures(exact=(20_040, 20_000), extra_buffer=(19_968, 19_968))
def test_s49_stop_the_prompt_edit_and_go_on(world, strategy, expected):
    """The next turn goes on where the stopped one was; another one goes on from the turn before."""
    w, _ = stopped_turn(world, strategy, either(strategy, 1, -1), 0)
    assert w.unmarked() == either(strategy, [20_000, 20_040], [19_968]) and w.marked() == []
    found = [w.ask(H * 20_000 + Q * 100 + E * 50).resume]
    assert w.marked() == either(strategy, [20_000, 20_040], [])
    found.append(w.ask(H * 20_000 + Z * 80).resume)
    assert tuple(found) == expected
    assert expected[1] in w.unmarked()


@figures(exact=(20_000, 20_000, 20_399), extra_buffer=(19_968, 19_968, 20_096))
def test_s49_stop_the_answer_edit_and_go_on(world, strategy, expected):
    """The same after 300 sampled tokens; the stopped answer itself is found too, and six slots are enough."""
    w, fed = stopped_turn(world, strategy, either(strategy, 1, -1), 300)
    assert len(fed) == 20_399
    second = w.ask(H * 20_000 + Q * 100 + E * 50)
    assert second.reuse.kv_depth == either(strategy, 20_100, 19_968)
    rest = w.resumes([H * 20_000 + Z * 80, fed + F * 50])
    assert (second.resume, *rest) == expected


@pytest.mark.parametrize("sampled", [0, 300])
def test_s49_a_cancel_prunes_nothing(world, sampled):
    """With a cap of 1 too, a cancel leaves the older checkpoint where it is."""
    w, _ = stopped_turn(world, "extra_buffer", 1, sampled)
    assert w.unmarked(H * 20_000) == [19_968]


@figures(exact=2000, extra_buffer=1984)
def test_s50_cancel_storm(world, strategy, expected):
    """Two hundred clients drop at random; the fork state, used by all, outlives the storm."""
    w = world(strategy, slots=either(strategy, 32, 64), running=8)
    w.resumes([A * 2000 + Y(1) * 200, A * 2000 + Y(2) * 200])
    chance = random.Random(50)
    left = [w.start(A * 2000 + B(i) * 200, 8000) for i in range(200)]
    while left:
        w.tick(span=chance.choice([1, 1, 20]))
        for _ in range(chance.randrange(8)):
            if left:
                assert w.cancel(left.pop(chance.randrange(min(len(left), 12))))
    assert w.counters.aborted_total == 200 and w.held == 0
    number = w.start(A * 2000 + Z * 200)
    w.tick()
    assert w.answer(number).resume == expected


# Histories that change


def two_turns(world, strategy: str, *, keep: tuple[int, ...] = (), thinking: bool = False, **flags: object):
    """Scenario 53: the world after both turns, and the second one."""
    w = world(strategy, **flags)
    w.ask(P * 3000, script=T * 2000 + Y * 300, keep=keep)
    message, header = P * 2996, (P * 3000)[2996:]
    history = P * 3000 + T * 2000 if thinking else message + [token + 1 for token in header]
    return w, w.ask(history + Y * 300 + Q * 50)


@figures(exact=2996, extra_buffer=2944)
def test_s53_checkpoint_at_the_end_of_the_last_message(world, strategy, expected):
    """The next turn resumes where the history changed; the dead branch is the first to be evicted."""
    w, second = two_turns(world, strategy, keep=(2996,))
    assert second.resume == expected <= 2996
    assert w.scheduler.cache.victims.state_victim().end == either(strategy, 5299, 5248)


@figures(exact=2996, extra_buffer=2944)
def test_s53_without_the_option(world, strategy, expected):
    """Thinking removed means no reuse, once: the fork state is there for the turn after."""
    w, second = two_turns(world, strategy)
    assert second.resume == 0
    assert expected in w.unmarked(second.prompt)


@figures(exact=0, extra_buffer=2944)
def test_s53_literal_prompt_end(world, strategy, expected):
    """Kept at 3000, behind the header that changes, `exact` can't use it; a grid of 64 rounds it down before it."""
    _, second = two_turns(world, strategy, checkpoint_at="fork,finish,prompt-end")
    assert second.resume == expected


@figures(exact=5299, extra_buffer=5248)
def test_s53_thinking_kept(world, strategy, expected):
    """A history that does not change is found to its end."""
    assert two_turns(world, strategy, thinking=True)[1].resume == expected


@BOTH
def test_s53_the_report_says_where_history_changed(world, strategy):
    """To the token, whatever the pages are."""
    _, second = two_turns(world, strategy)
    assert second.reuse.diverged_at == 2996
    assert "history changed at 2996" in str(second.reuse)


PROMPT_END = {"checkpoint_at": "fork,finish,prompt-end"}
KEPT = pytest.mark.parametrize("kept", ["level 3", "level 2", "prompt end"])


def retokenized(world, strategy: str, kept: str):
    """Scenario 56: both later requests. The 300 ids after g699 differ from g700 on."""
    flags = {"level 3": {"level": 3}, "level 2": {}, "prompt end": PROMPT_END}[kept]
    w = world(strategy, **flags)
    first = w.ask(P * 2000, 1000)
    assert min(first.text) >= OWN
    second = w.ask(P * 2000 + first.text[:700] + D * 300 + Q * 40)
    return second, w.ask(first.said + Q * 40)


@KEPT
@figures(
    exact=({"level 3": 2688, "level 2": 0, "prompt end": 2000}, 2700, 2999),
    extra_buffer=({"level 3": 1984, "level 2": 0, "prompt end": 1984}, 2688, 2944),
)
def test_s56_generated_text_comes_back_as_other_ids(world, strategy, expected, kept):
    """Matching is by ids, and the best kept state before the first other id is found.

    `extra_buffer` is an engine whose decode snapshots only roll, so level 3 gives it 1984, not 2688.
    """
    resumes, matched, third = expected
    second, last = retokenized(world, strategy, kept)
    assert (second.resume, second.reuse.kv_depth) == (resumes[kept], matched)
    assert last.resume == third


@BOTH
def test_s56_the_report_gives_the_first_differing_position(world, strategy):
    """To the token, whatever the pages are."""
    assert retokenized(world, strategy, "level 2")[0].reuse.diverged_at == 2700


# Determinism


@figures(exact={"default": 1, "strict": 64}, extra_buffer={"default": 64})
def test_s58_warm_reuse(world, strategy, expected):
    """After two runs that fill the cache, each warm run reuses all that the strategy can name.

    Strict reuse keeps states on the grid of 64 only.
    """
    prompts = [X(i) * (300 + 457 * i) for i in range(20)]
    for mode, grid in expected.items():
        w = world(strategy, strict_reuse=mode == "strict")
        assert w.resumes(prompts, 32) == [0] * 20
        w.resumes(prompts, 32)
        for _ in range(3):
            assert w.resumes(prompts, 32) == [(len(prompt) - 1) // grid * grid for prompt in prompts]


@pytest.mark.parametrize("order", ["ABAD", "BADA", "DABA"])
@figures(exact=3000, extra_buffer=2944)
def test_s59_order_must_not_matter(world, strategy, expected, order):
    """Whoever comes second makes the fork state; the others resume from it."""
    w = world(strategy)
    assert w.resumes([H * 3000 + stream * 500 for stream in by_name(order)], 32) == [0, 0, expected, expected]


@pytest.mark.parametrize(
    ("order", "expected"),
    [("ABAD", [0, 0, 3456, 2944]), ("BADA", [0, 0, 2944, 3456]), ("DABA", [0, 0, 2944, 3456])],
)
def test_s59_strict_mode(world, order, expected):
    """Strict reuse finds the fork on the grid of 64; a prompt that comes again finds its own prompt end, 3456."""
    w = world("exact", strict_reuse=True)
    assert w.resumes([H * 3000 + stream * 500 for stream in by_name(order)], 32) == expected


@BOTH
def test_s59_a_second_client(world, strategy):
    """While somebody else runs, figures may differ; the texts, checked at each end, may not."""
    w = world(strategy, slots=16)
    for order in ("ABAD", "BADA", "DABA"):
        numbers = []
        for stream in by_name(order):
            numbers += [w.start(H * 3000 + stream * 500, 32), w.start(H * 1000 + stream * 70, 9)]
            w.tick(2)
        w.drain()
        answers = [w.answer(number) for number in numbers]
        assert all(answer.finish is Finish.LENGTH and answer.resume < len(answer.prompt) for answer in answers)


def by_name(order: str):
    return [{"A": A, "B": B, "D": D}[name] for name in order]
