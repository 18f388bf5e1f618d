"""The text side of a model folder: tokenizer, chat template, and turning tokens back into text as they come.

Knows the files beside the weights (`tokenizer.json`, `tokenizer_config.json`, `chat_template.jinja`,
`generation_config.json`, `config.json`) and nothing of requests, HTTP or tensors. Everything here may be
called from several threads at once: a `Text` never changes after `load` (its table of token bytes is a memo
that only gains entries), and a `TextStream` belongs to one request.
"""

import codecs
import datetime
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.sandbox
from tokenizers import Tokenizer

from milepost.core import tokens as packed_tokens
from milepost.core.tokens import Packed
from milepost.errors import InvalidRequest, ModelError

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"

# A character is at most four byte tokens long, so tokens that still end in a broken character after twice
# that many will not become a whole one.
HELD_TOKENS = 8

# Names that the chat template gets from the server; `extra` may not replace them.
TEMPLATE_NAMES = frozenset({"messages", "tools", "add_generation_prompt", "raise_exception", "strftime_now"})


@dataclass(frozen=True, slots=True)
class Defaults:
    """What the model's authors recommend for sampling; None where they say nothing."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None


@dataclass(frozen=True, slots=True)
class Text:
    """Tokenizer and chat template of one model. `vocab_size` counts the ids that the model can embed."""

    tokenizer: Tokenizer
    templates: Mapping[str, "_Template"]
    special: Mapping[str, str]
    stop_ids: frozenset[int]
    defaults: Defaults
    vocab_size: int
    silent: frozenset[int]
    table: "_ByteTable | None"

    @classmethod
    def load(cls, folder: Path) -> "Text":
        """Read the folder; `ModelError` in one line when something is missing or broken."""
        tokenizer = _tokenizer(folder)
        config = _read_json(folder / "config.json")
        settings = _read_json(folder / "tokenizer_config.json")
        generation = _read_json(folder / "generation_config.json")
        special = _special_strings(_read_json(folder / "special_tokens_map.json") | settings)
        silent = frozenset(i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special)
        nested = config.get("text_config") or {}
        eos = tokenizer.token_to_id(special.get("eos_token", ""))
        return cls(
            tokenizer=tokenizer,
            templates={name: _Template(name, source) for name, source in _templates(folder, settings)},
            special=special,
            stop_ids=_stop_ids([generation, config, nested], eos),
            defaults=_defaults(generation),
            vocab_size=config.get("vocab_size") or nested.get("vocab_size") or tokenizer.get_vocab_size(),
            silent=silent,
            table=_ByteTable(tokenizer, silent) if _is_byte_level(tokenizer) else None,
        )

    def encode(self, text: str, *, special: bool = False) -> Packed:
        """Tokenize. Special tokens written out in `text` are recognised.

        `special` adds those that the tokenizer puts around a text of its own accord (BOS, say); a rendered
        chat has them already. `InvalidRequest` for a text with lone surrogates.
        """
        try:
            # The batch call lets other threads run and skips character offsets: half the time of `encode`.
            [encoding] = self.tokenizer.encode_batch_fast([text], add_special_tokens=special)
        except TypeError as error:  # a lone surrogate is a Python string, but no text
            raise InvalidRequest("the text is not valid Unicode") from error
        return packed_tokens.pack(encoding.ids)

    def decode(self, tokens: Packed, *, special: bool = False) -> str:
        """The text of `tokens`, without special tokens unless `special`."""
        return self.tokenizer.decode(packed_tokens.unpack(tokens).tolist(), skip_special_tokens=not special)

    def takes_tools(self) -> bool:
        """Whether the chat template looks at `tools` at all."""
        return "tool_use" in self.templates or any("tools" in t.variables for t in self.templates.values())

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        extra: Mapping[str, Any] | None = None,
    ) -> str:
        """Write the conversation out as the model was trained to read it.

        `InvalidRequest`, naming the field, for a message that is not text or that the template refuses.
        """
        template = self._template(tools)
        extra = extra or {}
        if taken := TEMPLATE_NAMES & extra.keys():
            name = min(taken)
            raise InvalidRequest(f"chat_template_kwargs can't set {name}", f"chat_template_kwargs.{name}")
        variables = {
            **self.special,
            **extra,
            "messages": [_message(message, f"messages[{i}]") for i, message in enumerate(messages)],
            "tools": list(tools) if tools else None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return template.compiled.render(variables)
        except (jinja2.TemplateError, RecursionError) as error:
            raise InvalidRequest(f"the chat template refuses this: {error}", "messages") from error
        except Exception as error:
            # The template is the model author's program run on the client's values: a TypeError or KeyError
            # in it says that it doesn't fit these messages, not that Milepost is broken.
            reason = f"the chat template can't write these messages: {type(error).__name__}: {error}"
            raise InvalidRequest(reason, "messages") from error

    def _template(self, tools: Sequence[Mapping[str, Any]] | None) -> "_Template":
        if not self.templates:
            raise InvalidRequest("this model has no chat template; use /v1/completions", "messages")
        if tools and not self.takes_tools():
            raise InvalidRequest("the chat template of this model takes no tools", "tools")
        if tools and "tool_use" in self.templates:
            return self.templates["tool_use"]
        return self.templates.get("default") or next(iter(self.templates.values()))


class TextStream:
    """The text of one answer, token by token, cut before the stop string that is complete first.

    The concatenation of everything returned equals the decoding of all tokens at once, however the text is
    split into tokens. Nothing returned ever has to be taken back: a character is sent when it is whole, and
    what may be the beginning of a stop string waits until it is or isn't one.
    """

    def __init__(self, text: Text, stops: Sequence[str] = ()) -> None:
        self._decoder = _ByteDecoder(text.table) if text.table is not None else _WindowDecoder(text)
        self._watches = [_Watch(stop) for stop in stops]
        self._held = ""
        self.stopped = False

    def push(self, token: int) -> str:
        """Take one more token; return the text that has become safe to send."""
        return "" if self.stopped else self._release(self._decoder.push(token))

    def flush(self) -> str:
        """The rest, at the end of the answer. A character still broken becomes U+FFFD."""
        if self.stopped:
            return ""
        text = self._release(self._decoder.flush())
        if self.stopped:
            return text
        rest, self._held = self._held, ""
        return text + rest

    def _release(self, piece: str) -> str:
        if not self._watches or not piece:
            return piece
        text = self._held + piece
        for end, char in enumerate(piece, len(self._held) + 1):
            found = max((len(watch.stop) for watch in self._watches if watch.step(char)), default=0)
            if found:
                # Of stop strings that end on the same character, the longest began first.
                self.stopped = True
                self._held = ""
                return text[: end - found]
        keep = max(watch.matched for watch in self._watches)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


class _Watch:
    """Looks for one stop string, a character at a time (Knuth, Morris and Pratt's automaton).

    `matched` is the length of the longest beginning of `stop` that ends the text seen so far: exactly what
    has to be held back. `stop` must not be empty.
    """

    def __init__(self, stop: str) -> None:
        assert stop, "an empty stop string"
        self.stop = stop
        self.matched = 0
        self._shorter = [0] * len(stop)  # [i]: the longest proper border of the first i + 1 characters
        border = 0
        for i in range(1, len(stop)):
            while border and stop[i] != stop[border]:
                border = self._shorter[border - 1]
            border += stop[i] == stop[border]
            self._shorter[i] = border

    def step(self, char: str) -> bool:
        """Take one character; True when it completes the stop string. Not to be called after that."""
        while self.matched and char != self.stop[self.matched]:
            self.matched = self._shorter[self.matched - 1]
        self.matched += char == self.stop[self.matched]
        return self.matched == len(self.stop)


class _ByteTable(dict[int, bytes]):
    """Id → the bytes it stands for, of a byte-level tokenizer; filled as ids are met.

    Byte-level vocabularies write each byte as one printable character: printable Latin-1 as itself, the
    others, in order, from U+0100 on. A token that isn't written so (an added one with a space in it) is
    plain text.
    """

    def __init__(self, tokenizer: Tokenizer, silent: frozenset[int]) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        self._silent = silent
        printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
        others = [byte for byte in range(256) if byte not in printable]
        self._byte = {chr(byte): byte for byte in printable}
        self._byte |= {chr(0x100 + i): byte for i, byte in enumerate(others)}

    def __missing__(self, token: int) -> bytes:
        word = self._tokenizer.id_to_token(token)
        if word is None or token in self._silent:
            value = b""
        elif all(char in self._byte for char in word):
            value = bytes(self._byte[char] for char in word)
        else:
            value = word.encode()
        self[token] = value
        return value


class _ByteDecoder:
    """For byte-level tokenizers: tokens are bytes, and the bytes are UTF-8."""

    def __init__(self, table: _ByteTable) -> None:
        self._table = table
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        return self._utf8.decode(self._table[token])

    def flush(self) -> str:
        return self._utf8.decode(b"", True)


class _WindowDecoder:
    """For all other tokenizers: decode the new token behind its predecessor, and send what that adds.

    The predecessor is there because many decoders drop the space before the first token. Tokens that end in
    a broken character (single bytes of a SentencePiece vocabulary) are held until it is whole, `HELD_TOKENS`
    at most, so that the window stays small.
    """

    def __init__(self, text: Text) -> None:
        self._tokenizer = text.tokenizer
        self._silent = text.silent
        self._before: list[int] = []
        self._sent = ""  # what `_before` decodes to
        self._held: list[int] = []

    def push(self, token: int) -> str:
        if token in self._silent or self._tokenizer.id_to_token(token) is None:
            return ""
        self._held.append(token)
        piece = self._new()
        if piece.endswith(REPLACEMENT) and len(self._held) < HELD_TOKENS:
            return ""
        self._before, self._held = self._held, []
        self._sent = self._tokenizer.decode(self._before)
        return piece

    def flush(self) -> str:
        piece = self._new() if self._held else ""
        self._held = []
        return piece

    def _new(self) -> str:
        return self._tokenizer.decode(self._before + self._held)[len(self._sent) :]


class _Template:
    """One compiled chat template, and the names of the variables it looks at."""

    def __init__(self, name: str, source: str) -> None:
        try:
            self.compiled = _JINJA.from_string(source)
            self.variables = jinja2.meta.find_undeclared_variables(_JINJA.parse(source))
        except jinja2.TemplateSyntaxError as error:
            where = f"chat template {name!r}, line {error.lineno}"
            raise ModelError(f"{where}: {error}") from error


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %} … {% endgeneration %}` marks words for training; here it changes nothing."""

    tags = {"generation"}  # noqa: RUF012, the base class declares it so

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    """The Jinja dialect that chat templates are written in, as transformers documents it."""

    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        # Jinja's own filter writes < and > as escapes, which the model has never seen.
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def strftime_now(layout: str) -> str:
        return datetime.datetime.now().strftime(layout)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = tojson
    environment.globals |= {"raise_exception": raise_exception, "strftime_now": strftime_now}
    return environment


_JINJA = _environment()


def _message(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The message as templates expect it: string content, tool arguments as objects.

    Parts are joined without a separator, as templates that take parts join them. A missing content (an
    assistant that only called tools) is empty text, for many templates add strings without looking.
    """
    if not isinstance(message.get("role"), str):
        raise InvalidRequest(f"{where}.role must be a string", f"{where}.role")
    result = dict(message)
    result["content"] = _content(message.get("content"), f"{where}.content")
    if calls := message.get("tool_calls"):
        if not isinstance(calls, list):
            raise InvalidRequest(f"{where}.tool_calls must be a list", f"{where}.tool_calls")
        result["tool_calls"] = [_tool_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)]
    return result


def _content(content: Any, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequest(f"{where} must be a string or a list of parts", where)
    words = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        if kind != "text":
            field = f"{where}[{i}]"
            raise InvalidRequest(f"{field}: only parts of type text are served, not {kind}", field)
        if not isinstance(part.get("text"), str):
            raise InvalidRequest(f"{where}[{i}].text must be a string", f"{where}[{i}].text")
        words.append(part["text"])
    return "".join(words)


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    """Clients send a call's arguments as a string of JSON; templates write them out as an object."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        raise InvalidRequest(f"{where}.function must be an object", f"{where}.function")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError) as error:
            field = f"{where}.function.arguments"
            raise InvalidRequest(f"{field} must be a string of JSON: {error}", field) from error
    return {**call, "function": {**function, "arguments": arguments}}


def _tokenizer(folder: Path) -> Tokenizer:
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ModelError(f"{path} is missing; AutoTokenizer.from_pretrained(…).save_pretrained(…) writes one")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise ModelError(f"{path} is no tokenizer: {error}") from error
    # Some folders keep the truncation and padding of their training; a prompt must be neither cut nor filled.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _is_byte_level(tokenizer: Tokenizer) -> bool:
    if tokenizer.decoder is None:
        return False
    decoder = json.loads(tokenizer.decoder.__getstate__())
    parts = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    return [part["type"] for part in parts] == ["ByteLevel"]


def _read_json(path: Path) -> dict[str, Any]:
    """The object in the file; empty when there is no such file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{path} is no valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} must hold an object")
    return value


def _special_strings(settings: Mapping[str, Any]) -> dict[str, str]:
    """bos_token, eos_token and their like, each written either as a string or as a described token."""
    strings = {}
    for name, value in settings.items():
        if re.fullmatch(r"[a-z]+_token", name):
            content = value.get("content") if isinstance(value, dict) else value
            if isinstance(content, str):
                strings[name] = content
    return strings


def _templates(folder: Path, settings: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    """Name and source of each chat template. A file of its own wins over the tokenizer's settings."""
    alone = folder / "chat_template.jinja"
    if alone.is_file():
        found: Any = alone.read_text(encoding="utf-8")
    else:
        found = (_read_json(folder / "chat_template.json") or settings).get("chat_template")
    named: dict[str, str] = {}
    if isinstance(found, str):
        named["default"] = found
    elif isinstance(found, list):
        try:
            named |= {entry["name"]: entry["template"] for entry in found}
        except (TypeError, KeyError) as error:
            raise ModelError(f"{folder}: each chat template needs a name and a template") from error
    elif found is not None:
        raise ModelError(f"{folder}: chat_template must be a string or a list of named templates")
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        named[path.stem] = path.read_text(encoding="utf-8")
    return named.items()


def _stop_ids(configs: Iterable[Mapping[str, Any]], eos: int | None) -> frozenset[int]:
    ids = set() if eos is None else {eos}
    for config in configs:
        value = config.get("eos_token_id")
        ids.update(value if isinstance(value, list) else [] if value is None else [value])
    return frozenset(ids)


def _defaults(generation: Mapping[str, Any]) -> Defaults:
    def number(name: str, kind: Callable[[Any], Any]) -> Any:
        value = generation.get(name)
        return None if value is None else kind(value)

    # `do_sample: false` is greedy decoding whatever the other fields say; absent says nothing.
    greedy = generation.get("do_sample") is False
    return Defaults(
        temperature=0.0 if greedy else number("temperature", float),
        top_p=number("top_p", float),
        top_k=number("top_k", int),
        min_p=number("min_p", float),
    )
