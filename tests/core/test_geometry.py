"""Bytes of slots and rows: closed numbers of known models, ways to cut them, configs, and what is really allocated."""

import pytest

from milepost.core import geometry as geo
from milepost.core import models
from milepost.core.geometry import Formats, Layout, Part, measure
from milepost.errors import ConfigError, ModelConfigError

# name: slot bytes with fp32 states, MiB with bf16 states, KV bytes a token in bf16 (whole model)
KNOWN = {
    "qwen3-next-80b": (77_266_944, 37.69, 24_576),
    "qwen3.5-27b": (153_944_064, 74.81, 65_536),
    "qwen3.8-27b": (153_944_064, 74.81, 65_536),
    "qwen3.6-35b": (64_389_120, 31.41, 20_480),
    "qwen3.5-9b": (51_511_296, 25.12, 32_768),
    "qwen3.5-4b": (51_511_296, 25.12, 32_768),
    "qwen3.5-2b": (19_537_920, 9.63, 12_288),
    "qwen3.5-0.8b": (19_537_920, 9.63, 12_288),
    "qwen3.5-122b": (153_649_152, 74.53, 24_576),
    "qwen3.5-397b": (192_061_440, 93.16, 30_720),
    "qwen3.8-2.4t": (587_292_672, 284.09, 94_208),
    "qwen3.8-flash-next": (115_458_048, 56.11, 24_576),
    "kimi-linear-48b": (43_417_600, 21.41, 8_064),
    "kimi-k3": (449_372_160, 221.55, 27_648),
    "glm-5.3-flash": (147_619_840, 72.78, 11_264 + 11 * 33),
    "nemotron-3-nano": (49_082_368, 23.81, 6_144),
    "nemotron-3.5-lightning": (49_082_368, 23.81, 6_144),
    "nemotron-3-super": (170_229_760, 82.34, 8_192),
    "nemotron-3-ultra": (407_961_600, 197.06, 12_288),
    "nemotron-h-56b": (912_605_184, 438.33, 40_960),
    "granite-4.0-h-small": (152_819_712, 73.74, 16_384),
    "falcon-h1-7b": (139_358_208, 66.90, 45_056),
    "minimax-text-01": (293_601_280, 140.00, 40_960),
    "ring-2.5-1t": (293_601_280, 140.00, 11_520),
    "ling-3.0-flash": (75_980_800, 37.46, 8_064),
    "bamba-9b": (244_784_128, 117.44, 12_288),
    "olmo-hybrid-7b": (54_743_040, 26.89, 122_880),
    "lara-4-mini": (15_024_128, 7.33, 14_336),
    "lfm2-1.2b": (81_920, 0.08, 12_288),
    "lfm2-8b-a1b": (147_456, 0.14, 12_288),
    "jamba-1.5-mini": (16_056_320, 8.31, 16_384),
    "inkling": (7_299_072, 6.96, 45_056),
}


@pytest.mark.parametrize("name", KNOWN)
def test_bytes_of_known_models(name):
    slot, half, row = KNOWN[name]
    model = models.find(name)
    footprint = measure(model, Layout(), Formats())
    assert (footprint.slot, footprint.row) == (slot, row)
    assert f"{measure(model, Layout(), Formats(state='bfloat16')).slot / 2**20:.2f}" == f"{half:.2f}"


def test_every_known_model_is_checked():
    assert {_family(name) for name in models.TABLE} == {_family(name) for name in KNOWN}


def _family(name):
    same = {"qwen3.6-27b": "qwen3.5-27b", "qwen3.8-27b": "qwen3.5-27b", "qwen3.5-35b": "qwen3.6-35b"}
    return {**same, "minimax-m1": "minimax-text-01", "ling-2.5-1t": "ring-2.5-1t"}.get(name, name)


@pytest.mark.parametrize(
    ("name", "exchange"),
    [("qwen3.5-9b", 3144), ("kimi-k3", 32507), ("glm-5.3-flash", 24624), ("nemotron-3-ultra", 66400)],
)
def test_exchange_rate_with_fp8_kv(name, exchange):
    assert round(measure(models.find(name), Layout(), Formats(kv="fp8_e4m3")).exchange) == exchange


def test_names_of_repositories_are_found():
    assert models.find("Qwen/Qwen3.5-9B-FP8").name == "qwen3.5-9b"
    assert models.find("zai-org/GLM-5.3-Flash").name == "glm-5.3-flash"
    with pytest.raises(ConfigError, match="--model gpt: must be one of"):
        models.find("gpt")


def test_states_divide_and_latents_do_not():
    glm = models.find("glm-5.3-flash")
    whole, half = (measure(glm, Layout(tp=tp), Formats(kv="fp8_e4m3")) for tp in (1, 2))
    assert (half.slot * 2, half.row) == (whole.slot, whole.row) == (147_619_840, 5_995)


def test_kv_heads_replicate():
    qwen = models.find("qwen3.5-9b")  # four KV heads
    rows = [measure(qwen, Layout(tp=tp), Formats()).row for tp in (1, 2, 4, 8)]
    assert rows == [32_768, 16_384, 8_192, 8_192]


