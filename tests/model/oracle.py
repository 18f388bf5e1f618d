"""Tiny random models made by transformers, and a driver that feeds our decoder sequences from scattered memory."""

import re
import warnings
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from milepost.model import Batch, Decoder, Memory, Span

VOCAB = 320
LINEAR, FULL, SLIDING = "linear_attention", "full_attention", "sliding_attention"
_BRANCH = re.compile(r"(out_proj|o_proj|down_proj|w2|output_linear)(\.weight)?$")

_SHARED = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": 1,
    "pad_token_id": 0,
    "eos_token_id": 2,
    "intermediate_size": 96,
    "tie_word_embeddings": False,
}
_DELTA = {
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
}
_EXPERTS = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
}
_LATENT = {
    "num_key_value_heads": 4,  # transformers' KDA models can't resume unless there are as many as heads
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 24,
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "n_group": 4,
    "topk_group": 2,
    "layer_types": [LINEAR, LINEAR, FULL, LINEAR, FULL],
}


_MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 24,
    "mamba_n_groups": 2,
    "mamba_chunk_size": 64,
}


@dataclass(frozen=True)
class Recipe:
    """A tiny model: transformers' names of its classes (both begin with `name`), and its config.

    around: the fields of a multimodal wrapper around it.
    """

    name: str
    fields: dict[str, Any]
    config: str = "Config"
    model: str = "ForCausalLM"
    around: dict[str, Any] | None = None


# Head sizes are few and shared: compiled kernels are made for each.
FAMILIES: dict[str, Recipe] = {
    "qwen3_5_text": Recipe(
        "Qwen3_5", {**_DELTA, "layer_types": [LINEAR, LINEAR, FULL, LINEAR, FULL]}, config="TextConfig"
    ),
    "qwen3_5_moe_text": Recipe(
        "Qwen3_5Moe",
        {**_DELTA, **_EXPERTS, "layer_types": [LINEAR, FULL, LINEAR, FULL], "tie_word_embeddings": True},
        config="TextConfig",
    ),
    "qwen3_next": Recipe(
        "Qwen3Next",
        {
            **_DELTA,
            **_EXPERTS,
            "layer_types": [LINEAR, LINEAR, FULL, LINEAR, FULL],
            "mlp_only_layers": [0, 2],
            "norm_topk_prob": False,
        },
    ),
    "kimi_linear": Recipe("KimiLinear", {**_LATENT, "linear_head_dim": 16, "linear_num_heads": 4}),
    "bailing_hybrid": Recipe(
        "BailingHybrid", {**_LATENT, "head_dim": 16, "q_lora_rank": 24, "first_k_dense_replace": 2}
    ),
    "nemotron_h": Recipe(
        "NemotronH",
        {
            "layers_block_type": [LINEAR, "moe", FULL, "mlp", LINEAR, "moe", LINEAR, FULL],
            "head_dim": 16,
            "ssm_state_size": 24,
            "mamba_num_heads": 8,
            "mamba_head_dim": 16,
            "n_groups": 2,
            "time_step_min": 0.05,  # large enough to be reached
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "moe_shared_expert_intermediate_size": 48,
            "moe_latent_size": 40,
        },
    ),
    "granitemoehybrid": Recipe(
        "GraniteMoeHybrid",
        {
            **_MAMBA,
            "layer_types": [LINEAR, FULL, LINEAR, LINEAR, FULL],
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "shared_intermediate_size": 48,
            "position_embedding_type": "rope",
            "attention_multiplier": 0.3,
            "embedding_multiplier": 1.5,
            "residual_multiplier": 0.7,
            "logits_scaling": 1.25,
        },
    ),
    # With a cache, transformers' Bamba gets its rotary positions wrong unless they are given.
    "bamba": Recipe("Bamba", {**_MAMBA, "num_hidden_layers": 5, "attn_layer_indices": [1, 4]}),
    "falcon_h1": Recipe(
        "FalconH1",
        {
            **_MAMBA,
            "mamba_d_ssm": 128,
            "num_hidden_layers": 4,
            "mamba_rms_norm": True,
            "mamba_norm_before_gate": False,
            "ssm_multipliers": [0.9, 1.2, 0.8, 1.1, 0.7],
            "ssm_in_multiplier": 1.25,
            "ssm_out_multiplier": 0.8,
            "attention_in_multiplier": 1.1,
            "attention_out_multiplier": 0.9,
            "key_multiplier": 0.75,
            "mlp_multipliers": [0.9, 1.3],
            "embedding_multiplier": 1.5,
            "lm_head_multiplier": 0.8,
        },
    ),
    "lfm2": Recipe("Lfm2", {"layer_types": ["conv", FULL, "conv", "conv", FULL], "block_multiple_of": 16}),
    "lfm2_moe": Recipe(
        "Lfm2Moe",
        {
            "layer_types": ["conv", "conv", FULL, "conv", FULL],
            "num_dense_layers": 1,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
        },
    ),
    "minimax": Recipe(
        "MiniMax",
        {
            "layer_types": [LINEAR, LINEAR, FULL, LINEAR],
            "head_dim": 16,
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "block_size": 32,
            "linear_attn_alpha_factor": 1.5,
            "full_attn_beta_factor": 0.8,
            "mlp_alpha_factor": 1.2,
        },
    ),
    # No class gives logits of the text part alone. Its cached path agrees with a full forward (measured: 2e-5). The
    # choice bites from 28 tokens on: six groups of four are seen, and what comes behind the last whole one.
    # With few index heads groups often score exactly 0, and then transformers' choice among them is arbitrary.
    "glm5_next": Recipe(
        "Glm5Next",
        {
            **_LATENT,
            "q_lora_rank": 24,
            "qk_rope_head_dim": 0,
            "layer_types": [LINEAR, "indexed_attention", "indexed_attention", LINEAR, LINEAR, "indexed_attention"],
            "indexer_types": ["full", "full", "shared", "full", "full", "full"],
            "mlp_layer_types": ["dense", "sparse", "sparse", "dense", "sparse", "sparse"],
            "linear_head_dim": 16,
            "linear_num_heads": 4,
            "index_n_heads": 16,
            "index_head_dim": 24,
            "index_kpool": 4,
            "index_topk": 24,
            "hc_mult": 3,
            "hc_sinkhorn_iters": 4,
            "hc_eps": 1e-3,
            "rms_norm_eps": 1e-3,
            "swiglu_limit": 0.8,
        },
        model="ForConditionalGeneration",
        around={
            "vision_config": {
                "depth": 1,
                "hidden_size": 16,
                "num_heads": 2,
                "intermediate_size": 16,
                "out_hidden_size": 16,
                "projection_intermediate_size": 16,
            },
        },
    ),
    "olmo_hybrid": Recipe(
        "OlmoHybrid", {**_DELTA, "head_dim": 16, "layer_types": [LINEAR, LINEAR, FULL, LINEAR, FULL]}
    ),
    "lara_mini": Recipe(
        "LaraMini",
        {
            **_DELTA,
            **_EXPERTS,
            "head_dim": 16,
            "sliding_window": 24,
            "layer_types": [LINEAR, SLIDING, FULL, SLIDING, LINEAR, FULL],
        },
    ),
}


