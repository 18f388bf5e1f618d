"""What clients may ask for: the bodies of the two generation routes, and their way to `core.request.Request`.

Validation is strict where a field would change the answer and can't be honoured (it is refused by name), and
blind to all other unknown fields, for OpenAI clients send many. Nothing here knows sockets or streaming.
"""

import random
import time
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from milepost.core.request import Request, Sampling
from milepost.core.tokens import Packed, common, length, pack, unpack
from milepost.engine.text import Text
from milepost.errors import InvalidRequest, PromptTooLong, UnknownModel
from milepost.server.errors import from_msgspec

STOPS = 16
STOP_LENGTH = 1024
SEED_BITS = 63  # what NumPy, torch and JSON all take as a non-negative int64
COMPLETION_TOKENS = 16  # OpenAI's default for /v1/completions; chats default to as many as fit

_chance = random.SystemRandom()


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """What the server needs to know beyond the engine and the text side.

    `context_length` is in tokens, `body_limit` in bytes; `choices_limit` bounds prompts times n.
    `keep_message_end`: ask for a checkpoint at the end of a chat's last message, before the header of the answer,
    for templates that rewrite what follows it (thinking that is dropped from the history, say).
    """

    model_name: str
    context_length: int
    aliases: tuple[str, ...] = ()
    cache_report: bool = True
    metrics: bool = True
    keep_message_end: bool = False
    body_limit: int = 64 * 1024 * 1024
    choices_limit: int = 128


Count = Annotated[int, Meta(ge=1)]
TokenId = Annotated[int, Meta(ge=0, lt=2**31)]
Share = Annotated[float, Meta(gt=0, le=1)]
Stop = Annotated[str, Meta(min_length=1, max_length=STOP_LENGTH)]


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = False


class Body(msgspec.Struct, kw_only=True):
    """Fields that both routes share."""

    model: str | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    n: Count | None = 1
    max_tokens: Count | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Share | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    seed: int | None = None
    stop: Stop | Annotated[list[Stop], Meta(max_length=STOPS)] | None = None
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool | None = False
    cache_salt: str | None = None
    extra_key: str | None = None
    lora: str | None = None
    user: str | None = None
    session_id: str | None = None


class ChatBody(Body, kw_only=True):
    messages: Annotated[list[dict[str, Any]], Meta(min_length=1)]
    max_completion_tokens: Count | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    add_generation_prompt: bool | None = True
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None


class CompletionBody(Body, kw_only=True):
    prompt: str | list[str | TokenId | list[TokenId]]
    max_tokens: Count | None = COMPLETION_TOKENS
    echo: bool | None = False


# Fields that would change the answer and that nothing here can honour. Absent, null, false and empty values
# are harmless anywhere; the values listed mean "off" for that field.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "logprobs": (),
    "top_logprobs": (0,),
    "prompt_logprobs": (),
    "logit_bias": (),
    "response_format": ({"type": "text"},),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "use_beam_search": (),
    "suffix": (),
    "functions": (),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "documents": (),
    "chat_template": (),
    "continue_final_message": (),
    "min_tokens": (0,),
    "bad_words": (),
    "allowed_token_ids": (),
    "logits_processors": (),
    "truncate_prompt_tokens": (),
    "prompt_embeds": (),
    "input_embeds": (),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "json_schema": (),
    "regex": (),
    "ebnf": (),
    "stop_regex": (),
    "lora_path": (),
    "include_stop_str_in_output": (),
    "no_stop_trim": (),
}
# These two are on unless switched off.
MUST_STAY_ON = ("skip_special_tokens", "spaces_between_special_tokens")


@dataclass(frozen=True, slots=True)
class Job:
    """One validated HTTP request: `choices` engine requests for each of its prompts, prompt by prompt."""

    id: str
    created: int
    chat: bool
    requests: tuple[Request, ...]
    choices: int
    stops: tuple[str, ...]
    stream: bool
    include_usage: bool
    echoes: tuple[str, ...]  # per engine request: text to repeat before the answer


