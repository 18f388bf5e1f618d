"""RAGPulse: requests that name components (system prompt, passages, …) and tables of the components' lengths.

A component is a segment: reusable where all before it match. What a prompt has more than its components (the template,
7 to 12 tokens) stands at its end, in a segment of its own. Needs the folder, for the tables.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from milepost.sim.formats.base import Format, Options, Parsed
from milepost.sim.formats.lines import Row, in_order, short
from milepost.sim.trace import Segments, SessionId, Turn

KINDS = ("sys_prompt", "passages_ids", "history", "web_search", "user_input")
"""In the order of the prompt."""
TABLES = ("sys_prompt_id", "passage_id", "history_id", "web_search_id", "user_input_id")


def parse(rows: Iterable[Row], _options: Options) -> Parsed:
    lengths: dict[int, int] = {}
    requests: list[Row] = []
    for row in rows:
        name = next((name for name in TABLES if name in row), None)
        if name is None:
            requests.append(row)
        else:
            lengths[row.count(name)] = row.count("token_length")
    if requests and not lengths:
        raise requests[0].error("the lengths of components are in tables beside this file; give the folder")
    found, notes = in_order(requests, lambda row: row.number("timestamp"))
    turns: list[Turn] = []
    count: dict[SessionId, int] = defaultdict(int)
    for row in found:
        session = row.id("session_id")
        turns.append(_turn(row, session, count[session], lengths))
        count[session] += 1
    return Parsed(turns, notes)


def _turn(row: Row, session: SessionId, number: int, lengths: Mapping[int, int]) -> Turn:
    ids = row.child("hash_ids")
    prompt: list[tuple[str, int]] = []
    for kind in KINDS:
        for one in ids.list(kind) if kind in ids else []:
            if type(one) is not int or one not in lengths:
                raise ids.error(f"{kind} has {short(one)}, whose length no table gives")
            if lengths[one]:
                prompt.append((str(one), lengths[one]))
    length = row.count("input_length", 1)
    rest = length - sum(n for _, n in prompt)
    if rest < 0:
        raise row.error(f"input_length is {length}, but its components have {length - rest} tokens")
    if rest:
        prompt.append((f"{session}/{number}/template", rest))
    output = row.count("output_length")
    identity = Segments(tuple(prompt), (f"{session}/{number}/answer", max(1, output)))
    return Turn(session, number, length, output, identity, row.number("timestamp"))


def matches(record: Mapping[str, Any]) -> bool:
    return isinstance(record.get("hash_ids"), Mapping) or (
        "token_length" in record and any(t in record for t in TABLES)
    )


FORMAT = Format("ragpulse", matches, parse, folder=True)
