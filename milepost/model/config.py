"""A model's shape as data: which mixer and which MLP each layer has, their sizes, and what a layer keeps of the past.

Specs say sizes in elements. A linear spec's `state` and an attention spec's `kv` are the only description of what a
slot and a row hold; Memory allocates from them. Reading `config.json` is the families' work (`families/`).
"""

from collections.abc import Mapping
from dataclasses import dataclass

LINEAR = "linear"
ATTENTION = "attention"
WINDOW = "window"  # attention to the last few tokens, whose KV lies in a pool of its own
BOTH = "both"  # attention and the linear mixer side by side on the same input
NONE = "none"
DENSE = "dense"
MOE = "moe"
GATED_DELTA = LINEAR  # the name from before there were other linear kinds

SILU = "silu"
SIGMOID = "sigmoid"
RELU2 = "relu2"

GATE_FIRST = "gate first"  # norm(o * gate)
NORM_FIRST = "norm first"  # norm(o) * gate
NO_NORM = "no norm"  # o * gate

UNLIMITED = 1 << 40  # tokens, more than any sequence has


@dataclass(frozen=True, slots=True)
class StateLayout:
    """What a linear layer keeps in a slot: its last `taps` inputs of `channels`, and a recurrent state."""

    taps: int
    channels: int
    temporal: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class KvLayout:
    """What an attention layer keeps in a row, as shapes."""

    keys: tuple[int, ...]
    values: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """The two halves of a layer, mixer and MLP, and how each joins the stream.

    x = norm(stream); stream = stream + scale * half(x). With a `restart` r the stream goes on from r * x instead of
    itself. With `post_norm` the norm is applied to the half's output instead of its input.
    """

    mixer: str
    mlp: str
    scales: tuple[float, float] = (1.0, 1.0)
    restarts: tuple[float | None, float | None] = (None, None)
    post_norm: bool = False

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of memory its mixers work on, those side by side in order."""
        return {BOTH: (LINEAR, ATTENTION), NONE: ()}.get(self.mixer, (self.mixer,))


@dataclass(frozen=True, slots=True)
class StreamsSpec:
    """Several streams, mixed by weights that each token makes; `rounds` of the Sinkhorn iteration, eps its floor."""

    count: int
    rounds: int
    eps: float


@dataclass(frozen=True, slots=True)
class LinearSpec:
    """Heads of a recurrent mixer with state [key dim, value dim] per value head, behind a short convolution.

    Each key head serves value_heads / key_heads consecutive value heads. kernel 1: no convolution.
    """

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

    @property
    def state(self) -> StateLayout:
        taps = self.kernel - 1
        return StateLayout(taps, self.channels if taps else 0, (self.value_heads, self.key_dim, self.value_dim))


@dataclass(frozen=True, slots=True)
class GatedDeltaSpec(LinearSpec):
    """The delta rule with gates: Gated DeltaNet and, with a decay for each key channel, Kimi's KDA.

    bound: the log decay is bound * sigmoid(rate * x) instead of -rate * softplus(x). gate: of the output.
    normalized: q and k are of unit length.
    """

    normalized = True
    norm = NORM_FIRST

    channel_gates: bool = False
    bound: float | None = None
    beta_scale: float = 1.0
    gate: str = SILU

    @property
    def norm_groups(self) -> int:
        """Parts of the output that are normed each alone: its heads."""
        return self.value_heads

    @property
    def gates(self) -> int:
        """Width of the decay's projection."""
        return self.value_heads * (self.key_dim if self.channel_gates else 1)


@dataclass(frozen=True, slots=True)
class ScanSpec(LinearSpec):
    """A decaying sum of k v^T: Mamba-2 (`timed`: a step size for each token and head), Lightning (fixed decays).

    norm: over `norm_groups` equal parts of the output. scales: of the projections to v, k, q, z and the step, and of
    the output.
    """

    normalized = False

    timed: bool = True
    step_floor: float = 0.0
    norm: str = GATE_FIRST
    norm_groups: int = 1
    gate: str = SILU
    scales: tuple[float, ...] = (1.0,) * 6


