"""What `rmq browse` reads: lists of topics, queues and groups, one page of messages, and searches that end.

Each method reads a bounded amount, so a topic of any size opens at once. None of them changes anything. A reader is for
one thread at a time, so callers wait for the end of a method before they call the next one.
"""

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import datetime
from typing import Any, NamedTuple

import rmq_spark
from rmq_spark.command.output import cell, printable, rows_of
from rmq_spark.command.place import Place
from rmq_spark.command.queue_views import describe, look_at
from rmq_spark.store.model import QueueBounds, QueueKey
from rmq_spark.store.names import is_system_topic

PAGE_MESSAGES = 50
SEARCHED_MESSAGES = 5_000  # by one search for a text
FOUND_MESSAGES = 100  # of one search that are listed
SHOWN_CHARS = 20_000  # of a body
_PREVIEW_CHARS = 200
_COLUMNS = ("queueOffset", "storeTimestamp", "tags", "keys", "body")
TEXT, JSON, HEX = "text", "JSON", "hex"
_JSON_TOKENS = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"|[][{},:]|[^][{},:"\s]+')


class TopicRow(NamedTuple):
    """A topic. `problem` is why it, or one of its queues, cannot be read."""

    name: str
    queues: int
    messages: int
    is_system: bool
    problem: str | None


class QueueRow(NamedTuple):
    """A queue. `bounds` is None if it cannot be read, and then `problem` is why."""

    queue: QueueKey
    bounds: QueueBounds | None
    problem: str | None


class MessageRow(NamedTuple):
    """A message in a list. `preview` is the beginning of its body on one line."""

    queue: QueueKey
    offset: int
    stored: datetime | str | None
    tags: str
    keys: str
    preview: str


class Found(NamedTuple):
    """The messages that a search has found: the first `FOUND_MESSAGES` of `total`."""

    rows: list[MessageRow]
    total: int


class TextSearch(NamedTuple):
    """The outcome of a search for a text: the first message that has it or None, and the offset to continue from."""

    found: int | None
    next_offset: int
    is_end: bool


class Pages:
    """The pages of a place."""

    def __init__(self, place: Place, reader: Any) -> None:
        self._place, self._reader = place, reader

    @property
    def name(self) -> str:
        """The folder of the store, or the name servers."""
        return str(self._place.path or self._place.cluster["name_server"])

    @property
    def is_cluster(self) -> bool:
        """Whether the place is a cluster."""
        return self._place.is_cluster

    def topics(self) -> list[TopicRow]:
        """Return all topics, those of users first."""
        self._reader.refresh()
        rows = list(self._cluster_topics() if self.is_cluster else self._store_topics())
        return sorted(rows, key=lambda row: (row.is_system, row.name))

    def _store_topics(self) -> Iterator[TopicRow]:
        for name in self._reader.topics():
            try:
                found = self._store_queues(name)
            except rmq_spark.NotFoundError as error:  # a light message queue, or a topic that was deleted meanwhile
                yield TopicRow(name, 0, 0, True, str(error))
                continue
            problems = [row.problem for row in found if row.problem]
            yield TopicRow(
                name, len(found), sum(map(_count, found)), is_system_topic(name), problems[0] if problems else None
            )

    def _cluster_topics(self) -> Iterator[TopicRow]:
        for topic in look_at(self._reader, self._reader.topics()):
            problem = topic.problem or next(iter(topic.problems.values()), None)
            yield TopicRow(topic.name, len(topic.answers), topic.messages, is_system_topic(topic.name), problem)

    def queues(self, topic: str) -> list[QueueRow]:
        """Return the queues of a topic. Raises NotFoundError if it does not exist any more."""
        self._reader.refresh()
        if not self.is_cluster:
            return self._store_queues(topic)
        answers = self._reader.answers(self._reader.queues(topic))
        return [
            QueueRow(queue, answer if isinstance(answer, QueueBounds) else None, describe(answer))
            for queue, answer in answers.items()
        ]

    def _store_queues(self, topic: str) -> list[QueueRow]:
        rows = []
        for queue in self._reader.queues(topic):
            try:
                rows.append(QueueRow(queue, self._reader.bounds(queue), None))
            except rmq_spark.StoreError as error:
                rows.append(QueueRow(queue, None, str(error)))
        return rows

    def bounds(self, queue: QueueKey) -> QueueBounds:
        """Return the offsets that a queue has now. Raises the error of a queue that cannot be read."""
        self._reader.refresh()
        found: QueueBounds = self._reader.bounds(queue)
        return found

    def messages(self, queue: QueueKey, begin: int, end: int) -> list[MessageRow]:
        """Return the messages with queue offsets [begin, end), at most `PAGE_MESSAGES` of them."""
        rows = []
        for batch in self._reader.read(queue, begin, min(end, begin + PAGE_MESSAGES), _COLUMNS):
            rows += [_message_row(queue, row) for row in rows_of(batch)]
        return rows

    def message(self, queue: QueueKey, offset: int) -> Any:
        """Return one message with all columns. Raises OffsetRangeError if it has expired."""
        return self._reader.message(queue, offset)

    def offset_at(self, queue: QueueKey, time_ms: int) -> int:
        """Return the offset of the first message stored at or after a time (ms since the epoch), or the queue's end."""
        found: int = self._reader.offset_at_time(queue, time_ms)
        return found

    def find_key(self, topics: Sequence[str], key: str) -> Found:
        """Return the messages of topics with a key, by RocketMQ's index."""
        positions: list[tuple[QueueKey, int]] = []
        for topic in topics:
            with suppress(rmq_spark.NotFoundError):
                positions += self._reader.find_key(topic, key)
        return self._rows_at(positions)

    def find_id(self, topics: Sequence[str], message_id: str) -> Found:
        """Return the messages of topics with an id, a msgId or an offsetMsgId."""
        return self._rows_at(self._reader.find_message_id(message_id, list(topics)))

    def _rows_at(self, positions: Sequence[tuple[QueueKey, int]]) -> Found:
        rows: list[MessageRow] = []
        for queue, offset in positions[:FOUND_MESSAGES]:
            with suppress(rmq_spark.OffsetRangeError):  # it has expired
                rows += self.messages(queue, offset, offset + 1)
        return Found(rows, len(positions) if len(positions) > FOUND_MESSAGES else len(rows))

    def find_text(self, queue: QueueKey, text: str, begin: int) -> TextSearch:
        """Search the bodies, tags and keys of a queue for a text, from an offset: at most `SEARCHED_MESSAGES` messages.

        Upper and lower case are the same.
        """
        bounds = self.bounds(queue)
        offset, sought = max(begin, bounds.min_offset), text.lower()
        end = min(offset + SEARCHED_MESSAGES, bounds.max_offset)
        while offset < end:
            until = min(offset + PAGE_MESSAGES, end)
            for batch in self._reader.read(queue, offset, until, _COLUMNS):
                for row in rows_of(batch):
                    texts = (row["tags"] or "", row["keys"] or "", (row["body"] or b"").decode(errors="replace"))
                    if any(sought in one.lower() for one in texts):
                        return TextSearch(row["queueOffset"], row["queueOffset"] + 1, False)
            offset = until
        return TextSearch(None, offset, offset >= bounds.max_offset)

    def lag(self, group: str | None = None) -> list[dict[str, Any]]:
        """Return the lag of one group or of all groups, queue by queue, as rows of `rmq_spark.group_lag`."""
        return rows_of(self._reader.lag(group))


