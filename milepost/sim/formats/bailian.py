"""Bailian JSONL (Qwen traces): seconds, blocks of 16 tokens, chats that grow from a root by `parent_chat_id`.

Every row is a complete request: its length counts the history. A chat is all rows that reach one root.
"""

from collections import defaultdict
from collections.abc import Iterable

from milepost.sim.formats import blocks
from milepost.sim.formats.base import Format, Options, Parsed
from milepost.sim.formats.lines import Row, in_order
from milepost.sim.trace import SessionId, Turn

BLOCK = 16


def parse(rows: Iterable[Row], options: Options) -> Parsed:
    block = options.block or BLOCK
    found, notes = in_order(list(rows), lambda row: row.number("timestamp"))
    roots: dict[SessionId, SessionId] = {}
    numbers, turns = blocks.Numbers(), []
    count: dict[SessionId, int] = defaultdict(int)
    orphans = 0
    for row in found:
        chat, parent = row.id("chat_id"), row.id("parent_chat_id")
        if chat in roots:
            raise row.error(f"chat_id is {chat!r}: an earlier row has it too")
        orphans += parent not in (-1, "-1") and parent not in roots
        session = roots[chat] = roots.get(parent, chat)
        length = row.count("input_length", 1)
        ids = blocks.id_list(row, "hash_ids")
        full = blocks.check(row, len(ids), length, block)
        identity = numbers.blocks(ids, full, block)
        turn = Turn(session, count[session], length, row.count("output_length"), identity, row.number("timestamp"))
        count[session] += 1
        turns.append(turn)
    if orphans:
        notes.append(f"{orphans} rows continue chats that the file does not hold; each begins a session here")
    return Parsed(turns, notes)


FORMAT = Format("bailian", lambda record: "parent_chat_id" in record, parse, takes=frozenset({"block"}))
