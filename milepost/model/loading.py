"""From a model folder, or a random generator, to a Decoder."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path

import torch

from milepost.errors import ModelError
from milepost.model.config import ATTENTION, DENSE, LINEAR, NONE, WINDOW, ModelConfig
from milepost.model.decoder import Block, Decoder, Parts
from milepost.model.families import FAMILIES, load_model_config
from milepost.model.families.family import Family
from milepost.model.kernels import Kernels, TorchKernels, choose_kernels
from milepost.model.linear import Linear
from milepost.model.mixers import Parallel
from milepost.model.parts import Half, Maker
from milepost.model.stream import HyperStreams, Sum
from milepost.model.weights import Expected, FileWeights, RandomWeights, Reader, Recorder, Shape, Weights, check

Tensor = torch.Tensor


def load_decoder(
    folder: Path, *, device: torch.device | str = "cpu", dtype: torch.dtype | str = "auto", kernels: str = "auto"
) -> Decoder:
    """Load a model folder in Hugging Face's layout: `config.json` and safetensors.

    dtype    "auto" is the config's own; or a torch dtype, or its name
    kernels  "auto", "numba" (CPU only) or "torch"

    Raises ModelConfigError or WeightsError.
    """
    folder = Path(folder)
    config = load_model_config(folder)
    family = FAMILIES[config.model_type]
    weights = FileWeights(folder, lambda name: family.canonical(name, len(config.layers)), config.weight_block)
    allowed = frozenset({"lm_head.weight"} if config.tie_word_embeddings else ())
    check(weights.shapes, expected_tensors(config, weights.shapes) | weights.scales, allowed)
    return _decoder(config, weights, device, dtype, kernels)


def random_decoder(
    config: ModelConfig,
    seed: int = 0,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | str = "auto",
    kernels: str = "auto",
) -> Decoder:
    """A decoder with random weights, for tests and benchmarks."""
    norm = 1 - FAMILIES[config.model_type].offset
    return _decoder(config, RandomWeights(expected_tensors(config, {}), seed, norm), device, dtype, kernels)


def expected_tensors(config: ModelConfig, found: Mapping[str, Shape]) -> dict[str, Shape]:
    """Canonical name and shape of every tensor of a model; `found` decides where there is more than one way."""
    expected = Expected(found)
    maker = _maker(config, torch.device("meta"), torch.float32, TorchKernels())
    _build(maker, Recorder(expected))
    return expected.wanted


def _decoder(
    config: ModelConfig, weights: Weights, device: torch.device | str, dtype: torch.dtype | str, kernels: str
) -> Decoder:
    device, dtype = torch.device(device), _dtype(dtype, config)
    maker = _maker(config, device, dtype, choose_kernels(kernels, device, dtype))
    return Decoder(config, _build(maker, Reader(weights)))


def _maker(config: ModelConfig, device: torch.device, dtype: torch.dtype, kernels: Kernels) -> Maker:
    return Maker(config, device, dtype, kernels, FAMILIES[config.model_type].offset)


def _dtype(wanted: torch.dtype | str, config: ModelConfig) -> torch.dtype:
    if wanted == "auto":
        wanted = config.dtype or "float32"
    if isinstance(wanted, str):
        wanted = getattr(torch, wanted, wanted)
    if wanted not in (torch.float32, torch.bfloat16, torch.float16):
        raise ModelError(f"dtype {wanted!r}: supported are float32, bfloat16 and float16")
    return wanted


def _build(maker: Maker, read: Reader) -> Parts:
    config = maker.config
    family = FAMILIES[config.model_type]
    vocabulary = config.vocab_size, config.hidden_size
    embedding = maker.matrix(read("model.embed_tokens.weight", *vocabulary))
    if config.tie_word_embeddings:
        head = Linear(embedding, keep_layout=True)
    else:
        head = maker.linear(read("lm_head.weight", *vocabulary))
    blocks = []
    for i, layer in enumerate(config.layers):
        under = read.under(f"model.layers.{i}")
        if layer.mixer != NONE:
            blocks.append(Block(_mixer(family, i, maker, under), family.join(maker, under, family.names, layer, 0)))
        if layer.mlp != NONE:
            make = family.dense if layer.mlp == DENSE else family.moe
            half = make(maker, under.under(family.names.mlp), i)
            blocks.append(Block(half, family.join(maker, under, family.names, layer, 1)))
    norm = maker.norm(read("model.norm.weight", config.hidden_size))
    stream = partial(Sum, kernels=maker.kernels, eps=config.rms_norm_eps)
    if config.streams is not None:
        stream = partial(HyperStreams, **stream.keywords, spec=config.streams)
    return Parts(embedding, blocks, stream, norm, head, maker.kernels)


def _mixer(family: Family, i: int, maker: Maker, read: Reader) -> Half:
    """The mixer of layer i, or its mixers side by side."""
    config, names, mixers = maker.config, family.names, []
    parts = {
        LINEAR: (family.linear, names.linear),
        ATTENTION: (family.attention, names.attention),
        WINDOW: (family.window, names.attention),
    }
    for kind in config.layers[i].kinds:
        make, name = parts[kind]
        mixers.append(make(maker, read.under(name), config.layers_with(kind).index(i)))
    return mixers[0] if len(mixers) == 1 else Parallel(tuple(mixers))
