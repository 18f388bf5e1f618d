"""The stream that the halves of the layers read and add to: one sum, or several mixed anew at each half.

A stream lives for one forward pass. `enter` gives what a half sees, `leave` takes what it made of that, `end` gives
what the head sees. What is particular to a half lies in its join.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from milepost.model.config import StreamsSpec
from milepost.model.kernels.plain import Kernels, rms_norm
from milepost.model.linear import Linear

Tensor = torch.Tensor


class Stream(Protocol):
    """All tensors [rows, hidden]; a join is of the kind that the stream knows."""

    def enter(self, join: Any) -> Tensor: ...

    def leave(self, join: Any, x: Tensor, y: Tensor) -> None: ...

    def end(self, norm: Tensor) -> Tensor: ...


@dataclass
class Join:
    """How half a layer joins a sum (`config.LayerSpec`); norm weights float32, as they multiply."""

    norm: Tensor | None  # of its input
    post_norm: Tensor | None  # of its output
    scale: float = 1.0
    restart: float | None = None


class Sum:
    """stream = stream + scale * half(norm(stream)). It is added up when next read, in one pass with the norm."""

    def __init__(self, embedded: Tensor, kernels: Kernels, eps: float) -> None:
        self._sum = embedded
        self._delta: Tensor | None = None
        self._kernels = kernels
        self._eps = eps

    def enter(self, join: Join) -> Tensor:
        return self._read(join.norm)

    def leave(self, join: Join, x: Tensor, y: Tensor) -> None:
        if join.post_norm is not None:
            y = rms_norm(y, join.post_norm, self._eps).to(y.dtype)
        if join.scale != 1:
            y = y * join.scale
        if join.restart is not None:
            self._sum = x * join.restart
        self._delta = y

    def end(self, norm: Tensor) -> Tensor:
        return self._read(norm)

    def _read(self, norm: Tensor | None) -> Tensor:
        stream, delta = self._sum, self._delta
        if norm is None:
            self._sum, self._delta = stream if delta is None else stream + delta, None
            return self._sum
        if delta is None:
            return rms_norm(stream, norm, self._eps).to(stream.dtype)
        return self._kernels.add_norm(stream, delta, norm, self._eps)


@dataclass
class HyperJoin:
    """How half a layer joins n streams. `mix` [n + n + n * n, n * hidden] and `bias` make, of all streams of a token at
    once, the weights that read the streams, that write to them, and that go from stream to stream. All float32.
    """

    norm: Tensor
    mix: Linear
    bias: Tensor


class HyperStreams:
    """Manifold-constrained hyper-connections: x = norm(read . S), S = between^T S + write y; S [n, hidden] a token.

    `between` is nearly doubly stochastic, so the streams are mixed without growing. The head sees their mean.
    """

    def __init__(self, embedded: Tensor, kernels: Kernels, eps: float, spec: StreamsSpec) -> None:
        self._streams = embedded[:, None].repeat(1, spec.count, 1)
        self._kernels = kernels
        self._eps = eps
        self._spec = spec

    def enter(self, join: HyperJoin) -> Tensor:
        flat = self._streams.flatten(1).float()
        made = join.mix(flat) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + self._eps) + join.bias
        x, self._write, self._between = self._kernels.read_streams(
            self._spec, self._streams, made, join.norm, self._eps
        )
        return x

    def leave(self, _join: HyperJoin, _x: Tensor, y: Tensor) -> None:
        self._kernels.write_streams(self._streams, y, self._write, self._between)

    def end(self, norm: Tensor) -> Tensor:
        return rms_norm(self._streams.float().mean(1), norm, self._eps).to(self._streams.dtype)
