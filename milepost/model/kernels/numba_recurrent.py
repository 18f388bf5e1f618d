"""Compiled loops of the recurrent mixers: convolutions, chunk terms, steps, gated norms. `mixers/` has the laws."""

import functools
import math

import numpy as np
from numba import prange

from milepost.model.kernels.numba_elementwise import (
    INLINE,
    PARALLEL,
    compiled,
    exp,
    narrow,
    scale_to_norm,
    sigmoid,
    softplus,
    widen,
)


@compiled(**INLINE)
def _l2_normalize(x, size, factor):
    square = np.float32(0.0)
    for j in range(size):
        square += x[j] * x[j]
    scale = factor / math.sqrt(square + np.float32(1e-6))
    for j in range(size):
        x[j] *= scale


@compiled(**INLINE)
def _gate(x, silu):
    return x * sigmoid(x) if silu else sigmoid(x)


@compiled(**INLINE)
def _convolve(inputs, window, taps, weight, bias, first, size, out):
    """One token's convolution with silu for `size` channels from `first` on; shifts the window.

    inputs [channels...]; window [taps, channels], oldest first; weight [taps + 1, channels].
    """
    for j in range(size):
        y = bias[first + j] + widen(inputs[first + j]) * weight[taps, first + j]
        for i in range(taps):
            y += widen(window[i, first + j]) * weight[i, first + j]
        out[j] = y * sigmoid(y)
    _shift(inputs, window, taps, first, size)


@compiled(**INLINE)
def _shift(inputs, window, taps, first, size):
    """Move a window on by one input, `size` channels from `first` on."""
    if taps:
        for i in range(taps - 1):
            for j in range(size):
                window[i, first + j] = window[i + 1, first + j]
        for j in range(size):
            window[taps - 1, first + j] = narrow(widen(inputs[first + j]), window)


@compiled(**INLINE)
def _delta_head(state, key_dim, value_dim, q, k, v, decay, beta, read, out):
    """One head's step, state [dk, dv] in place: S = diag(decay) S; S += k (beta (v - S^T k))^T; out = S^T q."""
    for j in range(value_dim):
        read[j] = np.float32(0.0)
        out[j] = np.float32(0.0)
    for i in range(key_dim):
        factor = k[i] * decay[i]
        for j in range(value_dim):
            read[j] += factor * widen(state[i, j])
    for j in range(value_dim):
        read[j] = beta * (v[j] - read[j])
    for i in range(key_dim):
        for j in range(value_dim):
            s = decay[i] * widen(state[i, j]) + k[i] * read[j]
            state[i, j] = narrow(s, state)
            out[j] += q[i] * s


@compiled(**INLINE)
def _inputs(row, window, weight, bias, taps, kh, key_heads, dim, values, q, k, v):
    """q, k and v of key head kh and its value heads, after the convolution of one token's [q | k | v | ...]."""
    at_k = key_heads * dim
    _convolve(row, window, taps, weight, bias, kh * dim, dim, q)
    _convolve(row, window, taps, weight, bias, at_k + kh * dim, dim, k)
    _convolve(row, window, taps, weight, bias, 2 * at_k + kh * values, values, v)


@compiled(**INLINE)
def _decay(x, rate, bounded, limit):
    return exp(limit * sigmoid(rate * x) if bounded else -rate * softplus(x))


