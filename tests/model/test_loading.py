"""What can't be served is refused by name, with what would be supported."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from milepost.errors import ModelConfigError, ModelError, WeightsError
from milepost.model import load_decoder, load_model_config, random_decoder
from tests.model.oracle import Driver, random_tokens
from tests.model.test_memory import QWEN_2B

FLOAT8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "llama"}, ["model_type", "'llama'", "qwen3_next"]),
        ({"model_type": None}, ["model_type"]),
        ({"hidden_act": "gelu"}, ["hidden_act", "'gelu'", "'silu'"]),
        ({"attention_bias": True}, ["attention_bias", "True", "False"]),
        ({"attn_output_gate": False}, ["attn_output_gate"]),
        ({"layer_types": ["sliding_attention"] * 24}, ["layer_types", "sliding_attention", "full_attention"]),
        ({"layer_types": ["full_attention"]}, ["layer_types", "num_hidden_layers = 24"]),
        ({"hidden_size": 0}, ["hidden_size", "0", "at least 1"]),
        ({"hidden_size": "big"}, ["hidden_size", "'big'"]),
        ({"num_key_value_heads": 3}, ["num_key_value_heads", "3", "num_attention_heads = 8"]),
        ({"linear_num_value_heads": 24}, ["linear_num_value_heads", "24", "16"]),
        ({"linear_conv_kernel_dim": 1}, ["linear_conv_kernel_dim"]),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4}}, ["rope_parameters", "yarn", "default"]),
        ({"rope_scaling": {"type": "linear"}}, ["rope_scaling", "linear", "default"]),
        ({"partial_rotary_factor": 0.005}, ["partial_rotary_factor", "0.005"]),
        ({"quantization_config": {"quant_method": "awq"}}, ["quantization_config.quant_method", "'awq'", "'fp8'"]),
        ({"quantization_config": {"bits": 4}}, ["quantization_config.quant_method", "(missing)"]),
        ({"quantization_config": {"quant_method": "fp8"}}, ["quantization_config.weight_block_size", "(missing)"]),
        ({"quantization_config": {**FLOAT8, "weight_block_size": [128]}}, ["weight_block_size", "[128]"]),
        ({"quantization_config": {**FLOAT8, "activation_scheme": "static"}}, ["activation_scheme", "'dynamic'"]),
        ({"quantization_config": {**FLOAT8, "expert_dtype": "fp4"}}, ["quantization_config.expert_dtype", "'fp4'"]),
        ({"quantization_config": {**FLOAT8, "odd": 3}}, ["quantization_config.odd", "3"]),
        ({"rms_norm_eps": -1}, ["rms_norm_eps", "-1"]),
    ],
)
def test_a_config_that_is_not_supported(changes, words):
    with pytest.raises(ModelConfigError) as error:
        load_model_config({**QWEN_2B, **changes})
    assert all(word in str(error.value) for word in words), str(error.value)


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        ("qwen3_next", {"surprise": 3}, ["surprise", "3", "not known"]),
        ("qwen3_next", {"rope_parameters": {"rope_type": "default", "factor": 2}}, ["rope_parameters", "factor"]),
        ("kimi_linear", {"num_key_value_heads": 2}, ["num_key_value_heads", "2", "4"]),
        ("kimi_linear", {"layer_types": None}, ["layer_types", "a list"]),
        ("kimi_linear", {"mla_use_nope": False}, ["mla_use_nope", "True"]),
        ("kimi_linear", {"linear_attn_config": {"head_dim": 16, "odd": 1}}, ["linear_attn_config.odd"]),
        ("kimi_linear", {"topk_group": 1, "num_experts_per_token": 3}, ["topk_group", "1"]),
        ("kimi_linear", {"mlp_layer_types": ["dense"]}, ["mlp_layer_types", "5 of dense and sparse"]),
        (
            "bailing_hybrid",
            {"short_conv_kernel_size": None, "linear_conv_kernel_dim": None},
            ["short_conv_kernel_size"],
        ),
        ("bailing_hybrid", {"kda_lower_bound": 2.0}, ["kda_lower_bound", "below 0"]),
        ("bailing_hybrid", {"rope_parameters": {"rope_type": "yarn"}}, ["rope_parameters", "yarn"]),
        ("nemotron_h", {"layers_block_type": ["mamba", "odd"]}, ["layers_block_type", "odd"]),
        ("nemotron_h", {"mlp_hidden_act": "silu"}, ["mlp_hidden_act", "relu2"]),
        ("nemotron_h", {"use_bias": True}, ["use_bias", "True"]),
        ("nemotron_h", {"time_step_limit": [0.0, 0.5]}, ["time_step_limit", "0.5"]),
        ("granitemoehybrid", {"position_embedding_type": "alibi"}, ["position_embedding_type", "alibi"]),
        ("granitemoehybrid", {"mamba_n_groups": 3}, ["mamba_n_groups", "8"]),
        ("bamba", {"mlp_bias": True}, ["mlp_bias"]),
        ("falcon_h1", {"ssm_multipliers": [1.0]}, ["ssm_multipliers", "5 numbers"]),
        ("falcon_h1", {"projectors_bias": True}, ["projectors_bias"]),
        ("falcon_h1", {"rope_parameters": {"partial_rotary_factor": 0.5}}, ["partial_rotary_factor", "0.5", "1"]),
        ("lfm2", {"conv_bias": True}, ["conv_bias"]),
        ("lfm2", {"block_use_swiglu": False}, ["block_use_swiglu"]),
        ("lfm2_moe", {"layer_types": None}, ["layer_types"]),
        ("minimax", {"sliding_window": 64}, ["sliding_window", "64"]),
        ("minimax", {"rotary_dim": 12}, ["rotary_dim", "12", "16"]),
        ("glm5_next", {"index_kpool_always_select_tail": False}, ["index_kpool_always_select_tail", "False", "True"]),
        ("glm5_next", {"index_topk": 25}, ["index_topk", "25", "index_kpool = 4"]),
        ("glm5_next", {"index_topk_freq": 2, "indexer_types": None}, ["index_topk_freq", "2", "1"]),
        ("glm5_next", {"index_topk_pattern": "FSF"}, ["index_topk_pattern", "FSF"]),
        ("glm5_next", {"indexer_types": ["full"]}, ["indexer_types", "6 of full and shared"]),
        ("glm5_next", {"indexer_types": ["full"] * 5 + ["shared"]}, ["indexer_types", "right behind"]),
        ("glm5_next", {"indexer_types": ["full", *["shared"] * 2, *["full"] * 3]}, ["indexer_types", "right behind"]),
        ("glm5_next", {"qk_rope_head_dim": 8}, ["qk_rope_head_dim", "8", "0"]),
        ("glm5_next", {"q_lora_rank": None}, ["q_lora_rank", "None"]),
        ("glm5_next", {"hc_mult": None}, ["hc_mult", "None"]),
        ("glm5_next", {"linear_lower_bound": 1.0}, ["linear_lower_bound", "1.0", "below 0"]),
        ("glm5_next", {"linear_attn_config": {"safe_gate": False}}, ["linear_attn_config.safe_gate"]),
        ("olmo_hybrid", {"linear_key_head_dim": None}, ["linear_key_head_dim", "None"]),
    ],
)
def test_a_field_that_a_family_does_not_support(goldens, family, changes, words):
    raw = json.loads((goldens(family).folder / "config.json").read_text())
    raw = raw.get("text_config", raw)
    with pytest.raises(ModelConfigError) as error:
        load_model_config({**raw, **changes})
    assert all(word in str(error.value) for word in words), str(error.value)


def test_other_ways_to_say_the_same(goldens):
    """Fields as published checkpoints have them, against fields as transformers writes them."""
    raw = json.loads((goldens("kimi_linear").folder / "config.json").read_text())
    published = {name: value for name, value in raw.items() if not name.startswith("linear_") and name != "layer_types"}
    published |= {"mlp_layer_types": None, "first_k_dense_replace": 1, "mla_use_nope": True, "rope_theta": 1e4}
    published["linear_attn_config"] = {
        "head_dim": 16,
        "num_heads": 4,
        "short_conv_kernel_size": 4,
        "full_attn_layers": [3, 5],
        "kda_layers": [1, 2, 4],
    }
    assert load_model_config(published) == load_model_config(raw)
    raw = json.loads((goldens("nemotron_h").folder / "config.json").read_text())
    published = {name: value for name, value in raw.items() if name != "layers_block_type"}
    assert load_model_config({**published, "hybrid_override_pattern": "ME*-MEM*"}) == load_model_config(raw)
    wrapped = json.loads((goldens("glm5_next").folder / "config.json").read_text())
    raw = {**wrapped["text_config"], "dtype": "float32"}
    published = {name: value for name, value in raw.items() if not name.startswith("linear_") and name != "layer_types"}
    published["linear_attn_config"] = {"head_dim": 16, "num_heads": 4, "full_attn_layers": [2, 3, 6]}
    published["layer_types"] = [kind.replace("indexed", "full") for kind in raw["layer_types"]]
    for again in (
        wrapped,
        published,
        {**raw, "layer_types": None, "linear_attn_config": published["linear_attn_config"]},
    ):
        assert load_model_config(again) == load_model_config(raw)
    flat = {**raw, "model_type": "glm5_next", "linear_lower_bound": None}
    assert load_model_config(flat).linear.bound is None
    raw = json.loads((goldens("granitemoehybrid").folder / "config.json").read_text())
    kinds = ["mamba", "attention", "mamba", "mamba", "attention"]
    assert load_model_config({**raw, "layer_types": kinds, "mamba_d_head": "auto"}) == load_model_config(raw)


def test_too_many_experts_a_token():
    moe = {
        "model_type": "qwen3_5_moe_text",
        "num_experts": 4,
        "num_experts_per_tok": 5,
        "moe_intermediate_size": 8,
        "shared_expert_intermediate_size": 8,
    }
    with pytest.raises(ModelConfigError, match="num_experts_per_tok is 5"):
        load_model_config({**QWEN_2B, **moe})


def test_a_config_file_that_is_none(tmp_path):
    with pytest.raises(ModelConfigError, match="can't be read"):
        load_model_config(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ModelConfigError, match="list"):
        load_model_config(tmp_path / "config.json")


def test_what_a_config_says():
    config = load_model_config({**QWEN_2B, "eos_token_id": [5, 6], "rope_theta": 1e7, "torch_dtype": "bfloat16"})
    assert config.linear_layers == tuple(i for i in range(24) if i % 4 != 3)
    assert config.attention_layers == tuple(range(3, 24, 4))
    assert config.eos_token_ids == (5, 6)
    assert config.dtype == "bfloat16"
    assert config.attention.rope_theta == 1e7
    assert config.attention.rotary_dim == 64


def test_a_wrapper_gives_what_it_has():
    wrapper = {"model_type": "qwen3_5", "text_config": QWEN_2B, "tie_word_embeddings": True, "eos_token_id": 9}
    config = load_model_config(wrapper)
    assert (config.model_type, config.tie_word_embeddings, config.eos_token_ids) == ("qwen3_5_text", True, (9,))


@pytest.fixture
def folder(goldens, tmp_path):
    """A copy of a dense model whose tensors a test may spoil."""
    source = goldens("qwen3_5_text").folder
    (tmp_path / "config.json").write_text((source / "config.json").read_text())

    def spoil(change):
        tensors = load_file(source / "model.safetensors")
        change(tensors)
        save_file(tensors, tmp_path / "model.safetensors")
        return tmp_path

    return spoil


def test_missing_tensors(folder):
    name = "model.layers.1.linear_attn.A_log"
    with pytest.raises(WeightsError, match=f"missing: {name}"):
        load_decoder(folder(lambda tensors: tensors.pop(name)))


def test_unexpected_tensors(folder):
    with pytest.raises(WeightsError, match=r"unexpected: model\.layers\.0\.extra"):
        load_decoder(folder(lambda tensors: tensors.update({"model.layers.0.extra": torch.zeros(1)})))


def test_a_tensor_of_another_shape(folder):
    name = "model.layers.2.self_attn.k_proj.weight"
    with pytest.raises(WeightsError, match=rf"another shape: {name} is \[3, 64\], not \[64, 64\]"):
        load_decoder(folder(lambda tensors: tensors.update({name: torch.zeros(3, 64)})))


def test_all_problems_at_once_but_not_without_end(folder):
    def spoil(tensors):
        for name in list(tensors):
            if ".mlp." in name:
                del tensors[name]

    with pytest.raises(WeightsError, match=r"missing: .* and 7 more"):
        load_decoder(folder(spoil))


def test_files_that_are_missing_or_broken(folder, tmp_path):
    folder(lambda _tensors: None).joinpath("model.safetensors").unlink()
    with pytest.raises(WeightsError, match=r"lacks model\.safetensors"):
        load_decoder(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not tensors")
    with pytest.raises(WeightsError, match="can't be read"):
        load_decoder(tmp_path)
    index = {"weight_map": {"a": "model-1.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(WeightsError, match=r"lacks model-1\.safetensors"):
        load_decoder(tmp_path)


def test_a_dtype_that_is_none(goldens):
    with pytest.raises(ModelError, match="int8"):
        load_decoder(goldens("qwen3_5_text").folder, dtype="int8")


def test_random_decoder_and_warm_up(golden):
    config = load_model_config(golden.folder)
    one, two = random_decoder(config, 1), random_decoder(config, 1)
    logits = []
    for decoder in (one, two):
        driver = Driver(decoder)
        decoder.warm_up(driver.memory)
        logits.append(driver.feed(driver.sequence(random_tokens(0, 50)), [40] + [1] * 10))
    assert torch.equal(*logits)
    assert 0.3 < logits[0].std() < 3
