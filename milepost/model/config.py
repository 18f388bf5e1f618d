"""A model's shape, read from the `config.json` that Hugging Face models carry.

The result is data: which mixer and which MLP each layer has, and their sizes. Whatever the decoder would not
compute faithfully is refused here, by name, value and what is supported; nothing is guessed silently.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from milepost.errors import ModelConfigError

GATED_DELTA = "gated_delta"
ATTENTION = "attention"
DENSE = "dense"
MOE = "moe"

_MIXERS = {"linear_attention": GATED_DELTA, "full_attention": ATTENTION}


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """The two halves of one layer, as names of entries in the decoder's tables."""

    mixer: str
    mlp: str


@dataclass(frozen=True, slots=True)
class GatedDeltaSpec:
    """Sizes of a Gated DeltaNet mixer. Each key head serves value_heads / key_heads consecutive value heads."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int

    @property
    def key_width(self) -> int:
        return self.key_heads * self.key_dim

    @property
    def value_width(self) -> int:
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Channels of the convolution: q, k and v."""
        return 2 * self.key_width + self.value_width


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Sizes of a full-attention mixer with an output gate; rotary on the first `rotary_dim` of each head."""

    heads: int
    kv_heads: int
    head_dim: int
    rotary_dim: int
    rope_theta: float


@dataclass(frozen=True, slots=True)
class MoeSpec:
    """Routed experts plus one shared expert behind a sigmoid gate."""

    experts: int
    per_token: int
    width: int
    shared_width: int
    normalize: bool


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Everything the decoder needs to know about a model. Sizes in elements."""

    model_type: str
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    linear: GatedDeltaSpec | None
    attention: AttentionSpec | None
    intermediate_size: int
    moe: MoeSpec | None
    rms_norm_eps: float
    tie_word_embeddings: bool
    max_position_embeddings: int
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    pad_token_id: int | None
    dtype: str | None
    state_dtype: str

    @property
    def linear_layers(self) -> tuple[int, ...]:
        """Indexes of the layers that have a recurrent state."""
        return tuple(i for i, layer in enumerate(self.layers) if layer.mixer == GATED_DELTA)

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """Indexes of the layers that have KV."""
        return tuple(i for i, layer in enumerate(self.layers) if layer.mixer == ATTENTION)


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
    return _parse(_Fields(raw))


def _read(path: Path) -> dict[str, Any]:
    file = path / "config.json" if path.is_dir() else path
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelConfigError(f"{file} can't be read as a model config: {error}") from error
    if not isinstance(raw, dict):
        raise ModelConfigError(f"{file} holds a {type(raw).__name__}; a JSON object is supported")
    return raw


class _Fields:
    """Typed access to a config's fields; every complaint names field, value and what is supported."""

    def __init__(self, raw: Mapping[str, Any]) -> None:
        self.raw = raw

    def refuse(self, name: str, supported: str) -> ModelConfigError:
        value = self.raw.get(name, "(missing)")
        return ModelConfigError(f"config field {name} is {value!r}; supported: {supported}")

    def get(self, name: str, default: Any) -> Any:
        value = self.raw.get(name)
        return default if value is None else value

    def size(self, name: str, default: int | None = None) -> int:
        value = self.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.refuse(name, "a whole number of at least 1")
        return value

    def number(self, name: str, default: float) -> float:
        value = self.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise self.refuse(name, "a number above 0")
        return float(value)

    def only(self, name: str, value: Any) -> None:
        """Refuse any value but `value`, which is also what a missing field means."""
        if self.get(name, value) != value:
            raise self.refuse(name, repr(value))


def _parse(fields: _Fields) -> ModelConfig:
    family = _FAMILIES.get(str(fields.raw.get("model_type")))
    if family is None:
        raise fields.refuse("model_type", ", ".join(sorted(_FAMILIES)))
    fields.only("hidden_act", "silu")
    fields.only("attention_bias", False)
    fields.only("attn_output_gate", True)
    fields.only("quantization_config", None)
    mixers = _mixers(fields)
    mlps = family(fields, len(mixers))
    eos = fields.get("eos_token_id", ())
    return ModelConfig(
        model_type=fields.raw["model_type"],
        vocab_size=fields.size("vocab_size"),
        hidden_size=fields.size("hidden_size"),
        layers=tuple(LayerSpec(mixer, mlp) for mixer, mlp in zip(mixers, mlps, strict=True)),
        linear=_gated_delta(fields) if GATED_DELTA in mixers else None,
        attention=_attention(fields) if ATTENTION in mixers else None,
        intermediate_size=fields.size("intermediate_size") if DENSE in mlps else 0,
        moe=_moe(fields) if MOE in mlps else None,
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        tie_word_embeddings=bool(fields.get("tie_word_embeddings", False)),
        max_position_embeddings=fields.size("max_position_embeddings", 32768),
        eos_token_ids=(eos,) if isinstance(eos, int) else tuple(eos),
        bos_token_id=fields.raw.get("bos_token_id"),
        pad_token_id=fields.raw.get("pad_token_id"),
        dtype=fields.get("dtype", fields.raw.get("torch_dtype")),
        state_dtype=str(fields.get("mamba_ssm_dtype", "float32")),
    )


