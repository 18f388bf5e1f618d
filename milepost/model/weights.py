"""Tensors by name, from safetensors files or from a random generator, checked against the config before any is used."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open

from milepost.errors import WeightsError
from milepost.model.config import ModelConfig
from milepost.model.families import canonical, expected_tensors

Tensor = torch.Tensor


class Weights(Protocol):
    """Where the decoder's tensors come from."""

    shapes: Mapping[str, tuple[int, ...]]  # canonical names

    def read(self, name: str) -> Tensor: ...


class FileWeights:
    """The tensors of a model folder: `model.safetensors`, or shards named by `model.safetensors.index.json`."""

    def __init__(self, folder: Path) -> None:
        self._where: dict[str, tuple[str, str]] = {}  # canonical name -> file, name in the file
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._files = {}
        for path in _weight_files(folder):
            try:
                file = safe_open(path, framework="pt")
            except (OSError, SafetensorError) as error:
                raise WeightsError(f"{path} can't be read: {error}") from error
            self._files[path.name] = file
            for name in file.keys():  # noqa: SIM118 - not a dict
                known = canonical(name)
                if known is not None:
                    self._where[known] = path.name, name
                    self.shapes[known] = tuple(file.get_slice(name).get_shape())

    def read(self, name: str) -> Tensor:
        file, name_there = self._where[name]
        return self._files[file].get_tensor(name_there)


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
    """Random tensors for a config: every gate, decay and norm away from its neutral value, activations of order one."""

    def __init__(self, config: ModelConfig, seed: int) -> None:
        self.shapes = expected_tensors(config, lambda _layer: True)
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
        if name.endswith("conv1d.weight"):
            return noise * 0.5
        if len(shape) == 1:
            return noise * 0.2
        return noise / shape[-1] ** 0.5


def check(weights: Weights, config: ModelConfig) -> None:
    """Raise WeightsError unless the tensors are exactly those of the config."""
    found = weights.shapes
    wanted = expected_tensors(config, lambda layer: f"model.layers.{layer}.mlp.experts.gate_up_proj" in found)
    allowed = {"lm_head.weight"} if config.tie_word_embeddings else set()
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
