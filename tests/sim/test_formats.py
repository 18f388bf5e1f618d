"""Reading and writing traces: each format from a few rows written by hand, and the shared sets where present."""

import gzip
import json
import random
from dataclasses import replace

import pytest

from milepost.errors import TraceError
from milepost.sim.formats.detect import FORMATS, WRITERS, read, write
from milepost.sim.trace import Blocks, Link, Segments, Trace, Turn, material
from tests.shared import shared


@pytest.fixture
def put(tmp_path):
    """Writes rows (objects as JSON, strings as they are) to a file whose name says nothing."""

    def write_rows(*rows, name="trace", zipped=False):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        text = "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)
        path.write_bytes(gzip.compress(text.encode()) if zipped else text.encode())
        return path

    return write_rows


def ids(turn):
    return turn.identity.ids().tolist()


def mooncake(at, length, hash_ids, **more):
    return {"timestamp": at, "input_length": length, "output_length": 10, "hash_ids": hash_ids, **more}


# Mooncake


def test_mooncake_keeps_full_blocks_apart_from_the_partial_tail(put):
    trace = read(put(mooncake(0, 1100, [7, 9, 4]), mooncake(2500, 1024, [7, 9]), mooncake(2500.5, 1500, [7, 9, 1])))
    assert [ids(turn) for turn in trace.turns] == [[0, 1], [0, 1], [0, 1]]
    assert [turn.identity.tail for turn in trace.turns] == [2, None, 3]
    assert [(turn.session, turn.turn, turn.arrival) for turn in trace.turns] == [(0, 0, 0), (1, 0, 2.5), (2, 0, 2.5005)]
    assert trace.block == 512 and trace.notes == ()


def test_mooncake_rows_without_an_id_for_the_tail_are_read_too(put):
    trace = read(put(mooncake(0, 1100, [7, 9]), mooncake(1, 1100, [7, 9, 3])))
    assert [(ids(turn), turn.identity.tail) for turn in trace.turns] == [([0, 1], None), ([0, 1], 2)]


def test_mooncake_ids_of_contents_become_ids_of_prefixes(put):
    """The same id after another block is another prefix; 64-bit ids fit."""
    trace = read(put(mooncake(0, 1024, [2**63, 5]), mooncake(1, 1024, [6, 5]), mooncake(2, 1024, [2**63, 5])))
    assert [ids(turn) for turn in trace.turns] == [[0, 1], [2, 3], [0, 1]]


def test_mooncake_sessions_and_delays(put):
    rows = [
        mooncake(0, 512, [0], session_id="a"),
        mooncake(100, 512, [1], session_id="b"),
        {**mooncake(None, 1024, [0, 2]), "delay": 1500, "session_id": "a"},
    ]
    trace = read(put(*rows))
    assert [(t.session, t.turn, t.arrival, t.think) for t in trace.turns] == [
        ("a", 0, 0.0, None),
        ("b", 0, 0.1, None),
        ("a", 1, None, 1.5),
    ]


def test_mooncake_rows_out_of_order_are_sorted_and_said(put):
    trace = read(put(mooncake(9, 512, [0], session_id="a"), mooncake(3, 512, [1], session_id="a")))
    assert [(turn.turn, turn.arrival) for turn in trace.turns] == [(0, 0.003), (1, 0.009)]
    assert any("sorted" in note for note in trace.notes)


def test_mooncake_infers_sessions_only_when_asked(put):
    path = put(
        mooncake(0, 1100, [0, 1, 2]),
        mooncake(1, 1100, [0, 1, 3]),
        mooncake(2, 1700, [0, 1, 4, 5]),
        mooncake(3, 2100, [0, 1, 4, 6, 7]),
        mooncake(4, 600, [8, 9]),
    )
    assert [turn.session for turn in read(path).turns] == [0, 1, 2, 3, 4]
    inferred = read(path, infer_sessions=True)
    # 1 has the same full blocks as 0 and nothing more, so 2 continues 1, the latest; 0 stays a session of its own.
    assert [(turn.session, turn.turn) for turn in inferred.turns] == [(0, 0), (1, 0), (1, 1), (1, 2), (2, 0)]
    assert any("inferred" in note for note in inferred.notes)


