"""The small operations between the GEMMs, in two versions of one interface.

TorchKernels runs anywhere and is the definition. NumbaKernels is for CPUs: the same results up to rounding, in one pass
over memory and without the overhead of a dozen tensor operations. `choose_kernels` picks one by device and argument.
"""

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F

from milepost.errors import ModelError
from milepost.model.config import AttentionSpec, GatedDeltaSpec
from milepost.model.work import DecodeWork

Tensor = torch.Tensor


class DeltaWeights(Protocol):
    """What `delta_step` needs of a Gated DeltaNet layer; all float32."""

    spec: GatedDeltaSpec
    eps: float
    conv_weight: Tensor  # [kernel, channels], oldest tap first
    rate: Tensor  # [value heads], exp(A_log)
    dt_bias: Tensor  # [value heads]
    norm: Tensor  # [value dim]


class AttentionWeights(Protocol):
    """What `attention_step` needs of an attention layer; all float32."""

    spec: AttentionSpec
    eps: float
    q_norm: Tensor  # [head dim]
    k_norm: Tensor  # [head dim]


@dataclass
class ChunkTerms:
    """What a kernel chunk of the delta rule needs besides its initial state (`mixers/gated_delta.py` has the law).

    float32, [chunks, value heads, width, dim] unless said.
    """

    values: Tensor  # (I + L)^-1 diag(beta) V
    corrections: Tensor  # (I + L)^-1 diag(beta e^G) K
    queries: Tensor  # diag(e^G) Q
    keys: Tensor  # diag(e^(G_last - G)) K
    scores: Tensor  # A, [chunks, value heads, width, width]
    decays: Tensor  # e^(G_last), [chunks, value heads]


class Kernels(Protocol):
    """The interface; TorchKernels' docstrings define each operation."""

    def enter(self) -> None: ...

    def add_norm(self, stream: Tensor, delta: Tensor, weight: Tensor, eps: float) -> Tensor: ...

    def silu_mul(self, gate_up: Tensor) -> Tensor: ...

    def convolve(self, layer: DeltaWeights, ext: Tensor, chunks: Tensor) -> tuple[Tensor, Tensor, Tensor]: ...

    def chunk_terms(self, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, decay: Tensor) -> "ChunkTerms": ...

    def gated_norm(self, layer: DeltaWeights, x: Tensor, place: Tensor, projected: Tensor, out: Tensor) -> None: ...

    def delta_step(
        self, layer: DeltaWeights, projected: Tensor, work: DecodeWork, conv: Tensor, temporal: Tensor, out: Tensor
    ) -> None: ...

    def attention_step(
        self,
        layer: AttentionWeights,
        projected: Tensor,
        work: DecodeWork,
        keys: Tensor,
        values: Tensor,
        out: Tensor,
    ) -> None: ...


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last dimension in float32; `weight` as it multiplies (any "1 +" already added)."""
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x [tokens, heads, dim] float32: dimensions j and half + j turn by the token's j-th angle.

    cos, sin [tokens, half]; dimensions from 2 * half on pass unchanged.
    """
    half = cos.shape[-1]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), -1)


