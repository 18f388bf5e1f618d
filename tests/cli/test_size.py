"""`milepost size` from the outside: what it prints, what it answers, what it refuses."""

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from milepost.cli import cli
from milepost.cli.size import size
from milepost.core.sizing import GIB
from milepost.errors import ConfigError

GLM = "--model glm-5.3-flash --tp 2 --kv-cache-dtype fp8"
B1 = f"{GLM} --rest-memory 62.45GiB --mamba-full-memory-ratio 0.9 --mamba-radix-cache-strategy extra_buffer"
DEMO = Path(__file__).parents[2] / "milepost" / "demo"


def run(args, *more):
    result = CliRunner().invoke(size, [*args.split(), *map(str, more)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def ask(args, *more):
    return json.loads(run(args, *more, "--json"))


def refused(args, *more):
    with pytest.raises(ConfigError) as error:
        CliRunner().invoke(size, [*args.split(), *map(str, more)], catch_exceptions=False)
    text = str(error.value)
    assert "\n" not in text and "; for example " in text
    return text


def setting(answers, name):
    return next((row["value"], row["source"]) for row in answers["settings"] if row["name"] == name)


def test_the_documented_boot():
    answers = ask(B1)
    assert (answers["slot_bytes"], answers["row_bytes"]) == (73_809_920, 5_995)
    assert (answers["state_slots"], f"{answers['kv_tokens'] / 1e6:.2f}M") == (429, "5.89M")
    assert (answers["slots_per_request"], answers["max_running_requests"], answers["binds"]) == (5, 85, "state")
    assert answers["boot_lines"] == [
        "Mamba Cache is allocated. max_mamba_cache_size: 429, conv_state size: 1.00GB, ssm_state size: 28.55GB",
        f"KV Cache is allocated. dtype: torch.float8_e4m3fn, #tokens: {answers['kv_tokens']}, KV size: 32.89 GB",
        "max_running_requests is capped to 85 by the mamba state cache "
        "(max_mamba_cache_size=429, 5 state slots per request)",
    ]
    assert answers["exchange_rate"] == 12311.9


@pytest.mark.parametrize(("slots", "tokens"), [(300, "7.48M"), (192, "8.81M")])
def test_pinned_slots(slots, tokens):
    answers = ask(f"{GLM} --rest-memory 62.4472GiB --page-size 64 --mamba-radix-cache-strategy extra_buffer_lazy")
    assert answers["slots_per_request"] == 4
    answers = ask(f"{GLM} --rest-memory 62.4472GiB --max-mamba-cache-size {slots}")
    assert (answers["state_slots"], f"{answers['kv_tokens'] / 1e6:.2f}M") == (slots, tokens)


def test_what_people_see():
    text = run(B1, "--context", 32768)
    for part in (
        "429 slots and a dummy",
        "state 47% : KV 53%",
        "max_mamba_cache_size: 429, conv_state size: 1.00GB, ssm_state size: 28.55GB",
        "The state pool binds at 85 running requests on a rank (the state pool 85, the KV pool 179).",
        "one slot costs as much as 12,312 tokens of KV",
        "Balanced ratio r* at 32,768 tokens a request: 1.88. It leaves out retained sessions",
        "174 slots are headroom",
        "--mamba-full-memory-ratio     0.9           user",
        "note: KV bytes depend on the attention back end",
    ):
        assert part in text, part


# --- model defaults and the resolved table --------------------------------------------------------------------


def test_model_defaults():
    glm = ask(f"{GLM} --rest-memory 62.45GiB")
    assert setting(glm, "--mamba-full-memory-ratio") == ("0.25", "model")
    assert setting(glm, "--mamba-radix-cache-strategy") == ("extra_buffer_lazy", "model")
    inkling = ask("--model inkling --rest-memory 40GiB")
    assert setting(inkling, "--mamba-full-memory-ratio") == ("0.1", "model")
    assert setting(inkling, "--swa-full-tokens-ratio") == ("0.1", "model")
    assert any("convolution streams" in note for note in inkling["notes"])
    qwen = ask("--model qwen3.5-9b --rest-memory 40GiB")
    assert setting(qwen, "--mamba-full-memory-ratio") == ("0.9", "default")
    assert setting(qwen, "--mamba-radix-cache-strategy") == ("exact", "default")


def test_an_explicit_flag_wins():
    answers = ask(f"{GLM} --rest-memory 62.45GiB --mamba-full-memory-ratio 0.25 --mamba-radix-cache-strategy exact")
    assert setting(answers, "--mamba-full-memory-ratio") == ("0.25", "user")
    assert setting(answers, "--mamba-radix-cache-strategy") == ("exact", "user")
    assert answers["slots_per_request"] == 1


def test_a_derived_strategy():
    answers = ask(f"{GLM} --rest-memory 62.45GiB --pp 2")
    assert answers["strategy"] == "extra_buffer" and answers["slots_per_request"] == 4
    assert setting(answers, "overlap schedule") == ("off", "derived")


def test_s44_the_role_comes_first():
    """A decode worker has no prefix cache, so one slot a request, with or without a strategy flag."""
    flags = "--model qwen3.5-9b --rest-memory 40GiB --max-running-requests 8 --speculative-num-draft-tokens 4"
    for more in ("", "--mamba-radix-cache-strategy extra_buffer"):
        answers = ask(f"{flags} --disaggregation-mode decode {more}")
        assert answers["slots_per_request"] == 1 and answers["state_slots"] == 8
        assert setting(answers, "--mamba-radix-cache-strategy") == ("none", "derived")


def test_s44_missing_kernels_are_said(tmp_path):
    lfm = {"model_type": "lfm2", "hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32}
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**lfm, "num_key_value_heads": 8, "full_attn_idxs": [2, 5, 8]}))
    args = f"--config {file} --rest-memory 1GiB"
    assert "lacks in SGLang" in refused(f"{args} --mamba-radix-cache-strategy extra_buffer")
    assert ask(f"{args} --mamba-radix-cache-strategy auto")["strategy"] == "no_buffer"
    assert ask(args)["strategy"] == "exact"


