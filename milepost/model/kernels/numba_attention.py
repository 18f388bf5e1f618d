"""Compiled loops of attention over rows anywhere in the pool."""

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
    prefetch,
    scale_to_norm,
    sigmoid,
    widen,
)

_AHEAD = 12  # rows whose KV is asked for before its turn: scattered rows would each wait for memory


@compiled(**INLINE)
def _norm_rotate(row, first, size, half, normed, weight, eps, cos, sin, factor, out):
    """out = factor * rotary(RMSNorm(row[first:]) * weight) of `size` elements; the first 2 * half of them turn.

    Without the norm where not `normed`.
    """
    for j in range(size):
        out[j] = widen(row[first + j])
    if normed:
        scale = factor * scale_to_norm(out, size, eps)
        for j in range(size):
            out[j] *= scale * weight[j]
    else:
        for j in range(size):
            out[j] *= factor
    for j in range(half):
        a = out[j]
        b = out[half + j]
        out[j] = a * cos[j] - b * sin[j]
        out[half + j] = b * cos[j] + a * sin[j]


@compiled(**INLINE)
def _softmax(scores, count):
    top = scores[0]
    for t in range(count):
        top = max(top, scores[t])
    total = np.float32(0.0)
    for t in range(count):
        scores[t] = exp(scores[t] - top)
        total += scores[t]
    inverse = np.float32(1.0) / total
    for t in range(count):
        scores[t] *= inverse


@functools.cache
def attention_step_for(heads, kv_heads, dim, gated, normed):
    """One token of attention for each of a batch of sequences, reading KV rows in place."""
    group = heads // kv_heads
    at_k = (1 + gated) * heads * dim
    at_v = at_k + kv_heads * dim

    @compiled(**PARALLEL)
    def attention_step(projected, angles, rows, offsets, keys, values, weights, eps, out):
        """Norms, rotary, KV written to its row, attention, output gate.

        projected  [batch, q | gate, if there is one | k | v]
        angles     (cos, sin), each [batch, rotary dim / 2]
        rows       int32, the sequences' KV rows one after the other; sequence n has rows[offsets[n] : offsets[n + 1]],
                   the last of them is written here
        keys       [rows, kv heads, dim], values the same
        weights    (q norm [dim], k norm [dim])
        out        [batch, heads * dim]
        """
        q_norm, k_norm = weights
        cos, sin = angles
        half = cos.shape[1]
        for task in prange((len(offsets) - 1) * kv_heads):
            n = task // kv_heads
            kh = task % kv_heads
            row = projected[n]
            own = rows[offsets[n] : offsets[n + 1]]
            count = len(own)
            line = 64 // keys.itemsize  # elements of a cache line
            wide = np.empty(dim, np.float32)
            q = np.empty((group, dim), np.float32)
            o = np.zeros((group, dim), np.float32)
            scores = np.empty((group, count), np.float32)
            one = np.float32(1.0)
            _norm_rotate(row, at_k + kh * dim, dim, half, normed, k_norm, eps, cos[n], sin[n], one, wide)
            for j in range(dim):
                keys[own[count - 1], kh, j] = narrow(wide[j], keys)
                values[own[count - 1], kh, j] = narrow(widen(row[at_v + kh * dim + j]), values)
            factor = one / math.sqrt(np.float32(dim))
            for g in range(group):
                _norm_rotate(row, (kh * group + g) * dim, dim, half, normed, q_norm, eps, cos[n], sin[n], factor, q[g])
            for t in range(count):
                ahead = own[min(t + _AHEAD, count - 1)]
                for j in range(0, dim, line):
                    prefetch(keys[ahead, kh, j:])
                key = keys[own[t], kh]
                for j in range(dim):
                    wide[j] = widen(key[j])
                for g in range(group):
                    dot = np.float32(0.0)
                    for j in range(dim):
                        dot += q[g, j] * wide[j]
                    scores[g, t] = dot
            for g in range(group):
                _softmax(scores[g], count)
            for t in range(count):
                ahead = own[min(t + _AHEAD, count - 1)]
                for j in range(0, dim, line):
                    prefetch(values[ahead, kh, j:])
                value = values[own[t], kh]
                for j in range(dim):
                    wide[j] = widen(value[j])
                for g in range(group):
                    p = scores[g, t]
                    for j in range(dim):
                        o[g, j] += p * wide[j]
            for g in range(group):
                first = (kh * group + g) * dim
                for j in range(dim):
                    y = o[g, j]
                    if gated:
                        y *= sigmoid(widen(row[heads * dim + first + j]))
                    out[n, first + j] = narrow(y, out)

    return attention_step


