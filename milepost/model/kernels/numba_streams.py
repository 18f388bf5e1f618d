"""Compiled loops of hyper-connections (`stream.py`)."""

import functools

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
    widen,
)


@compiled(**INLINE)
def _balance(between, count, along, floor):
    """Scale the rows (along 1) or columns (along 0) of [count, count], one after the other, to sums of nearly one."""
    for i in range(count):
        total = floor
        for j in range(count):
            total += between[i * along + j * (1 - along), j * along + i * (1 - along)]
        factor = np.float32(1.0) / total
        for j in range(count):
            between[i * along + j * (1 - along), j * along + i * (1 - along)] *= factor


@functools.cache
def read_streams_for(count):
    """What goes into half a layer, of `count` streams, and the weights with which its output goes back."""

    @compiled(**PARALLEL)
    def read_streams(streams, made, norm, settings, x, write, between):
        """streams [tokens, count, width]; made [tokens, count + count + count * count]; norm [width].

        settings (eps of the norm, floor, rounds); x [tokens, width]; write [tokens, count]; between [.., count, count].
        """
        eps, floor, rounds = settings
        width = len(norm)
        for t in prange(len(streams)):
            mix = np.empty((count, count), np.float32)
            wide = np.zeros(width, np.float32)
            for i in range(count):
                top = made[t, (2 + i) * count]
                for j in range(count):
                    top = max(top, made[t, (2 + i) * count + j])
                total = np.float32(0.0)
                for j in range(count):
                    mix[i, j] = exp(made[t, (2 + i) * count + j] - top)
                    total += mix[i, j]
                for j in range(count):
                    mix[i, j] = mix[i, j] / total + floor
            _balance(mix, count, 0, floor)
            for _ in range(rounds - 1):
                _balance(mix, count, 1, floor)
                _balance(mix, count, 0, floor)
            for i in range(count):
                write[t, i] = np.float32(2.0) * sigmoid(made[t, count + i])
                for j in range(count):
                    between[t, i, j] = mix[i, j]
                weight = sigmoid(made[t, i]) + floor
                for j in range(width):
                    wide[j] += weight * widen(streams[t, i, j])
            scale = scale_to_norm(wide, width, eps)
            for j in range(width):
                x[t, j] = narrow(wide[j] * scale * norm[j], x)

    return read_streams


@functools.cache
def write_streams_for(count):
    @compiled(**PARALLEL)
    def write_streams(streams, y, write, between):
        """streams = between^T streams + write y in place; y [tokens, width], the rest as above."""
        width = y.shape[1]
        for t in prange(len(streams)):
            mixed = np.empty((count, width), np.float32)
            for i in range(count):
                for j in range(width):
                    mixed[i, j] = write[t, i] * widen(y[t, j])
                for k in range(count):
                    weight = between[t, k, i]
                    for j in range(width):
                        mixed[i, j] += weight * widen(streams[t, k, j])
            for i in range(count):
                for j in range(width):
                    streams[t, i, j] = narrow(mixed[i, j], streams)

    return write_streams