def test_mooncake_texts(put):
    history = [{"role": "user", "content": "x" * 300}]
    rows = [
        {"timestamp": 0, "text_input": "ab" * 200, "output_length": 5},
        {"timestamp": 1, "messages": history, "output_length": 7, "session_id": "s", "message_mode": "delta"},
        {"delay": 9, "messages": [{"role": "user", "content": "more"}], "session_id": "s", "message_mode": "delta"},
        {"timestamp": 3, "payload": {"prompt": "ab" * 200}, "output_length": 5},
    ]
    trace = read(put(*rows))
    assert [turn.prompt_len for turn in trace.turns] == [100, 75, 75 + 7 + 1, 100]
    assert trace.turns[0].identity.prompt == trace.turns[3].identity.prompt
    assert trace.turns[2].identity.prompt[:2] == trace.turns[1].identity.prompt
    assert any("4 characters" in note for note in trace.notes) and any("256 tokens" in note for note in trace.notes)


def test_sidecar_gives_the_block_size(put, tmp_path):
    path = put(mooncake(0, 100, [0, 1]))
    with pytest.raises(TraceError, match=r":1: 2 ids for 100 tokens don't fit blocks of 512.*for example --block 64"):
        read(path)
    (tmp_path / "trace.meta.json").write_text('{"block_size": 64}')
    assert read(path).block == 64
    with pytest.raises(TraceError, match="contradicts"):
        read(path, block=32)


# WEKA


WEKA = {
    "id": "w",
    "block_size": 64,
    "hash_id_scope": "local",
    "tool_tokens": 100,
    "system_tokens": 60,
    "requests": [
        {"t": 0.0, "in": 200, "out": 9, "runs": [[1, 3]], "api": 5.0, "think": 0.0, "type": "n", "stop": "tool_use"},
        {
            "t": 25.0,
            "type": "subagent",
            "tool_tokens": 64,
            "system_tokens": 0,
            "requests": [
                {"t": 0.0, "in": 130, "out": 1, "runs": [[90, 2]], "api": 2.0, "think": 0.0, "type": "n"},
                {"t": 7.0, "in": 200, "out": 0, "runs": [[90, 2], [99, 1]], "api": 11.0, "type": "s", "ttft": 0.5},
            ],
        },
        {"t": 30.0, "in": 340, "out": 4, "runs": [[1, 2], [10, 3]], "think": 25.0, "type": "n"},
        {"t": 31.0, "type": "subagent", "requests": [{"t": 0.0, "in": 65, "out": 1, "runs": [[120, 1]], "api": 500.0}]},
        {"t": 40.0, "in": 400, "out": 4, "runs": [[1, 2], [10, 4]], "api": 1.0, "type": "n"},
    ],
}


def test_weka_sessions_and_subagents(put):
    trace = read(put(WEKA, {**WEKA, "id": "v"}))
    turns = trace.turns[:6]
    assert [(t.session, t.turn) for t in turns] == [
        ("w", 0),
        ("w/subagent_001", 0),
        ("w/subagent_001", 1),
        ("w", 1),
        ("w/subagent_002", 0),
        ("w", 2),
    ]
    assert [t.identity.runs for t in turns][2:4] == [((90, 2), (99, 1)), ((1, 2), (10, 3))]
    assert {t.identity.space for t in turns} == {"w"} and {t.identity.space for t in trace.turns} == {"w", "v"}
    # The first subagent ended at 25 after 18 s, so it began at 7: 2 s after the end of the turn that called it.
    assert turns[1].link == turns[2].link == Link("w", 0, gates=True)
    assert (turns[1].arrival, turns[1].think, turns[2].arrival, turns[2].think) == (7.0, 2.0, 14.0, 5.0)
    # The second can't have ended at 31 after 500 s: it began there, and nobody waited.
    assert turns[4].link == Link("w", 1, gates=False) and turns[4].arrival == 31.0
    assert [t.think for t in turns if t.session == "w"] == [0.0, 25.0, None]  # the last: no api before it
    assert [t.took for t in turns if t.session == "w"] == [5.0, None, 1.0]


