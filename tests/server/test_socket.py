"""A real server on a real socket: the `openai` client, clients that hang up, signals, and taken ports."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import openai
import pytest

from milepost.core import tokens
from milepost.errors import ConfigError, Unavailable
from milepost.server.run import listen, ready_line

SLOW = [item for _ in range(400) for item in (40, 0.02)]


@pytest.fixture
def client(port):
    with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="-", max_retries=0) as client:
        yield client


def wait_until(condition, seconds: float = 5.0) -> float:
    """Seconds until `condition()`; fails when they run out."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < seconds, "waited in vain"
        time.sleep(0.005)
    return time.monotonic() - began


def send_raw(port: int, path: str, body: dict) -> socket.socket:
    raw = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(raw)}\r\n\r\n"
    connection = socket.create_connection(("127.0.0.1", port), timeout=5)
    connection.sendall(head.encode() + raw)
    return connection


def test_the_openai_client(client, engine):
    messages = [{"role": "user", "content": "Hello"}]
    answer = client.chat.completions.create(model="demo", messages=messages)
    assert answer.choices[0].message.content == "In the beginning"
    assert answer.usage.prompt_tokens_details.cached_tokens == 3
    several = client.completions.create(model="demo", prompt=["a", "b"], n=2, max_tokens=3)
    assert [choice.index for choice in several.choices] == [0, 1, 2, 3]
    assert [model.id for model in client.models.list()] == ["demo"]
    assert client.models.retrieve("demo").id == "demo"
    assert engine.aborted == []


def test_the_openai_client_streams(client, engine, text):
    engine.script = lambda _: tokens.unpack(text.encode("你好 😀 the end")).tolist()
    messages = [{"role": "user", "content": "Hello"}]
    options = {"include_usage": True}
    chunks = list(client.chat.completions.create(model="demo", messages=messages, stream=True, stream_options=options))
    said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert said == "你好 😀 the end"
    assert chunks[-1].usage.total_tokens > 0
    parts = client.completions.create(model="demo", prompt="a", stream=True, max_tokens=100)
    assert "".join(part.choices[0].text for part in parts) == "你好 😀 the end"


def test_the_openai_client_understands_errors(client, engine):
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="demo", prompt="a", logprobs=3)
    assert caught.value.param == "logprobs"
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="other", prompt="a")
    engine.script = lambda _: [40, 41, Unavailable("the engine has died")]
    with pytest.raises(openai.APIError, match="the engine has died"):
        list(client.completions.create(model="demo", prompt="a", stream=True))
    engine.alive = False
    with pytest.raises(openai.InternalServerError, match="the engine has stopped"):
        client.completions.create(model="demo", prompt="a", stream=True)
    engine.alive = True
    engine.script = lambda _: [40]
    assert client.completions.create(model="demo", prompt="a").choices


def test_tokens_come_as_they_are_made(client, engine):
    engine.script = lambda _: [40, 0.3, 41]
    began = time.monotonic()
    stream = client.completions.create(model="demo", prompt="a", stream=True)
    first = next(iter(stream))
    assert first.choices[0].text
    assert time.monotonic() - began < 0.25
    list(stream)


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("script", [SLOW, [30.0]], ids=["while it talks", "before the first token"])
def test_hanging_up_aborts(port, engine, n, stream, script):
    engine.script = lambda _: script
    body = {"prompt": "a", "stream": stream, "n": n, "max_tokens": 900}
    connection = send_raw(port, "/v1/completions", body)
    wait_until(lambda: len(engine.open) == n)
    if stream and script is SLOW:
        assert b"200 OK" in connection.recv(4096)
    connection.close()
    assert wait_until(lambda: not engine.open) < 1.0
    assert len(engine.aborted) == n
    assert httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200
    assert f'finish_reason="abort",model_name="demo"}} {n}.0' in httpx.get(f"http://127.0.0.1:{port}/metrics").text


def test_an_openai_client_that_stops_reading_aborts(client, engine):
    engine.script = lambda _: SLOW
    stream = client.completions.create(model="demo", prompt="a", stream=True, max_tokens=900)
    next(iter(stream))
    stream.close()
    wait_until(lambda: not engine.open, 1.0)
    assert len(engine.aborted) == 1


def test_a_client_that_leaves_inside_its_body(port, engine):
    connection = socket.create_connection(("127.0.0.1", port), timeout=5)
    connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{")
    connection.close()
    assert httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200
    assert engine.requests == []


def test_long_bodies_do_not_block_others(port, engine):
    """200 kB of prompt are tokenized off the loop; the answer is right either way."""
    response = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json={"prompt": "word " * 40_000})
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "context_length_exceeded"
    assert engine.requests == []


SCRIPT = """
import sys
sys.path.insert(0, sys.argv[1])
from conftest import TEXT, FakeEngine, create_app, ServerSettings
from milepost.server.run import run
run(create_app(FakeEngine(), TEXT, ServerSettings("demo", 1000)), port=0)
print("cleaned up", flush=True)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_end_it_in_order(number):
    here = Path(__file__).parent
    command = [sys.executable, "-c", SCRIPT, str(here)]
    environment = {**os.environ, "PYTHONPATH": str(here.parents[1])}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        try:
            line = process.stdout.readline()
            assert line.startswith("ready: curl http://127.0.0.1:"), line + process.stderr.read()
            url = line.split()[2]
            assert httpx.post(url, json={"messages": [{"role": "user", "content": "Hi"}]}).status_code == 200
            process.send_signal(number)
            out, err = process.communicate(timeout=15)
        finally:
            process.kill()
    assert (out, err, process.returncode) == ("cleaned up\n", "", 0)


def test_a_taken_port_is_said_so():
    with listen("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with pytest.raises(ConfigError, match=f"--port {port}: can't be bound"):
            listen("127.0.0.1", port)
    with pytest.raises(ConfigError, match="--host"):
        listen("not.an.address.invalid", 0)
    with pytest.raises(ConfigError, match="--port"):
        listen("127.0.0.1", 70_000)


def test_the_ready_line_names_an_address_that_works():
    assert "http://127.0.0.1:8/" in ready_line("0.0.0.0", 8)
    assert "http://[::1]:8/" in ready_line("::", 8)
    assert "http://[fe80::1]:8/" in ready_line("fe80::1", 8)
