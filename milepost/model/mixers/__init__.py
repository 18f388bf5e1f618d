"""The token mixers: one class per kind, each with its weights and one `forward`.

A mixer takes the normed stream [rows, hidden], the batch's Work and the Memory, and returns [rows, hidden]. It is
given the index of its own layer among those of its memory's kind when it is made.
"""

from milepost.model.mixers.attention import Attention
from milepost.model.mixers.gated_delta import GatedDelta

__all__ = ["Attention", "GatedDelta"]