def test_weka_original_says_the_same_as_the_compact_form(put):
    def original(entry):
        entry = dict(entry)
        for ours, theirs in (("api", "api_time"), ("think", "think_time")):
            if ours in entry:
                entry[theirs] = entry.pop(ours)
        if "runs" in entry:
            entry["hash_ids"] = [i for start, count in entry.pop("runs") for i in range(start, start + count)]
        if "requests" in entry:
            entry["requests"] = [original(one) for one in entry["requests"]]
        return entry

    compact = read(put(WEKA, name="compact"))
    spread_out = json.dumps({**original(WEKA), "models": ["m"], "totals": {}}, indent=1)
    assert read(put(spread_out, name="whole")).turns == compact.turns
    put(original(WEKA), name="folder/a.json")
    put(original({**WEKA, "id": "v"}), name="folder/b.json.gz", zipped=True)
    assert len(read(put("not data", name="folder/README.md").parent).turns) == 12


def test_weka_child_on_the_clock_of_the_session(put):
    """Newer corpora: the child's times count like its parent's, and the entry's time is its start."""
    newer = json.loads(json.dumps(WEKA))
    child = newer["requests"][1]
    child["t"] = 7.0
    child["requests"][0]["t"], child["requests"][1]["t"] = 7.0, 14.0
    turns = read(put(newer)).turns
    assert (turns[1].arrival, turns[1].think, turns[2].arrival, turns[1].link) == (7.0, 2.0, 14.0, Link("w", 0))


def test_weka_common_prefix(put):
    """(100 + 60) // 64 = 2 blocks of main sessions are common, 1 of subagents; everything else stays apart."""
    trace = read(put(WEKA, {**WEKA, "id": "v"}), share_prefix=True)
    first, second = ([set(ids(t)) for t in trace.turns[at : at + 6]] for at in (0, 6))
    assert [len(a & b) for a, b in zip(first, second, strict=True)] == [2, 1, 1, 2, 0, 2]
    assert len(set.union(*first)) == 3 + 3 + 4 + 1 and len(first[0] & first[3]) == 2
    assert trace.block == 64 and {t.identity.space for t in trace.turns} == {""}


# The other formats


def test_bailian(put):
    def row(chat, parent, at, turn, length, hash_ids):
        base = {"chat_id": chat, "parent_chat_id": parent, "timestamp": at, "input_length": length}
        return {**base, "output_length": 3, "type": "text", "turn": turn, "hash_ids": hash_ids}

    rows = [row(4, -1, 0.5, 1, 20, [50, 51]), row(6, 4, 3.0, 2, 40, [50, 60, 61]), row(9, 7, 4.0, 5, 16, [70])]
    trace = read(put(*rows))
    assert [(t.session, t.turn, t.arrival) for t in trace.turns] == [(4, 0, 0.5), (4, 1, 3.0), (9, 0, 4.0)]
    assert [(ids(t), t.identity.tail) for t in trace.turns] == [([0], 1), ([0, 2], 3), ([4], None)]
    assert trace.block == 16 and any("1 rows continue chats" in note for note in trace.notes)


def test_aiperf_single_and_multi_turn(put):
    single = [
        {"session_id": "a", "text": "word" * 64, "timestamp": 0, "output_length": 8},
        {"session_id": "a", "texts": ["word" * 64, "tail"], "delay": 2000, "output_length": 8},
    ]
    trace = read(put(*single))
    assert [(t.turn, t.prompt_len, t.arrival, t.think) for t in trace.turns] == [(0, 64, 0.0, None), (1, 65, None, 2.0)]
    assert trace.turns[1].identity.prompt[0] == trace.turns[0].identity.prompt[0]
    turns = [
        {"role": "system", "text": "You help."},
        {"text": "Hello", "output_length": 20},
        {"text": "Again", "delay": 10, "output_length": 5, "image": "…"},
    ]
    trace = read(put({"session_id": "b", "turns": turns}))
    assert [t.prompt_len for t in trace.turns] == [3 + 2, 3 + 2 + 20 + 2]
    first, second = (t.identity for t in trace.turns)
    assert second.prompt[:3] == (*first.prompt, first.output)
    assert any("images" in note for note in trace.notes)


