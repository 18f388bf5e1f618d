"""The hot loops on a CPU, compiled by numba: scalar code on NumPy views of torch's memory.

Arrays hold float32, or bfloat16 seen as uint16 (NumPy has no bfloat16); `_widen` and `_narrow` choose by the array's
type when a kernel is compiled. All sums are float32. Each parallel task works on one sequence alone, so a result
never depends on the batch around it.

Kernels with inner loops over head dimensions are made per model shape (`*_for`), so that these loops have constant
lengths and become straight vector code; the sizes reach the helpers as arguments and are folded after inlining.

The machine code is cached beside this file, or in the user's cache folder, or, if neither is writable, not at all.
"""

import functools
import math

import numba
import numpy as np
from llvmlite import ir
from numba import njit, prange, types
from numba.core import cgutils
from numba.extending import intrinsic, overload

_VECTOR = {"reassoc", "contract", "nsz", "arcp"}
_PARALLEL = {"parallel": True, "fastmath": _VECTOR, "error_model": "numpy"}
_AHEAD = 12  # rows whose KV is asked for before its turn: scattered rows would each wait for memory
_INLINE = {"forceinline": True, "fastmath": _VECTOR, "error_model": "numpy"}


def _compile(function=None, **options):
    """numba.njit with a cache on disk where there is a place for one."""
    if function is None:
        return lambda f: _compile(f, **options)
    try:
        return njit(cache=True, **options)(function)
    except RuntimeError:  # "no locator available": nothing near the package or the user is writable
        return njit(**options)(function)


def _widen(value):
    raise NotImplementedError


def _narrow(value, array):
    raise NotImplementedError


@overload(_widen, inline="always")
def _widen_overload(value):
    """A float32 from an array element."""
    if isinstance(value, types.Integer):
        return lambda value: np.uint32(np.uint32(value) << np.uint32(16)).view(np.float32)
    return lambda value: value


@overload(_narrow, inline="always")
def _narrow_overload(value, array):  # noqa: ARG001 - numba matches parameters by name
    """A float32 as an element of `array`; to bfloat16 it rounds to nearest, ties to even."""
    if isinstance(array.dtype, types.Integer):

        def to_bfloat16(value, array):  # noqa: ARG001
            bits = np.float32(value).view(np.uint32)
            rounded = np.uint32(bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))
            return np.uint16(rounded >> np.uint32(16))

        return to_bfloat16
    return lambda value, array: np.float32(value)  # noqa: ARG005


@intrinsic
def _prefetch(typingctx, array):  # noqa: ARG001 - numba passes it
    """Ask for the cache line in which a one-dimensional array begins."""

    def code(context, builder, signature, args):
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        pointer = builder.bitcast(data, ir.IntType(8).as_pointer())
        flag = ir.IntType(32)
        hint = ir.FunctionType(ir.VoidType(), [pointer.type, flag, flag, flag])
        function = cgutils.get_or_insert_function(builder.module, hint, "llvm.prefetch.p0")
        builder.call(function, [pointer, flag(0), flag(3), flag(1)])  # for reading, keep in all caches, data
        return

    return types.void(array), code


@_compile(error_model="numpy", forceinline=True)
def _exp(x):
    """e^x in float32, within 2 ulp; written out so that loops over it vectorise (libm's can't be).

    x = n ln 2 + r with |r| <= ln 2 / 2; e^r by its Taylor polynomial of degree 7, 2^n by the exponent bits.
    """
    x = min(max(x, np.float32(-87.0)), np.float32(88.0))
    n = math.floor(x * np.float32(1.44269504) + np.float32(0.5))
    r = x - n * np.float32(0.693359375)
    r = r + n * np.float32(2.12194440e-4)
    p = np.float32(1.0 / 5040.0)
    p = p * r + np.float32(1.0 / 720.0)
    p = p * r + np.float32(1.0 / 120.0)
    p = p * r + np.float32(1.0 / 24.0)
    p = p * r + np.float32(1.0 / 6.0)
    p = p * r + np.float32(0.5)
    p = p * r + np.float32(1.0)
    p = p * r + np.float32(1.0)
    return p * np.uint32((np.int32(n) + np.int32(127)) << np.int32(23)).view(np.float32)


@_compile(**_INLINE)
def _sigmoid(x):
    return np.float32(1.0) / (np.float32(1.0) + _exp(-x))


