"""Nemotron-H: each layer is one half alone, Mamba-2, attention, an MLP or experts, with relu2."""

from milepost.model.config import ATTENTION, DENSE, LINEAR, MOE, NONE, RELU2, LayerSpec, ModelConfig
from milepost.model.families.alike import plain_attention, whole_model
from milepost.model.families.deepseek import sigmoid_moe
from milepost.model.families.family import About, Family, Names
from milepost.model.families.fields import Fields
from milepost.model.families.mamba2 import ONLY, mamba2, scan_spec

_NEMOTRON = {"linear_attention": LINEAR, "mamba": LINEAR, "full_attention": ATTENTION, "attention": ATTENTION}
_EXPERT_FIELDS = (
    *("n_routed_experts", "num_experts_per_tok", "n_shared_experts", "n_group", "topk_group", "norm_topk_prob"),
    *("routed_scaling_factor", "moe_intermediate_size", "moe_shared_expert_intermediate_size", "moe_latent_size"),
)
_LETTERS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}


def _read_nemotron(fields: Fields) -> ModelConfig:
    pattern = fields.get("hybrid_override_pattern", "")
    kinds = fields.get(fields.first("layers_block_type", "layer_types"), [_LETTERS.get(c, c) for c in pattern])
    known = {**{kind: LayerSpec(mixer, NONE) for kind, mixer in _NEMOTRON.items()}}
    known |= {"mlp": LayerSpec(NONE, DENSE), "moe": LayerSpec(NONE, MOE)}
    if not kinds or not set(kinds) <= set(known):
        raise fields.refuse("layers_block_type", f"a list of {', '.join(known)}")
    fields.only("attention_head_dim", fields.get("head_dim"))
    moe = None
    fields.ignore("num_hidden_layers", "expand", "mamba_expand")  # said by the list, and by heads times their width
    if "moe" in kinds:
        latent = fields.size("moe_latent_size", 0, least=0)
        moe = sigmoid_moe(fields, shared_width=fields.size("moe_shared_expert_intermediate_size"), latent=latent)
        fields.only("n_shared_experts", 1)
    else:
        fields.ignore(*_EXPERT_FIELDS)
    return whole_model(
        fields,
        [known[kind] for kind in kinds],
        # transformers clamps the step of a prefill only. Here decode does the same, or a resumed state would differ.
        linear=scan_spec(fields, step_floor=fields.number("time_step_min", 0.001)),
        attention=plain_attention(fields),
        moe=moe,
        activation=RELU2,
    )


_NEMOTRON_RENAMES = (("embeddings", "embed_tokens"), ("norm_f", "norm"), ("shared_experts", "shared_expert"))
_MIXER = Names(mixer_norm="norm", mlp_norm="norm", linear="mixer", attention="mixer", mlp="mixer")


_NEMOTRON_ONLY = {**ONLY, "mlp_hidden_act": ("relu2",)}
_ABOUT = About(
    "Mamba-2",
    "GQA, no positions",
    "dense or experts, relu2",
    ("nemotron-3-nano",),
    ("one shared expert, if any experts",),
)

FAMILIES = {
    "nemotron_h": Family(
        _read_nemotron, mamba2, names=_MIXER, renames=_NEMOTRON_RENAMES, only=_NEMOTRON_ONLY, about=_ABOUT
    )
}
