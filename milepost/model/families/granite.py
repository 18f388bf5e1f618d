"""Granite 4 hybrid: Mamba-2 with attention, experts beside a shared MLP or that alone."""

import torch

from milepost.model.config import ATTENTION, DENSE, LINEAR, MOE, SILU, LayerSpec, ModelConfig, MoeSpec
from milepost.model.families.alike import KINDS, layer_kinds, plain_attention, rope, whole_model
from milepost.model.families.family import About, Family, Names
from milepost.model.families.fields import Fields
from milepost.model.families.mamba2 import ONLY, mamba2, scan_spec
from milepost.model.mlp import Dense, Moe
from milepost.model.parts import Maker
from milepost.model.weights import Reader


def _read_granite(fields: Fields) -> ModelConfig:
    listed = ["linear_attention"] * fields.size("num_hidden_layers")
    mixers = layer_kinds(fields, listed, {**KINDS, "mamba": LINEAR, "attention": ATTENTION})
    experts, branch = fields.size("num_local_experts", 8, least=0), fields.number("residual_multiplier", 1.0)
    fields.ignore("init_method")
    dim = plain_attention(fields).head_dim
    rotary = rope(fields, dim) if fields.get("position_embedding_type") == "rope" else (0, 1.0)
    fields.ignore("rope_parameters", "rope_scaling", "rope_theta", "num_experts_per_tok", "intermediate_size")
    of_q = fields.number("attention_multiplier", 1.0) * dim**0.5  # on top of the usual 1 / sqrt(dim)
    shared = fields.size("shared_intermediate_size", 1024)
    moe = None
    if experts:
        moe = MoeSpec(
            experts=experts,
            per_token=fields.size("num_experts_per_tok", 2),
            width=fields.size("intermediate_size"),
            shared_width=shared,
            normalize=True,
        )
    return whole_model(
        fields,
        [LayerSpec(mixer, MOE if experts else DENSE, scales=(branch, branch)) for mixer in mixers],
        linear=scan_spec(fields, norm_groups=fields.size("mamba_n_groups", 1)),
        attention=plain_attention(fields, rotary, scales=(of_q, 1.0, 1.0, 1.0)),
        moe=moe,
        intermediate_size=shared,
        embedding_scale=fields.number("embedding_multiplier", 1.0),
        logit_scale=1 / fields.number("logits_scaling", 1.0),
    )


def _granite_shared(maker: Maker, read: Reader, _layer: int) -> Dense:
    width, hidden = maker.config.intermediate_size, maker.config.hidden_size
    ours = read.under("shared_mlp")
    up, down = ours("input_linear.weight", 2 * width, hidden), ours("output_linear.weight", hidden, width)
    return Dense(maker.linear(up), maker.linear(down), SILU, maker.kernels)


def _granite_moe(maker: Maker, read: Reader, layer: int) -> Moe:
    spec, hidden = maker.config.moe, maker.config.hidden_size
    ours = read.under("block_sparse_moe")
    return Moe(
        spec=spec,
        router=maker.linear(ours("router.layer.weight", spec.experts, hidden)),
        bias=torch.zeros(spec.experts, device=maker.device),
        up=maker.matrix(ours("input_linear.weight", spec.experts, 2 * spec.width, hidden)),
        down=maker.matrix(ours("output_linear.weight", spec.experts, hidden, spec.width)),
        activation=SILU,
        kernels=maker.kernels,
        shared=_granite_shared(maker, read, layer),
    )


FAMILIES = {
    "granitemoehybrid": Family(
        _read_granite,
        mamba2,
        dense=_granite_shared,
        moe=_granite_moe,
        names=Names(linear="mamba", mlp=""),
        only={**ONLY, "position_embedding_type": (None, "rope", "nope"), "normalization_function": ("rmsnorm",)},
        about=About("Mamba-2", "GQA", "dense, with or without experts", ("granite-4.0-h-small",)),
    ),
}
