"""Mamba-2 as Nemotron-H, Granite, Bamba and Falcon-H1 store it: what their modules share."""

from typing import Any

import torch

from milepost.model.config import NO_NORM, ScanSpec
from milepost.model.families.fields import Fields
from milepost.model.mixers import Scan
from milepost.model.parts import Maker, scaled
from milepost.model.weights import Reader

ONLY = {
    **dict.fromkeys(("mamba_proj_bias", "use_bias", "projectors_bias"), (False,)),
    "mamba_hidden_act": ("silu",),
}


def mamba2(maker: Maker, read: Reader, index: int) -> Scan:
    """The files have in_proj [z | v | k | q | step] and a convolution over [v | k | q], in Mamba's words x, B, C."""
    config = maker.config
    spec, hidden, width = config.linear, config.hidden_size, config.linear.value_width
    sizes = width, width, spec.key_width, spec.key_width, spec.value_heads
    z, v, k, q, step = read("in_proj.weight", sum(sizes), hidden).split(sizes)
    of_z, of_v, of_k, of_q, of_step, of_output = spec.scales

    def reordered(tensor: torch.Tensor) -> torch.Tensor:
        return torch.cat(tuple(reversed(tensor.split(sizes[1:4]))))

    conv = read("conv1d.weight", spec.channels, 1, spec.kernel)
    bias = read("conv1d.bias", spec.channels) if read.has("conv1d.bias") else torch.zeros(spec.channels)
    norm = torch.ones(width) if spec.norm == NO_NORM else read("norm.weight", width)
    return Scan(
        spec=spec,
        index=index,
        eps=config.rms_norm_eps,
        projection=maker.linear(
            scaled(q, of_q), scaled(k, of_k), scaled(v, of_v), scaled(z, of_z), scaled(step, of_step)
        ),
        output=maker.linear(scaled(read("out_proj.weight", hidden, width), of_output)),
        conv_weight=maker.vector(reordered(conv)[:, 0].t()),
        conv_bias=maker.vector(reordered(bias)),
        rate=maker.vector(read("A_log", spec.value_heads)).exp(),
        dt_bias=maker.vector(read("dt_bias", spec.value_heads)),
        skip=maker.vector(read("D", spec.value_heads)),
        norm=maker.vector(norm),
        kernels=maker.kernels,
    )


def scan_spec(fields: Fields, **more: Any) -> ScanSpec:
    """Sizes of the mixer; Nemotron-H has other names for them."""
    heads = fields.size(fields.first("mamba_n_heads", "mamba_num_heads"))
    name = fields.first("mamba_d_head", "mamba_head_dim")
    expanded = fields.size("mamba_expand", 2) * fields.size("hidden_size")
    inner = fields.size("mamba_d_ssm", expanded)
    dim = inner // heads if fields.get(name, "auto") == "auto" else fields.size(name)
    groups = fields.size(fields.first("mamba_n_groups", "n_groups"), 1)
    state = fields.size(fields.first("mamba_d_state", "ssm_state_size"))
    kernel = fields.size(fields.first("mamba_d_conv", "conv_kernel"), 4, least=2)
    if heads % groups:
        raise fields.refuse(fields.first("mamba_n_groups", "n_groups"), f"a divisor of the {heads} heads")
    fields.ignore("time_step_min")  # how biases were drawn; only Nemotron-H means more by it
    fields.get("mamba_conv_bias"), fields.get("use_conv_bias")  # the bias is in the file or not
    limit = fields.get("time_step_limit", [0.0, float("inf")])
    if list(limit) not in ([0.0, float("inf")], [0.0, {"__float__": "Infinity"}]):
        raise fields.refuse("time_step_limit", "0 to infinity")
    return ScanSpec(groups, heads, state, dim, kernel, **{"norm_groups": groups, **more})
