"""Which of the earlier tokens a token of latent attention sees.

Tokens are taken in groups at absolute positions. A group that is whole has one key, and one score for each query:

    K = sum_i softmax_i(gate_i + place_i) k_i for token i of the group, per channel        s = sum_h w_h relu(q_h . K)

A query sees the groups with the best scores, the earlier one in a tie, and all tokens behind the last whole group.
The index part of a row is [key | gate] of its token; in the last row of a group K stands in place of the key, which
nobody asks for again. So a row depends on tokens up to its own only, and sequences may part behind any row.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from milepost.model.config import ATTENTION, IndexSpec
from milepost.model.kernels.plain import Kernels, best
from milepost.model.work import DecodeRows, PrefillSpan, View, Work

Tensor = torch.Tensor
EPS = 1e-6
_LIMIT = 1 << 22  # elements of one mask, or of the scores of all heads; longer products are cut by queries


@dataclass
class Choice:
    """What is seen. spans: bool [queries, groups] for each prefill span, or None: all; decode: rows of each step."""

    spans: tuple[Tensor | None, ...]
    decode: DecodeRows | None


class Everything:
    """No choice."""

    def choose(self, _query: Tensor, _inputs: Tensor, work: Work, _values: Tensor) -> Choice:
        view = work.views[ATTENTION]
        return Choice((None,) * len(view.spans), view.decode)


class AsBefore:
    """The choice of the last indexer. Its own index parts hold nothing, and not what other sequences left there."""

    def choose(self, _query: Tensor, _inputs: Tensor, work: Work, values: Tensor) -> Choice:
        view = work.views[ATTENTION]
        values[view.target] = 0
        if view.decode is not None:
            values[view.decode.last_rows(values.device)] = 0
        return work.choice


@dataclass
class Indexer:
    """All weights float32."""

    spec: IndexSpec
    norm: Tensor  # [dim]
    bias: Tensor  # [dim]
    place: Tensor  # [group, dim]
    kernels: Kernels

    def choose(self, query: Tensor, inputs: Tensor, work: Work, values: Tensor) -> Choice:
        """Keep what belongs into the rows' index parts, values [rows, 2 * dim], then choose.

        query [tokens, heads * dim]; inputs [tokens, key | gate | weight of each head].
        """
        spec = self.spec
        query = query.float().unflatten(-1, (spec.heads, spec.dim))
        key, gate, weights = inputs.float().split((spec.dim, spec.dim, spec.heads), -1)
        weights = weights * (spec.heads * spec.dim) ** -0.5
        key = F.layer_norm(key, (spec.dim,), self.norm, self.bias, EPS)
        index = torch.cat((key, gate), -1).to(values.dtype)
        view = work.views[ATTENTION]
        begin = view.count
        work.choice = Choice(self._prefill(query, weights, index[:begin], view, values), None)
        if view.decode is not None:
            work.choice.decode = self._step(query[begin:], weights[begin:], index[begin:], view.decode, values)
        return work.choice

    def _prefill(
        self, query: Tensor, weights: Tensor, index: Tensor, view: View, values: Tensor
    ) -> tuple[Tensor | None, ...]:
        group, dim = self.spec.group, self.spec.dim
        for span in view.spans:
            own = index[span.first : span.first + span.length]
            early = span.before % group  # tokens of the first group that came before
            tokens = own if not early else torch.cat((values[span.gather[span.before - early : span.before]], own))
            count = len(tokens) // group
            own[group - 1 - early :: group, :dim] = self.kernels.pool(
                tokens[: count * group].unflatten(0, (count, group)), self.place
            )
        values[view.target] = index[view.source]
        return tuple(self._chosen(query, weights, span, view, values) for span in view.spans)

    def _chosen(self, query: Tensor, weights: Tensor, span: PrefillSpan, view: View, values: Tensor) -> Tensor | None:
        spec = self.spec
        count = (span.before + span.length) // spec.group
        if count <= spec.kept:
            return None
        own = slice(span.first, span.first + span.length)
        rows = view.target[own] if span.gather is None else span.gather
        keys = values[rows[spec.group - 1 :: spec.group], : spec.dim].float()
        chosen = torch.empty((span.length, count), dtype=torch.bool, device=keys.device)
        for part, at in _parts(span, spec.heads * count, keys.device):
            scores = (query[own][part] @ keys.t()).relu_()
            scores = (weights[own][part][:, None] @ scores)[:, 0]
            whole = torch.arange(count, device=keys.device) < (at + 1) // spec.group
            chosen[part] = best(scores.masked_fill_(~whole, -torch.inf), spec.kept) & whole
        return chosen

    def _step(self, query: Tensor, weights: Tensor, index: Tensor, seen: DecodeRows, values: Tensor) -> DecodeRows:
        spec, count = self.spec, seen.count
        values[seen.last_rows(values.device)] = index[:count]
        lengths = np.diff(seen.offsets)
        ends = seen.offsets[1:][lengths % spec.group == 0]
        if len(ends):
            rows = torch.from_numpy(seen.rows[ends[:, None] + np.arange(-spec.group, 0)]).long().to(values.device)
            values[rows[:, -1], : spec.dim] = self.kernels.pool(values[rows], self.place)
        if lengths.max() // spec.group <= spec.kept:
            return seen
        return self.kernels.choose_rows(spec, query[:count], weights[:count], seen, values)


def attend_chosen(q: Tensor, k: Tensor, v: Tensor, span: PrefillSpan, chosen: Tensor, group: int) -> Tensor:
    """Attention of a span as in `attention.attend`, q, k, v [tokens, heads, dim], to the groups chosen and the rest."""
    out = q.new_empty((*q.shape[:2], v.shape[-1]))
    k, v = (t.transpose(0, 1)[None] for t in (k, v))
    place = torch.arange(k.shape[2], device=q.device)
    for part, at in _parts(span, len(place), q.device):
        mask = (place >= (at + 1) // group * group) & (place <= at)
        mask[:, : chosen.shape[1] * group] |= chosen[part].repeat_interleave(group, 1)
        out[part] = F.scaled_dot_product_attention(q[part].transpose(0, 1)[None], k, v, attn_mask=mask)[0].transpose(
            0, 1
        )
    return out


def _parts(span: PrefillSpan, width: int, device: torch.device) -> Iterator[tuple[slice, Tensor]]:
    """Parts of a span's queries that need at most _LIMIT elements, at `width` a query; positions int64 [queries, 1]."""
    step = max(1, _LIMIT // width)
    for first in range(0, span.length, step):
        stop = min(first + step, span.length)
        yield slice(first, stop), torch.arange(span.before + first, span.before + stop, device=device)[:, None]
