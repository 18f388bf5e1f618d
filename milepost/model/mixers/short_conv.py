"""A gated short convolution: y = C * conv(B * x), with [B | C | x] one projection of the input. No recurrent state."""

from dataclasses import dataclass

import torch

from milepost.model.config import ShortConvSpec
from milepost.model.kernels import Kernels
from milepost.model.linear import Linear
from milepost.model.memory import Memory
from milepost.model.mixers.recurrent import behind_windows
from milepost.model.work import Work

Tensor = torch.Tensor


@dataclass
class ShortConv:
    """Weights: projection [B | C | x, hidden], output [hidden, width], conv_weight float32 [kernel, width]."""

    spec: ShortConvSpec
    index: int  # of this layer among the linear layers
    projection: Linear
    output: Linear
    conv_weight: Tensor
    kernels: Kernels

    def forward(self, x: Tensor, work: Work, memory: Memory) -> Tensor:
        projected = self.projection(x)
        out = x.new_zeros((len(x), self.spec.width))
        conv = memory.conv[self.index]
        begin = 0
        if work.prefill is not None:
            begin = work.prefill.count
            before, _, value = projected[:begin].chunk(3, -1)
            ext = behind_windows(before * value, work.prefill, conv)
            # A token's oldest input stands as many places before the token as there are taps.
            places = work.prefill.ext_tokens - self.spec.state.taps
            self.kernels.gated_conv(projected[:begin], ext, places, self.conv_weight, out[:begin])
        if work.decode is not None:
            end = begin + work.decode.count
            self.kernels.conv_step(projected[begin:end], self.conv_weight, work.decode, conv, out[begin:end])
        return self.output(out)