def test_autobench(put):
    rows = [
        {"prompt": list(range(150)), "output_len": 9, "timestamp": 5},
        {"prompt": list(range(130)), "max_tokens": 9, "timestamp": 9, "routing_key": "k"},
        {"prompt": ["one", "two"], "timestamp": 10},
    ]
    trace = read(put(*rows))
    assert [t.prompt_len for t in trace.turns] == [150, 130, 1, 1 + 256 + 1]
    assert trace.turns[0].identity.prompt[:2] == trace.turns[1].identity.prompt[:2]
    assert trace.turns[1].session == "k" and (trace.turns[3].turn, trace.turns[3].arrival) == (1, None)


@pytest.mark.parametrize(
    ("header", "lines", "arrivals"),
    [
        (
            "TIMESTAMP,ContextTokens,GeneratedTokens",
            ["2023-11-16 18:17:03.9799600,4808,10\r", "2023-11-16 18:17:05.0000000,3180,8\r"],
            [0.0, 1.02004],
        ),
        (
            "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type",
            ["5,ChatGPT,4808,10,4818,API log", "6.5,GPT-4,100,0,100,API log", "7,GPT-4,3180,8,3188,API log"],
            [5.0, 7.0],
        ),
        ("arrival,input_length,output_length", ["3,4808,10", "4,3180,8"], [3.0, 4.0]),
    ],
    ids=["azure", "burstgpt", "plain"],
)
def test_csv_has_lengths_only(put, header, lines, arrivals):
    trace = read(put(header, *lines))
    assert [t.prompt_len for t in trace.turns] == [4808, 3180] and [t.output_len for t in trace.turns] == [10, 8]
    assert [t.arrival for t in trace.turns] == pytest.approx(arrivals, abs=1e-6)
    assert not trace.has_identity and any("no reuse information" in note for note in trace.notes)
    with pytest.raises(TraceError, match="no reuse information"):
        material(trace)
    assert header.startswith("Timestamp") == any("1 failed" in note for note in trace.notes)


def test_ragpulse(put):
    def request(at, length, session, **components):
        return {
            "timestamp": at,
            "input_length": length,
            "output_length": 5,
            "hash_ids": components,
            "session_id": session,
        }

    rows = [
        request("9", 25, "s", sys_prompt=[1], passages_ids=[2], history=[], web_search=[], user_input=[3]),
        request("4", 17, "s", sys_prompt=[1], passages_ids=[], history=[], web_search=[], user_input=[3]),
    ]
    path = put(rows[0], "", rows[1], name="rag/requests.jsonl")
    with pytest.raises(TraceError, match=r"requests\.jsonl:1: .*give the folder"):
        read(path)
    put({"sys_prompt_id": 1, "token_length": 10}, {"sys_prompt_id": 3, "token_length": 0}, name="rag/a.jsonl")
    put({"passage_id": 2, "token_length": 8}, {"user_input_id": 3, "token_length": 2}, name="rag/b.jsonl")
    trace = read(path.parent)
    assert [(t.arrival, t.turn) for t in trace.turns] == [(4.0, 0), (9.0, 1)]
    assert [t.identity.prompt[:-1] for t in trace.turns] == [(("1", 10), ("3", 2)), (("1", 10), ("2", 8), ("3", 2))]
    assert [t.identity.prompt[-1][1] for t in trace.turns] == [5, 5]


def test_lmcache(put):
    rows = [
        {"workload": "w", "session": 1, "timestamp": 0, "input_length": 40, "output_length": 2, "runs": [[5, 2]]},
        {"workload": "w", "session": 1, "timestamp": 1375, "input_length": 64, "output_length": 2, "runs": [[5, 3]]},
    ]
    trace = read(put(*rows))
    assert [(t.session, t.turn, t.arrival) for t in trace.turns] == [("w/1", 0, 0.0), ("w/1", 1, 1.375)]
    assert [ids(t) for t in trace.turns] == [[5, 6], [5, 6, 7]]


def dynamo(session, parent, received, took, length, hashes, kind="request_end"):
    replay = {"trace_block_size": 32, "input_length": length, "input_sequence_hashes": hashes}
    request = {"request_id": "r", "model": "m", "input_tokens": length, "output_tokens": 4, "replay": replay}
    request |= {"request_received_ms": received, "total_time_ms": took}
    context = {"session_id": session, "parent_session_id": parent} if session else None
    return {"schema": "dynamo.request.trace.v1", "event_type": kind, "agent_context": context, "request": request}


