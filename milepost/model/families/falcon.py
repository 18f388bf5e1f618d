"""Bamba, with Mamba-2 or attention in a layer, and Falcon-H1, with both side by side in each."""

from milepost.model.config import (
    ATTENTION,
    BOTH,
    DENSE,
    GATE_FIRST,
    LINEAR,
    NO_NORM,
    NORM_FIRST,
    LayerSpec,
    ModelConfig,
)
from milepost.model.families.alike import plain_attention, rope, whole_model
from milepost.model.families.family import About, Family, Names
from milepost.model.families.fields import Fields
from milepost.model.families.mamba2 import ONLY, mamba2, scan_spec


def _read_bamba(fields: Fields) -> ModelConfig:
    chosen = fields.get("attn_layer_indices", ())
    layers = [ATTENTION if i in chosen else LINEAR for i in range(fields.size("num_hidden_layers"))]
    attention = plain_attention(fields)
    return whole_model(
        fields,
        [LayerSpec(mixer, DENSE) for mixer in layers],
        linear=scan_spec(fields),
        attention=plain_attention(fields, rope(fields, attention.head_dim, 0.5)),
    )


def _read_falcon(fields: Fields) -> ModelConfig:
    fields.ignore("mlp_expansion_factor")
    normed, first = fields.flag("mamba_rms_norm", False), fields.flag("mamba_norm_before_gate", True)
    inward, outward = fields.number("ssm_in_multiplier", 1.0), fields.number("ssm_out_multiplier", 1.0)
    inside = fields.get("ssm_multipliers", [1.0] * 5)
    into, key, out = (fields.number(f"{name}_multiplier", 1.0) for name in ("attention_in", "key", "attention_out"))
    of_mlp = fields.get("mlp_multipliers", [1.0, 1.0])
    for name, values, count in (("ssm_multipliers", inside, 5), ("mlp_multipliers", of_mlp, 2)):
        if not isinstance(values, list) or len(values) != count:
            raise fields.refuse(name, f"{count} numbers")
    return whole_model(
        fields,
        [LayerSpec(BOTH, DENSE)] * fields.size("num_hidden_layers"),
        linear=scan_spec(
            fields,
            norm=(NORM_FIRST if first else GATE_FIRST) if normed else NO_NORM,
            scales=(*(inward * scale for scale in inside), outward),
        ),
        attention=plain_attention(
            fields, rope(fields, plain_attention(fields).head_dim), scales=(into, into * key, into, out)
        ),
        embedding_scale=fields.number("embedding_multiplier", 1.0),
        logit_scale=fields.number("lm_head_multiplier", 1.0),
        mlp_scales=tuple(of_mlp),
    )


_FEED_FORWARD = (("feed_forward", "mlp"), ("pre_ff_layernorm", "post_attention_layernorm"), ("final_layernorm", "norm"))

FAMILIES = {
    "bamba": Family(
        _read_bamba,
        mamba2,
        names=Names(linear="mamba"),
        renames=_FEED_FORWARD,
        only=ONLY,
        about=About("Mamba-2", "GQA", "dense", ("bamba-9b",)),
    ),
    "falcon_h1": Family(
        _read_falcon,
        mamba2,
        names=Names(linear="mamba"),
        renames=_FEED_FORWARD,
        only={**ONLY, "mamba_use_mlp": (True,)},
        about=About("Mamba-2", "GQA, side by side", "dense", ("falcon-h1-7b",)),
    ),
}
