"""Logits against transformers: however a sequence is cut, batched, resumed or scattered, they are the same."""

import copy
import json
from pathlib import Path

import numpy as np
import pytest
import torch

import milepost
from milepost.model import Batch, load_decoder
from tests.model.oracle import FAMILIES, Driver, make_reference, random_tokens, reference_logits, save, worst

TOLERANCE = 1e-4

pytestmark = pytest.mark.filterwarnings("ignore")  # what transformers warns about is its own affair


# With plain tensor operations one family for each kind of part; test_kernels.py holds both versions together.
TORCH = (
    "bailing_hybrid",
    "falcon_h1",
    "glm5_next",
    "kimi_linear",
    "lfm2_moe",
    "lara_mini",
    "minimax",
    "nemotron_h",
    "olmo_hybrid",
    "qwen3_5_text",
)
DRIVEN = [(family, "numba") for family in sorted(FAMILIES)] + [(family, "torch") for family in TORCH]


@pytest.fixture(params=DRIVEN, ids="-".join)
def driven(request, goldens, decoders):
    """A golden model and a driver of ours."""
    family, kernels = request.param
    return goldens(family), Driver(decoders(goldens(family).folder, kernels=kernels))


@pytest.fixture
def driver(driven):
    return driven[1]


@pytest.fixture
def expected(driven):
    """Logits of a sequence by transformers."""
    return lambda tokens: reference_logits(driven[0].reference, tokens)


def test_the_reference_is_worth_comparing_with(golden):
    logits = reference_logits(golden.reference, random_tokens(0, 100))
    assert 0.5 < logits.std() < 2
    # Every token matters: change one early token, and the last logits move by far more than the tolerance.
    tokens = random_tokens(0, 100)
    tokens[20] = (tokens[20] + 1) % 320
    assert worst(reference_logits(golden.reference, tokens)[-1], logits[-1]) > 100 * TOLERANCE


def test_full_prefill(driver, expected):
    tokens = random_tokens(1, 200)
    assert worst(driver.feed(driver.sequence(tokens), [200]), expected(tokens)) < TOLERANCE


