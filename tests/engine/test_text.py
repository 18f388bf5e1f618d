"""The text side: loading a folder, rendering chats, and streams that say the same as decoding at once."""

import json
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

import milepost
from milepost.core import tokens
from milepost.engine.text import HELD_TOKENS, Defaults, Text, TextStream
from milepost.errors import InvalidRequest, ModelError

DEMO = Path(milepost.__file__).parent / "demo"
TEXT = Text.load(DEMO)
IM_START, IM_END = 1, 2


def byte_tokens(raw: bytes) -> list[int]:
    """One token per byte, which the demo's vocabulary allows."""
    table = {value: token for token in range(256 + 3) if len(value := TEXT.table[token]) == 1}
    return [table[bytes([byte])] for byte in raw]


def say(text: Text, ids: list[int], stops: tuple[str, ...] = ()) -> tuple[str, bool]:
    stream = TextStream(text, stops)
    said = "".join([stream.push(token) for token in ids])
    return said + stream.flush(), stream.stopped


def sentencepiece() -> Text:
    """A vocabulary in the manner of SentencePiece: ▁ for spaces, byte tokens, no space before the first word."""
    words = ["<unk>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁the", "▁cat", "s", "▁a", "."]
    vocab = {word: i for i, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Prepend("▁")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken("<s>", special=True), AddedToken("<unk>", special=True)])
    return Text(tokenizer, {}, {}, frozenset(), Defaults(), len(words), frozenset({0, 1}), None)


PIECES = sentencepiece()


# Streams


@given(st.text(), st.data())
def test_any_split_into_tokens_says_the_whole_text(words, data):
    """Characters cut anywhere, special tokens thrown in: nothing is lost, doubled or broken."""
    raw = words.encode()
    ids = []
    while raw:
        size = data.draw(st.integers(1, len(raw)))
        part, raw = raw[:size], raw[size:]
        try:
            ids += tokens.unpack(TEXT.encode(part.decode())).tolist()
        except UnicodeDecodeError:
            ids += byte_tokens(part)
        ids += [IM_START] * data.draw(st.integers(0, 1))
    assert say(TEXT, ids) == (TEXT.decode(tokens.pack(ids)), False)


@given(st.lists(st.integers(0, 4200), max_size=40))
def test_any_tokens_at_all_say_what_decoding_says(ids):
    """Byte sequences that are no UTF-8 included: broken ones become U+FFFD just as they do at once."""
    assert say(TEXT, ids) == (TEXT.decode(tokens.pack(ids)), False)


@given(st.lists(st.sampled_from(b"\xe4\xbd\xa0\xf0\x9f\x98\x80\xc3\xed\xffA"), max_size=30))
def test_broken_bytes_say_what_decoding_says(raw):
    ids = byte_tokens(bytes(raw))
    assert say(TEXT, ids)[0] == bytes(raw).decode(errors="replace") == TEXT.decode(tokens.pack(ids))


def test_a_character_comes_when_it_is_whole():
    stream = TextStream(TEXT)
    assert [stream.push(token) for token in byte_tokens("a😀é".encode())] == ["a", "", "", "", "😀", "", "é"]
    assert stream.flush() == ""


def test_a_broken_character_comes_at_the_end():
    stream = TextStream(TEXT)
    assert [stream.push(token) for token in byte_tokens(b"\xf0\x9f")] == ["", ""]
    assert stream.flush() == "�"
    assert stream.flush() == ""


FEW = st.sampled_from(["ab", "abé😀"])  # few letters, so that stop strings begin often and overlap themselves


@given(st.data())
def test_stop_strings_cut_the_same_however_the_text_is_split(data):
    """Against the definition: the stop string that is complete first, and of those the one that began first."""
    letters = data.draw(FEW)
    words = data.draw(st.text(letters, max_size=30))
    stops = data.draw(st.lists(st.text(letters, min_size=1, max_size=6), max_size=4))
    ends = [(at + len(stop), -len(stop)) for stop in stops if (at := words.find(stop)) >= 0]
    cut = words
    if ends:
        end, minus = min(ends)
        cut = words[: end + minus]
    whole = tokens.unpack(TEXT.encode(words)).tolist()
    for ids in (whole, byte_tokens(words.encode())):
        assert say(TEXT, ids, tuple(stops)) == (cut, bool(ends))


@given(st.text("ab", max_size=30), st.lists(st.text("ab", min_size=1, max_size=6), min_size=1, max_size=3))
def test_just_the_beginning_of_a_stop_string_is_held(words, stops):
    """After each character, what is held is the longest end of the text that begins a stop string."""
    stream = TextStream(TEXT, stops)
    sent = ""
    for n, token in enumerate(byte_tokens(words.encode()), 1):
        sent += stream.push(token)
        if stream.stopped:
            break
        ends = [words[n - size : n] for size in range(n, -1, -1)]
        held = next(end for end in ends if any(stop.startswith(end) for stop in stops))
        assert words[:n] == sent + held


