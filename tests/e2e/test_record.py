"""What the server records, the replay reads back: hashed, in blocks, and with the same reuse."""

import asyncio
import json
import random
import signal
import subprocess
import sys

import httpx
import pytest
from click.testing import CliRunner

from milepost.cli import cli
from milepost.cli.replay import build
from milepost.config import CacheConfig
from milepost.core.request import Finish, Request
from milepost.core.tokens import pack
from milepost.engine.facade import Delta, Usage
from milepost.engine.record import RecordingEngine, TraceFile
from milepost.errors import ConfigError
from milepost.sim.formats.detect import read
from milepost.sim.replay import Replay
from milepost.sim.trace import material
from tests.e2e import live

POOLS = {"max_mamba_cache_size": 32, "max_total_tokens": 20_000, "chunked_prefill_size": 256}


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module", params=[1, 64])
def recorded(request, tmp_path_factory):
    """Three chats of four turns, forks and a salted prompt, one request at a time; what the server said of each."""
    path = tmp_path_factory.mktemp("recorded") / "trace.jsonl"
    file = TraceFile(path, "demo", request.param)
    create = live.create_app
    said = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(live, "create_app", lambda engine, *rest: create(RecordingEngine(engine, file), *rest))
        with live.serving(**POOLS) as server, httpx.Client(base_url=server.url, timeout=60) as http:
            talk(server, http, said)
            server.check()
    file.close()
    return path, request.param, said


