"""The real app over a real engine loop, on the simulator's tagged memory: HTTP with figures known in advance.

Streams and the model's answers share the 4096 ids of the embedded model's tokenizer, half each.
"""

import json
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import httpx

from milepost.core.plan import Executor, Plan, Result
from milepost.engine.loop import EngineLoop
from milepost.server.app import create_app
from milepost.server.protocol import ServerSettings
from tests.scenarios.world import Stream, Tokens, World
from tests.server.conftest import TEXT, serving

HALF = 2048
CONTEXT = 32_768


def streams(names: str) -> list[Stream]:
    return [Stream(name, HALF) for name in names]


class Gate:
    """An executor that runs a step when it is let, so that a test can look while it waits."""

    def __init__(self, inner: Executor) -> None:
        self._inner = inner
        self._permits = threading.Semaphore(0)
        self._free = True
        self.steps = 0
        self.waits = threading.Event()

    def run(self, plan: Plan) -> Result:
        self.steps += 1
        if not self._free:
            self.waits.set()
            self._permits.acquire()
        return self._inner.run(plan)

    def shut(self) -> None:
        self._free = False

    def let(self, steps: int) -> None:
        """Let as many steps run, one after another, each as soon as it is asked for."""
        for _ in range(steps):
            assert self.waits.wait(10), "the engine asks for no step"
            self.waits.clear()
            self._permits.release()

    def open(self) -> None:
        self._free = True
        self._permits.release()

    def close(self) -> None:
        self._inner.close()


class Small(World):
    """A world whose tokens fit the tokenizer."""

    own = HALF


class Served:
    """A world behind its app on a socket. `ask` and `start` are what clients do, `gauges` is what a scrape finds."""

    def __init__(self, world: World, port: int, gate: Gate) -> None:
        self.world = world
        self.port = port
        self.gate = gate
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30)

    def ask(self, prompt: Tokens, gen: int | None = 1) -> httpx.Response:
        return self.client.post("/v1/completions", json=body(prompt, gen))

    def cached(self, prompt: Tokens, gen: int = 1) -> int:
        """How many prompt tokens the answer's usage says were cached."""
        answer = self.ask(prompt, gen).json()
        assert answer["choices"][0]["finish_reason"] == "length"
        return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])

    def start(self, prompt: Tokens, gen: int) -> socket.socket:
        """A streaming request whose client hangs up when the socket is closed; nobody reads the answer."""
        raw = json.dumps(body(prompt, gen, stream=True)).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(raw)}\r\n\r\n"
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=10)
        connection.sendall(head.encode() + raw)
        return connection

    def gauges(self) -> dict[str, float]:
        """All series of the metrics page without their labels (requests: by how they ended)."""
        page = self.client.get("/metrics").text
        found = {}
        for name, labels, value in re.findall(r"^milepost:(\w+)\{(.*)\} (\S+)$", page, re.MULTILINE):
            reason = re.search(r'finish_reason="(\w+)"', labels)
            found[f"{name}.{reason[1]}" if reason else name] = float(value)
        return found

    def wait(self, condition: Callable[[], bool], seconds: float = 10.0) -> None:
        began = time.monotonic()
        while not condition():
            assert time.monotonic() - began < seconds, "waited in vain"
            time.sleep(0.002)


def body(prompt: Tokens, gen: int | None, **more: Any) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": gen, "temperature": 0, "ignore_eos": True, **more}


@contextmanager
def served(world: World) -> Iterator[Served]:
    """Start the loop and the server; stop both, and leave the world to whoever checks it."""
    world.scheduler.limits = replace(world.scheduler.limits, context=CONTEXT)
    gate = Gate(world.executor)
    engine = EngineLoop(world.scheduler, gate, TEXT, {})
    engine.start()
    try:
        with serving(create_app(engine, TEXT, ServerSettings("demo", CONTEXT))) as port:
            it = Served(world, port, gate)
            with it.client:
                yield it
            gate.open()
    finally:
        gate.open()
        engine.close()
