"""What all recurrent mixers share: windows of the convolution, chunks of the prefill, states by slot.

The law, per value head with state S [dk, dv] and decay a_t (a number, or one for each of the dk channels):

    S_t = diag(a_t) S_{t-1} + k_t d_t^T        o_t = S_t^T q_t

Kinds differ in where a_t comes from, in d_t, and in what becomes of q, k and o; see the modules beside this one.
Prefill uses the matrix form over chunks of up to 64 tokens, with G_t = g_1 + ... + g_t for a_t = e^(g_t):

    O = diag(e^G) Q S + A D                                A_tj = q_t . (e^(G_t - G_j) k_j) for j <= t, else 0
    S' = e^(G_last) S + (diag(e^(G_last - G)) K)^T D

Everything without S is computed for all chunks of the batch at once; only these lines go chunk after chunk.
"""

from dataclasses import dataclass

import torch

from milepost.model.kernels.plain import ChunkTerms, Kernels
from milepost.model.linear import Linear
from milepost.model.memory import Memory
from milepost.model.work import DecodeWork, PrefillWork, Work

Tensor = torch.Tensor


@dataclass
class Recurrent:
    """Weights: projection [q | k | v | z | gates, hidden], output [hidden, value width]; the rest float32."""

    spec: object  # a LinearSpec
    index: int  # of this layer among the linear layers
    eps: float
    projection: Linear
    output: Linear
    conv_weight: Tensor  # [kernel, channels], oldest tap first
    conv_bias: Tensor  # [channels]
    norm: Tensor  # [value width]
    kernels: Kernels

    skip = None  # or float32 [value heads]: how much of v is added to o

    def forward(self, x: Tensor, work: Work, memory: Memory) -> Tensor:
        projected = self._project(x)
        out = projected.new_zeros((len(x), self.spec.value_width))
        conv, temporal = memory.conv[self.index], memory.temporal[self.index]
        begin = 0
        if work.prefill is not None:
            begin = work.prefill.count
            self._prefill(projected[:begin], work.prefill, conv, temporal, out[:begin])
        if work.decode is not None:
            end = begin + work.decode.count
            o = self._step(projected[begin:end], work.decode, conv, temporal)[:, :, None]
            self.kernels.finish(self, o, torch.arange(len(o), device=o.device), projected[begin:end], out[begin:end])
        return self.output(out)

    def _project(self, x: Tensor) -> Tensor:
        return self.projection(x)

    def _terms(self, q: Tensor, k: Tensor, v: Tensor, gates: Tensor, real: Tensor) -> ChunkTerms:
        raise NotImplementedError

    def _step(self, projected: Tensor, work: DecodeWork, conv: Tensor, temporal: Tensor) -> Tensor:
        """float32 [batch, value heads, dv]."""
        raise NotImplementedError

    def _prefill(self, projected: Tensor, work: PrefillWork, conv: Tensor, temporal: Tensor, out: Tensor) -> None:
        spec = self.spec
        ext = behind_windows(projected[:, : spec.channels], work, conv)
        q, k, v = self.kernels.convolve(self, ext, work.chunks)
        gates = projected[:, spec.channels + spec.value_width :].float()[work.chunk_rows]
        state = temporal[work.slots].float() * work.resumed[:, None, None, None]
        o = _scan(self._terms(q, k, v, gates, work.real[..., None]), state, work, temporal)
        temporal[work.slots] = state.to(temporal.dtype)
        if self.skip is not None:
            o.addcmul_(v, self.skip[:, None, None])
        self.kernels.finish(self, o, work.unchunk, projected, out)


def behind_windows(x: Tensor, work: PrefillWork, conv: Tensor) -> Tensor:
    """x [count, channels] with each span behind its window, [ext_length, channels]; the windows move on."""
    if not conv.shape[1]:
        return x.contiguous()  # no convolution; compiled loops are slow over columns that lie apart
    ext = x.new_empty((work.ext_length, x.shape[1]))
    for s, own in enumerate(work.spans, 1):
        shift = s * conv.shape[1]
        ext[own.start + shift : own.stop + shift] = x[own]
    ext[work.ext_windows] = (conv[work.slots] * work.resumed[:, None, None]).to(ext.dtype)
    conv[work.slots] = ext[work.ext_ends].to(conv.dtype)
    if len(work.mark_slots):
        conv[work.mark_slots] = ext[work.ext_marks].to(conv.dtype)
    return ext


def _scan(terms: ChunkTerms, state: Tensor, work: PrefillWork, temporal: Tensor) -> Tensor:
    """Run the chunks in order, state [spans, heads, dk, dv] in place; returns o [chunks, heads, width, dv]."""
    o = torch.empty(terms.values.shape, device=state.device)
    values, queries, keys, scores, decays = (
        t.flatten(0, 1) for t in (terms.values, terms.queries, terms.keys, terms.scores, terms.decays)
    )
    corrections = None if terms.corrections is None else terms.corrections.flatten(0, 1)
    flat_state, flat_o = state.flatten(0, 1), o.flatten(0, 1)
    heads, first = state.shape[1], 0
    for wave, count in enumerate(work.waves):
        own = slice(first * heads, (first + count) * heads)
        s = flat_state[: count * heads]  # spans are ordered by their number of chunks
        d = values[own] if corrections is None else torch.baddbmm(values[own], corrections[own], s, alpha=-1)
        torch.baddbmm(queries[own] @ s, scores[own], d, out=flat_o[own])
        s *= decays[own, :, None]
        s.baddbmm_(keys[own].transpose(-1, -2), d)
        for span, slot in work.marks.get(wave, ()):
            temporal[slot] = state[span].to(temporal.dtype)
        first += count
    return o
