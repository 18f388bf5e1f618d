"""Compiled loops of routed experts: which experts a token takes, and the few rows that each expert gets in decode."""

import numpy as np
from numba import prange

from milepost.model.kernels.numba_elementwise import INLINE, PARALLEL, compiled, exp, narrow, prefetch, sigmoid, widen

_ROWS = 32  # of a weight, for one task


@compiled(**PARALLEL)
def route(logits, bias, softmax, normalize, sizes, numbers, chosen, weights):
    """The best experts of each token and their weights, both [tokens, per token], from logits [tokens, experts].

    sizes (groups, groups kept), numbers (epsilon, scale), as in MoeSpec; bias float32 [experts]
    """
    groups, kept = sizes
    epsilon, scale = numbers
    tokens, experts = logits.shape
    size = experts // groups
    low = np.float32(-np.inf)
    for t in prange(tokens):
        scores = np.empty(experts, np.float32)
        ranked = np.empty(experts, np.float32)
        value = np.empty(groups, np.float32)
        top = low
        for e in range(experts):
            scores[e] = widen(logits[t, e])
            top = max(top, scores[e])
        total = np.float32(0.0)
        for e in range(experts):
            scores[e] = exp(scores[e] - top) if softmax else sigmoid(scores[e])
            total += scores[e]
        factor = np.float32(1.0) / total if softmax else np.float32(1.0)
        for e in range(experts):
            scores[e] *= factor
            ranked[e] = scores[e] + bias[e]
        for g in range(groups * (kept < groups)):
            first = second = low
            for e in range(g * size, (g + 1) * size):
                second = max(second, min(first, ranked[e]))
                first = max(first, ranked[e])
            value[g] = first + second
        for _ in range(groups - kept):
            worst = np.argmin(value)
            value[worst] = np.inf
            ranked[worst * size : (worst + 1) * size] = low
        total = epsilon
        for c in range(chosen.shape[1]):
            best = np.argmax(ranked)
            ranked[best] = low
            chosen[t, c] = best
            weights[t, c] = scores[best]
            total += scores[best]
        for c in range(chosen.shape[1]):
            weights[t, c] *= scale / total if normalize else scale


@compiled(**INLINE)
def _products(weight, first, a, share, pairs, y):
    """y[p] = weight a[p // share] for the pairs p given, `_ROWS` rows of the weight from `first` on.

    Two rows and four pairs at a time, the last pair again where four don't fill up: so there is only one loop, and
    what is computed for a pair doesn't depend on how many there are.
    """
    count = len(weight)
    last = len(pairs) - 1
    line = 64 // weight.itemsize
    for r in range(first, min(first + _ROWS, count), 2):
        other = min(r + 1, count - 1)
        u = weight[r]
        v = weight[other]
        for ahead in (r + 4, r + 5):
            soon = weight[min(ahead, count - 1)]
            for j in range(0, len(u), line):
                prefetch(soon[j:])
        for i in range(0, last + 1, 4):
            p0 = pairs[i]
            p1 = pairs[min(i + 1, last)]
            p2 = pairs[min(i + 2, last)]
            p3 = pairs[min(i + 3, last)]
            a0 = a[p0 // share]
            a1 = a[p1 // share]
            a2 = a[p2 // share]
            a3 = a[p3 // share]
            u0 = u1 = u2 = u3 = v0 = v1 = v2 = v3 = np.float32(0.0)
            for j in range(len(u)):
                wide_u = widen(u[j])
                wide_v = widen(v[j])
                u0 += wide_u * a0[j]
                u1 += wide_u * a1[j]
                u2 += wide_u * a2[j]
                u3 += wide_u * a3[j]
                v0 += wide_v * a0[j]
                v1 += wide_v * a1[j]
                v2 += wide_v * a2[j]
                v3 += wide_v * a3[j]
            y[p0, r], y[p1, r], y[p2, r], y[p3, r] = u0, u1, u2, u3
            y[p0, other], y[p1, other], y[p2, other], y[p3, other] = v0, v1, v2, v3


@compiled(**INLINE)
def _sum(y, place, weights, t, out):
    """out[t] = sum of weights[t, c] y[place[t * per token + c]]."""
    per_token = weights.shape[1]
    total = np.zeros(y.shape[1], np.float32)
    for c in range(per_token):
        own = y[place[t * per_token + c]]
        for j in range(len(own)):
            total[j] += weights[t, c] * widen(own[j])
    for j in range(len(total)):
        out[t, j] = narrow(total[j], out)


@compiled(**PARALLEL)
def combine(y, order, weights, out):
    """Each token's weighted sum over its pairs, where y[i] is of the pair order[i]."""
    place = np.empty(len(order), np.int64)
    for i in range(len(order)):
        place[order[i]] = i
    for t in prange(len(out)):
        _sum(y, place, weights, t, out)


@compiled(**PARALLEL)
def experts(x, chosen, weights, matrices, activation, out):
    """out[t] = sum of weights[t, c] down(activation(up x[t])) over the experts chosen[t, c].

    x float32 [tokens, inner]; matrices up [experts, gate | up or up alone, inner] and down [experts, inner, width];
    activation (gated, limit), as in MLPs. One pass over the weights of each expert that any token takes; pairs of a
    token and an expert are numbered t * per token + c.
    """
    up, down = matrices
    gated, limit = activation
    tokens, per_token = chosen.shape
    count, rows, inner = up.shape
    width = down.shape[2]
    pairs = tokens * per_token
    first = np.zeros(count + 1, np.int64)
    for p in range(pairs):
        first[chosen[p // per_token, p % per_token] + 1] += 1
    active = np.flatnonzero(first[1:])
    first = np.cumsum(first)
    order = np.empty(pairs, np.int64)
    free = first.copy()
    for p in range(pairs):
        e = chosen[p // per_token, p % per_token]
        order[free[e]] = p
        free[e] += 1
    raw = np.empty((pairs, rows), np.float32)
    y = np.empty((pairs, inner), np.float32)
    blocks = -(-rows // _ROWS)
    for task in prange(len(active) * blocks):
        e = active[task // blocks]
        _products(up[e], task % blocks * _ROWS, x, per_token, order[first[e] : first[e + 1]], raw)
    for p in prange(pairs):
        for j in range(width):
            g = min(raw[p, j], limit)
            if gated:
                raw[p, j] = g * sigmoid(g) * min(max(raw[p, width + j], -limit), limit)
            else:
                raw[p, j] = max(g, np.float32(0.0)) ** 2
    blocks = -(-inner // _ROWS)
    for task in prange(len(active) * blocks):
        e = active[task // blocks]
        _products(down[e], task % blocks * _ROWS, raw, 1, order[first[e] : first[e + 1]], y)
    place = np.arange(pairs)
    for t in prange(tokens):
        _sum(y, place, weights, t, out)
