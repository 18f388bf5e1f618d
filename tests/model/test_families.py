"""What `milepost models` says of the families, held against their configs, closed formulas and what is allocated."""

import json
import shutil

import pytest
import torch
from click.testing import CliRunner

from milepost.boot import DEMO, boot
from milepost.cli import cli
from milepost.config import CacheConfig, ServeConfig
from milepost.errors import ConfigError, ModelConfigError
from milepost.model import Memory, load_model_config
from milepost.model.config import DENSE, MOE, GatedDeltaSpec, LatentSpec, ScanSpec
from milepost.model.families import EVERYWHERE, FAMILIES
from tests.core.test_geometry import KNOWN
from tests.model import oracle


def run(*args) -> str:
    result = CliRunner().invoke(cli, ["models", *map(str, args)], catch_exceptions=False, env={"COLUMNS": "100"})
    assert result.exit_code == 0
    return result.output


def ask(*args):
    return json.loads(run(*args, "--json"))


def raw_config(golden) -> dict:
    """The text model's own, where it is wrapped."""
    raw = json.loads((golden.folder / "config.json").read_text())
    return raw.get("text_config", raw)


# --- the list -------------------------------------------------------------------------------------------------


def test_every_family_is_listed_once_with_the_bytes_of_closed_formulas():
    rows = ask()["families"]
    assert sorted(name for row in rows for name in row["model_types"]) == sorted(FAMILIES)
    for row in rows:
        assert row["published"], f"{row['model_types']} has no example"
        for shown in row["published"]:
            slot, _, kv = KNOWN[_as_known(shown["model"])]
            assert (shown["slot_bytes"], shown["row_bytes"]) == (slot, kv)
            assert sum(shown["slot_parts"].values()) == slot
            assert sum(shown["row_parts"].values()) == kv
            assert shown["dtypes"] == {"state": "float32", "conv": "bfloat16", "kv": "bfloat16"}


def _as_known(name):
    return {"qwen3.5-35b": "qwen3.6-35b"}.get(name, name)


def test_every_family_has_a_recipe():
    assert {id(FAMILIES[name]) for name in oracle.FAMILIES} == {id(family) for family in FAMILIES.values()}


def test_people_see_all_of_it_at_100_columns():
    text, rows = run(), ask()["families"]
    assert max(map(len, text.splitlines())) <= 100
    for row in rows:
        for shown in row["published"]:
            line = next(line for line in text.splitlines() if shown["model"] in line)
            assert f"{shown['slot_bytes']:,}" in line and f"{shown['row_bytes']:,}" in line
    assert all(name in text for name in FAMILIES)
    assert "block_use_swiglu true" in text and "hidden_act silu" in text and "multiples of 64" in text


# --- what a family says of itself, and its configs --------------------------------------------------------------

LINEAR = {"GDN": "Gated DeltaNet", "short conv": "short convolution"}


def test_kinds_are_those_of_the_config(golden):
    config = load_model_config(golden.folder)
    about = FAMILIES[config.model_type].about
    assert about.linear == _linear(config.linear)
    assert about.attention.startswith("MLA" if isinstance(config.attention, LatentSpec) else "GQA")
    assert ("gated" in about.attention) == config.attention.gated
    mlps = {layer.mlp for layer in config.layers}
    assert DENSE not in mlps or "dense" in about.mlp
    assert MOE not in mlps or "experts" in about.mlp


def _linear(spec) -> str:
    if isinstance(spec, GatedDeltaSpec):
        return "KDA" if spec.channel_gates else "Gated DeltaNet"
    if isinstance(spec, ScanSpec):
        return "Mamba-2" if spec.timed else "Lightning"
    return "short convolution"


def test_examples_are_of_the_families_kind():
    for row in ask()["families"]:
        for shown in row["published"]:
            assert LINEAR.get(shown["linear"], shown["linear"]) == row["linear"]
            assert ("latent" in shown["row_parts"]) == row["attention"].startswith("MLA")


def test_a_field_has_the_values_that_are_listed_and_no_other(golden):
    raw = raw_config(golden)
    only = {**EVERYWHERE, **FAMILIES[raw["model_type"]].only}
    for name, values in only.items():
        for value in values:
            load_model_config({**raw, name: value})
        with pytest.raises(ModelConfigError, match=f"^config field {name} is 'odd'"):
            load_model_config({**raw, name: "odd"})


# --- one model --------------------------------------------------------------------------------------------------


def test_a_folder_has_the_bytes_that_are_allocated(golden):
    said = ask(golden.folder)
    config = load_model_config(golden.folder)
    dtypes = {name: getattr(torch, dtype) for name, dtype in said["dtypes"].items()}
    memory = Memory(
        config, 3, 5, kv_dtype=dtypes["kv"], state_dtype=dtypes["state"], conv_dtype=dtypes["conv"], device="cpu"
    )
    assert (said["slot_bytes"], said["row_bytes"]) == (memory.slot_bytes, memory.row_bytes)
    assert said["slot_parts"] == {"state": memory.temporal_bytes // 4, "conv": memory.conv_bytes // 4}
    assert said["model_types"] == [config.model_type]
    counts = said["layers"]
    assert sum(count for kind, count in counts.items() if "linear" in kind) == len(config.linear_layers)
    assert sum(count for kind, count in counts.items() if "attention" in kind) == len(config.attention_layers)
    assert "a slot" in run(golden.folder) and f"{memory.slot_bytes:,} B" in run(golden.folder)


def test_every_family_boots_with_exact_checkpoints(golden, tmp_path):
    """The whole boot, which compares what is allocated with what is planned; the tokenizer is the demo's."""
    for file in [*golden.folder.iterdir(), DEMO / "tokenizer.json", DEMO / "tokenizer_config.json"]:
        shutil.copy(file, tmp_path / file.name)
    booted = boot(ServeConfig(model_path=tmp_path), CacheConfig(max_mamba_cache_size=6, max_total_tokens=512))
    info = booted.engine.info()
    assert (info["strategy"], info["grid"], info["max_mamba_cache_size"]) == ("exact", 1, 6)
    assert ("chunk" in info["checkpoint_reasons"]) == bool(load_model_config(tmp_path).window_layers)


def test_a_known_model():
    glm = ask("zai-org/GLM-5.3-Flash")
    assert glm["layers"] == {"linear": 34, "attention": 11}
    assert (glm["slot_bytes"], glm["row_parts"]) == (147_619_840, {"latent": 11 * 512 * 2, "index": 11 * 33})
    falcon = ask("falcon-h1-7b")
    assert falcon["layers"] == {"linear and attention": 44} and falcon["model_types"] == ["falcon_h1"]
    inkling = ask("inkling")
    assert (inkling["window_row_bytes"], inkling["window_tokens"]) == (55 * 2 * 16 * 128 * 2, 512)
    assert "level 2 keeps checkpoints at chunk ends" in run("inkling")
    small = run("qwen3.5-2b")
    assert "19,537,920 B" in small and "= 18,874,368 state + 663,552 conv" in small


def test_what_is_not_a_model(tmp_path):
    with pytest.raises(
        ConfigError, match=r"^models odd: must be a folder with a config\.json, or one of qwen3-next-80b"
    ):
        run("odd")
    with pytest.raises(ModelConfigError, match="can't be read"):
        run(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ModelConfigError, match="model_type is 'llama'; supported: bailing_hybrid"):
        run(tmp_path)