def _count(row: QueueRow) -> int:
    return 0 if row.bounds is None else row.bounds.max_offset - row.bounds.min_offset


def _message_row(queue: QueueKey, row: dict[str, Any]) -> MessageRow:
    body = (row["body"] or b"")[:_PREVIEW_CHARS]
    return MessageRow(
        queue,
        row["queueOffset"],
        row["storeTimestamp"],
        printable(row["tags"] or ""),
        printable(row["keys"] or ""),
        printable(body.decode(errors="ignore")) if _is_text(body) else cell("", body),
    )


def _is_text(body: bytes) -> bool:
    """Return whether the bytes are the beginning of a text in UTF-8, which may end inside of a character."""
    try:
        body.decode()
    except UnicodeDecodeError as error:
        return error.reason == "unexpected end of data" and error.start > 0
    return True


def best_form(body: bytes) -> str:
    """Return the form in which a body is shown first: JSON for an object or a list, text for UTF-8, else hex."""
    try:
        text = body.decode()
    except UnicodeDecodeError:
        return HEX
    return JSON if text.lstrip()[:1] in ("{", "[") and _is_json(text) else TEXT


def _is_json(text: str) -> bool:
    """Return whether a text is JSON that nests less deeply than Python's parser can read."""
    try:
        json.loads(text, parse_int=str, parse_float=str)  # a number may have any length
    except (ValueError, RecursionError):
        return False
    return True


def body_lines(body: bytes, form: str, row_bytes: int) -> list[str]:
    """Return a body as lines, in one of the forms. A body that does not have the form is shown as text.

    JSON gets new lines and spaces, and everything else in it is as it was written: all digits of numbers, and names
    that occur twice. Control characters are escaped. `row_bytes` is the number of bytes in a line of hex. After
    `SHOWN_CHARS` characters the rest is left out, and the last line says so.
    """
    if form == HEX:
        kept = body[: SHOWN_CHARS // 4]
        lines = [_hex_line(kept, at, row_bytes) for at in range(0, len(kept), row_bytes)]
        return [*lines, *_left_out(len(body) - len(kept), "bytes")]
    text = body.decode(errors="replace")
    shown, rest = _indent(text) if form == JSON and _is_json(text) else (text, 0)
    lines = [printable(line.replace("\t", "    ")) for line in shown[:SHOWN_CHARS].split("\n")]
    return [*lines, *_left_out(len(shown) + rest - SHOWN_CHARS, "characters")]


def _indent(text: str) -> tuple[str, int]:
    """Return JSON with a line for each member, up to `SHOWN_CHARS` characters or more, and the length of the rest."""
    parts: list[str] = []
    size, depth, before = 0, 0, ""
    for found in _JSON_TOKENS.finditer(text):
        token = found[0]
        if token in ("]", "}"):
            depth -= 1
        if before in ("[", "{", ",") or token in ("]", "}"):
            is_empty = before in ("[", "{") and token in ("]", "}")
            parts.append("" if is_empty else "\n" + "  " * depth)
            size += len(parts[-1])
        parts.append(": " if token == ":" else _with_characters(token))
        size += len(parts[-1])
        if size > SHOWN_CHARS:
            return "".join(parts), len(text) - found.end()
        if token in ("[", "{"):
            depth += 1
        before = token
    return "".join(parts), 0


def _with_characters(token: str) -> str:
    """Return a token of JSON with characters in place of their numbers, such as "é" for "\\u00e9"."""
    return json.dumps(json.loads(token), ensure_ascii=False) if "\\u" in token else token


def _hex_line(data: bytes, at: int, row_bytes: int) -> str:
    row = data[at : at + row_bytes]
    shown = "".join(chr(one) if 32 <= one < 127 else "." for one in row)
    return f"{at:06x}  {row.hex(' '):<{row_bytes * 3 - 1}}  {shown}"


def _left_out(count: int, unit: str) -> list[str]:
    return [f"… {count:,} more {unit}; `rmq get --json` prints all"] if count > 0 else []
