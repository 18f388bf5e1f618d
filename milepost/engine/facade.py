"""What the server sees of the engine, and nothing more: a seam of five methods.

The server never touches pools, plans or tensors; the engine never sees HTTP. `Engine` is implemented by
`engine.loop.EngineLoop`, and by a fake of a few lines in the server's tests.
"""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, Protocol

from milepost.core.request import Finish, Request


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one request, known at its end. `cached_tokens` of the prompt were reused."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Delta:
    """News of one request. Exactly one delta of each request carries `finish` and `usage`, its last.

    `text` is safe to send: it ends on a whole character and can't be the beginning of a stop string.
    """

    text: str
    tokens: tuple[int, ...] = ()
    finish: Finish | None = None
    usage: Usage | None = None


class Engine(Protocol):
    def validate(self, request: Request) -> None:
        """Raise a `RequestError` when the request can never be served, naming both numbers."""

    def stream(self, request: Request, stops: tuple[str, ...] = ()) -> AsyncIterator[Delta]:
        """Submit, then yield deltas until the last. Closing the iterator (`aclose`) early aborts the request.

        Generation ends before the first occurrence of one of `stops` (never sent). Raises `Unavailable`
        when the engine has died.
        """

    def info(self) -> dict[str, Any]:
        """The resolved settings and pool sizes, as JSON values (for /get_server_info)."""

    def gauges(self) -> dict[str, float]:
        """Name → value of everything countable, for metrics: pools, queue, counters (names in `core.stats`).

        Cheap; may be called from another thread. Names that end in `_total` only grow. Raises `Unavailable` when
        the engine has died.
        """

    async def flush(self) -> bool:
        """Empty the prefix cache when nothing runs; False (and nothing done) while something does."""
