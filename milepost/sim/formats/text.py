"""Prompts given as text or token ids: identity without a tokenizer, and filler for formats that hold nothing else.

Text is cut every 256 characters from the start of each message; a cut of equal text is an equal segment. Four
characters are taken as a token: structure is right to 64 tokens, sizes are estimates. Token ids are cut every 64.
"""

import hashlib
import zlib
from collections.abc import Mapping, Sequence

import numpy as np

from milepost.core.tokens import Tokens
from milepost.sim.executor import scramble
from milepost.sim.formats.lines import Row, short
from milepost.sim.trace import Blocks, SegmentMaterial, Turn

CHARACTERS = 4
PIECE = 64
NOTE = f"prompts are text: {CHARACTERS} characters are taken as a token, so lengths are estimates"
DEFAULT_OUTPUT = 256
OUTPUT_NOTE = f"some rows have no output length: {DEFAULT_OUTPUT} tokens are taken"
WORDS = 26**3
FIRST_TOKEN = 1000
"""Filler ids are 1,000 … 18,575: in every vocabulary of today, and above the special ids of most."""

Pieces = tuple[tuple[str, int], ...]


def text_pieces(text: str, role: str = "") -> Pieces:
    step = CHARACTERS * PIECE
    cuts = [text[at : at + step] for at in range(0, len(text), step)]
    return tuple((_name(f"{role}\0{cut}".encode()), -(-len(cut) // CHARACTERS)) for cut in cuts)


def token_pieces(tokens: Sequence[int]) -> Pieces:
    cuts = [tokens[at : at + PIECE] for at in range(0, len(tokens), PIECE)]
    return tuple((_name(b"ids" + repr(cut).encode()), len(cut)) for cut in cuts)


def _name(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=9).hexdigest()


def message_pieces(row: Row, name: str, messages: object) -> Pieces:
    """Chat messages, in order; of their parts the texts."""
    if not isinstance(messages, list):
        raise row.error(f"{name} is {short(messages)}: a list of messages is needed")
    found: Pieces = ()
    for i, one in enumerate(messages):
        message = row.inside(name, i, one)
        content = message.record.get("content")
        if isinstance(content, list):
            content = "".join(str(part.get("text") or "") for part in content if isinstance(part, Mapping))
        elif content is not None and not isinstance(content, str):
            raise message.error(f"content is {short(content)}: text or parts are needed")
        extra = message.record.get("tool_calls")
        found += text_pieces((content or "") + (repr(extra) if extra else ""), str(message.record.get("role", "")))
    return found


def filler(turn: Turn, material: SegmentMaterial, following: int | None) -> Tokens:
    """int32 [prompt_len] in 0 … 26³−1, equal where prompts are equal: a function of the ids alone.

    `following`: the block that the partial tail begins, where that is known.
    """
    if not isinstance(turn.identity, Blocks):
        return material.prompt(turn) % np.int32(WORDS)
    identity = turn.identity
    base = np.uint64(zlib.crc32(str(identity.space).encode())) << np.uint64(32)
    heads = scramble(base + identity.ids().astype(np.uint64))
    begun = -(-(turn.prompt_len - heads.size * identity.block) // identity.block)
    own = zlib.crc32(f"{turn.session}/{turn.turn}/tail".encode())
    first = np.uint64(own) if following is None else base + np.uint64(following)
    heads = np.concatenate([heads, scramble(np.arange(begun, dtype=np.uint64) + first)])
    mixed = scramble(np.add.outer(heads, np.arange(identity.block, dtype=np.uint64)).ravel()[: turn.prompt_len])
    return ((mixed >> np.uint64(33)) % np.uint64(WORDS)).astype(np.int32)


def words(tokens: Tokens) -> str:
    """Four characters a token: three letters and a space."""
    letters = np.stack([tokens // 676, tokens // 26 % 26, tokens % 26, np.full(tokens.size, -65)], axis=1) + ord("a")
    return letters.astype(np.uint8).tobytes().decode("ascii")


def output_length(row: Row, names: Sequence[str], notes: list[str]) -> int:
    for name in names:
        if name in row:
            return row.count(name)
    if OUTPUT_NOTE not in notes:
        notes.append(OUTPUT_NOTE)
    return DEFAULT_OUTPUT
