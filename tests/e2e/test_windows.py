"""A model with sliding-window, linear and full-attention layers behind the real server and the real client."""

import json
import shutil
import warnings

import httpx
import openai
import pytest

from milepost.boot import DEMO, boot
from milepost.config import CacheConfig, ServeConfig
from milepost.errors import ConfigError
from tests.e2e.live import Live, serving
from tests.e2e.test_real_server import VERSES

WINDOW = 48
POOLS = {"max_mamba_cache_size": 24, "max_total_tokens": 4_000, "chunked_prefill_size": 128, "strict_reuse": True}


@pytest.fixture(scope="module")
def lara(tmp_path_factory):
    """A tiny random lara_mini with the demo's tokenizer."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torch
        import transformers

        torch.manual_seed(3)
        config = transformers.LaraMiniConfig(
            vocab_size=json.loads((DEMO / "config.json").read_text())["vocab_size"],
            hidden_size=64,
            num_hidden_layers=5,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            linear_key_head_dim=16,
            linear_value_head_dim=16,
            moe_intermediate_size=32,
            shared_expert_intermediate_size=32,
            num_experts=4,
            num_experts_per_tok=2,
            sliding_window=WINDOW,
            max_position_embeddings=4096,
            eos_token_id=2,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        )
        folder = tmp_path_factory.mktemp("lara")
        transformers.LaraMiniForCausalLM(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, folder / name)
    return folder


def chat(live: Live) -> list[tuple[str, int]]:
    """Five turns: what was said, and how much of each prompt was reused."""
    messages, said = [], []
    with openai.OpenAI(base_url=live.url + "/v1", api_key="none", max_retries=0) as client:
        for verse in VERSES:
            messages.append({"role": "user", "content": verse * 3})
            answer = client.chat.completions.create(
                model=live.booted.name, messages=messages, max_tokens=20, temperature=0
            )
            text = answer.choices[0].message.content
            messages.append({"role": "assistant", "content": text})
            said.append((text, answer.usage.prompt_tokens_details.cached_tokens))
    live.check()
    return said


@pytest.mark.parametrize("ratio", [0.06, 0.5], ids=["few windows", "enough"])
def test_a_conversation_reads_the_same_with_and_without_the_cache(lara, ratio):
    with serving(model_path=lara, disable_radix_cache=True, max_running_requests=4, **POOLS) as live:
        cold = chat(live)
    with serving(model_path=lara, swa_full_tokens_ratio=ratio, **POOLS) as live:
        rows = int(4_000 * ratio)
        assert f"Use sliding window memory pool. full_layer_tokens=4000, swa_layer_tokens={rows}" in live.booted.lines
        assert live.scheduler.windows.reach == WINDOW
        warm = chat(live)
        metrics = httpx.get(live.url + "/metrics").text
        assert f'milepost:window_rows{{model_name="{live.booted.name}"}} {rows}.0' in metrics
    assert [text for text, _ in warm] == [text for text, _ in cold]
    assert [cached for _, cached in cold] == [0] * len(VERSES)
    assert all(cached > 0 and cached % 64 == 0 for _, cached in warm[1:])


def test_a_window_pool_too_small_is_refused_by_name(lara):
    said = r"--swa-full-tokens-ratio 0.01: leaves 40 window rows; at least 50 are needed"
    with pytest.raises(ConfigError, match=said):
        boot(ServeConfig(model_path=lara), CacheConfig(swa_full_tokens_ratio=0.01, max_total_tokens=4_000))


def test_too_few_tokens_for_a_window_are_refused_by_name(lara):
    with pytest.raises(ConfigError, match=r"--max-total-tokens 30: is too few .* 50 rows; .* --max-total-tokens 64$"):
        boot(ServeConfig(model_path=lara), CacheConfig(max_total_tokens=30))


def test_what_a_small_window_pool_means_is_said(lara):
    booted = boot(ServeConfig(model_path=lara), CacheConfig(swa_full_tokens_ratio=0.05, max_total_tokens=4_000))
    assert "prefill chunks are cut from 2048 to 152 tokens: the window pool has 200 rows" in booted.lines
    assert "the window pool lets 1 long requests run beside a prefill chunk of 152 tokens" in booted.lines
