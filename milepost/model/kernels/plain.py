"""The small operations between the GEMMs, in two versions of one class.

TorchKernels runs anywhere and is the definition. NumbaKernels (`compiled.py`) is for CPUs: the same results up to
rounding, in one pass over memory and without the overhead of a dozen tensor operations. `choose_kernels` picks one by
device and argument.
"""

import math
from dataclasses import dataclass, replace
from typing import Protocol

import torch
import torch.nn.functional as F

from milepost.errors import ModelError
from milepost.model.config import (
    GATE_FIRST,
    NO_NORM,
    RELU2,
    SILU,
    AttentionSpec,
    GatedDeltaSpec,
    IndexSpec,
    LatentSpec,
    LinearSpec,
    MoeSpec,
    ScanSpec,
    StreamsSpec,
)
from milepost.model.linear import product
from milepost.model.work import DecodeRows, DecodeWork

Tensor = torch.Tensor


class RecurrentWeights(Protocol):
    """What `convolve` and `finish` need of a recurrent layer; all float32."""

    spec: LinearSpec
    eps: float
    conv_weight: Tensor  # [kernel, channels], oldest tap first
    conv_bias: Tensor  # [channels]
    norm: Tensor  # [value width]; of a gated delta layer the same for each head


class DeltaWeights(RecurrentWeights, Protocol):
    """What `delta_step` needs of a gated delta layer; all float32."""

    spec: GatedDeltaSpec
    rate: Tensor  # [value heads], exp(A_log)
    dt_bias: Tensor  # [spec.gates]


class ScanWeights(RecurrentWeights, Protocol):
    """What `scan_step` needs of a Mamba-2 or Lightning layer; all float32."""

    spec: ScanSpec
    rate: Tensor  # [value heads]: the log decay is -rate times the step
    dt_bias: Tensor  # [value heads]
    skip: Tensor  # [value heads]


class AttentionWeights(Protocol):
    """What `attention_step` needs of an attention layer; norms float32."""

    spec: AttentionSpec
    eps: float
    q_norm: Tensor | None  # [head dim]
    k_norm: Tensor | None


class ExpertWeights(Protocol):
    """What `route` and `experts` need of routed experts."""

    spec: MoeSpec
    bias: Tensor  # float32 [experts], for the choice only
    up: Tensor  # [experts, gate | up or up alone, inner]
    down: Tensor  # [experts, inner, width]
    activation: str
    limit: float | None  # of the activation's input