def parse(raw: bytes, kind: type[Body]) -> Body:
    """The body as `kind`, or `InvalidRequest` that names the field."""
    try:
        fields = msgspec.json.decode(raw)
        if isinstance(fields, dict):
            refuse_unsupported(fields)
        return msgspec.convert(fields, kind)
    except msgspec.MsgspecError as error:
        raise from_msgspec(error) from error
    except RecursionError as error:
        raise InvalidRequest("the body is nested too deeply") from error


def refuse_unsupported(fields: dict[str, Any]) -> None:
    for name in UNSUPPORTED.keys() & fields.keys():
        value = fields[name]
        empty = value is None or value is False or value in ("", [], {})
        off = not isinstance(value, bool) and value in UNSUPPORTED[name]
        if not empty and not off:
            raise InvalidRequest(f"{name} is not supported by this server", name)
    for name in MUST_STAY_ON:
        if fields.get(name) is False:
            raise InvalidRequest(f"{name} can't be switched off", name)
    best_of, n = fields.get("best_of"), fields.get("n") or 1
    if best_of is not None and best_of != n:
        raise InvalidRequest(f"best_of {best_of} is not supported unless it equals n ({n})", "best_of")


def check_model(name: str | None, settings: ServerSettings) -> None:
    if name not in (None, settings.model_name, *settings.aliases):
        raise UnknownModel(f"the model {name} is not served here; {settings.model_name} is", "model")


def chat_job(body: ChatBody, text: Text, settings: ServerSettings) -> Job:
    """Render, tokenize and check a chat. Takes a while for a long one: call it off the event loop."""
    check_model(body.model, settings)
    tools = _chosen_tools(body)
    extra = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        extra.setdefault("reasoning_effort", body.reasoning_effort)
    generation_prompt = body.add_generation_prompt is not False
    prompt = text.render(body.messages, tools=tools, add_generation_prompt=generation_prompt, extra=extra)
    # The template has written all special tokens out, BOS included.
    packed = text.encode(prompt, special=False)
    if body.max_completion_tokens is not None:
        body.max_tokens = body.max_completion_tokens
    keep: tuple[int, ...] = ()
    if settings.keep_message_end and generation_prompt:
        without = text.render(body.messages, tools=tools, add_generation_prompt=False, extra=extra)
        keep = message_end(packed, text.encode(without))
    return _job(body, [("messages", packed, "")], text, settings, keep)


def message_end(prompt: Packed, messages: Packed) -> tuple[int, ...]:
    """The position at which the messages end and the header of the answer begins; none where they don't part."""
    end = common(messages, prompt, 0)
    return (end,) if 0 < end < length(prompt) else ()


def completion_job(body: CompletionBody, text: Text, settings: ServerSettings) -> Job:
    """Tokenize and check the prompts of a completion. May take a while, as `chat_job`."""
    check_model(body.model, settings)
    prompts = []
    for field, prompt in _prompts(body.prompt):
        packed = text.encode(prompt, special=True) if isinstance(prompt, str) else pack(prompt)
        echo = "" if not body.echo else prompt if isinstance(prompt, str) else text.decode(packed)
        prompts.append((field, packed, echo))
    return _job(body, prompts, text, settings)


