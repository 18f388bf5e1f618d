"""Typed access to the fields of a `config.json`.

Every complaint names field, value and what is supported. A field that nobody asked for is refused too, unless it says
nothing (null, false, 0, empty) or is known not to matter for the forward pass.
"""

from collections.abc import Mapping
from typing import Any

from milepost.errors import ModelConfigError

# What is done with a model and not what it computes; kernel sizes of other implementations and how weights were drawn
# before training; multi-token prediction, which is not served.
_HARMLESS = frozenset(
    """
    _name_or_path add_cross_attention architectures attention_dropout auto_map chunk_size_feed_forward
    embd_pdrop ep_size hidden_dropout id2label initializer_range is_decoder is_encoder_decoder label2id
    language_model_only moe_router_dtype num_logits_to_keep output_attentions
    output_hidden_states output_router_logits pretraining_tp problem_type rescale_prenorm_residual resid_pdrop
    return_dict router_aux_loss_coef router_jitter_noise router_z_loss_coef seq_length tokenizer_class
    transformers_version use_cache use_mamba_kernels z_loss_coefficient
    block_size chunk_size mamba_chunk_size linear_a_log_max linear_a_log_min linear_dt_init_floor linear_dt_max
    linear_dt_min time_step_floor time_step_max mamba_dt_rank time_step_rank
    mtp_hybrid_override_pattern mtp_layers_block_type mtp_loss_scaling_factor mtp_num_hidden_layers
    mtp_use_dedicated_embeddings num_mtp_layers num_nextn_predict_layers moe_shared_expert_overlap
    """.split()  # noqa: SIM905 - a list literal of these takes fifty lines
)


class Fields:
    """A config's fields, and which of them were asked for."""

    def __init__(self, raw: Mapping[str, Any], inside: str = "") -> None:
        self.raw = raw
        self._inside = inside
        self._asked: set[str] = set()

    def refuse(self, name: str, supported: str) -> ModelConfigError:
        value = self.raw.get(name, "(missing)")
        return ModelConfigError(f"config field {self._inside}{name} is {value!r}; supported: {supported}")

    def get(self, name: str, default: Any = None) -> Any:
        self._asked.add(name)
        value = self.raw.get(name)
        return default if value is None else value

    def first(self, *names: str) -> str:
        """The first of several names of one field that is set (or the first at all)."""
        self._asked.update(names)
        return next((name for name in names if self.raw.get(name) is not None), names[0])

    def size(self, name: str, default: int | None = None, least: int = 1) -> int:
        value = self.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self.refuse(name, f"a whole number of at least {least}")
        return value

    def number(self, name: str, default: float) -> float:
        value = self.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise self.refuse(name, "a number above 0")
        return float(value)

    def only(self, name: str, *values: Any) -> None:
        """Refuse any value but `values`; the first is also what a missing field means."""
        if self.get(name, values[0]) not in values:
            raise self.refuse(name, " or ".join(map(repr, values)))

    def flag(self, name: str, default: bool) -> bool:
        value = self.get(name, default)
        if not isinstance(value, bool):
            raise self.refuse(name, "true or false")
        return value

    def ignore(self, *names: str) -> None:
        """Fields that say nothing new, or nothing about the forward pass."""
        self._asked.update(names)

    def inner(self, name: str) -> "Fields":
        """The fields of an object inside."""
        value = self.get(name, {})
        if not isinstance(value, dict):
            raise self.refuse(name, "an object")
        return Fields(value, f"{name}.")

    def check_all_asked(self) -> None:
        for name, value in self.raw.items():
            if name not in self._asked and name not in _HARMLESS and value:
                raise self.refuse(name, "nothing; the field is not known for this model_type")