# --- where memory comes from ----------------------------------------------------------------------------------


def test_gpu_weights_fraction():
    answers = ask(f"{GLM} --gpu h200 --weights 70GiB --mem-fraction-static 0.9")
    assert answers["rest_bytes"] == int(141 * GIB * 0.9) - 70 * GIB
    assert setting(answers, "memory for both pools")[1] == "derived"


def test_estimated_weights_say_so():
    answers = ask("--model qwen3.5-9b --gpu-memory 80GiB --mem-fraction-static 0.5 --weights-dtype fp8 --tp 2")
    assert answers["rest_bytes"] == 40 * GIB - 4_500_000_000
    assert any("estimated as 9e+09 parameters in fp8" in note for note in answers["notes"])
    derived = ask("--model qwen3.5-9b --gpu h100")
    assert setting(derived, "--mem-fraction-static") == ("0.875", "derived")
    assert any("captured graphs" in note for note in derived["notes"])


def test_weights_of_a_checkpoint(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text((DEMO / "config.json").read_text())
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": 3 * GIB}}))
    answers = ask(f"--config {folder} --gpu-memory 10GiB --mem-fraction-static 0.8")
    assert answers["rest_bytes"] == 5 * GIB and answers["model"] == "model"
    demo = ask(f"--config {DEMO / 'config.json'} --gpu-memory 1GiB --mem-fraction-static 0.5")
    assert demo["rest_bytes"] == GIB // 2 - (DEMO / "model.safetensors").stat().st_size


def test_parallel_layouts():
    answers = ask("--model kimi-k3 --tp 8 --dcp-size 8 --kv-cache-dtype fp8 --rest-memory 27.64GiB --page-size 64 "
                  "--mamba-radix-cache-strategy extra_buffer --mamba-full-memory-ratio 9")  # fmt: skip
    assert (answers["state_slots"], answers["max_running_requests"]) == (474, 94)
    assert answers["kv_tokens_total"] == 8 * answers["kv_tokens"]
    shared = ask(f"{B1} --dp-size 2 --max-running-requests 41")
    assert (shared["max_running_requests"], shared["max_running_requests_total"]) == (20, 40)


# --- the inverse ----------------------------------------------------------------------------------------------


def test_inverse_and_back():
    answers = ask(f"{GLM} --rest-memory 62.45GiB --concurrency 16 --context 65536 --sessions 48")
    inverse = answers["inverse"]
    assert inverse["fits"] and inverse["flags"] == {"--max-mamba-cache-size": 112, "--max-running-requests": 16}
    flags = " ".join(f"{flag} {value}" for flag, value in inverse["flags"].items())
    again = ask(f"{GLM} --rest-memory 62.45GiB {flags} --context 65536")
    assert again["max_running_requests"] == 16 and again["kv_tokens"] == answers["kv_tokens"]
    assert again["kv_tokens"] >= inverse["needs_kv_tokens"] == 64 * 65536
    ratio = ask(f"{GLM} --rest-memory 62.45GiB --mamba-full-memory-ratio {inverse['same_as_ratio']}")
    assert abs(ratio["state_slots"] - 112) <= 1


def test_three_pools():
    """Lara 4 Mini: 13 window layers of 4 KV heads of 128, keys and values in two bytes, the last 512 tokens."""
    args = "--model lara-4-mini --rest-memory 2GiB"
    answers = ask(args)
    windows = answers["window_tokens"]
    assert (answers["window_row_bytes"], windows) == (13 * 2 * 4 * 128 * 2, int(answers["kv_tokens"] * 0.8))
    assert answers["caps"]["windows"] == (windows - 2048) // 513 < answers["caps"]["state"]
    text = run(args)
    assert f"The window pool binds at {answers['caps']['windows']} running requests" in text
    assert "--swa-full-tokens-ratio" in text and f"windows  {windows:,} tokens" in text
    inverse = ask(f"{args} --concurrency 4 --context 4096 --sessions 12")["inverse"]
    assert inverse["fits"] and 16 * 513 + 2048 <= inverse["flags"]["--swa-full-tokens-ratio"] * 16 * 4096 < 11_000


def test_an_honest_no():
    args = f"{GLM} --rest-memory 62.45GiB --concurrency 16 --context 131072 --sessions 100"
    inverse = ask(args)["inverse"]
    assert not inverse["fits"] and inverse["needs_bytes"] > inverse["have_bytes"]
    assert inverse["best_fit"]["running"] == 16 and inverse["best_fit"]["sessions"] < 100
    text = run(args)
    assert "Does not fit: 16 running requests and 100 idle sessions of 131,072 tokens; needs " in text
    assert f"Best fit: 16 running requests and {inverse['best_fit']['sessions']} idle sessions" in text
    halves = ask("--model qwen3.5-9b --rest-memory 8GiB --concurrency 100 --context 1200")["inverse"]
    assert halves["would_fit_with"] == ["--mamba-ssm-dtype bfloat16", "--kv-cache-dtype fp8"]


def test_host_tier():
    by_ratio = ask(f"{B1} --hicache-ratio 2")["host"]
    assert by_ratio["host_states"] == 859
    by_size = ask(f"{B1} --hicache-size 32 --hicache-mamba-size 8")["host"]
    assert by_size["host_states"] == 8 * 10**9 // 73_809_920 + 1
    assert by_size["host_kv_tokens"] == 24 * 10**9 // 5_995


# --- refusals (S43 and others) --------------------------------------------------------------------------------

S43 = {
    "--mamba-max-states-per-path 0": "must be -1 (no cap) or at least 1",
    "--mamba-max-states-per-path -2": "must be -1 (no cap) or at least 1",
    "--hybrid-cache-checkpoints-level 0": "must be 2 or 3",
    "--hybrid-cache-checkpoints-level 1": "must be 2 or 3",
    "--hybrid-cache-checkpoints-level 4": "must be 2 or 3",
    "--hybrid-cache-checkpoints-level x": "must be a whole number",
    "--mamba-full-memory-ratio 0": "must be above 0",
    "--mamba-full-memory-ratio -1": "must be above 0",
    "--mamba-full-memory-ratio nan": "must be above 0",
    "--max-mamba-cache-size 0": "must be at least 1, the slots of one running request (exact)",
    "--mamba-radix-cache-strategy exact --disable-radix-cache": "has no meaning with --disable-radix-cache",
    "--hicache-size 0": "must be above 0",
    "--hicache-size 8 --hicache-mamba-size 9": "must be at most the whole host budget (--hicache-size 8)",
}


@pytest.mark.parametrize("flags", S43)
def test_s43_refused(flags):
    text = refused(f"--model qwen3.5-9b --rest-memory 8GiB {flags}")
    assert S43[flags] in text and any(flag in text for flag in flags.split() if flag.startswith("--"))


@pytest.mark.parametrize(
    ("flags", "limit"),
    [
        ("--mamba-max-states-per-path -1", None),
        ("--max-mamba-cache-size 1", 1),
        ("--mamba-track-interval 100", None),
        ("--max-mamba-cache-size 5 --mamba-radix-cache-strategy extra_buffer", 1),
    ],
)
def test_s43_accepted(flags, limit):
    answers = ask(f"--model qwen3.5-9b --rest-memory 8GiB {flags}")
    assert limit is None or answers["max_running_requests"] == limit


@pytest.mark.parametrize("slots", [1, 2, 3, 4])
def test_s43_extra_buffer(slots):
    base = "--model qwen3.5-9b --rest-memory 8GiB --mamba-radix-cache-strategy extra_buffer"
    text = refused(f"{base} --max-mamba-cache-size {slots}")
    assert "must be at least 5, the slots of one running request (extra_buffer)" in text
    assert "must be a multiple of the page of 64" in refused(f"{base} --page-size 64 --mamba-track-interval 100")


def test_s43_a_model_without_states(tmp_path):
    config = json.loads((DEMO / "config.json").read_text())
    config["layer_types"] = ["full_attention"] * 8
    (tmp_path / "config.json").write_text(json.dumps(config))
    args = f"--config {tmp_path} --rest-memory 1GiB"
    assert "has no meaning for a model without recurrent states" in refused(
        f"{args} --mamba-radix-cache-strategy exact"
    )
    answers = ask(args)
    assert (answers["slot_bytes"], answers["kv_tokens"]) == (0, GIB // answers["row_bytes"])
    assert "KV pool binds" in run(args)


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ("--rest-memory 1GiB", "--model (not set): give one of --model and --config"),
        ("--model nope --rest-memory 1GiB", "--model nope: must be one of"),
        ("--config /nowhere --rest-memory 1GiB", "--config /nowhere: can't be read as JSON"),
        ("--model qwen3.5-9b", "--rest-memory (not set): must be set, or --gpu or --gpu-memory"),
        ("--model qwen3.5-9b --gpu h900", "--gpu h900: must be one of h100, h200, b200, b300"),
        ("--model qwen3.5-9b --rest-memory 8GiB --gpu h100", "--gpu h100: has no meaning with --rest-memory"),
        ("--model qwen3.5-9b --rest-memory 8Gib", "--rest-memory 8Gib: must be a number with a unit"),
        ("--model qwen3.5-9b --rest-memory 8MiB", "--rest-memory 8MiB: one running request takes 1 slots of"),
        ("--model kimi-k3 --gpu h100", "--tp 1: the weights take 5178.16GiB of the 80GiB of a rank"),
        ("--model inkling --gpu h100", "--weights (not set): must be set: the number of parameters is not known"),
        ("--model qwen3.5-9b --gpu h100 --mem-fraction-static 0.1", "must be above 0.21"),
        ("--model qwen3.5-9b --rest-memory 8GiB --kv-cache-dtype int3", "--kv-cache-dtype int3: must be one of"),
        ("--model qwen3.5-9b --rest-memory 8GiB --mamba-ssm-dtype int3", "--mamba-ssm-dtype int3: must be one of"),
        ("--model qwen3.5-9b --rest-memory 8GiB --tp 64", "--tp 64: must divide the"),
        ("--model qwen3.5-9b --rest-memory 8GiB --concurrency 4", "--context (not set)"),
        ("--model qwen3.5-9b --rest-memory 8GiB --sessions 4", "--concurrency (not set)"),
        ("--model qwen3.5-9b --rest-memory 8GiB --context 0", "--context 0: must be at least 1"),
        (f"{B1} --concurrency 4 --context 9 --max-mamba-cache-size 9", "is what --concurrency asks for"),
        (f"{B1} --pp 2 --mamba-radix-cache-strategy extra_buffer_lazy", "needs the overlap schedule, which --pp 2"),
        (f"{B1} --speculative-num-draft-tokens 4", "--max-running-requests (not set): must be set with"),
        (f"{B1} --speculative-num-draft-tokens 512 --max-running-requests 4", "--mamba-track-interval 256: must be"),
        ("--boot-log /nowhere", "--boot-log /nowhere: can't be read"),
    ],
)
def test_refused(args, said):
    assert said in refused(args)


