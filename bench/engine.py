"""The engine against transformers: same weights, same process, random tokens, greedy.

    python bench/engine.py [--dtype bfloat16] [--threads 2] [--repeats 3] [--json]

Ours is the whole engine below the server: scheduler, cache, executor, sampler. The model is a 47 M one: hidden 512,
FFN 1536, 12 layers (9 Gated DeltaNet + 3 attention), 8 heads x 64, 2 KV heads, vocabulary 8192, tied. Each figure
is the best of a few repeats, ours and theirs in turn, so that a busy neighbour hurts both. Transformers runs as
installed, without its optional GPU packages; it computes the logits of the last position only.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from milepost.core.checkpoint import EXACT, NO_CACHE
from milepost.core.pool import Owner
from milepost.core.request import Request, Sampling
from milepost.core.scheduler import Limits, Scheduler
from milepost.core.tokens import pack
from milepost.engine.executor import TorchExecutor
from milepost.model import Decoder, Memory, load_decoder

PREFILL = ((1, 512), (1, 2048), (8, 512), (32, 128))
DECODE = tuple((batch, context) for context in (64, 512) for batch in (1, 8, 32))
STEPS = 8
VOCAB = 8192


def build(folder: Path) -> None:
    """Save the model with random weights of a scale that keeps activations and logits of order one."""
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    torch.manual_seed(0)
    config = Qwen3_5TextConfig(
        vocab_size=VOCAB,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=12,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        linear_num_key_heads=8,
        linear_num_value_heads=8,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        tie_word_embeddings=True,
    )
    model = Qwen3_5ForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_().div_(parameter.shape[-1] ** 0.5)
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f} M parameters", file=sys.stderr)
    model.save_pretrained(folder)


class Ours:
    """A scheduler and an executor with pools for `batch` sequences."""

    def __init__(self, decoder: Decoder, batch: int, context: int) -> None:
        rows = batch * (context + 512)
        memory = Memory(decoder.config, 2 * batch, rows, kv_dtype=decoder.dtype)
        self.scheduler = Scheduler(rows, 2 * batch, Limits(batch, 2048, 1 << 20), EXACT, NO_CACHE)
        self.executor = TorchExecutor(decoder, memory)
        self.numbers: list[Owner] = []

    def prefill(self, prompts: np.ndarray) -> None:
        """Prompts [batch, n] up to the first token of each answer."""
        for prompt in prompts:
            self.numbers.append(self.scheduler.submit(Request("", pack(prompt), Sampling(max_new=500))))
        while any(not sequence.generated for sequence in self.scheduler.sequences.values()):
            self.step()

    def step(self) -> None:
        plan = self.scheduler.plan()
        self.scheduler.commit(self.executor.run(plan))

    def restart(self) -> None:
        for number in self.numbers:
            self.scheduler.abort(number)
        self.numbers.clear()


class Theirs:
    """transformers with its own cache."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.restart()

    def prefill(self, prompts: np.ndarray) -> None:
        self._feed(torch.from_numpy(prompts).long())

    def step(self) -> None:
        self._feed(self.next)

    def _feed(self, ids: torch.Tensor) -> None:
        n = ids.shape[1]
        positions = torch.arange(self.at, self.at + n)[None].expand(len(ids), -1)
        with torch.no_grad():
            out = self.model(ids, position_ids=positions, cache=self.cache, use_cache=True, logits_to_keep=1)
        self.next = out.logits[:, -1].argmax(-1, keepdim=True)
        self.cache = out.cache
        self.at += n

    def restart(self) -> None:
        self.cache = None
        self.at = 0


Runner = Ours | Theirs


def time_prefill(runner: Runner, batch: int, length: int) -> float:
    """Seconds from `batch` prompts of `length` tokens to their first tokens."""
    prompts = np.random.default_rng(1).integers(0, VOCAB, (batch, length), dtype=np.int32)
    runner.restart()
    begin = time.perf_counter()
    runner.prefill(prompts)
    return time.perf_counter() - begin


def time_decode(runner: Runner) -> float:
    """Seconds of one step, the best of STEPS that follow each other."""
    times = []
    for _ in range(STEPS):
        begin = time.perf_counter()
        runner.step()
        times.append(time.perf_counter() - begin)
    return min(times)


def compare(ours: Callable[[], float], theirs: Callable[[], float], tokens: int, repeats: int) -> dict[str, float]:
    """Best of `repeats` for both, in turn, as tokens a second."""
    pairs = [(ours(), theirs()) for _ in range(repeats)]
    fast, reference = (tokens / min(times) for times in zip(*pairs, strict=True))
    return {"ours": round(fast, 1), "transformers": round(reference, 1), "ratio": round(fast / reference, 2)}


def measure(decoder: Decoder, model: Any, repeats: int) -> dict[str, dict[str, float]]:
    """All figures, by name."""
    results = {}
    for batch, length in PREFILL:
        mine, other = Ours(decoder, batch, length), Theirs(model)
        for runner in (mine, other):
            time_prefill(runner, 1, 64)
        name = f"prefill batch {batch} of {length}"
        timers = partial(time_prefill, mine, batch, length), partial(time_prefill, other, batch, length)
        results[name] = compare(*timers, batch * length, repeats)
        print(name, results[name], file=sys.stderr, flush=True)
    for batch, context in DECODE:
        mine, other = Ours(decoder, batch, context), Theirs(model)
        prompts = np.random.default_rng(3).integers(0, VOCAB, (batch, context), dtype=np.int32)
        for runner in (mine, other):
            runner.prefill(prompts)
            time_decode(runner)
        name = f"decode batch {batch} context {context}"
        results[name] = compare(partial(time_decode, mine), partial(time_decode, other), batch, repeats)
        print(name, results[name], file=sys.stderr, flush=True)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    from transformers import Qwen3_5ForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    dtype = getattr(torch, options.dtype)
    with tempfile.TemporaryDirectory() as folder:
        build(Path(folder))
        decoder = load_decoder(Path(folder), dtype=dtype)
        model = Qwen3_5ForCausalLM.from_pretrained(folder, dtype=dtype).eval()
        results = measure(decoder, model, options.repeats)
    if options.json:
        print(json.dumps({"dtype": options.dtype, "threads": options.threads, "tokens_per_second": results}))
        return
    print(f"{options.dtype}, {options.threads} threads; tokens a second")
    for name, row in results.items():
        print(f"{name:32} {row['ours']:10.1f} {row['transformers']:10.1f}   x {row['ratio']:.2f}")


if __name__ == "__main__":
    main()