def test_mamba_groups_are_padded():
    falcon = models.find("falcon-h1-7b")  # one group
    one, four = (measure(falcon, Layout(tp=tp), Formats()) for tp in (1, 4))
    assert four.temporal * 4 == one.temporal
    assert four.column == 44 * (24 * 128 + 2 * 4 * 256) // 4 * 2


def test_attention_dp_undoes_tp_for_attention():
    qwen = models.find("qwen3.5-9b")
    assert measure(qwen, Layout(tp=8, attn_dp=4), Formats()) == measure(qwen, Layout(tp=2), Formats())


def test_pipeline_stages_pay_for_the_largest():
    glm = models.find("glm-5.3-flash")
    stages = Layout(pp=4).stages(glm)
    assert [len(stage) for stage in stages] == [11, 11, 11, 12]  # what is left over goes to the last
    assert sum(stages, ()) == glm.layers
    states = max(sum(Part.STATE in layer for layer in stage) for stage in stages)
    footprint = measure(glm, Layout(pp=4), Formats())
    assert footprint.slot * 34 == 147_619_840 * states


@pytest.mark.parametrize(
    ("kv", "scaled", "pool", "layer"),
    [
        ("fp8_e4m3", False, None, 545),
        ("fp8_e4m3", True, 1, 660),
        ("bfloat16", False, None, 1024 + 33),
        ("fp4_e2m1", False, None, 256 + 32 + 33),
        ("mxfp8", False, None, 512 + 16 + 33),
    ],
)
def test_layouts_of_a_latent(kv, scaled, pool, layer):
    footprint = measure(models.find("glm-5.3-flash"), Layout(), Formats(kv=kv, scaled=scaled, index_pool=pool))
    assert footprint.layer_row == layer


def test_an_index_as_the_engine_keeps_it():
    """A key and a gate of 128 for each token, in the KV's dtype, instead of a pooled key."""
    glm = models.find("glm-5.3-flash")
    for kv, size in (("float32", 4), ("bfloat16", 2)):
        assert measure(glm, Layout(), Formats(kv=kv, own_index=True)).layer_row == (512 + 2 * 128) * size
    kimi = models.find("kimi-k3")
    assert measure(kimi, Layout(), Formats(own_index=True)) == measure(kimi, Layout(), Formats())


def test_windows_are_a_pool_of_their_own():
    footprint = measure(models.find("inkling"), Layout(), Formats())
    assert footprint.window_row * footprint.window_size == 230_686_720  # 231 MB a sequence
    eight = measure(models.find("inkling"), Layout(tp=8), Formats())
    assert eight.temporal == 0 and eight.column == 66 * (2 * 128 + 2 * 2 * 128 + 2 * 6144) * 2


@pytest.mark.parametrize(
    ("layout", "said"),
    [
        (Layout(tp=3), "--tp 3: must divide the 64 linear-attention heads; for example --tp 2"),
        (Layout(tp=4, attn_dp=3), "--dp-size 3: must divide --tp 4, with DP attention; for example --dp-size 2"),
        (Layout(tp=4, dcp=3), "--dcp-size 3: must divide the 4 attention ranks; for example --dcp-size 2"),
        (Layout(pp=46), "--pp 46: must be at most the 45 layers; for example --pp 45"),
        (Layout(pp=0), "--pp 0: must be at least 1; for example --pp 1"),
    ],
)
def test_layouts_that_do_not_work(layout, said):
    with pytest.raises(ConfigError) as error:
        measure(models.find("glm-5.3-flash"), layout, Formats())
    assert str(error.value) == said


# --- configs: the same model by its config.json -------------------------------------------------------------