# --- boot logs ------------------------------------------------------------------------------------------------

PREFIX = "[2026-11-02 10:00:00 DP0 TP1 EP1] "
LOG_B1 = f"""\
[2026-11-02 09:59:00] server_args=ServerArgs(model_path='zai-org/GLM-5.3-Flash', page_size=64, tp_size=2)
{PREFIX}Mamba Cache is allocated. max_mamba_cache_size: 429, conv_state size: 1.00GB, ssm_state size: 28.55GB
{PREFIX}KV Cache is allocated. dtype: torch.float8_e4m3fn, #tokens: 5890560, KV size: 32.89 GB
{PREFIX}max_running_requests is capped to 85 by the mamba state cache \
(max_mamba_cache_size=429, 5 state slots per request)
"""
LOG_B11 = """\
Mamba Cache is allocated. max_mamba_cache_size: 64, conv_state size: 0.07GB ssm_state size: 3.05GB \
intermediate_ssm_state_cache size: 48.75GB intermediate_conv_window_cache size: 0.43GB
KV Cache is allocated. #tokens: 295950, K size: 4.52 GB, V size: 4.52 GB
"""
LOG_B10 = """\
[TP0] Mamba Cache is allocated. max_mamba_cache_size: 2211,
         conv_state size: 0.44 GB, ssm_state size: 24.84 GB
[TP0] KV Cache is allocated. dtype: torch.float8_e4m3fn, #tokens: 19644177,
         K size: 14.05 GB, V size: 14.05 GB
[TP0] max_total_num_tokens=19644177, chunked_prefill_size=8192,
         max_running_requests=32, context_len=262144
"""


