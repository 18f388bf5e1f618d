"""The token mixers: one class per kind, each with its weights and one `forward`.

A mixer takes the normed stream [rows, hidden], the batch's Work and the Memory, and returns [rows, hidden]. It is
given the index of its own layer among those of its memory's kind when it is made.
"""

from dataclasses import dataclass

import torch

from milepost.model.memory import Memory
from milepost.model.mixers.attention import Attention
from milepost.model.mixers.gated_delta import GatedDelta
from milepost.model.mixers.indexer import AsBefore, Everything, Indexer
from milepost.model.mixers.latent import LatentAttention
from milepost.model.mixers.scan import Scan
from milepost.model.mixers.short_conv import ShortConv
from milepost.model.work import Work

__all__ = [
    "AsBefore",
    "Attention",
    "Everything",
    "GatedDelta",
    "Indexer",
    "LatentAttention",
    "Parallel",
    "Scan",
    "ShortConv",
]


@dataclass
class Parallel:
    """Two mixers on the same input; their outputs are added."""

    mixers: tuple

    def forward(self, x: torch.Tensor, work: Work, memory: Memory) -> torch.Tensor:
        first, second = (mixer.forward(x, work, memory) for mixer in self.mixers)
        return first + second
