"""The decoder: embeddings, layers of mixer and MLP, logits. One flat forward pass over a ragged batch.

Default mode runs the whole batch at once. Strict mode trades speed for reuse that is exact by construction:

* A span is computed in blocks cut at absolute multiples of 64. Each prefill block runs alone, with every GEMM, every
  attention call and every kernel chunk padded to exactly 64 rows, so what is computed for a token is the same sequence
  of calls on the same numbers and shapes whether the span began at position 0 or was resumed at a multiple of 64.
* Blocks of one token (decode) run in groups whose GEMMs have exactly 8 rows, a size from which a row's result
  no longer depends on its neighbours; everything between the GEMMs works on each sequence alone.

A cached run then equals a cold one bit for bit, if states are resumed at multiples of 64 only, and only from states
that prefill made.
"""

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from milepost.errors import ModelError
from milepost.model.batch import Batch, Span
from milepost.model.config import DENSE, GATED_DELTA, ModelConfig, load_model_config
from milepost.model.families import DELTA_LAYOUTS, Read, merge_attention, mixer_name
from milepost.model.kernels import Kernels, choose_kernels, rms_norm
from milepost.model.linear import Linear
from milepost.model.memory import Memory
from milepost.model.mixers import Attention, GatedDelta
from milepost.model.mlp import Dense, Moe
from milepost.model.weights import FileWeights, RandomWeights, Weights, check
from milepost.model.work import CHUNK, Work, prepare

Tensor = torch.Tensor

STRICT_DECODE_ROWS = 8


class Mixer(Protocol):
    """A layer's first half."""

    def forward(self, x: Tensor, work: Work, memory: Memory) -> Tensor: ...


class Mlp(Protocol):
    """A layer's second half."""

    def forward(self, x: Tensor, fixed_rows: int | None) -> Tensor: ...


@dataclass
class Layer:
    """One layer; norm weights float32, as they multiply."""

    mixer_norm: Tensor
    mixer: Mixer
    mlp_norm: Tensor
    mlp: Mlp


class Decoder:
    """A loaded model. `forward` is the only thing it does; all state lies in the Memory it is given."""

    def __init__(self, config: ModelConfig, parts: "_Parts") -> None:
        self.config = config
        self.device = parts.embedding.device
        self.dtype = parts.embedding.dtype
        self._embedding = parts.embedding
        self._layers = parts.layers
        self._norm = parts.norm
        self._head = parts.head
        self._kernels = parts.kernels
        self._frequencies = _frequencies(config).to(self.device)

    def forward(self, batch: Batch, memory: Memory, *, strict: bool = False) -> Tensor:
        """Consume the batch's tokens: states, windows and KV in `memory` move on.

        Returns the logits of batch.wanted, float32 [len(wanted), vocab].
        """
        with torch.no_grad():
            self._kernels.enter()
            if strict:
                return self._forward_strict(batch, memory)
            work = prepare(batch, self.config, self._frequencies)
            x = self._run(work, memory)
            if len(batch.wanted) == 0:
                return self._no_logits()
            return self._logits(x[torch.from_numpy(work.place[batch.wanted]).to(self.device)])

    def warm_up(self, memory: Memory) -> None:
        """Compile what is compiled at first use, in a scratch memory of the same dtypes."""
        scratch = Memory(
            self.config,
            1,
            3,
            kv_dtype=memory.keys.dtype,
            state_dtype=memory.temporal.dtype,
            conv_dtype=memory.conv.dtype,
            device=self.device,
        )
        tokens, wanted = np.zeros(2, np.int32), np.zeros(1, np.int64)
        self.forward(Batch(tokens, (Span(0, 2, np.array([1, 2], np.int32), 1),), wanted), scratch)
        self.forward(Batch(tokens[:1], (Span(2, 3, np.array([1, 2, 3], np.int32), 1),), wanted), scratch)

    def _run(self, work: Work, memory: Memory) -> Tensor:
        """The normed stream after the last layer, [rows of work, hidden]."""
        kernels, eps = self._kernels, self.config.rms_norm_eps
        stream = self._embedding[work.tokens]
        x = rms_norm(stream, self._layers[0].mixer_norm, eps).to(self.dtype)
        norms = [layer.mixer_norm for layer in self._layers[1:]] + [self._norm]
        for layer, next_norm in zip(self._layers, norms, strict=True):
            x = kernels.add_norm(stream, layer.mixer.forward(x, work, memory), layer.mlp_norm, eps)
            x = kernels.add_norm(stream, layer.mlp.forward(x, work.fixed_rows), next_norm, eps)
        memory.copy_slots(work.copies)
        return x

    def _logits(self, x: Tensor) -> Tensor:
        return self._head(x).float()

    def _no_logits(self) -> Tensor:
        return torch.empty((0, self.config.vocab_size), device=self.device)

    def _forward_strict(self, batch: Batch, memory: Memory) -> Tensor:
        logits = torch.empty((len(batch.wanted), self.config.vocab_size), device=self.device)
        steps = []
        for block in _strict_blocks(batch):
            if block.waits:
                steps.append(block)
            else:
                self._run_strict([block], memory, batch.wanted, logits)
        for first in range(0, len(steps), STRICT_DECODE_ROWS):
            self._run_strict(steps[first : first + STRICT_DECODE_ROWS], memory, batch.wanted, logits)
        return logits

    def _run_strict(self, blocks: list["_Block"], memory: Memory, wanted: np.ndarray, logits: Tensor) -> None:
        """Run one prefill block, or up to 8 blocks of one token, and fill in their wanted logits."""
        decode = blocks[0].decode
        tokens = np.concatenate([block.tokens for block in blocks])
        part = Batch(tokens, tuple(block.span for block in blocks), np.empty(0, np.int64))
        rows = STRICT_DECODE_ROWS if decode else CHUNK
        work = prepare(part, self.config, self._frequencies, decode=decode, fixed_rows=rows)
        x = self._run(work, memory)
        # From place in the batch to place in this part; the head runs on all rows, so its shape is always the same.
        place = np.concatenate([block.first + np.arange(len(block.tokens)) for block in blocks])
        hits = [(i, int(np.nonzero(place == token)[0][0])) for i, token in enumerate(wanted) if token in place]
        if hits:
            targets, sources = torch.tensor(hits, device=self.device).unbind(1)
            logits[targets] = self._logits(x)[sources]