def read(tmp_path, text, args="", *more):
    file = tmp_path / "boot.log"
    file.write_text(text)
    return ask(f"--boot-log {file} {args}", *more)


def test_a_log_is_explained(tmp_path):
    answers = read(tmp_path, LOG_B1)
    log = answers["log"]
    assert log["explained_by"] == ["glm-5.3-flash, TP 2, float32 state, fp8_e4m3 KV"]
    assert log["rank"] == "DP0 TP1 EP1" and log["differences"] == []
    assert log["slot_bytes_between"][0] <= answers["slot_bytes"] == 73_809_920 <= log["slot_bytes_between"][1]
    assert (answers["row_bytes"], answers["slots_per_request"], answers["max_running_requests"]) == (5_995, 5, 85)
    assert answers["boot_lines"] == [line.removeprefix(PREFIX) for line in LOG_B1.splitlines()[1:]]
    assert f"{log['rest_bytes'] / GIB:.2f}" == "62.44"
    assert setting(answers, "--mamba-full-memory-ratio") == ("0.8987", "derived")
    assert setting(answers, "--mamba-radix-cache-strategy") == ("extra_buffer", "derived")


def test_a_log_answers_the_same_questions(tmp_path):
    answers = read(tmp_path, LOG_B1, "--concurrency 16 --context 65536 --sessions 48")
    assert answers["inverse"]["fits"]
    assert answers["inverse"]["flags"]["--max-mamba-cache-size"] == 16 * 5 + 48


