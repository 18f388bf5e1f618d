"""The real server on the embedded model, through the real client."""

import asyncio
import random

import httpx
import openai
import pytest

from tests.e2e.live import Live, serving

VERSES = [
    "And it came to pass in those days, that the king sent messengers unto the land of Judah.",
    "Then answered the people, and said, We will serve the LORD our God.",
    "And David said unto his servants, Go ye up, and see the land.",
    "The LORD is my shepherd; I shall not want.",
    "And they departed thence, and came into their own country.",
]


@pytest.fixture(scope="module")
def live():
    with serving(max_mamba_cache_size=64, max_total_tokens=60_000, chunked_prefill_size=256) as running:
        yield running


@pytest.fixture
def client(live):
    with openai.OpenAI(base_url=live.url + "/v1", api_key="none", max_retries=0) as made:
        yield made


def common(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@pytest.mark.parametrize("max_tokens", [24, 400], ids=["cut short", "to the end"])
def test_five_turns_reuse_all_that_was_consumed(live: Live, client, max_tokens):
    """Each turn reuses, to the token, what the model had consumed and the new prompt repeats."""
    messages = [{"role": "system", "content": f"You continue the text, at most {max_tokens} tokens."}]
    before: list[int] = []
    for turn, verse in enumerate(VERSES):
        messages.append({"role": "user", "content": verse})
        stream = client.chat.completions.create(
            model="milepost-demo",
            messages=messages,
            max_tokens=max_tokens,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
        answer, usage = "", None
        for chunk in stream:
            answer += (chunk.choices[0].delta.content or "") if chunk.choices else ""
            usage = chunk.usage or usage
        heard = live.recorder.heard[-1]
        assert usage is not None and usage.prompt_tokens == len(heard.prompt)
        repeated = common(before, heard.prompt)
        assert usage.prompt_tokens_details.cached_tokens == heard.cached == repeated
        assert turn == 0 or repeated == len(before) > 0, "the template or the tokenizer rewrote the history"
        before = heard.consumed
        messages.append({"role": "assistant", "content": answer})
    live.check()


@pytest.mark.parametrize("level", [2, 3])
def test_forks(level):
    """A+B, A+D, A+E: the third reuses exactly A; at level 3 the second already reuses the last chunk end."""
    chance = random.Random(3)
    a, b, d, e = ([chance.randrange(3, 4096) for _ in range(n)] for n in (700, 90, 80, 70))
    flags = {"max_mamba_cache_size": 32, "max_total_tokens": 20_000, "chunked_prefill_size": 256}
    with serving(hybrid_cache_checkpoints_level=level, **flags) as live, httpx.Client(base_url=live.url) as http:
        found = []
        for prompt in (a + b, a + d, a + e):
            body = {"prompt": prompt, "max_tokens": 4, "temperature": 0}
            usage = http.post("/v1/completions", json=body, timeout=60).json()["usage"]
            found.append(usage["prompt_tokens_details"]["cached_tokens"])
        assert found == [0, 512 if level == 3 else 0, 700]
        live.check()


@pytest.mark.parametrize("keep", [False, True])
def test_history_rewritten_after_the_header(keep):
    """A client that drops the answer's beginning from the history still finds the end of its last message."""
    flags = {"max_mamba_cache_size": 32, "max_total_tokens": 20_000}
    with serving({"keep_message_end": keep}, **flags) as live, httpx.Client(base_url=live.url, timeout=60) as http:
        messages = [{"role": "user", "content": " ".join(VERSES)}]
        body = {"messages": messages, "max_tokens": 12, "temperature": 0}
        first = http.post("/v1/chat/completions", json=body).json()
        again = {"role": "user", "content": "Another question."}
        second = http.post("/v1/chat/completions", json={**body, "messages": [*messages, again]}).json()
        header = len(live.booted.text.encode("<|im_start|>assistant\n")) // 4
        found = second["usage"]["prompt_tokens_details"]["cached_tokens"]
        # "<|im_start|>" is in both; the role after it differs.
        message_end = first["usage"]["prompt_tokens"] - header
        assert found == (message_end if keep else 0)
        live.check()


def test_namespaces_never_share(live: Live):
    prompt = list(range(100, 400))
    with httpx.Client(base_url=live.url) as http:
        found = []
        for salt in ("a", "a", "a", "b"):
            body = {"prompt": [*prompt, len(found)], "max_tokens": 1, "temperature": 0, "cache_salt": salt}
            usage = http.post("/v1/completions", json=body, timeout=60).json()["usage"]
            found.append(usage["prompt_tokens_details"]["cached_tokens"])
    assert found == [0, 0, 300, 0]


def test_refusals_leave_the_server_alive(live: Live):
    wrong = [
        ("/v1/completions", {"prompt": [5] * 40_000}, 400, "context"),
        ("/v1/completions", {"prompt": "x", "temperature": -1}, 400, "temperature"),
        ("/v1/completions", {"prompt": "x", "model": "gpt-x"}, 404, "gpt-x"),
        ("/v1/chat/completions", {"messages": "x"}, 400, "messages"),
        ("/v1/completions", {"prompt": "x", "top_p": 0}, 400, "top_p"),
        ("/v1/nothing", {}, 404, "nothing"),
    ]
    with httpx.Client(base_url=live.url) as http:
        for path, body, status, word in wrong:
            answer = http.post(path, json=body)
            error = answer.json()["error"]
            assert answer.status_code == status, answer.text
            assert word in error["message"] + str(error["param"]), answer.text
        assert http.post("/v1/completions", content=b"{").status_code == 400
        assert http.get("/health").status_code == 200
        assert http.post("/flush_cache").status_code == 200
        page = http.get("/metrics").text
        assert "milepost:state_slots_free" in page and "milepost:lost_reuse_tokens_total" in page
        assert http.get("/get_server_info").json()["strategy"] == "exact"
    live.check()


def test_two_thousand_requests_with_aborts_and_disconnects():
    """Random prompts that share stems, a third of them dropped at a random moment; then everything is back."""
    flags = {"max_mamba_cache_size": 12, "max_total_tokens": 3_000, "chunked_prefill_size": 128}
    with serving(max_running_requests=10, **flags) as live:
        counts = asyncio.run(_storm(live, 2_000))
        live.check()
        assert counts["served"] + counts["dropped"] == 2_000
        assert counts["served"] > 1_000 and counts["dropped"] > 300
        counters = live.scheduler.counters
        assert counters.finished_total + counters.aborted_total == counters.requests_total
        assert counters.aborted_total > 50 and counters.cached_tokens_total > 0
        assert live.scheduler.flush()
        stats = live.scheduler.stats()
        assert stats.states.free == stats.states.size and stats.rows.free == stats.rows.size


async def _storm(live: Live, total: int) -> dict[str, int]:
    chance = random.Random(11)
    stems = [[chance.randrange(3, 4096) for _ in range(120)] for _ in range(6)]
    counts = {"served": 0, "dropped": 0}
    gate = asyncio.Semaphore(24)
    limits = httpx.Limits(max_connections=32)
    async with httpx.AsyncClient(base_url=live.url, limits=limits, timeout=60) as http:

        async def one(drop: bool) -> None:
            stem = chance.choice(stems)
            prompt = stem[: chance.randrange(1, 120)] + [chance.randrange(3, 4096) for _ in range(chance.randrange(9))]
            body = {"prompt": prompt, "max_tokens": chance.randrange(1, 14), "stream": chance.random() < 0.5}
            if drop:
                body["max_tokens"] = 200
            wait = chance.random() * 0.05 if drop else 60
            async with gate:
                try:
                    async with asyncio.timeout(wait):
                        answer = await http.post("/v1/completions", json=body)
                    assert answer.status_code == 200, answer.text
                    counts["served"] += 1
                except TimeoutError:
                    counts["dropped"] += 1

        await asyncio.gather(*(one(chance.random() < 0.33) for _ in range(total)))
    return counts
