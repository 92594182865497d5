"""One decoded message, with its body as text, JSON or hex; and samples of consume-queue entries.

A few thousand entries that are evenly spaced describe a queue of millions of messages well enough for a plot. They take
20 bytes each. A small queue is read completely. `EntrySample.is_complete` is False if results are estimates.
"""

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rmq_spark.store.errors import DamageError
from rmq_spark.store.format.columns import COLUMNS
from rmq_spark.store.format.record import (
    BORN_HOST_V6,
    MAX_RECORD_BYTES,
    MIN_RECORD_BYTES,
    RECORD_HEAD,
    RECORD_HEAD_BORN_V6,
)
from rmq_spark.store.format.record_headers import gather
from rmq_spark.store.log.commit_log import CommitLog
from rmq_spark.store.log.consume_queue import ConsumeQueue, Entries
from rmq_spark.store.log.segments import SegmentRun
from rmq_spark.store.model import QueueKey
from rmq_spark.store.view import summary_html
from rmq_spark.store.view.summary import as_pandas
from rmq_spark.store.view.summary_text import bytes_text, time_text

SHOWN_CHARS = 4000  # characters of a body that are shown
SHOWN_HEX_BYTES = 512  # bytes of a body that are shown as a hex dump
_HEX_ROW_BYTES = 16
_JSON_CHARS = 1 << 20  # longer JSON is not indented, but shown as text
# Control characters. Binary data contains them and text does not. Terminals interpret them, so they are not printed.
_CONTROLS = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")
_LINE_BREAKS_TOO = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
_JSON_TOKENS = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\],:]|[^\s{}\[\],:"]+')


@dataclass(frozen=True, slots=True, repr=False)
class Message:
    """One message, with all of its fields. `body` is decompressed, times are ms since the epoch, hosts are `ip:port`.

    `topic` is the topic to which the message was sent, and `physical_topic` the topic in which it is stored. They
    differ if the message is retried. `broker_name` is "" in a store directory. `table` has the message as one row, with
    all columns of the data source; the column brokerName is only there for a message of a cluster.
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
    broker_name: str = ""

    def text(self) -> str:
        """Return the body as text. Raises UnicodeDecodeError if the body is not UTF-8."""
        return self.body.decode()

    def json(self) -> Any:
        """Return the value of a JSON body. Raises ValueError if the body is not JSON."""
        return json.loads(self.body)

    def hex(self, max_bytes: int | None = None) -> str:
        """Return the body, or its first `max_bytes`, as a hex dump.

        Each line has a position, 16 bytes in hex, and the same bytes as ASCII characters.
        """
        return hex_dump(self.body[:max_bytes])

    def to_arrow(self) -> pa.Table:
        """Return a table with the message as its only row, with all columns of the data source."""
        return self.table

    def to_pandas(self) -> Any:
        """Return the table as a pandas DataFrame. Raises ModuleNotFoundError if pandas is not installed."""
        return as_pandas(self.table)

    def readable_body(self) -> tuple[str, str, int]:
        """Return how to show the body: its kind, the first part of it as text, and how much is left out.

        The kind is "JSON", "text", "bytes", or "nothing" if the body is empty. JSON is indented, and its numbers and
        names are not changed. Bytes are shown as a hex dump. The part that is left out is counted in characters, or in
        bytes if the kind is "bytes".
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
            with suppress(ValueError, RecursionError):  # raised if the text is not JSON
                json.loads(text)
                text, kind = _indented(text), "JSON"
        return kind, text[:SHOWN_CHARS], max(0, len(text) - SHOWN_CHARS)

    def __repr__(self) -> str:
        kind, text, left = self.readable_body()
        named = "".join(f"\n  {_in_a_line(name)} = {_in_a_line(value)}" for name, value in self.properties.items())
        more = f"\n… and {left:,} more" if left else ""
        return (
            f"message {self.message_id} of {self.topic}\n"
            f"in {QueueKey(self.physical_topic, self.queue_id, self.broker_name)}, queue offset {self.queue_offset}, "
            f"physical offset {self.commit_log_offset}\n"
            f"born {time_text(self.born_ms)} UTC, stored {time_text(self.stored_ms)} UTC\nproperties:{named}\n"
            f"body, {bytes_text(len(self.body))} of {kind}:\n{text}{more}"
        )

    def _repr_html_(self) -> str:
        return summary_html.message_html(self)


def message_of(table: pa.Table) -> Message:
    """Return the message in a table, which must have one row and all columns of a record; then maybe brokerName."""
    assert table.num_rows == 1, table.num_rows
    assert table.column_names[: len(COLUMNS)] == list(COLUMNS), table.column_names
    # Read times as integers, because a producer may write any number, also one that no datetime can represent.
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
        broker_name=row.get("brokerName", ""),
    )


