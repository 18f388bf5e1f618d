"""Full attention: grouped queries; as the model has it RMSNorm on q and k, partial rotary, a sigmoid output gate.

KV is read from the rows a span names, in any order and anywhere in the pool.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from milepost.model.config import AttentionSpec
from milepost.model.kernels import Kernels, rms_norm, split_attention
from milepost.model.linear import Linear
from milepost.model.memory import Memory
from milepost.model.work import PrefillSpan, PrefillWork, Work

Tensor = torch.Tensor

_MASK_LIMIT = 1 << 22  # elements of one boolean mask; longer products are cut by queries


@dataclass
class Attention:
    """Weights: projection [q | gate | k | v, hidden], output [hidden, q], norms float32 as they multiply.

    Norms over all heads at once are applied here; the kernels see the result as if there were none.
    """

    spec: AttentionSpec
    index: int  # of this layer among the attention layers
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
        keys, values = memory.keys[self.index], memory.values[self.index]
        begin = 0
        if work.prefill is not None:
            begin = work.prefill.count
            self._prefill(projected[:begin], work, work.prefill, keys, values, out[:begin])
        if work.decode is not None:
            end = begin + work.decode.count
            self.kernels.attention_step(self, projected[begin:end], work.decode, keys, values, out[begin:end])
        return self.output(out)

    def _prefill(
        self, projected: Tensor, work: Work, prefill: PrefillWork, keys: Tensor, values: Tensor, out: Tensor
    ) -> None:
        count = prefill.count
        q, gate, k, v = split_attention(self, projected, work.cos[:count], work.sin[:count])
        dtype = projected.dtype
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
        keys[prefill.target] = k[prefill.source].to(keys.dtype)
        values[prefill.target] = v[prefill.source].to(values.dtype)
        for span in prefill.spans:
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
    """Attention of a span to itself and to all that came before it.

    q [queries, heads, dim], k, v [keys, kv heads, dim]; the last key is the last query's own. A part of the queries
    at a time where masks would be large.
    """
    if span.gather is None:
        return _scaled_dot(q, k, v, None)
    step = max(1, _MASK_LIMIT // len(k))
    if step >= len(q):
        return _scaled_dot(q, k, v, span.mask)
    parts = []
    for first in range(0, len(q), step):
        queries = q[first : first + step]
        seen = span.start + first + len(queries)
        mask = torch.ones((len(queries), seen), dtype=torch.bool, device=q.device).tril(span.start + first)
        parts.append(_scaled_dot(queries, k[:seen], v[:seen], mask))
    return torch.cat(parts)


def _scaled_dot(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """softmax(q k^T / sqrt(dim)) v ; q [queries, heads, dim], k, v [keys, kv heads, dim]; causal without a mask."""
    group = q.shape[1] // k.shape[1]
    if group > 1:
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    q, k, v = (t.transpose(0, 1)[None] for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)[0].transpose(0, 1)
