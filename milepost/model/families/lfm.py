"""LFM2: gated short convolutions with attention, dense or with experts."""

from milepost.model.config import ATTENTION, DENSE, LINEAR, MOE, SIGMOID, LayerSpec, ModelConfig, MoeSpec, ShortConvSpec
from milepost.model.families.alike import layer_kinds, plain_attention, rope, whole_model
from milepost.model.families.family import About, Family, Names
from milepost.model.families.fields import Fields
from milepost.model.mixers import ShortConv
from milepost.model.parts import Maker
from milepost.model.weights import Reader


def short_conv(maker: Maker, read: Reader, index: int) -> ShortConv:
    spec, hidden = maker.config.linear, maker.config.hidden_size
    return ShortConv(
        spec=spec,
        index=index,
        projection=maker.linear(read("in_proj.weight", 3 * spec.width, hidden)),
        output=maker.linear(read("out_proj.weight", hidden, spec.width)),
        conv_weight=maker.vector(read("conv.weight", spec.width, 1, spec.kernel)[:, 0].t()),
        kernels=maker.kernels,
    )


def _width(fields: Fields) -> int:
    """The MLP's width: what the config says, or two thirds of it rounded up to a multiple."""
    width = fields.size(fields.first("block_ff_dim", "intermediate_size"))
    multiple, factor = fields.size("block_multiple_of", 256), fields.number("block_ffn_dim_multiplier", 1.0)
    if not fields.flag("block_auto_adjust_ff_dim", True):
        return width
    return -(-int(factor * int(2 * width / 3)) // multiple) * multiple


def _moe(fields: Fields) -> MoeSpec:
    return MoeSpec(
        experts=fields.size("num_experts"),
        per_token=fields.size("num_experts_per_tok"),
        width=fields.size("moe_intermediate_size"),
        shared_width=0,
        normalize=fields.flag("norm_topk_prob", True),
        scoring=SIGMOID,
        biased=fields.flag("use_expert_bias", True),
        scale=fields.number("routed_scaling_factor", 1.0),
        epsilon=1e-6,
    )


def _read(fields: Fields) -> ModelConfig:
    for name in ("block_dim", "conv_dim", "conv_dim_out"):
        fields.only(name, fields.size("hidden_size"))
    fields.only("num_heads", fields.size("num_attention_heads"))
    fields.ignore("block_mlp_init_scale", "block_out_init_scale", "block_use_xavier_init", "conv_use_xavier_init")
    fields.ignore("block_norm_eps")  # norm_eps is what counts
    has_experts = fields.raw["model_type"] == "lfm2_moe"
    count = fields.size("num_hidden_layers")
    full = fields.get("full_attn_idxs", range(count))
    listed = None if has_experts else ["full_attention" if i in full else "conv" for i in range(count)]
    mixers = layer_kinds(fields, listed, {"conv": LINEAR, "full_attention": ATTENTION})
    dense = fields.size("num_dense_layers", 2, least=0) if has_experts else count
    dim = plain_attention(fields).head_dim
    return whole_model(
        fields,
        [LayerSpec(mixer, DENSE if i < dense else MOE) for i, mixer in enumerate(mixers)],
        linear=ShortConvSpec(fields.size("hidden_size"), fields.size("conv_L_cache", 3, least=2)),
        attention=plain_attention(fields, rope(fields, dim, theta=1e6), normed=True),
        moe=_moe(fields) if has_experts else None,
        intermediate_size=fields.size("intermediate_size") if has_experts else _width(fields),
        tied=True,
    )


_RENAMES = (
    ("operator_norm", "input_layernorm"),
    ("ffn_norm", "post_attention_layernorm"),
    ("embedding_norm", "norm"),
    ("feed_forward.expert_bias", "mlp.gate.e_score_correction_bias"),
    ("feed_forward", "mlp"),
    ("w1", "gate_proj"),
    ("w2", "down_proj"),
    ("w3", "up_proj"),
    ("self_attn.out_proj", "self_attn.o_proj"),
    ("q_layernorm", "q_norm"),
    ("k_layernorm", "k_norm"),
)

_ONLY = {"conv_bias": (False,), "block_use_swiglu": (True,), "use_pos_enc": (True,)}
_ABOUT = About("short convolution", "GQA", "dense, or dense, then experts", ("lfm2-1.2b", "lfm2-8b-a1b"))
_LFM = Family(_read, short_conv, names=Names(linear="conv"), renames=_RENAMES, only=_ONLY, about=_ABOUT)

FAMILIES = dict.fromkeys(("lfm2", "lfm2_moe"), _LFM)
