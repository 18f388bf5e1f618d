"""Lara mini: Gated DeltaNet, sliding windows with rotary positions, full attention without any; experts throughout."""

from milepost.model.config import MOE, WINDOW, LayerSpec, ModelConfig
from milepost.model.families.alike import KINDS, layer_kinds, plain_attention, rope, whole_model
from milepost.model.families.family import About, Family
from milepost.model.families.fields import Fields
from milepost.model.families.qwen import delta_spec, gated_delta, separate, shared_moe
from milepost.model.mixers import GatedDelta
from milepost.model.parts import Maker
from milepost.model.weights import Reader

_PERIOD = ("linear_attention", "sliding_attention", "linear_attention", "full_attention", "sliding_attention")
_REQUIRED = (  # missing ones mean other sizes here than in other families; configs say them
    "num_key_value_heads",
    "head_dim",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
)


def _delta(maker: Maker, read: Reader, index: int) -> GatedDelta:
    """Published files have the projections in one, rows [q | k | v | z | b | a]."""
    if not read.has("in_proj.weight"):
        return separate(maker, read, index)
    spec = maker.config.linear
    rows = spec.channels + spec.value_width + 2 * spec.value_heads
    projection = read("in_proj.weight", rows, maker.config.hidden_size)
    return gated_delta(maker, read, index, projection, read("conv1d.weight", spec.channels, 1, spec.kernel))


def _read(fields: Fields) -> ModelConfig:
    for name in _REQUIRED:
        fields.size(name)
    listed = [_PERIOD[i % len(_PERIOD)] for i in range(fields.size("num_hidden_layers"))]
    mixers = layer_kinds(fields, listed, {**KINDS, "sliding_attention": WINDOW})
    rotary, reach = rope(fields, fields.size("head_dim")), fields.size("sliding_window")
    return whole_model(
        fields,
        [LayerSpec(mixer, MOE) for mixer in mixers],
        linear=delta_spec(fields),
        attention=plain_attention(fields, normed=True),
        window=plain_attention(fields, rotary, normed=True, reach=reach),
        moe=shared_moe(fields, shared_gate=False, wide_router=True),
        tied=True,
    )


_ABOUT = About("Gated DeltaNet", "GQA, sliding windows", "experts", ("lara-4-mini",))
_RENAMES = (("linear_attn.out_norm", "linear_attn.norm"),)

FAMILIES = {"lara_mini": Family(_read, _delta, renames=_RENAMES, about=_ABOUT)}