def l2_normalize(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


class TorchKernels:
    """Plain tensor operations, on any device and in any floating dtype."""

    def enter(self) -> None:
        """Called at the start of each forward pass, in whatever thread it runs."""

    def add_norm(self, stream: Tensor, delta: Tensor, weight: Tensor, eps: float) -> Tensor:
        """stream += delta in place, then RMSNorm(stream) * weight. Both [tokens, width]."""
        stream += delta
        return rms_norm(stream, weight, eps).to(stream.dtype)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """silu(gate) * up of [tokens, gate | up]."""
        gate, up = gate_up.float().chunk(2, -1)
        return (F.silu(gate) * up).to(gate_up.dtype)

    def convolve(self, layer: DeltaWeights, ext: Tensor, chunks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """silu of the causal convolution of a prefill, laid out in kernel chunks.

        ext [.., channels] holds each span's inputs behind its window; a token's oldest input stands at chunks[c, t].
        Returns float32 q, k [chunks, key heads, width, dk], of unit length and q divided by sqrt(dk), and
        v [chunks, value heads, width, dv].

        As shifted multiply-adds: F.conv1d is slow in bfloat16 on a CPU, and its result for a position depends on the
        length of the call.
        """
        spec, taps = layer.spec, layer.spec.kernel
        wide = ext.float()
        length = len(ext) - taps + 1
        y = wide[:length] * layer.conv_weight[0]
        for i in range(1, taps):
            y.addcmul_(wide[i : i + length], layer.conv_weight[i])
        mixed = F.silu(y)[chunks]
        parts = mixed.split((spec.key_width, spec.key_width, spec.value_width), -1)
        dims = (spec.key_dim, spec.key_dim, spec.value_dim)
        q, k, v = (part.unflatten(-1, (-1, dim)).transpose(1, 2) for part, dim in zip(parts, dims, strict=True))
        return l2_normalize(q) * spec.key_dim**-0.5, l2_normalize(k), v

    def chunk_terms(self, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, decay: Tensor) -> ChunkTerms:
        """The terms of the matrix form; beta and the log decay are [chunks, value heads, width], the rest as above."""
        group = v.shape[1] // k.shape[1]
        total = decay.cumsum(-1)
        # Above the diagonal the difference is positive and might overflow; it is cut off before the exponential.
        between = (total[..., :, None] - total[..., None, :]).tril().exp().tril()
        kk, qk = (x @ k.transpose(-1, -2) for x in (k, q))
        q, k, kk, qk = (x.repeat_interleave(group, 1) for x in (q, k, kk, qk))
        right = torch.cat((v, k * total.exp()[..., None]), -1) * beta[..., None]
        # Only what is strictly below the diagonal is read; the diagonal counts as ones.
        lower = beta[..., None] * between * kk
        solved = torch.linalg.solve_triangular(lower, right, upper=False, unitriangular=True)
        last = total[..., -1:]
        return ChunkTerms(
            values=solved[..., : v.shape[-1]],
            corrections=solved[..., v.shape[-1] :],
            queries=q * total.exp()[..., None],
            keys=k * (last - total).exp()[..., None],
            scores=between * qk,
            decays=last[..., 0].exp(),
        )

    def gated_norm(self, layer: DeltaWeights, x: Tensor, place: Tensor, projected: Tensor, out: Tensor) -> None:
        """out[t] = RMSNorm(o_t) * norm * silu(z_t), per head; the norm comes first.

        x [chunks, value heads, width, dv] float32; o_t lies at place[t] of [chunks * width]; z_t is in projected[t].
        """
        o = x.transpose(1, 2).flatten(0, 1)[place]
        _gate_output(layer, o, projected, out)

    def delta_step(
        self, layer: DeltaWeights, projected: Tensor, work: DecodeWork, conv: Tensor, temporal: Tensor, out: Tensor
    ) -> None:
        """One token of Gated DeltaNet per sequence; windows and states in place by slot.

        projected [batch, q | k | v | z | b | a]; conv [slots, kernel - 1, channels];
        temporal [slots, value heads, dk, dv]; out [batch, value heads * dv].
        """
        spec = layer.spec
        slots = work.slots_on(projected.device)
        x = projected[:, : spec.channels]
        taps = torch.cat((conv[slots].float(), x[:, None].float()), 1)
        conv[slots] = torch.cat((conv[slots][:, 1:], x[:, None].to(conv.dtype)), 1)
        mixed = F.silu((taps * layer.conv_weight).sum(1))
        q, k, v = mixed.split((spec.key_width, spec.key_width, spec.value_width), -1)
        group = spec.value_heads // spec.key_heads
        q, k = (l2_normalize(t.reshape(-1, spec.key_heads, spec.key_dim)).repeat_interleave(group, 1) for t in (q, k))
        v = v.reshape(-1, spec.value_heads, spec.value_dim)
        gates = projected[:, spec.channels + spec.value_width :].float()
        beta, decay = delta_gates(layer, gates)
        state = temporal[slots].float() * decay.exp()[..., None, None]
        change = beta[..., None] * (v - torch.einsum("bhij,bhi->bhj", state, k))
        state += k[..., None] * change[..., None, :]
        temporal[slots] = state.to(temporal.dtype)
        o = torch.einsum("bhij,bhi->bhj", state, q * spec.key_dim**-0.5)
        _gate_output(layer, o, projected, out)

    def attention_step(
        self,
        layer: AttentionWeights,
        projected: Tensor,
        work: DecodeWork,
        keys: Tensor,
        values: Tensor,
        out: Tensor,
    ) -> None:
        """One token of gated attention per sequence; its KV is written to the last of the sequence's rows first.

        projected [batch, q | gate | k | v]; keys, values [rows, kv heads, dim]; out [batch, heads * dim].
        """
        spec = layer.spec
        q, gate, k, v = split_attention(layer, projected, work.cos, work.sin)
        rows, visible = work.padded_rows(projected.device)
        last = work.last_rows(projected.device)
        keys[last] = k.to(keys.dtype)
        values[last] = v.to(values.dtype)
        q = q.view(len(q), spec.kv_heads, -1, spec.head_dim)
        scores = torch.einsum("bkgd,btkd->bkgt", q, keys[rows].float()) * spec.head_dim**-0.5
        scores = scores.masked_fill(~visible[:, None, None], -math.inf)
        o = torch.einsum("bkgt,btkd->bkgd", scores.softmax(-1), values[rows].float())
        out.copy_(o.flatten(1) * gate)


def _gate_output(layer: DeltaWeights, o: Tensor, projected: Tensor, out: Tensor) -> None:
    """The gated norm of o [tokens, value heads, dv]."""
    spec = layer.spec
    z = projected[:, spec.channels : spec.channels + spec.value_width].float().view(o.shape)
    out.copy_((rms_norm(o, layer.norm, layer.eps) * F.silu(z)).flatten(1))


def delta_gates(layer: DeltaWeights, gates: Tensor) -> tuple[Tensor, Tensor]:
    """(beta, log decay), each [..., value heads], from float32 gates [..., b | a]."""
    b, a = gates.chunk(2, -1)
    return b.sigmoid(), -layer.rate * F.softplus(a + layer.dt_bias)


def split_attention(
    layer: AttentionWeights, projected: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(q, gate, k, v) of a projection, float32: q, k normed and turned [tokens, heads, dim]; gate after its sigmoid."""
    spec = layer.spec
    width, kv_width = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    q, gate, k, v = projected.float().split((width, width, kv_width, kv_width), -1)
    q, k, v = (t.unflatten(-1, (-1, spec.head_dim)) for t in (q, k, v))
    q = rotate(rms_norm(q, layer.q_norm, layer.eps), cos, sin)
    k = rotate(rms_norm(k, layer.k_norm, layer.eps), cos, sin)
    return q, gate.sigmoid(), k, v


def _array(tensor: Tensor) -> np.ndarray:
    """A NumPy view; bfloat16 as its bits."""
    return (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


_WORTH_SPREADING = 1 << 15  # elements
_NATIVE = (torch.float32, torch.bfloat16)


class NumbaKernels(TorchKernels):
    """Compiled loops for tensors in CPU memory. Memory that is neither float32 nor bfloat16 takes TorchKernels' way."""

    def __init__(self) -> None:
        from milepost.model import (
            numba_kernels,
        )  # imported here: it takes half a second, and a GPU server needs none of it

        self._compiled = numba_kernels
        self._threads = torch.get_num_threads()
        numba_kernels.set_threads(self._threads)
        # Both share one OpenMP pool, and starting numba's threads resets the count that torch had set.
        torch.set_num_threads(self._threads)

    def enter(self) -> None:
        """The number of threads is kept per thread; the engine may run in another than the one that loaded."""
        self._compiled.set_threads(self._threads)

    def _spread(self, work: Tensor) -> None:
        """All threads for much elementwise work, one for little: waking and awaiting the others costs more."""
        self._compiled.set_threads(self._threads if work.numel() > _WORTH_SPREADING else 1)

    def add_norm(self, stream: Tensor, delta: Tensor, weight: Tensor, eps: float) -> Tensor:
        out = torch.empty_like(stream)
        self._spread(stream)
        self._compiled.add_norm(_array(stream), _array(delta), _array(weight), np.float32(eps), _array(out))
        return out

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        out = gate_up.new_empty((gate_up.shape[0], gate_up.shape[1] // 2))
        self._spread(gate_up)
        self._compiled.silu_mul(_array(gate_up), _array(out))
        return out

    def convolve(self, layer: DeltaWeights, ext: Tensor, chunks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        spec = layer.spec
        count, width = chunks.shape
        q = torch.empty((count, spec.key_heads, width, spec.key_dim))
        k = torch.empty_like(q)
        v = torch.empty((count, spec.value_heads, width, spec.value_dim))
        self.enter()
        kernel = self._compiled.convolve_for(*_sizes(spec))
        kernel(*(_array(t) for t in (ext, chunks, layer.conv_weight, q, k, v)))
        return q, k, v

    def chunk_terms(self, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, decay: Tensor) -> ChunkTerms:
        heads, width, key_dim, value_dim = v.shape[1], v.shape[2], k.shape[-1], v.shape[-1]
        products = k @ k.transpose(-1, -2), q @ k.transpose(-1, -2)
        solved, queries, keys, scores = (
            torch.empty((len(v), heads, width, size)) for size in (value_dim + key_dim, key_dim, key_dim, width)
        )
        decays = torch.empty((len(v), heads))
        self.enter()
        self._compiled.chunk_terms_for(key_dim, value_dim)(
            *(_array(t) for t in (q, k, v)),
            tuple(_array(t) for t in products),
            tuple(_array(t.contiguous()) for t in (beta, decay)),
            *(_array(t) for t in (solved, queries, keys, scores, decays)),
        )
        return ChunkTerms(solved[..., :value_dim], solved[..., value_dim:], queries, keys, scores, decays)

    def gated_norm(self, layer: DeltaWeights, x: Tensor, place: Tensor, projected: Tensor, out: Tensor) -> None:
        self.enter()
        self._compiled.gated_norm_for(x.shape[-1])(
            _array(x),
            _array(place),
            _array(projected),
            layer.spec.channels,
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
        self.enter()
        self._compiled.delta_step_for(*_sizes(layer.spec))(
            _array(projected),
            work.slots,
            _array(conv),
            _array(temporal),
            tuple(_array(t) for t in (layer.conv_weight, layer.rate, layer.dt_bias, layer.norm)),
            np.float32(layer.eps),
            _array(out),
        )

    def attention_step(
        self,
        layer: AttentionWeights,
        projected: Tensor,
        work: DecodeWork,
        keys: Tensor,
        values: Tensor,
        out: Tensor,
    ) -> None:
        if keys.dtype not in _NATIVE:
            super().attention_step(layer, projected, work, keys, values, out)
            return
        spec = layer.spec
        self.enter()
        self._compiled.attention_step_for(spec.heads, spec.kv_heads, spec.head_dim, spec.rotary_dim)(
            _array(projected),
            (_array(work.cos), _array(work.sin)),
            work.rows,
            work.offsets,
            _array(keys),
            _array(values),
            (_array(layer.q_norm), _array(layer.k_norm)),
            np.float32(layer.eps),
            _array(out),
        )


def _sizes(spec: GatedDeltaSpec) -> tuple[int, int, int, int, int]:
    return spec.key_heads, spec.value_heads, spec.key_dim, spec.value_dim, spec.kernel


def choose_kernels(name: str, device: torch.device, dtype: torch.dtype) -> Kernels:
    """The kernels called `name`: "numba", "torch", or "auto", which is numba where it can run."""
    possible = device.type == "cpu" and dtype in (torch.float32, torch.bfloat16)
    if name == "torch" or (name == "auto" and not possible):
        return TorchKernels()
    if name not in ("auto", "numba"):
        raise ModelError(f"kernels {name!r}: choose auto, numba or torch")
    if not possible:
        raise ModelError(f"kernels numba: needs a CPU and float32 or bfloat16, not {device.type} and {dtype}; use auto")
    return NumbaKernels()
