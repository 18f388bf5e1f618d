"""NumbaKernels: the compiled loops of `numba_*.py` behind the interface of `kernels.py`."""

from dataclasses import replace

import numpy as np
import torch

from milepost.model import numba_attention, numba_recurrent, numba_streams
from milepost.model import numba_elementwise as elementwise
from milepost.model.config import GATE_FIRST, NO_NORM, SILU, IndexSpec, LatentSpec, LinearSpec, StreamsSpec
from milepost.model.kernels import AttentionWeights, ChunkTerms, ConvWeights, DeltaWeights, ScanWeights, TorchKernels
from milepost.model.work import DecodeRows, DecodeWork

Tensor = torch.Tensor


def _array(tensor: Tensor) -> np.ndarray:
    """A NumPy view; bfloat16 as its bits."""
    return (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


_WORTH_SPREADING = 1 << 15  # elements
_NATIVE = (torch.float32, torch.bfloat16)


class NumbaKernels(TorchKernels):
    """Compiled loops for tensors in CPU memory. Memory that is neither float32 nor bfloat16 takes TorchKernels' way."""

    def __init__(self) -> None:
        self._threads = torch.get_num_threads()
        elementwise.set_threads(self._threads)
        # Both share one OpenMP pool, and starting numba's threads resets the count that torch had set.
        torch.set_num_threads(self._threads)

    def enter(self) -> None:
        """The number of threads is kept per thread; the engine may run in another than the one that loaded."""
        elementwise.set_threads(self._threads)

    def _spread(self, work: Tensor) -> None:
        """All threads for much elementwise work, one for little: waking and awaiting the others costs more."""
        elementwise.set_threads(self._threads if work.numel() > _WORTH_SPREADING else 1)

    def add_norm(self, stream: Tensor, delta: Tensor, weight: Tensor, eps: float) -> Tensor:
        out = torch.empty_like(stream)
        self._spread(stream)
        elementwise.add_norm(_array(stream), _array(delta), _array(weight), np.float32(eps), _array(out))
        return out

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        out = gate_up.new_empty((gate_up.shape[0], gate_up.shape[1] // 2))
        self._spread(gate_up)
        elementwise.silu_mul(_array(gate_up), _array(out))
        return out

    def read_streams(
        self, spec: StreamsSpec, streams: Tensor, made: Tensor, norm: Tensor, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        n = spec.count
        x, write = streams.new_empty((len(streams), streams.shape[2])), torch.empty((len(streams), n))
        between = torch.empty((len(streams), n, n))
        self._spread(streams)
        numba_streams.read_streams_for(n)(
            *(_array(t) for t in (streams, made, norm)),
            (np.float32(eps), np.float32(spec.eps), spec.rounds),
            *(_array(t) for t in (x, write, between)),
        )
        return x, write, between

    def write_streams(self, streams: Tensor, y: Tensor, write: Tensor, between: Tensor) -> None:
        self._spread(streams)
        numba_streams.write_streams_for(streams.shape[1])(*(_array(t) for t in (streams, y, write, between)))

    def convolve(self, layer: ConvWeights, ext: Tensor, chunks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        spec = layer.spec
        count, width = chunks.shape
        q = torch.empty((count, spec.key_heads, width, spec.key_dim))
        k = torch.empty_like(q)
        v = torch.empty((count, spec.value_heads, width, spec.value_dim))
        self.enter()
        kernel = numba_recurrent.convolve_for(spec.kernel, spec.normalized)
        kernel(*(_array(t) for t in (ext, chunks, layer.conv_weight, layer.conv_bias, q, k, v)))
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
        numba_recurrent.chunk_terms_for(key_dim, value_dim, delta)(
            *(_array(t) for t in (q, k, v)),
            tuple(_array(t) for t in products),
            tuple(_array(t.contiguous()) for t in (beta, decay)),
            *(_array(t) for t in (solved, queries, keys, scores, decays)),
        )
        corrections = solved[..., value_dim:] if delta else None
        return ChunkTerms(solved[..., :value_dim], corrections, queries, keys, scores, decays[..., None])

    def channel_terms(self, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, decay: Tensor) -> ChunkTerms:
        key_dim, value_dim = k.shape[-1], v.shape[-1]
        solved, queries, keys, scores = _outputs(v, value_dim + key_dim, key_dim)
        decays = torch.empty((*v.shape[:2], key_dim))
        self.enter()
        numba_recurrent.channel_terms_for(key_dim, value_dim)(
            *(_array(t) for t in (q, k, v)),
            tuple(_array(t.contiguous()) for t in (beta, decay)),
            *(_array(t) for t in (solved, queries, keys, scores, decays)),
        )
        return ChunkTerms(solved[..., :value_dim], solved[..., value_dim:], queries, keys, scores, decays)

    def gated_norm(self, layer: DeltaWeights, x: Tensor, place: Tensor, projected: Tensor, out: Tensor) -> None:
        self.enter()
        numba_recurrent.gated_norm_for(x.shape[-1], layer.spec.gate == SILU)(
            _array(x),
            _array(place),
            _array(projected),
            layer.spec.channels,
            _array(layer.norm),
            np.float32(layer.eps),
            _array(out),
        )

    def finish(self, layer: ScanWeights, o: Tensor, projected: Tensor, out: Tensor) -> None:
        spec = layer.spec
        self._spread(o)
        flags = spec.norm == GATE_FIRST, spec.norm != NO_NORM, spec.gate == SILU
        numba_recurrent.finish_for(*flags)(
            _array(o),
            spec.norm_groups,
            _array(projected),
            spec.channels,
            _array(layer.norm),
            np.float32(layer.eps),
            _array(out),
        )

    def delta_step(
        self, layer: DeltaWeights, projected: Tensor, work: DecodeWork, conv: Tensor, temporal: Tensor, out: Tensor
    ) -> None:
        if conv.dtype not in _NATIVE or temporal.dtype not in _NATIVE:
            super().delta_step(layer, projected, work, conv, temporal, out)
            return
        spec = layer.spec
        self.enter()
        kind = spec.channel_gates, spec.bound is not None, spec.gate == SILU
        weights = layer.conv_weight, layer.conv_bias, layer.rate, layer.dt_bias, layer.norm
        numba_recurrent.delta_step_for(*_sizes(spec), *kind)(
            _array(projected),
            work.slots,
            _array(conv),
            _array(temporal),
            tuple(_array(t) for t in weights),
            (np.float32(layer.eps), np.float32(spec.bound or 0), np.float32(spec.beta_scale)),
            _array(out),
        )

    def scan_step(
        self, layer: ScanWeights, projected: Tensor, work: DecodeWork, conv: Tensor, temporal: Tensor
    ) -> Tensor:
        if conv.dtype not in _NATIVE or temporal.dtype not in _NATIVE:
            return super().scan_step(layer, projected, work, conv, temporal)
        spec = layer.spec
        out = torch.empty((len(projected), spec.value_width))
        self.enter()
        weights = layer.conv_weight, layer.conv_bias, layer.rate, layer.dt_bias, layer.skip
        numba_recurrent.scan_step_for(*_sizes(spec), spec.timed)(
            _array(projected),
            work.slots,
            _array(conv),
            _array(temporal),
            tuple(_array(t) for t in weights),
            np.float32(spec.step_floor),
            _array(out),
        )
        return out

    def conv_step(self, x: Tensor, weight: Tensor, work: DecodeWork, conv: Tensor) -> Tensor:
        if conv.dtype not in _NATIVE:
            return super().conv_step(x, weight, work, conv)
        out = torch.empty(x.shape)
        self._spread(x)
        arrays = _array(x), work.slots, _array(conv), _array(weight), _array(out)
        numba_recurrent.conv_step_for(len(weight))(*arrays)
        return out

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
        numba_attention.attention_step_for(*sizes, spec.gated, normed)(
            _array(projected),
            (_array(seen.cos), _array(seen.sin)),
            seen.rows,
            seen.offsets,
            _array(keys),
            _array(values),
            tuple(_array(t) for t in norms),
            np.float32(layer.eps),
            _array(out),
        )

    def latent_step(self, spec: LatentSpec, query: Tensor, seen: DecodeRows, keys: Tensor) -> Tensor:
        if keys.dtype not in _NATIVE:
            return super().latent_step(spec, query, seen, keys)
        out = torch.empty((*query.shape[:2], spec.rank))
        self.enter()
        numba_attention.latent_step_for(spec.heads, spec.rank, query.shape[-1])(
            _array(query), seen.rows, seen.offsets, _array(keys), _array(out)
        )
        return out

    def pool(self, tokens: Tensor, place: Tensor) -> Tensor:
        if tokens.dtype not in _NATIVE:
            return super().pool(tokens, place)
        out = tokens.new_empty((len(tokens), place.shape[1]))
        self._spread(tokens)
        numba_attention.pool_for(*place.shape)(_array(tokens), _array(place), _array(out))
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
        numba_attention.choose_rows_for(spec.heads, spec.dim, spec.group)(
            _array(query), _array(weights), view.rows, view.offsets, _array(values), spec.kept, borders, rows
        )
        return replace(view, rows=rows, offsets=borders)


def _outputs(v: Tensor, solved: int, key_dim: int) -> tuple[Tensor, ...]:
    """Memory for solved, queries, keys and scores of chunks of v."""
    width = v.shape[2]
    return tuple(torch.empty((*v.shape[:3], size)) for size in (solved, key_dim, key_dim, width))


def _sizes(spec: LinearSpec) -> tuple[int, int, int, int, int]:
    return spec.key_heads, spec.value_heads, spec.key_dim, spec.value_dim, spec.kernel