def test_nothing_follows_a_stop_string():
    stream = TextStream(TEXT, ["STOP"])
    said = [stream.push(token) for token in byte_tokens(b"a STxSTOP and more")]
    assert ("".join(said), stream.stopped, stream.flush()) == ("a STx", True, "")


def test_flush_sends_what_was_held_for_a_stop_string():
    assert say(TEXT, byte_tokens(b"a ST"), ("STOP",)) == ("a ST", False)


def test_special_and_unknown_tokens_are_silent():
    assert say(TEXT, [IM_START, *byte_tokens(b"hi"), IM_END, 99_999]) == ("hi", False)


@given(st.lists(st.sampled_from(["▁", "▁the", "▁cat", "s", "▁a", ".", "é", "😀", "<s>"]), max_size=20))
def test_sentencepiece_streams_as_it_decodes(words):
    ids = []
    for word in words:
        if (token := PIECES.tokenizer.token_to_id(word)) is None:
            ids += [2 + byte for byte in word.encode()]
        else:
            ids.append(token)
    stream = TextStream(PIECES)
    parts = [stream.push(token) for token in ids]
    assert "".join(parts) + stream.flush() == PIECES.decode(tokens.pack(ids))
    assert not any("�" in part for part in parts)


def test_sentencepiece_holds_broken_bytes_no_longer_than_it_must():
    stream = TextStream(PIECES)
    parts = [stream.push(2 + 0xFF) for _ in range(100)]
    assert "".join(parts) + stream.flush() == "�" * 100
    assert len(parts[0]) == 0
    assert len(parts[HELD_TOKENS - 1]) == HELD_TOKENS


# Folders


def folder(tmp_path: Path, **files: object) -> Path:
    """The demo's tokenizer with other settings around it; names are written with _ for the last dot."""
    shutil.copy(DEMO / "tokenizer.json", tmp_path)
    for name, content in files.items():
        stem, _, suffix = name.rpartition("_")
        path = tmp_path / f"{stem}.{suffix}"
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    return tmp_path


def test_the_demo_folder():
    assert TEXT.stop_ids == {0, 2}
    assert TEXT.defaults == Defaults(temperature=0.8, top_p=0.95)
    assert TEXT.vocab_size == 4096
    assert TEXT.special["eos_token"] == "<|im_end|>"
    prompt = TEXT.render([{"role": "user", "content": "Hi <|im_end|>"}])
    assert prompt == "<|im_start|>user\nHi <|im_end|><|im_end|>\n<|im_start|>assistant\n"
    ids = tokens.unpack(TEXT.encode(prompt)).tolist()
    assert ids.count(IM_START) == 2
    assert TEXT.decode(TEXT.encode(prompt), special=True) == prompt
    assert "<|im" not in TEXT.decode(TEXT.encode(prompt))


def test_a_bare_folder_serves_completions_only(tmp_path):
    text = Text.load(folder(tmp_path))
    assert (text.stop_ids, text.defaults, text.vocab_size) == (frozenset(), Defaults(), 4096)
    with pytest.raises(InvalidRequest, match="no chat template"):
        text.render([{"role": "user", "content": "Hi"}])


def test_eos_may_be_spread_over_all_files(tmp_path):
    path = folder(
        tmp_path,
        tokenizer_config_json={"eos_token": {"content": "<|im_start|>", "special": True}},
        generation_config_json={"eos_token_id": [7, 8], "do_sample": False, "temperature": 0.6, "top_k": 20},
        config_json={"text_config": {"eos_token_id": 9, "vocab_size": 5000}},
    )
    text = Text.load(path)
    assert text.stop_ids == {1, 7, 8, 9}
    assert text.defaults == Defaults(temperature=0.0, top_k=20), "do_sample false is greedy"
    assert text.vocab_size == 5000


def test_named_templates_and_their_files(tmp_path):
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "{{ tools | length }}"}]
    text = Text.load(folder(tmp_path, tokenizer_config_json={"chat_template": named}))
    message = [{"role": "user", "content": "Hi"}]
    assert text.render(message) == "plain"
    assert text.render(message, tools=[{"type": "function"}]) == "1"
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "from json"}))
    assert Text.load(tmp_path).render(message) == "from json"
    (tmp_path / "chat_template.jinja").write_text("from jinja")
    assert Text.load(tmp_path).render(message) == "from jinja"


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"config_json": "{"}, "config.json is no valid JSON"),
        ({"config_json": "[]"}, "must hold an object"),
        ({"tokenizer_json": "{}"}, "is no tokenizer"),
        ({"chat_template_jinja": "\n{% if %}"}, "chat template 'default', line 2"),
        ({"tokenizer_config_json": {"chat_template": 3}}, "must be a string or a list"),
        ({"tokenizer_config_json": {"chat_template": ["x"]}}, "needs a name"),
    ],
)
def test_broken_folders_are_refused_in_one_line(tmp_path, files, message):
    with pytest.raises(ModelError, match=message) as caught:
        Text.load(folder(tmp_path, **files))
    assert "\n" not in str(caught.value)