def test_a_log_with_drafts(tmp_path):
    answers = read(tmp_path, LOG_B11, "--disable-radix-cache")
    texts = answers["log"]["explained_by"]
    assert texts[0] == "qwen3.5-9b, TP 1, float32 state, bfloat16 KV, 16 draft tokens"
    assert {text.split(",")[0] for text in texts} == {"qwen3.5-9b", "qwen3.5-4b"}
    assert answers["slots_per_request"] == 1
    assert "intermediate_ssm_state_cache size: 48.75GB" in answers["boot_lines"][0]


def test_a_wrapped_log_and_replicated_heads(tmp_path):
    answers = read(tmp_path, LOG_B10, "--model nemotron-3-nano")
    assert answers["log"]["explained_by"] == ["nemotron-3-nano, TP 4, float32 state, fp8_e4m3 KV"]
    assert answers["max_running_requests"] == 32


def test_differences_are_named(tmp_path):
    other = LOG_B1.replace("28.55GB", "14.28GB").replace("32.89", "39.83")  # bf16 state, 660 B a layer
    text = read(tmp_path, other)["log"]["explained_by"]
    assert text == ["glm-5.3-flash, TP 2, bfloat16 state, fp8_e4m3 KV, scaled layout, index pooled by 1"]
    drafted = read(tmp_path, LOG_B1.replace("32.89", "35.88"))["log"]["explained_by"]
    assert drafted == ["glm-5.3-flash, TP 2, float32 state, fp8_e4m3 KV, 1 draft layer in the KV"]
    wrong = read(tmp_path, LOG_B1.replace("1.00GB", "3.00GB"), "--model glm-5.3-flash")
    assert wrong["log"]["explained_by"] == []
    assert wrong["log"]["differences"] == ["conv_state: log 3.00 GB, geometry 1.00 GB (2506752 B a slot)"]
    assert wrong["slot_bytes"] == pytest.approx((28.55 + 3.00) * GIB / 430, rel=1e-3)