def talk(server, http, said):
    chance = random.Random(2)

    def ask(prompt, **more):
        body = {"prompt": prompt, "max_tokens": chance.randrange(1, 90), "temperature": 0, **more}
        usage = http.post("/v1/completions", json=body).json()["usage"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        said.append((usage["prompt_tokens"], usage["completion_tokens"], cached))
        return server.recorder.heard[-1].tokens

    shared = [chance.randrange(3, 4096) for _ in range(400)]
    chats = [shared + [chance.randrange(3, 4096) for _ in range(60 + 30 * i)] for i in range(3)]
    for _ in range(4):
        for i, chat in enumerate(chats):
            chat += ask(chat, session_id=f"chat of {i}")
            chat += [chance.randrange(3, 4096) for _ in range(chance.randrange(1, 150))]
    ask(shared)
    ask(shared, cache_salt="somebody else's")


def test_a_recording_replays_with_the_same_reuse(recorded):
    """With blocks of one token: equal to the token. With blocks of 64: two blocks less at most.

    But where reuse would end inside the prompt's last block: of whole blocks at least one is always computed, so a
    state at the end of the last full block can't be used.
    """
    path, block, said = recorded
    trace = read(path)
    assert trace.block == block and len(trace.turns) == len(said) == 14
    assert [(turn.prompt_len, turn.output_len) for turn in trace.turns] == [pair[:2] for pair in said]
    flags = CacheConfig(**POOLS) if block == 1 else CacheConfig(max_total_tokens=20_000, max_mamba_cache_size=32)
    replay = Replay(build(flags), material(trace), audited=True)
    replayed = [served.cached for served in replay.sequential(trace.turns)]
    real = [cached for _, _, cached in said]
    assert sum(real) > 2_500
    if block == 1:
        assert replayed == real
        return
    for ours, (prompt, _, theirs) in zip(replayed, said, strict=True):
        assert ours <= theirs and (theirs < ours + 2 * block or theirs // block == prompt // block)


def test_a_recording_holds_no_text_and_says_when(recorded):
    path, block, _ = recorded
    found = rows(path)
    meta = json.loads(path.with_name("trace.jsonl.meta.json").read_text())
    assert (meta["format"], meta["version"], meta["block_size"], meta["model"]) == ("mooncake", 1, block, "demo")
    assert "chat of" not in path.read_text() and "somebody" not in path.read_text()
    names = [row["session_id"] for row in found]
    assert names[:3] == names[3:6] == names[6:9] and len(set(names)) == 3 + 2
    assert [row["timestamp"] for row in found] == sorted(row["timestamp"] for row in found)
    for row in found:
        assert len(row["hash_ids"]) == -(-row["input_length"] // block) and row["took_ms"] > 0
        whole = (row["input_length"] + row["output_length"]) // block
        assert len(row["output_hash_ids"]) == whole - row["input_length"] // block
    seen = [i for row in found for i in row["hash_ids"] + row["output_hash_ids"]]
    assert list(dict.fromkeys(seen)) == list(range(max(seen) + 1))
    assert not set(found[-1]["hash_ids"]) & set(found[-2]["hash_ids"]), "two namespaces share ids"
    turns = read(path).turns
    assert all(turn.think is not None and turn.took for turn in turns if turn.turn)


def test_replay_reads_it_from_the_command_line(recorded):
    path, _, said = recorded
    args = ["replay", str(path), "--max-total-tokens", "20000", "--max-mamba-cache-size", "32", "--json"]
    figures = json.loads(CliRunner().invoke(cli, args, catch_exceptions=False).stdout)
    assert figures["requests"] == 14 and figures["prompt_tokens"] == sum(prompt for prompt, _, _ in said)


class Scripted:
    """An engine that answers two tokens, or waits forever on a prompt of one."""

    async def stream(self, request, _stops=()):
        yield Delta("a", (7,))
        if len(request.prompt) == 4:
            await asyncio.Event().wait()
        yield Delta("b", (8,), Finish.STOP, Usage(4, 2, 0))


def serve(engine, *prompts, drop=False):
    async def one(prompt):
        stream = engine.stream(Request("", pack(prompt), session="s"))
        async for _ in stream:
            if drop:
                break
        await stream.aclose()

    async def every():
        for prompt in prompts:
            await one(prompt)

    asyncio.run(every())


def test_rows_are_on_disk_at_once_and_aborts_leave_none(tmp_path):
    now = iter([100.0, 100.5, 102.0, 104.25])
    file = TraceFile(tmp_path / "t", "m", 4, salt=b"x")
    engine = RecordingEngine(Scripted(), file, lambda: next(now))
    serve(engine, [1, 2, 3, 4, 5, 6])
    assert rows(tmp_path / "t")[0]["hash_ids"] == [0, 1]
    serve(engine, [1, 2, 3, 4, 5, 6, 7, 8])
    first, second = rows(tmp_path / "t")
    assert (first["timestamp"], first["took_ms"]) == (0.0, 500.0)
    assert (second["timestamp"], second["took_ms"]) == (2000.0, 2250.0)
    # 1 … 6 and the answer 7, 8 fill the second block, which the next prompt has too.
    assert first["output_hash_ids"] == [2] and second["hash_ids"] == [0, 2] and second["output_hash_ids"] == []
    assert read(tmp_path / "t").turns[1].think == 1.5
    now = iter([110.0])
    serve(engine, [1], drop=True)
    assert len(rows(tmp_path / "t")) == 2
    file.close()


def test_the_salt_decides_about_digests_and_is_not_stored(tmp_path):
    for name, salt in (("a", b"1"), ("b", b"1"), ("c", b"2")):
        file = TraceFile(tmp_path / name, "m", 4, salt)
        serve(RecordingEngine(Scripted(), file), [1, 2, 3, 4])
        file.close()
    a, b, c = (rows(tmp_path / name)[0]["session_id"] for name in "abc")
    assert a == b != c
    prints = [json.loads((tmp_path / f"{name}.meta.json").read_text())["salt_fingerprint"] for name in "abc"]
    assert prints[0] == prints[1] != prints[2]


def test_a_full_disk_ends_the_recording_and_not_the_service(tmp_path, caplog):
    file = TraceFile(tmp_path / "t", "m", 4)

    class Full:
        closed = False

        def write(self, _text):
            raise OSError(28, "No space left on device")

        def close(self):
            self.closed = True

    file._file.close()
    file._file = Full()
    serve(RecordingEngine(Scripted(), file), [1, 2, 3], [1, 2, 3])
    assert sum("No space left" in record.getMessage() for record in caplog.records) == 1


def test_refusals_come_before_anything_is_loaded(tmp_path):
    kept = tmp_path / "t.jsonl"
    kept.write_text("mine")
    for args, complaint in (
        (["--record-trace", str(kept)], "exists already"),
        (["--record-trace", str(tmp_path / "no" / "t")], "needs the folder"),
        (["--record-trace", str(tmp_path / "new"), "--record-block", "0"], "--record-block 0"),
    ):
        with pytest.raises(ConfigError, match=complaint):
            CliRunner().invoke(cli, ["serve", *args], catch_exceptions=False)
    assert kept.read_text() == "mine" and not (tmp_path / "new").exists()


def test_serve_records(tmp_path):
    """The command itself, in a process of its own, until it is told to stop."""
    path = tmp_path / "t.jsonl"
    args = ["serve", "--port", "0", "--record-trace", str(path), "--memory-budget", "64MiB"]
    code = "from milepost.cli import main; main()"
    with subprocess.Popen([sys.executable, "-c", code, *args], stdout=subprocess.PIPE, text=True) as server:
        try:
            ready = next(line for line in server.stdout if line.startswith("ready"))
            url = ready.split()[2].removesuffix("/chat/completions")
            body = {"prompt": list(range(100, 230)), "max_tokens": 5}
            assert httpx.post(f"{url}/completions", json=body, timeout=60).status_code == 200
            assert [row["input_length"] for row in rows(path)] == [130], "written while the server runs"
        finally:
            server.send_signal(signal.SIGTERM)
    assert server.returncode == 0 and read(path).block == 64
