"""Qwen3-Next and Qwen3.5: Gated DeltaNet with gated attention, dense or with experts."""

import torch

from milepost.model.config import DENSE, MOE, AttentionSpec, GatedDeltaSpec, LayerSpec, ModelConfig, MoeSpec
from milepost.model.families.alike import heads, layer_kinds, rope, whole_model
from milepost.model.families.family import About, Family
from milepost.model.families.fields import Fields
from milepost.model.mixers import GatedDelta
from milepost.model.parts import Maker, Tensor
from milepost.model.weights import Reader


def delta_spec(fields: Fields, **more) -> GatedDeltaSpec:
    """A Gated DeltaNet mixer by the fields most families have."""
    spec = GatedDeltaSpec(
        key_heads=fields.size("linear_num_key_heads", 16),
        value_heads=fields.size("linear_num_value_heads", 32),
        key_dim=fields.size("linear_key_head_dim", 128),
        value_dim=fields.size("linear_value_head_dim", 128),
        kernel=fields.size("linear_conv_kernel_dim", 4),
        **more,
    )
    if spec.value_heads % spec.key_heads:
        raise fields.refuse("linear_num_value_heads", f"a multiple of linear_num_key_heads = {spec.key_heads}")
    if spec.kernel < 2:
        raise fields.refuse("linear_conv_kernel_dim", "at least 2")
    return spec


def gated_delta(maker: Maker, read: Reader, index: int, projection: Tensor, conv: Tensor, **names: str) -> GatedDelta:
    """A Gated DeltaNet mixer of a merged projection [q | k | v | z | b | a, hidden] and a convolution."""
    config = maker.config
    spec = config.linear
    return GatedDelta(
        spec=spec,
        index=index,
        eps=config.rms_norm_eps,
        projection=maker.linear(projection),
        output=maker.linear(read(names.get("output", "out_proj.weight"), config.hidden_size, spec.value_width)),
        conv_weight=maker.vector(conv[:, 0].t()),
        conv_bias=torch.zeros(spec.channels, device=maker.device),
        rate=maker.vector(read("A_log", spec.value_heads)).exp(),
        dt_bias=maker.vector(read("dt_bias", spec.gates)),
        norm=maker.vector(read(names.get("norm", "norm.weight"), spec.value_dim)).repeat(spec.value_heads),
        kernels=maker.kernels,
    )


def separate(maker: Maker, read: Reader, index: int) -> GatedDelta:
    """The projections one by one, as transformers has them."""
    spec, hidden = maker.config.linear, maker.config.hidden_size
    sizes = {"qkv": spec.channels, "z": spec.value_width, "b": spec.value_heads, "a": spec.value_heads}
    merged = torch.cat([read(f"in_proj_{part}.weight", size, hidden) for part, size in sizes.items()])
    return gated_delta(maker, read, index, merged, read("conv1d.weight", spec.channels, 1, spec.kernel))


def _per_key_head(maker: Maker, read: Reader, index: int) -> GatedDelta:
    """For each key head: its q and k, then v and z (likewise b and a) of the value heads it serves."""
    spec, hidden = maker.config.linear, maker.config.hidden_size
    values = spec.value_width // spec.key_heads
    qkvz = read("in_proj_qkvz.weight", spec.channels + spec.value_width, hidden).unflatten(0, (spec.key_heads, -1))
    ba = read("in_proj_ba.weight", 2 * spec.value_heads, hidden).unflatten(0, (spec.key_heads, 2, -1))
    parts = (*qkvz.split((spec.key_dim, spec.key_dim, values, values), 1), *ba.unbind(1))
    merged = torch.cat([part.flatten(0, 1) for part in parts])
    return gated_delta(maker, read, index, merged, read("conv1d.weight", spec.channels, 1, spec.kernel))


def shared_moe(fields: Fields, **more) -> MoeSpec:
    spec = MoeSpec(
        experts=fields.size("num_experts"),
        per_token=fields.size("num_experts_per_tok"),
        width=fields.size("moe_intermediate_size"),
        shared_width=fields.size("shared_expert_intermediate_size"),
        normalize=fields.flag("norm_topk_prob", True),
        **{"shared_gate": True, **more},
    )
    if spec.per_token > spec.experts:
        raise fields.refuse("num_experts_per_tok", f"at most num_experts = {spec.experts}")
    return spec


def _mlps(fields: Fields, layers: int) -> list[str]:
    """Whether a layer's MLP is dense or has experts; each model_type has its own rule."""
    fields.ignore("moe_intermediate_size", "num_experts_per_tok", "shared_expert_intermediate_size")
    if fields.raw["model_type"] == "qwen3_next":
        dense, step = set(fields.get("mlp_only_layers", ())), fields.size("decoder_sparse_step", 1)
        has_experts = bool(fields.get("num_experts", 512))
        return [MOE if has_experts and i not in dense and (i + 1) % step == 0 else DENSE for i in range(layers)]
    fields.ignore("num_experts", "decoder_sparse_step", "mlp_only_layers")
    if "moe" in fields.raw["model_type"]:
        fields.only("norm_topk_prob", True)
        return [MOE] * layers
    fields.ignore("norm_topk_prob")
    return [DENSE] * layers


def _read(fields: Fields) -> ModelConfig:
    count, interval = fields.size("num_hidden_layers"), fields.size("full_attention_interval", 4)
    period = ["linear_attention" if (i + 1) % interval else "full_attention" for i in range(count)]
    mixers = layer_kinds(fields, period)
    mlps = _mlps(fields, count)
    sizes = heads(fields, 256)
    return whole_model(
        fields,
        [LayerSpec(mixer, mlp) for mixer, mlp in zip(mixers, mlps, strict=True)],
        linear=delta_spec(fields),
        attention=AttentionSpec(*sizes, *rope(fields, sizes[2], 0.25)),
        moe=shared_moe(fields) if MOE in mlps else None,
    )


_ONLY = {"attn_output_gate": (True,)}
_DENSE_OR_MOE = About("Gated DeltaNet", "GQA, gated", "dense or experts", ("qwen3.5-9b", "qwen3.5-35b"))
_NEXT = About("Gated DeltaNet", "GQA, gated", "experts, some dense", ("qwen3-next-80b",))
_SEPARATE = Family(_read, separate, offset=1.0, only=_ONLY, about=_DENSE_OR_MOE)

FAMILIES = {
    **dict.fromkeys(("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"), _SEPARATE),
    "qwen3_next": Family(_read, _per_key_head, offset=1.0, only=_ONLY, about=_NEXT),
}