def _indented(text: str) -> str:
    """Return a JSON text with indentation. Numbers keep their digits, and duplicate names are kept."""
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
    """Return a JSON string, with its quotes, in which escaped characters are decoded.

    If the decoded text has control characters or surrogates, returns `quoted` unchanged.
    """
    text = json.dumps(json.loads(quoted), ensure_ascii=False)
    is_text = not _CONTROLS.search(text) and not any("\ud800" <= char <= "\udfff" for char in text)
    return text if is_text else quoted


def _in_a_line(text: str) -> str:
    """Return a text in which line breaks and control characters are escaped."""
    return _LINE_BREAKS_TOO.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def hex_dump(data: bytes, first: int = 0) -> str:
    """Return a hex dump. Each line has a position, 16 bytes in hex, and the same bytes as ASCII characters.

    `first` is the position of the first byte.
    """
    lines = []
    for at in range(0, len(data), _HEX_ROW_BYTES):
        part = data[at : at + _HEX_ROW_BYTES]
        shown = "".join(chr(byte) if 32 <= byte < 127 else "." for byte in part)
        lines.append(f"{first + at:08x}  {part.hex(' '):<{3 * _HEX_ROW_BYTES - 1}}  {shown}")
    return "\n".join(lines)


Numbers = NDArray[np.int64]
NO_TIME = -1  # the time of an entry if the record at its physical offset is not the entry's record
_CHUNK_ENTRIES = 1 << 20  # entries that are read at once: 20 MiB


@dataclass(frozen=True, slots=True)
class SampleSize:
    """The size of a sample of a queue's entries.

    If the queue has at most `whole_count` entries, the sample has all of them. Otherwise, it has `run_count` runs of
    `run_entries` consecutive entries, and the last entry.
    """

    whole_count: int
    run_count: int
    run_entries: int


@dataclass(frozen=True, slots=True)
class EntrySample:
    """A sample of a queue's entries, in the order of the queue. It includes the first and the last entry.

    `messages` has for each entry the number of messages that the entry represents. Their sum is the number of messages
    in the queue. `is_complete` is True if the sample has all entries of the queue.
    """

    entries: Entries
    messages: NDArray[np.float64]
    is_complete: bool

    def record_bytes(self, among: NDArray[np.bool_] | None = None) -> int:
        """Return the number of bytes of all records of the queue. It is an estimate unless the sample is complete.

        `among` is a mask of entries. If it is given, the records of the other entries are not counted.
        """
        chosen = np.ones(len(self.entries), np.bool_) if among is None else among
        sizes = np.where(chosen, self.entries.sizes, 0)
        if self.is_complete:
            return int(sizes.sum())
        counts = self.entries.message_counts
        return round(float((sizes * self.messages / (1 if counts is None else counts)).sum()))


