"""Seconds of a step from FLOPs and bytes: docs/cost-model.md has the formulae and how wrong they are.

Knows a model's shape, a layout and a GPU. A step takes, for each class of operations, the longer of computing and
moving bytes; the classes follow one another; launches, all-reduces and a fixed part come on top. All figures are of
one rank, and ranks run alike. With data-parallel attention the sequences are those of one rank, and the experts see
as many from each. Pipeline stages follow one another: they save memory, not latency.

Absolute seconds are good to a band only (`Roofline.band`). Trust ratios between settings of one model and GPU.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import expm1, hypot, log1p

import numpy as np
from numpy.typing import NDArray

from milepost.core import gpus, models
from milepost.core.geometry import (
    STATE_DTYPES,
    Formats,
    Grouped,
    Latent,
    Layout,
    Model,
    Part,
    kv_bytes,
    layer_row_bytes,
)
from milepost.core.gpus import Gpu
from milepost.errors import ConfigError
from milepost.sim.cost import Band

WEIGHTS = {"bfloat16": (2.0, 1.0), "fp8": (1.0, 2.0), "fp4": (0.56, 2.0)}
"""Bytes of a parameter (fp4 with scales), and FLOP/s as multiples of bfloat16's (fp4 counted as fp8)."""

KERNEL_CHUNK = 64
"""Tokens that a prefill kernel of a linear layer takes at once (flash-linear-attention's, as SGLang runs it)."""

DELTA_FLOPS, SCAN_FLOPS = 7, 6
"""FLOPs of a token for each element of the state: delta rules and Lightning; Mamba."""

SCANS = ("Mamba-1", "Mamba-2")


# --- what a model's shape lacks --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Shape:
    """What decides about time and not about memory. 0: unknown, and estimated.

    `heads`: of queries, in full attention. `active`: parameters used for a token. `experts`, `top`: of an MoE layer.
    `unread`: parameters in look-up tables. `selected`: tokens that sparse attention looks at.
    """

    hidden: int = 0
    heads: int = 0
    active: float = 0
    experts: int = 0
    top: int = 0
    unread: float = 0
    selected: int = 0
    notes: tuple[str, ...] = ()


_HIDDEN = ("the hidden size is from memory, unverified",)
_HEADS = ("the number of query heads is from memory, unverified",)
_ACTIVE = ("active parameters are from memory, unverified",)
_COMMUNITY = ("parameter counts are community figures",)
_NO_EXPERTS = ("numbers of experts were not collected",)
_QWEN_27B, _QWEN_35B = Shape(5120, 24, 27e9), Shape(2048, 16, 3e9, 256, 8)
_NANO, _MINIMAX = Shape(2688, 32, 3.2e9, 128, 6, notes=_ACTIVE), Shape(6144, 64, 45.9e9, 32, 2)
_RING = Shape(8192, 64, 63e9, notes=_NO_EXPERTS + _HEADS)

SHAPES = {
    "qwen3-next-80b": Shape(2048, 16, 3e9, 512, 10),
    "qwen3.5-27b": _QWEN_27B,
    "qwen3.6-27b": _QWEN_27B,
    "qwen3.8-27b": _QWEN_27B,
    "qwen3.5-35b": _QWEN_35B,
    "qwen3.6-35b": _QWEN_35B,
    "qwen3.5-9b": Shape(4096, 16, 9e9, notes=_HIDDEN),
    "qwen3.5-4b": Shape(2560, 16, 4e9, notes=_HIDDEN),
    "qwen3.5-2b": Shape(2048, 8, 2e9, notes=_HIDDEN),
    "qwen3.5-0.8b": Shape(1024, 8, 0.8e9, notes=_HIDDEN),
    "qwen3.5-122b": Shape(3072, 32, 10e9, 256, 8),
    "qwen3.5-397b": Shape(4096, 32, 17e9, 512, 10),
    "qwen3.8-2.4t": Shape(0, 64, 95e9, notes=_NO_EXPERTS),
    "qwen3.8-flash-next": Shape(2560, 24, 6e9, 512, 10, 51e9, notes=("sparse attention is counted as dense",)),
    "kimi-linear-48b": Shape(2304, 32, 3e9, 256, 8),
    "kimi-k3": Shape(7168, 96, 104e9, 896, 16, notes=_COMMUNITY),
    "glm-5.3-flash": Shape(4096, 64, 18e9, 288, 8, selected=2048),
    "nemotron-3-nano": _NANO,
    "nemotron-3.5-lightning": _NANO,
    "nemotron-3-super": Shape(4096, 32, 12e9, 512, 22),
    "nemotron-3-ultra": Shape(8192, 64, 55e9, 512, 22),
    "nemotron-h-56b": Shape(8192, 64, 56e9),
    "granite-4.0-h-small": Shape(4096, 32, 9e9, 72, 10, notes=_HEADS),
    "falcon-h1-7b": Shape(3072, 12, 7e9, notes=_HEADS),
    "minimax-text-01": _MINIMAX,
    "minimax-m1": _MINIMAX,
    "ring-2.5-1t": _RING,
    "ling-2.5-1t": _RING,
    "jamba-1.5-mini": Shape(4096, 32, 12e9, 16, 2, notes=_HEADS + _ACTIVE),
}
"""Of models of core/models.py: model configs, unless a note says otherwise."""