def test_dynamo(put):
    big = 2**64 - 1
    rows = [
        {"timestamp": 1, "event": dynamo("a", None, 1000, 500, 40, [big, 2])},
        {"timestamp": 2, "event": {"schema": "dynamo.request.trace.v1", "event_type": "tool_start", "tool": {}}},
        {"timestamp": 3, "event": dynamo("a", None, 4000, 100, 64, [big, 3])},
        {"timestamp": 9, "event": dynamo("b", "a", 1700, 100, 32, [4])},
    ]
    turns = read(put(*rows)).turns
    assert [(t.session, t.turn, t.arrival) for t in turns] == [("a", 0, 0.0), ("b", 0, 0.7), ("a", 1, 3.0)]
    assert [t.think for t in turns] == pytest.approx([0.0, 0.2, 2.5])
    assert turns[1].link == Link("a", 0) and [ids(t) for t in turns] == [[0], [2], [0, 3]]
    with pytest.raises(TraceError, match="agent_context"):
        read(put(dynamo("a", None, 0, 1, 32, [1]), dynamo(None, None, 1, 1, 32, [1])))


# Refusals


@pytest.mark.parametrize(
    ("rows", "complaint"),
    [
        ([mooncake(0, 512, [1]), mooncake(0, -1, [])], ":2: input_length is -1: a whole number of at least 1"),
        ([mooncake(0, 512, [1]), mooncake(0, 1.5, [])], ":2: input_length is 1.5"),
        ([mooncake(0, 512, ["1"])], ":1: hash_ids[0] is '1'"),
        ([mooncake(0, 1025, [1])], ":1: 1 ids for 1025 tokens don't fit blocks of 512, which make 2 or 3"),
        ([mooncake("x", 512, [1])], ":1: timestamp is 'x'"),
        ([{**mooncake(0, 512, [1]), "delay": 3}], "exactly one of timestamp and delay"),
        ([{**mooncake(0, 512, [1]), "text_input": "x"}], "exactly one of input_length, text_input"),
        ([mooncake(0, 512, [1]), mooncake(1, 512, None)], "1 rows of this file have no hash_ids"),
        ([{"timestamp": 0, "input_length": 5}], ":1: no 'output_length'"),
        ([mooncake(0, 512, [1], output_hash_ids=[2])], "the answer completes 0 blocks"),
        ([{**WEKA, "requests": [{"t": 0, "in": 640, "out": 1, "runs": [[1, 3]]}]}], ":1: requests[0]: 3 ids for 640"),
        ([{**WEKA, "requests": [{"t": 0, "in": 64, "out": 1, "runs": [[1, 0]]}]}], "runs[0] is [1, 0]"),
        ([WEKA, WEKA], ":2: id is 'w': another session has it too"),
        ([{**WEKA, "requests": []}], "requests is empty"),
        (["arrival,input_length,output_length", "3,x,10"], ":2: input_length is 'x'"),
        (["arrival,input_length,output_length", "3,10"], ":2: 2 values for 3 columns"),
        (["soon,input_length,output_length", "3,10,1"], "not a trace format that is known"),
        (['{"a": 1}'], "its fields: a"),
        (["[1]"], ":1: an object is needed"),
        (['{"input_length": 1'], ":1: "),
        ([dynamo("a", None, 0, 1, 32, [1], kind="no")], "event_type is 'no'"),
        ([{"prompt": [], "output_len": 1}], "prompt is []"),
        ([{"session_id": "a", "turns": [{"role": "system", "text": "x"}]}], "turns is empty"),
        ([{"text": "", "output_length": 1}], "no text in it"),
    ],
)
def test_a_bad_row_names_file_line_and_field(put, rows, complaint):
    path = put(*rows)
    with pytest.raises(TraceError) as error:
        read(path)
    assert str(path) in str(error.value) and complaint in str(error.value)


def test_options_without_meaning_and_mixed_folders_are_refused(put):
    with pytest.raises(TraceError, match="--share-prefix has no meaning for the mooncake format"):
        read(put(mooncake(0, 512, [1])), share_prefix=True)
    with pytest.raises(TraceError, match="--block has no meaning for the weka format"):
        read(put(WEKA), block=64)
    with pytest.raises(TraceError, match="No such file"):
        read(put(WEKA).with_name("missing"))
    with pytest.raises(TraceError, match="the folder has no"):
        read(put("x", name="empty/README.md").parent)
    put(WEKA, name="mixed/a.json")
    with pytest.raises(TraceError, match="several formats"):
        read(put(mooncake(0, 512, [1]), name="mixed/b.json").parent)
    put(mooncake(0, 512, [1]), name="two/a.json")
    with pytest.raises(TraceError, match="one file"):
        read(put(mooncake(0, 512, [1]), name="two/b.json").parent)


