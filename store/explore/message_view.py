"""One message as a value: where it lies, all of its properties, and its body as text, JSON or hex."""

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from rmq_spark.store.explore import summary_html
from rmq_spark.store.explore.summary import as_pandas
from rmq_spark.store.explore.summary_text import bytes_text, time_text
from rmq_spark.store.format.columns import COLUMNS

SHOWN_CHARS = 4000  # of a body
SHOWN_HEX_BYTES = 512
_HEX_ROW_BYTES = 16
_JSON_CHARS = 1 << 20  # longer ones are shown as the text that they are
# What no text has but bytes do, and what a terminal would obey.
_CONTROLS = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")
_LINE_BREAKS_TOO = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
_JSON_TOKENS = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\],:]|[^\s{}\[\],:"]+')


@dataclass(frozen=True, slots=True, repr=False)
class Message:
    """One message, decoded whole. Times are ms since the epoch, hosts `ip:port`; the body is decompressed.

    `topic` is the one that it was sent to, `physical_topic` the one in which it lies: those of a retry differ.
    `to_arrow` gives the same as a row with all columns of the data source.
    """

    topic: str
    physical_topic: str
    queue_id: int
    queue_offset: int
    commit_log_offset: int
    message_id: str
    offset_message_id: str
    tags: str | None
    keys: str | None
    properties: Mapping[str, str]
    body: bytes
    born_ms: int
    stored_ms: int
    born_host: str
    store_host: str
    reconsume_times: int
    flag: int
    sys_flag: int
    table: pa.Table

    def text(self) -> str:
        """Return the body as text. Raises UnicodeDecodeError if it is no UTF-8."""
        return self.body.decode()

    def json(self) -> Any:
        """Return what the body says as JSON. Raises ValueError if it is none."""
        return json.loads(self.body)

    def hex(self, max_bytes: int | None = None) -> str:
        """Return the body, or so many bytes of it, as a hex dump: position, 16 bytes, and what is ASCII among them."""
        return hex_dump(self.body[:max_bytes])

    def to_arrow(self) -> pa.Table:
        """Return the message as a table of one row."""
        return self.table

    def to_pandas(self) -> Any:
        """Return the same as a pandas DataFrame. Raises ModuleNotFoundError where pandas is not installed."""
        return as_pandas(self.table)

    def readable_body(self) -> tuple[str, str, int]:
        """Return what kind the body is (JSON, text, bytes), as much of it as is to be read, and how much more there is.

        JSON is indented, its numbers and names are as they were sent; bytes are a hex dump. What is left out is counted
        in characters, of bytes in bytes.
        """
        if not self.body:
            return "nothing", "", 0
        try:
            text = self.body.decode()
        except UnicodeDecodeError:
            text = "\0"
        if _CONTROLS.search(text):
            return "bytes", self.hex(SHOWN_HEX_BYTES), max(0, len(self.body) - SHOWN_HEX_BYTES)
        kind = "text"
        if text.lstrip()[:1] in ("{", "[") and len(text) <= _JSON_CHARS:
            with suppress(ValueError, RecursionError):  # it may only begin like it
                json.loads(text)
                text, kind = _indented(text), "JSON"
        return kind, text[:SHOWN_CHARS], max(0, len(text) - SHOWN_CHARS)

    def __repr__(self) -> str:
        kind, text, left = self.readable_body()
        named = "".join(f"\n  {_in_a_line(name)} = {_in_a_line(value)}" for name, value in self.properties.items())
        more = f"\n… and {left:,} more" if left else ""
        return (
            f"message {self.message_id} of {self.topic}\n"
            f"in {self.physical_topic}/{self.queue_id}, queue offset {self.queue_offset}, "
            f"physical offset {self.commit_log_offset}\n"
            f"born {time_text(self.born_ms)} UTC, stored {time_text(self.stored_ms)} UTC\nproperties:{named}\n"
            f"body, {bytes_text(len(self.body))} of {kind}:\n{text}{more}"
        )

    def _repr_html_(self) -> str:
        return summary_html.message_html(self)


def message_of(table: pa.Table) -> Message:
    """Return the message of a table with one row and every column of the data source."""
    assert table.num_rows == 1, table.num_rows
    assert table.column_names == list(COLUMNS), table.column_names
    # Times as numbers: a producer may write any, and a date has no room for all.
    row = table.drop_columns(["bornTimestamp", "storeTimestamp"]).to_pylist()[0]
    born_us, stored_us = (table[name].cast(pa.int64())[0].as_py() for name in ("bornTimestamp", "storeTimestamp"))
    return Message(
        topic=row["topic"],
        physical_topic=row["physicalTopic"],
        queue_id=row["queueId"],
        queue_offset=row["queueOffset"],
        commit_log_offset=row["commitLogOffset"],
        message_id=row["msgId"],
        offset_message_id=row["offsetMsgId"],
        tags=row["tags"],
        keys=row["keys"],
        properties=dict(row["properties"] or []),
        body=row["body"],
        born_ms=born_us // 1000,
        stored_ms=stored_us // 1000,
        born_host=row["bornHost"],
        store_host=row["storeHost"],
        reconsume_times=row["reconsumeTimes"],
        flag=row["flag"],
        sys_flag=row["sysFlag"],
        table=table,
    )


def _indented(text: str) -> str:
    """Return JSON in lines and indented. Nothing is computed: a number keeps its digits, a name may be there twice."""
    parts: list[str] = []
    depth, last = 0, ""
    for token in _JSON_TOKENS.findall(text):
        if token in ("}", "]"):
            depth -= 1
        if (
            (last in ("{", "[") and token not in ("}", "]"))
            or last == ","
            or (token in ("}", "]") and last not in "{[")
        ):
            parts.append("\n" + "  " * depth)
        parts.append(_readable(token) if token[0] == '"' else token)
        if token == ":":
            parts.append(" ")
        elif token in ("{", "["):
            depth += 1
        last = token
    return "".join(parts)


def _readable(quoted: str) -> str:
    """Return a string of JSON with the characters that it says by number, but for those that no text has."""
    text = json.dumps(json.loads(quoted), ensure_ascii=False)
    is_text = not _CONTROLS.search(text) and not any("\ud800" <= char <= "\udfff" for char in text)
    return text if is_text else quoted


def _in_a_line(text: str) -> str:
    """Return a text with what would break a line, or what a terminal obeys, written out."""
    return _LINE_BREAKS_TOO.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def hex_dump(data: bytes, first: int = 0) -> str:
    """Return bytes as lines of 16: where they stand, counted from `first`, in hex, and what of them is ASCII."""
    lines = []
    for at in range(0, len(data), _HEX_ROW_BYTES):
        part = data[at : at + _HEX_ROW_BYTES]
        shown = "".join(chr(byte) if 32 <= byte < 127 else "." for byte in part)
        lines.append(f"{first + at:08x}  {part.hex(' '):<{3 * _HEX_ROW_BYTES - 1}}  {shown}")
    return "\n".join(lines)
