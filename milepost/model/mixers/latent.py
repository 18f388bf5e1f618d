"""Multi-head latent attention: rows hold one latent c and one shared key r per token instead of keys and values.

    k = [U_h c | r]    v = W_h c    for head h; c normed, r turned by its position where the model has positions

Prefill expands the rows it reads to keys and values. Decode takes U and W to the other side instead (absorbs them), so
that it reads the rows as they are: q . k = (U_h^T q_c) . c + q_r . r, and sum p v = W_h (sum p c).
"""

from dataclasses import dataclass

import torch

from milepost.model.config import ATTENTION, LatentSpec
from milepost.model.kernels.plain import Kernels, rms_norm, rotate
from milepost.model.linear import Linear
from milepost.model.memory import Memory
from milepost.model.mixers.attention import attend
from milepost.model.mixers.indexer import AsBefore, Choice, Everything, Indexer, attend_chosen
from milepost.model.work import DecodeRows, View, Work

Tensor = torch.Tensor


@dataclass
class LatentAttention:
    """Weights: projection [q | latent | key | gate | index inputs, hidden], output [hidden, heads * value dim], norms
    float32.

    With a low-rank q the projection gives that instead of q, and q_up [q | index query, q rank] takes it further.
    expand [heads, nope + value dim, rank] holds U and W; rotary dimensions are in two halves.
    """

    spec: LatentSpec
    index: int  # of this layer among the attention layers
    projection: Linear
    q_norm: Tensor | None
    q_up: Linear | None
    norm: Tensor
    expand: Tensor
    output: Linear
    kernels: Kernels
    indexer: Everything | AsBefore | Indexer

    def forward(self, x: Tensor, work: Work, memory: Memory) -> Tensor:
        spec = self.spec
        view, keys = work.views[ATTENTION], memory.keys[self.index]
        q, row, gate, query, inputs = self._project(x, view)
        choice = self.indexer.choose(query, inputs, work, memory.values[self.index])
        out = x.new_zeros((len(x), spec.heads, spec.value_dim))
        begin = view.count
        if view.spans:
            self._prefill(q[:begin], row[:begin], view, choice, keys, out[:begin])
        if view.decode is not None:
            self._step(q[begin:], row[begin:], view.decode, choice, keys, out[begin:])
        if spec.gated:
            out = out * gate.float().sigmoid().to(out.dtype)[..., None]
        return self.output(out.flatten(1))

    def _project(self, x: Tensor, view: View) -> tuple[Tensor, ...]:
        """q [rows, heads, nope + rope], rows to keep [rows, rank + rope], gate [rows, heads or 0], and for the indexer
        its query and inputs, each [rows, any]; in x's dtype.
        """
        spec, width = self.spec, self.spec.heads * self.spec.key_dim
        projected = self.projection(x)
        sizes = spec.q_rank or width, spec.rank, spec.rope, spec.heads * spec.gated
        q, latent, key, gate, inputs = projected.split((*sizes, projected.shape[1] - sum(sizes)), -1)
        if self.q_up is not None:
            q = self.q_up(rms_norm(q, self.q_norm, spec.eps).to(x.dtype))
        q, query = q[:, :width].unflatten(-1, (spec.heads, -1)), q[:, width:]
        latent = rms_norm(latent, self.norm, spec.eps).to(x.dtype)
        if spec.rotary_dim:
            turned = rotate(q[..., spec.nope :].float(), view.cos, view.sin).to(x.dtype)
            q = torch.cat((q[..., : spec.nope], turned), -1)
            key = rotate(key[:, None].float(), view.cos, view.sin)[:, 0].to(x.dtype)
        return q, torch.cat((latent, key), -1), gate, query, inputs

    def _prefill(self, q: Tensor, row: Tensor, view: View, choice: Choice, keys: Tensor, out: Tensor) -> None:
        keys[view.target] = row[view.source].to(keys.dtype)
        for span, chosen in zip(view.spans, choice.spans, strict=True):
            own = slice(span.first, span.first + span.length)
            k, v = self._expanded(row[own] if span.gather is None else keys[span.gather].to(q.dtype))
            if chosen is None:
                out[own] = attend(q[own], k, v, span)
            else:
                out[own] = attend_chosen(q[own], k, v, span, chosen, self.spec.index.group)

    def _expanded(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Keys [rows, heads, nope + rope] and values [rows, heads, value dim]."""
        spec = self.spec
        latent, key = rows.split((spec.rank, spec.rope), -1)
        both = (latent @ self.expand.flatten(0, 1).t()).unflatten(-1, (spec.heads, -1))
        k, v = both.split((spec.nope, spec.value_dim), -1)
        return torch.cat((k, key[:, None].expand(-1, spec.heads, -1)), -1), v

    def _step(self, q: Tensor, row: Tensor, seen: DecodeRows, choice: Choice, keys: Tensor, out: Tensor) -> None:
        """Padding rows take part in the products, whose results may depend on the number of rows (strict mode)."""
        spec, count = self.spec, seen.count
        keys[seen.last_rows(q.device)] = row[:count].to(keys.dtype)
        up, down = self.expand.split((spec.nope, spec.value_dim), 1)
        absorbed = torch.einsum("bhn,hnr->bhr", q[..., : spec.nope], up)
        query = torch.cat((absorbed, q[..., spec.nope :]), -1)[:count].float() * spec.key_dim**-0.5
        mean = absorbed.new_zeros((len(q), spec.heads, spec.rank))
        mean[:count] = self.kernels.latent_step(spec, query, choice.decode, keys)
        out.copy_(torch.einsum("bhr,hvr->bhv", mean, down))
