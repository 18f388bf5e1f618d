"""The scenarios over HTTP: refusals, conversations, hang-ups, storms, gauges (scenarios 8, 10, 11, 40, 49, 50, 56)."""

import random

import pytest

pytest.importorskip("starlette", reason="the server needs starlette")

from milepost.boot import boot
from milepost.config import CacheConfig, ServeConfig
from tests.scenarios.served import Small, served, streams
from tests.scenarios.world import either, figures

A, B, D, E, F, H, P, Q, X, Y, Z = streams("ABDEFHPQXYZ")


@pytest.fixture
def server(world):
    """`server(strategy, …)`: a world behind HTTP until the end of the test."""
    stacks = []

    def make(strategy, **more):
        context = served(world(strategy, kind=Small, **more))
        stacks.append(context)
        return context.__enter__()

    yield make
    for context in stacks:
        context.__exit__(None, None, None)


@figures(exact=("16555", "16384"), extra_buffer=("259", "256"))
def test_s08_request_that_can_never_fit(server, strategy, expected):
    """It is refused before any work, with both numbers; without max_new it ends with the pool, and others go on."""
    s = server(strategy, slots=8, rows=16_384)
    refused = s.ask(A * 16_300, 256)
    message = refused.json()["error"]["message"]
    assert refused.status_code == 400 and all(number in message.split(" ") for number in expected), message
    assert s.gate.steps == 0
    assert s.cached(B * 100) == 0
    answer = s.ask(A * 16_300, None).json()
    assert (answer["choices"][0]["finish_reason"], answer["usage"]["completion_tokens"]) == ("length", 85)
    assert s.world.counters.computed_tokens_total == 100 + 16_300 + 84


@figures(exact=8, extra_buffer=24)
def test_s10_cancel_while_waiting(server, strategy, expected):
    """A client that hangs up in the queue leaves no trace in the pools."""
    s = server(strategy, slots=either(strategy, 16, 40), rows=65_536, running=8)
    s.cached(A * 4096)
    crowd = [s.start(Y(i) * 100, 7000) for i in range(8)]
    s.wait(lambda: s.gauges()["running_requests"] == 8)
    for number in range(1, 11):
        with s.start(A * 4096 + B(number) * 100, 10):
            s.wait(lambda: s.gauges()["waiting_requests"] == 1)
        s.wait(lambda number=number: s.gauges()["aborted_total"] == number)
        assert s.gauges()["state_slots_held"] == expected
    hang_up(crowd)
    s.wait(lambda: s.gauges()["state_slots_held"] == 0)
    gauges = s.gauges()
    assert gauges["state_slots_free"] + gauges["state_slots_evictable"] == either(strategy, 16, 40)


@figures(exact=500, extra_buffer=448)
def test_s11_conversations_that_hang_up(server, strategy, expected):
    """Some clients leave during their second turn: what is held goes back each time, and the others notice nothing."""
    s = server(strategy, slots=32, rows=200_000)
    for i in range(1, 21):
        assert s.cached(A(i) * 500) == 0
        if i % 5 == 0:
            with s.start(A(i) * 500 + B(i) * 200, 20_000):
                s.wait(lambda: s.gauges()["running_requests"] == 1)
            s.wait(lambda: s.gauges()["running_requests"] == 0)
        else:
            assert s.cached(A(i) * 500 + B(i) * 200) == expected
        assert s.gauges()["state_slots_held"] == 0
    assert s.gauges()["requests_total.abort"] == 4


BUSY = [("exact", 2, 4, (4, 0, 0, 4)), ("extra_buffer", 2, 20, (12, 0, 8, 20)), ("extra_buffer", 3, 20, (16, 0, 4, 20))]


@pytest.mark.parametrize(("strategy", "level", "slots", "expected"), BUSY)
def test_s40_two_gauges_not_one_maximum(server, strategy, level, slots, expected):
    """A full state pool is no full KV pool, and the reserved slots explain why a fifth request waits."""
    s = server(strategy, slots=slots, rows=1_000_000, level=level)
    crowd = [s.start(X(i) * 64, 30_000) for i in range(5)]
    s.wait(lambda: (s.gauges()["running_requests"], s.gauges()["waiting_requests"]) == (4, 1))
    busy = s.gauges()
    names = ("state_slots_held", "state_slots_evictable", "state_slots_free", "reserved_slots")
    assert tuple(busy[name] for name in names) == expected and busy["state_slots"] == slots
    assert busy["kv_rows_held"] < 0.01 * busy["kv_rows"]
    reasons = [busy[f"waiting_for_{name}"] for name in ("state_pool", "kv_pool", "running_limit")]
    assert reasons == [1, 0, 0]
    hang_up(crowd)
    s.wait(lambda: s.gauges()["running_requests"] == s.gauges()["waiting_requests"] == 0)
    idle = s.gauges()
    assert (idle["state_slots_held"], idle["kv_rows_held"], idle["reserved_slots"]) == (0, 0, 0)
    assert idle["state_slots_free"] + idle["state_slots_evictable"] == slots