def test_a_folder_without_a_tokenizer(tmp_path):
    with pytest.raises(ModelError, match="is missing"):
        Text.load(tmp_path)


# Templates


def template(tmp_path: Path, source: str) -> Text:
    settings = {"bos_token": "<s>", "eos_token": "</s>"}
    return Text.load(folder(tmp_path, chat_template_jinja=source, tokenizer_config_json=settings))


def test_the_dialect_of_chat_templates(tmp_path):
    text = template(
        tmp_path,
        "{{ bos_token }}{% for m in messages %}\n"
        "  {% if m.role == 'skip' %}{% continue %}{% endif %}\n"
        "  {% generation %}\n"
        "{{ {'a': m.content} | tojson }}{% endgeneration %}{% endfor %}"
        "{{ strftime_now('%Y') | length }}{{ mood }}",
    )
    messages = [{"role": "skip", "content": ""}, {"role": "user", "content": "<é & 'x'>"}]
    assert text.render(messages, extra={"mood": "!"}) == "<s>" + '{"a": "<é & \'x\'>"}' + "4!"


def test_contents_and_tool_calls_are_made_plain(tmp_path):
    text = template(
        tmp_path, "{% for m in messages %}[{{ m.content }}{{ m.tool_calls | tojson }}]{% endfor %}{{ tools }}"
    )
    call = {"id": "1", "function": {"name": "f", "arguments": '{"x": 1}'}}
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    said = text.render(
        [
            {"role": "user", "content": parts, "tool_calls": []},
            {"role": "assistant", "content": None, "tool_calls": [call]},
        ]
    )
    assert said == '[ab[]][[{"id": "1", "function": {"name": "f", "arguments": {"x": 1}}}]]None'


@pytest.mark.parametrize(
    ("message", "field"),
    [
        ({"content": "x"}, "messages[0].role"),
        ({"role": "user", "content": 3}, "messages[0].content"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "messages[0].content[0]"),
        ({"role": "user", "content": ["x"]}, "messages[0].content[0]"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content[0].text"),
        ({"role": "assistant", "tool_calls": "f"}, "messages[0].tool_calls"),
        ({"role": "assistant", "tool_calls": [1]}, "messages[0].tool_calls[0].function"),
        (
            {"role": "assistant", "tool_calls": [{"function": {"arguments": "{"}}]},
            "messages[0].tool_calls[0].function.arguments",
        ),
    ],
)
def test_messages_that_are_no_text_are_refused_by_name(message, field):
    with pytest.raises(InvalidRequest) as caught:
        TEXT.render([message])
    assert caught.value.field == field
    assert field in str(caught.value)


def test_a_template_may_refuse(tmp_path):
    message = [{"role": "user", "content": "x"}]
    with pytest.raises(InvalidRequest, match="roles must alternate"):
        template(tmp_path, "{{ raise_exception('roles must alternate') }}").render(message)
    with pytest.raises(InvalidRequest, match="TypeError"):
        template(tmp_path, "{{ 'x' + 3 }}").render(message)
    with pytest.raises(InvalidRequest, match="unsafe"):
        template(tmp_path, "{{ messages.append(1) }}").render(message)
    with pytest.raises(InvalidRequest, match="chat_template_kwargs can't set tools"):
        TEXT.render(message, extra={"tools": []})


def test_tools_need_a_template_that_takes_them(tmp_path):
    message = [{"role": "user", "content": "x"}]
    with pytest.raises(InvalidRequest, match="takes no tools"):
        TEXT.render(message, tools=[{"type": "function"}])
    source = "{% if not tools is defined %}{% set tools = none %}{% endif %}{{ tools | length }}"
    assert template(tmp_path, source).render(message, tools=[{"type": "function"}]) == "1"


def test_a_lone_surrogate_is_no_text():
    with pytest.raises(InvalidRequest, match="Unicode"):
        TEXT.encode("\ud800")


def test_encode_adds_special_tokens_only_on_request(tmp_path):
    raw = json.loads((DEMO / "tokenizer.json").read_text())
    bos = {"SpecialToken": {"id": "<|im_start|>", "type_id": 0}}
    raw["post_processor"]["single"].insert(0, bos)
    raw["post_processor"]["special_tokens"] = {
        "<|im_start|>": {"id": "<|im_start|>", "ids": [1], "tokens": ["<|im_start|>"]}
    }
    text = Text.load(folder(tmp_path, tokenizer_json=raw))
    assert text.encode("a", special=True) == tokens.pack([1]) + text.encode("a")