def test_ranks_that_disagree(tmp_path):
    other = LOG_B1.replace("TP1 EP1", "TP0 EP0").replace("5890560", "5890624")
    notes = read(tmp_path, LOG_B1 + other)["notes"]
    assert "rank DP0 TP0 EP0: 429 slots, 5890624 tokens, unlike rank DP0 TP1 EP1" in notes


def test_a_log_of_something_else(tmp_path):
    file = tmp_path / "boot.log"
    file.write_text("nothing here\n")
    assert "has no rank with both" in refused(f"--boot-log {file}")


def test_list_models():
    text = run("--list-models")
    assert "glm-5.3-flash" in text and "147,619,840" in text


# --- the page -------------------------------------------------------------------------------------------------

PAGE = (Path(__file__).parents[2] / "docs" / "sizing.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```text ?([\w.]*)\n(.*?)```", PAGE, re.DOTALL)
COMMANDS = [block.splitlines() for name, block in BLOCKS if not name]


@pytest.mark.parametrize("lines", COMMANDS, ids=lambda lines: lines[0][-40:])
def test_every_figure_of_the_page_is_printed(lines, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, block in BLOCKS:
        if name:
            (tmp_path / name).write_text(block)
    command, *shown = lines
    result = CliRunner().invoke(cli, command.removeprefix("$ milepost ").split(), catch_exceptions=False)
    printed = {" ".join(line.split()) for line in result.output.splitlines()}
    missing = [line for line in shown if " ".join(line.split()) not in printed]
    assert not missing, sorted(printed)