def shape_of(model: Model, known: Shape | None = None) -> Shape:
    """The shape of a model, what is unknown estimated and noted.

    Guesses: 8 queries a KV head, or a latent's as many as linear heads; the hidden size of a dense model.
    """
    shape = known or SHAPES.get(model.name, Shape())
    notes = list(shape.notes)
    active = shape.active or model.params
    if not shape.active:
        notes.append("active parameters are taken to be all")
    heads = shape.heads
    if not heads and model.attention is not None:
        linear = model.recurrence.heads if model.recurrence else 32
        heads = 8 * model.attention.kv_heads if isinstance(model.attention, Grouped) else linear
        notes.append("the number of query heads is a guess")
    hidden = shape.hidden
    if not hidden:
        hidden = int((active / (12 * len(model.layers))) ** 0.5)  # 12·hidden² parameters a layer
        notes.append("the hidden size is a guess")
    return replace(shape, hidden=hidden, heads=heads, active=active, notes=tuple(notes))


# --- how much of the peaks is reached --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Kernels:
    """How well the kernels of linear layers do. Shares of the GPU's bandwidth and of its bfloat16 FLOP/s.

    `state` and `conv`: bandwidth while decoding states, and in the convolutions of prefill. `linear`: FLOP/s of a
    prefill that fills the GPU; `chunk_s`: seconds that one stretch needs for each `KERNEL_CHUNK` tokens, however few
    its heads; `start_s`: seconds before the first token, a layer.
    """

    state: float = 0.7
    conv: float = 0.5
    linear: float = 0.04
    chunk_s: float = 2e-6
    start_s: float = 35e-6


FITTED = {
    ("h100", "GDN"): Kernels(0.894, 0.688, 0.0443, 1.89e-6, 32.8e-6),
    ("h100", "KDA"): Kernels(0.797, 0.693, 0.0253, 3.13e-6, 36.0e-6),
    ("h100", "Mamba-2"): Kernels(conv=0.754),
    ("h200", "GDN"): Kernels(0.784, 0.501, 0.0358, 1.72e-6, 28.4e-6),
    ("h200", "KDA"): Kernels(0.712, 0.545, 0.0290, 3.12e-6, 43.1e-6),
    ("h200", "Mamba-2"): Kernels(conv=0.628),
    ("b200", "GDN"): Kernels(0.830, 0.376, 0.0318, 2.16e-6, 35.2e-6),
    ("b200", "KDA"): Kernels(0.647, 0.385, 0.0166, 3.82e-6, 42.3e-6),
    ("b200", "Mamba-2"): Kernels(conv=0.450),
    ("b300", "GDN"): Kernels(0.822, 0.386, 0.0295, 2.14e-6, 33.1e-6),
    ("b300", "KDA"): Kernels(0.665, 0.400, 0.0175, 3.65e-6, 50.8e-6),
    ("b300", "Mamba-2"): Kernels(conv=0.490),
}
"""By GPU and family. Made by `bench/cost_model.py`; the errors are in docs/cost-model.md."""


@dataclass(frozen=True, slots=True)
class Efficiency:
    """Shares of peaks, and seconds that no peak explains. Sources: docs/cost-model.md.

    `weights`, `kv`, `link`: shares of bandwidths. `prefill`, `decode`: shares of FLOP/s in steps with and without
    prefill. `layer_s`: launches of a layer in a captured graph; `eager_s`: in a step with prefill, which is not
    captured. `step_s`, `request_s`: for each step, and for each sequence in it. `hop_s`: latency of an all-reduce.
    """

    weights: float = 0.8
    kv: float = 0.53
    link: float = 0.7
    prefill: float = 0.45
    decode: float = 0.30
    layer_s: float = 32e-6
    eager_s: float = 32e-6
    step_s: float = 126e-6
    request_s: float = 4e-6
    hop_s: float = 10e-6
    kernels: Kernels = field(default_factory=Kernels)


