"""Fits the factors of a law to measured seconds: of kernels (tables, a layer each) and of whole servers.

Factors are positive and errors relative, so both are fitted as logarithms: Gauss-Newton steps, damped as Levenberg
and Marquardt do, with Huber's weights, so that a tenth of wild points does not decide. NumPy only.
"""

import csv
import gzip
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from milepost.core import models
from milepost.core.geometry import Formats, Layout
from milepost.core.gpus import Gpu
from milepost.sim.roofline import (
    DELTA_FLOPS,
    KERNEL_CHUNK,
    PRIORS,
    SERVED,
    Efficiency,
    Kernels,
    efficiency,
    roofline,
)

Floats = NDArray[np.float64]

Law = Callable[[Floats], Floats]
"""Predicted seconds of all points, from the factors."""

STEPS, NUDGE, LONGEST = 80, 1e-4, 0.5
"""Steps at most; the difference for slopes; the longest step. In logarithms of factors."""

HUBER = 1.5
"""Errors beyond so many robust standard deviations count linearly, not squared."""


def fit(law: Law, start: Sequence[float], measured: Floats, prior: float = 0.0) -> Floats:
    """The factors at which `law` comes nearest to `measured`, from `start`.

    `prior`: how strongly they are held at `start`; a factor e times as large then costs as much as one point that
    is off by √prior.
    """
    begin = np.log(np.asarray(start, np.float64))
    target, factors, damping = np.log(measured), begin.copy(), 1e-2

    def errors(at: Floats) -> Floats:
        return np.asarray(np.log(law(np.exp(at))) - target)

    def cost(off: Floats, at: Floats, weights: Floats) -> float:
        return float(np.square(weights * off).sum() + prior * np.square(at - begin).sum())

    axes, pull = np.eye(factors.size), np.sqrt(prior)
    for _ in range(STEPS):
        here = errors(factors)
        weights = _huber(here)
        slopes = np.stack([(errors(factors + NUDGE * axis) - here) / NUDGE for axis in axes], 1)
        matrix = np.vstack([slopes * weights[:, None], pull * axes, np.sqrt(damping) * axes])
        right = np.concatenate([-here * weights, pull * (begin - factors), np.zeros(factors.size)])
        step = np.clip(np.linalg.lstsq(matrix, right, rcond=None)[0], -LONGEST, LONGEST)
        if cost(errors(factors + step), factors + step, weights) < cost(here, factors, weights):
            factors, damping = factors + step, max(damping / 3, 1e-7)
            if np.abs(step).max() < 1e-6:
                break
        else:
            damping *= 5
    return np.exp(factors)


def _huber(errors: Floats) -> Floats:
    """Square roots of Huber's weights, at a scale from the median error (at least 2 %)."""
    scale = HUBER * max(1.48 * float(np.median(np.abs(errors))), 0.02)
    return np.asarray(1 / np.sqrt(np.maximum(1.0, np.abs(errors) / scale)))


@dataclass(frozen=True, slots=True)
class Errors:
    """Relative errors of predictions: |predicted / measured − 1|, and the signed median."""

    points: int
    median: float
    ninth: float
    within_tenth: float
    bias: float


def errors(predicted: Floats, measured: Floats) -> Errors:
    signed = predicted / measured - 1
    size = np.abs(signed)
    ninth = float(np.quantile(size, 0.9))
    return Errors(size.size, float(np.median(size)), ninth, float((size <= 0.1).mean()), float(np.median(signed)))


# --- laws of kernels of linear layers --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Stream:
    """A kernel that moves bytes: start + bytes / (share of bandwidth), faster while all fits in the cache.

    Factors: seconds to start, share of bandwidth, by how much the cache is faster, bytes at which it is full. The
    cache is an artefact of measuring one layer again and again: a server's other layers empty it.
    """

    moved: Floats
    bandwidth: float

    def __call__(self, factors: Floats) -> Floats:
        start, share, gain, room = factors
        cached = 1 / (1 + (self.moved / room) ** 8)
        return np.asarray(start + self.moved / (self.bandwidth * share) * (1 - cached * gain / (1 + gain)))