@figures(exact=(40, 1), extra_buffer=(8, 5))
def test_s40_reports_agree(strategy, expected):
    """Boot report, endpoint and gauges of a real start say the same."""
    limit, reserved = expected
    page = either(strategy, 1, 64)
    sizes = CacheConfig(
        max_mamba_cache_size=40, max_total_tokens=8192, mamba_radix_cache_strategy=strategy, page_size=page
    )
    booted = boot(ServeConfig(dtype="float32"), sizes)
    info, gauges = booted.engine.info(), booted.engine.gauges()
    booted.engine.close()
    report = "\n".join(booted.lines)
    assert f"capped to {limit} by the mamba state cache (max_mamba_cache_size=40, {reserved} " in report
    assert f"max_total_num_tokens=8192, max_running_requests={limit}, " in report
    assert (info["max_running_requests"], info["max_mamba_cache_size"], info["max_total_tokens"]) == (limit, 40, 8192)
    assert (gauges["running_limit"], gauges["state_slots"], gauges["kv_rows"]) == (limit, 40, 8192)
    assert (info["slots_per_request"], info["grid"]) == (reserved, page)


@figures(exact=(20_000, 20_000, 20_399), extra_buffer=(19_968, 19_968, 20_096))
def test_s49_stop_the_answer(server, strategy, expected):
    """The device is idle within one step of the disconnect, and what was computed is there for the next turn."""
    s = server(strategy, slots=6, mamba_max_states_per_path=either(strategy, 1, -1))
    s.cached(H * 20_000)
    turn = H * 20_000 + Q * 100
    before = s.gate.steps
    s.gate.shut()
    with s.start(turn, 1000):
        s.gate.let(299)
        assert s.gate.waits.wait(10)
    s.wait(lambda: s.gauges().get("requests_total.abort") == 1)
    s.gate.let(1)
    s.wait(lambda: s.gauges()["running_requests"] == 0)
    assert (s.gate.steps - before, s.gauges()["state_slots_held"]) == (300, 0)
    s.gate.open()
    fed = turn + s.world.say(turn, 299)
    assert (s.cached(turn + E * 50), s.cached(H * 20_000 + Z * 80), s.cached(fed + F * 50)) == expected


@figures(exact=2000, extra_buffer=1984)
def test_s50_cancel_storm(server, strategy, expected):
    """Two hundred clients drop at random times; nothing stays held, and the fork state is still there."""
    s = server(strategy, slots=either(strategy, 32, 64), running=8)
    for number in (1, 2):
        s.cached(A * 2000 + Y(number) * 200)
    clients = [s.start(A * 2000 + B(i) * 200, 8000) for i in range(200)]
    s.wait(lambda: s.gauges()["running_requests"] + s.gauges()["waiting_requests"] == 200)
    random.Random(50).shuffle(clients)
    while clients:
        hang_up([clients.pop() for _ in range(min(len(clients), 7))])
        s.gauges()  # a moment in between, in which steps are run
    s.wait(lambda: s.gauges().get("requests_total.abort") == 200)
    s.wait(lambda: s.gauges()["running_requests"] == s.gauges()["waiting_requests"] == 0)
    gauges = s.gauges()
    assert (gauges["aborted_total"], gauges["state_slots_held"], gauges["kv_rows_held"]) == (200, 0, 0)
    steps = s.gate.steps
    assert s.cached(A * 2000 + Z * 200) == expected
    assert s.gate.steps == steps + 1


@figures(exact=(0, 2999), extra_buffer=(0, 2944))
def test_s56_other_ids_over_http(server, strategy, expected):
    """Matching is by ids: an answer that comes back as other ids is another history."""
    s = server(strategy)
    assert s.cached(P * 2000, 1000) == 0
    said = s.world.say(P * 2000, 1000)
    other = P * 2000 + said[:700] + D * 300 + Q * 40
    assert (s.cached(other), s.cached(P * 2000 + said + Q * 40)) == expected


def hang_up(clients) -> None:
    for client in clients:
        client.close()
