"""Bytes of one state slot and of one KV row, for a model on a parallel layout.

Knows shapes, dtypes and how tensor, pipeline and data parallelism cut them. Knows nothing of budgets (sizing.py),
of particular models or of files (models.py). All results are bytes on one rank; formulas: docs/sizing.md, "Bytes".

    slot   recurrent states (`temporal`) and convolution windows (`conv`) of all linear layers of the rank
    row    KV of one token in all full-attention layers of the rank, index keys included
"""

from dataclasses import dataclass, field, replace
from enum import IntFlag

from milepost.errors import ConfigError

STATE_DTYPES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of an element of a state or of a convolution window."""

KV_DTYPES = {
    "float32": "torch.float32",
    "float16": "torch.float16",
    "bfloat16": "torch.bfloat16",
    "fp8_e4m3": "torch.float8_e4m3fn",
    "fp8_e5m2": "torch.float8_e5m2",
    "mxfp8": "torch.float8_e4m3fn",
    "fp4_e2m1": "torch.float4_e2m1fn_x2",
}
"""KV dtypes and the names that a boot log gives them."""

KV_ALIASES = {"bf16": "bfloat16", "fp16": "float16", "fp8": "fp8_e4m3", "fp4": "fp4_e2m1", "auto": "bfloat16"}


class Part(IntFlag):
    """What one layer keeps of the past. A layer may keep several, or nothing."""

    NONE = 0
    STATE = 1
    KV = 2
    WINDOW = 4  # KV of the last tokens only


@dataclass(frozen=True, slots=True)
class Recurrence:
    """What one linear layer keeps, in elements of the whole model.

    The temporal state is `heads` times `head_size`, split by head. The windows are `taps` (kernel − 1) columns of
    channels: `channels` are split; `groups` of `group_width` are first padded up to the number of ranks;
    `kv_streams` (heads, width) split as KV heads do, never below one head; `whole` ones are kept by every rank.
    `dense_windows`: the windows of successive draft steps overlap in storage.
    """

    family: str
    heads: int = 0
    head_size: int = 0
    channels: int = 0
    groups: int = 0
    group_width: int = 0
    taps: int = 0
    kv_streams: tuple[tuple[int, int], ...] = ()
    whole: int = 0
    dense_windows: bool = True
    reads_config_dtype: bool = True

    def temporal(self, ranks: int) -> int:
        """Elements of the temporal state of one layer on one of `ranks`."""
        return _share(self.heads, ranks, "linear-attention heads") * self.head_size

    def column(self, ranks: int) -> int:
        """Channels of the windows of one layer on one of `ranks`."""
        padded = -(-self.groups // ranks) * ranks * self.group_width
        split = _share(self.channels + padded, ranks, "convolution channels")
        return split + sum(max(1, heads // ranks) * width for heads, width in self.kv_streams) + self.whole


def gated_delta(
    key_heads: int, value_heads: int, key_dim: int = 128, value_dim: int = 128, kernel: int = 4
) -> Recurrence:
    """Gated DeltaNet: windows of q, k (one group a key head) and v."""
    return Recurrence(
        "GDN", value_heads, key_dim * value_dim, value_heads * value_dim, key_heads, 2 * key_dim, kernel - 1
    )


def kda(heads: int, dim: int = 128, kernel: int = 4) -> Recurrence:
    """Kimi delta attention: q, k, v of equal width; the state dtype of the model's config is not read."""
    return Recurrence(
        "KDA", heads, dim * dim, 3 * heads * dim, taps=kernel - 1, dense_windows=False, reads_config_dtype=False
    )


def mamba2(heads: int, dim: int, state: int, groups: int, kernel: int = 4) -> Recurrence:
    return Recurrence("Mamba-2", heads, dim * state, heads * dim, groups, 2 * state, kernel - 1)


def mamba1(inner: int, state: int, kernel: int = 4) -> Recurrence:
    return Recurrence("Mamba-1", inner, state, inner, taps=kernel - 1)


def lightning(heads: int, dim: int) -> Recurrence:
    """Lightning attention: no convolution; the state dtype of the model's config is not read."""
    return Recurrence("Lightning", heads, dim * dim, reads_config_dtype=False)


def short_conv(hidden: int, window: int) -> Recurrence:
    """Short convolutions alone, as in LFM2: windows of `window` − 1 columns, no temporal state."""
    return Recurrence("short conv", channels=hidden, taps=window - 1)


def conv_streams(hidden: int, full: tuple[int, int], window: tuple[int, int], kernel: int = 4) -> Recurrence:
    """Six convolutions a layer, as in Inkling: k and v of both attention kinds, and two over the hidden size."""
    streams = (full, full, window, window)
    return Recurrence("conv streams", taps=kernel - 1, kv_streams=streams, whole=2 * hidden, dense_windows=False)


