"""What several families read from their configs in the same way."""

from collections.abc import Mapping
from typing import Any

from milepost.errors import ModelConfigError
from milepost.model.config import ATTENTION, DENSE, LINEAR, MOE, WINDOW, AttentionSpec, LayerSpec, ModelConfig
from milepost.model.families.fields import Fields

KINDS = {"linear_attention": LINEAR, "full_attention": ATTENTION}

# With text alone the three positions of a multimodal rope are one.
_ROPE_FIELDS = {"rope_type", "type", "rope_theta", "partial_rotary_factor", "mrope_section", "mrope_interleaved"}


def layer_kinds(fields: Fields, default: list[str] | None = None, kinds: Mapping[str, str] = KINDS) -> list[str]:
    """The mixer of each layer: as `layer_types` says, else `default`."""
    count = fields.size("num_hidden_layers")
    listed = fields.get("layer_types", default)
    if listed is None:
        raise fields.refuse("layer_types", "a list")
    if len(listed) != count:
        raise fields.refuse("layer_types", f"one entry for each of num_hidden_layers = {count}")
    if not set(listed) <= set(kinds):
        raise fields.refuse("layer_types", " and ".join(kinds))
    return [kinds[kind] for kind in listed]


def rope(fields: Fields, dim: int, fraction: float | None = None, theta: float = 10000.0) -> tuple[int, float]:
    """(rotary dimensions of a head of `dim`, theta), from whichever of the two forms of fields there is.

    `fraction` and `theta` are what missing fields mean; without a `fraction` all dimensions turn.
    """
    name = fields.first("rope_parameters", "rope_scaling")
    said = fields.get(name) or {}
    kind = said.get("rope_type", said.get("type", "default"))
    if kind != "default":
        raise fields.refuse(name, "rope_type 'default'")
    unknown = set(said) - _ROPE_FIELDS
    if unknown:
        raise fields.refuse(name, f"no {', '.join(sorted(unknown))}")
    wanted = said.get("partial_rotary_factor", fields.get("partial_rotary_factor", fraction or 1.0))
    if fraction is None and wanted != 1:
        raise ModelConfigError(f"config field partial_rotary_factor is {wanted!r}; supported: 1")
    fraction, rotary = wanted, int(dim * wanted)
    if rotary % 2 or not 0 < rotary <= dim:
        raise ModelConfigError(
            f"config field partial_rotary_factor is {fraction!r}; supported: an even number of rotary dimensions, "
            f"at most head_dim = {dim}"
        )
    return rotary, float(said.get("rope_theta", fields.get("rope_theta", theta)))


def heads(fields: Fields, default_dim: int | None = None) -> tuple[int, int, int]:
    """(query heads, KV heads, width of a head); by default the heads share the hidden size."""
    count = fields.size("num_attention_heads")
    kv = fields.size("num_key_value_heads", count)
    if count % kv:
        raise fields.refuse("num_key_value_heads", f"a divisor of num_attention_heads = {count}")
    return count, kv, fields.size("head_dim", default_dim or fields.size("hidden_size") // count)


def plain_attention(fields: Fields, rotary: tuple[int, float] = (0, 1.0), **more: Any) -> AttentionSpec:
    """Attention without an output gate and, unless asked for, without norms."""
    return AttentionSpec(*heads(fields), *rotary, gated=False, **{"normed": False, **more})


def weight_block(fields: Fields) -> tuple[int, int] | None:
    """(rows, columns) of float8 weights that share a scale, DeepSeek's way; None where nothing is quantised."""
    if not fields.get("quantization_config"):
        return None
    said = fields.inner("quantization_config")
    block = said.get("weight_block_size")
    if said.get("quant_method") != "fp8":
        raise said.refuse("quant_method", "'fp8' with a weight_block_size")
    if not isinstance(block, list | tuple) or len(block) != 2 or not all(type(n) is int and n > 0 for n in block):
        raise said.refuse("weight_block_size", "two whole numbers of at least 1")
    said.only("activation_scheme", "dynamic")  # otherwise there are scales of activations, too
    said.only("fmt", "e4m3")
    said.only("scale_fmt", "float", "ue8m0")
    said.only("expert_dtype", "fp8")
    said.ignore("modules_to_not_convert", "modules_to_convert", "ignored_layers", "dequantize")  # files tell by dtype
    said.check_all_asked()
    return block[0], block[1]


def whole_model(fields: Fields, layers: list[LayerSpec], **parts: Any) -> ModelConfig:
    """The config from what a family read of its own and what all have alike; no field may be left over."""
    mlps = {layer.mlp for layer in layers}
    eos = fields.get("eos_token_id", ())
    config = ModelConfig(
        model_type=str(fields.get("model_type")),
        vocab_size=fields.size("vocab_size"),
        hidden_size=fields.size("hidden_size"),
        layers=tuple(layers),
        linear=parts.pop("linear") if any(LINEAR in layer.kinds for layer in layers) else None,
        attention=parts.pop("attention") if any(ATTENTION in layer.kinds for layer in layers) else None,
        window=parts.pop("window") if any(WINDOW in layer.kinds for layer in layers) else None,
        intermediate_size=parts.pop("intermediate_size", None) or _intermediate(fields, DENSE in mlps),
        moe=parts.pop("moe") if MOE in mlps else None,
        rms_norm_eps=fields.number(
            fields.first("layer_norm_epsilon", "rms_norm_eps", "norm_eps"), parts.pop("eps", 1e-6)
        ),
        tie_word_embeddings=fields.flag(fields.first("tie_word_embeddings", "tie_embedding"), parts.pop("tied", False)),
        max_position_embeddings=fields.size(fields.first("max_position_embeddings", "model_max_length"), 32768),
        eos_token_ids=(eos,) if isinstance(eos, int) else tuple(eos),
        bos_token_id=fields.get("bos_token_id"),
        pad_token_id=fields.get("pad_token_id"),
        dtype=fields.get(fields.first("dtype", "torch_dtype")),
        state_dtype=str(fields.get(fields.first("mamba_ssm_dtype", "mamba_ssm_cache_dtype"), "float32")),
        **{name: value for name, value in parts.items() if name not in ("linear", "attention", "window", "moe")},
    )
    fields.check_all_asked()
    return config


def _intermediate(fields: Fields, dense: bool) -> int:
    if dense:
        return fields.size("intermediate_size")
    fields.ignore("intermediate_size")
    return 0
