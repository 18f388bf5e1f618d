"""Tiny random models made by transformers, and a driver that feeds our decoder sequences from scattered memory."""

import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from milepost.model import Batch, Decoder, Memory, Span

VOCAB = 320
LINEAR, FULL = "linear_attention", "full_attention"

_SHARED = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
_EXPERTS = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_5_text": {"intermediate_size": 96, "layer_types": [LINEAR, LINEAR, FULL, LINEAR, FULL]},
    "qwen3_5_moe_text": {**_EXPERTS, "layer_types": [LINEAR, FULL, LINEAR, FULL], "tie_word_embeddings": True},
    "qwen3_next": {
        **_EXPERTS,
        "intermediate_size": 96,
        "layer_types": [LINEAR, LINEAR, FULL, LINEAR, FULL],
        "mlp_only_layers": [0, 2],
        "norm_topk_prob": False,
        # Key heads as many as value heads, 64 wide: the shape of the demo and of the benchmark.
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 4,
        "num_key_value_heads": 1,
    },
}


def make_reference(family: str, **changes: Any) -> Any:
    """A transformers model whose gates, decays, convolutions and norms are all away from their neutral values."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import transformers

    classes = {
        "qwen3_5_text": (transformers.Qwen3_5TextConfig, transformers.Qwen3_5ForCausalLM),
        "qwen3_5_moe_text": (transformers.Qwen3_5MoeTextConfig, transformers.Qwen3_5MoeForCausalLM),
        "qwen3_next": (transformers.Qwen3NextConfig, transformers.Qwen3NextForCausalLM),
    }
    config_class, model_class = classes[family]
    fields = {**_SHARED, **FAMILIES[family], **changes}
    fields["num_hidden_layers"] = len(fields["layer_types"])
    torch.manual_seed(7)
    model = model_class(config_class(**fields)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            _randomize(name, parameter)
    return model


def _randomize(name: str, parameter: torch.Tensor) -> None:
    parameter.normal_()
    if name.endswith("A_log"):
        parameter.mul_(0.7).add_(0.3)
    elif name.endswith("dt_bias"):
        parameter.sub_(2)
    elif name.endswith("linear_attn.norm.weight"):
        parameter.mul_(0.2).add_(1)
    elif name.endswith("conv1d.weight"):
        parameter.mul_(0.5)
    elif parameter.dim() == 1:
        parameter.mul_(0.2)
    else:
        # Branches at a third of their strength: unit branches amplify rounding beyond what the tests allow.
        branch = name.endswith(("out_proj.weight", "o_proj.weight", "down_proj.weight", "down_proj"))
        parameter.mul_((0.3 if branch else 1.0) / parameter.shape[-1] ** 0.5)


def reference_logits(model: Any, tokens: np.ndarray) -> torch.Tensor:
    """float32 [len(tokens), vocab] from one full forward."""
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ids = torch.from_numpy(tokens.astype(np.int64))[None]
        return model(ids, position_ids=torch.arange(len(tokens))[None]).logits[0].float()


def random_tokens(seed: int, length: int, vocab: int = VOCAB) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, vocab, length, dtype=np.int32)


class Sequence:
    """Tokens with scattered rows and a working slot, fed piece by piece."""

    def __init__(self, tokens: np.ndarray, rows: np.ndarray, slot: int) -> None:
        self.tokens = tokens
        self.rows = rows
        self.slot = slot
        self.at = 0

    def take(self, count: int, marks: tuple[tuple[int, int], ...] = ()) -> tuple[np.ndarray, Span]:
        """The next `count` tokens and their span."""
        start, stop = self.at, self.at + count
        self.at = stop
        return self.tokens[start:stop], Span(start, stop, self.rows[:stop], self.slot, marks)


class Driver:
    """A decoder, a memory with ids handed out in shuffled order, and sequences in it."""

    def __init__(self, decoder: Decoder, *, slots: int = 12, rows: int = 2000, seed: int = 0, **dtypes: Any) -> None:
        self.decoder = decoder
        dtypes.setdefault("kv_dtype", decoder.dtype)
        self.memory = Memory(decoder.config, slots, rows, **dtypes)
        # What is never handed out must never matter, and what was used before must not either.
        for tensor in (self.memory.conv, self.memory.temporal, self.memory.keys, self.memory.values):
            tensor[:, 1:].normal_()
        rng = np.random.default_rng(seed)
        self._rows = rng.permutation(np.arange(1, rows + 1)).astype(np.int32)
        self._slots = [int(slot) for slot in rng.permutation(np.arange(1, slots + 1))]
        self._used = 0

    def slot(self) -> int:
        return self._slots.pop()

    def rows(self, count: int) -> np.ndarray:
        first, self._used = self._used, self._used + count
        assert self._used <= len(self._rows)
        return self._rows[first : self._used]

    def sequence(self, tokens: np.ndarray) -> Sequence:
        return Sequence(tokens, self.rows(len(tokens)), self.slot())

    def run(self, *parts: tuple[np.ndarray, Span], strict: bool = False) -> list[torch.Tensor]:
        """One forward pass over the parts; the logits of all tokens, part by part."""
        tokens = np.concatenate([part[0] for part in parts])
        batch = Batch(tokens, tuple(part[1] for part in parts), np.arange(len(tokens)))
        logits = self.decoder.forward(batch, self.memory, strict=strict)
        return list(logits.split([len(part[0]) for part in parts]))

    def feed(self, sequence: Sequence, sizes: Iterable[int], strict: bool = False) -> torch.Tensor:
        """Feed one sequence alone in pieces; the logits of all of them."""
        return torch.cat([self.run(sequence.take(size), strict=strict)[0] for size in sizes])


def worst(a: torch.Tensor, b: torch.Tensor) -> float:
    """Largest absolute difference."""
    assert a.shape == b.shape, (a.shape, b.shape)
    return float((a - b).abs().max())


def save(model: Any, folder: Path, **options: Any) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save_pretrained(folder, **options)
    return folder