def test_broken_files_are_refused(put):
    path = put(*[mooncake(i, 512, [i]) for i in range(400)], zipped=True)
    whole = path.read_bytes()
    for broken in (whole[:-30], whole[:40] + b"\xff" * 40 + whole[80:], b"\xff\xfe{}"):
        path.write_bytes(broken)
        with pytest.raises(TraceError, match="trace: "):
            read(path)


SAMPLES = {
    "mooncake": [mooncake(0, 1100, [7, 9, 4], session_id="a", took_ms=5), mooncake(5, 1024, [7, 9], session_id="a")],
    "texts": [
        {"timestamp": 0, "messages": [{"role": "user", "content": "x"}], "output_length": 5, "message_mode": "delta"}
    ],
    "weka": [WEKA],
    "aiperf": [{"session_id": "b", "turns": [{"role": "system", "text": "S"}, {"text": "H", "delay": 3}]}],
    "autobench": [{"prompt": [1, 2], "output_len": 9}, {"messages": [{"content": "x"}], "max_tokens": 1}],
    "dynamo": [dynamo("a", None, 0, 1, 40, [1, 2]), {"timestamp": 3, "event": dynamo("b", "a", 9, 1, 32, [1])}],
    "segments": [{"session": 0, "turn": 0, "arrival": 0, "segments": [["a", 3]], "output": ["b", 2], "output_len": 2}],
    "ragpulse": [
        {"sys_prompt_id": 1, "token_length": 10},
        {"timestamp": "4", "input_length": 17, "output_length": 5, "hash_ids": {"sys_prompt": [1]}, "session_id": "s"},
    ],
    "lmcache": [
        {"workload": "w", "session": 1, "timestamp": 0, "input_length": 40, "output_length": 2, "runs": [[5, 2]]}
    ],
    "bailian": [
        {"chat_id": 4, "parent_chat_id": -1, "timestamp": 1, "input_length": 20, "output_length": 3, "hash_ids": [5]}
    ],
}
JUNK = (
    None,
    -1,
    0,
    3,
    2.5,
    True,
    "x",
    "",
    [],
    {},
    [[1, 2]],
    ["x"],
    [None],
    {"a": 1},
    1e308,
    10**400,
    float("nan"),
    2**70,
)


def spoiled(value, chance):
    """A copy in which one value at a random depth is junk or is gone."""
    if isinstance(value, dict | list) and value and chance.random() < 0.8:
        keys = list(value) if isinstance(value, dict) else range(len(value))
        key = chance.choice(keys)
        copy = value.copy()
        if chance.random() < 0.1:
            del copy[key]
        else:
            copy[key] = spoiled(value[key], chance)
        return copy
    return chance.choice(JUNK)


@pytest.mark.parametrize("name", SAMPLES)
def test_spoiled_rows_are_read_or_refused_with_their_place(put, name):
    chance, refused = random.Random(name), 0
    assert read(put(*SAMPLES[name])).turns
    for _ in range(250):
        rows = [spoiled(row, chance) for row in SAMPLES[name]]
        path = put(*rows)
        try:
            assert read(path).turns
        except TraceError as error:
            refused += 1
            assert str(path) in str(error)
    assert refused > 50


# Writing


def blocks_trace():
    """Two id spaces, a tail with an id, one without, an answer, a subagent."""

    def blocks(runs, space, tail=None, answer=()):
        return Blocks(runs, 64, space, tail, answer)

    return Trace(
        "made",
        (
            Turn("a", 0, 200, 70, blocks(((5, 3),), "x", 40, ((60, 1),)), 0.0, None, None, 1.5),
            Turn("b", 0, 192, 10, blocks(((5, 3),), "y"), 0.5),
            Turn("a.sub", 0, 70, 1, blocks(((90, 1),), "x"), 2.0, 0.5, Link("a", 0), 1.0),
            Turn("a", 1, 300, 7, blocks(((5, 3), (60, 1)), "x"), 9.0, 7.5, None, 1.0),
        ),
    )


