"""How each model family names and lays out its tensors, as data; and the one layout the layers use.

Names here are canonical: `model.` before the decoder's tensors. `canonical` maps what a file says to that.
A family that lays out a mixer in another way is one more entry in the tables below.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from milepost.model.config import DENSE, GATED_DELTA, GatedDeltaSpec, ModelConfig

Tensor = torch.Tensor
Read = Callable[[str], Tensor]
Shape = tuple[int, ...]

# Tensors of parts that are not served: multi-token prediction and vision towers.
_IGNORED = ("mtp.", "model.mtp.", "visual.", "model.visual.", "vision_tower.")
_PREFIXES = {
    "model.language_model.": "model.",
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
}


@dataclass(frozen=True, slots=True)
class DeltaLayout:
    """How a family stores a Gated DeltaNet mixer's input projections."""

    shapes: Callable[[GatedDeltaSpec, int], dict[str, Shape]]  # (spec, hidden size) -> name -> shape
    merge: Callable[[GatedDeltaSpec, Read], Tensor]  # reads them and returns [q | k | v | z | b | a, hidden]


def _separate_shapes(spec: GatedDeltaSpec, hidden: int) -> dict[str, Shape]:
    return {
        "in_proj_qkv.weight": (spec.channels, hidden),
        "in_proj_z.weight": (spec.value_width, hidden),
        "in_proj_b.weight": (spec.value_heads, hidden),
        "in_proj_a.weight": (spec.value_heads, hidden),
    }


def _separate_merge(_spec: GatedDeltaSpec, read: Read) -> Tensor:
    return torch.cat([read(f"in_proj_{part}.weight") for part in ("qkv", "z", "b", "a")])


def _per_key_head_shapes(spec: GatedDeltaSpec, hidden: int) -> dict[str, Shape]:
    return {
        "in_proj_qkvz.weight": (spec.channels + spec.value_width, hidden),
        "in_proj_ba.weight": (2 * spec.value_heads, hidden),
    }


def _per_key_head_merge(spec: GatedDeltaSpec, read: Read) -> Tensor:
    """For each key head: its q and k, then v and z (likewise b and a) of the value heads it serves."""
    values = spec.value_width // spec.key_heads
    qkvz = read("in_proj_qkvz.weight").unflatten(0, (spec.key_heads, -1))
    ba = read("in_proj_ba.weight").unflatten(0, (spec.key_heads, 2, -1))
    parts = (*qkvz.split((spec.key_dim, spec.key_dim, values, values), 1), *ba.unbind(1))
    return torch.cat([part.flatten(0, 1) for part in parts])


_SEPARATE = DeltaLayout(_separate_shapes, _separate_merge)
_PER_KEY_HEAD = DeltaLayout(_per_key_head_shapes, _per_key_head_merge)

DELTA_LAYOUTS: Mapping[str, DeltaLayout] = {
    "qwen3_5": _SEPARATE,
    "qwen3_5_text": _SEPARATE,
    "qwen3_5_moe": _SEPARATE,
    "qwen3_5_moe_text": _SEPARATE,
    "qwen3_next": _PER_KEY_HEAD,
}


def canonical(name: str) -> str | None:
    """The canonical name of a tensor in a file, or None if it belongs to a part that is not served."""
    if name.startswith(_IGNORED):
        return None
    for prefix, replacement in _PREFIXES.items():
        if name.startswith(prefix):
            return replacement + name.removeprefix(prefix)
    return name


def expected_tensors(config: ModelConfig, fused_experts: Callable[[int], bool]) -> dict[str, Shape]:
    """Canonical name and shape of every tensor of a model.

    fused_experts(layer): whether that layer's experts are stored as one tensor rather than one by one.
    """
    hidden = config.hidden_size
    shapes: dict[str, Shape] = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    for i, layer in enumerate(config.layers):
        mixer = _delta_shapes(config) if layer.mixer == GATED_DELTA else _attention_shapes(config)
        mlp = (
            _mlp_shapes(hidden, config.intermediate_size)
            if layer.mlp == DENSE
            else _moe_shapes(config, fused_experts(i))
        )
        norms = {"input_layernorm.weight": (hidden,), "post_attention_layernorm.weight": (hidden,)}
        parts = {
            **norms,
            **{f"{mixer_name(layer.mixer)}.{name}": shape for name, shape in mixer.items()},
            **{f"mlp.{name}": shape for name, shape in mlp.items()},
        }
        shapes.update({f"model.layers.{i}.{name}": shape for name, shape in parts.items()})
    return shapes


def mixer_name(mixer: str) -> str:
    """What a layer calls its mixer."""
    return "linear_attn" if mixer == GATED_DELTA else "self_attn"


def _delta_shapes(config: ModelConfig) -> dict[str, Shape]:
    spec = config.linear
    assert spec is not None
    return {
        **DELTA_LAYOUTS[config.model_type].shapes(spec, config.hidden_size),
        "conv1d.weight": (spec.channels, 1, spec.kernel),
        "A_log": (spec.value_heads,),
        "dt_bias": (spec.value_heads,),
        "norm.weight": (spec.value_dim,),
        "out_proj.weight": (config.hidden_size, spec.value_width),
    }


def _attention_shapes(config: ModelConfig) -> dict[str, Shape]:
    spec = config.attention
    assert spec is not None
    width, kv_width = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    return {
        "q_proj.weight": (2 * width, config.hidden_size),
        "k_proj.weight": (kv_width, config.hidden_size),
        "v_proj.weight": (kv_width, config.hidden_size),
        "o_proj.weight": (config.hidden_size, width),
        "q_norm.weight": (spec.head_dim,),
        "k_norm.weight": (spec.head_dim,),
    }


def _mlp_shapes(hidden: int, width: int) -> dict[str, Shape]:
    return {
        "gate_proj.weight": (width, hidden),
        "up_proj.weight": (width, hidden),
        "down_proj.weight": (hidden, width),
    }


def _moe_shapes(config: ModelConfig, fused: bool) -> dict[str, Shape]:
    spec, hidden = config.moe, config.hidden_size
    assert spec is not None
    shapes: dict[str, Shape] = {
        "gate.weight": (spec.experts, hidden),
        "shared_expert_gate.weight": (1, hidden),
        **{f"shared_expert.{name}": shape for name, shape in _mlp_shapes(hidden, spec.shared_width).items()},
    }
    if fused:
        shapes["experts.gate_up_proj"] = (spec.experts, 2 * spec.width, hidden)
        shapes["experts.down_proj"] = (spec.experts, hidden, spec.width)
    else:
        for e in range(spec.experts):
            shapes.update({f"experts.{e}.{name}": shape for name, shape in _mlp_shapes(hidden, spec.width).items()})
    return shapes


def merge_attention(config: ModelConfig, read: Read) -> Tensor:
    """[q | gate | k | v, hidden]; the files interleave q and gate head by head."""
    spec = config.attention
    assert spec is not None
    q, gate = read("q_proj.weight").unflatten(0, (spec.heads, 2, spec.head_dim)).unbind(1)
    return torch.cat([q.flatten(0, 1), gate.flatten(0, 1), read("k_proj.weight"), read("v_proj.weight")])