@functools.cache
def delta_step_for(key_heads, value_heads, key_dim, value_dim, kernel, channel_gates, bounded):
    """One token of the gated delta rule for each of a batch of sequences."""
    group = value_heads // key_heads
    values = group * value_dim
    at_b = 2 * (key_heads * key_dim + value_heads * value_dim)
    at_a = at_b + value_heads

    @compiled(**PARALLEL)
    def delta_step(projected, slots, conv, temporal, weights, numbers, out):
        """Convolution and delta rule.

        projected  [batch, q | k | v | z | b | a]
        conv       [slots, kernel - 1, channels], temporal [slots, value heads, dk, dv]: updated in place by slot
        weights    (convolution [kernel, channels], its bias, exp(A_log) [value heads], dt_bias)
        numbers    (bound of the decay, scale of beta)
        out        float32 [batch, value heads, dv]
        """
        conv_weight, conv_bias, rate, dt_bias = weights
        limit, scale = numbers
        for task in prange(len(slots) * key_heads):
            n = task // key_heads
            kh = task % key_heads
            slot = slots[n]
            row = projected[n]
            q = np.empty(key_dim, np.float32)
            k = np.empty(key_dim, np.float32)
            v = np.empty(values, np.float32)
            decay = np.empty(key_dim, np.float32)
            read = np.empty(value_dim, np.float32)
            o = np.empty(value_dim, np.float32)
            _inputs(row, conv[slot], conv_weight, conv_bias, kernel - 1, kh, key_heads, key_dim, values, q, k, v)
            _l2_normalize(q, key_dim, np.float32(1.0) / math.sqrt(np.float32(key_dim)))
            _l2_normalize(k, key_dim, np.float32(1.0))
            for g in range(group):
                h = kh * group + g
                beta = scale * sigmoid(widen(row[at_b + h]))
                if channel_gates:
                    for i in range(key_dim):
                        j = h * key_dim + i
                        decay[i] = _decay(widen(row[at_a + j]) + dt_bias[j], rate[h], bounded, limit)
                else:
                    decay[:] = _decay(widen(row[at_a + h]) + dt_bias[h], rate[h], bounded, limit)
                own = v[g * value_dim : (g + 1) * value_dim]
                _delta_head(temporal[slot, h], key_dim, value_dim, q, k, own, decay, beta, read, o)
                out[n, h] = o

    return delta_step


@functools.cache
def scan_step_for(key_heads, value_heads, key_dim, value_dim, kernel, timed):
    """One token for each of a batch of sequences where d_t = step_t v_t: Mamba-2, Lightning."""
    group = value_heads // key_heads
    values = group * value_dim
    at_step = 2 * (key_heads * key_dim + value_heads * value_dim)

    @compiled(**PARALLEL)
    def scan_step(projected, slots, conv, temporal, weights, floor, out):
        """Convolution and recurrence.

        projected  [batch, q | k | v | z | step]
        weights    (convolution [kernel, channels], its bias, rate, dt_bias and skip [value heads])
        floor      the least step
        out        float32 [batch, value heads, dv]: o + skip v
        """
        conv_weight, conv_bias, rate, dt_bias, skip = weights
        for task in prange(len(slots) * key_heads):
            n = task // key_heads
            kh = task % key_heads
            slot = slots[n]
            row = projected[n]
            q = np.empty(key_dim, np.float32)
            k = np.empty(key_dim, np.float32)
            v = np.empty(values, np.float32)
            o = np.empty(value_dim, np.float32)
            _inputs(row, conv[slot], conv_weight, conv_bias, kernel - 1, kh, key_heads, key_dim, values, q, k, v)
            for g in range(group):
                h = kh * group + g
                step = np.float32(1.0)
                if timed:
                    step = max(softplus(widen(row[at_step + h]) + dt_bias[h]), floor)
                decay = exp(-rate[h] * step)
                own = v[g * value_dim : (g + 1) * value_dim]
                state = temporal[slot, h]
                for j in range(value_dim):
                    o[j] = skip[h] * own[j]
                for i in range(key_dim):
                    factor = step * k[i]
                    for j in range(value_dim):
                        s = decay * widen(state[i, j]) + factor * own[j]
                        state[i, j] = narrow(s, state)
                        o[j] += q[i] * s
                out[n, h] = o

    return scan_step