def shape(trace):
    """How much each prompt shares with each before, in tokens of full blocks."""
    found = []
    for i, turn in enumerate(trace.turns):
        for other in trace.turns[:i]:
            a, b = (material(Trace("", (other, turn))).prompt(t).tolist() for t in (other, turn))
            found.append(next((k for k, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))))
    return found


@pytest.mark.parametrize("name", ["t.jsonl", "t.jsonl.gz"])
def test_mooncake_round_trip(tmp_path, name):
    made, path = blocks_trace(), tmp_path / name
    lost = write(made, path, "mooncake")
    again = read(path)
    assert again.block == 64 and json.loads((tmp_path / f"{name}.meta.json").read_text())["block_size"] == 64
    assert [(t.session, t.turn, t.prompt_len, t.output_len) for t in again.turns] == [
        (t.session, t.turn, t.prompt_len, t.output_len) for t in made.turns
    ]
    assert [ids(t) for t in again.turns] == [[0, 1, 2], [5, 6, 7], [8], [0, 1, 2, 4]]
    assert again.turns[0].identity.answer == ((4, 1),) and again.turns[0].took == 1.5
    assert (again.turns[3].think, again.turns[3].arrival) == (7.5, None)
    assert any("subagents" in note for note in lost) and any("delay" in note for note in lost)