@functools.cache
def latent_step_for(heads, rank, width):
    """Attention of one token for each of a batch of sequences to latent rows of `width`, values their first `rank`."""
    block = next(size for size in (4, 2, 1) if heads % size == 0)  # heads that share one pass over the rows
    blocks = heads // block

    @compiled(**PARALLEL)
    def latent_step(query, rows, offsets, keys, out):
        """query float32 [batch, heads, width]; rows, offsets as above; keys [rows, width]; out [batch, heads, rank]."""
        for task in prange((len(offsets) - 1) * blocks):
            n = task // blocks
            first = task % blocks * block
            own = rows[offsets[n] : offsets[n + 1]]
            count = len(own)
            line = 64 // keys.itemsize
            wide = np.empty(width, np.float32)
            scores = np.empty((block, count), np.float32)
            o = np.zeros((block, rank), np.float32)
            for t in range(count):
                ahead = own[min(t + _AHEAD, count - 1)]
                for j in range(0, width, line):
                    prefetch(keys[ahead, j:])
                key = keys[own[t]]
                for j in range(width):
                    wide[j] = widen(key[j])
                for g in range(block):
                    q = query[n, first + g]
                    dot = np.float32(0.0)
                    for j in range(width):
                        dot += q[j] * wide[j]
                    scores[g, t] = dot
            for g in range(block):
                _softmax(scores[g], count)
            for t in range(count):
                key = keys[own[t]]
                for j in range(rank):
                    wide[j] = widen(key[j])
                for g in range(block):
                    p = scores[g, t]
                    for j in range(rank):
                        o[g, j] += p * wide[j]
            for g in range(block):
                for j in range(rank):
                    out[n, first + g, j] = o[g, j]

    return latent_step


@functools.cache
def pool_for(group, dim):
    """One key for each group of tokens."""

    @compiled(**PARALLEL)
    def pool(tokens, place, out):
        """tokens [groups, group, key | gate]; place float32 [group, dim]; out [groups, dim]."""
        for g in prange(len(tokens)):
            top = np.full(dim, np.float32(-np.inf))
            total = np.zeros(dim, np.float32)
            key = np.zeros(dim, np.float32)
            for i in range(group):
                for j in range(dim):
                    top[j] = max(top[j], widen(tokens[g, i, dim + j]) + place[i, j])
            for i in range(group):
                for j in range(dim):
                    weight = exp(widen(tokens[g, i, dim + j]) + place[i, j] - top[j])
                    total[j] += weight
                    key[j] += weight * widen(tokens[g, i, j])
            for j in range(dim):
                out[g, j] = narrow(key[j] / total[j], out)

    return pool


@functools.cache
def choose_rows_for(heads, dim, group):
    """An indexer's choice for one token of each of a batch of sequences."""

    @compiled(**PARALLEL)
    def choose_rows(query, weights, rows, offsets, values, kept, borders, out):
        """The rows of the `kept` best groups and of the tail; of sequence n into out[borders[n] : borders[n + 1]].

        query float32 [batch, heads, dim]; weights float32 [batch, heads]; rows, offsets as above; values [rows, any].
        """
        for n in prange(len(offsets) - 1):
            own = rows[offsets[n] : offsets[n + 1]]
            groups = len(own) // group
            line = 64 // values.itemsize
            wide = np.empty(dim, np.float32)
            scores = np.empty(groups, np.float32)
            for g in range(groups):
                ahead = own[min(g + _AHEAD, groups - 1) * group + group - 1]
                for j in range(0, dim, line):
                    prefetch(values[ahead, j:])
                key = values[own[g * group + group - 1]]
                for j in range(dim):
                    wide[j] = widen(key[j])
                score = np.float32(0.0)
                for h in range(heads):
                    dot = np.float32(0.0)
                    for j in range(dim):
                        dot += query[n, h, j] * wide[j]
                    score += weights[n, h] * max(dot, np.float32(0.0))
                scores[g] = score
            level = 0  # groups that are as good as the last one that is kept, and are kept
            least = np.float32(-np.inf)
            if groups > kept:
                least = np.partition(scores, groups - kept)[groups - kept]
                level = kept
                for g in range(groups):
                    level -= scores[g] > least
            at = borders[n]
            for g in range(groups):
                take = scores[g] > least
                if scores[g] == least and level > 0:
                    level -= 1
                    take = True
                if take:
                    for i in range(g * group, (g + 1) * group):
                        out[at] = own[i]
                        at += 1
            for i in range(groups * group, len(own)):
                out[at] = own[i]
                at += 1

    return choose_rows
