"""The routes in process: answers, usage, and every way in which a request can be refused."""

import asyncio
import json
import logging
import math

import httpx
import pytest

from milepost.core import tokens
from milepost.errors import Unavailable
from milepost.server.app import create_app
from milepost.server.protocol import ServerSettings

HELLO = [{"role": "user", "content": "Hello"}]


def events(response: httpx.Response) -> list[dict]:
    """The JSON events of a stream; the closing mark must be there, and last."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = response.text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


def error(response: httpx.Response) -> dict:
    body = response.json()
    assert body.keys() == {"error"}
    assert body["error"].keys() == {"message", "type", "param", "code"}
    return body["error"]


# Answers


def test_a_chat(chat, engine, text):
    body = chat(model="demo").json()
    prompt = text.render(HELLO)
    assert engine.requests[0].prompt == text.encode(prompt)
    size = tokens.length(text.encode(prompt))
    assert body["id"].startswith("chatcmpl-")
    assert (body["object"], body["model"]) == ("chat.completion", "demo")
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "In the beginning"},
            "logprobs": None,
            "finish_reason": "length",
        }
    ]
    made = body["usage"]["completion_tokens"]
    assert body["usage"] == {
        "prompt_tokens": size,
        "completion_tokens": made,
        "total_tokens": size + made,
        "prompt_tokens_details": {"cached_tokens": 3},
    }
    assert engine.open == set()
    assert engine.aborted == []


def test_a_completion(complete, engine):
    body = complete().json()
    assert body["id"].startswith("cmpl-")
    assert body["object"] == "text_completion"
    assert body["choices"][0] == {
        "index": 0,
        "text": "In the beginning",
        "logprobs": None,
        "finish_reason": "length",
    }
    assert engine.requests[0].sampling.max_new == 16, "OpenAI's default"


def test_a_chat_stream_says_what_the_answer_says(chat):
    got = events(chat(stream=True, stream_options={"include_usage": True}))
    assert got[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    content = [event["choices"][0]["delta"].get("content", "") for event in got[:-1]]
    assert "".join(content) == "In the beginning"
    assert len(content) > 4, "it comes in pieces"
    assert got[-2]["choices"][0] == {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "length"}
    assert got[-1]["choices"] == []
    assert got[-1]["usage"]["prompt_tokens_details"] == {"cached_tokens": 3}
    assert all(event["usage"] is None for event in got[:-1])
    assert {event["object"] for event in got} == {"chat.completion.chunk"}
    assert len({(event["id"], event["created"], event["model"]) for event in got}) == 1


def test_a_completion_stream(complete):
    got = events(complete(stream=True))
    assert "".join(event["choices"][0]["text"] for event in got) == "In the beginning"
    assert got[-1]["choices"][0]["finish_reason"] == "length"
    assert not any("usage" in event for event in got)


@pytest.mark.parametrize("stream", [False, True])
def test_n_choices_count_their_prompt_once(complete, engine, stream):
    engine.script = lambda request: [40 + request.sampling.seed] * 5
    response = complete(n=3, seed=7, stream=stream, stream_options={"include_usage": True})
    if stream:
        got = events(response)
        said = {0: "", 1: "", 2: ""}
        for event in got[:-1]:
            [choice] = event["choices"]
            said[choice["index"]] += choice["text"]
        usage = got[-1]["usage"]
    else:
        body = response.json()
        said = {choice["index"]: choice["text"] for choice in body["choices"]}
        usage = body["usage"]
    assert [request.sampling.seed for request in sorted(engine.requests, key=lambda r: r.id)] == [7, 8, 9]
    assert len({request.id for request in engine.requests}) == 3
    assert len(set(said.values())) == 3
    assert usage["prompt_tokens"] == tokens.length(engine.requests[0].prompt)
    assert usage["completion_tokens"] == 15
    assert usage["prompt_tokens_details"]["cached_tokens"] == 3


@pytest.mark.parametrize("prompts", [["a b", "Hello there you"], [[40, 41], [42, 43, 44, 45]]])
def test_several_prompts_in_one_completion(complete, engine, prompts, text):
    engine.script = lambda request: tokens.unpack(request.prompt).tolist()
    body = complete(prompt=prompts, n=2).json()
    said = [choice["text"] for choice in body["choices"]]
    packed = [text.encode(p) if isinstance(p, str) else tokens.pack(p) for p in prompts]
    assert said == [text.decode(p) for p in packed for _ in range(2)]
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    assert body["usage"]["prompt_tokens"] == sum(tokens.length(p) for p in packed)
    assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 6


def test_a_prompt_of_token_ids(complete, engine):
    assert complete(prompt=[40, 41, 42]).status_code == 200
    assert engine.requests[0].prompt == tokens.pack([40, 41, 42])


@pytest.mark.parametrize("stream", [False, True])
def test_echo_repeats_the_prompt(complete, stream):
    response = complete(echo=True, stream=stream)
    said = (
        "".join(e["choices"][0]["text"] for e in events(response)) if stream else response.json()["choices"][0]["text"]
    )
    assert said == "HelloIn the beginning"


def test_unicode_streams_whole(chat, engine, text):
    words = 'naïve 😀👩‍👩‍👧 "quoted"\n\\ 你好 \u2028 end'
    engine.script = lambda _: tokens.unpack(text.encode(words)).tolist()
    got = events(chat(stream=True))
    parts = [event["choices"][0]["delta"].get("content", "") for event in got]
    assert "".join(parts) == words
    assert not any("�" in part for part in parts)


@pytest.mark.parametrize("stop", [" the", ["nothing", " the"]])
def test_stop_strings(complete, engine, stop):
    choice = complete(stop=stop).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("In", "stop")
    assert engine.stops == [(stop,) if isinstance(stop, str) else tuple(stop)]


def test_the_end_token_stops_unless_ignored(complete, engine):
    engine.script = lambda _: [40, 2, 41]
    assert complete().json()["choices"][0]["finish_reason"] == "stop"
    assert complete(ignore_eos=True).json()["usage"]["completion_tokens"] == 3
    assert complete(ignore_eos=True, stop_token_ids=[41]).json()["choices"][0]["finish_reason"] == "stop"
    assert [request.sampling.stop_ids for request in engine.requests] == [{0, 2}, set(), {41}]


def test_sampling_defaults_and_wishes(chat, engine):
    chat()
    chat(temperature=0, top_p=0.5, top_k=-1, min_p=0.1, max_tokens=5, seed=-1)
    chat(max_tokens=5, max_completion_tokens=6, temperature=None, n=None)
    default, wished, both = (request.sampling for request in engine.requests)
    assert (default.temperature, default.top_p, default.top_k) == (0.8, 0.95, 0), "the model's own"
    assert default.max_new is None
    assert (wished.temperature, wished.top_p, wished.top_k, wished.min_p) == (0.0, 0.5, 0, 0.1)
    assert (wished.max_new, wished.seed) == (5, 2**63 - 1)
    assert (both.max_new, both.temperature) == (6, 0.8)
    assert default.seed != both.seed, "drawn anew for each request"


def test_namespaces_never_collide(chat, engine):
    chat()
    chat(cache_salt="a", extra_key="b")
    chat(cache_salt='a","extra_key":"b')
    chat(extra_key="a", cache_salt="b")
    chat(lora="a")
    names = [request.namespace for request in engine.requests]
    assert names[0] == ""
    assert len(set(names)) == 5


def test_sessions(chat, engine):
    chat(user="u")
    chat(user="u", session_id="s")
    assert [request.session for request in engine.requests] == ["u", "s"]


def test_unknown_and_harmless_fields_are_ignored(chat):
    response = chat(
        metadata={"a": 1},
        store=False,
        service_tier="auto",
        logprobs=False,
        logit_bias={},
        presence_penalty=0.0,
        frequency_penalty=0,
        repetition_penalty=1.0,
        response_format={"type": "text"},
        best_of=1,
        tool_choice="none",
        stop=None,
        skip_special_tokens=True,
    )
    assert response.status_code == 200, response.text


def test_many_at_once(app, engine):
    engine.script = lambda request: [0.01, *tokens.unpack(request.prompt).tolist()]

    async def scenario():
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            bodies = [{"prompt": f"number {i}", "stream": i % 2 == 1, "max_tokens": 50} for i in range(40)]
            return await asyncio.gather(*(client.post("/v1/completions", json=body) for body in bodies))

    for i, response in enumerate(asyncio.run(scenario())):
        if i % 2:
            said = "".join(event["choices"][0]["text"] for event in events(response))
        else:
            said = response.json()["choices"][0]["text"]
        assert said == f"number {i}"
    assert engine.open == set()


# Refusals


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"messages": []}, "messages", "length >= 1"),
        ({"messages": None}, "messages", "Expected `array`"),
        ({"messages": [3]}, "messages[0]", "Expected `object`"),
        ({"messages": [{"content": "x"}]}, "messages[0].role", "must be a string"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content[0]",
            "image_url",
        ),
        ({"temperature": 2.1}, "temperature", "<= 2"),
        ({"temperature": -0.1}, "temperature", ">= 0"),
        ({"temperature": "hot"}, "temperature", "Expected `float | null`"),
        ({"top_p": 0}, "top_p", "> 0"),
        ({"top_p": 1.5}, "top_p", "<= 1"),
        ({"top_k": -2}, "top_k", ">= -1"),
        ({"min_p": 2}, "min_p", "<= 1"),
        ({"max_tokens": 0}, "max_tokens", ">= 1"),
        ({"max_completion_tokens": 1.5}, "max_completion_tokens", "Expected `int | null`"),
        ({"n": 0}, "n", ">= 1"),
        ({"n": True}, "n", "Expected `int | null`"),
        ({"n": 129}, "n", "at most 128"),
        ({"seed": "x"}, "seed", "Expected `int | null`"),
        ({"stop": ""}, "stop", "length >= 1"),
        ({"stop": ["a", ""]}, "stop[1]", "length >= 1"),
        ({"stop": ["a"] * 17}, "stop", "length <= 16"),
        ({"stop": 3}, "stop", "Expected"),
        ({"stop_token_ids": [-1]}, "stop_token_ids[0]", ">= 0"),
        ({"stream": "yes"}, "stream", "Expected `bool | null`"),
        ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage", "Expected `bool | null`"),
        ({"logprobs": True}, "logprobs", "not supported"),
        ({"top_logprobs": 2}, "top_logprobs", "not supported"),
        ({"logit_bias": {"50": 1}}, "logit_bias", "not supported"),
        ({"response_format": {"type": "json_object"}}, "response_format", "not supported"),
        ({"presence_penalty": 0.5}, "presence_penalty", "not supported"),
        ({"frequency_penalty": -1}, "frequency_penalty", "not supported"),
        ({"repetition_penalty": 1.1}, "repetition_penalty", "not supported"),
        ({"functions": [{}]}, "functions", "not supported"),
        ({"modalities": ["audio"]}, "modalities", "not supported"),
        ({"best_of": 2}, "best_of", "equals n"),
        ({"skip_special_tokens": False}, "skip_special_tokens", "switched off"),
        ({"tool_choice": "required"}, "tool_choice", "auto or none"),
        ({"tool_choice": {"type": "function"}}, "tool_choice", "auto or none"),
        ({"tools": [{"type": "function"}]}, "tools", "takes no tools"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages", "can't set"),
        ({"max_tokens": 999}, "messages", "the context length is 1000"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_bad_chat_is_refused_by_name(chat, engine, fields, param, message, stream):
    response = chat(**{"stream": stream, **fields})
    assert response.status_code == 400, response.text
    got = error(response)
    assert got["param"] == param
    assert message in got["message"]
    assert got["type"] == "invalid_request_error"
    assert engine.requests == []


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"prompt": None}, "prompt", "Expected `str | array`"),
        ({"prompt": ""}, "prompt", "empty"),
        ({"prompt": []}, "prompt", "empty"),
        ({"prompt": [[]]}, "prompt[0]", "empty"),
        ({"prompt": ["a", ""]}, "prompt[1]", "empty"),
        ({"prompt": ["a", 1]}, "prompt", "a list of strings"),
        ({"prompt": [-1]}, "prompt[0]", ">= 0"),
        ({"prompt": [1, True]}, "prompt[1]", "Expected"),
        ({"prompt": [4096]}, "prompt", "vocabulary of 4096"),
        ({"prompt": [[5], [5, 2**31 - 1]]}, "prompt[1]", "vocabulary of 4096"),
        ({"prompt": [5] * 1000}, "prompt", "1000 tokens"),
        ({"prompt": ["a"] * 50, "n": 3}, "n", "at most 128"),
        ({"logprobs": 0}, "logprobs", "not supported"),
        ({"suffix": "x"}, "suffix", "not supported"),
        ({"echo": "yes"}, "echo", "Expected `bool | null`"),
    ],
)
def test_a_bad_completion_is_refused_by_name(complete, engine, fields, param, message):
    response = complete(**fields)
    assert response.status_code == 400, response.text
    assert error(response)["param"] == param
    assert message in error(response)["message"]
    assert engine.requests == []


def test_required_fields_are_named(call):
    for path, field in (("/v1/chat/completions", "messages"), ("/v1/completions", "prompt")):
        response = call("POST", path, json={})
        assert response.status_code == 400
        assert error(response)["param"] == field


@pytest.mark.parametrize(
    "raw",
    [b"", b"{", b"[]", b'"x"', b"\xff", b'{"prompt": "\\ud800 lone"}', b"[" * 100_000, b'{"prompt": NaN}'],
)
def test_bodies_that_are_no_object_of_json(call, raw):
    response = call("POST", "/v1/completions", content=raw)
    assert response.status_code == 400, response.text
    assert error(response)["type"] == "invalid_request_error"


def test_prompts_that_can_never_fit(chat, complete, engine):
    assert error(complete(prompt=[5] * 990, max_tokens=11))["code"] == "context_length_exceeded"
    assert complete(prompt=[5] * 990, max_tokens=10).status_code == 200
    engine.room = 2
    response = chat(stream=True)
    assert response.status_code == 400
    assert "the pool 2 rows" in error(response)["message"]


def test_models_by_name(chat, call):
    assert chat(model="org/demo").status_code == 200
    response = chat(model="gpt-4")
    assert response.status_code == 404
    assert error(response)["code"] == "model_not_found"
    assert [card["id"] for card in call("GET", "/v1/models").json()["data"]] == ["demo"]
    card = call("GET", "/v1/models/org/demo").json()
    assert (card["id"], card["max_model_len"]) == ("org/demo", 1000)
    assert call("GET", "/v1/models/nope").status_code == 404


def test_no_such_route(call):
    response = call("GET", "/v1/nothing")
    assert response.status_code == 404
    assert "/v1/nothing" in error(response)["message"]
    response = call("GET", "/v1/completions")
    assert response.status_code == 405
    assert "POST" in response.headers["allow"]
    assert error(response)["type"] == "invalid_request_error"


def test_bodies_have_a_limit(engine, text):
    app = create_app(engine, text, ServerSettings("demo", 1000, body_limit=100))

    async def scenario():
        async def pieces():
            for _ in range(50):
                yield b"x" * 10

        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            declared = await client.post("/v1/completions", content=b"x" * 101)
            chunked = await client.post("/v1/completions", content=pieces())
            fits = await client.post("/v1/completions", content=b'{"prompt": "a"}'.ljust(100))
            return declared, chunked, fits

    declared, chunked, fits = asyncio.run(scenario())
    assert (declared.status_code, chunked.status_code, fits.status_code) == (413, 413, 200)
    assert "100 are read" in error(declared)["message"]


# The engine's troubles


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 2])
def test_a_dead_engine_is_503(chat, call, engine, stream, n):
    engine.alive = False
    response = chat(stream=stream, n=n)
    assert response.status_code == 503
    assert error(response)["type"] == "service_unavailable_error"
    assert call("GET", "/health").status_code == 503
    engine.alive = True
    assert call("GET", "/health").status_code == 200
    assert chat().status_code == 200


@pytest.mark.parametrize("n", [1, 2])
def test_an_engine_that_dies_in_a_stream(chat, engine, n):
    engine.script = lambda _: [40, 41, 0.01, Unavailable("the engine has died")]
    response = chat(stream=True, n=n)
    assert response.status_code == 200
    *_, last, end = response.text.split("\n\n")
    assert end == ""
    assert json.loads(last.removeprefix("data: "))["error"]["message"] == "the engine has died"
    assert "[DONE]" not in response.text
    engine.script = lambda _: [40]
    assert chat().status_code == 200
    assert engine.open == set()


def test_an_engine_that_just_stops_talking(chat, engine, monkeypatch):
    monkeypatch.setattr(engine, "_play", lambda *_: iter(()))
    response = chat()
    assert response.status_code == 503
    assert "early" in error(response)["message"]


def test_a_bug_is_500_and_not_told(chat, engine, caplog):
    engine.script = lambda _: [AssertionError("secret")]
    response = chat()
    assert response.status_code == 500
    assert "secret" not in response.text
    engine.script = lambda _: [40, AssertionError("secret")]
    with caplog.at_level(logging.ERROR):
        response = chat(stream=True)
    assert '"server_error"' in response.text
    assert "secret" not in response.text
    assert "secret" in caplog.text


# Everything else


def test_server_info(call):
    info = call("GET", "/get_server_info").json()
    assert info["strategy"] == "exact"
    assert info["model_name"] == "demo"
    assert info["aliases"] == ["org/demo"]


def test_flush(call, engine):
    assert call("POST", "/flush_cache").status_code == 200
    engine.open.add("x")
    response = call("POST", "/flush_cache")
    assert response.status_code == 409
    assert error(response)["code"] == "busy"


def test_usage_may_keep_quiet_about_the_cache(engine, text):
    app = create_app(engine, text, ServerSettings("demo", 1000, cache_report=False, metrics=False))

    async def scenario():
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            return await client.post("/v1/completions", json={"prompt": "a"}), await client.get("/metrics")

    answer, metrics = asyncio.run(scenario())
    assert "prompt_tokens_details" not in answer.json()["usage"]
    assert metrics.status_code == 404


def scrape(call) -> dict[str, float]:
    page = call("GET", "/metrics")
    assert page.headers["content-type"].startswith("text/plain")
    rows = [line.rpartition(" ") for line in page.text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in rows}


def test_metrics(call, complete, chat, engine):
    complete(prompt=[5] * 10)
    complete(prompt=[5] * 10, stop=" the")
    chat(temperature=3)
    engine.script = lambda _: [40, Unavailable("dead")]
    complete()
    got = scrape(call)
    model = 'model_name="demo"'
    assert got[f"milepost:prompt_tokens_total{{{model}}}"] == 20, "the server's own count, not the engine's 99"
    assert got[f"milepost:cached_tokens_total{{{model}}}"] == 6
    assert got[f'milepost:requests_total{{finish_reason="length",{model}}}'] == 1
    assert got[f'milepost:requests_total{{finish_reason="stop",{model}}}'] == 1
    assert got[f'milepost:requests_total{{finish_reason="error",{model}}}'] == 1
    assert got[f'milepost:http_errors_total{{code="400",{model}}}'] == 1
    assert got[f'milepost:http_errors_total{{code="503",{model}}}'] == 1
    assert got[f"milepost:time_to_first_token_seconds_count{{{model}}}"] == 3
    made = got[f"milepost:generation_tokens_total{{{model}}}"]
    assert got[f"milepost:inter_token_latency_seconds_count{{{model}}}"] == made - 3
    assert got[f"milepost:e2e_request_latency_seconds_count{{{model}}}"] == 2
    assert got[f"milepost:rows_free{{{model}}}"] == 7
    assert got[f"milepost:evicted_tokens_total{{{model}}}"] == 5
    assert got[f'milepost:tier_rows{{{model},tier="storage"}}'] == 2
    assert got[f"milepost:engine_up{{{model}}}"] == 1
    engine.alive = False
    assert scrape(call)[f"milepost:engine_up{{{model}}}"] == 0
    assert not any(math.isnan(value) for value in got.values())


def test_the_index(call):
    assert "demo" in call("GET", "/").text
