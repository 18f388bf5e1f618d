"""GLM-5.3-Flash (`glm5_next`), its text part: KDA, indexed latent attention, experts, several streams."""

import torch

from milepost.model.config import ATTENTION, SIGMOID, GatedDeltaSpec, IndexSpec, LayerSpec, ModelConfig, StreamsSpec
from milepost.model.families.alike import KINDS, layer_kinds, whole_model
from milepost.model.families.deepseek import both, latent_attention, latent_spec, mlp_kinds, sigmoid_moe
from milepost.model.families.family import About, Family, Names
from milepost.model.families.fields import Fields
from milepost.model.families.kimi import kda, kda_fields
from milepost.model.linear import Linear
from milepost.model.parts import Maker
from milepost.model.stream import HyperJoin
from milepost.model.weights import Reader


def _read(fields: Fields) -> ModelConfig:
    count = fields.size("num_hidden_layers")
    listed, sizes, said = kda_fields(fields)
    every_fourth = [list(KINDS)[i % 4 == 3] for i in range(count)]
    layers = layer_kinds(fields, listed or every_fourth, {**KINDS, "indexed_attention": ATTENTION})
    fields.only("qk_rope_head_dim", 0)
    fields.size("q_lora_rank")
    return whole_model(
        fields,
        both(layers, mlp_kinds(fields, 3)),
        linear=GatedDeltaSpec(*sizes, channel_gates=True, bound=_bound(fields, said), gate=SIGMOID),
        attention=latent_spec(
            fields, rotary=False, eps=fields.number("rms_norm_eps", 1e-5), index=_index(fields, layers)
        ),
        moe=sigmoid_moe(fields, scale=2.5),
        mlp_limit=fields.number("swiglu_limit", 10.0),
        streams=StreamsSpec(fields.size("hc_mult"), fields.size("hc_sinkhorn_iters"), fields.number("hc_eps", 1e-6)),
        eps=1e-5,
    )


def _bound(fields: Fields, said: Fields) -> float | None:
    """Null is no bound, a missing field is the usual one."""
    said.only("safe_gate", True)
    bound = said.get("gate_lower_bound", fields.get("linear_lower_bound"))
    if bound is None:
        return None if "linear_lower_bound" in fields.raw and not said.raw else -5.0
    if not isinstance(bound, int | float) or bound >= 0:
        raise fields.refuse("linear_lower_bound", "null or a number below 0")
    return float(bound)


def _index(fields: Fields, layers: list[str]) -> IndexSpec:
    fields.only("index_kpool_always_select_tail", True)
    fields.only("index_topk_freq", 1)
    fields.only("index_topk_pattern", None)
    fields.ignore("index_skip_topk_offset")
    group, most = fields.size("index_kpool"), fields.size("index_topk")
    if most % group:
        raise fields.refuse("index_topk", f"a multiple of index_kpool = {group}")
    return IndexSpec(
        heads=fields.size("index_n_heads"),
        dim=fields.size("index_head_dim"),
        group=group,
        kept=most // group,
        shared=_shared(fields, layers),
    )


def _shared(fields: Fields, layers: list[str]) -> tuple[int, ...]:
    """A choice is shared by the layer behind: further ones, or those behind a linear layer, would get none."""
    kinds = fields.get("indexer_types", ["full"] * len(layers))
    if len(kinds) != len(layers) or not set(kinds) <= {"full", "shared"}:
        raise fields.refuse("indexer_types", f"{len(layers)} of full and shared")
    attention = [i for i, layer in enumerate(layers) if layer == ATTENTION]
    shared = [i for i in attention if kinds[i] == "shared"]
    if any(i - 1 not in attention or i - 1 in shared for i in shared):
        raise fields.refuse("indexer_types", "shared right behind an attention layer that is full")
    return tuple(attention.index(i) for i in shared)


def _join(maker: Maker, read: Reader, names: Names, _layer: LayerSpec, which: int) -> HyperJoin:
    """The scales of the three parts are taken into the matrix."""
    count, hidden = maker.config.streams.count, maker.config.hidden_size
    prefix, sizes = ("hc_attn", "hc_ffn")[which], (count, count, count * count)
    mix, scale = read(f"{prefix}_fn", sum(sizes), count * hidden).float(), read(f"{prefix}_scale", 3).float()
    mix = torch.cat([part * factor for part, factor in zip(mix.split(sizes), scale, strict=True)])
    norm = read(f"{(names.mixer_norm, names.mlp_norm)[which]}.weight", hidden)
    bias = maker.vector(read(f"{prefix}_base", sum(sizes)))
    return HyperJoin(maker.norm(norm), Linear(maker.vector(mix)), bias)


_GLM = Family(
    _read,
    kda,
    latent_attention,
    join=_join,
    about=About("KDA", "MLA, no positions, indexed", "dense, then experts", ("glm-5.3-flash",)),
    names=Names(linear="self_attn"),
    renames=(("shared_experts", "shared_expert"),),
)

FAMILIES = {"glm5_next": _GLM, "glm5_next_text": _GLM}
