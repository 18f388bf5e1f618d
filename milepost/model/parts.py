"""From named tensors to the parts of a layer: what several families put together in the same way."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Protocol

import torch

from milepost.model.config import ATTENTION, RELU2, WINDOW, AttentionSpec, ModelConfig
from milepost.model.kernels import Kernels
from milepost.model.linear import Linear
from milepost.model.memory import Memory
from milepost.model.mixers import Attention
from milepost.model.mlp import Dense, Moe
from milepost.model.weights import Reader
from milepost.model.work import Work

Tensor = torch.Tensor


class Half(Protocol):
    """Half a layer: a mixer or an MLP. x [rows, hidden] -> [rows, hidden]."""

    def forward(self, x: Tensor, work: Work, memory: Memory) -> Tensor: ...


@dataclass
class Maker:
    """Puts tensors on a device and in a dtype. `offset` is what the model's norm weights are stored without."""

    config: ModelConfig
    device: torch.device
    dtype: torch.dtype
    kernels: Kernels
    offset: float

    def matrix(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.device, self.dtype).contiguous()

    def linear(self, *tensors: Tensor) -> Linear:
        """One product for all tensors [outputs, inputs], in this order."""
        return Linear(self.matrix(tensors[0] if len(tensors) == 1 else torch.cat(tensors)))

    def stack(self, tensors: Iterable[Tensor], count: int) -> Tensor:
        """`count` tensors of one shape as one, without holding them all twice."""
        tensors = iter(tensors)
        first = next(tensors)
        out = torch.empty((count, *first.shape), device=self.device, dtype=self.dtype)
        for place, tensor in zip(out, chain((first,), tensors), strict=True):
            place.copy_(tensor)
        return out

    def vector(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.device, torch.float32).contiguous()

    def norm(self, tensor: Tensor) -> Tensor:
        return self.vector(tensor) + self.offset


def scaled(tensor: Tensor, factor: float) -> Tensor:
    """A factor of the architecture, taken into the weights before they are rounded to the model's dtype."""
    return tensor if factor == 1 else tensor.float() * factor


def attention(maker: Maker, read: Reader, index: int, kind: str = ATTENTION) -> Attention:
    """Grouped-query attention; the files interleave q and its gate head by head."""
    spec, hidden = maker.config.attentions[kind], maker.config.hidden_size
    assert isinstance(spec, AttentionSpec)
    width, kv_width = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    q = read("q_proj.weight", width * (1 + spec.gated), hidden)
    gates = []
    if spec.gated:
        q, gate = (t.flatten(0, 1) for t in q.unflatten(0, (spec.heads, 2, spec.head_dim)).unbind(1))
        gates = [gate]
    k, v = (read(f"{name}_proj.weight", kv_width, hidden) for name in "kv")
    of_q, of_k, of_v, of_output = spec.scales
    norms = [None, None]
    if spec.normed:
        sizes = (width, kv_width) if spec.wide_norms else (spec.head_dim,) * 2
        norms = [maker.norm(read(f"{name}_norm.weight", size)) for name, size in zip("qk", sizes, strict=True)]
    return Attention(
        spec=spec,
        kind=kind,
        index=index,
        eps=maker.config.rms_norm_eps,
        projection=maker.linear(scaled(q, of_q), *gates, scaled(k, of_k), scaled(v, of_v)),
        output=maker.linear(scaled(read("o_proj.weight", hidden, width), of_output)),
        q_norm=norms[0],
        k_norm=norms[1],
        kernels=maker.kernels,
    )


window = partial(attention, kind=WINDOW)


def mlp(maker: Maker, read: Reader, width: int) -> Dense:
    """A gated MLP, or an ungated one where the activation is relu2."""
    config = maker.config
    up, down = (half(maker, read, width, config.hidden_size) for half in (_up, _down))
    return Dense(maker.linear(up), maker.linear(down), config.activation, maker.kernels, config.mlp_limit)


def _up(maker: Maker, read: Reader, width: int, hidden: int) -> Tensor:
    """[gate | up, hidden], or up alone."""
    up = read("up_proj.weight", width, hidden)
    if maker.config.activation == RELU2:
        return up
    return torch.cat((scaled(read("gate_proj.weight", width, hidden), maker.config.mlp_scales[0]), up))


def _down(maker: Maker, read: Reader, width: int, hidden: int) -> Tensor:
    return scaled(read("down_proj.weight", hidden, width), maker.config.mlp_scales[1])


def dense(maker: Maker, read: Reader, _layer: int) -> Dense:
    return mlp(maker, read, maker.config.intermediate_size)


def moe(maker: Maker, read: Reader, _layer: int) -> Moe:
    """Experts one by one or in one tensor each way; names as in most families."""
    spec, hidden = maker.config.moe, maker.config.hidden_size
    assert spec is not None
    inner = spec.latent or hidden
    if read.has("experts.gate_up_proj"):
        up = maker.matrix(read("experts.gate_up_proj", spec.experts, 2 * spec.width, inner))
        down = maker.matrix(read("experts.down_proj", spec.experts, inner, spec.width))
    else:
        each = [read.under(f"experts.{e}") for e in range(spec.experts)]
        up, down = (
            maker.stack((half(maker, one, spec.width, inner) for one in each), spec.experts) for half in (_up, _down)
        )
    router = read("gate.weight", spec.experts, hidden)
    shared = mlp(maker, read.under("shared_expert"), spec.shared_width) if spec.shared_width else None
    bias = read("gate.e_score_correction_bias", spec.experts) if spec.biased else torch.zeros(spec.experts)
    return Moe(
        spec=spec,
        router=Linear(maker.vector(router)) if spec.wide_router else maker.linear(router),
        bias=maker.vector(bias),
        up=up,
        down=down,
        activation=maker.config.activation,
        limit=maker.config.mlp_limit,
        kernels=maker.kernels,
        shared=shared,
        shared_gate=maker.linear(read("shared_expert_gate.weight", 1, hidden)) if shared and spec.shared_gate else None,
        inward=maker.linear(read("fc1_latent_proj.weight", inner, hidden)) if spec.latent else None,
        outward=maker.linear(read("fc2_latent_proj.weight", hidden, inner)) if spec.latent else None,
    )