@dataclass(frozen=True, slots=True)
class Grouped:
    """Grouped-query attention. KV heads are split over ranks and replicate where there are fewer than ranks."""

    kv_heads: int
    head_dim: int
    value_dim: int = 0  # 0: as head_dim

    def key_elements(self, ranks: int) -> int:
        return max(1, self.kv_heads // ranks) * self.head_dim

    def value_elements(self, ranks: int) -> int:
        return max(1, self.kv_heads // ranks) * (self.value_dim or self.head_dim)


@dataclass(frozen=True, slots=True)
class Latent:
    """Multi-head latent attention: one latent of `rank` and `rope` elements a token, the same on every rank."""

    rank: int
    rope: int


@dataclass(frozen=True, slots=True)
class Index:
    """Keys of a sparse indexer, one for `pool` tokens, the same on every rank.

    `quantized`: fp8 with a 4-byte scale for each 128 elements, whatever the dtype of the KV; else bfloat16.
    `gated`: a key of `pool` tokens is a mean, weighted by gates as wide as the keys of single tokens.
    """

    dim: int
    pool: int
    quantized: bool = True
    gated: bool = False

    @property
    def unpooled(self) -> int:
        """Elements of one token before it is pooled with others."""
        return self.dim * (1 + self.gated)

    def row_bytes(self, pool: int | None = None) -> int:
        key = self.dim + self.dim // 128 * 4 if self.quantized else 2 * self.dim
        return -(-key // (pool or self.pool))


@dataclass(frozen=True, slots=True)
class Defaults:
    """What a model sets unless the user does. None: nothing of its own."""

    ratio: float | None = None
    strategy: str | None = None
    window_ratio: float | None = None
    extra_buffer: bool = True  # the architecture supports SGLang's extra_buffer strategies


@dataclass(frozen=True, slots=True)
class Model:
    """The parts of a model that decide about memory. `notes` mark what is unverified, for the user to see.

    `context` in tokens, 0 if unknown; `params` in all, 0 if unknown; `chunk` is the model's checkpoint grid.
    `ordered` is False where only the number of layers of each kind is known.
    """

    name: str
    layers: tuple[Part, ...]
    recurrence: Recurrence | None
    attention: Grouped | Latent | None
    index: Index | None = None
    window: Grouped | None = None
    window_size: int = 0
    chunk: int = 64
    context: int = 0
    state_dtype: str = "float32"
    params: float = 0
    ordered: bool = True
    defaults: Defaults = field(default_factory=Defaults)
    notes: tuple[str, ...] = ()

    def count(self, part: Part) -> int:
        return sum(1 for layer in self.layers if part in layer)

    @property
    def hybrid(self) -> bool:
        """It has recurrent states at all."""
        return self.count(Part.STATE) > 0


@dataclass(frozen=True, slots=True)
class Layout:
    """How a model is spread: tensor, pipeline, attention data and decode context parallelism."""

    tp: int = 1
    pp: int = 1
    attn_dp: int = 1
    dcp: int = 1

    def check(self, model: Model) -> None:
        """Refuse what can't be laid out, with a value that can."""
        for flag, value in (
            ("--tp", self.tp),
            ("--pp", self.pp),
            ("--dp-size", self.attn_dp),
            ("--dcp-size", self.dcp),
        ):
            if value < 1:
                raise ConfigError(flag, value, "must be at least 1", 1)
        if self.tp % self.attn_dp:
            works = _divisor(self.tp, self.attn_dp)
            raise ConfigError("--dp-size", self.attn_dp, f"must divide --tp {self.tp}, with DP attention", works)
        if self.ranks % self.dcp:
            works = _divisor(self.ranks, self.dcp)
            raise ConfigError("--dcp-size", self.dcp, f"must divide the {self.ranks} attention ranks", works)
        if self.pp > len(model.layers):
            raise ConfigError("--pp", self.pp, f"must be at most the {len(model.layers)} layers", len(model.layers))

    @property
    def ranks(self) -> int:
        """Ranks that share one attention layer."""
        return self.tp // self.attn_dp

    def stages(self, model: Model) -> list[tuple[Part, ...]]:
        """The layers of each pipeline stage; what does not divide goes to the last stages, one layer each."""
        base, extra = divmod(len(model.layers), self.pp)
        stages, start = [], 0
        for stage in range(self.pp):
            stop = start + base + (stage >= self.pp - extra)
            stages.append(model.layers[start:stop])
            start = stop
        return stages


@dataclass(frozen=True, slots=True)
class Formats:
    """Dtypes, and the KV layout of an attention back end where it has a choice.

    `scaled`: an fp8 latent with a 4-byte scale for each 128 elements and a 2-byte rope part.
    `index_pool`: tokens that share an index key; None: the model's. `own_index`: as Milepost's own engine keeps it,
    for each token what is pooled, in the dtype of the KV.
    """

    state: str = "float32"
    conv: str = "bfloat16"
    kv: str = "bfloat16"
    scaled: bool = False
    index_pool: int | None = None
    own_index: bool = False


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes on one rank: those of the pipeline stage that needs most, so that all ranks get equal pools.

    `column` is one column of convolution windows, `taps` their number. `key_share` is the part of `row` that holds
    keys; 0 where keys and values are one latent. `layer_row` is the row of one full-attention layer.
    """

    temporal: int
    column: int
    taps: int
    row: int
    layer_row: int = 0
    key_share: float = 0.0
    window_row: int = 0
    window_size: int = 0
    dense_windows: bool = True
    kv_dtype: str = "bfloat16"

    @property
    def conv(self) -> int:
        return self.column * self.taps

    @property
    def slot(self) -> int:
        return self.temporal + self.conv

    @property
    def exchange(self) -> float:
        """KV tokens that cost as much as one slot; 0 where a token costs nothing."""
        return self.slot / self.row if self.row else 0.0

    def draft_windows(self, steps: int) -> int:
        """Bytes of the windows that one request keeps for `steps` draft steps, as allocated."""
        columns = steps + self.taps - 1 if self.dense_windows else steps * self.taps
        return self.column * columns if self.taps else 0


def measure(model: Model, layout: Layout, formats: Formats) -> Footprint:
    """The footprint of a model. Raises `ConfigError` where it can't be cut that way."""
    layout.check(model)
    stages = layout.stages(model)
    states = max(sum(Part.STATE in layer for layer in stage) for stage in stages)
    attention = max(sum(Part.KV in layer for layer in stage) for stage in stages)
    windows = max(sum(Part.WINDOW in layer for layer in stage) for stage in stages)
    layer_row, key_share = layer_row_bytes(model, layout, formats)
    temporal = column = taps = 0
    dense = True
    if model.recurrence is not None:
        state_size, conv_size = STATE_DTYPES[formats.state], STATE_DTYPES[formats.conv]
        temporal = states * model.recurrence.temporal(layout.ranks) * state_size
        column = states * model.recurrence.column(layout.ranks) * conv_size
        taps, dense = model.recurrence.taps, model.recurrence.dense_windows
    window_row = 0
    if model.window is not None:
        window_row = windows * _grouped_bytes(model.window, layout.ranks, formats.kv)
    return Footprint(
        temporal,
        column,
        taps,
        attention * layer_row,
        layer_row,
        key_share,
        window_row,
        model.window_size,
        dense,
        formats.kv,
    )


def layer_row_bytes(model: Model, layout: Layout, formats: Formats) -> tuple[int, float]:
    """Bytes of a token's KV in one full-attention layer, and the share of keys (0: one latent)."""
    attention, extra = model.attention, index_bytes(model, formats)
    if attention is None:
        return extra, 0.0
    if isinstance(attention, Latent):
        if formats.scaled:
            return attention.rank + attention.rank // 128 * 4 + 2 * attention.rope + extra, 0.0
        return kv_bytes(attention.rank + attention.rope, formats.kv) + extra, 0.0
    keys, values = attention.key_elements(layout.ranks), attention.value_elements(layout.ranks)
    return _grouped_bytes(attention, layout.ranks, formats.kv) + extra, keys / (keys + values)


def index_bytes(model: Model, formats: Formats) -> int:
    """Bytes of a token's index key in one full-attention layer; 0 without an index."""
    if model.index is None:
        return 0
    return (
        kv_bytes(model.index.unpooled, formats.kv) if formats.own_index else model.index.row_bytes(formats.index_pool)
    )


def kv_bytes(elements: int, dtype: str) -> int:
    """Bytes of `elements` of KV; block formats with their scales (fp4: a byte for 16, mxfp8: for 32)."""
    if dtype == "fp4_e2m1":
        return elements // 2 + elements // 16
    if dtype == "mxfp8":
        return elements + elements // 32
    sizes = {"float32": 4, "float16": 2, "bfloat16": 2, "fp8_e4m3": 1, "fp8_e5m2": 1}
    return elements * sizes[dtype]


def kv_dtype(name: str) -> str:
    """The full name of a KV dtype. Raises `ConfigError`."""
    full = KV_ALIASES.get(name, name)
    if full not in KV_DTYPES:
        allowed = f"must be one of {', '.join([*KV_ALIASES, *KV_DTYPES])}"
        raise ConfigError("--kv-cache-dtype", name, allowed, "fp8_e4m3")
    return full


def with_bytes(footprint: Footprint, slot: int | None, row: int | None) -> Footprint:
    """The footprint with bytes known from elsewhere, such as a boot log; a slot's go to the temporal part."""
    if slot is not None:
        footprint = replace(footprint, temporal=max(0, slot - footprint.conv))
        if footprint.slot != slot:
            footprint = replace(footprint, temporal=slot, column=0)
    return footprint if row is None else replace(footprint, row=row)


def _grouped_bytes(attention: Grouped, ranks: int, dtype: str) -> int:
    return kv_bytes(attention.key_elements(ranks), dtype) + kv_bytes(attention.value_elements(ranks), dtype)


def _share(total: int, ranks: int, what: str) -> int:
    if total % ranks:
        raise ConfigError("--tp", ranks, f"must divide the {total} {what}", _divisor(total, ranks))
    return total // ranks


def _divisor(total: int, most: int) -> int:
    """The largest divisor of `total` that is at most `most`."""
    return next(value for value in range(min(total, most), 0, -1) if total % value == 0)