@_compile(error_model="numpy", forceinline=True)
def _softplus(x):
    if x > np.float32(20.0):
        return x
    return np.float32(math.log1p(math.exp(x)))


@_compile(**_PARALLEL)
def add_norm(stream, delta, weight, eps, out):
    """stream += delta, then out = RMSNorm(stream) * weight. All [tokens, width]; weight [width]."""
    tokens, width = stream.shape
    for t in prange(tokens):
        square = np.float32(0.0)
        for j in range(width):
            stream[t, j] = _narrow(_widen(stream[t, j]) + _widen(delta[t, j]), stream)
        for j in range(width):
            x = _widen(stream[t, j])
            square += x * x
        scale = np.float32(1.0) / math.sqrt(square / np.float32(width) + eps)
        for j in range(width):
            out[t, j] = _narrow(_widen(stream[t, j]) * scale * weight[j], out)


@_compile(**_PARALLEL)
def silu_mul(gate_up, out):
    """out = silu(gate) * up, with gate_up [tokens, 2 * width] holding gate first."""
    tokens, width = out.shape
    for t in prange(tokens):
        for j in range(width):
            gate = _widen(gate_up[t, j])
            out[t, j] = _narrow(gate * _sigmoid(gate) * _widen(gate_up[t, width + j]), out)


@_compile(**_INLINE)
def _scale_to_norm(x, size, eps):
    """1 / sqrt(mean of squares + eps)."""
    square = np.float32(0.0)
    for j in range(size):
        square += x[j] * x[j]
    return np.float32(1.0) / math.sqrt(square / np.float32(size) + eps)


@_compile(**_INLINE)
def _l2_normalize(x, size, factor):
    square = np.float32(0.0)
    for j in range(size):
        square += x[j] * x[j]
    scale = factor / math.sqrt(square + np.float32(1e-6))
    for j in range(size):
        x[j] *= scale


@_compile(**_INLINE)
def _gated_norm(x, size, gates, first, weight, eps, out, to):
    """out[to:] = RMSNorm(x) * weight * silu(gates[first:]), `size` elements."""
    scale = _scale_to_norm(x, size, eps)
    for j in range(size):
        gate = _widen(gates[first + j])
        out[to + j] = _narrow(x[j] * scale * weight[j] * gate * _sigmoid(gate), out)