def _mixers(fields: _Fields) -> list[str]:
    count = fields.size("num_hidden_layers")
    kinds = fields.raw.get("layer_types")
    if kinds is None:
        interval = fields.size("full_attention_interval", 4)
        kinds = ["linear_attention" if (i + 1) % interval else "full_attention" for i in range(count)]
    if len(kinds) != count:
        raise fields.refuse("layer_types", f"one entry for each of num_hidden_layers = {count}")
    if not set(kinds) <= set(_MIXERS):
        raise fields.refuse("layer_types", " and ".join(_MIXERS))
    return [_MIXERS[kind] for kind in kinds]


def _gated_delta(fields: _Fields) -> GatedDeltaSpec:
    spec = GatedDeltaSpec(
        key_heads=fields.size("linear_num_key_heads", 16),
        value_heads=fields.size("linear_num_value_heads", 32),
        key_dim=fields.size("linear_key_head_dim", 128),
        value_dim=fields.size("linear_value_head_dim", 128),
        kernel=fields.size("linear_conv_kernel_dim", 4),
    )
    if spec.value_heads % spec.key_heads:
        raise fields.refuse("linear_num_value_heads", f"a multiple of linear_num_key_heads = {spec.key_heads}")
    if spec.kernel < 2:
        raise fields.refuse("linear_conv_kernel_dim", "at least 2")
    return spec


def _attention(fields: _Fields) -> AttentionSpec:
    rope = fields.raw.get("rope_parameters") or fields.raw.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        name = "rope_parameters" if fields.raw.get("rope_parameters") else "rope_scaling"
        raise fields.refuse(name, "rope_type 'default'")
    heads = fields.size("num_attention_heads")
    kv_heads = fields.size("num_key_value_heads", heads)
    head_dim = fields.size("head_dim", 256)
    fraction = rope.get("partial_rotary_factor", fields.get("partial_rotary_factor", 0.25))
    rotary_dim = int(head_dim * fraction)
    if heads % kv_heads:
        raise fields.refuse("num_key_value_heads", f"a divisor of num_attention_heads = {heads}")
    if rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
        raise ModelConfigError(
            f"config field partial_rotary_factor is {fraction!r}; supported: an even number of rotary dimensions, "
            f"at most head_dim = {head_dim}"
        )
    theta = float(rope.get("rope_theta", fields.get("rope_theta", 10000.0)))
    return AttentionSpec(heads, kv_heads, head_dim, rotary_dim, theta)


def _moe(fields: _Fields) -> MoeSpec:
    spec = MoeSpec(
        experts=fields.size("num_experts"),
        per_token=fields.size("num_experts_per_tok"),
        width=fields.size("moe_intermediate_size"),
        shared_width=fields.size("shared_expert_intermediate_size"),
        normalize=bool(fields.get("norm_topk_prob", True)),
    )
    if spec.per_token > spec.experts:
        raise fields.refuse("num_experts_per_tok", f"at most num_experts = {spec.experts}")
    return spec


def _all_dense(_fields: _Fields, layers: int) -> list[str]:
    return [DENSE] * layers


def _all_moe(fields: _Fields, layers: int) -> list[str]:
    fields.only("norm_topk_prob", True)
    return [MOE] * layers


def _qwen3_next_mlps(fields: _Fields, layers: int) -> list[str]:
    dense = set(fields.get("mlp_only_layers", ()))
    step = fields.size("decoder_sparse_step", 1)
    has_experts = bool(fields.get("num_experts", 512))
    return [MOE if has_experts and i not in dense and (i + 1) % step == 0 else DENSE for i in range(layers)]


_FAMILIES: dict[str, Callable[[_Fields, int], list[str]]] = {
    "qwen3_5": _all_dense,
    "qwen3_5_text": _all_dense,
    "qwen3_5_moe": _all_moe,
    "qwen3_5_moe_text": _all_moe,
    "qwen3_next": _qwen3_next_mlps,
}