QWEN = {"num_attention_heads": 16, "hidden_size": 2048, "head_dim": 256, "max_position_embeddings": 262144}
CONFIGS = {
    "qwen3-next-80b": {**QWEN, "model_type": "qwen3_next", "num_hidden_layers": 48, "num_key_value_heads": 2},
    "qwen3.5-35b": {
        "model_type": "qwen3_5_moe",
        "text_config": {
            **QWEN,
            "model_type": "qwen3_5_moe_text",
            "num_key_value_heads": 2,
            "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 10,
            "linear_num_value_heads": 32,
        },
    },
    "kimi-linear-48b": {
        "model_type": "kimi_linear",
        "num_hidden_layers": 27,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "linear_attn_config": {
            "num_heads": 32,
            "head_dim": 128,
            "short_conv_kernel_size": 4,
            "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
        },
    },
    "glm-5.3-flash": {
        "model_type": "glm5_next",
        "text_config": {
            "num_hidden_layers": 45,
            "kv_lora_rank": 512,
            "qk_rope_head_dim": 0,
            "index_head_dim": 128,
            "index_kpool": 4,
            "linear_num_heads": 64,
            "linear_head_dim": 128,
        },
    },
    "nemotron-3-nano": {
        "model_type": "nemotron_h",
        "hybrid_override_pattern": "MEMEM*E" * 6 + "ME" * 5,
        "hidden_size": 2688,
        "mamba_num_heads": 64,
        "mamba_head_dim": 64,
        "ssm_state_size": 128,
        "n_groups": 8,
        "num_attention_heads": 32,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "chunk_size": 256,
    },
    "granite-4.0-h-small": {
        "model_type": "granitemoehybrid",
        "hidden_size": 4096,
        "layer_types": (["mamba"] * 9 + ["attention"]) * 4,
        "mamba_n_heads": 128,
        "mamba_d_head": "auto",
        "mamba_d_state": 128,
        "mamba_n_groups": 1,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    "falcon-h1-7b": {
        "model_type": "falcon_h1",
        "hidden_size": 3072,
        "num_hidden_layers": 44,
        "mamba_d_ssm": 3072,
        "mamba_n_heads": 24,
        "mamba_d_head": 128,
        "mamba_d_state": 256,
        "mamba_n_groups": 1,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "head_dim": 128,
    },
    "minimax-text-01": {
        "model_type": "minimax",
        "hidden_size": 6144,
        "attn_type_list": ([0] * 7 + [1]) * 10,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
    "ring-2.5-1t": {
        "model_type": "bailing_hybrid",
        "num_hidden_layers": 80,
        "layer_group_size": 8,
        "num_attention_heads": 64,
        "head_dim": 128,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
    },
    "jamba-1.5-mini": {
        "model_type": "jamba",
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    "inkling": {
        "model_type": "inkling_mm_model",
        "text_config": {
            "model_type": "inkling_text",
            "hidden_size": 6144,
            "num_hidden_layers": 66,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "swa_num_key_value_heads": 16,
            "swa_head_dim": 128,
        },
    },
}


@pytest.mark.parametrize("name", CONFIGS)
def test_config_and_table_agree(name):
    read, known = models.read_config(CONFIGS[name], name), models.find(name)
    for tp in (1, 2, 4):
        assert measure(read, Layout(tp=tp), Formats()) == measure(known, Layout(tp=tp), Formats())
    assert (read.chunk, read.defaults) == (known.chunk, known.defaults)


def test_short_convolutions():
    lfm = models.read_config(
        {
            "model_type": "lfm2",
            "hidden_size": 2048,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "full_attn_idxs": [2, 5, 8, 10, 12, 14],
            "conv_L_cache": 3,
        }
    )
    footprint = measure(lfm, Layout(tp=2), Formats())
    assert (footprint.temporal, footprint.conv, footprint.row) == (0, 10 * 1024 * 2 * 2, 2 * 4 * 64 * 2 * 6)
    assert lfm.chunk == 1 and not lfm.defaults.extra_buffer


def test_the_state_dtype_of_a_config():
    qwen = models.read_config({**CONFIGS["qwen3-next-80b"], "mamba_ssm_dtype": "bfloat16"})
    kimi = models.read_config({**CONFIGS["kimi-linear-48b"], "mamba_ssm_dtype": "bfloat16"})
    assert (qwen.state_dtype, kimi.state_dtype) == ("bfloat16", "float32")  # KDA does not read it


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"model_type": "llama"}, "config field model_type is 'llama'; supported: bailing_hybrid, bamba"),
        ({"model_type": "kimi_linear", "num_hidden_layers": 4}, "config field linear_num_heads is \\(missing\\)"),
        ({"model_type": "qwen3_next", "num_attention_heads": 4, "layer_types": ["odd"]}, "layer_types has odd"),
        ({"model_type": "qwen3_next", "num_attention_heads": "4"}, "num_attention_heads is '4'; supported: a whole"),
    ],
)
def test_configs_that_are_not_understood(config, said):
    with pytest.raises(ModelConfigError, match=said):
        models.read_config(config)


# --- what is really allocated -------------------------------------------------------------------------------

SMALL = {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 64,
    "head_dim": 32,
    "intermediate_size": 64,
    "vocab_size": 100,
    "num_hidden_layers": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}


@pytest.mark.parametrize("kind", ["qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"])
@pytest.mark.parametrize("state", ["float32", "bfloat16"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_prediction_equals_allocation(kind, state, dtype):
    torch = pytest.importorskip("torch")
    from milepost.model import Memory, load_model_config

    config = {**SMALL, "model_type": kind}
    footprint = measure(models.read_config(config), Layout(), Formats(state, dtype, dtype))
    slots, rows = 5, 9
    kinds = {"kv_dtype": getattr(torch, dtype), "state_dtype": getattr(torch, state)}
    memory = Memory(load_model_config(config), slots, rows, **kinds)
    assert (memory.slot_bytes, memory.row_bytes) == (footprint.slot, footprint.row)
    assert memory.temporal.nbytes == (slots + 1) * footprint.temporal
    assert memory.conv.nbytes == (slots + 1) * footprint.conv
    assert memory.keys.nbytes + memory.values.nbytes == (rows + 1) * footprint.row


def test_bytes_from_elsewhere():
    footprint = measure(models.find("qwen3.5-9b"), Layout(), Formats())
    other = geo.with_bytes(footprint, 60_000_000, 1000)
    assert (other.slot, other.row, other.conv) == (60_000_000, 1000, footprint.conv)
    assert geo.with_bytes(footprint, 10, None).slot == 10
