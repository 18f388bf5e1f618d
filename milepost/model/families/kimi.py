"""Kimi-Linear and Ling 3 (`bailing_hybrid`): KDA with latent attention, experts behind a sigmoid router."""

from functools import partial

import torch

from milepost.model.config import SIGMOID, GatedDeltaSpec, ModelConfig
from milepost.model.families.alike import KINDS, layer_kinds, whole_model
from milepost.model.families.deepseek import both, latent_attention, latent_spec, mlp_kinds, sigmoid_moe
from milepost.model.families.family import About, Family, Names
from milepost.model.families.fields import Fields
from milepost.model.mixers import GatedDelta
from milepost.model.parts import Maker
from milepost.model.weights import Reader


def kda(maker: Maker, read: Reader, index: int, bottleneck: bool = True, flat: bool = True) -> GatedDelta:
    """Separate projections; z and the decay through a bottleneck (g_a, g_b; f_a, f_b) or directly (g, f).

    flat: A_log is stored as a vector.
    """
    config = maker.config
    spec, hidden, width = config.linear, config.hidden_size, config.linear.key_width
    qkv = [read(f"{name}_proj.weight", width, hidden) for name in "qkv"]
    b = read("b_proj.weight", spec.value_heads, hidden)
    low = spec.value_dim if bottleneck else None
    if low is None:
        z, a = (read(f"{name}_proj.weight", width, hidden) for name in "gf")
        projection, low_rank = maker.linear(*qkv, z, b, a), None
    else:
        inward = [read(f"{name}_a_proj.weight", low, hidden) for name in "gf"]
        projection = maker.linear(*qkv, b, *inward)
        low_rank = tuple(maker.linear(read(f"{name}_b_proj.weight", width, low)) for name in "gf")
    rate = read("A_log", *((spec.value_heads,) if flat else (1, 1, spec.value_heads, 1)))
    conv = torch.cat([read(f"{name}_conv1d.weight", width, 1, spec.kernel) for name in "qkv"])
    return GatedDelta(
        spec=spec,
        index=index,
        eps=config.rms_norm_eps,
        projection=projection,
        output=maker.linear(read("o_proj.weight", hidden, width)),
        conv_weight=maker.vector(conv[:, 0].t()),
        conv_bias=torch.zeros(spec.channels, device=maker.device),
        rate=maker.vector(rate.flatten()).exp(),
        dt_bias=maker.vector(read("dt_bias", width)),
        norm=maker.vector(read("o_norm.weight", spec.value_dim)).repeat(spec.value_heads),
        kernels=maker.kernels,
        low_rank=low_rank,
    )


def kda_fields(fields: Fields) -> tuple[list[str] | None, tuple[int, int, int, int, int], Fields]:
    """(the mixers, if they are listed so, sizes for a GatedDeltaSpec, what else `linear_attn_config` says)."""
    said = fields.inner("linear_attn_config")
    full = said.get("full_attn_layers")  # counted from 1
    said.ignore("kda_layers")
    heads = said.size("num_heads", fields.get("linear_num_heads"))
    dim = said.size("head_dim", fields.get("linear_head_dim"))
    kernel = said.size("short_conv_kernel_size", fields.get("linear_conv_kernel_dim", 4), least=2)
    kinds, count = list(KINDS), fields.size("num_hidden_layers")
    listed = None if full is None else [kinds[i + 1 in full] for i in range(count)]
    return listed, (heads, heads, dim, dim, kernel), said


def _read_kimi(fields: Fields) -> ModelConfig:
    listed, sizes, said = kda_fields(fields)
    said.check_all_asked()
    fields.ignore("rope_theta", "rope_scaling")  # no layer has rotary positions
    return whole_model(
        fields,
        both(layer_kinds(fields, listed), mlp_kinds(fields, 1)),
        linear=GatedDeltaSpec(*sizes, channel_gates=True, gate=SIGMOID),
        attention=latent_spec(fields, rotary=False),
        moe=sigmoid_moe(fields),
    )


def _read_bailing(fields: Fields) -> ModelConfig:
    heads = fields.size("linear_num_heads", fields.size("num_attention_heads"))
    # transformers writes the rotary width as head_dim, and the heads' own as linear_head_dim.
    dim = fields.size(fields.first("linear_head_dim", "head_dim"), 128)
    kernel = fields.size(fields.first("short_conv_kernel_size", "linear_conv_kernel_dim"), least=2)
    safe, bound = fields.flag("kda_safe_gate", True), fields.get("kda_lower_bound", -5.0)
    if not isinstance(bound, int | float) or bound >= 0:
        raise fields.refuse("kda_lower_bound", "a number below 0")
    count, group = fields.size("num_hidden_layers"), fields.size("layer_group_size", 6)
    kinds = list(KINDS)
    return whole_model(
        fields,
        both(layer_kinds(fields, [kinds[(i + 1) % group == 0] for i in range(count)]), mlp_kinds(fields, 2)),
        linear=GatedDeltaSpec(
            heads, heads, dim, dim, kernel, channel_gates=True, bound=float(bound) if safe else None, gate=SIGMOID
        ),
        attention=latent_spec(fields, rotary=True),
        moe=sigmoid_moe(fields),
    )


_RENAMES = (
    ("block_sparse_moe", "mlp"),
    ("shared_experts", "shared_expert"),
    ("w1", "gate_proj"),
    ("w2", "down_proj"),
    ("w3", "up_proj"),
)
_BAILING = (
    ("attention", "self_attn"),
    ("dense", "o_proj"),
    ("word_embeddings", "embed_tokens"),
    ("expert_bias", "e_score_correction_bias"),
    ("shared_experts", "shared_expert"),
)
_NAMES = Names(linear="self_attn")
_KIMI_ONLY = {"mla_use_nope": (True,), "moe_router_activation_func": ("sigmoid",), "use_grouped_topk": (True,)}
_MLP = "dense, then experts"
_OF_KDA = ("short_conv_kernel_size of at least 2: Ling 2.5, which has Lightning layers, is refused",)
_ABOUT_KIMI = About("KDA", "MLA, no positions", _MLP, ("kimi-linear-48b",))
_ABOUT_BAILING = About("KDA", "MLA, gated", _MLP, ("ling-3.0-flash",), _OF_KDA)

FAMILIES = {
    "kimi_linear": Family(
        _read_kimi,
        partial(kda, flat=False),
        latent_attention,
        names=_NAMES,
        renames=_RENAMES,
        only=_KIMI_ONLY,
        about=_ABOUT_KIMI,
    ),
    "bailing_hybrid": Family(
        _read_bailing,
        partial(kda, bottleneck=False),
        latent_attention,
        names=_NAMES,
        renames=_BAILING,
        about=_ABOUT_BAILING,
    ),
}
