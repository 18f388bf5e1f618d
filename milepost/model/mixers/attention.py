"""Attention: grouped queries; as the model has it RMSNorm on q and k, partial rotary, a sigmoid output gate.

KV is read from the rows a span names, in any order and anywhere in the pool. Full attention and sliding windows differ
in the pool and the view of the batch that they work on.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from milepost.model.config import AttentionSpec
from milepost.model.kernels.plain import Kernels, rms_norm, split_attention
from milepost.model.linear import Linear
from milepost.model.memory import Memory
from milepost.model.work import PrefillSpan, View, Work

Tensor = torch.Tensor


@dataclass
class Attention:
    """Weights: projection [q | gate | k | v, hidden], output [hidden, q], norms float32 as they multiply.

    Norms over all heads at once are applied here; the kernels see the result as if there were none.
    """

    spec: AttentionSpec
    kind: str  # ATTENTION or WINDOW: the pool and the view it works on
    index: int  # of this layer among those of its kind
    eps: float
    projection: Linear
    output: Linear
    q_norm: Tensor | None
    k_norm: Tensor | None
    kernels: Kernels

    def forward(self, x: Tensor, work: Work, memory: Memory) -> Tensor:
        projected = self.projection(x)
        if self.spec.wide_norms:
            projected = self._wide_norms(projected)
        out = projected.new_zeros((len(x), self.spec.heads * self.spec.head_dim))
        view = work.views[self.kind]
        keys, values = (pool[self.index] for pool in memory.kv[self.kind])
        begin = view.count
        if view.spans:
            self._prefill(projected[:begin], view, keys, values, out[:begin])
        if view.decode is not None:
            end = begin + view.decode.count
            self.kernels.attention_step(self, projected[begin:end], view.decode, keys, values, out[begin:end])
        return self.output(out)

    def _prefill(self, projected: Tensor, view: View, keys: Tensor, values: Tensor, out: Tensor) -> None:
        q, gate, k, v = split_attention(self, projected, view.cos[: view.count], view.sin[: view.count])
        dtype = projected.dtype
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
        keys[view.target] = k[view.source].to(keys.dtype)
        values[view.target] = v[view.source].to(values.dtype)
        for span in view.spans:
            own = slice(span.first, span.first + span.length)
            if span.gather is None:
                o = attend(q[own], k[own], v[own], span)
            else:
                o = attend(q[own], keys[span.gather].to(dtype), values[span.gather].to(dtype), span)
            out[own] = o.flatten(1) if gate is None else (o.flatten(1) * gate[own]).to(dtype)

    def _wide_norms(self, projected: Tensor) -> Tensor:
        assert not self.spec.gated
        width, kv_width = self.spec.heads * self.spec.head_dim, self.spec.kv_heads * self.spec.head_dim
        q, k, v = projected.split((width, kv_width, kv_width), -1)
        q, k = (rms_norm(t, norm, self.eps).to(v.dtype) for t, norm in ((q, self.q_norm), (k, self.k_norm)))
        return torch.cat((q, k, v), -1)


def attend(q: Tensor, k: Tensor, v: Tensor, span: PrefillSpan) -> Tensor:
    """Attention of a span to itself and to what it sees of what came before.

    q [queries, heads, dim], k, v [keys, kv heads, dim]; the last key is the last query's own.
    """
    parts = [_scaled_dot(q[queries], k[keys], v[keys], mask) for queries, keys, mask in span.parts()]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _scaled_dot(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """softmax(q k^T / sqrt(dim)) v ; q [queries, heads, dim], k, v [keys, kv heads, dim]; causal without a mask."""
    group = q.shape[1] // k.shape[1]
    if group > 1:
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    q, k, v = (t.transpose(0, 1)[None] for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)[0].transpose(0, 1)
