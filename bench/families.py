"""Every family against transformers: same weights, same process, random tokens. Decoder and memory only, no engine.

    python bench/families.py [FAMILY ...] [--dtype float32] [--threads 2] [--repeats 3]

Each model has hidden 256, a dozen layers and random weights; the sizes are the test recipes' but larger. Each figure
is the best of a few repeats, ours and theirs in turn, so that a busy neighbour hurts both; with one thread time is CPU
time, and no neighbour counts. transformers runs as installed, without its optional GPU packages.
"""

import argparse
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
from milepost.model import Batch, Decoder, Memory, Span, load_decoder
from tests.model.oracle import FAMILIES, make_reference, save

PREFILL, DECODE, STEPS = (1, 512), (8, 128), 8
SCALED = {"hidden_size": 256, "intermediate_size": 768, "vocab_size": 2048, "num_attention_heads": 8}
SIZES = {
    "head_dim": 32,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_num_heads": 8,
    "linear_head_dim": 32,
    "kv_lora_rank": 128,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "index_head_dim": 32,
    "index_topk": 128,
    "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 128,
    "moe_shared_expert_intermediate_size": 128,
    "shared_intermediate_size": 256,
    "moe_latent_size": 128,
    "mamba_n_heads": 16,
    "mamba_num_heads": 16,
    "mamba_d_head": 32,
    "mamba_head_dim": 32,
    "mamba_d_state": 64,
    "ssm_state_size": 64,
    "mamba_d_ssm": 512,
    "sliding_window": 128,
}


def build(family: str) -> Any:
    """The test recipe, larger."""
    fields = FAMILIES[family].fields
    changes = {**SCALED, **{name: size for name, size in SIZES.items() if fields.get(name)}}
    if fields.get("num_key_value_heads") == 4:  # those that must have as many as heads
        changes["num_key_value_heads"] = 8
    for name in ("layer_types", "layers_block_type", "indexer_types", "mlp_layer_types"):
        if name in fields:
            changes[name] = (fields[name] * 3)[:12]
            if name == "layer_types":
                changes["num_hidden_layers"] = 12
    return make_reference(family, **changes)


class Ours:
    def __init__(self, decoder: Decoder, batch: int, length: int) -> None:
        self.decoder = decoder
        rows = batch * (length + STEPS + 1)
        self.memory = Memory(decoder.config, batch, rows, window_rows=rows, kv_dtype=decoder.dtype)
        self.rows = np.random.default_rng(0).permutation(np.arange(1, rows + 1, dtype=np.int32)).reshape(batch, -1)
        self.at = 0

    def run(self, tokens: np.ndarray) -> None:
        """Tokens [batch, n] behind those that were there."""
        start, self.at = self.at, self.at + tokens.shape[1]
        ids = [rows[: self.at] for rows in self.rows]
        spans = tuple(Span(start, self.at, rows, i + 1, window=rows) for i, rows in enumerate(ids))
        wanted = (np.arange(len(spans)) + 1) * tokens.shape[1] - 1
        self.decoder.forward(Batch(tokens.flatten(), spans, wanted), self.memory)


class Theirs:
    def __init__(self, model: Any) -> None:
        self.model, self.cache, self.at = model, None, 0

    def run(self, tokens: np.ndarray) -> None:
        positions = torch.arange(self.at, self.at + tokens.shape[1])[None].expand(len(tokens), -1)
        self.at += tokens.shape[1]
        ids = torch.from_numpy(tokens.astype(np.int64))
        with torch.no_grad():
            out = self.model(ids, position_ids=positions, cache=self.cache, use_cache=True, logits_to_keep=1)
        self.cache = out.cache


def rate(make: Callable[[], Any], prompt: np.ndarray, decode: bool, clock: Callable[[], float]) -> float:
    """Tokens a second of a prefill, or of steps behind it."""
    runner = make()
    began = clock()
    runner.run(prompt)
    if not decode:
        return prompt.size / (clock() - began)
    runner.run(prompt[:, :1])
    began = clock()
    for _ in range(STEPS - 1):
        runner.run(prompt[:, :1])
    return len(prompt) * (STEPS - 1) / (clock() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", metavar="FAMILY", help=", ".join(FAMILIES))
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    clock = time.process_time if options.threads == 1 else time.perf_counter
    warnings.simplefilter("ignore")
    dtype = getattr(torch, options.dtype)
    print(f"{options.dtype}, {options.threads} threads; tokens a second, ours and transformers'")
    for family in options.families or FAMILIES:
        model = build(family).to(dtype)
        with tempfile.TemporaryDirectory() as folder:
            decoder = load_decoder(save(model, Path(folder)), dtype=dtype)
        for name, (batch, length), decode in (("prefill", PREFILL, False), ("decode", DECODE, True)):
            prompt = np.random.default_rng(1).integers(0, 2048, (batch, length), dtype=np.int32)
            makers = partial(Ours, decoder, batch, length), partial(Theirs, model)
            rate(makers[0], prompt, decode, clock)  # compiles
            pairs = [[rate(make, prompt, decode, clock) for make in makers] for _ in range(options.repeats)]
            ours, theirs = (max(values) for values in zip(*pairs, strict=True))
            print(f"{family:18} {name:8} {ours:10.0f} {theirs:10.0f}   x {ours / theirs:.2f}", flush=True)


if __name__ == "__main__":
    main()
