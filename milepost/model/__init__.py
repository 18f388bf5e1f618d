"""The model: weights, layers and the arithmetic of one forward pass over a ragged batch.

It knows tokens, positions, slots and rows. It does not know requests, caches, schedules or text: what a batch
holds and where its memory lies was decided elsewhere.
"""

from milepost.model.batch import Batch, Span
from milepost.model.config import ModelConfig
from milepost.model.decoder import Decoder
from milepost.model.families import load_model_config
from milepost.model.loading import load_decoder, random_decoder
from milepost.model.memory import Memory

__all__ = [
    "Batch",
    "Decoder",
    "Memory",
    "ModelConfig",
    "Span",
    "load_decoder",
    "load_model_config",
    "random_decoder",
]
