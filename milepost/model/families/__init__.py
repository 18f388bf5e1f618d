"""The model families: how each reads its config, what its files call tensors, how its parts are put together.

A family is one `Family` in a module of its own; `FAMILIES` is the only list of them. docs/adding-a-model.md says how.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from milepost.errors import ModelConfigError
from milepost.model.config import ModelConfig
from milepost.model.families import falcon, glm, granite, kimi, lara, lfm, minimax, nemotron, olmo, qwen
from milepost.model.families.alike import weight_block
from milepost.model.families.family import Family
from milepost.model.families.fields import Fields

EVERYWHERE = {"hidden_act": ("silu",), "attention_bias": (False,), "mlp_bias": (False,)}
"""Fields, and the values of them that are supported in any family."""

FAMILIES: Mapping[str, Family] = {
    **qwen.FAMILIES,
    **kimi.FAMILIES,
    **glm.FAMILIES,
    **nemotron.FAMILIES,
    **granite.FAMILIES,
    **falcon.FAMILIES,
    **lfm.FAMILIES,
    **minimax.FAMILIES,
    **olmo.FAMILIES,
    **lara.FAMILIES,
}


def load_model_config(source: Path | Mapping[str, Any]) -> ModelConfig:
    """Read a `config.json` (its path, its folder, or the parsed object).

    A multimodal wrapper's `text_config` is used, with the wrapper's own `tie_word_embeddings` and token ids where
    it has them. Raises ModelConfigError.
    """
    raw = dict(source) if isinstance(source, Mapping) else _read(Path(source))
    if "text_config" in raw:
        outer = raw
        raw = dict(outer["text_config"])
        for name in ("tie_word_embeddings", "eos_token_id", "bos_token_id", "pad_token_id", "dtype", "torch_dtype"):
            if outer.get(name) is not None:
                raw[name] = outer[name]
        if "quantization_config" in outer:
            raw["quantization_config"] = outer["quantization_config"]
        raw.setdefault("model_type", outer.get("model_type"))
    fields = Fields(raw)
    family = FAMILIES.get(str(fields.get("model_type")))
    if family is None:
        raise fields.refuse("model_type", ", ".join(sorted(FAMILIES)))
    block = weight_block(fields)
    for name, values in {**EVERYWHERE, **family.only}.items():
        fields.only(name, *values)
    return replace(family.read(fields), weight_block=block)


def _read(path: Path) -> dict[str, Any]:
    file = path / "config.json" if path.is_dir() else path
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelConfigError(f"{file} can't be read as a model config: {error}") from error
    if not isinstance(raw, dict):
        raise ModelConfigError(f"{file} holds a {type(raw).__name__}; a JSON object is supported")
    return raw
