"""MiniMax-Text-01 and M1: Lightning attention with softmax attention, all layers with experts."""

import torch

from milepost.model.config import ATTENTION, LINEAR, MOE, NORM_FIRST, SIGMOID, LayerSpec, ModelConfig, MoeSpec, ScanSpec
from milepost.model.families.alike import KINDS, layer_kinds, plain_attention, rope, whole_model
from milepost.model.families.family import About, Family, Names
from milepost.model.families.fields import Fields
from milepost.model.mixers import Scan
from milepost.model.parts import Maker
from milepost.model.weights import Reader

_EPS = 1e-6  # of the norm inside the mixer, whatever the config says of the others


def lightning(maker: Maker, read: Reader, index: int) -> Scan:
    """The files interleave q, k and v head by head. Decays follow from the head and from the depth of the layer."""
    config = maker.config
    spec, hidden, width = config.linear, config.hidden_size, config.linear.value_width
    heads, layer = spec.value_heads, config.linear_layers[index]
    qkv = read("qkv_proj.weight", 3 * width, hidden).unflatten(0, (heads, 3, spec.value_dim))
    depth = 1 - layer / (len(config.layers) - 1 + 1e-5) + 1e-5
    rate = 2.0 ** (-8 / heads * (torch.arange(heads) + 1)) * depth
    return Scan(
        spec=spec,
        index=index,
        eps=_EPS,
        projection=maker.linear(
            *(part.flatten(0, 1) for part in qkv.unbind(1)), read("output_gate.weight", width, hidden)
        ),
        output=maker.linear(read("out_proj.weight", hidden, width)),
        conv_weight=torch.ones((1, spec.channels), device=maker.device),
        conv_bias=torch.zeros(spec.channels, device=maker.device),
        rate=maker.vector(rate),
        dt_bias=torch.zeros(heads, device=maker.device),
        skip=torch.zeros(heads, device=maker.device),
        norm=maker.vector(read("norm.weight", width)),
        kernels=maker.kernels,
    )


def _read(fields: Fields) -> ModelConfig:
    flags = fields.get("attn_type_list")  # 1: softmax attention
    count = fields.size("num_hidden_layers")
    kinds = list(KINDS)
    listed = [kinds[bool(flag)] for flag in flags] if flags else [kinds[(i + 1) % 2] for i in range(count)]
    mixers = layer_kinds(fields, listed)
    attention = plain_attention(fields)
    heads, dim = attention.heads, attention.head_dim
    fields.only("rotary_dim", dim)  # transformers turns all of a head, whatever this field says

    def factors(name: str) -> tuple[float, float]:
        return fields.number(f"{name}_alpha_factor", 1.0), fields.number(f"{name}_beta_factor", 1.0)

    of_mixer, of_mlp = {LINEAR: factors("linear_attn"), ATTENTION: factors("full_attn")}, factors("mlp")
    return whole_model(
        fields,
        [
            LayerSpec(mixer, MOE, scales=(of_mixer[mixer][1], of_mlp[1]), restarts=(of_mixer[mixer][0], of_mlp[0]))
            for mixer in mixers
        ],
        linear=ScanSpec(heads, heads, dim, dim, 1, timed=False, norm=NORM_FIRST, gate=SIGMOID),
        attention=plain_attention(fields, rope(fields, dim, theta=1e6)),
        moe=MoeSpec(
            experts=fields.size(fields.first("num_local_experts", "num_experts")),
            per_token=fields.size("num_experts_per_tok"),
            width=fields.size("intermediate_size"),
            shared_width=0,
            normalize=True,
        ),
    )


_RENAMES = (("block_sparse_moe", "mlp"), ("w1", "gate_proj"), ("w2", "down_proj"), ("w3", "up_proj"))
_DERIVED = ("slope_rate", "query_decay", "key_decay", "diagonal_decay")

_ABOUT = About("Lightning", "GQA", "experts", ("minimax-text-01",), ("rotary_dim, if said, equal to head_dim",))

FAMILIES = {
    "minimax": Family(
        _read, lightning, names=Names(linear="self_attn"), renames=_RENAMES, ignored=_DERIVED, about=_ABOUT
    ),
}