@dataclass(frozen=True, slots=True)
class ShortConvSpec:
    """A convolution of `width` channels between two gates; its windows are all its state."""

    width: int
    kernel: int

    @property
    def state(self) -> StateLayout:
        return StateLayout(self.kernel - 1, self.width, (0,))


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Grouped-query attention; rotary on the first `rotary_dim` of each head (0: no positions).

    gated: a sigmoid output gate. normed: RMSNorm of each q and k head; wide_norms: of all heads together.
    scales: of the projections to q, k, v and of the output. reach: tokens that one sees, itself included.
    """

    heads: int
    kv_heads: int
    head_dim: int
    rotary_dim: int
    rope_theta: float
    gated: bool = True
    normed: bool = True
    wide_norms: bool = False
    scales: tuple[float, float, float, float] = (1.0, 1.0, 1.0, 1.0)
    reach: int = UNLIMITED

    @property
    def kv(self) -> KvLayout:
        shape = self.kv_heads, self.head_dim
        return KvLayout(shape, shape)


@dataclass(frozen=True, slots=True)
class IndexSpec:
    """An indexer: a query sees the `kept` groups that score best, and what no group is whole of yet.

    Groups are of `group` tokens, counted from position 0; each has one key of `dim` for all `heads`. shared: attention
    layers (by index among them) without an indexer, which see what the layer before them does.
    """

    heads: int
    dim: int
    group: int
    kept: int
    shared: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class LatentSpec:
    """Multi-head latent attention: a row is one latent of `rank` and a key of `rope` that all heads share.

    q_rank: of the low-rank projection to q (0: none). rotary_dim is `rope` or 0 (no positions). gated: a sigmoid gate
    for each head. eps: of the norms inside. With an `index` a row holds an index key and its gate, too.
    """

    reach = UNLIMITED

    heads: int
    rank: int
    rope: int
    nope: int
    value_dim: int
    q_rank: int
    rotary_dim: int
    rope_theta: float
    gated: bool
    eps: float = 1e-6
    index: IndexSpec | None = None

    @property
    def key_dim(self) -> int:
        return self.nope + self.rope

    @property
    def kv(self) -> KvLayout:
        return KvLayout((self.rank + self.rope,), (2 * self.index.dim if self.index else 0,))


@dataclass(frozen=True, slots=True)
class MoeSpec:
    """Routed experts, and a shared one (shared_width 0: none) with or without a sigmoid gate.

    scoring: softmax or sigmoid of the router's logits; biased: a bias added for the choice only; groups_kept of
    `groups` of experts may be chosen from. latent: the experts work on a projection of that width (0: on the stream).
    """

    experts: int
    per_token: int
    width: int
    shared_width: int
    normalize: bool
    shared_gate: bool = False
    scoring: str = "softmax"
    biased: bool = False
    groups: int = 1
    groups_kept: int = 1
    scale: float = 1.0
    epsilon: float = 0.0
    latent: int = 0
    wide_router: bool = False  # the router computes in float32


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Everything the decoder needs to know about a model. Sizes in elements."""

    model_type: str
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    linear: GatedDeltaSpec | ScanSpec | ShortConvSpec | None
    attention: AttentionSpec | LatentSpec | None
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
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    mlp_scales: tuple[float, float] = (1.0, 1.0)  # of the gate and of the output
    activation: str = SILU
    mlp_limit: float | None = None  # the gate is cut off above it, the other half on both sides
    streams: StreamsSpec | None = None  # None: one, a sum
    window: AttentionSpec | None = None  # of the layers whose KV is a sliding window
    weight_block: tuple[int, int] | None = None  # rows and columns that share a scale, where weights are float8

    def layers_with(self, kind: str) -> tuple[int, ...]:
        """Indexes of the layers that work on a kind of memory."""
        return tuple(i for i, layer in enumerate(self.layers) if kind in layer.kinds)

    @property
    def linear_layers(self) -> tuple[int, ...]:
        """Indexes of the layers that have a recurrent state or windows of a convolution."""
        return self.layers_with(LINEAR)

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """Indexes of the layers that have the KV of all tokens."""
        return self.layers_with(ATTENTION)

    @property
    def window_layers(self) -> tuple[int, ...]:
        """Indexes of the layers that have the KV of a sliding window."""
        return self.layers_with(WINDOW)

    @property
    def attentions(self) -> Mapping[str, AttentionSpec | LatentSpec]:
        """Those of full attention and sliding windows that the model has, by kind."""
        specs = {ATTENTION: self.attention, WINDOW: self.window}
        return {kind: spec for kind, spec in specs.items() if spec is not None}

    @property
    def state(self) -> StateLayout:
        """What each linear layer keeps in a slot."""
        return self.linear.state if self.linear is not None else StateLayout(0, 0, (0,))

    def kv(self, kind: str) -> KvLayout:
        """What each attention layer of a kind keeps in a row of its pool."""
        return self.attentions[kind].kv if kind in self.attentions else KvLayout((0,), (0,))