@dataclass(frozen=True)
class _Block:
    """A part of a span between two multiples of 64."""

    span: Span
    tokens: np.ndarray
    first: int  # index of its first token in the batch
    decode: bool  # one token, and not the first of a sequence: runs as a decode step
    waits: bool  # decode, and nothing of its span comes after it: may share a group


def _strict_blocks(batch: Batch) -> list[_Block]:
    """The blocks of all spans; those of one span in order."""
    blocks = []
    first = 0
    for span in batch.spans:
        grid = range((span.start // CHUNK + 1) * CHUNK, span.stop, CHUNK)
        borders = [span.start, *grid, span.stop]
        inner = [position for position, _ in span.marks if position not in borders]
        assert not inner, f"strict mode has states at multiples of {CHUNK} and at the end of a span, not at {inner}"
        for start, stop in pairwise(borders):
            marks = tuple((position, slot) for position, slot in span.marks if position == stop)
            begin = first + start - span.start
            tokens = batch.tokens[begin : begin + stop - start]
            decode = stop - start == 1 and start > 0
            block = Span(start, stop, span.rows[:stop], span.slot, marks)
            blocks.append(_Block(block, tokens, begin, decode, decode and stop == span.stop))
        first += span.length
    return blocks


def _frequencies(config: ModelConfig) -> Tensor:
    """Angle per position of each rotary pair, theta^(-2j/dim), float32 [rotary dim / 2] (none without attention)."""
    if config.attention is None:
        return torch.empty(0)
    dim = config.attention.rotary_dim
    return 1.0 / config.attention.rope_theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)


@dataclass
class _Parts:
    """What a decoder is made of."""

    embedding: Tensor  # [vocab, hidden]
    layers: list[Layer]
    norm: Tensor
    head: Linear
    kernels: Kernels


@dataclass
class _Builder:
    """Turns named tensors into layers on a device and in a dtype."""

    config: ModelConfig
    weights: Weights
    device: torch.device
    dtype: torch.dtype
    kernels: Kernels

    def build(self) -> _Parts:
        config = self.config
        embedding = self._matrix(self.weights.read("model.embed_tokens.weight"))
        tied = config.tie_word_embeddings
        head = Linear(embedding, keep_layout=True) if tied else self._linear(self.weights.read("lm_head.weight"))
        indexes = {**_count(config.linear_layers), **_count(config.attention_layers)}
        layers = [self._layer(i, indexes[i]) for i in range(len(config.layers))]
        return _Parts(embedding, layers, self._norm(self.weights.read("model.norm.weight")), head, self.kernels)

    def _layer(self, i: int, index: int) -> Layer:
        """Layer i, whose mixer is the index-th of its kind."""
        spec = self.config.layers[i]
        read = _under(self.weights.read, f"model.layers.{i}.")
        mixer = self._gated_delta if spec.mixer == GATED_DELTA else self._attention
        mlp_read = _under(read, "mlp.")
        return Layer(
            mixer_norm=self._norm(read("input_layernorm.weight")),
            mixer=mixer(_under(read, mixer_name(spec.mixer) + "."), index),
            mlp_norm=self._norm(read("post_attention_layernorm.weight")),
            mlp=self._dense(mlp_read) if spec.mlp == DENSE else self._moe(mlp_read, i),
        )

    def _gated_delta(self, read: Read, index: int) -> Mixer:
        config = self.config
        assert config.linear is not None
        return GatedDelta(
            spec=config.linear,
            index=index,
            eps=config.rms_norm_eps,
            projection=self._linear(DELTA_LAYOUTS[config.model_type].merge(config.linear, read)),
            output=self._linear(read("out_proj.weight")),
            conv_weight=self._vector(read("conv1d.weight")[:, 0].t()),
            rate=self._vector(read("A_log")).exp(),
            dt_bias=self._vector(read("dt_bias")),
            norm=self._vector(read("norm.weight")),
            kernels=self.kernels,
        )

    def _attention(self, read: Read, index: int) -> Mixer:
        config = self.config
        assert config.attention is not None
        return Attention(
            spec=config.attention,
            index=index,
            eps=config.rms_norm_eps,
            projection=self._linear(merge_attention(config, read)),
            output=self._linear(read("o_proj.weight")),
            q_norm=self._norm(read("q_norm.weight")),
            k_norm=self._norm(read("k_norm.weight")),
            kernels=self.kernels,
        )

    def _dense(self, read: Read) -> Dense:
        gate_up = torch.cat([read("gate_proj.weight"), read("up_proj.weight")])
        return Dense(self._linear(gate_up), self._linear(read("down_proj.weight")), self.kernels)

    def _moe(self, read: Read, i: int) -> Mlp:
        spec = self.config.moe
        assert spec is not None
        if f"model.layers.{i}.mlp.experts.gate_up_proj" in self.weights.shapes:
            pairs = zip(read("experts.gate_up_proj"), read("experts.down_proj"), strict=True)
            experts = [Dense(self._linear(gate_up), self._linear(down), self.kernels) for gate_up, down in pairs]
        else:
            experts = [self._dense(_under(read, f"experts.{e}.")) for e in range(spec.experts)]
        return Moe(
            spec=spec,
            router=self._linear(read("gate.weight")),
            experts=tuple(experts),
            shared=self._dense(_under(read, "shared_expert.")),
            shared_gate=self._linear(read("shared_expert_gate.weight")),
        )

    def _matrix(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.device, self.dtype).contiguous()

    def _linear(self, tensor: Tensor) -> Linear:
        return Linear(self._matrix(tensor))

    def _vector(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.device, torch.float32).contiguous()

    def _norm(self, tensor: Tensor) -> Tensor:
        """These families store RMSNorm weights as differences from one (all but the gated norm)."""
        return 1 + self._vector(tensor)


def _count(layers: tuple[int, ...]) -> dict[int, int]:
    return {layer: index for index, layer in enumerate(layers)}


def _under(read: Read, prefix: str) -> Read:
    return lambda name: read(prefix + name)


def load_decoder(
    folder: Path, *, device: torch.device | str = "cpu", dtype: torch.dtype | str = "auto", kernels: str = "auto"
) -> Decoder:
    """Load a model folder in Hugging Face's layout: `config.json` and safetensors.

    dtype    "auto" is the config's own; or a torch dtype, or its name
    kernels  "auto", "numba" (CPU only) or "torch"

    Raises ModelConfigError or WeightsError.
    """
    folder = Path(folder)
    config = load_model_config(folder)
    weights = FileWeights(folder)
    return _decoder(config, weights, device=device, dtype=dtype, kernels=kernels)


def random_decoder(
    config: ModelConfig,
    seed: int = 0,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | str = "auto",
    kernels: str = "auto",
) -> Decoder:
    """A decoder with random weights, for tests and benchmarks."""
    return _decoder(config, RandomWeights(config, seed), device=device, dtype=dtype, kernels=kernels)


def _decoder(config: ModelConfig, weights: Weights, **options: Any) -> Decoder:
    check(weights, config)
    device = torch.device(options["device"])
    dtype = _dtype(options["dtype"], config)
    kernels = choose_kernels(options["kernels"], device, dtype)
    return Decoder(config, _Builder(config, weights, device, dtype, kernels).build())


def _dtype(wanted: torch.dtype | str, config: ModelConfig) -> torch.dtype:
    if wanted == "auto":
        wanted = config.dtype or "float32"
    if isinstance(wanted, str):
        wanted = getattr(torch, wanted, wanted)
    if wanted not in (torch.float32, torch.bfloat16, torch.float16):
        raise ModelError(f"dtype {wanted!r}: supported are float32, bfloat16 and float16")
    return wanted