@dataclass(frozen=True, slots=True)
class Tiled:
    """A kernel that moves bytes in tiles, and pays for each sequence and channel. Factors: seconds to start, share of
    bandwidth, seconds for a sequence and channel.
    """

    moved: Floats
    lanes: Floats
    bandwidth: float

    def __call__(self, factors: Floats) -> Floats:
        start, share, lane = factors
        return np.asarray(start + self.moved / (self.bandwidth * share) + lane * self.lanes)


@dataclass(frozen=True, slots=True)
class Chunked:
    """A chunked prefill kernel: start + a part for each state + the root of the squares of the time to compute and
    the time of one stretch's chain of chunks.

    Factors: seconds to start; share of FLOP/s; seconds of a chunk in the chain; seconds for a state (of one head).
    """

    states: Floats
    chunks: Floats
    flops: Floats
    peak: float

    def __call__(self, factors: Floats) -> Floats:
        start, share, chunk, state = factors
        return np.asarray(start + state * self.states + np.hypot(self.flops / (self.peak * share), self.chunks * chunk))


# --- measured kernel tables ------------------------------------------------------------------------------------

SHORTEST, MOST = 64, 32_768
"""Prefills fitted: at least a kernel's chunk, and no more tokens than a server computes in one step."""

TILE = 512
"""Tokens that the Mamba-2 convolution (TensorRT-LLM) computes at least."""

STATE_BYTES, WINDOW_BYTES = 4, 2
TAPS = 3


@dataclass(frozen=True, slots=True)
class Fitted:
    """One kernel of one table: factors from one half of its rows, errors on the other.

    `beyond`: errors on prefills of more tokens than were fitted.
    """

    gpu: str
    family: str
    kernel: str
    phase: str
    factors: tuple[float, ...]
    held_out: Errors
    beyond: Errors | None = None


def fit_table(path: Path, gpu: Gpu) -> list[Fitted]:
    """All kernels of a table `gdn_…`, `kda_…` or `mamba2_…` (milliseconds a layer; columns: AIConfigurator's)."""
    with gzip.open(path, "rt") as file:
        rows = list(csv.DictReader(file))
    family = {"gdn": "GDN", "kda": "KDA", "mamba2": "Mamba-2"}[path.name.split("_")[0]]
    groups = sorted({(row["phase"], row["kernel_source"]) for row in rows if row["phase"] in ("context", "generation")})
    chosen = {key: [row for row in rows if (row["phase"], row["kernel_source"]) == key] for key in groups}
    return [_fit_kernel(some, gpu, family, *key) for key, some in chosen.items()]


def _fit_kernel(rows: list[dict[str, str]], gpu: Gpu, family: str, phase: str, kernel: str) -> Fitted:
    if phase == "context":
        rows = [row for row in rows if int(row["seq_len"]) >= SHORTEST]
    columns = {name: np.array([float(row[name]) for row in rows]) for name in rows[0] if _numeric(rows[0][name])}
    measured = columns["latency"] / 1e3
    usual = columns["num_tokens"] <= MOST
    half = np.random.default_rng(0).permutation(measured.size) % 2 == 0
    law, start = _law(columns, gpu, family, phase, kernel)
    train, test = usual & half, usual & ~half
    factors = fit(law(train), start, measured[train])
    predicted = law(np.ones(measured.size, bool))(factors)
    beyond = errors(predicted[~usual], measured[~usual]) if (~usual).any() else None
    return Fitted(gpu.name, family, kernel, phase, tuple(factors), errors(predicted[test], measured[test]), beyond)


def _numeric(text: str) -> bool:
    return text.replace(".", "", 1).replace("e-", "", 1).isdigit()


