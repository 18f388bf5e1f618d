"""Speed of single cache operations on a large cache: match, publish a chunk, evict.

    python bench/core_ops.py [--json]

The cache holds sessions of 100,000 tokens in nodes of 5,000, a state on each node. Times are the median of
repeated calls, one thread, in milliseconds. "floor" is what comparing the same tokens costs with one memcmp and
nothing else: the machine's own unit, so that runs on different machines can be compared.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable

import numpy as np
from rich.console import Console
from rich.table import Table

from milepost.core.cache import PrefixCache, Snapshot
from milepost.core.checkpoint import EXACT, CheckpointPolicy, Reason
from milepost.core.pool import Owner, RowPool, SlotPool
from milepost.core.tokens import length

NODE = 5_000
SESSION = 100_000
CHUNK = 8_192
EVICTED = 100_000
PUBLISHER = Owner(1)


def session(number: int, tokens: int) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 2**30, tokens, dtype=np.int32)


def filled(tokens: int) -> PrefixCache:
    """A cache of `tokens` tokens in whole sessions, with room for what the benchmark adds."""
    sessions = tokens // SESSION
    nodes = sessions * SESSION // NODE
    cache = PrefixCache(RowPool(tokens + 600_000), SlotPool(nodes + 64), EXACT, CheckpointPolicy.level(3))
    for number in range(sessions):
        publish(cache, session(number, SESSION), NODE)
    return cache


def publish(cache: PrefixCache, tokens: np.ndarray, step: int) -> None:
    """Publish a sequence in nodes of `step` tokens, each with a state, and let go of it."""
    key = tokens.tobytes()
    lease = cache.acquire(cache.match(key), PUBLISHER)
    cache.restored(lease)
    start = lease.node.end
    rows = np.concatenate([cache.path_rows(lease.node), cache.take_rows(tokens.size - start, PUBLISHER)])
    for stop in range(start + step, tokens.size + 1, step):
        slot = cache.take_slot(PUBLISHER)
        cache.publish(lease, tokens[:stop].tobytes(), rows, Snapshot(stop, slot, Reason.CHUNK))
    cache.release(lease)


def timed(deed: Callable[[], object], repeat: int = 1) -> float:
    began = time.perf_counter()
    for _ in range(repeat):
        deed()
    return (time.perf_counter() - began) / repeat * 1e3


def measure_match(cache: PrefixCache, prompt: int, sessions: int) -> tuple[float, float]:
    """(match of a prompt that is cached up to its last token, memcmp of as many tokens), in ms."""
    keys = [session(n % sessions, SESSION)[: prompt % (SESSION + 1) or SESSION].tobytes() for n in range(20)]
    if prompt > SESSION:
        long = session(10**6, prompt)
        publish(cache, long, NODE)
        keys = [long.tobytes()] * 20
    times, floors = [], []
    for key in keys:
        copy = bytes(bytearray(key))
        times.append(timed(lambda key=key: cache.match(key[:-4])))
        floors.append(timed(lambda key=key, copy=copy: key == copy))
        assert cache.match(key).resume == length(key) // NODE * NODE
    return statistics.median(times), statistics.median(floors)


def measure_publish(cache: PrefixCache, prompt: int) -> float:
    """Publish a chunk behind `prompt` cached tokens: acquire's lease is at the prompt's end."""
    times = []
    for trial in range(12):
        tokens = session(2 * 10**6 + trial + prompt, prompt + CHUNK)
        publish(cache, tokens[:prompt], NODE)
        lease = cache.acquire(cache.match(tokens[:prompt].tobytes()), PUBLISHER)
        cache.restored(lease)
        start = lease.node.end
        rows = np.concatenate([cache.path_rows(lease.node), cache.take_rows(prompt + CHUNK - start, PUBLISHER)])
        slot = cache.take_slot(PUBLISHER)
        buffer = np.concatenate([tokens, np.zeros(100, np.int32)])

        def deed(buffer=buffer, lease=lease, rows=rows, slot=slot) -> None:
            key = buffer[: prompt + CHUNK].tobytes()
            cache.publish(lease, key, rows, Snapshot(prompt + CHUNK, slot, Reason.CHUNK))

        times.append(timed(deed))
        cache.release(lease)
    return statistics.median(times)


def measure_evict(cache: PrefixCache) -> float:
    """Take 100,000 rows from a full pool."""
    while cache.rows.free:
        cache.rows.take(cache.rows.free, Owner(2))
    times = []
    for owner in range(3, 10):
        times.append(timed(lambda owner=owner: cache.take_rows(EVICTED, Owner(owner))))
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--cached", type=int, nargs="*", default=[1_000_000, 10_000_000])
    args = parser.parse_args()
    results = []
    for cached in args.cached:
        for prompt in (10_000, 50_000, 100_000, 200_000):
            cache = filled(cached)
            match, floor = measure_match(cache, prompt, cached // SESSION)
            results.append(
                {
                    "cached": cached,
                    "prompt": prompt,
                    "match_ms": match,
                    "floor_ms": floor,
                    "publish_8k_ms": measure_publish(cache, prompt),
                    "evict_100k_ms": measure_evict(cache),
                }
            )
    if args.json:
        print(json.dumps(results))
        return
    table = Table("cached", "prompt", "match ms", "memcmp ms", "publish 8k ms", "evict 100k ms")
    for row in results:
        times = [f"{row[name]:.3f}" for name in ("match_ms", "floor_ms", "publish_8k_ms", "evict_100k_ms")]
        table.add_row(f"{row['cached']:,}", f"{row['prompt']:,}", *times)
    Console().print(table)


if __name__ == "__main__":
    main()