PRIORS = Efficiency()
"""Nothing fitted: AIConfigurator's bandwidth, BLIS's MFU and overheads."""

SERVED = replace(PRIORS, layer_s=97.4e-6, eager_s=1.52e-3)
"""Overheads fitted on ten end-to-end points of hybrids (`bench/cost_model.py`)."""

BAND = Band(0.55, 1.55)
"""Measured over predicted seconds per output token, of ten points each predicted by a fit to the other systems."""

OFF_COVERAGE = 1.25
"""The band is so much wider where a figure of the model is a guess, or the GPU was not measured."""


def efficiency(gpu: Gpu, model: Model, base: Efficiency = SERVED) -> Efficiency:
    """`base` with the measured kernels of the GPU and the model's family, where there are any."""
    family = model.recurrence.family if model.recurrence else ""
    return replace(base, kernels=FITTED.get((gpu.name, family), base.kernels))


# --- FLOPs and bytes -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Work:
    """FLOPs and bytes of one rank, all layers together (all pipeline stages).

    `routed` and `shared` parameters of the whole model; `share` of routed ones that a token uses. For each (query,
    key) pair: `pair_flops`, `window_flops`. For each token of context: `row`, `index`, `window_row` bytes. For each
    sequence: `slot` and, for each token, `column` and `state_flops`. `reduced`: bytes of all-reduces for a token.
    """

    routed: float
    shared: float
    share: float
    active: float
    pair_flops: float
    window_flops: float
    row: float
    index: float
    window_row: float
    slot: float
    temporal: float
    column: float
    state_flops: float
    state_layers: int
    reduced: float
    reductions: int
    layers: int

    def params_read(self, tokens: float) -> float:
        """Parameters that `tokens` tokens touch: of E experts, E·(1 − (1 − k/E)^tokens) in expectation."""
        return self.shared + self.routed * -expm1(tokens * log1p(-self.share))


def work(model: Model, layout: Layout, formats: Formats, shape: Shape) -> Work:
    """What a step does on each rank. Formulae: docs/cost-model.md, "FLOPs and bytes"."""
    ranks, full = layout.ranks, model.count(Part.KV)
    row, _ = layer_row_bytes(model, layout, formats)
    index = model.index.row_bytes(formats.index_pool) if model.index else 0
    state_layers, temporal, column, state_flops = model.count(Part.STATE), 0.0, 0.0, 0.0
    slot = 0.0
    if model.recurrence is not None and state_layers:
        elements = state_layers * model.recurrence.temporal(ranks)
        temporal = elements * STATE_DTYPES[formats.state]
        column = state_layers * model.recurrence.column(ranks) * STATE_DTYPES[formats.conv]
        slot = temporal + column * model.recurrence.taps
        state_flops = elements * (SCAN_FLOPS if model.recurrence.family in SCANS else DELTA_FLOPS)
    window_layers, window_row = model.count(Part.WINDOW), 0.0
    if model.window is not None:
        elements = model.window.key_elements(ranks) + model.window.value_elements(ranks)
        window_row = window_layers * kv_bytes(elements, formats.kv)
    params, share = max(model.params - shape.unread, shape.active), 0.0
    routed = 0.0
    if shape.active < params:
        share = shape.top / shape.experts if shape.experts else shape.active / params
        routed = (params - shape.active) / (1.0 - share)
    return Work(
        routed,
        params - routed,
        share,
        shape.active,
        full * _pair_flops(model.attention, shape.heads) / ranks,
        window_layers * _pair_flops(model.window, shape.heads) / ranks,
        full * (row - index) / layout.dcp,
        full * index / layout.dcp,
        window_row,
        slot,
        temporal,
        column,
        state_flops,
        state_layers,
        2 * len(model.layers) * 2 * shape.hidden * 2 * (layout.tp - 1) / layout.tp,
        2 * len(model.layers) if layout.tp > 1 else 0,
        len(model.layers),
    )


