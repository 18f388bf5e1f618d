"""Tensors by name, from safetensors files or from a random generator, checked against the config before any is used.

What a model's tensors are is said once: by the code that reads them, each with its shape. Run with a `Recorder` on
torch's meta device that code lists them; run with a `Reader` it loads them.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open

from milepost.errors import WeightsError

Tensor = torch.Tensor
Shape = tuple[int, ...]


class Weights(Protocol):
    """Where the decoder's tensors come from."""

    shapes: Mapping[str, Shape]  # canonical names

    def read(self, name: str) -> Tensor: ...


class Reader:
    """Reads tensors whose names begin with `prefix`."""

    def __init__(self, weights: Weights, prefix: str = "") -> None:
        self._weights = weights
        self._prefix = prefix

    def __call__(self, name: str, *shape: int) -> Tensor:  # noqa: ARG002 - the shape was checked before
        """The tensor, which has this shape."""
        return self._weights.read(self._prefix + name)

    def has(self, name: str) -> bool:
        """For what is stored in one of several ways."""
        return self._prefix + name in self._weights.shapes

    def under(self, prefix: str) -> "Reader":
        return type(self)(self._weights, f"{self._prefix}{prefix}." if prefix else self._prefix)


class Recorder(Reader):
    """Notes names and shapes in `weights.wanted` and hands out tensors without memory."""

    def __call__(self, name: str, *shape: int) -> Tensor:
        self._weights.wanted[self._prefix + name] = shape
        return torch.empty(shape, device="meta")


class Expected:
    """The list that a Recorder fills; what there is to choose from is what was `found`."""

    def __init__(self, found: Mapping[str, Shape]) -> None:
        self.shapes = found
        self.wanted: dict[str, Shape] = {}


_FLOATS = ("F32", "BF16", "F16", "F64")
_FLOAT8 = "F8_E4M3"
_SCALES = "_scale_inv"  # behind the name of a float8 tensor: the one with its scales


class FileWeights:
    """The tensors of a model folder: `model.safetensors`, or shards named by `model.safetensors.index.json`.

    Float8 tensors are widened one by one as they are read, each `block` of them (rows, columns) by a scale of its own.
    `scales`: names and shapes of the tensors that hold these.
    """

    def __init__(self, folder: Path, canonical: Callable[[str], str | None], block: Shape | None = None) -> None:
        self._where: dict[str, tuple[str, str]] = {}  # canonical name -> file, name in the file
        self.shapes: dict[str, Shape] = {}
        self.scales: dict[str, Shape] = {}
        self._files = {}
        self._block = block
        odd = []
        for path in _weight_files(folder):
            try:
                file = safe_open(path, framework="pt")
            except (OSError, SafetensorError) as error:
                raise WeightsError(f"{path} can't be read: {error}") from error
            self._files[path.name] = file
            for name in file.keys():  # noqa: SIM118 - not a dict
                plain = name.removesuffix(_SCALES)
                known = canonical(plain)
                if known is None:
                    continue
                known += name[len(plain) :]
                tensor = file.get_slice(name)
                shape, dtype = tuple(tensor.get_shape()), tensor.get_dtype()
                self._where[known] = path.name, name
                self.shapes[known] = shape
                if dtype == _FLOAT8 and block is not None and len(shape) > 1:
                    blocks = (-(-size // of) for size, of in zip(shape[-2:], block, strict=True))
                    self.scales[known + _SCALES] = *shape[:-2], *blocks
                elif dtype not in _FLOATS and name == plain:
                    odd.append(f"{known} is {dtype}" + " without a weight_block_size" * (dtype == _FLOAT8))
        if odd:
            raise WeightsError(f"tensors {_list('of a dtype that is not supported', odd)}")

    def read(self, name: str) -> Tensor:
        tensor = self._stored(name)
        if name + _SCALES not in self.scales:
            return tensor
        assert self._block is not None
        return widened(tensor, self._stored(name + _SCALES), self._block)

    def _stored(self, name: str) -> Tensor:
        file, name_there = self._where[name]
        return self._files[file].get_tensor(name_there)


def widened(tensor: Tensor, scales: Tensor, block: Shape) -> Tensor:
    """Float8 [..., rows, columns] as float32, each block times its scale [..., blocks of rows, blocks of columns].

    The last blocks may be cut short.
    """
    wide = tensor.float()
    across = scales.float().repeat_interleave(block[1], -1)[..., : wide.shape[-1]]
    for rows, scale in zip(wide.split(block[0], -2), across.split(1, -2), strict=True):
        rows *= scale
    return wide


def _weight_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.exists():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, AttributeError) as error:
            raise WeightsError(f"{index} can't be read: {error!r}") from error
    else:
        names = ["model.safetensors"]
    missing = [name for name in names if not (folder / name).exists()]
    if missing:
        raise WeightsError(f"{folder} lacks {', '.join(missing)}")
    return [folder / name for name in names]


class RandomWeights:
    """Random tensors: every gate, decay and norm away from its neutral value, activations of order one.

    norm: what norm weights scatter about, 1 or, where a family stores differences from one, 0.
    """

    def __init__(self, shapes: Mapping[str, Shape], seed: int, norm: float) -> None:
        self.shapes = shapes
        self._norm = norm
        self._generator = torch.Generator().manual_seed(seed)

    def read(self, name: str) -> Tensor:
        shape = self.shapes[name]
        noise = torch.randn(shape, generator=self._generator)
        if name.endswith("A_log"):
            return noise * 0.5 + 0.5
        if name.endswith("linear_attn.norm.weight"):
            return 1 + 0.2 * noise
        if name.endswith("dt_bias"):
            return noise - 1
        if len(shape) == 3 and shape[1] == 1:  # a convolution
            return noise * 0.5
        if len(shape) == 1:
            return noise * 0.2 + (self._norm if "norm" in name else 0.0)
        return noise / shape[-1] ** 0.5


def check(found: Mapping[str, Shape], wanted: Mapping[str, Shape], allowed: frozenset[str]) -> None:
    """Raise WeightsError unless the tensors are exactly those wanted, and maybe some of those allowed."""
    problems = [
        _list("missing", [name for name in wanted if name not in found]),
        _list("unexpected", [name for name in found if name not in wanted and name not in allowed]),
        _list(
            "of another shape",
            [
                f"{name} is {list(found[name])}, not {list(shape)}"
                for name, shape in wanted.items()
                if name in found and tuple(found[name]) != shape
            ],
        ),
    ]
    if any(problems):
        raise WeightsError("tensors " + "; ".join(problem for problem in problems if problem))


def _list(what: str, items: list[str], most: int = 8) -> str:
    """'missing: a, b and 3 more', or '' for none."""
    if not items:
        return ""
    more = f" and {len(items) - most} more" if len(items) > most else ""
    return f"{what}: {', '.join(items[:most])}{more}"
