"""Encoded messages that wait to be sent: in memory, and beyond a limit in a temporary file.

A task encodes all of its rows before it sends the first one, so that a row that is refused stops the task before
anything was sent. The items of a queue stay in the order in which they were added.
"""

import tempfile
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import IO

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rmq_spark.store.errors import DiskFullError, StoreError
from rmq_spark.store.format.batch_items import NOT_SOLO, EncodedItems
from rmq_spark.store.format.byte_ranges import Bytes, of_one_size, take_ranges
from rmq_spark.store.model import QueueKey

MEMORY_BYTES = 64 << 20  # items in memory before the file is used


@dataclass(slots=True)
class ItemRun:
    """Adjacent items of one queue. They are `data`, or if that is None the bytes of the file from `position` on.

    `sizes` are the sizes of the items (bytes). `solo` is as in `EncodedItems`. `rows` are the numbers of the messages,
    in the order in which they were added, and `is_free` says that any queue of the topic may take all of them.
    """

    rows: NDArray[np.int64]
    sizes: NDArray[np.int64]
    solo: NDArray[np.int32] | None
    is_free: bool
    data: memoryview | None
    position: int

    def cut(self, count: int) -> tuple["ItemRun", "ItemRun | None"]:
        """Return the first `count` items, and the others, None if there are none."""
        if count == len(self.rows):
            return self, None
        at = int(self.sizes[:count].sum())
        parts = []
        for some, begin, end in ((slice(0, count), 0, at), (slice(count, None), at, None)):
            parts.append(
                ItemRun(
                    self.rows[some],
                    self.sizes[some],
                    None if self.solo is None else self.solo[some],
                    self.is_free,
                    None if self.data is None else self.data[begin:end],
                    self.position + begin,
                )
            )
        return parts[0], parts[1]


class MessageSpool:
    """The items of one sender, by queue, and the ids of the messages if it `keeps_ids`. Use it in `with`."""

    def __init__(self, *, keeps_ids: bool = False, memory_bytes: int = MEMORY_BYTES) -> None:
        self.runs: dict[QueueKey, deque[ItemRun]] = {}
        self.count = 0  # messages
        self.bytes = 0  # their items
        self._ids: list[Bytes] | None = [] if keeps_ids else None
        self._memory_bytes = memory_bytes
        self._file: IO[bytes] | None = None
        self._file_bytes = 0

    def __enter__(self) -> "MessageSpool":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def add(self, items: EncodedItems) -> None:
        """Add messages. Raises DiskFullError if the temporary file has no room."""
        for queue, run in self._sort(items):
            self.runs.setdefault(queue, deque()).append(run)
        self.count += len(items.sizes)
        if self._ids is not None:
            self._ids.append(items.ids)

    def add_one(self, queue: QueueKey, item: bytes, message_id: str, *, is_free: bool) -> None:
        """Add one message, whose item stays in memory. `is_free` says that any queue of the topic may take it."""
        rows, sizes = np.array([self.count]), np.array([len(item)])
        self.runs.setdefault(queue, deque()).append(ItemRun(rows, sizes, None, is_free, memoryview(item), 0))
        self.count += 1
        if self._ids is not None:
            self._ids.append(np.frombuffer(message_id.encode(), np.uint8).reshape(1, -1))

    def read(self, run: ItemRun) -> bytes | memoryview:
        """Return the bytes of the items of a run. Raises StoreError if the temporary file cannot be read."""
        if run.data is not None:
            return run.data
        assert self._file is not None, run
        size = int(run.sizes.sum())
        try:
            self._file.seek(run.position)
            data = self._file.read(size)
        except OSError as error:
            raise StoreError(
                f"messages to send cannot be read from the temporary file: {error.strerror}; expected {size} bytes at "
                f"position {run.position}. Check the disk of the temporary folder, and send the messages again."
            ) from None
        assert len(data) == size, (len(data), size)
        return data

    def ids(self, rows: NDArray[np.int64]) -> tuple[str, ...]:
        """Return the ids of the messages with these numbers. Return () if the spool does not keep ids."""
        if not self._ids:
            return ()
        every = self._ids[0] if len(self._ids) == 1 else np.concatenate(self._ids)
        return tuple(bytes(every[row]).decode() for row in rows.tolist())

    def id_column(self) -> pa.StringArray:
        """Return the ids of all messages, which the spool must keep."""
        assert self._ids is not None, "the spool keeps no ids"
        ids = np.ascontiguousarray(np.concatenate(self._ids) if self._ids else np.zeros((0, 1), np.uint8))
        return of_one_size(ids.view(f"V{ids.shape[1]}")[:, 0]).cast(pa.string())

    def close(self) -> None:
        """Delete the temporary file. A second call does nothing."""
        file, self._file = self._file, None
        self.runs.clear()
        if file is not None:
            with suppress(OSError):  # bytes that were buffered on a full disk; the file is deleted nevertheless
                file.close()

    def _sort(self, items: EncodedItems) -> Iterator[tuple[QueueKey, ItemRun]]:
        """Yield the run of each queue, whose items are stored next to each other."""
        numbers, sizes = items.queues.numbers, items.sizes
        data, ends = items.data, np.cumsum(sizes)
        order = np.arange(len(numbers))
        if (numbers[1:] < numbers[:-1]).any():
            order = np.argsort(numbers, kind="stable")
            begins = ends - sizes
            gathered = take_ranges(data, begins[order], ends[order])
            _, offsets, buffer = gathered.buffers()
            bounds = np.frombuffer(offsets, np.int32, len(order) + 1)
            data, ends = np.frombuffer(buffer, np.uint8, int(bounds[-1])), bounds[1:].astype(np.int64)
        base, stored = self._store(data)
        counts = np.bincount(numbers, minlength=len(items.queues.queues))
        last = 0
        for queue, end in zip(items.queues.queues, np.cumsum(counts).tolist(), strict=True):
            rows = order[last:end]
            begin_byte, end_byte = int(ends[last - 1]) if last else 0, int(ends[end - 1])
            solo = None if items.solo is None else items.solo[rows]
            yield (
                queue,
                ItemRun(
                    rows + self.count,
                    sizes[rows],
                    None if solo is None or (solo == NOT_SOLO).all() else solo,
                    bool(items.queues.are_free[rows].all()),
                    None if stored is None else stored[begin_byte:end_byte],
                    base + begin_byte,
                ),
            )
            last = end

    def _store(self, data: Bytes) -> tuple[int, memoryview | None]:
        """Store bytes. Return their position in the file, or 0 and the bytes if they are in memory."""
        self.bytes += len(data)
        if self.bytes <= self._memory_bytes:
            return 0, memoryview(pa.py_buffer(data)).cast("B")
        begin = self._file_bytes
        try:
            if self._file is None:
                self._file = tempfile.TemporaryFile(prefix="rmq-spark-")  # noqa: SIM115 - closed by `close`
            self._file.seek(begin)
            self._file.write(pa.py_buffer(data))
            self._file.flush()
        except OSError as error:
            folder = "" if self._file is None else f" {tempfile.gettempdir()}"  # else it may be that there is none
            raise DiskFullError(
                f"messages to send cannot be kept in the temporary folder{folder}: {error.strerror}; expected room for "
                f"about {self.bytes} bytes. Nothing was sent. Free space there, set TMPDIR to another folder, or use "
                "more partitions."
            ) from None
        self._file_bytes += len(data)
        return begin, None
