"""What the loader has to know about a model family."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from milepost.model import parts
from milepost.model.config import LayerSpec, ModelConfig
from milepost.model.families.fields import Fields
from milepost.model.parts import Half, Maker
from milepost.model.stream import Join
from milepost.model.weights import Reader

Part = Callable[[Maker, Reader, int], Half]
"""Makes a mixer (the int is its index among those of its memory's kind) or an MLP (the int is the layer's)."""

# Tensors of parts that are not served: multi-token prediction and vision towers.
_IGNORED = ("mtp.", "model.mtp.", "visual.", "model.visual.", "vision_tower.")
_PREFIXES = {
    "model.language_model.": "model.",
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "backbone.": "model.",
}


@dataclass(frozen=True, slots=True)
class Names:
    """What a layer's parts are called, after `Family.renames`."""

    mixer_norm: str = "input_layernorm"
    mlp_norm: str = "post_attention_layernorm"
    linear: str = "linear_attn"
    attention: str = "self_attn"
    mlp: str = "mlp"
    post_norms: tuple[str, str] = ("post_attention_layernorm", "post_feedforward_layernorm")


def join(maker: Maker, read: Reader, names: Names, layer: LayerSpec, which: int) -> Join:
    """How the layer's first (0) or second (1) half joins a sum."""
    name = names.post_norms[which] if layer.post_norm else (names.mixer_norm, names.mlp_norm)[which]
    norm = maker.norm(read(f"{name}.weight", maker.config.hidden_size))
    norms = (None, norm) if layer.post_norm else (norm, None)
    return Join(*norms, layer.scales[which], layer.restarts[which])


@dataclass(frozen=True, slots=True)
class About:
    """What people are told of a family (`milepost models`); tests hold it against the family's configs.

    published: models of core/models.py whose bytes stand for it. needs: what no list of supported values says.
    """

    linear: str
    attention: str
    mlp: str
    published: tuple[str, ...]
    needs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Family:
    """renames: (dotted part of a file's name, what it is called here), applied in order.

    only: the values of a config field that are supported; the first is also what a missing field means.
    offset: what norm weights are stored without. ignored: endings of tensors that follow from the config.
    """

    about: About = field(kw_only=True)
    only: Mapping[str, tuple[Any, ...]] = field(kw_only=True, default_factory=dict)
    read: Callable[[Fields], ModelConfig]
    linear: Part
    attention: Part = parts.attention
    window: Part = parts.window
    dense: Part = parts.dense
    moe: Part = parts.moe
    join: Callable[[Maker, Reader, Names, LayerSpec, int], Any] = join
    names: Names = Names()
    renames: tuple[tuple[str, str], ...] = ()
    offset: float = 0.0
    ignored: tuple[str, ...] = ()

    def canonical(self, name: str, layers: int) -> str | None:
        """What a file's tensor is called here, or None if it belongs to a part that is not served."""
        if name.startswith(_IGNORED) or name.endswith(self.ignored):
            return None
        for prefix, replacement in _PREFIXES.items():
            if name.startswith(prefix):
                name = replacement + name.removeprefix(prefix)
                break
        name = f".{name}."
        for old, new in self.renames:
            name = name.replace(f".{old}.", f".{new}.")
        name = name.strip(".")
        beyond = name.startswith("model.layers.") and int(name.split(".")[2]) >= layers
        return None if beyond else name  # layers behind the last predict further tokens