def sample_entries(queue: ConsumeQueue, first: int, end: int, max_offset: int, size: SampleSize) -> EntrySample:
    """Return a sample of the entries [first, end) of a queue, by number.

    `max_offset` is the queue offset that the next message of the queue will get.
    """
    count = end - first
    if count <= max(size.whole_count, size.run_count * size.run_entries + 1):
        entries = _joined([queue.read(at, min(at + _CHUNK_ENTRIES, end)) for at in range(first, end, _CHUNK_ENTRIES)])
        counts = entries.message_counts
        return EntrySample(entries, np.ones(len(entries)) if counts is None else counts.astype(np.float64), True)
    # The last entry is a run of its own, so that the times of the first and the last message are known.
    begins = [first + at * (count - 1) // size.run_count for at in range(size.run_count)]
    if count <= _CHUNK_ENTRIES:  # one large read is faster than hundreds of small ones
        everything = queue.read(first, end)
        runs = [everything.part(begin - first, begin - first + size.run_entries) for begin in begins]
        runs.append(everything.part(len(everything) - 1, len(everything)))
    else:
        runs = [queue.read(begin, begin + size.run_entries) for begin in begins] + [queue.read(end - 1, end)]
    lengths = np.array([len(run) for run in runs])
    offsets = np.array([*(run.queue_offsets[0] for run in runs if len(run)), max_offset], np.int64)
    weights = np.diff(offsets) / lengths[lengths > 0]
    return EntrySample(_joined(runs), np.repeat(weights, lengths[lengths > 0]), False)


@dataclass(frozen=True, slots=True)
class EntryFaults:
    """Two masks of invalid entries. They are found with the list of segments; no records are read."""

    wrong_size: NDArray[np.bool_]  # the size is impossible for a record, or exceeds the end of the record's segment
    without_segment: NDArray[np.bool_]  # the record is in a missing segment between two existing segments

    @property
    def good(self) -> NDArray[np.bool_]:
        """A mask of the entries that are valid."""
        return ~(self.wrong_size | self.without_segment)


def find_faults(run: SegmentRun, offsets: Numbers, sizes: Numbers) -> EntryFaults:
    """Return which entries are invalid. `offsets` and `sizes` are the physical offsets and sizes of their records.

    An entry for a record before or after all segments is treated as valid, because it may be expired or new.
    """
    if not run.segments:
        return EntryFaults((sizes < MIN_RECORD_BYTES) | (sizes > MAX_RECORD_BYTES), np.zeros(len(offsets), np.bool_))
    begins = np.array([segment.begin for segment in run.segments], np.int64)
    at = np.searchsorted(begins, offsets, side="right") - 1
    ends = begins[at] + run.size
    is_within = (offsets >= run.begin) & (offsets < run.end)
    without_segment = is_within & (offsets >= ends)
    crosses = is_within & ~without_segment & (sizes > ends - offsets)
    return EntryFaults((sizes < MIN_RECORD_BYTES) | (sizes > MAX_RECORD_BYTES) | crosses, without_segment)


def header_times(log: CommitLog, offsets: Numbers, sizes: Numbers) -> tuple[Numbers, Numbers]:
    """Return two arrays with the born times and the store times (ms) of records. Only their headers are read.

    `offsets` are the physical offsets of the records, in any order, and `sizes` are their sizes. A time is NO_TIME if
    the log has no such record at that offset. Raises StoreChangedError if a file is missing.
    """
    offsets, first, which = np.unique(
        offsets, return_index=True, return_inverse=True
    )  # an offset may occur twice: the first record of a queue may also be its last
    born, stored = _unique_header_times(log, offsets, sizes[first])
    return born[which], stored[which]


def _unique_header_times(log: CommitLog, offsets: Numbers, sizes: Numbers) -> tuple[Numbers, Numbers]:
    """Return what `header_times` returns. The offsets must be sorted and distinct."""
    born, stored = np.full(len(offsets), NO_TIME, np.int64), np.full(len(offsets), NO_TIME, np.int64)
    order = np.arange(len(offsets))
    order = order[find_faults(log.segments, offsets, sizes).good & (offsets >= log.segments.begin)]
    order = order[offsets[order] + sizes[order] <= log.segments.end]
    keep = np.append(True, offsets[order][1:] >= (offsets[order] + sizes[order])[:-1])[: len(order)]
    order = order[keep]  # a record that overlaps the previous one is damaged, so it is not read
    try:
        for stretch in log.stretches(offsets[order], sizes[order]):
            chosen = order[stretch.first : stretch.last]
            headers = gather(stretch.buffer, stretch.positions, RECORD_HEAD)
            good = (headers["physical_offset"] == offsets[chosen]) & (headers["total_size"] == sizes[chosen])
            times = headers["store_timestamp"].astype(np.int64)
            long = np.flatnonzero(good & (headers["sys_flag"] & BORN_HOST_V6 != 0))
            if len(long):
                times[long] = gather(stretch.buffer, stretch.positions[long], RECORD_HEAD_BORN_V6)["store_timestamp"]
            stretch.check()
            stored[chosen[good]] = times[good]
            born[chosen[good]] = headers["born_timestamp"][good]
    except DamageError:
        pass  # an entry has an impossible size; records that were not read yet keep NO_TIME
    return born, stored


def _joined(parts: Sequence[Entries]) -> Entries:
    """Return the entries of several reads as one value."""
    parts = [part for part in parts if len(part)]
    if len(parts) == 1:
        return parts[0]
    none = np.zeros(0, np.int64)
    if not parts:
        return Entries(none, none, none, none, None)
    counts = [part.message_counts for part in parts]
    return Entries(
        np.concatenate([part.physical_offsets for part in parts]),
        np.concatenate([part.sizes for part in parts]),
        np.concatenate([part.tags_codes for part in parts]),
        np.concatenate([part.queue_offsets for part in parts]),
        None if counts[0] is None else np.concatenate([part for part in counts if part is not None]),
    )
