"""Olmo hybrid: Gated DeltaNet with eigenvalues down to -1, and attention whose norms come after it."""

from dataclasses import replace

import torch

from milepost.model.config import ATTENTION, DENSE, LayerSpec, ModelConfig
from milepost.model.families.alike import layer_kinds, plain_attention, rope, whole_model
from milepost.model.families.family import About, Family, Names
from milepost.model.families.fields import Fields
from milepost.model.families.qwen import delta_spec, gated_delta
from milepost.model.mixers import GatedDelta
from milepost.model.parts import Maker
from milepost.model.weights import Reader

_EPS = 1e-5  # of the gated norm, whatever the config says of the others


def _separate(maker: Maker, read: Reader, index: int) -> GatedDelta:
    spec, hidden = maker.config.linear, maker.config.hidden_size
    widths = {"q": spec.key_width, "k": spec.key_width, "v": spec.value_width}
    sizes = {**widths, "g": spec.value_width, "b": spec.value_heads, "a": spec.value_heads}
    merged = torch.cat([read(f"{name}_proj.weight", size, hidden) for name, size in sizes.items()])
    conv = torch.cat([read(f"{name}_conv1d.weight", size, 1, spec.kernel) for name, size in widths.items()])
    mixer = gated_delta(maker, read, index, merged, conv, output="o_proj.weight", norm="o_norm.weight")
    return replace(mixer, eps=_EPS)


def _read(fields: Fields) -> ModelConfig:
    count = fields.size("num_hidden_layers")
    listed = ["full_attention" if i % 4 == 3 else "linear_attention" for i in range(count)]
    mixers = layer_kinds(fields, listed)
    attention = plain_attention(fields)
    for name in ("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim"):
        fields.size(name)  # these have other defaults here; configs say them
    theta = (fields.get("rope_parameters") or {}).get("rope_theta", fields.get("rope_theta"))
    rotary = rope(fields, attention.head_dim) if theta is not None else (0, 1.0)
    return whole_model(
        fields,
        [LayerSpec(mixer, DENSE, post_norm=mixer == ATTENTION) for mixer in mixers],
        linear=delta_spec(fields, beta_scale=2.0 if fields.flag("linear_allow_neg_eigval", True) else 1.0),
        attention=plain_attention(fields, rotary, normed=True, wide_norms=True),
    )


_RENAMES = (("attention_layer_norm", "input_layernorm"), ("feedforward_layer_norm", "post_attention_layernorm"))

_ABOUT = About(
    "Gated DeltaNet", "GQA", "dense", ("olmo-hybrid-7b",), ("heads and widths of the linear layers said in the config",)
)

FAMILIES = {"olmo_hybrid": Family(_read, _separate, names=Names(), renames=_RENAMES, about=_ABOUT)}
