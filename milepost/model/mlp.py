"""The feed-forward halves of a layer: gated MLP, and routed experts with a shared one."""

from dataclasses import dataclass

import torch

from milepost.model.config import MoeSpec
from milepost.model.kernels import Kernels
from milepost.model.linear import Linear

Tensor = torch.Tensor


@dataclass
class Dense:
    """down(silu(gate x) * up x); gate and up in one matrix [gate | up, hidden]."""

    gate_up: Linear
    down: Linear
    kernels: Kernels

    def forward(self, x: Tensor, fixed_rows: int | None) -> Tensor:  # noqa: ARG002 - every MLP has it
        return self.down(self.kernels.silu_mul(self.gate_up(x)))


@dataclass
class Moe:
    """The top experts of each token by softmax, weighted, plus the shared expert times a sigmoid gate."""

    spec: MoeSpec
    router: Linear  # [experts, hidden]
    experts: tuple[Dense, ...]
    shared: Dense
    shared_gate: Linear  # [1, hidden]

    def forward(self, x: Tensor, fixed_rows: int | None) -> Tensor:
        out = torch.sigmoid(self.shared_gate(x)) * self.shared.forward(x, fixed_rows)
        weights, chosen = self.router(x).float().softmax(-1).topk(self.spec.per_token, -1)
        if self.spec.normalize:
            weights = weights / weights.sum(-1, keepdim=True)
        weights = weights.to(x.dtype).flatten()
        # Sort the (token, expert) pairs by expert, so that each expert takes its tokens as one slice.
        order = chosen.flatten().argsort(stable=True)
        tokens = order // self.spec.per_token
        counts = torch.bincount(chosen.flatten(), minlength=self.spec.experts).tolist()
        first = 0
        for expert, count in zip(self.experts, counts, strict=True):
            if count:
                mine = slice(first, first + count)
                y = _padded(expert, x[tokens[mine]], fixed_rows)
                out.index_add_(0, tokens[mine], y * weights[order[mine], None])
                first += count
        return out


def _padded(expert: Dense, x: Tensor, fixed_rows: int | None) -> Tensor:
    """The expert on x, in strict mode padded to `fixed_rows`: how many tokens share an expert must not matter."""
    if fixed_rows is None:
        return expert.forward(x, None)
    padded = x.new_zeros((fixed_rows, x.shape[1]))
    padded[: len(x)] = x
    return expert.forward(padded, fixed_rows)[: len(x)]
