"""What several families took from DeepSeek: latent attention, a sigmoid router with groups, dense layers first."""

from typing import Any

import torch

from milepost.model.config import DENSE, MOE, SIGMOID, LatentSpec, LayerSpec, MoeSpec
from milepost.model.families.alike import rope
from milepost.model.families.fields import Fields
from milepost.model.mixers import AsBefore, Everything, Indexer, LatentAttention
from milepost.model.parts import Maker
from milepost.model.weights import Reader

_MLPS = {"dense": DENSE, "sparse": MOE}


def latent_attention(maker: Maker, read: Reader, index: int) -> LatentAttention:
    """Names as in DeepSeek's models. Rotary dimensions come in pairs; here they lie in two halves."""
    indexer, query, inputs = _indexer(maker, read.under("indexer"), index)
    spec, hidden = maker.config.attention, maker.config.hidden_size
    width = spec.heads * spec.key_dim
    if spec.q_rank:
        first = read("q_a_proj.weight", spec.q_rank, hidden)
        q = read("q_b_proj.weight", width, spec.q_rank)
    else:
        first = q = read("q_proj.weight", width, hidden)
    kv = read("kv_a_proj_with_mqa.weight", spec.rank + spec.rope, hidden)
    if spec.rotary_dim:
        order = torch.arange(spec.rope).view(-1, 2).t().flatten()
        q = q.unflatten(0, (spec.heads, -1))
        q = torch.cat((q[:, : spec.nope], q[:, spec.nope :][:, order]), 1).flatten(0, 1)
        kv = torch.cat((kv[: spec.rank], kv[spec.rank :][order]))
        first = first if spec.q_rank else q
    expand = read("kv_b_proj.weight", spec.heads * (spec.nope + spec.value_dim), spec.rank)
    gate = [read("g_proj.weight", spec.heads, hidden)] if spec.gated else []
    return LatentAttention(
        spec=spec,
        index=index,
        projection=maker.linear(first, kv, *gate, *inputs),
        q_norm=maker.norm(read("q_a_layernorm.weight", spec.q_rank)) if spec.q_rank else None,
        q_up=maker.linear(q, *query) if spec.q_rank else None,
        norm=maker.norm(read("kv_a_layernorm.weight", spec.rank)),
        expand=maker.matrix(expand.unflatten(0, (spec.heads, -1))),
        output=maker.linear(read("o_proj.weight", hidden, spec.heads * spec.value_dim)),
        kernels=maker.kernels,
        indexer=indexer,
    )


def _indexer(maker: Maker, read: Reader, index: int) -> tuple[Any, list[torch.Tensor], list[torch.Tensor]]:
    """(indexer, what makes its query of the low-rank q, what makes its inputs)."""
    spec, hidden = maker.config.attention.index, maker.config.hidden_size
    if spec is None or index in spec.shared:
        return Everything() if spec is None else AsBefore(), [], []
    query = read("wq_b.weight", spec.heads * spec.dim, maker.config.attention.q_rank)
    key = read("wk.weight", spec.dim, hidden)
    gate = read("index_kpool_compress_gate", spec.dim, hidden)
    weights = read("weights_proj.weight", spec.heads, hidden)
    indexer = Indexer(
        spec=spec,
        norm=maker.vector(read("k_norm.weight", spec.dim)),
        bias=maker.vector(read("k_norm.bias", spec.dim)),
        place=maker.vector(read("index_kpool_compress_ape", spec.group, spec.dim)),
        kernels=maker.kernels,
    )
    return indexer, [query], [key, gate, weights]


def sigmoid_moe(fields: Fields, scale: float = 1.0, **more) -> MoeSpec:
    """A sigmoid router with a bias for the choice, and groups; field names differ a little between families."""
    experts = fields.size(fields.first("num_experts", "n_routed_experts", "num_local_experts"))
    groups = fields.size(fields.first("num_expert_group", "n_group"), 1)
    fields.only("topk_method", "noaux_tc")
    width = fields.size("moe_intermediate_size")
    shared = fields.size(fields.first("num_shared_experts", "n_shared_experts"), 1, least=0)
    spec = MoeSpec(
        experts=experts,
        per_token=fields.size(fields.first("num_experts_per_token", "num_experts_per_tok")),
        width=width,
        **{"shared_width": shared * width, **more},
        normalize=fields.flag(fields.first("moe_renormalize", "norm_topk_prob"), True),
        scoring=SIGMOID,
        biased=True,
        groups=groups,
        groups_kept=fields.size("topk_group", groups),
        scale=fields.number("routed_scaling_factor", scale),
        epsilon=1e-20,
        wide_router=True,
    )
    if experts % groups or experts // groups < 2 or not spec.per_token <= experts // groups * spec.groups_kept:
        raise fields.refuse("topk_group", "groups of at least two experts, enough of them for those chosen")
    return spec


def latent_spec(fields: Fields, rotary: bool, **more) -> LatentSpec:
    heads = fields.size("num_attention_heads")
    fields.only("num_key_value_heads", heads)
    width = fields.size("qk_rope_head_dim", least=int(rotary))
    rotary_dim, theta = rope(fields, width, theta=6e6) if rotary else (0, 1.0)
    spec = LatentSpec(
        heads=heads,
        rank=fields.size("kv_lora_rank"),
        rope=width,
        nope=fields.size("qk_nope_head_dim"),
        value_dim=fields.size("v_head_dim"),
        q_rank=fields.size("q_lora_rank", 0, least=0),
        rotary_dim=rotary_dim,
        rope_theta=theta,
        gated=rotary,
        **more,
    )
    fields.ignore("qk_head_dim", "head_dim")
    return spec


def mlp_kinds(fields: Fields, first_dense: int) -> list[str]:
    count, dense = fields.size("num_hidden_layers"), fields.size("first_k_dense_replace", first_dense, least=0)
    fields.only("moe_layer_freq", 1)
    listed = fields.get("mlp_layer_types", ["dense" if i < dense else "sparse" for i in range(count)])
    if len(listed) != count or not set(listed) <= set(_MLPS):
        raise fields.refuse("mlp_layer_types", f"{count} of dense and sparse")
    return [_MLPS[kind] for kind in listed]


def both(mixers: list[str], mlps: list[str]) -> list[LayerSpec]:
    return [LayerSpec(mixer, mlp) for mixer, mlp in zip(mixers, mlps, strict=True)]