@pytest.mark.parametrize("size", [16, 63, 64, 100])
def test_chunked_prefill(driver, expected, size):
    tokens = random_tokens(2, 230)
    sizes = [size] * (230 // size) + [230 % size] * (230 % size > 0)
    assert worst(driver.feed(driver.sequence(tokens), sizes), expected(tokens)) < TOLERANCE


def test_decode(driver, expected):
    tokens = random_tokens(3, 110)
    assert worst(driver.feed(driver.sequence(tokens), [70] + [1] * 40), expected(tokens)) < TOLERANCE


def test_decode_from_the_first_token(driver, expected):
    tokens = random_tokens(4, 12)
    assert worst(driver.feed(driver.sequence(tokens), [1] * 12), expected(tokens)) < TOLERANCE


@pytest.mark.parametrize("position", [1, 2, 50, 64, 100, 128, 139, 140])
def test_resume_from_a_mark(driver, expected, position):
    """The state at a mark is that of exactly so many tokens; another sequence continues from a copy of it."""
    tokens, others = random_tokens(5, 150), random_tokens(6, 150)
    others[:position] = tokens[:position]
    first = driver.sequence(tokens)
    kept = driver.slot()
    out = driver.run(first.take(140, marks=((position, kept),)))[0]
    assert worst(out, expected(tokens)[:140]) < TOLERANCE
    second = driver.resumed(others, first, position, kept)
    resumed = driver.feed(second, [40 if position < 110 else 5, 3, 1, 1])
    assert worst(resumed, expected(others)[position : second.at]) < TOLERANCE
    # The first sequence went on undisturbed by its mark.
    assert worst(driver.feed(first, [1] * 10), expected(tokens)[140:]) < TOLERANCE


def test_several_marks_in_one_span_and_on_a_decode_step(driver, expected):
    tokens = random_tokens(7, 180)
    sequence = driver.sequence(tokens)
    marks = [(position, driver.slot()) for position in (30, 64, 65, 130, 170)]
    driver.run(sequence.take(20))
    driver.run(sequence.take(149, marks=tuple(marks[:4])))
    driver.run(sequence.take(1, marks=(marks[4],)))
    for position, slot in marks:
        sequence.slot, sequence.at = slot, position
        assert worst(driver.feed(sequence, [7, 1]), expected(tokens)[position : position + 8]) < TOLERANCE


def test_ragged_batches(driver, expected):
    """Prefill, continued prefill and decode in one batch, in any order, joining and leaving."""
    lengths = [150, 90, 40, 170, 66, 3]
    sequences = [driver.sequence(random_tokens(10 + i, length)) for i, length in enumerate(lengths)]
    got = [[] for _ in sequences]
    rng = np.random.default_rng(0)
    while any(sequence.at < len(sequence.tokens) for sequence in sequences):
        live = [i for i, s in enumerate(sequences) if s.at < len(s.tokens) and rng.random() < 0.8]
        rng.shuffle(live)
        parts = []
        for i in live:
            left = len(sequences[i].tokens) - sequences[i].at
            parts.append(sequences[i].take(min(left, int(rng.choice([1, 1, 5, 33, 64, 100])))))
        if parts:
            for i, logits in zip(live, driver.run(*parts), strict=True):
                got[i].append(logits)
    for sequence, pieces in zip(sequences, got, strict=True):
        assert worst(torch.cat(pieces), expected(sequence.tokens)) < TOLERANCE


def test_marks_of_several_spans_in_one_batch(driver, expected):
    """Each span's state goes to its own target, also where spans are reordered by length and share a wave."""
    sequences = [driver.sequence(random_tokens(30 + i, length)) for i, length in enumerate((90, 190, 150))]
    marks = [(40, driver.slot()), (100, driver.slot()), (100, driver.slot())]
    driver.run(*(s.take(len(s.tokens) - 10, marks=(mark,)) for s, mark in zip(sequences, marks, strict=True)))
    for sequence, (position, slot) in zip(sequences, marks, strict=True):
        sequence.slot, sequence.at = slot, position
        got = driver.feed(sequence, [20, 1, 1])
        assert worst(got, expected(sequence.tokens)[position : position + 22]) < TOLERANCE


@pytest.mark.parametrize(
    ("family", "limit"),
    [("qwen3_5_text", "work._MASK_LIMIT"), ("lara_mini", "work._MASK_LIMIT"), ("glm5_next", "mixers.indexer._LIMIT")],
)
def test_long_context_attention_in_parts(goldens, decoders, monkeypatch, family, limit):
    """Masks beyond the limit are cut by queries; the result is the same."""
    monkeypatch.setattr(f"milepost.model.{limit}", 1000)
    golden = goldens(family)
    driver = Driver(decoders(golden.folder))
    tokens = random_tokens(8, 200)
    logits = driver.feed(driver.sequence(tokens), [50, 150])
    assert worst(logits, reference_logits(golden.reference, tokens)) < TOLERANCE


def test_wanted_rows_come_in_the_order_asked_for(goldens, decoders):
    golden = goldens("qwen3_5_text")
    driver = Driver(decoders(golden.folder))
    a, b = driver.sequence(random_tokens(20, 30)), driver.sequence(random_tokens(21, 50))
    parts = [a.take(30), b.take(50)]
    tokens = np.concatenate([a.tokens, b.tokens])
    wanted = np.array([79, 3, 29])
    logits = driver.decoder.forward(Batch(tokens, tuple(part[1] for part in parts), wanted), driver.memory)
    first, second = (reference_logits(golden.reference, s.tokens) for s in (a, b))
    assert logits.dtype == torch.float32
    assert worst(logits, torch.stack([second[49], first[3], first[29]])) < TOLERANCE
    nothing = Batch(tokens[:1], (driver.sequence(tokens[:1]).take(1)[1],), np.empty(0, np.int64))
    assert driver.decoder.forward(nothing, driver.memory).shape == (0, 320)


def test_dummies_stay_zero(driver):
    for i in range(3):
        sequence = driver.sequence(random_tokens(i, 70))
        driver.feed(sequence, [66, 1, 1])
        driver.run(driver.sequence(random_tokens(i, 70)).take(70), strict=True)
    memory = driver.memory
    tensors = memory.conv, memory.temporal, *memory.kv["attention"], *memory.kv["window"]
    assert not any(tensor[:, 0].any() for tensor in tensors)


def test_bfloat16_is_no_worse_than_the_reference_in_bfloat16(golden, decoders):
    """The model dtype changes rounding, not meaning (and which expert a near tie goes to)."""
    tokens = random_tokens(9, 120)
    exact = reference_logits(golden.reference, tokens)
    theirs = reference_logits(copy.deepcopy(golden.reference).bfloat16(), tokens)
    driver = Driver(decoders(golden.folder, dtype=torch.bfloat16, kernels="torch"))
    ours = driver.feed(driver.sequence(tokens), [80] + [1] * 40)
    assert (ours - exact).abs().mean() < 1.5 * (theirs - exact).abs().mean()


def test_tensors_of_a_multimodal_wrapper(goldens, tmp_path):
    """The same text model inside a wrapper: nested config, prefixed names, and towers that are not served."""
    from safetensors.torch import load_file, save_file

    golden = goldens("qwen3_5_text")
    tensors = load_file(golden.folder / "model.safetensors")
    wrapped = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in tensors.items()}
    wrapped["model.visual.patch_embed.weight"] = torch.zeros(2)
    wrapped["mtp.fc.weight"] = torch.zeros(2)
    save_file(wrapped, tmp_path / "model.safetensors")
    text = json.loads((golden.folder / "config.json").read_text())
    config = {"model_type": "qwen3_5", "text_config": text, "vision_config": {}, "tie_word_embeddings": False}
    (tmp_path / "config.json").write_text(json.dumps(config))
    tokens = random_tokens(3, 50)
    driver = Driver(load_decoder(tmp_path, dtype=torch.float32))
    logits = driver.feed(driver.sequence(tokens), [50])
    assert worst(logits, reference_logits(golden.reference, tokens)) < TOLERANCE