def make_reference(family: str, **changes: Any) -> Any:
    """A transformers model whose gates, decays, convolutions and norms are all away from their neutral values."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import transformers

    recipe = FAMILIES[family]
    fields = {**_SHARED, **recipe.fields, **changes}
    if "layer_types" in fields:
        fields["num_hidden_layers"] = len(fields["layer_types"])
    torch.manual_seed(7)
    if recipe.around is not None:
        fields = {**recipe.around, "text_config": fields}
    config = getattr(transformers, recipe.name + recipe.config)(**fields)
    model = getattr(transformers, recipe.name + recipe.model)(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            _randomize(name, parameter)
        for name, buffer in model.named_buffers():
            if name.endswith(("e_score_correction_bias", "expert_bias")):
                buffer.normal_().mul_(0.1)
    return model


def _randomize(name: str, parameter: torch.Tensor) -> None:
    neutral = float(parameter.mean()) if parameter.dim() == 1 else 0.0  # a norm's weight: one, or zero
    parameter.normal_()
    if name.endswith("A_log"):
        parameter.mul_(0.7).add_(0.3)
    elif name.endswith("dt_bias"):
        parameter.sub_(2)
    elif name.endswith(("conv1d.weight", "conv.weight")):
        parameter.mul_(0.5)
    elif parameter.dim() == 1:
        parameter.mul_(0.2).add_(neutral)
    else:
        # Branches at a third of their strength: unit branches amplify rounding beyond what the tests allow.
        parameter.mul_((0.3 if _BRANCH.search(name) else 1.0) / parameter.shape[-1] ** 0.5)


def reference_logits(model: Any, tokens: np.ndarray) -> torch.Tensor:
    """float32 [len(tokens), vocab] from one full forward."""
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ids = torch.from_numpy(tokens.astype(np.int64))[None]
        return model(ids, position_ids=torch.arange(len(tokens))[None]).logits[0].float()


def random_tokens(seed: int, length: int, vocab: int = VOCAB) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, vocab, length, dtype=np.int32)


class Windows:
    """The window pool, by position: rows behind a window are given back, and hold NaN until they are used again.

    `spare`: how many positions behind the window keep their rows.
    """

    def __init__(self, memory: Memory, reach: int, rng: np.random.Generator) -> None:
        self.reach = reach
        self.spare = 0
        self._memory = memory
        self._free = [int(row) for row in rng.permutation(np.arange(1, memory.window_rows + 1))]
        self._users = Counter[int]()
        for tensor in (memory.window_keys, memory.window_values):
            tensor[:, 1:] = torch.nan

    def window(self, rows: dict[int, int], start: int, stop: int, kept: set[int]) -> np.ndarray:
        """The span's window, as `rows` (by position) move on; the windows of positions `kept` stay."""
        if not self.reach:
            return np.empty(0, np.int32)
        first = max(0, start - self.reach - self.spare)
        needed = {p for at in kept for p in range(at - self.reach, at)} | set(range(first, stop))
        for position in set(rows) - needed:
            self._give_back(rows.pop(position))
        for position in range(start, stop):
            if position not in rows:
                rows[position] = self._free.pop()
                self._users[rows[position]] = 1
        return np.array([rows[position] for position in range(first, stop)], np.int32)

    def share(self, rows: dict[int, int], position: int) -> dict[int, int]:
        """What whoever goes on from `position` has of another's rows: the last window's."""
        shared = {p: rows[p] for p in range(max(0, position - self.reach), position)}
        self._users.update(shared.values())
        return shared

    def _give_back(self, row: int) -> None:
        self._users[row] -= 1
        if not self._users[row]:
            self._free.append(row)
            for tensor in (self._memory.window_keys, self._memory.window_values):
                tensor[:, row] = torch.nan


