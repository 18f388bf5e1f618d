"""The hot loops on a CPU, compiled by numba: scalar code on NumPy views of torch's memory.

Arrays hold float32, or bfloat16 seen as uint16 (NumPy has no bfloat16); `widen` and `narrow` choose by the array's
type when a kernel is compiled. All sums are float32. Each parallel task works on one sequence alone, or
does the same for each of several, so a result never depends on the batch around it.

Kernels with inner loops over head dimensions are made per model shape (`*_for`), so that these loops have constant
lengths and become straight vector code; the sizes reach the helpers as arguments and are folded after inlining.

The machine code is cached beside this file, or in the user's cache folder, or, if neither is writable, not at all.
"""

import math

import numba
import numpy as np
from llvmlite import ir
from numba import njit, prange, types
from numba.core import cgutils
from numba.extending import intrinsic, overload

_VECTOR = {"reassoc", "contract", "nsz", "arcp"}
PARALLEL = {"parallel": True, "fastmath": _VECTOR, "error_model": "numpy"}
INLINE = {"forceinline": True, "fastmath": _VECTOR, "error_model": "numpy"}


def compiled(function=None, **options):
    """numba.njit with a cache on disk where there is a place for one."""
    if function is None:
        return lambda f: compiled(f, **options)
    try:
        return njit(cache=True, **options)(function)
    except RuntimeError:  # "no locator available": nothing near the package or the user is writable
        return njit(**options)(function)


def widen(value):
    raise NotImplementedError


def narrow(value, array):
    raise NotImplementedError


@overload(widen, inline="always")
def widen_overload(value):
    """A float32 from an array element."""
    if isinstance(value, types.Integer):
        return lambda value: np.uint32(np.uint32(value) << np.uint32(16)).view(np.float32)
    return lambda value: value


@overload(narrow, inline="always")
def narrow_overload(value, array):  # noqa: ARG001 - numba matches parameters by name
    """A float32 as an element of `array`; to bfloat16 it rounds to nearest, ties to even."""
    if isinstance(array.dtype, types.Integer):

        def to_bfloat16(value, array):  # noqa: ARG001
            bits = np.float32(value).view(np.uint32)
            rounded = np.uint32(bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))
            return np.uint16(rounded >> np.uint32(16))

        return to_bfloat16
    return lambda value, array: np.float32(value)  # noqa: ARG005


@intrinsic
def prefetch(typingctx, array):  # noqa: ARG001 - numba passes it
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


@compiled(error_model="numpy", forceinline=True)
def exp(x):
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


@compiled(**INLINE)
def sigmoid(x):
    return np.float32(1.0) / (np.float32(1.0) + exp(-x))


@compiled(**INLINE)
def softplus(x):
    """log(1 + e^x) = max(x, 0) + log(1 + u) with u = e^-|x|; the logarithm by its series in u / (2 + u) <= 1/3."""
    u = exp(-abs(x))
    s = u / (np.float32(2.0) + u)
    q = s * s
    p = np.float32(1.0 / 11.0)
    p = p * q + np.float32(1.0 / 9.0)
    p = p * q + np.float32(1.0 / 7.0)
    p = p * q + np.float32(1.0 / 5.0)
    p = p * q + np.float32(1.0 / 3.0)
    p = p * q + np.float32(1.0)
    return max(x, np.float32(0.0)) + np.float32(2.0) * s * p


@compiled(**PARALLEL)
def add_norm(stream, delta, weight, eps, out):
    """stream += delta, then out = RMSNorm(stream) * weight. All [tokens, width]; weight [width]."""
    tokens, width = stream.shape
    for t in prange(tokens):
        square = np.float32(0.0)
        for j in range(width):
            stream[t, j] = narrow(widen(stream[t, j]) + widen(delta[t, j]), stream)
        for j in range(width):
            x = widen(stream[t, j])
            square += x * x
        scale = np.float32(1.0) / math.sqrt(square / np.float32(width) + eps)
        for j in range(width):
            out[t, j] = narrow(widen(stream[t, j]) * scale * weight[j], out)


@compiled(**PARALLEL)
def silu_mul(gate_up, out):
    """out = silu(gate) * up, with gate_up [tokens, 2 * width] holding gate first."""
    tokens, width = out.shape
    for t in prange(tokens):
        for j in range(width):
            gate = widen(gate_up[t, j])
            out[t, j] = narrow(gate * sigmoid(gate) * widen(gate_up[t, width + j]), out)


@compiled(**INLINE)
def scale_to_norm(x, size, eps):
    """1 / sqrt(mean of squares + eps)."""
    square = np.float32(0.0)
    for j in range(size):
        square += x[j] * x[j]
    return np.float32(1.0) / math.sqrt(square / np.float32(size) + eps)


def set_threads(count):
    """Let the calling thread's kernels use `count` threads, or as many as numba was started with if that is fewer."""
    numba.set_num_threads(min(count, numba.config.NUMBA_NUM_THREADS))
