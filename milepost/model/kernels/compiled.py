"""NumbaKernels: the compiled loops of `numba_*.py` behind the interface of `plain.py`."""

import ctypes
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from milepost.model.config import (
    GATE_FIRST,
    NO_NORM,
    RELU2,
    SILU,
    IndexSpec,
    LatentSpec,
    LinearSpec,
    StreamsSpec,
)
from milepost.model.kernels import numba_attention, numba_experts, numba_recurrent, numba_streams
from milepost.model.kernels import numba_elementwise as elementwise
from milepost.model.kernels.plain import (
    AttentionWeights,
    ChunkTerms,
    DeltaWeights,
    ExpertWeights,
    RecurrentWeights,
    ScanWeights,
    TorchKernels,
)
from milepost.model.work import DecodeRows, DecodeWork

Tensor = torch.Tensor


def _array(tensor: Tensor) -> np.ndarray:
    """A NumPy view; bfloat16 as its bits."""
    return (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


def _call(kernel: Callable, *arguments: Any) -> None:
    """Run a compiled kernel on tensors, numbers, and tuples of them."""
    kernel(*map(_native, arguments))


def _native(argument: Any) -> Any:
    if isinstance(argument, Tensor):
        return _array(argument)
    if isinstance(argument, tuple):
        return tuple(map(_native, argument))
    return np.float32(argument) if isinstance(argument, float) else argument


_WORTH_SPREADING = 1 << 15  # elements
_FEW = 16  # tokens of an expert, up to which one pass over its weights beats a product for each expert
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # M_... of malloc.h
_NATIVE = (torch.float32, torch.bfloat16)


def _keep_freed_memory() -> None:
    """Have glibc keep what one layer frees for the next, instead of giving it back and having new pages cleared.

    That took up to a fifth of a prefill. Other C libraries are left as they are.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, 32 << 20)  # the most that glibc allows
        mallopt(_TRIM_THRESHOLD, 1 << 30)


class NumbaKernels(TorchKernels):
    """Compiled loops for tensors in CPU memory. Memory that is neither float32 nor bfloat16 takes TorchKernels' way."""

    def __init__(self) -> None:
        _keep_freed_memory()
        self._threads = torch.get_num_threads()
        self._using = (0, 0)  # thread, and how many threads its kernels use
        self.enter()
        # Both share one OpenMP pool, and starting numba's threads resets the count that torch had set.
        torch.set_num_threads(self._threads)

    def enter(self) -> None:
        self._use(self._threads)

    def _use(self, count: int) -> None:
        """Set the number of threads, which numba keeps per thread: the engine may run in another than the loader's."""
        using = threading.get_ident(), count
        if using != self._using:
            elementwise.set_threads(count)
            self._using = using

    def _spread(self, work: Tensor) -> None:
        """All threads for much elementwise work, one for little: waking and awaiting the others costs more."""
        self._use(self._threads if work.numel() > _WORTH_SPREADING else 1)

    def add_norm(self, stream: Tensor, delta: Tensor, weight: Tensor, eps: float) -> Tensor:
        out = torch.empty_like(stream)
        self._spread(stream)
        _call(elementwise.add_norm, stream, delta, weight, eps, out)
        return out

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        out = gate_up.new_empty((gate_up.shape[0], gate_up.shape[1] // 2))
        self._spread(gate_up)
        _call(elementwise.silu_mul, gate_up, out)
        return out

    def read_streams(
        self, spec: StreamsSpec, streams: Tensor, made: Tensor, norm: Tensor, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        n = spec.count
        x, write = streams.new_empty((len(streams), streams.shape[2])), torch.empty((len(streams), n))
        between = torch.empty((len(streams), n, n))
        self._spread(streams)
        numbers = eps, spec.eps, spec.rounds
        _call(numba_streams.read_streams_for(n), streams, made, norm, numbers, x, write, between)
        return x, write, between

    def write_streams(self, streams: Tensor, y: Tensor, write: Tensor, between: Tensor) -> None:
        self._spread(streams)
        _call(numba_streams.write_streams_for(streams.shape[1]), streams, y, write, between)

    def route(self, layer: ExpertWeights, logits: Tensor) -> tuple[Tensor, Tensor]:
        spec = layer.spec
        chosen = torch.empty((len(logits), spec.per_token), dtype=torch.int64)
        weights = torch.empty(chosen.shape)
        self._spread(logits)
        sizes, numbers = (spec.groups, spec.groups_kept), (float(spec.epsilon), float(spec.scale))
        kind = spec.scoring == "softmax", spec.normalize
        _call(numba_experts.route, logits, layer.bias, *kind, sizes, numbers, chosen, weights)
        return chosen, weights

    def experts(
        self, layer: ExpertWeights, x: Tensor, chosen: Tensor, weights: Tensor, fixed_rows: int | None
    ) -> Tensor:
        if chosen.numel() > _FEW * len(layer.up):
            return super().experts(layer, x, chosen, weights, fixed_rows)
        out = torch.empty_like(x)
        self.enter()
        gated = layer.activation != RELU2
        limit = float("inf") if layer.limit is None else layer.limit
        _call(numba_experts.experts, x.float(), chosen, weights, (layer.up, layer.down), (gated, limit), out)
        return out

    def combine(self, y: Tensor, order: Tensor, weights: Tensor) -> Tensor:
        out = y.new_empty((len(weights), y.shape[1]))
        self._spread(y)
        _call(numba_experts.combine, y, order, weights, out)
        return out

    def convolve(self, layer: RecurrentWeights, ext: Tensor, chunks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        spec = layer.spec
        count, width = chunks.shape
        q = torch.empty((count, spec.key_heads, width, spec.key_dim))
        k = torch.empty_like(q)
        v = torch.empty((count, spec.value_heads, width, spec.value_dim))
        self.enter()
        kernel = numba_recurrent.convolve_for(spec.kernel, spec.normalized)
        _call(kernel, ext, chunks, layer.conv_weight, layer.conv_bias, q, k, v)
        return q, k, v

    def chunk_terms(self, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, decay: Tensor) -> ChunkTerms:
        return self._terms(q, k, v, beta, decay, True)

    def scan_terms(self, q: Tensor, k: Tensor, v: Tensor, step: Tensor, decay: Tensor) -> ChunkTerms:
        return self._terms(q, k, v, step, decay, False)

    def _terms(self, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, decay: Tensor, delta: bool) -> ChunkTerms:
        key_dim, value_dim = k.shape[-1], v.shape[-1]
        products = k @ k.transpose(-1, -2) if delta else k, q @ k.transpose(-1, -2)
        solved, queries, keys, scores = _outputs(v, value_dim + key_dim * delta, key_dim)
        decays = torch.empty(v.shape[:2])
        self.enter()
        kernel = numba_recurrent.chunk_terms_for(key_dim, value_dim, delta)
        gates = beta.contiguous(), decay.contiguous()
        _call(kernel, q, k, v, products, gates, solved, queries, keys, scores, decays)
        corrections = solved[..., value_dim:] if delta else None
        return ChunkTerms(solved[..., :value_dim], corrections, queries, keys, scores, decays[..., None])

    def channel_terms(self, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, decay: Tensor) -> ChunkTerms:
        key_dim, value_dim = k.shape[-1], v.shape[-1]
        solved, queries, keys, scores = _outputs(v, value_dim + key_dim, key_dim)
        decays = torch.empty((*v.shape[:2], key_dim))
        self.enter()
        kernel = numba_recurrent.channel_terms_for(key_dim, value_dim)
        gates = beta.contiguous(), decay.contiguous()
        _call(kernel, q, k, v, gates, solved, queries, keys, scores, decays)
        return ChunkTerms(solved[..., :value_dim], solved[..., value_dim:], queries, keys, scores, decays)

    def finish(self, layer: RecurrentWeights, o: Tensor, place: Tensor, projected: Tensor, out: Tensor) -> None:
        spec = layer.spec
        self._spread(o)
        flags = spec.norm == GATE_FIRST, spec.norm != NO_NORM, spec.gate == SILU
        arguments = o, place, spec.norm_groups, projected, spec.channels, layer.norm, layer.eps, out
        _call(numba_recurrent.finish_for(*flags), *arguments)

    def delta_step(
        self, layer: DeltaWeights, projected: Tensor, work: DecodeWork, conv: Tensor, temporal: Tensor
    ) -> Tensor:
        if conv.dtype not in _NATIVE or temporal.dtype not in _NATIVE:
            return super().delta_step(layer, projected, work, conv, temporal)
        spec = layer.spec
        kernel = numba_recurrent.delta_step_for(*_sizes(spec), spec.channel_gates, spec.bound is not None)
        weights = layer.conv_weight, layer.conv_bias, layer.rate, layer.dt_bias
        numbers = float(spec.bound or 0), float(spec.beta_scale)
        return self._step(kernel, spec, projected, work.slots, conv, temporal, weights, numbers)

    def scan_step(
        self, layer: ScanWeights, projected: Tensor, work: DecodeWork, conv: Tensor, temporal: Tensor
    ) -> Tensor:
        if conv.dtype not in _NATIVE or temporal.dtype not in _NATIVE:
            return super().scan_step(layer, projected, work, conv, temporal)
        spec = layer.spec
        kernel = numba_recurrent.scan_step_for(*_sizes(spec), spec.timed)
        weights = layer.conv_weight, layer.conv_bias, layer.rate, layer.dt_bias, layer.skip
        return self._step(kernel, spec, projected, work.slots, conv, temporal, weights, float(spec.step_floor))

    def _step(self, kernel: Callable, spec: LinearSpec, projected: Tensor, *arguments: Any) -> Tensor:
        out = torch.empty((len(projected), spec.value_heads, spec.value_dim))
        self.enter()
        _call(kernel, projected, *arguments, out)
        return out

    def gated_conv(self, projected: Tensor, ext: Tensor, places: Tensor, weight: Tensor, out: Tensor) -> None:
        self._spread(ext)
        _call(numba_recurrent.gated_conv, projected, ext, places, weight, out)

    def conv_step(self, projected: Tensor, weight: Tensor, work: DecodeWork, conv: Tensor, out: Tensor) -> None:
        if conv.dtype not in _NATIVE:
            super().conv_step(projected, weight, work, conv, out)
            return
        self._spread(projected)
        _call(numba_recurrent.conv_step, projected, work.slots, conv, weight, out)

    def attention_step(
        self,
        layer: AttentionWeights,
        projected: Tensor,
        seen: DecodeRows,
        keys: Tensor,
        values: Tensor,
        out: Tensor,
    ) -> None:
        if keys.dtype not in _NATIVE:
            super().attention_step(layer, projected, seen, keys, values, out)
            return
        spec = layer.spec
        self.enter()
        normed = spec.normed and not spec.wide_norms
        norms = (layer.q_norm, layer.k_norm) if normed else (seen.cos[0], seen.sin[0])  # without norms: never read
        sizes = spec.heads, spec.kv_heads, spec.head_dim
        kernel = numba_attention.attention_step_for(*sizes, spec.gated, normed)
        turns = seen.cos, seen.sin
        _call(kernel, projected, turns, seen.rows, seen.offsets, keys, values, norms, layer.eps, out)

    def latent_step(self, spec: LatentSpec, query: Tensor, seen: DecodeRows, keys: Tensor) -> Tensor:
        if keys.dtype not in _NATIVE:
            return super().latent_step(spec, query, seen, keys)
        out = torch.empty((*query.shape[:2], spec.rank))
        self.enter()
        kernel = numba_attention.latent_step_for(spec.heads, spec.rank, query.shape[-1])
        _call(kernel, query, seen.rows, seen.offsets, keys, out)
        return out

    def pool(self, tokens: Tensor, place: Tensor) -> Tensor:
        if tokens.dtype not in _NATIVE:
            return super().pool(tokens, place)
        out = tokens.new_empty((len(tokens), place.shape[1]))
        self._spread(tokens)
        _call(numba_attention.pool_for(*place.shape), tokens, place, out)
        return out

    def choose_rows(
        self, spec: IndexSpec, query: Tensor, weights: Tensor, view: DecodeRows, values: Tensor
    ) -> DecodeRows:
        if values.dtype not in _NATIVE:
            return super().choose_rows(spec, query, weights, view, values)
        groups, rest = np.divmod(np.diff(view.offsets), spec.group)
        borders = np.append(0, np.cumsum(np.minimum(groups, spec.kept) * spec.group + rest))
        rows = np.empty(borders[-1], np.int32)
        self.enter()
        kernel = numba_attention.choose_rows_for(spec.heads, spec.dim, spec.group)
        _call(kernel, query, weights, view.rows, view.offsets, values, spec.kept, borders, rows)
        return replace(view, rows=rows, offsets=borders)


def _outputs(v: Tensor, solved: int, key_dim: int) -> tuple[Tensor, ...]:
    """Memory for solved, queries, keys and scores of chunks of v."""
    width = v.shape[2]
    return tuple(torch.empty((*v.shape[:3], size)) for size in (solved, key_dim, key_dim, width))


def _sizes(spec: LinearSpec) -> tuple[int, int, int, int, int]:
    return spec.key_heads, spec.value_heads, spec.key_dim, spec.value_dim, spec.kernel
