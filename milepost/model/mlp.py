"""The feed-forward halves of a layer: gated and ungated MLPs, and routed experts with or without a shared one."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from milepost.model.config import RELU2, MoeSpec
from milepost.model.kernels import Kernels
from milepost.model.linear import Linear
from milepost.model.memory import Memory
from milepost.model.work import Work

Tensor = torch.Tensor


@dataclass
class Dense:
    """down(silu(gate x) * up x), gate and up in one matrix [gate | up, hidden]; or down(relu(up x)^2).

    limit: gate x is cut off above it, up x on both sides.
    """

    up: Linear
    down: Linear
    activation: str
    kernels: Kernels
    limit: float | None = None

    def forward(self, x: Tensor, work: Work, memory: Memory) -> Tensor:  # noqa: ARG002 - every half has them
        return self(x)

    def __call__(self, x: Tensor) -> Tensor:
        y = self.up(x)
        if self.limit is not None:
            y.clamp_(max=self.limit)[:, y.shape[1] // 2 :].clamp_(min=-self.limit)
        return self.down(F.relu(y).square() if self.activation == RELU2 else self.kernels.silu_mul(y))


@dataclass
class Moe:
    """The top experts of each token, weighted, plus the shared expert, which may have a sigmoid gate."""

    spec: MoeSpec
    router: Linear  # [experts, hidden]
    experts: tuple[Dense, ...]
    shared: Dense | None = None
    shared_gate: Linear | None = None  # [1, hidden]
    bias: Tensor | None = None  # float32 [experts], for the choice only
    inward: Linear | None = None  # to the experts' own width, and back
    outward: Linear | None = None

    def forward(self, x: Tensor, work: Work, memory: Memory) -> Tensor:  # noqa: ARG002
        chosen, weights = self._route(x)
        inner = x if self.inward is None else self.inward(x)
        y = self._experts(inner, chosen, weights.to(x.dtype).flatten(), work.fixed_rows)
        if self.outward is not None:
            y = self.outward(y)
        if self.shared is None:
            return y
        shared = self.shared(x)
        return y + (shared if self.shared_gate is None else torch.sigmoid(self.shared_gate(x)) * shared)

    def _route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(experts int64, weights float32), each [tokens, experts per token]."""
        spec = self.spec
        logits = self.router(x.to(self.router.weight.dtype)).float()
        scores = logits.softmax(-1) if spec.scoring == "softmax" else logits.sigmoid()
        ranked = scores if self.bias is None else scores + self.bias
        if spec.groups > 1:
            grouped = ranked.unflatten(-1, (spec.groups, -1))
            kept = grouped.topk(2, -1)[0].sum(-1).topk(spec.groups_kept, -1)[1]
            dropped = torch.ones(grouped.shape[:2], dtype=torch.bool, device=x.device).scatter_(1, kept, False)
            ranked = grouped.masked_fill(dropped[..., None], -torch.inf).flatten(1)
        chosen = ranked.topk(spec.per_token, -1)[1]
        weights = scores.gather(1, chosen)
        if spec.normalize:
            weights = weights / (weights.sum(-1, keepdim=True) + spec.epsilon)
        return chosen, weights * spec.scale

    def _experts(self, x: Tensor, chosen: Tensor, weights: Tensor, fixed_rows: int | None) -> Tensor:
        out = torch.zeros_like(x)
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
        return expert(x)
    padded = x.new_zeros((fixed_rows, x.shape[1]))
    padded[: len(x)] = x
    return expert(padded)[: len(x)]