@functools.cache
def gated_norm_for(dim):
    """The gated norm of heads of `dim`."""

    @_compile(**_PARALLEL)
    def gated_norm(x, place, gates, offset, weight, eps, out):
        """x [chunks, heads, width, dim]; token t lies at place[t] in [chunks * width], gates at gates[t, offset:]."""
        heads, width = x.shape[1:3]
        for t in prange(len(place)):
            for h in range(heads):
                own = x[place[t] // width, h, place[t] % width]
                _gated_norm(own, dim, gates[t], offset + h * dim, weight, eps, out[t], h * dim)

    return gated_norm


@_compile(**_INLINE)
def _convolve(inputs, window, taps, weight, first, size, out):
    """One token's convolution with silu for `size` channels from `first` on; shifts the window.

    inputs [channels...]; window [taps, channels], oldest first; weight [taps + 1, channels].
    """
    for j in range(size):
        y = _widen(inputs[first + j]) * weight[taps, first + j]
        for i in range(taps):
            y += _widen(window[i, first + j]) * weight[i, first + j]
        out[j] = y * _sigmoid(y)
    for i in range(taps - 1):
        for j in range(size):
            window[i, first + j] = window[i + 1, first + j]
    for j in range(size):
        window[taps - 1, first + j] = _narrow(_widen(inputs[first + j]), window)


@_compile(**_INLINE)
def _delta_head(state, key_dim, value_dim, q, k, v, decay, beta, read, out):
    """One head's step, state [dk, dv] in place: S = decay S; S += k (beta (v - S^T k))^T; out = S^T q."""
    for j in range(value_dim):
        read[j] = np.float32(0.0)
        out[j] = np.float32(0.0)
    for i in range(key_dim):
        for j in range(value_dim):
            read[j] += k[i] * _widen(state[i, j])
    for j in range(value_dim):
        read[j] = beta * (v[j] - decay * read[j])
    for i in range(key_dim):
        for j in range(value_dim):
            s = decay * _widen(state[i, j]) + k[i] * read[j]
            state[i, j] = _narrow(s, state)
            out[j] += q[i] * s


@functools.cache
def delta_step_for(key_heads, value_heads, key_dim, value_dim, kernel):
    """One token of Gated DeltaNet for each of a batch of sequences."""
    group = value_heads // key_heads
    key_width = key_heads * key_dim
    at_z = 2 * key_width + value_heads * value_dim
    at_b = at_z + value_heads * value_dim
    at_a = at_b + value_heads
    values = group * value_dim
    taps = kernel - 1

    @_compile(**_PARALLEL)
    def delta_step(projected, slots, conv, temporal, weights, eps, out):
        """Convolution, delta rule, gated norm.

        projected  [batch, q | k | v | z | b | a]
        conv       [slots, kernel - 1, channels], temporal [slots, value heads, dk, dv]: updated in place by slot
        weights    (convolution [kernel, channels], exp(A_log) [value heads], dt_bias [value heads], norm [dv])
        out        [batch, value heads * dv]
        """
        conv_weight, rate, dt_bias, norm = weights
        for task in prange(len(slots) * key_heads):
            n = task // key_heads
            kh = task % key_heads
            slot = slots[n]
            row = projected[n]
            q = np.empty(key_dim, np.float32)
            k = np.empty(key_dim, np.float32)
            v = np.empty(values, np.float32)
            read = np.empty(value_dim, np.float32)
            o = np.empty(value_dim, np.float32)
            _convolve(row, conv[slot], taps, conv_weight, kh * key_dim, key_dim, q)
            _convolve(row, conv[slot], taps, conv_weight, key_width + kh * key_dim, key_dim, k)
            _convolve(row, conv[slot], taps, conv_weight, 2 * key_width + kh * values, values, v)
            _l2_normalize(q, key_dim, np.float32(1.0) / math.sqrt(np.float32(key_dim)))
            _l2_normalize(k, key_dim, np.float32(1.0))
            for g in range(group):
                h = kh * group + g
                beta = _sigmoid(_widen(row[at_b + h]))
                decay = np.float32(math.exp(-rate[h] * _softplus(_widen(row[at_a + h]) + dt_bias[h])))
                own = v[g * value_dim : (g + 1) * value_dim]
                _delta_head(temporal[slot, h], key_dim, value_dim, q, k, own, decay, beta, read, o)
                _gated_norm(o, value_dim, row, at_z + h * value_dim, norm, eps, out[n], h * value_dim)

    return delta_step


@functools.cache
def convolve_for(key_heads, value_heads, key_dim, value_dim, kernel):
    """The convolution of a prefill, with its results as the chunk form wants them."""
    key_width = key_heads * key_dim

    @_compile(**_PARALLEL)
    def convolve(ext, chunks, weight, q, k, v):
        """ext [.., channels] inputs after their windows; chunks [chunks, width] where a token's oldest input stands.

        weight [kernel, channels]; out: q, k [chunks, key heads, width, dk], normed, q scaled;
        v [chunks, value heads, width, dv].
        """
        count, width = chunks.shape
        for task in prange(count * width):
            c = task // width
            t = task % width
            e = chunks[c, t]
            mixed = np.empty(ext.shape[1], np.float32)
            for j in range(len(mixed)):
                y = np.float32(0.0)
                for i in range(kernel):
                    y += _widen(ext[e + i, j]) * weight[i, j]
                mixed[j] = y * _sigmoid(y)
            for h in range(key_heads):
                own_q = mixed[h * key_dim : (h + 1) * key_dim]
                own_k = mixed[key_width + h * key_dim : key_width + (h + 1) * key_dim]
                _l2_normalize(own_q, key_dim, np.float32(1.0) / math.sqrt(np.float32(key_dim)))
                _l2_normalize(own_k, key_dim, np.float32(1.0))
                for j in range(key_dim):
                    q[c, h, t, j] = own_q[j]
                    k[c, h, t, j] = own_k[j]
            for h in range(value_heads):
                for j in range(value_dim):
                    v[c, h, t, j] = mixed[2 * key_width + h * value_dim + j]

    return convolve


@functools.cache
def chunk_terms_for(key_dim, value_dim):
    """The terms of the delta rule's matrix form (`kernels.ChunkTerms`) from the chunks' products."""

    @_compile(**_PARALLEL)
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
                    e = _exp(min(total[t] - total[j], np.float32(0.0)))
                    between[j] = e if j <= t else np.float32(0.0)
                for j in range(width):
                    scores[c, h, t, j] = between[j] * qk[c, kh, t, j]
                since = np.float32(math.exp(total[t]))
                until = np.float32(math.exp(running - total[t]))
                step = beta[c, h, t]
                for j in range(key_dim):
                    queries[c, h, t, j] = q[c, kh, t, j] * since
                    keys[c, h, t, j] = k[c, kh, t, j] * until
                    x[t, value_dim + j] = k[c, kh, t, j] * since * step
                for j in range(value_dim):
                    x[t, j] = v[c, h, t, j] * step
                # Forward substitution: row t of (I + L)^-1 R is R_t less the rows above, weighted by L_t.
                for i in range(t):
                    factor = step * between[i] * kk[c, kh, t, i]
                    for j in range(value_dim + key_dim):
                        x[t, j] -= factor * x[i, j]
            decays[c, h] = np.float32(math.exp(running))

    return chunk_terms


@_compile(**_INLINE)
def _norm_rotate(row, first, size, half, weight, eps, cos, sin, factor, out):
    """out = factor * rotary(RMSNorm(row[first:]) * weight) of `size` elements; the first 2 * half of them turn."""
    for j in range(size):
        out[j] = _widen(row[first + j])
    scale = factor * _scale_to_norm(out, size, eps)
    for j in range(size):
        out[j] *= scale * weight[j]
    for j in range(half):
        a = out[j]
        b = out[half + j]
        out[j] = a * cos[j] - b * sin[j]
        out[half + j] = b * cos[j] + a * sin[j]


@_compile(**_INLINE)
def _softmax(scores, count):
    top = scores[0]
    for t in range(count):
        top = max(top, scores[t])
    total = np.float32(0.0)
    for t in range(count):
        scores[t] = _exp(scores[t] - top)
        total += scores[t]
    inverse = np.float32(1.0) / total
    for t in range(count):
        scores[t] *= inverse


@functools.cache
def attention_step_for(heads, kv_heads, dim, rotary_dim):
    """One token of gated attention for each of a batch of sequences, reading KV rows in place."""
    group = heads // kv_heads
    half = rotary_dim // 2
    at_k = 2 * heads * dim
    at_v = at_k + kv_heads * dim

    @_compile(**_PARALLEL)
    def attention_step(projected, angles, rows, offsets, keys, values, weights, eps, out):
        """Norms, rotary, KV written to its row, attention, output gate.

        projected  [batch, q | gate | k | v]
        angles     (cos, sin), each [batch, rotary dim / 2]
        rows       int32, the sequences' KV rows one after the other; sequence n has rows[offsets[n] : offsets[n + 1]],
                   the last of them is written here
        keys       [rows, kv heads, dim], values the same
        weights    (q norm [dim], k norm [dim])
        out        [batch, heads * dim]
        """
        q_norm, k_norm = weights
        cos, sin = angles
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
            _norm_rotate(row, at_k + kh * dim, dim, half, k_norm, eps, cos[n], sin[n], one, wide)
            for j in range(dim):
                keys[own[count - 1], kh, j] = _narrow(wide[j], keys)
                values[own[count - 1], kh, j] = _narrow(_widen(row[at_v + kh * dim + j]), values)
            factor = one / math.sqrt(np.float32(dim))
            for g in range(group):
                _norm_rotate(row, (kh * group + g) * dim, dim, half, q_norm, eps, cos[n], sin[n], factor, q[g])
            for t in range(count):
                ahead = own[min(t + _AHEAD, count - 1)]
                for j in range(0, dim, line):
                    _prefetch(keys[ahead, kh, j:])
                key = keys[own[t], kh]
                for j in range(dim):
                    wide[j] = _widen(key[j])
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
                    _prefetch(values[ahead, kh, j:])
                value = values[own[t], kh]
                for j in range(dim):
                    wide[j] = _widen(value[j])
                for g in range(group):
                    p = scores[g, t]
                    for j in range(dim):
                        o[g, j] += p * wide[j]
            for g in range(group):
                first = (kh * group + g) * dim
                for j in range(dim):
                    out[n, first + j] = _narrow(o[g, j] * _sigmoid(_widen(row[heads * dim + first + j])), out)

    return attention_step


def set_threads(count):
    """Let the calling thread's kernels use `count` threads, or as many as numba was started with if that is fewer."""
    numba.set_num_threads(min(count, numba.config.NUMBA_NUM_THREADS))
