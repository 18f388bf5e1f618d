"""Decaying sums of k v^T: Mamba-2 and Lightning attention (`recurrent.py` has the law they share).

    d_t = step_t v_t        o_t = S_t^T q_t + skip v_t

Mamba-2 (SSD): q, k, v are its C, B and x, key heads its groups, step_t = softplus(its input + bias) per head and the
log decay -e^A step_t. Lightning: no convolution, step 1, fixed decays. Then a gated norm over parts of the output.
"""

from dataclasses import dataclass

import torch

from milepost.model.config import ScanSpec
from milepost.model.kernels.plain import ChunkTerms, scan_gates
from milepost.model.mixers.recurrent import Recurrent
from milepost.model.work import DecodeWork

Tensor = torch.Tensor


@dataclass
class Scan(Recurrent):
    """Projection [q | k | v | z | step, if the model is timed]."""

    spec: ScanSpec
    rate: Tensor  # [value heads]: the log decay is -rate times the step
    dt_bias: Tensor  # [value heads]
    skip: Tensor  # [value heads]

    def _terms(self, q: Tensor, k: Tensor, v: Tensor, gates: Tensor, real: Tensor) -> ChunkTerms:
        step, decay = ((t * real).transpose(1, 2) for t in scan_gates(self, gates))
        return self.kernels.scan_terms(q, k, v, step, decay)

    def _step(self, projected: Tensor, work: DecodeWork, conv: Tensor, temporal: Tensor) -> Tensor:
        return self.kernels.scan_step(self, projected, work, conv, temporal)
