"""Which model has which shape: a table of known hybrids, and a reader of Hugging Face configs (as parsed JSON).

Shapes come from model configs unless a note says otherwise. A note is a mark that the user gets to see: what is
unverified, inferred or not counted. What a config does not say is refused by name, not guessed.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from milepost.core import geometry as geo
from milepost.core.geometry import Defaults, Grouped, Index, Latent, Model, Part, Recurrence
from milepost.errors import ConfigError, ModelConfigError

BOTH = Part.STATE | Part.KV

INKLING = Defaults(ratio=0.1, strategy="extra_buffer", window_ratio=0.1)
GLM_FLASH = Defaults(ratio=0.25, strategy="extra_buffer_lazy")
NO_EXTRA_BUFFER = Defaults(extra_buffer=False)

GRID_256 = 256
COMMUNITY = "parameter counts are community figures"
PARAMS_UNVERIFIED = "parameter counts are unverified"
GLM_LAYOUT = (
    "KV bytes depend on the attention back end: 545 a layer with a pooled index, 660 with --kv-layout scaled "
    "--index-pool 1 (inferred from a log)"
)
BY_DEFAULTS = "the shape is that of the defaults of transformers' config class"
STREAMS = "no boot log has confirmed the bytes of the convolution streams"
_LARA = (Part.STATE, Part.WINDOW, Part.STATE, Part.KV, Part.WINDOW)
NO_QSA = "index keys and per-layer-embedding states are not counted: their sizes were not collected"


def _every(count: int, period: int, last: bool = False) -> tuple[Part, ...]:
    """`count` layers, full attention at the end of each `period`, and at the very end if `last`."""
    full = [(i + 1) % period == 0 or (last and i == count - 1) for i in range(count)]
    return tuple(Part.KV if here else Part.STATE for here in full)


def _spread(states: int, attention: int, neither: int = 0) -> tuple[Part, ...]:
    """Layers of each kind, spread evenly: for models of which only the numbers are known."""
    kinds = ((Part.STATE, states), (Part.KV, attention), (Part.NONE, neither))
    placed = [((i + 0.5) / many, order, part) for order, (part, many) in enumerate(kinds) for i in range(many)]
    return tuple(part for _, _, part in sorted(placed))


def _qwen(name: str, layers: int, key: int, value: int, kv: int, params: float, **more: Any) -> Model:
    return Model(name, _every(layers, 4), geo.gated_delta(key, value), Grouped(kv, 256), params=params, **more)


def _nemotron(name: str, layers: tuple[int, int, int], heads: int, params: float, **more: Any) -> Model:
    state, kv_heads = more.pop("state", 128), more.pop("kv_heads", 2)
    return Model(
        name,
        _spread(*layers),
        geo.mamba2(heads, 64, state, 8),
        Grouped(kv_heads, 128),
        chunk=GRID_256,
        params=params,
        ordered=False,
        **more,
    )


def _lfm(name: str, full: tuple[int, ...], layers: int, params: float) -> Model:
    return Model(
        name,
        tuple(Part.KV if i in full else Part.STATE for i in range(layers)),
        geo.short_conv(2048, 3),
        Grouped(8, 64),
        chunk=1,
        context=128000,
        params=params,
        defaults=NO_EXTRA_BUFFER,
        notes=("which layers are attention is unverified",),
    )


def _table() -> dict[str, Model]:
    """All models of docs/sizing.md, by their short names."""
    models = [
        _qwen("qwen3-next-80b", 48, 16, 32, 2, 80e9),
        *(_qwen(f"qwen{version}-27b", 64, 16, 48, 4, 27e9) for version in ("3.5", "3.6", "3.8")),
        *(_qwen(f"qwen{version}-35b", 40, 16, 32, 2, 35e9) for version in ("3.5", "3.6")),
        _qwen("qwen3.5-9b", 32, 16, 32, 4, 9e9),
        _qwen("qwen3.5-4b", 32, 16, 32, 4, 4e9),
        _qwen("qwen3.5-2b", 24, 16, 16, 2, 2e9),
        _qwen("qwen3.5-0.8b", 24, 16, 16, 2, 0.8e9),
        _qwen("qwen3.5-122b", 48, 16, 64, 2, 122e9),
        _qwen("qwen3.5-397b", 60, 16, 64, 2, 397e9),
        _qwen("qwen3.8-2.4t", 92, 16, 128, 4, 2.4e12),
        _qwen("qwen3.8-flash-next", 48, 16, 48, 2, 176e9, notes=(NO_QSA,)),
        *_kdas(),
        _nemotron("nemotron-3-nano", (23, 6, 23), 64, 31.6e9, notes=(PARAMS_UNVERIFIED,)),
        _nemotron("nemotron-3.5-lightning", (23, 6, 23), 64, 31.6e9, notes=(PARAMS_UNVERIFIED,)),
        _nemotron("nemotron-3-super", (40, 8, 40), 128, 120e9),
        _nemotron("nemotron-3-ultra", (48, 12, 48), 256, 550e9),
        _nemotron("nemotron-h-56b", (54, 10, 54), 256, 56e9, state=256, kv_heads=8),
        Model(
            "granite-4.0-h-small",
            _spread(36, 4),
            geo.mamba2(128, 64, 128, 1),
            Grouped(8, 128),
            chunk=GRID_256,
            params=32e9,
            ordered=False,
            notes=("the width of a Mamba-2 head (64) is inferred",),
        ),
        Model("falcon-h1-7b", (BOTH,) * 44, geo.mamba2(24, 128, 256, 1), Grouped(2, 128), chunk=GRID_256, params=7e9),
        Model(
            "bamba-9b",
            tuple(Part.KV if i in (9, 18, 27) else Part.STATE for i in range(32)),
            geo.mamba2(128, 64, 256, 1),
            Grouped(8, 128),
            chunk=GRID_256,
            params=9e9,
            notes=(f"which layers are attention is unverified; {BY_DEFAULTS}",),
        ),
        Model(
            "olmo-hybrid-7b",
            _every(32, 4),
            geo.gated_delta(30, 30, 96, 192),
            Grouped(30, 128),
            context=65536,
            params=7e9,
            notes=(BY_DEFAULTS,),
        ),
        Model(
            "lara-4-mini",
            tuple(_LARA[i % 5] for i in range(34)),
            geo.gated_delta(8, 16),
            Grouped(4, 128),
            window=Grouped(4, 128),
            window_size=512,
            context=131072,
            notes=(BY_DEFAULTS,),
        ),
        _lfm("lfm2-1.2b", (2, 5, 8, 10, 12, 14), 16, 1.2e9),
        _lfm("lfm2-8b-a1b", (2, 6, 10, 14, 18, 21), 24, 8.3e9),
        *_lightnings(),
        Model(
            "jamba-1.5-mini",
            tuple(Part.KV if i % 8 == 4 else Part.STATE for i in range(32)),
            geo.mamba1(8192, 16),
            Grouped(8, 128),
            context=262144,
            params=52e9,
            notes=("KV heads (8 × 128) and parameter counts are unverified",),
        ),
        Model(
            "inkling",
            tuple(BOTH if (i + 1) % 6 == 0 else Part.STATE | Part.WINDOW for i in range(66)),
            geo.conv_streams(6144, (8, 128), (16, 128)),
            Grouped(8, 128),
            window=Grouped(16, 128),
            window_size=512,
            context=131072,
            defaults=INKLING,
            notes=(STREAMS,),
        ),
    ]
    return {model.name: model for model in models}


def _kdas() -> list[Model]:
    return [
        Model("kimi-linear-48b", _every(27, 4, True), geo.kda(32), Latent(512, 64), context=1048576, params=48e9),
        Model(
            "kimi-k3",
            _every(93, 4, True),
            geo.kda(96),
            Latent(512, 64),
            params=2.78e12,
            notes=(COMMUNITY,),
        ),
        Model(
            "glm-5.3-flash",
            _every(45, 4),
            geo.kda(64),
            Latent(512, 0),
            Index(128, 4, gated=True),
            context=1048576,
            params=320e9,
            defaults=GLM_FLASH,
            notes=(GLM_LAYOUT,),
        ),
        Model("ling-3.0-flash", _every(42, 6), geo.kda(32), Latent(512, 64), context=262144, notes=(BY_DEFAULTS,)),
    ]


def _lightnings() -> list[Model]:
    minimax = Model("minimax-text-01", _every(80, 8), geo.lightning(64, 128), Grouped(8, 128), params=456e9)
    ring = Model("ring-2.5-1t", _every(80, 8), geo.lightning(64, 128), Latent(512, 64), params=1e12)
    ring = replace(ring, notes=("the parameter count is approximate",))
    return [minimax, replace(minimax, name="minimax-m1"), ring, replace(ring, name="ling-2.5-1t")]


TABLE = _table()


def find(name: str) -> Model:
    """A model of the table by its name, or by its repository's (`Qwen/Qwen3.5-9B-FP8`). Raises `ConfigError`."""
    wanted = _plain(name.rsplit("/", 1)[-1])
    matches = [model for key, model in TABLE.items() if wanted == _plain(key) or wanted.startswith(_plain(key))]
    if not matches:
        raise ConfigError("--model", name, f"must be one of {', '.join(TABLE)}, or use --config", "glm-5.3-flash")
    return max(matches, key=lambda model: len(model.name))


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower().replace("nvidia-", ""))


