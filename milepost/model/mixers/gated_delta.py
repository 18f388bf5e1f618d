"""The gated delta rule: Gated DeltaNet, and with a decay for each key channel, KDA.

    d_t = beta_t (v_t - (diag(a_t) S_{t-1})^T k_t)        q, k of unit length, q divided by sqrt(dk)

Unrolled from a chunk's initial state S this is a triangular system for the rows d_t of D (see `recurrent.py`):

    (I + L) D = diag(beta) V - diag(beta) (e^G K) S        L_tj = beta_t k_t . (e^(G_t - G_j) k_j) for j < t, else 0
"""

from dataclasses import dataclass

import torch

from milepost.model.config import GatedDeltaSpec
from milepost.model.kernels.plain import ChunkTerms, delta_gates
from milepost.model.linear import Linear
from milepost.model.mixers.recurrent import Recurrent
from milepost.model.work import DecodeWork

Tensor = torch.Tensor


@dataclass
class GatedDelta(Recurrent):
    """Projection [q | k | v | z | b | a].

    low_rank: where z and a come through a bottleneck, the projection's last columns are two of its width instead,
    and low_rank holds what takes them to z and to a.
    """

    spec: GatedDeltaSpec
    rate: Tensor  # [value heads], exp(A_log)
    dt_bias: Tensor  # [spec.gates]
    low_rank: tuple[Linear, Linear] | None = None

    def _project(self, x: Tensor) -> Tensor:
        y = self.projection(x)
        if self.low_rank is None:
            return y
        width = self.low_rank[0].weight.shape[1]
        at_b = self.spec.channels
        b, for_z, for_a = y[:, at_b:].split((self.spec.value_heads, width, width), -1)
        z, a = (linear(t) for linear, t in zip(self.low_rank, (for_z, for_a), strict=True))
        return torch.cat((y[:, :at_b], z, b, a), -1)

    def _terms(self, q: Tensor, k: Tensor, v: Tensor, gates: Tensor, real: Tensor) -> ChunkTerms:
        beta, decay = delta_gates(self, gates)
        beta = (beta * real).transpose(1, 2)
        if not self.spec.channel_gates:
            return self.kernels.chunk_terms(q, k, v, beta, (decay * real).transpose(1, 2))
        decay = (decay * real[..., None]).transpose(1, 2)
        return self.kernels.channel_terms(q, k, v, beta, decay)

    def _step(self, projected: Tensor, work: DecodeWork, conv: Tensor, temporal: Tensor) -> Tensor:
        return self.kernels.delta_step(self, projected, work, conv, temporal)