class Sequence:
    """Tokens with scattered rows and a working slot, fed piece by piece."""

    def __init__(self, tokens: np.ndarray, rows: np.ndarray, slot: int, windows: Windows) -> None:
        self.tokens = tokens
        self.rows = rows
        self.slot = slot
        self.at = 0
        self.window: dict[int, int] = {}  # position -> row of the window pool
        self._windows = windows
        self._marked: set[int] = set()

    def take(self, count: int, marks: tuple[tuple[int, int], ...] = ()) -> tuple[np.ndarray, Span]:
        """The next `count` tokens and their span."""
        start, stop = self.at, self.at + count
        self.at = stop
        self._marked |= {position for position, _ in marks}
        window = self._windows.window(self.window, start, stop, self._marked)
        return self.tokens[start:stop], Span(start, stop, self.rows[:stop], self.slot, marks, window)

    def leave(self) -> None:
        """Give back all window rows; others keep those that they share."""
        self._windows.window(self.window, 0, 0, set())


class Driver:
    """A decoder, a memory with ids handed out in shuffled order, and sequences in it."""

    def __init__(self, decoder: Decoder, *, slots: int = 12, rows: int = 2000, seed: int = 0, **memory: Any) -> None:
        self.decoder = decoder
        window = decoder.config.window
        memory = {"kv_dtype": decoder.dtype, "window_rows": rows if window else 0, **memory}
        self.memory = Memory(decoder.config, slots, rows, **memory)
        # What is never handed out must never matter, and what was used before must not either.
        for tensor in (self.memory.conv, self.memory.temporal, self.memory.keys, self.memory.values):
            tensor[:, 1:].normal_()
        rng = np.random.default_rng(seed)
        self.windows = Windows(self.memory, window.reach if window else 0, rng)
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
        return Sequence(tokens, self.rows(len(tokens)), self.slot(), self.windows)

    def resumed(self, tokens: np.ndarray, first: Sequence, position: int, slot: int) -> Sequence:
        """A sequence that goes on where `first` was after `position` tokens, from the state in `slot`."""
        again = self.sequence(tokens)
        again.rows = np.concatenate([first.rows[:position], again.rows[position:]])
        again.window = self.windows.share(first.window, position)
        again.at = position
        self.memory.copy_slot(slot, again.slot)
        return again

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
    if model.config.model_type == "olmo_hybrid":
        _cut_convolutions(folder / "model.safetensors", model.config)
    return folder


def _cut_convolutions(file: Path, config: Any) -> None:
    """transformers writes a convolution over q, k, v in three equal parts, though theirs are not; cut it rightly."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(file)
    key = config.linear_num_key_heads * config.linear_key_head_dim
    for name in [name for name in tensors if name.endswith(".q_conv1d.weight")]:
        names = [name.replace(".q_", f".{part}_") for part in "qkv"]
        whole = torch.cat([tensors[part] for part in names])
        tensors.update(zip(names, (part.contiguous() for part in whole.tensor_split((key, 2 * key))), strict=True))
    save_file(tensors, file, {"format": "pt"})
