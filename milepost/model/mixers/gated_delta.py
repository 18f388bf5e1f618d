"""Gated DeltaNet: a short causal convolution, then the gated delta rule, then a gated norm.

Per head with state S [dk, dv], decay a_t = exp(g_t) and step size beta_t:

    S_t = a_t S_{t-1} + k_t d_t^T        d_t = beta_t (v_t - a_t S_{t-1}^T k_t)        o_t = S_t^T q_t

Prefill uses the matrix form over chunks of up to 64 tokens. Unrolling the recurrence from the chunk's initial state S,
with G_t = g_1 + ... + g_t, gives a triangular system for the rows d_t of D:

    (I + L) D = diag(beta) V - diag(beta e^G) K S          L_tj = beta_t e^(G_t - G_j) (k_t . k_j) for j < t, else 0
    O = diag(e^G) Q S + A D                                A_tj = e^(G_t - G_j) (q_t . k_j) for j <= t, else 0
    S' = e^(G_last) S + (diag(e^(G_last - G)) K)^T D

Everything without S is computed for all chunks of the batch at once; only the last three lines go chunk after chunk.
"""

from dataclasses import dataclass

import torch

from milepost.model.config import GatedDeltaSpec
from milepost.model.kernels import ChunkTerms, Kernels, delta_gates
from milepost.model.linear import Linear
from milepost.model.memory import Memory
from milepost.model.work import PrefillWork, Work

Tensor = torch.Tensor


@dataclass
class GatedDelta:
    """Weights: projection [q | k | v | z | b | a, hidden], output [hidden, value width]; the rest float32."""

    spec: GatedDeltaSpec
    index: int  # of this layer among the linear layers
    eps: float
    projection: Linear
    output: Linear
    conv_weight: Tensor  # [kernel, channels], oldest tap first
    rate: Tensor  # [value heads], exp(A_log)
    dt_bias: Tensor  # [value heads]
    norm: Tensor  # [value dim]
    kernels: Kernels

    def forward(self, x: Tensor, work: Work, memory: Memory) -> Tensor:
        projected = self.projection(x)
        out = projected.new_zeros((len(x), self.spec.value_width))
        conv, temporal = memory.conv[self.index], memory.temporal[self.index]
        begin = 0
        if work.prefill is not None:
            begin = work.prefill.count
            self._prefill(projected[:begin], work.prefill, conv, temporal, out[:begin])
        if work.decode is not None:
            end = begin + work.decode.count
            self.kernels.delta_step(self, projected[begin:end], work.decode, conv, temporal, out[begin:end])
        return self.output(out)

    def _prefill(self, projected: Tensor, work: PrefillWork, conv: Tensor, temporal: Tensor, out: Tensor) -> None:
        spec = self.spec
        ext = self._windows(projected[:, : spec.channels], work, conv)
        q, k, v = self.kernels.convolve(self, ext, work.chunks)
        gates = projected[:, spec.channels + spec.value_width :].float()[work.chunk_rows]
        beta, decay = ((t * work.real[..., None]).transpose(1, 2) for t in delta_gates(self, gates))
        state = temporal[work.slots].float() * work.resumed[:, None, None, None]
        o = self._scan(self.kernels.chunk_terms(q, k, v, beta, decay), state, work, temporal)
        temporal[work.slots] = state.to(temporal.dtype)
        self.kernels.gated_norm(self, o, work.unchunk, projected, out)

    def _windows(self, x: Tensor, work: PrefillWork, conv: Tensor) -> Tensor:
        """x [count, channels] with each span behind its window, [ext_length, channels]; the windows move on."""
        ext = x.new_empty((work.ext_length, x.shape[1]))
        ext[work.ext_tokens] = x
        ext[work.ext_windows] = (conv[work.slots] * work.resumed[:, None, None]).to(ext.dtype)
        conv[work.slots] = ext[work.ext_ends].to(conv.dtype)
        if len(work.mark_slots):
            conv[work.mark_slots] = ext[work.ext_marks].to(conv.dtype)
        return ext

    def _scan(self, terms: ChunkTerms, state: Tensor, work: PrefillWork, temporal: Tensor) -> Tensor:
        """Run the chunks in order, state [spans, heads, dk, dv] in place; returns o [chunks, heads, width, dv]."""
        o = torch.empty(terms.values.shape, device=state.device)
        values, corrections, queries, keys, scores = (
            t.flatten(0, 1) for t in (terms.values, terms.corrections, terms.queries, terms.keys, terms.scores)
        )
        flat_state, flat_o, decays = state.flatten(0, 1), o.flatten(0, 1), terms.decays.flatten()[:, None, None]
        heads, first = state.shape[1], 0
        for wave, count in enumerate(work.waves):
            own = slice(first * heads, (first + count) * heads)
            s = flat_state[: count * heads]  # spans are ordered by their number of chunks
            d = torch.baddbmm(values[own], corrections[own], s, alpha=-1)
            torch.baddbmm(queries[own] @ s, scores[own], d, out=flat_o[own])
            s *= decays[own]
            s.baddbmm_(keys[own].transpose(-1, -2), d)
            for span, slot in work.marks.get(wave, ()):
                temporal[slot] = state[span].to(temporal.dtype)
            first += count
        return o