def _pair_flops(attention: Grouped | Latent | None, heads: int) -> float:
    """FLOPs of one query token and one key token in one layer: scores, and the sum of values."""
    if attention is None:
        return 0.0
    if isinstance(attention, Latent):
        return 2.0 * heads * (2 * attention.rank + attention.rope)
    return 2.0 * heads * (attention.head_dim + (attention.value_dim or attention.head_dim))


def pairs(start: int, stop: int) -> float:
    """(query, key) pairs of the tokens start … stop−1: each sees all before it, and itself."""
    return (stop * (stop + 1) - start * (start + 1)) / 2


def pairs_within(start: int, stop: int, limit: int) -> float:
    """The same, where a token sees at most `limit`."""
    low, high = min(start, limit), min(stop, limit)
    return pairs(low, high) + limit * float(stop - high - start + low)


def pairs_of_all(contexts: NDArray[np.int64], tokens: int, limit: int) -> float:
    """`pairs_within` of `tokens` tokens after each of the contexts."""
    low, high = np.minimum(contexts, limit), np.minimum(contexts + tokens, limit)
    inside = high * (high + 1) - low * (low + 1)
    return float(inside.sum() / 2 + limit * (contexts.size * tokens - (high - low).sum()))


# --- seconds ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Roofline:
    """A `Cost`: one replica of a model on GPUs. Make it by `roofline`."""

    model: Model
    layout: Layout
    formats: Formats
    gpu: Gpu
    shape: Shape
    weights: str
    efficiency: Efficiency
    work: Work

    def seconds(self, prefill: Sequence[tuple[int, int]], contexts: Sequence[int], tokens: int) -> float:
        """Of `tokens` steps that each decode a token after every context, the first of them with `prefill` as well.

        Equal to the sum over single steps with contexts that grow, in closed form.
        """
        batch = len(contexts)
        plain = tokens if batch else 0
        total = 0.0
        if prefill:
            plain -= 1
            total += self._mixed(prefill, batch)
        if batch:
            if plain > 0:
                total += plain * self._plain(batch)
            total += tokens * self._states(batch) + self._attention(contexts, tokens)
        return total

    def band(self) -> Band:
        """Factors on `seconds`: the measured time lies between them, as far as anyone has measured."""
        seen = self.gpu.name in gpus.HARDWARE and not any("guess" in note for note in self.shape.notes)
        return BAND if seen else Band(BAND.low / OFF_COVERAGE, BAND.high * OFF_COVERAGE)

    def parts(self, prefill: Sequence[tuple[int, int]], contexts: Sequence[int]) -> dict[str, float]:
        """Seconds of one step by what takes them."""
        batch, tokens = len(contexts), sum(stop - start for start, stop in prefill) + len(contexts)
        found = {"weights": self._weights(tokens, bool(prefill)), "all-reduce": self._reduce(tokens)}
        found["overheads"] = self._overheads(len(prefill) + batch, bool(prefill))
        found["KV, decode"] = self._attention(contexts, 1) if batch else 0.0
        found["states, decode"] = self._states(batch)
        found["attention, prefill"] = self._prefill_attention(prefill)
        found["states, prefill"] = self._prefill_states(prefill) if prefill else 0.0
        return found

    def _plain(self, batch: int) -> float:
        """A decode step but for attention and states."""
        return self._weights(batch, False) + self._reduce(batch) + self._overheads(batch, False)

    def _mixed(self, prefill: Sequence[tuple[int, int]], batch: int) -> float:
        """A step with prefill but for the attention and states of its decodes."""
        tokens = sum(stop - start for start, stop in prefill) + batch
        common = self._weights(tokens, True) + self._reduce(tokens) + self._overheads(len(prefill) + batch, True)
        return common + self._prefill_attention(prefill) + self._prefill_states(prefill)

    def _weights(self, tokens: int, prefill: bool) -> float:
        """Matrix products: every rank has its part of the weights, and tokens of all attention ranks meet in it."""
        size, speed = WEIGHTS[self.weights]
        tokens *= self.layout.attn_dp
        share = self.efficiency.prefill if prefill else self.efficiency.decode
        flops = 2.0 * self.work.active * tokens / (self.layout.tp * self.gpu.flops * speed * share)
        moved = self.work.params_read(tokens) * size / (self.layout.tp * self.gpu.bandwidth * self.efficiency.weights)
        return max(flops, moved)

    def _reduce(self, tokens: int) -> float:
        moved = self.work.reduced * tokens / (self.gpu.link * self.efficiency.link)
        return moved + self.work.reductions * self.efficiency.hop_s

    def _overheads(self, sequences: int, prefill: bool) -> float:
        launch = self.efficiency.eager_s if prefill else self.efficiency.layer_s
        return self.work.layers * launch + self.efficiency.step_s + sequences * self.efficiency.request_s

    def _states(self, batch: int) -> float:
        """One decode step reads and writes every state."""
        moved = 2.0 * batch * self.work.slot / (self.gpu.bandwidth * self.efficiency.kernels.state)
        return max(moved, batch * self.work.state_flops / (self.gpu.flops * self.efficiency.kernels.linear))

    def _attention(self, contexts: Sequence[int], tokens: int) -> float:
        """Decode steps: the score of each key, and its row from memory, for each query."""
        count, done = len(contexts), self.work
        seen = tokens * float(sum(contexts)) + count * pairs(0, tokens)
        looked, window = seen, 0.0
        if self.shape.selected or done.window_row:
            lengths = np.array(contexts, np.int64)
            if self.shape.selected:
                looked = pairs_of_all(lengths, tokens, self.shape.selected)
            if done.window_row:
                window = pairs_of_all(lengths, tokens, self.model.window_size)
        speed, rate = self.gpu.flops * self.efficiency.decode, self.gpu.bandwidth * self.efficiency.kv
        total = looked * max(done.pair_flops / speed, done.row / rate) + seen * done.index / rate
        return total + window * max(done.window_flops / speed, done.window_row / rate)

    def _prefill_attention(self, prefill: Sequence[tuple[int, int]]) -> float:
        """Prefill: each stretch causally, at its true context; its rows are read once."""
        limit, window = self.shape.selected, self.model.window_size
        flops = moved = 0.0
        for start, stop in prefill:
            looked = pairs_within(start, stop, limit) if limit else pairs(start, stop)
            flops += looked * self.work.pair_flops
            moved += stop * (self.work.row + self.work.index)
            if window:
                flops += pairs_within(start, stop, window) * self.work.window_flops
                moved += min(stop, stop - start + window) * self.work.window_row
        speed, rate = self.gpu.flops * self.efficiency.prefill, self.gpu.bandwidth * self.efficiency.kv
        return max(flops / speed, moved / rate)

    def _prefill_states(self, prefill: Sequence[tuple[int, int]]) -> float:
        """Linear layers in prefill: stretches run side by side, the chunks of one after another.

        Kernels write the state of every chunk. Filling the GPU and waiting for a chain add up as squares (as measured).
        """
        kernels, done = self.efficiency.kernels, self.work
        lengths = [stop - start for start, stop in prefill]
        tokens = sum(lengths)
        chunks = tokens / KERNEL_CHUNK + len(lengths)
        moved = (done.temporal * chunks + 2.0 * done.slot * len(lengths)) / (self.gpu.bandwidth * kernels.state)
        wide = max(moved, done.state_flops * tokens / (self.gpu.flops * kernels.linear))
        deep = done.state_layers * kernels.chunk_s * max(lengths) / KERNEL_CHUNK
        convolution = 2.0 * tokens * done.column / (self.gpu.bandwidth * kernels.conv)
        return hypot(wide, deep) + convolution + done.state_layers * kernels.start_s


def roofline(
    model: Model | str,
    gpu: Gpu | str,
    layout: Layout | None = None,
    formats: Formats | None = None,
    weights: str = "bfloat16",
    shape: Shape | None = None,
    using: Efficiency | None = None,
) -> Roofline:
    """The cost of a model on GPUs. `weights` is one of `WEIGHTS`. Raises `ConfigError` for what is not known.

    `shape` and `using` replace what is known of the model and of the GPU's efficiency.
    """
    model = models.find(model) if isinstance(model, str) else model
    gpu = gpus.find(gpu) if isinstance(gpu, str) else gpu
    if weights not in WEIGHTS:
        raise ConfigError("--weights", weights, f"must be one of {', '.join(WEIGHTS)}", "fp8")
    if not model.params:
        allowed = "its number of parameters is not known, so no time can be computed"
        raise ConfigError("--model", model.name, allowed, "--prefill-tps and --decode-ms")
    layout, formats = layout or Layout(), formats or Formats(model.state_dtype)
    layout.check(model)
    found = shape_of(model, shape)
    using = using or efficiency(gpu, model)
    return Roofline(model, layout, formats, gpu, found, weights, using, work(model, layout, formats, found))
