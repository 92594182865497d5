"""True contents of a store, from a decoder that shares no code with the engine, to compare readers with.

The decoder is a module that the caller gives (`tests/golden/decode_store.py`): one message at a time, no column.
"""

import base64
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any

from support.arrow_rows import Row

from rmq_spark.store.model import QueueKey

_INNER_BATCH = 0x80
_MESSAGES_MAX = 7  # of a batch in the golden stores


class LogBytes:
    """The commit log of a store as stored on disk, record by record."""

    def __init__(self, store: Path, decoder: ModuleType) -> None:
        self._decoder = decoder
        self._segments: dict[int, bytes] = {}
        folder = store / "commitlog"
        for path in folder.iterdir() if folder.is_dir() else ():
            if len(path.name) == 20 and path.name.isdigit() and path.is_file():
                self._segments[int(path.name)] = path.read_bytes()

    @property
    def begin(self) -> int:
        """Return where the first segment begins that a broker would keep: an empty last one does not count."""
        return min((begin for begin, data in self._segments.items() if data), default=1 << 63)

    def record(self, place: int) -> Any | None:
        """Return the whole record at a physical offset, None if there is none."""
        begin = max((begin for begin in self._segments if begin <= place), default=None)
        if begin is None:
            return None
        try:
            return self._decoder.parse_record(self._segments[begin], place - begin, begin)
        except (self._decoder.NoRecordError, UnicodeDecodeError):
            return None


class Truth:
    """Contents of an undamaged store: `rows` by queue and queue offset, as a reader gives them."""

    def __init__(self, path: Path, decoder: ModuleType) -> None:
        self.path, self._decoder = path, decoder
        self.fill_size: int = decoder.FILL_SIZE
        self.rows: dict[QueueKey, dict[int, Row]] = {}
        for topic, queues in decoder.decode_store(path)["topics"].items():
            for queue_id, queue in queues.items():
                rows = [_plain(row) for row in queue["rows"]]
                self.rows[QueueKey(topic, int(queue_id))] = {row["queueOffset"]: row for row in rows}

    def log_of(self, store: Path) -> LogBytes:
        """Return the log of another store, or of a damaged copy of this one."""
        return LogBytes(store, self._decoder)

    @cached_property
    def log(self) -> LogBytes:
        """The store's own log."""
        return self.log_of(self.path)

    @cached_property
    def last_segment(self) -> int:
        """Where the last segment with a record begins."""
        log = self._decoder.walk_log(self.path)
        begins = [int(path.name) for path in (self.path / "commitlog").iterdir()]
        return max(begin for begin in begins if begin in log.records)

    @cached_property
    def last_row(self) -> Row:
        """The last message in the log."""
        return max(
            (row for rows in self.rows.values() for row in rows.values()), key=lambda row: row["commitLogOffset"]
        )

    @cached_property
    def last_time(self) -> int:
        """The newest store time, in microseconds."""
        return max(int(row["storeTimestamp"]) for rows in self.rows.values() for row in rows.values())

    def meanings(self, record: Any) -> list[Row]:
        """Return the possible rows of a record, for all bits of compression and batches in its sysFlag."""
        return [_plain(row) for part in self._parts(record) for row in self._rows_of(part)]

    def _rows_of(self, record: Any) -> Iterator[Row]:
        """Yield the record's row, if its body can be unpacked."""
        try:
            yield self._decoder.row_of(record)
        except Exception:  # any error of zlib, struct or the decoder's assertions: it is not a row
            return

    def _parts(self, record: Any) -> list[Any]:
        """Return the record as one message, and the messages in it if it may be taken for a batch."""
        found, parse = [record], self._decoder.parse_properties
        if record.sys_flag & _INNER_BATCH:
            for count in range(1, _MESSAGES_MAX + 1):
                text = b"INNER_NUM\x01%d\x02INNER_BASE\x01%d\x02" % (count, record.queue_offset)
                try:
                    found += self._decoder.inner_messages(record, parse(record.properties) | parse(text))
                except Exception:  # another count
                    continue
        return found


def protected(record: Any) -> tuple[Any, ...]:
    """Return the parts of a record that something vouches for: CRC, unit, place."""
    return record.size, record.topic, record.queue_id, record.queue_offset, record.physical_offset, record.body


def wrapped(time_ms: int) -> int:
    """Return a time in microseconds, in 64 bits."""
    return (time_ms * 1000 + 2**63) % 2**64 - 2**63


def _plain(row: Row) -> Row:
    """Return a row of the decoder as the reader gives it."""
    times = {name: wrapped(row[name]) for name in ("bornTimestamp", "storeTimestamp")}
    return {**row, **times, "body": base64.b64decode(row["body"])}