def test_mooncake_rows_satisfy_the_rule_of_public_traces(tmp_path):
    """One id per started block, compact, in order of first occurrence."""
    write(blocks_trace(), tmp_path / "t", "mooncake")
    rows = [json.loads(line) for line in (tmp_path / "t").read_text().splitlines()]
    assert all(len(row["hash_ids"]) == -(-row["input_length"] // 64) for row in rows)
    seen = [i for row in rows for i in row["hash_ids"] + row.get("output_hash_ids", [])]
    assert list(dict.fromkeys(seen)) == list(range(max(seen) + 1))


def test_weka_round_trip(put, tmp_path):
    first = read(put(WEKA, {**WEKA, "id": "v"}))
    write(first, tmp_path / "out.gz", "weka")
    again = read(tmp_path / "out.gz")
    assert again.turns == first.turns


def test_segments_round_trip_and_from_blocks(tmp_path):
    made = Trace("s", (Turn("a", 0, 30, 4, Segments((("x", 10), ("y", 20)), ("z", 4)), 1.0, 0.5),))
    write(made, tmp_path / "s", "segments")
    assert read(tmp_path / "s").turns == made.turns
    write(blocks_trace(), tmp_path / "b", "segments")
    again = read(tmp_path / "b")
    assert [t.prompt_len for t in again.turns] == [200, 192, 70, 300]
    assert shape(again) == [0, 0, 0, 200, 0, 0]  # the tail of 8 tokens begins the block that follows


@pytest.mark.parametrize("to", ["aiperf", "autobench"])
def test_filler_shares_what_the_trace_shares(tmp_path, to):
    made = blocks_trace()
    write(made, tmp_path / "out", to)
    again = read(tmp_path / "out")
    assert [t.prompt_len for t in again.turns] == [t.prompt_len for t in made.turns]
    assert [t.output_len for t in again.turns] == [t.output_len for t in made.turns]
    order = [[t.session for t in again.turns].index(t.session) for t in made.turns]
    assert order == [0, 1, 2, 0] and shape(again) == [0, 0, 0, 192, 0, 0]  # text and ids are cut every 64 tokens
    if to == "autobench":
        first, *_, last = (json.loads(line)["prompt"] for line in (tmp_path / "out").read_text().splitlines())
        assert last[:200] == first  # the tail too


def test_segments_are_cut_into_blocks(tmp_path):
    """A block is equal where all tokens up to its end are: 100 shared tokens are one block of 64."""
    turns = [
        Turn(0, 0, 200, 5, Segments((("sys", 100), ("a", 100)), ("x", 5)), 0.0),
        Turn(1, 0, 190, 5, Segments((("sys", 100), ("b", 90)), ("y", 5)), 1.0),
        Turn(2, 0, 300, 5, Segments((("sys", 100), ("a", 100), ("c", 100)), ("z", 5)), 2.0),
    ]
    write(Trace("s", tuple(turns)), tmp_path / "m", "mooncake", 64)
    assert shape(read(tmp_path / "m")) == [1, 3, 1]


@pytest.mark.parametrize("to", WRITERS)
def test_writers_refuse_what_they_can_not_say(tmp_path, to):
    lengths = Trace("l", (Turn(0, 0, 10, 5, None, 0.0),))
    if to == "mooncake":
        write(lengths, tmp_path / "out", to)
        assert not read(tmp_path / "out").has_identity
    else:
        with pytest.raises(TraceError, match="l: "):
            write(lengths, tmp_path / "out", to)
        assert not (tmp_path / "out").exists()


def test_unknown_writers_and_other_blocks_are_refused(tmp_path):
    assert set(WRITERS) == {"aiperf", "autobench", "mooncake", "segments", "weka"} and len(FORMATS) == 10
    with pytest.raises(TraceError, match="must be one of"):
        write(blocks_trace(), tmp_path / "out", "lmcache")
    with pytest.raises(TraceError, match="can't be cut to 512"):
        write(blocks_trace(), tmp_path / "out", "mooncake", 512)
    with pytest.raises(TraceError, match="can't be written"):
        write(blocks_trace(), tmp_path / "no" / "out", "mooncake")


# An answer's blocks


def test_known_answers_are_fed(put):
    """The blocks that a trace says an answer completes are those that a replay generates."""
    row = mooncake(0, 100, [0, 1], output_hash_ids=[2, 3])
    path = put({**row, "output_length": 120}, mooncake(9, 230, [0, 2, 3, 4]))
    trace = read(path, block=64)
    fed = material(trace)
    assert fed.output(trace.turns[0]).tolist()[:2] == fed.prompt(trace.turns[1]).tolist()[1:]
    bare = replace(trace.turns[0], identity=replace(trace.turns[0].identity, answer=()))
    assert material(trace).output(bare).tolist()[:2] != fed.output(trace.turns[0]).tolist()[:2]


# The shared sets


@pytest.mark.parametrize(
    ("path", "requests", "sessions", "block"),
    [
        ("weka-claude-code/sessions.jsonl.gz", 49_334, 710 + 63, 64),
        ("weka-claude-code/original_sample", 370, 12 + 12, 64),
        ("mooncake-fast25/conversation_trace.jsonl.gz", 12_031, 12_031, 512),
        ("mooncake-fast25/synthetic_trace.jsonl.gz", 3_993, 3_993, 512),
        ("lmcache-agent/agent_blocks.jsonl.gz", 1_619, 20 + 25 + 24, 16),
        ("ragpulse", 7_106, 3_990, None),
        ("azure-llm-2023/AzureLLMInferenceTrace_code.csv.gz", 8_819, 8_819, None),
        ("azure-llm-2023/AzureLLMInferenceTrace_conv.csv.gz", 19_366, 19_366, None),
        ("synthetic/agent.jsonl.gz", 960, 48, None),
    ],
)
def test_shared_sets_are_read_whole(path, requests, sessions, block):
    trace = read(shared(f"traces/{path}"))
    assert (len(trace.turns), len({t.session for t in trace.turns}), trace.block) == (requests, sessions, block)


def test_originals_and_compact_form_agree():
    compact = {}
    for turn in read(shared("traces/weka-claude-code/sessions.jsonl.gz")).turns:
        compact.setdefault(str(turn.session).split("/")[0], []).append(turn)
    originals = read(shared("traces/weka-claude-code/original_sample")).turns
    by_session = {}
    for turn in originals:
        by_session.setdefault(str(turn.session).split("/")[0], []).append(turn)
    for name, turns in by_session.items():
        for one, other in zip(turns, compact[name], strict=True):
            assert one.identity == other.identity and one.output_len == other.output_len
            assert (one.turn, one.prompt_len, one.think is None) == (other.turn, other.prompt_len, other.think is None)
            # A subagent's recorded duration is a few seconds longer than its requests, all that the compact form has.
            assert one.arrival == pytest.approx(other.arrival, abs=8.0)
            assert (one.link and one.link.gates) == (other.link and other.link.gates)
