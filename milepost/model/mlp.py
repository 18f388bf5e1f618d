"""The feed-forward halves of a layer: gated and ungated MLPs, and routed experts with or without a shared one."""

from dataclasses import dataclass

import torch

from milepost.model.config import MoeSpec
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
        return self.down(self.kernels.activate(self.activation, self.up(x), self.limit))


@dataclass
class Moe:
    """The top experts of each token, weighted, plus the shared expert, which may have a sigmoid gate."""

    spec: MoeSpec
    router: Linear  # [experts, hidden]
    bias: Tensor  # float32 [experts], for the choice only
    up: Tensor  # [experts, gate | up or up alone, width of the experts' input]
    down: Tensor  # [experts, width of their input, their own]
    activation: str
    kernels: Kernels
    limit: float | None = None
    shared: Dense | None = None
    shared_gate: Linear | None = None  # [1, hidden]
    inward: Linear | None = None  # to the experts' own width, and back
    outward: Linear | None = None

    def forward(self, x: Tensor, work: Work, memory: Memory) -> Tensor:  # noqa: ARG002
        chosen, weights = self.kernels.route(self, self.router(x.to(self.router.weight.dtype)))
        inner = x if self.inward is None else self.inward(x)
        y = self.kernels.experts(self, inner, chosen, weights, work.fixed_rows)
        if self.outward is not None:
            y = self.outward(y)
        if self.shared is None:
            return y
        shared = self.shared(x)
        return y + (shared if self.shared_gate is None else torch.sigmoid(self.shared_gate(x)) * shared)
