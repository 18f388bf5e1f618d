"""Weights in float8 with a scale for each block, as DeepSeek and Qwen publish them: value = float8 * its block's scale.

The test quantises tiny models itself, takes every value apart again by that formula, one block after the other, and
holds the loaded tensors to these values and logits to transformers with these values as weights.
"""

import json
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from milepost.errors import WeightsError
from milepost.model import load_decoder, load_model_config
from milepost.model.families import FAMILIES
from milepost.model.weights import FileWeights
from tests.model.oracle import Driver, random_tokens, reference_logits, worst
from tests.model.test_golden import TOLERANCE

pytestmark = pytest.mark.filterwarnings("ignore")  # what transformers warns about is its own affair

LARGEST = 448.0  # of float8_e4m3fn
KEPT = ("embed_tokens", "lm_head", "norm", "conv", "gate.weight", "in_proj_ba", "shared_expert_gate", "router")


def blocks(shape: torch.Size, block: tuple[int, int]):
    """Index of each block's scale, and the block's part of the tensor."""
    *lead, rows, columns = shape
    counts = -(-rows // block[0]), -(-columns // block[1])
    for *at, i, j in product(*map(range, (*lead, *counts))):
        part = slice(i * block[0], (i + 1) * block[0]), slice(j * block[1], (j + 1) * block[1])
        yield (*at, i, j), (*at, *part)


def quantised(weight: torch.Tensor, block: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Float8, scales, and the values that these mean."""
    *lead, rows, columns = weight.shape
    scales = torch.empty(*lead, -(-rows // block[0]), -(-columns // block[1]))
    float8, values = torch.empty(weight.shape, dtype=torch.float8_e4m3fn), torch.empty(weight.shape)
    for index, part in blocks(weight.shape, block):
        scales[index] = weight[part].abs().max() / LARGEST
        float8[part] = (weight[part] / scales[index]).to(torch.float8_e4m3fn)
        values[part] = float8[part].float() * scales[index]
    return float8, scales, values


@dataclass
class Pair:
    """A folder with float8 weights, one with the values they stand for, and these values by the files' names."""

    float8: Path
    plain: Path
    values: dict[str, torch.Tensor]


def make(source: Path, target: Path, block: tuple[int, int]) -> Pair:
    files = sorted(source.glob("*.safetensors"))
    tensors = {name: tensor.float() for file in files for name, tensor in load_file(file).items()}
    stored, values = dict(tensors), dict(tensors)
    for name, tensor in tensors.items():
        if tensor.dim() > 1 and not any(part in name for part in KEPT):
            stored[name], stored[f"{name}_scale_inv"], values[name] = quantised(tensor, block)
    assert sum(name.endswith("_scale_inv") for name in stored) > 15
    raw: dict[str, Any] = json.loads((source / "config.json").read_text())
    said = {"quant_method": "fp8", "weight_block_size": list(block), "activation_scheme": "dynamic", "fmt": "e4m3"}
    said["modules_to_not_convert"] = ["lm_head", "model.embed_tokens"]
    pair = Pair(target / "float8", target / "plain", values)
    for folder, content, config in (
        (pair.float8, stored, {**raw, "quantization_config": said}),
        (pair.plain, values, raw),
    ):
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        # Dealt out to two shards in turn, so that scales lie in another file than their tensors.
        shards = {f"model-{k}.safetensors": dict(list(content.items())[k::2]) for k in (0, 1)}
        for name, part in shards.items():
            save_file(part, folder / name, {"format": "pt"})
        index = {"metadata": {}, "weight_map": {name: file for file, part in shards.items() for name in part}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return pair


@pytest.mark.parametrize(
    ("family", "block"),
    [
        ("qwen3_next", (128, 128)),
        ("qwen3_next", (24, 40)),
        ("qwen3_5_text", (20, 24)),
        ("kimi_linear", (48, 20)),
        ("granitemoehybrid", (40, 24)),  # experts in one tensor
        ("nemotron_h", (24, 40)),
    ],
)
def test_values_and_logits(goldens, tmp_path, family, block):
    import transformers

    pair = make(goldens(family).folder, tmp_path, block)
    config = load_model_config(pair.float8)
    assert config.weight_block == block
    weights = FileWeights(pair.float8, lambda name: name, block)
    for name, value in pair.values.items():
        assert torch.equal(weights.read(name), value), name
    driver, tokens = Driver(load_decoder(pair.float8, dtype=torch.float32)), random_tokens(3, 80)
    logits = driver.feed(driver.sequence(tokens), [60] + [1] * 20)
    reference = transformers.AutoModelForCausalLM.from_pretrained(pair.plain, dtype=torch.float32).eval()
    assert worst(logits, reference_logits(reference, tokens)) < TOLERANCE
    assert worst(logits, reference_logits(goldens(family).reference, tokens)) > 100 * TOLERANCE  # float8 is coarse


@pytest.fixture
def pair(goldens, tmp_path):
    return make(goldens("qwen3_5_text").folder, tmp_path, (20, 24))


def spoil(folder: Path, name: str, tensor: torch.Tensor | None) -> None:
    """Replace a tensor, or take it out."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    file = folder / index["weight_map"][name]
    tensors = load_file(file)
    tensors.pop(name)
    save_file(tensors if tensor is None else {**tensors, name: tensor}, file)


NAME = "model.layers.1.mlp.down_proj.weight"


def test_a_missing_scale(pair):
    spoil(pair.float8, f"{NAME}_scale_inv", None)
    with pytest.raises(WeightsError, match=f"tensors missing: {NAME}_scale_inv$"):
        load_decoder(pair.float8)


def test_a_scale_of_another_shape(pair):
    spoil(pair.float8, f"{NAME}_scale_inv", torch.ones(4, 5))  # [64, 96] in blocks of [20, 24] has [4, 4]
    with pytest.raises(WeightsError, match=rf"another shape: {NAME}_scale_inv is \[4, 5\], not \[4, 4\]"):
        load_decoder(pair.float8)


def test_a_scale_of_nothing(pair):
    spoil(pair.float8, NAME, pair.values[NAME])
    with pytest.raises(WeightsError, match=f"unexpected: {NAME}_scale_inv"):
        load_decoder(pair.float8)


def test_a_dtype_that_is_not_explained(pair):
    spoil(pair.float8, NAME, torch.zeros(64, 96, dtype=torch.int8))
    with pytest.raises(WeightsError, match=f"dtype that is not supported: {NAME} is I8$"):
        load_decoder(pair.float8)
    spoil(pair.plain, NAME, torch.zeros(64, 96).to(torch.float8_e4m3fn))
    with pytest.raises(WeightsError, match=f"not supported: {NAME} is F8_E4M3 without a weight_block_size"):
        load_decoder(pair.plain)


def test_scales_that_are_powers_of_two(pair):
    """`scale_fmt: ue8m0`: scales in a dtype that has an exponent only."""
    index = json.loads((pair.float8 / "model.safetensors.index.json").read_text())
    file = pair.float8 / index["weight_map"][f"{NAME}_scale_inv"]
    wide = load_file(file)[f"{NAME}_scale_inv"].log2().round().exp2()
    spoil(pair.float8, f"{NAME}_scale_inv", wide.to(torch.float8_e8m0fnu))
    weights = FileWeights(pair.float8, lambda name: name, (20, 24))
    got = weights.read(NAME)
    spoil(pair.float8, f"{NAME}_scale_inv", wide)
    assert torch.equal(got, FileWeights(pair.float8, lambda name: name, (20, 24)).read(NAME))
    assert got.abs().max() > 0


def test_multi_token_prediction_is_left_out(pair):
    """Tensors of parts that are not served need no scales, nor do their scales need tensors."""
    file = pair.float8 / "model-0.safetensors"
    extra = {"mtp.fc.weight": torch.ones(4, 4).to(torch.float8_e4m3fn), "mtp.fc.weight_scale_inv": torch.ones(9)}
    save_file({**load_file(file), **extra}, file)
    family = FAMILIES["qwen3_5_text"]
    weights = FileWeights(pair.float8, lambda name: family.canonical(name, 5), (20, 24))
    assert not [name for name in weights.shapes if "mtp" in name]
    load_decoder(pair.float8)