class _Fields:
    """Typed access to a config's fields."""

    def __init__(self, raw: Mapping[str, Any]) -> None:
        self.raw = raw

    def get(self, *names: str, default: Any = None) -> Any:
        """The first of `names` that is set."""
        return next((self.raw[name] for name in names if self.raw.get(name) is not None), default)

    def size(self, *names: str, default: int | None = None) -> int:
        value = self.get(*names, default=default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            shown = "(missing)" if value is None else repr(value)
            raise ModelConfigError(f"config field {names[0]} is {shown}; supported: a whole number")
        return value

    def heads(self) -> tuple[int, int]:
        """KV heads and their width."""
        heads = self.size("num_attention_heads")
        width = self.get("head_dim") or self.size("hidden_size") // heads
        return self.size("num_key_value_heads", default=heads), int(width)

    def kinds(self, default: Callable[[int, int], Part], **more: Part) -> tuple[Part, ...]:
        """The kind of each layer: as listed, or by `default(index, count)`. `more`: kinds that not all readers know."""
        known = {**_KINDS, **more}
        listed = self.get("layer_types", "layers_block_type")
        if listed is None:
            count = self.size("num_hidden_layers")
            return tuple(default(i, count) for i in range(count))
        unknown = sorted(set(listed) - set(known))
        if unknown:
            raise ModelConfigError(f"config field layer_types has {', '.join(unknown)}; supported: {', '.join(known)}")
        return tuple(known[kind] for kind in listed)


_KINDS = {
    "linear_attention": Part.STATE,
    "mamba": Part.STATE,
    "conv": Part.STATE,
    "full_attention": Part.KV,
    "attention": Part.KV,
    "indexed_attention": Part.KV,
    "hybrid": BOTH,
    "hybrid_sliding": Part.STATE | Part.WINDOW,
    "moe": Part.NONE,
    "mlp": Part.NONE,
}


def read_config(raw: Mapping[str, Any], name: str = "config") -> Model:
    """The shape in a `config.json` (a wrapper's `text_config` is used). Raises `ModelConfigError`."""
    inner = raw.get("text_config")
    merged = {**inner, "model_type": inner.get("model_type", raw.get("model_type"))} if inner else dict(raw)
    fields = _Fields(merged)
    kind = str(merged.get("model_type"))
    reader = _READERS.get(kind) or _READERS.get(str(raw.get("model_type")))
    if reader is None:
        raise ModelConfigError(f"config field model_type is {kind!r}; supported: {', '.join(sorted(_READERS))}")
    model = reader(fields)
    dtype = fields.get("mamba_ssm_dtype", "mamba_ssm_cache_dtype", default="float32")
    if model.recurrence is not None and model.recurrence.reads_config_dtype and dtype in geo.STATE_DTYPES:
        model = replace(model, state_dtype=dtype)
    context = fields.get("max_position_embeddings", "model_max_length", default=0)
    return replace(model, name=name, context=int(context))


def _period(period: int) -> Callable[[int, int], Part]:
    return lambda i, _count: Part.STATE if (i + 1) % period else Part.KV


def _read_qwen(fields: _Fields) -> Model:
    recurrence = geo.gated_delta(
        fields.size("linear_num_key_heads", default=16),
        fields.size("linear_num_value_heads", default=32),
        fields.size("linear_key_head_dim", default=128),
        fields.size("linear_value_head_dim", default=128),
        fields.size("linear_conv_kernel_dim", default=4),
    )
    kv_heads = fields.size("num_key_value_heads", default=fields.size("num_attention_heads"))
    attention = Grouped(kv_heads, fields.size("head_dim", default=256))
    layers = fields.kinds(_period(fields.size("full_attention_interval", default=4)))
    model = Model("", layers, recurrence, attention)
    if fields.get("indexer_head_dim"):
        index = Index(fields.size("indexer_head_dim"), fields.size("indexer_compress_ratio"), quantized=False)
        note = "bytes of index keys (bfloat16, one a block) are inferred"
        model = replace(model, index=index, notes=(note,))
    if fields.get("ple_layer_ids"):
        model = replace(model, notes=(*model.notes, "per-layer-embedding states are not counted"))
    return model


def _read_delta(fields: _Fields) -> Recurrence:
    """Gated DeltaNet whose sizes have no defaults that families share."""
    return geo.gated_delta(
        fields.size("linear_num_key_heads"),
        fields.size("linear_num_value_heads"),
        fields.size("linear_key_head_dim"),
        fields.size("linear_value_head_dim"),
        fields.size("linear_conv_kernel_dim", default=4),
    )


def _read_olmo(fields: _Fields) -> Model:
    return Model("", fields.kinds(_period(4)), _read_delta(fields), Grouped(*fields.heads()))


def _read_lara(fields: _Fields) -> Model:
    attention = Grouped(*fields.heads())
    return Model(
        "",
        fields.kinds(lambda i, _count: _LARA[i % 5], sliding_attention=Part.WINDOW),
        _read_delta(fields),
        attention,
        window=attention,
        window_size=fields.size("sliding_window"),
    )


def _read_latent(fields: _Fields) -> Latent:
    return Latent(fields.size("kv_lora_rank"), fields.size("qk_rope_head_dim", default=0))


def _read_kda(fields: _Fields) -> Model:
    linear = fields.get("linear_attn_config", default={})
    recurrence = geo.kda(
        linear.get("num_heads") or fields.size("linear_num_heads"),
        linear.get("head_dim") or fields.size("linear_head_dim"),
        linear.get("short_conv_kernel_size") or fields.size("linear_conv_kernel_dim", default=4),
    )
    full = linear.get("full_attn_layers")  # counted from 1
    if full is not None:
        layers = tuple(Part.KV if i + 1 in full else Part.STATE for i in range(fields.size("num_hidden_layers")))
    else:
        layers = fields.kinds(_period(4))
    model = Model("", layers, recurrence, _read_latent(fields))
    if fields.get("index_head_dim"):
        index = Index(fields.size("index_head_dim"), fields.size("index_kpool", default=16), gated=True)
        model = replace(model, index=index, defaults=GLM_FLASH, notes=(GLM_LAYOUT,))
    return model


def _read_mamba2(fields: _Fields) -> Model:
    width = fields.get("mamba_d_ssm") or fields.size("mamba_expand", "expand", default=2) * fields.size("hidden_size")
    heads = fields.size("mamba_n_heads", "mamba_num_heads")
    dim = fields.get("mamba_d_head", "mamba_head_dim", default="auto")
    recurrence = geo.mamba2(
        heads,
        width // heads if dim == "auto" else int(dim),
        fields.size("mamba_d_state", "ssm_state_size"),
        fields.size("mamba_n_groups", "n_groups", default=1),
        fields.size("mamba_d_conv", "conv_kernel", default=4),
    )
    chunk = fields.size("mamba_chunk_size", "chunk_size", default=GRID_256)
    return Model("", _mamba2_layers(fields), recurrence, Grouped(*fields.heads()), chunk=chunk)


def _mamba2_layers(fields: _Fields) -> tuple[Part, ...]:
    pattern = fields.get("hybrid_override_pattern")
    if pattern is not None:
        letters = {"M": Part.STATE, "*": Part.KV, "-": Part.NONE, "E": Part.NONE}
        unknown = sorted(set(pattern) - set(letters))
        if unknown:
            raise ModelConfigError(f"config field hybrid_override_pattern has {''.join(unknown)}; supported: M*-E")
        return tuple(letters[letter] for letter in pattern)
    if fields.get("model_type") == "falcon_h1":
        return (BOTH,) * fields.size("num_hidden_layers")
    chosen = fields.get("attn_layer_indices", default=())
    return fields.kinds(lambda i, _count: Part.KV if i in chosen else Part.STATE)


def _read_minimax(fields: _Fields) -> Model:
    kv_heads, width = fields.heads()
    flags = fields.get("attn_type_list")  # 1: full attention
    if flags is not None:
        layers = tuple(Part.KV if flag else Part.STATE for flag in flags)
    else:
        layers = fields.kinds(lambda i, _count: Part.STATE if i % 2 else Part.KV)
    return Model("", layers, geo.lightning(fields.size("num_attention_heads"), width), Grouped(kv_heads, width))


def _read_bailing(fields: _Fields) -> Model:
    heads = fields.size("linear_num_heads", "num_attention_heads")
    dim = fields.size("linear_head_dim", "head_dim", default=128)
    kernel = fields.get("short_conv_kernel_size", "linear_conv_kernel_dim")
    recurrence = geo.kda(heads, dim, kernel) if kernel else geo.lightning(heads, dim)
    layers = fields.kinds(_period(fields.size("layer_group_size")))
    return Model("", layers, recurrence, _read_latent(fields))


def _read_jamba(fields: _Fields) -> Model:
    period, offset = fields.size("attn_layer_period", default=8), fields.size("attn_layer_offset", default=4)
    layers = fields.kinds(lambda i, _count: Part.KV if i % period == offset else Part.STATE)
    inner = fields.size("mamba_expand", default=2) * fields.size("hidden_size")
    recurrence = geo.mamba1(inner, fields.size("mamba_d_state", default=16), fields.size("mamba_d_conv", default=4))
    return Model("", layers, recurrence, Grouped(*fields.heads()))


def _read_lfm(fields: _Fields) -> Model:
    full = fields.get("full_attn_idxs", default=())
    layers = fields.kinds(lambda i, _count: Part.KV if i in full else Part.STATE)
    recurrence = geo.short_conv(fields.size("hidden_size"), fields.size("conv_L_cache", default=3))
    return Model("", layers, recurrence, Grouped(*fields.heads()), chunk=1, defaults=NO_EXTRA_BUFFER)


def _read_inkling(fields: _Fields) -> Model:
    local = fields.get("local_layer_ids")
    if local is None:
        local = [i for i in range(fields.size("num_hidden_layers")) if (i + 1) % 6]
    layers = fields.kinds(lambda i, _count: Part.STATE | Part.WINDOW if i in local else BOTH)
    full = fields.heads()
    window = fields.size("swa_num_key_value_heads", default=full[0]), fields.size("swa_head_dim", default=full[1])
    kernel = fields.size("sconv_kernel_size", "conv_kernel_size", default=4)
    return Model(
        "",
        layers,
        geo.conv_streams(fields.size("hidden_size"), full, window, kernel),
        Grouped(*full),
        window=Grouped(*window),
        window_size=fields.size("sliding_window_size", "sliding_window", default=512),
        defaults=INKLING,
        notes=(STREAMS,),
    )


_READERS: dict[str, Callable[[_Fields], Model]] = {
    **dict.fromkeys(("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"), _read_qwen),
    **dict.fromkeys(("qwen4_exp", "qwen4_exp_text"), _read_qwen),
    **dict.fromkeys(("kimi_linear", "kimi_k3", "glm5_next", "glm5_next_text"), _read_kda),
    **dict.fromkeys(("nemotron_h", "falcon_h1", "bamba", "granitemoehybrid"), _read_mamba2),
    **dict.fromkeys(("minimax", "minimax_text_01", "minimax_m1"), _read_minimax),
    **dict.fromkeys(("lfm2", "lfm2_moe"), _read_lfm),
    **dict.fromkeys(("inkling_mm_model", "inkling_text", "inkling_model"), _read_inkling),
    "bailing_hybrid": _read_bailing,
    "olmo_hybrid": _read_olmo,
    "lara_mini": _read_lara,
    "jamba": _read_jamba,
}