@functools.cache
def finish_for(gate_first, normed, silu):
    """Norm and gate of outputs, in either order."""

    @compiled(**PARALLEL)
    def finish(o, place, groups, gates, offset, weight, eps, out):
        """o float32 [chunks, heads, width, dim], token t at place[t] of [chunks * width]; gates at gates[t, offset:].

        Normed in `groups` equal parts of all heads; weight [heads * dim].
        """
        heads, width, dim = o.shape[1:]
        size = heads * dim
        part = size // groups
        for t in prange(len(place)):
            gate = np.empty(size, np.float32)
            y = np.empty(size, np.float32)
            for j in range(size):
                gate[j] = _gate(widen(gates[t, offset + j]), silu)
            for h in range(heads):
                own = o[place[t] // width, h, place[t] % width]
                for j in range(dim):
                    y[h * dim + j] = own[j]
            if gate_first:
                for j in range(size):
                    y[j] *= gate[j]
            for g in range(groups * normed):
                scale = scale_to_norm(y[g * part :], part, eps)
                for j in range(part):
                    y[g * part + j] *= scale * weight[g * part + j]
            if not gate_first:
                for j in range(size):
                    y[j] *= gate[j]
            for j in range(size):
                out[t, j] = narrow(y[j], out)

    return finish


@compiled(**PARALLEL)
def gated_conv(projected, ext, places, weight, out):
    """out = C * the convolution of `ext`, B * x behind its windows; projected [tokens, B | C | x]."""
    kernel, width = weight.shape
    for t in prange(len(places)):
        y = np.zeros(width, np.float32)
        for i in range(kernel):
            for j in range(width):
                y[j] += widen(ext[places[t] + i, j]) * weight[i, j]
        for j in range(width):
            out[t, j] = narrow(widen(projected[t, width + j]) * y[j], out)


@compiled(**PARALLEL)
def conv_step(projected, slots, conv, weight, out):
    """The same for one token for each of a batch of sequences; conv [slots, kernel - 1, channels] moves on."""
    kernel, width = weight.shape
    for n in prange(len(slots)):
        window = conv[slots[n]]
        x = np.empty(width, out.dtype)
        y = np.empty(width, np.float32)
        for j in range(width):
            x[j] = narrow(widen(projected[n, j]) * widen(projected[n, 2 * width + j]), x)
        for j in range(width):
            y[j] = widen(x[j]) * weight[kernel - 1, j]
        for i in range(kernel - 1):
            for j in range(width):
                y[j] += widen(window[i, j]) * weight[i, j]
        for j in range(width):
            out[n, j] = narrow(widen(projected[n, width + j]) * y[j], out)
        _shift(x, window, kernel - 1, 0, width)


@functools.cache
def convolve_for(kernel, normalized):
    """The convolution of a prefill, with its results as the chunk form wants them."""

    @compiled(**PARALLEL)
    def convolve(ext, chunks, weight, bias, q, k, v):
        """ext [.., channels] inputs after their windows; chunks [chunks, width] where a token's oldest input stands.

        weight [kernel, channels]; out: q, k [chunks, key heads, width, dk]; v [chunks, value heads, width, dv].
        """
        count, width = chunks.shape
        key_heads, key_dim = q.shape[1], q.shape[3]
        value_heads, value_dim = v.shape[1], v.shape[3]
        key_width = key_heads * key_dim
        for task in prange(count * width):
            c = task // width
            t = task % width
            e = chunks[c, t]
            mixed = np.empty(ext.shape[1], np.float32)
            for j in range(len(mixed)):
                y = bias[j]
                for i in range(kernel):
                    y += widen(ext[e + i, j]) * weight[i, j]
                mixed[j] = y * sigmoid(y)
            for h in range(key_heads):
                own_q = mixed[h * key_dim : (h + 1) * key_dim]
                own_k = mixed[key_width + h * key_dim : key_width + (h + 1) * key_dim]
                if normalized:
                    _l2_normalize(own_q, key_dim, np.float32(1.0) / math.sqrt(np.float32(key_dim)))
                    _l2_normalize(own_k, key_dim, np.float32(1.0))
                for j in range(key_dim):
                    q[c, h, t, j] = own_q[j]
                    k[c, h, t, j] = own_k[j]
            for h in range(value_heads):
                for j in range(value_dim):
                    v[c, h, t, j] = mixed[2 * key_width + h * value_dim + j]

    return convolve


@compiled(**INLINE)
def _add_rows(x, t, factors, size):
    """x[t] += factors[i] x[i] for all i < t: row t of the forward substitution. Four at a time while they last."""
    for i in range(0, t - 3, 4):
        for j in range(size):
            a = factors[i] * x[i, j] + factors[i + 1] * x[i + 1, j]
            b = factors[i + 2] * x[i + 2, j] + factors[i + 3] * x[i + 3, j]
            x[t, j] += a + b
    for i in range(t // 4 * 4, t):
        for j in range(size):
            x[t, j] += factors[i] * x[i, j]


@functools.cache
def chunk_terms_for(key_dim, value_dim, delta):
    """The terms of the matrix form (`kernels.ChunkTerms`) from the chunks' products, for one decay per head.

    delta: the delta rule; otherwise d_t = beta_t v_t, nothing is solved, and `solved` is [.., width, dv].
    """

    @compiled(**PARALLEL)
    def chunk_terms(q, k, v, products, gates, solved, queries, keys, scores, decays):
        """One task per chunk and value head; key heads serve value heads in groups.

        products  (k k^T, q k^T), each [chunks, key heads, width, width]
        gates     (beta, log decay), each [chunks, value heads, width]
        out       solved [chunks, value heads, width, dv | dk], queries and keys [.., width, dk],
                  scores [.., width, width], decays [chunks, value heads]
        """
        kk, qk = products
        beta, decay = gates
        count, value_heads, width = beta.shape
        group = value_heads // q.shape[1]
        for task in prange(count * value_heads):
            c = task // value_heads
            h = task % value_heads
            kh = h // group
            total = np.empty(width, np.float32)
            between = np.empty(width, np.float32)
            running = np.float32(0.0)
            for t in range(width):
                running += decay[c, h, t]
                total[t] = running
            x = solved[c, h]
            for t in range(width):
                for j in range(width):
                    e = exp(min(total[t] - total[j], np.float32(0.0)))
                    between[j] = e if j <= t else np.float32(0.0)
                for j in range(width):
                    scores[c, h, t, j] = between[j] * qk[c, kh, t, j]
                since = exp(total[t])
                until = exp(running - total[t])
                step = beta[c, h, t]
                for j in range(key_dim):
                    queries[c, h, t, j] = q[c, kh, t, j] * since
                    keys[c, h, t, j] = k[c, kh, t, j] * until
                    if delta:
                        x[t, value_dim + j] = k[c, kh, t, j] * since * step
                for j in range(value_dim):
                    x[t, j] = v[c, h, t, j] * step
                if delta:
                    for j in range(width):
                        between[j] *= -step * kk[c, kh, t, j]
                    _add_rows(x, t, between, value_dim + key_dim)
            decays[c, h] = np.float32(math.exp(running))

    return chunk_terms


@functools.cache
def channel_terms_for(key_dim, value_dim):
    """As chunk_terms_for with the delta rule, for a decay per key channel."""

    @compiled(**PARALLEL)
    def channel_terms(q, k, v, gates, solved, queries, keys, scores, decays):
        """gates (beta [chunks, value heads, width], log decay [.., width, dk]); decays [chunks, value heads, dk].

        e^(G_t - G_j) k_j is kept for all j < t and decayed once a row: no exponential for each pair, none above one,
        and after the last row it is what `keys` has to be.
        """
        beta, decay = gates
        count, value_heads, width = beta.shape
        group = value_heads // q.shape[1]
        for task in prange(count * value_heads):
            c = task // value_heads
            h = task % value_heads
            kh = h // group
            x = solved[c, h]
            past = keys[c, h]
            a = np.empty(key_dim, np.float32)
            since = np.ones(key_dim, np.float32)
            lower = np.empty(width, np.float32)
            for t in range(width):
                step = beta[c, h, t]
                own_q = q[c, kh, t]
                own_k = k[c, kh, t]
                own = np.float32(0.0)
                for i in range(key_dim):
                    a[i] = exp(decay[c, h, t, i])
                    since[i] *= a[i]
                    past[t, i] = own_k[i]
                    queries[c, h, t, i] = own_q[i] * since[i]
                    x[t, value_dim + i] = own_k[i] * since[i] * step
                    own += own_k[i] * own_q[i]
                for j in range(value_dim):
                    x[t, j] = v[c, h, t, j] * step
                for j in range(t):
                    kk = np.float32(0.0)
                    qk = np.float32(0.0)
                    for i in range(key_dim):
                        p = past[j, i] * a[i]
                        past[j, i] = p
                        kk += p * own_k[i]
                        qk += p * own_q[i]
                    lower[j] = -step * kk
                    scores[c, h, t, j] = qk
                scores[c, h, t, t] = own
                for j in range(t + 1, width):
                    scores[c, h, t, j] = np.float32(0.0)
                _add_rows(x, t, lower, value_dim + key_dim)
            for i in range(key_dim):
                decays[c, h, i] = since[i]

    return channel_terms