def test_experts_stored_as_one_tensor(goldens, tmp_path):
    from safetensors.torch import load_file, save_file

    golden = goldens("qwen3_5_moe_text")
    tensors = load_file(golden.folder / "model.safetensors")
    one_by_one = {name for name in tensors if ".experts.0." in name}
    assert one_by_one, "transformers no longer writes experts one by one: this test is then the wrong way round"
    for i in range(4):
        under = f"model.layers.{i}.mlp.experts."
        parts = {
            part: torch.stack([tensors.pop(f"{under}{e}.{part}.weight") for e in range(8)])
            for part in ("gate_proj", "up_proj", "down_proj")
        }
        tensors[under + "gate_up_proj"] = torch.cat([parts["gate_proj"], parts["up_proj"]], 1)
        tensors[under + "down_proj"] = parts["down_proj"]
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((golden.folder / "config.json").read_text())
    tokens = random_tokens(3, 50)
    driver = Driver(load_decoder(tmp_path, dtype=torch.float32))
    logits = driver.feed(driver.sequence(tokens), [50])
    assert worst(logits, reference_logits(golden.reference, tokens)) < TOLERANCE


def test_a_dense_qwen3_next(tmp_path):
    model = make_reference(
        "qwen3_next",
        mlp_only_layers=[0, 1, 2],
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        linear_num_key_heads=2,
    )
    tokens = random_tokens(3, 100)
    driver = Driver(load_decoder(save(model, tmp_path), dtype=torch.float32))
    assert driver.decoder.config.moe is None
    assert worst(driver.feed(driver.sequence(tokens), [60] + [1] * 40), reference_logits(model, tokens)) < TOLERANCE


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("kimi_linear", {"q_lora_rank": 24, "n_group": 1, "topk_group": 1, "norm_topk_prob": False}),
        ("bailing_hybrid", {"q_lora_rank": None, "kda_safe_gate": False}),
        ("nemotron_h", {"moe_latent_size": None, "layers_block_type": ["linear_attention", "moe", "full_attention"]}),
        ("nemotron_h", {"use_conv_bias": False, "layers_block_type": ["linear_attention", "mlp", "full_attention"]}),
        ("granitemoehybrid", {"num_local_experts": 0, "position_embedding_type": None}),
        ("falcon_h1", {"mamba_rms_norm": False}),
        ("falcon_h1", {"mamba_norm_before_gate": True, "tie_word_embeddings": True}),
        ("lfm2", {"block_auto_adjust_ff_dim": False}),
        ("lfm2_moe", {"use_expert_bias": False, "norm_topk_prob": False, "routed_scaling_factor": 1.5}),
        # Groups that don't fit into the chunks, of one token, and more of them than there are tokens: all is seen.
        ("glm5_next", {"index_kpool": 7, "index_topk": 21, "linear_lower_bound": None, "n_group": 1, "topk_group": 1}),
        ("glm5_next", {"index_kpool": 1, "index_topk": 20, "indexer_types": ["full"] * 6, "hc_mult": 1}),
        ("glm5_next", {"index_topk": 200, "norm_topk_prob": False, "n_shared_experts": 2}),
        (
            "olmo_hybrid",
            {"linear_allow_neg_eigval": False, "rope_parameters": {"rope_type": "default", "rope_theta": 5e3}},
        ),
        ("lara_mini", {"sliding_window": 1, "tie_word_embeddings": True}),
        ("lara_mini", {"sliding_window": 7, "norm_topk_prob": False}),
        ("lara_mini", {"sliding_window": 70, "layer_types": ["sliding_attention", "linear_attention"]}),
        ("lara_mini", {"sliding_window": 200, "layer_types": ["sliding_attention", "full_attention"]}),
    ],
)
def test_other_settings(tmp_path, family, changes):
    """What a family's recipe leaves at one value."""
    model = make_reference(family, **changes)
    tokens = random_tokens(3, 100)
    driver = Driver(load_decoder(save(model, tmp_path), dtype=torch.float32, kernels="torch"))
    assert worst(driver.feed(driver.sequence(tokens), [60] + [1] * 40), reference_logits(model, tokens)) < TOLERANCE


def test_the_demo_model():
    """The shipped model, trained weights in bfloat16, computed in float32."""
    import transformers

    folder = Path(milepost.__file__).parent / "demo"
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    decoder = load_decoder(folder, dtype=torch.float32)
    assert load_decoder(folder).dtype == torch.bfloat16
    tokens = random_tokens(0, 160, vocab=decoder.config.vocab_size)
    driver = Driver(decoder)
    logits = driver.feed(driver.sequence(tokens), [64, 56] + [1] * 40)
    assert worst(logits, reference_logits(reference, tokens)) < TOLERANCE