def _job(
    body: Body,
    prompts: Sequence[tuple[str, Packed, str]],
    text: Text,
    settings: ServerSettings,
    keep: tuple[int, ...] = (),
) -> Job:
    n = body.n or 1
    if n * len(prompts) > settings.choices_limit:
        wanted = f"{len(prompts)} prompts times n {n} is {n * len(prompts)}"
        raise InvalidRequest(f"{wanted} choices; at most {settings.choices_limit} in one request", "n")
    for field, packed, _ in prompts:
        check_prompt(packed, body.max_tokens, field, text.vocab_size, settings.context_length)
    chat = isinstance(body, ChatBody)
    name = ("chatcmpl-" if chat else "cmpl-") + uuid.uuid4().hex
    seed = _chance.getrandbits(SEED_BITS) if body.seed is None else body.seed
    # An engine request's seed and id follow from its place, so that one choice can be repeated alone.
    requests = tuple(
        Request(
            id=f"{name}-{p * n + i}",
            prompt=packed,
            sampling=sampling(body, text, (seed + i) % 2**SEED_BITS),
            namespace=namespace(body),
            keep=keep,
            session=body.session_id or body.user or "",
            arrived=time.monotonic(),
        )
        for p, (_, packed, _) in enumerate(prompts)
        for i in range(n)
    )
    return Job(
        id=name,
        created=int(time.time()),
        chat=chat,
        requests=requests,
        choices=n,
        stops=(body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ()),
        stream=bool(body.stream),
        include_usage=bool(body.stream_options and body.stream_options.include_usage),
        echoes=tuple(echo for _, _, echo in prompts for _ in range(n)),
    )


def sampling(body: Body, text: Text, seed: int) -> Sampling:
    """The client's wishes, else what the model's authors recommend, else OpenAI's defaults."""
    defaults = text.defaults
    stop_ids = frozenset(body.stop_token_ids or ())
    return Sampling(
        max_new=body.max_tokens,
        temperature=_first(body.temperature, defaults.temperature, 1.0),
        top_k=max(0, _first(body.top_k, defaults.top_k, 0)),
        top_p=_first(body.top_p, defaults.top_p, 1.0),
        min_p=_first(body.min_p, defaults.min_p, 0.0),
        seed=seed,
        stop_ids=stop_ids if body.ignore_eos else stop_ids | text.stop_ids,
    )


def namespace(body: Body) -> str:
    """One string for everything that keeps prefixes apart; JSON, so that no two combinations look alike."""
    parts = {"cache_salt": body.cache_salt, "extra_key": body.extra_key, "lora": body.lora}
    given = {name: value for name, value in parts.items() if value}
    return msgspec.json.encode(given).decode() if given else ""


def check_prompt(packed: Packed, max_new: int | None, field: str, vocab_size: int, context_length: int) -> None:
    """Refuse a prompt that is empty, out of the vocabulary, or too long for the model's positions."""
    size = length(packed)
    if size == 0:
        raise InvalidRequest("the prompt is empty", field)
    highest = int(unpack(packed).max())
    if highest >= vocab_size:
        raise InvalidRequest(f"token {highest} is outside of the vocabulary of {vocab_size}", field)
    if size >= context_length:
        raise PromptTooLong(
            f"the prompt has {size} tokens; the context length is {context_length}, answer included", field
        )
    if max_new is not None and size + max_new > context_length:
        raise PromptTooLong(
            f"the prompt has {size} tokens and max_tokens is {max_new}, {size + max_new} together; "
            f"the context length is {context_length}",
            field,
        )


def _chosen_tools(body: ChatBody) -> list[dict[str, Any]] | None:
    if body.tool_choice not in (None, "none", "auto"):
        raise InvalidRequest("tool_choice must be auto or none: no tool can be forced here", "tool_choice")
    return None if body.tool_choice == "none" else body.tools


def _prompts(prompt: str | list[Any]) -> Iterable[tuple[str, str | list[int]]]:
    """The field's name and the value of each prompt: text, or a list of token ids."""
    if isinstance(prompt, str):
        return [("prompt", prompt)]
    if not prompt:
        raise InvalidRequest("prompt is empty", "prompt")
    if len({type(item) for item in prompt}) > 1:
        allowed = "a string, a list of strings, of tokens, or of token lists"
        raise InvalidRequest(f"prompt must be {allowed}", "prompt")
    if isinstance(prompt[0], int):
        return [("prompt", prompt)]
    return [(f"prompt[{i}]", item) for i, item in enumerate(prompt)]


def _first(*values: Any) -> Any:
    return next(value for value in values if value is not None)
