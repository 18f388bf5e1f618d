"""Bytes of slots and rows against the closed formulas of the reference (models-and-costs.md, section 1)."""

import json

import pytest
import torch

from milepost.core import models
from milepost.core.geometry import Formats, Layout, measure
from milepost.model import Memory, load_model_config
from tests.model.oracle import LINEAR

# Qwen3.5-2B's shape: its figures are in models-and-costs.md, section 2.2.
QWEN_2B = {
    "model_type": "qwen3_5_text",
    "vocab_size": 100,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 24,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}


def small(**changes):
    fields = {"num_hidden_layers": 8, "linear_num_value_heads": 6, "linear_num_key_heads": 2, "head_dim": 32}
    return load_model_config({**QWEN_2B, "linear_key_head_dim": 16, "linear_value_head_dim": 24, **fields, **changes})


def test_a_documented_model():
    memory = Memory(load_model_config(QWEN_2B), 2, 3, kv_dtype=torch.bfloat16)
    assert memory.slot_bytes == 19_537_920
    assert memory.row_bytes == 12_288
    assert memory.temporal.dtype == torch.float32
    assert memory.conv.dtype == torch.bfloat16


@pytest.mark.filterwarnings("ignore")
def test_glm_in_its_own_size():
    """transformers' defaults are GLM-5.3-Flash; slot as in section 2.2, a row with an index key and its gate of 128."""
    import transformers

    config = load_model_config(transformers.Glm5NextTextConfig(index_kpool=4).to_dict())
    memory = Memory(config, 2, 3, kv_dtype=torch.bfloat16, device="meta")
    assert memory.slot_bytes == 147_619_840
    assert memory.row_bytes == 11_264 + 11 * 2 * 128 * 2
    assert config.attention.index.kept == 512


@pytest.mark.parametrize("state", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("conv", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kv", [torch.float32, torch.bfloat16])
def test_closed_formulas(state, conv, kv):
    slots, rows = 5, 9
    memory = Memory(small(), slots, rows, kv_dtype=kv, state_dtype=state, conv_dtype=conv)
    layers, attention, nk, nv, dk, dv, kernel, kv_heads, head_dim = 6, 2, 2, 6, 16, 24, 4, 2, 32
    temporal = layers * nv * dk * dv * state.itemsize
    windows = layers * (2 * nk * dk + nv * dv) * (kernel - 1) * conv.itemsize
    assert memory.slot_bytes == temporal + windows
    assert memory.row_bytes == 2 * kv_heads * head_dim * kv.itemsize * attention
    assert memory.temporal_bytes == temporal * (slots + 1)
    assert memory.conv_bytes == windows * (slots + 1)
    assert memory.kv_bytes == memory.row_bytes * (rows + 1)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bytes_equal_the_planners_for_every_family(golden, dtype):
    """What core/geometry reads from a config is what is allocated for it."""
    shape = models.read_config(json.loads((golden.folder / "config.json").read_text()))
    footprint = measure(shape, Layout(), Formats("float32", dtype, dtype, own_index=True))
    memory = Memory(load_model_config(golden.folder), 5, 9, window_rows=7, kv_dtype=getattr(torch, dtype))
    assert (memory.slot_bytes, memory.row_bytes) == (footprint.slot, footprint.row)
    assert (memory.window_row_bytes, memory.window_bytes) == (footprint.window_row, 8 * footprint.window_row)
    assert memory.temporal_bytes == 6 * footprint.temporal
    assert memory.conv_bytes == 6 * footprint.conv
    assert memory.kv_bytes == 10 * footprint.row


def test_a_model_of_one_kind_only():
    linear = Memory(small(layer_types=[LINEAR] * 8), 3, 4, kv_dtype=torch.float32)
    assert linear.row_bytes == 0
    assert linear.slot_bytes > 0
    attention = Memory(small(layer_types=["full_attention"] * 8), 3, 4, kv_dtype=torch.float32)
    assert attention.slot_bytes == 0
    attention.copy_slots([(1, 2), (2, 3)])


def test_copies_read_before_they_write():
    memory = Memory(small(), 4, 2, kv_dtype=torch.float32)
    for tensor in (memory.conv, memory.temporal):
        tensor.normal_()
    conv, temporal = memory.conv.clone(), memory.temporal.clone()
    memory.copy_slots([(1, 2), (2, 3)])
    for now, before in ((memory.conv, conv), (memory.temporal, temporal)):
        assert torch.equal(now[:, 2], before[:, 1])
        assert torch.equal(now[:, 3], before[:, 2])
        assert torch.equal(now[:, [0, 1, 4]], before[:, [0, 1, 4]])
    memory.copy_slot(4, 1)
    assert torch.equal(memory.temporal[:, 1], temporal[:, 4])
    memory.copy_slots([])


def test_the_dummy_slot_is_nobodys_target():
    memory = Memory(small(), 4, 2, kv_dtype=torch.float32)
    with pytest.raises(AssertionError, match="slot 0"):
        memory.copy_slot(1, 0)
