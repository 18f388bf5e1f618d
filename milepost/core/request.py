"""What a client asks for, and what it is told: plain frozen data.

Knows nothing of text, HTTP, or tensors. Token lists are packed int32 `bytes` (see `tokens`).
"""

from dataclasses import dataclass, field
from enum import StrEnum

from milepost.core.tokens import Packed


class Finish(StrEnum):
    """Why a request ended. The values are the public ones."""

    STOP = "stop"  # a stop id or a stop string
    LENGTH = "length"  # max_new reached, or no room for more
    ABORT = "abort"  # cancelled by its sender


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are chosen. `temperature` 0 is greedy; `top_k` 0 and `top_p` 1 leave all tokens in.

    `max_new` None means: as many as fit. `seed` None means: any (drawn by whoever makes the request).
    """

    max_new: int | None = None
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    stop_ids: frozenset[int] = frozenset()

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0 or self.top_k == 1


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt to continue.

    `namespace` keeps prefixes apart that must never be shared (LoRA name, cache salt); `keep` are positions
    in the prompt at which the sender asks for a checkpoint (the end of the last message, say); `session`
    is for reports only.
    """

    id: str
    prompt: Packed
    sampling: Sampling = field(default_factory=Sampling)
    namespace: str = ""
    keep: tuple[int, ...] = ()
    session: str = ""
    arrived: float = 0.0