@dataclass
class ChunkTerms:
    """What a kernel chunk needs besides its initial state (`mixers/recurrent.py` has the law).

    float32, [chunks, value heads, width, dim] unless said.
    """

    values: Tensor  # D without what depends on S: (I + L)^-1 diag(beta) V, or diag(step) V
    corrections: Tensor | None  # what times S is taken from it: (I + L)^-1 diag(beta) (e^G K)
    queries: Tensor  # e^G Q
    keys: Tensor  # e^(G_last - G) K
    scores: Tensor  # A, [chunks, value heads, width, width]
    decays: Tensor  # e^(G_last), [chunks, value heads, 1 or key dim]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last dimension in float32; `weight` as it multiplies (any "1 +" already added)."""
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x [tokens, heads, dim] float32: dimensions j and half + j turn by the token's j-th angle.

    cos, sin [tokens, half]; dimensions from 2 * half on pass unchanged.
    """
    half = cos.shape[-1]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), -1)


def l2_normalize(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


class TorchKernels:
    """Plain tensor operations, on any device and in any floating dtype."""

    def enter(self) -> None:
        """Called at the start of each forward pass, in whatever thread it runs."""

    def add_norm(self, stream: Tensor, delta: Tensor, weight: Tensor, eps: float) -> Tensor:
        """stream += delta in place, then RMSNorm(stream) * weight. Both [tokens, width]."""
        stream += delta
        return rms_norm(stream, weight, eps).to(stream.dtype)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """silu(gate) * up of [tokens, gate | up]."""
        gate, up = gate_up.float().chunk(2, -1)
        return (F.silu(gate) * up).to(gate_up.dtype)

    def read_streams(
        self, spec: StreamsSpec, streams: Tensor, made: Tensor, norm: Tensor, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(RMSNorm(read . streams) * norm, write, between) of streams [tokens, n, width], read from the raw weights
        made [tokens, n read | n write | n * n between] float32. Returns [tokens, width], and float32 [tokens, n] and
        [tokens, from n, to n]: rows and columns scaled in turn so that they sum to one (Sinkhorn), columns last.
        """
        n = spec.count
        read, write, between = made.split((n, n, n * n), -1)
        between = between.unflatten(-1, (n, n)).softmax(-1) + spec.eps
        for i in range(2 * spec.rounds - 1):
            between = between / (between.sum(-1 if i % 2 else -2, keepdim=True) + spec.eps)
        x = ((read.sigmoid() + spec.eps)[:, None] @ streams.float())[:, 0]
        return rms_norm(x, norm, eps).to(streams.dtype), 2 * write.sigmoid(), between

    def write_streams(self, streams: Tensor, y: Tensor, write: Tensor, between: Tensor) -> None:
        """streams = between^T streams + write y in place, y [tokens, width]."""
        mixed = between.transpose(1, 2) @ streams.float()
        streams.copy_(mixed.addcmul_(write[..., None], y[:, None].float()))

    def activate(self, kind: str, y: Tensor, limit: float | None = None) -> Tensor:
        """The activation of an MLP on its product with [gate | up], or with up alone; y is cut off at the `limit`."""
        if limit is not None:
            y.clamp_(max=limit)[:, y.shape[1] // 2 :].clamp_(min=-limit)
        return F.relu(y).square() if kind == RELU2 else self.silu_mul(y)

    def route(self, layer: ExpertWeights, logits: Tensor) -> tuple[Tensor, Tensor]:
        """(experts int64, weights float32), each [tokens, experts per token], from logits [tokens, experts]."""
        spec, logits = layer.spec, logits.float()
        scores = logits.softmax(-1) if spec.scoring == "softmax" else logits.sigmoid()
        ranked = scores + layer.bias
        if spec.groups > 1:
            grouped = ranked.unflatten(-1, (spec.groups, -1))
            kept = grouped.topk(2, -1)[0].sum(-1).topk(spec.groups_kept, -1)[1]
            dropped = torch.ones(grouped.shape[:2], dtype=torch.bool, device=logits.device).scatter_(1, kept, False)
            ranked = grouped.masked_fill(dropped[..., None], -math.inf).flatten(1)
        chosen = ranked.topk(spec.per_token, -1)[1]
        weights = scores.gather(1, chosen)
        if spec.normalize:
            weights = weights / (weights.sum(-1, keepdim=True) + spec.epsilon)
        return chosen, weights * spec.scale

    def experts(
        self, layer: ExpertWeights, x: Tensor, chosen: Tensor, weights: Tensor, fixed_rows: int | None
    ) -> Tensor:
        """The weighted sum of what each token's experts make of x [tokens, inner].

        In strict mode all products have `fixed_rows` rows: how many tokens share an expert must not matter.
        """
        # Sort the (token, expert) pairs by expert, so that each expert takes its tokens as one slice.
        order = chosen.flatten().argsort(stable=True)
        x = x[order // chosen.shape[1]]
        y, first = torch.empty_like(x), 0
        for e, count in enumerate(torch.bincount(chosen.flatten(), minlength=len(layer.up)).tolist()):
            own = slice(first, first + count)
            if count:
                mine = x[own] if fixed_rows is None else F.pad(x[own], (0, 0, 0, fixed_rows - count))
                mine = product(self.activate(layer.activation, product(mine, layer.up[e]), layer.limit), layer.down[e])
                y[own] = mine[:count]
            first += count
        return self.combine(y, order, weights)

    def combine(self, y: Tensor, order: Tensor, weights: Tensor) -> Tensor:
        """Each token's weighted sum over its pairs, which are numbered token by token; y[i] is of pair order[i]."""
        return (y[order.argsort()].view(*weights.shape, -1) * weights[..., None].to(y.dtype)).sum(1)

    def convolve(self, layer: RecurrentWeights, ext: Tensor, chunks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """silu of the causal convolution of a prefill, laid out in kernel chunks.

        ext [.., channels] holds each span's inputs behind its window; a token's oldest input stands at chunks[c, t].
        Returns float32 q, k [chunks, key heads, width, dk] and v [chunks, value heads, width, dv]; for the delta rule
        q and k are of unit length and q is divided by sqrt(dk).

        As shifted multiply-adds: F.conv1d is slow in bfloat16 on a CPU, and its result for a position depends on the
        length of the call.
        """
        spec = layer.spec
        mixed = F.silu(shifted_sum(ext, layer.conv_weight) + layer.conv_bias)[chunks]
        parts = mixed.split((spec.key_width, spec.key_width, spec.value_width), -1)
        dims = (spec.key_dim, spec.key_dim, spec.value_dim)
        q, k, v = (part.unflatten(-1, (-1, dim)).transpose(1, 2) for part, dim in zip(parts, dims, strict=True))
        if not spec.normalized:
            return q, k, v
        return l2_normalize(q) * spec.key_dim**-0.5, l2_normalize(k), v

    def chunk_terms(self, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, decay: Tensor) -> ChunkTerms:
        """The terms of the delta rule; beta and the log decay are [chunks, value heads, width], the rest as above."""
        terms, kk = _decayed(q, k, v, decay)
        # Only what is strictly below the diagonal is read; the diagonal counts as ones.
        right = torch.cat((v, terms.corrections), -1) * beta[..., None]
        solved = torch.linalg.solve_triangular(beta[..., None] * kk, right, upper=False, unitriangular=True)
        terms.values, terms.corrections = solved[..., : v.shape[-1]], solved[..., v.shape[-1] :]
        return terms

    def channel_terms(self, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, decay: Tensor) -> ChunkTerms:
        """As chunk_terms, with a log decay for each key channel, [chunks, value heads, width, dk]."""
        group = v.shape[1] // k.shape[1]
        q, k = (x.repeat_interleave(group, 1) for x in (q, k))
        total = decay.cumsum(-2)
        kk, qk = (beta.new_empty((*beta.shape, beta.shape[-1])) for _ in range(2))
        for c in range(len(v)):  # one chunk at a time: this is dk times as large as the scores
            between = (total[c, :, :, None] - total[c, :, None]).clamp(max=0).exp() * k[c, :, None]
            kk[c], qk[c] = (torch.einsum("htd,htjd->htj", x[c], between) for x in (k, q))
        since, last = total.exp(), total[..., -1:, :]
        right = torch.cat((v, k * since), -1) * beta[..., None]
        solved = torch.linalg.solve_triangular(beta[..., None] * kk, right, upper=False, unitriangular=True)
        return ChunkTerms(
            values=solved[..., : v.shape[-1]],
            corrections=solved[..., v.shape[-1] :],
            queries=q * since,
            keys=k * (last - total).exp(),
            scores=qk.tril(),
            decays=last[..., 0, :].exp(),
        )

    def scan_terms(self, q: Tensor, k: Tensor, v: Tensor, step: Tensor, decay: Tensor) -> ChunkTerms:
        """The terms where d_t = step_t v_t; step and log decay [chunks, value heads, width]."""
        terms, _ = _decayed(q, k, v, decay)
        terms.values, terms.corrections = v * step[..., None], None
        return terms

    def finish(self, layer: RecurrentWeights, o: Tensor, place: Tensor, projected: Tensor, out: Tensor) -> None:
        """Norm (over `spec.norm_groups` parts) and gate of outputs, in `spec.norm`'s order.

        o [chunks, value heads, width, dv] float32, token t at place[t] of [chunks * width], its gate in projected[t].
        """
        spec = layer.spec
        o = o.transpose(1, 2).flatten(0, 1)[place].flatten(1)
        z = projected[:, spec.channels : spec.channels + spec.value_width].float()
        gate = F.silu(z) if spec.gate == SILU else z.sigmoid()
        if spec.norm == GATE_FIRST:
            o = o * gate
        if spec.norm != NO_NORM:
            parts = o.unflatten(1, (spec.norm_groups, -1))
            o = rms_norm(parts, layer.norm.view(spec.norm_groups, -1), layer.eps).flatten(1)
        out.copy_(o if spec.norm == GATE_FIRST else o * gate)

    def delta_step(
        self, layer: DeltaWeights, projected: Tensor, work: DecodeWork, conv: Tensor, temporal: Tensor
    ) -> Tensor:
        """One token of the gated delta rule per sequence; windows and states in place by slot.

        projected [batch, q | k | v | z | b | a]; conv [slots, kernel - 1, channels];
        temporal [slots, value heads, dk, dv]; returns o, float32 [batch, value heads, dv].
        """
        spec = layer.spec
        slots = work.slots_on(projected.device)
        q, k, v = self._convolve_step(layer, projected, slots, conv)
        q, k = l2_normalize(q), l2_normalize(k)
        beta, decay = delta_gates(layer, projected[:, spec.channels + spec.value_width :].float())
        decay = decay.exp() if spec.channel_gates else decay.exp()[..., None]
        state = temporal[slots].float() * decay[..., None]
        change = beta[..., None] * (v - torch.einsum("bhij,bhi->bhj", state, k))
        state += k[..., None] * change[..., None, :]
        temporal[slots] = state.to(temporal.dtype)
        return torch.einsum("bhij,bhi->bhj", state, q * spec.key_dim**-0.5)

    def scan_step(
        self, layer: ScanWeights, projected: Tensor, work: DecodeWork, conv: Tensor, temporal: Tensor
    ) -> Tensor:
        """One token per sequence where d_t = step_t v_t; returns o + skip v, float32 [batch, value heads, dv].

        projected [batch, q | k | v | z | step]; the memory as in delta_step.
        """
        spec = layer.spec
        slots = work.slots_on(projected.device)
        q, k, v = self._convolve_step(layer, projected, slots, conv)
        step, decay = scan_gates(layer, projected[:, spec.channels + spec.value_width :].float())
        state = temporal[slots].float() * decay.exp()[..., None, None]
        state += k[..., None] * (v * step[..., None])[..., None, :]
        temporal[slots] = state.to(temporal.dtype)
        return torch.einsum("bhij,bhi->bhj", state, q) + layer.skip[:, None] * v

    def _convolve_step(
        self, layer: RecurrentWeights, projected: Tensor, slots: Tensor, conv: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v [batch, value heads, dim] float32 of one token each, after the convolution and silu."""
        spec = layer.spec
        mixed = F.silu(_next(projected[:, : spec.channels], layer.conv_weight, slots, conv) + layer.conv_bias)
        q, k, v = mixed.split((spec.key_width, spec.key_width, spec.value_width), -1)
        group = spec.value_heads // spec.key_heads
        q, k = (t.reshape(-1, spec.key_heads, spec.key_dim).repeat_interleave(group, 1) for t in (q, k))
        return q, k, v.reshape(-1, spec.value_heads, spec.value_dim)

    def gated_conv(self, projected: Tensor, ext: Tensor, places: Tensor, weight: Tensor, out: Tensor) -> None:
        """out = C * the convolution of B * x, which are in `ext` behind their windows, a token's oldest at its place.

        projected [tokens, B | C | x]; weight [kernel, channels]; out [tokens, channels].
        """
        out.copy_(projected.chunk(3, -1)[1] * shifted_sum(ext, weight)[places])

    def conv_step(self, projected: Tensor, weight: Tensor, work: DecodeWork, conv: Tensor, out: Tensor) -> None:
        """The same for one token per sequence; windows in place by slot."""
        before, after, value = projected.chunk(3, -1)
        out.copy_(after * _next(before * value, weight, work.slots_on(out.device), conv))

    def attention_step(
        self,
        layer: AttentionWeights,
        projected: Tensor,
        seen: DecodeRows,
        keys: Tensor,
        values: Tensor,
        out: Tensor,
    ) -> None:
        """One token of attention per sequence; its KV is written to the last of the sequence's rows first.

        projected [batch, q | gate if the model has one | k | v]; keys, values [rows, kv heads, dim];
        out [batch, heads * dim].
        """
        spec = layer.spec
        q, gate, k, v = split_attention(layer, projected, seen.cos, seen.sin)
        rows, visible = seen.padded_rows(projected.device)
        last = seen.last_rows(projected.device)
        keys[last] = k.to(keys.dtype)
        values[last] = v.to(values.dtype)
        q = q.view(len(q), spec.kv_heads, -1, spec.head_dim)
        scores = torch.einsum("bkgd,btkd->bkgt", q, keys[rows].float()) * spec.head_dim**-0.5
        scores = scores.masked_fill(~visible[:, None, None], -math.inf)
        o = torch.einsum("bkgt,btkd->bkgd", scores.softmax(-1), values[rows].float())
        out.copy_(o.flatten(1) if gate is None else o.flatten(1) * gate)

    def latent_step(self, spec: LatentSpec, query: Tensor, seen: DecodeRows, keys: Tensor) -> Tensor:
        """Attention of one token per sequence to latent rows [rows, rank + rope]: the mean latent of each head.

        query [batch, heads, rank + rope] float32, scaled; returns float32 [batch, heads, rank].
        """
        rows, visible = seen.padded_rows(query.device)
        wide = keys[rows].float()
        scores = (query @ wide.transpose(1, 2)).masked_fill(~visible[:, None], -math.inf)
        return scores.softmax(-1) @ wide[..., : spec.rank]

    def pool(self, tokens: Tensor, place: Tensor) -> Tensor:
        """The keys of groups of index rows [groups, group, key | gate], in their dtype; place float32 [group, dim]."""
        key, gate = tokens.float().chunk(2, -1)
        return ((gate + place).softmax(1) * key).sum(1).to(tokens.dtype)

    def choose_rows(
        self, spec: IndexSpec, query: Tensor, weights: Tensor, view: DecodeRows, values: Tensor
    ) -> DecodeRows:
        """The same with those of the rows that an indexer chooses (`mixers/indexer.py` has the law).

        query [batch, heads, dim] and weights [batch, heads] float32, scaled; values [rows, group's key | any].
        """
        rows, visible = view.padded_rows(query.device)
        ends = slice(spec.group - 1, None, spec.group)
        whole = visible[:, ends]
        keys = values[rows[:, ends], : spec.dim].float()
        scores = (weights[:, None] @ (query @ keys.transpose(1, 2)).relu())[:, 0]
        chosen = best(scores.masked_fill(~whole, -math.inf), min(spec.kept, whole.shape[1])) & whole
        seen = visible.clone()
        seen[:, : whole.shape[1] * spec.group] &= (chosen | ~whole).repeat_interleave(spec.group, 1)
        offsets = F.pad(seen.sum(1).cumsum(0), (1, 0)).cpu().numpy()
        return replace(view, rows=rows[seen].int().cpu().numpy(), offsets=offsets)


Kernels = TorchKernels  # the interface is the class


def shifted_sum(ext: Tensor, weight: Tensor) -> Tensor:
    """The causal convolution of ext [length, channels], float32; weight [taps, channels], so taps - 1 rows shorter."""
    wide = ext.float()
    length = len(ext) - len(weight) + 1
    y = wide[:length] * weight[0]
    for i in range(1, len(weight)):
        y.addcmul_(wide[i : i + length], weight[i])
    return y


def best(scores: Tensor, count: int) -> Tensor:
    """bool [rows, any]: the `count` best of each row; of equal ones the first."""
    least = scores.topk(count, -1)[0][:, -1:]
    above, level = scores > least, scores == least
    return above | (level & (level.cumsum(-1) <= count - above.sum(-1, keepdim=True)))


def _next(x: Tensor, weight: Tensor, slots: Tensor, conv: Tensor) -> Tensor:
    """The convolution at one more token x [batch, channels], float32; the windows move on."""
    if not conv.shape[1]:
        return x.float() * weight[0]
    window = conv[slots]
    conv[slots] = torch.cat((window[:, 1:], x[:, None].to(conv.dtype)), 1)
    return (torch.cat((window.float(), x[:, None].float()), 1) * weight).sum(1)


def _decayed(q: Tensor, k: Tensor, v: Tensor, decay: Tensor) -> tuple[ChunkTerms, Tensor]:
    """The terms that rules with one decay per head share, with v and e^G K for values and corrections; and
    e^(G_t - G_j) k_t k_j.
    """
    group = v.shape[1] // k.shape[1]
    total = decay.cumsum(-1)
    # Above the diagonal the difference is positive and might overflow; it is cut off before the exponential.
    between = (total[..., :, None] - total[..., None, :]).tril().exp().tril()
    kk, qk = (x @ k.transpose(-1, -2) for x in (k, q))
    q, k, kk, qk = (x.repeat_interleave(group, 1) for x in (q, k, kk, qk))
    since, last = total.exp()[..., None], total[..., -1:]
    keys = k * (last - total).exp()[..., None]
    return ChunkTerms(v, k * since, q * since, keys, between * qk, last.exp()), between * kk


def delta_gates(layer: DeltaWeights, gates: Tensor) -> tuple[Tensor, Tensor]:
    """(beta [..., value heads], log decay [..., value heads(, dk)]) from float32 gates [..., b | a]."""
    spec = layer.spec
    b, a = gates.split((spec.value_heads, spec.gates), -1)
    a, rate = a + layer.dt_bias, layer.rate
    if spec.channel_gates:
        a, rate = a.unflatten(-1, (spec.value_heads, -1)), rate[:, None]
    decay = -rate * F.softplus(a) if spec.bound is None else spec.bound * torch.sigmoid(rate * a)
    return spec.beta_scale * b.sigmoid(), decay


def scan_gates(layer: ScanWeights, gates: Tensor) -> tuple[Tensor, Tensor]:
    """(step, log decay), each [..., value heads], from float32 gates [..., step] (or none: all steps are one)."""
    spec = layer.spec
    if spec.timed:
        step = F.softplus(gates + layer.dt_bias).clamp(min=spec.step_floor)
    else:
        step = gates.new_ones((*gates.shape[:-1], spec.value_heads))
    return step, -layer.rate * step


def split_attention(
    layer: AttentionWeights, projected: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """(q, gate, k, v) of a projection, float32: q, k normed and turned [tokens, heads, dim]; gate after its sigmoid."""
    spec = layer.spec
    width, kv_width = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    q, gate, k, v = projected.float().split((width, width * spec.gated, kv_width, kv_width), -1)
    q, k, v = (t.unflatten(-1, (-1, spec.head_dim)) for t in (q, k, v))
    if spec.normed and not spec.wide_norms:
        q, k = rms_norm(q, layer.q_norm, layer.eps), rms_norm(k, layer.k_norm, layer.eps)
    if spec.rotary_dim:
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
    return q, gate.sigmoid() if spec.gated else None, k, v


def choose_kernels(name: str, device: torch.device, dtype: torch.dtype) -> Kernels:
    """The kernels called `name`: "numba", "torch", or "auto", which is numba where it can run."""
    possible = device.type == "cpu" and dtype in (torch.float32, torch.bfloat16)
    if name == "torch" or (name == "auto" and not possible):
        return TorchKernels()
    if name not in ("auto", "numba"):
        raise ModelError(f"kernels {name!r}: choose auto, numba or torch")
    if not possible:
        raise ModelError(f"kernels numba: needs a CPU and float32 or bfloat16, not {device.type} and {dtype}; use auto")
    # Here: numba takes half a second, and a GPU server needs none of it.
    from milepost.model.kernels.compiled import NumbaKernels

    return NumbaKernels()