def _law(
    columns: dict[str, Floats], gpu: Gpu, family: str, phase: str, kernel: str
) -> tuple[Callable[[NDArray[np.bool_]], Law], tuple[float, ...]]:
    """The law of a kernel on some rows of its table, and where to start."""
    batch, length = columns["batch_size"], columns["seq_len"]
    if family == "Mamba-2":
        channels = columns["nheads"] * columns["head_dim"] + 2 * columns["n_groups"] * columns["d_state"]
        tiled = batch * np.maximum(length, TILE) * channels * 2 * WINDOW_BYTES
    else:
        keys = columns["num_k_heads"] * columns["head_k_dim"]
        channels = 2 * keys + columns["num_v_heads"] * columns["head_v_dim"]
        state = columns["num_v_heads"] * columns["head_k_dim"] * columns["head_v_dim"]
    if "conv" in kernel and phase == "generation":
        moved = batch * channels * WINDOW_BYTES * (2 * TAPS + 2)
        return lambda some: Stream(moved[some], gpu.bandwidth), (2e-6, 0.5, 0.5, 1e8)
    if "conv" in kernel and family == "Mamba-2":
        return lambda some: Tiled(tiled[some], (batch * channels)[some], gpu.bandwidth), (4e-6, 0.5, 1e-10)
    if "conv" in kernel:
        moved = batch * length * channels * 2 * WINDOW_BYTES
        return lambda some: Stream(moved[some], gpu.bandwidth), (4e-6, 0.5, 0.5, 1e8)
    if phase == "generation":
        moved = 2 * batch * state * STATE_BYTES
        return lambda some: Stream(moved[some], gpu.bandwidth), (4e-6, 0.8, 0.7, 1e8)
    flops, states = DELTA_FLOPS * batch * length * state, batch * columns["num_v_heads"]
    chunks = length / KERNEL_CHUNK
    return lambda some: Chunked(states[some], chunks[some], flops[some], gpu.flops), (3e-5, 0.04, 2e-6, 1e-8)


def kernels_of(fits: Sequence[Fitted], base: Kernels = PRIORS.kernels) -> Kernels:
    """What the kernels of one GPU and family amount to; what was not measured stays as in `base`.

    Of several decode kernels the first counts that any number of heads can use (`packed_decode`).
    """
    for one in fits:
        context, conv = one.phase == "context", "conv" in one.kernel
        if context and conv:
            base = replace(base, conv=one.factors[1])
        elif context:
            base = replace(base, start_s=one.factors[0], linear=one.factors[1], chunk_s=one.factors[2])
        elif "packed_decode" in one.kernel:
            base = replace(base, state=one.factors[1])
    return base


# --- end-to-end points -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Point:
    """Seconds per output token that somebody measured on a server, with `batch` requests of `prompt` and `output`
    tokens at all times. `system` groups points that share a server. `fitted`: fit to be learnt from.
    """

    system: str
    model: str
    gpu: Gpu
    tp: int
    weights: str
    prompt: int
    output: int
    batch: int
    tpot: float
    fitted: bool = True
    note: str = ""


def predict(point: Point, base: Efficiency | None = None) -> float:
    """Seconds per output token: a decode step, and its part of the prefills that the other requests bring."""
    model = models.find(point.model)
    using = efficiency(point.gpu, model, base or SERVED)
    cost = roofline(model, point.gpu, Layout(point.tp), Formats(model.state_dtype), point.weights, using=using)
    contexts = [point.prompt + point.output // 2] * point.batch
    step = cost.seconds([], contexts, 1)
    burden = cost.seconds([(0, point.prompt)], contexts, 1) - step
    return step + burden * (point.batch - 1) / point.output


LEARNT = ("layer_s", "eager_s")
"""What is learnt from servers: overheads. Shares of peaks stay as measured on kernels, or as others found them."""

HELD = 0.001
"""How strongly overheads are held at their priors (`fit`)."""


def fit_served(points: Sequence[Point], base: Efficiency = PRIORS) -> Efficiency:
    """`base` with the overheads at which the points are met best."""

    def with_overheads(factors: Floats) -> Efficiency:
        return replace(base, **dict(zip(LEARNT, factors.tolist(), strict=True)))

    def law(factors: Floats) -> Floats:
        using = with_overheads(factors)
        return np.array([predict(point, using) for point in points])

    start = [getattr(base, name) for name in LEARNT]
    return with_overheads(fit(law, start, np.array([point.tpot for point in points]), HELD))


def left_out(points: Sequence[Point], base: Efficiency = PRIORS) -> list[float]:
    """Predictions of each point by a fit to the points (fit to be learnt from) of all other systems."""
    fits: dict[str, Efficiency] = {}
    for system in {point.system for point in points}:
        fits[system] = fit_served([p for p in points if p.fitted and p.system != system], base)
    return [predict(point, fits[point.system]) for point in points]
