"""A store reader with summaries of the whole store, of one topic, of one message, and of a group's lag.

Summaries are computed from consume-queue entries and a few record headers, so they are fast. Only `message` decodes a
message.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import PurePath

import numpy as np
import pyarrow as pa

from rmq_spark.store.disk.clock import wall_clock_ms
from rmq_spark.store.disk.kernel_errors import is_unreadable
from rmq_spark.store.errors import DamageError, OptionError, StoreError, StorePathError
from rmq_spark.store.format.columns import COLUMNS
from rmq_spark.store.format.delay_levels import DEFAULT_DELAY_LEVELS
from rmq_spark.store.format.own_files import StoreSettings
from rmq_spark.store.log.commit_log import CommitLog
from rmq_spark.store.log.consume_queue import Entries
from rmq_spark.store.log.store_reader import StoreReader
from rmq_spark.store.log.store_state import read_settings, read_store_state
from rmq_spark.store.model import QueueKey
from rmq_spark.store.view import summary_html
from rmq_spark.store.view.message import (
    NO_TIME,
    EntryFaults,
    EntrySample,
    Message,
    Numbers,
    SampleSize,
    find_faults,
    header_times,
    message_of,
    sample_entries,
)
from rmq_spark.store.view.summary import GroupLag, QueueSummary, StoreSummary, TopicSummary
from rmq_spark.store.view.summary_text import count_text

# Entries (40 MiB) that the queues of a summary share equally. A queue with no more than its share is read completely.
_ALL_ENTRIES = 1 << 21
_RUNS, _RUN_ENTRIES = 8, 64  # sample of a larger queue: 8 runs of 64 entries; 1,000 queues take 0.1 s


class StoreExplorer(StoreReader):
    """A StoreReader that also has `summary`, `topic`, `message` and `lag`. A notebook displays it as its summary.

    Like a StoreReader, an instance must not be used by two threads at the same time.
    """

    def __init__(self, path: str, *, commit_log_path: str | None = None, read_mode: str = "auto") -> None:
        super().__init__(path, commit_log_path=commit_log_path, read_mode=read_mode)
        self._opened_with = commit_log_path, read_mode

    @property
    def log(self) -> CommitLog:
        """The commit log of the store, for plots."""
        self._refuse_if_closed()
        return self._log

    def refuse_inside(self, target: str | PurePath) -> None:
        """Raise OptionError if the output file `target` would be inside this store or another one."""
        # Imported here, because this module loads pyarrow.parquet, which takes as long as the rest of a reader.
        from rmq_spark.store.tools.parquet_file import require_outside_store

        require_outside_store(target, self.path, self._opened_with[0])

    def delay_level_count(self) -> int:
        """Return how many delay levels the store has. Settings of our writers may differ from RocketMQ's 18."""
        self._refuse_if_closed()
        settings = read_settings(self.path)
        return len(settings.levels if isinstance(settings, StoreSettings) else DEFAULT_DELAY_LEVELS)

    def summary(self) -> StoreSummary:
        """Return a summary of the store's current content, topic by topic.

        If a queue has very many messages, their bytes are estimated. If a queue is damaged, its summary has a
        `problem`, and no error is raised. Raises DamageError only if the end of the commit log cannot be determined.
        """
        self.refresh()
        topics = self._summaries(self.topics())
        run = self._log.segments
        state = read_store_state(self.path).closing.name.lower()
        begin = min(run.begin, self.log_end)
        return StoreSummary(self.path, topics, begin, self.log_end, len(run.segments), run.size, state)

    def topic(self, name: str) -> TopicSummary:
        """Return a summary of a topic's current content, queue by queue.

        Raises NotFoundError if the topic does not exist. The error names other topics.
        """
        self.refresh()
        self.queues(name)
        return self._summaries([name])[0]

    def message(self, queue: QueueKey, queue_offset: int) -> Message:
        """Return the message at a queue offset, with all columns.

        For example, to show the first message with a key: `reader.message(*reader.find_key("orders", "order-1")[0])`.

        Raises NotFoundError if the queue does not exist. Raises OffsetRangeError if the queue has no message at this
        offset; the error has the offsets that exist. Raises DamageError if the message is damaged.
        """
        if isinstance(queue_offset, bool) or not isinstance(queue_offset, int):
            raise OptionError(f"queue_offset={queue_offset!r} must be an integer. Queue offsets count messages from 0.")
        (batch,) = self.read(queue, queue_offset, queue_offset + 1, list(COLUMNS))
        return message_of(pa.Table.from_batches([batch]))

    def lag(self, group: str | None = None) -> GroupLag:
        """Return the current lag of a consumer group, or of each group if `group` is None.

        The result contains the table of `rmq_spark.group_lag`, and can also be shown as text or HTML. Raises the same
        errors as `rmq_spark.group_lag`.
        """
        # Imported here, because a Spark task only reads messages and should not load this module.
        from rmq_spark.store.group.admin import group_lag

        self._refuse_if_closed()
        commit_log_path, read_mode = self._opened_with
        now_ms = wall_clock_ms()
        table = group_lag(self.path, group, now_ms=now_ms, commit_log_path=commit_log_path, read_mode=read_mode)
        return GroupLag(self.path, group, now_ms, table)

    def sample(self, queue: QueueKey, size: SampleSize) -> EntrySample:
        """Return a sample of the entries that a queue had at the last refresh. It is empty if the queue has no files.

        Raises DamageError if the queue is damaged.
        """
        queue_files = self._queue(queue)
        if queue_files is None:
            none = np.zeros(0, np.int64)
            return EntrySample(Entries(none, none, none, none, None), np.zeros(0), True)
        first, end = self._entry_bounds(queue_files)
        found = sample_entries(queue_files, first, end, queue_files.offset_of(end, end), size)
        queue_files.run.close()  # a store may have more queues than a process may have open files
        return found

    def entries_between(self, queue: QueueKey, begin: int, end: int, at_once: int) -> Iterator[Entries]:
        """Yield the entries of a queue whose records begin at the physical offsets [begin, end).

        Yields up to `at_once` entries at a time, and only those that the queue had at the last refresh. Raises
        DamageError if the queue is damaged.
        """
        queue_files = self._queue(queue)
        if queue_files is None:
            return
        first, entries_end = self._entry_bounds(queue_files)
        if first == entries_end:
            return
        first, last = queue_files.first_from(begin, entries_end), queue_files.first_from(end, entries_end)
        for at in range(first, last, at_once):
            yield queue_files.read(at, min(at + at_once, last))
        queue_files.run.close()

    def times_of(self, entries: Entries) -> tuple[Numbers, Numbers]:
        """Return two arrays with the born times and the store times (ms) of the entries' records.

        A time is NO_TIME if the record at the entry's physical offset is not the record of the entry.
        """
        return header_times(self._log, entries.physical_offsets, entries.sizes)

    def _summaries(self, topics: Sequence[str]) -> tuple[TopicSummary, ...]:
        """Return a summary of each topic, in the given order.

        It is computed from a sample of each queue's entries, and from the headers of its first and last record.
        """
        queues = [queue for topic in topics for queue in self.queues(topic)]
        size = SampleSize(_ALL_ENTRIES // max(1, len(queues)), _RUNS, _RUN_ENTRIES)
        found: dict[QueueKey, QueueSummary] = {}
        inexact, offsets, sizes, edges = set(), [], [], []
        for queue in queues:
            try:
                bounds, sample = self._bounds(queue), self.sample(queue, size)
            except StoreError as error:
                if not (isinstance(error, DamageError | StorePathError) or is_unreadable(error)):
                    raise
                found[queue] = QueueSummary(queue.queue_id, problem=str(error))
                continue
            if not len(sample.entries):
                found[queue] = QueueSummary(queue.queue_id, bounds.min_offset, bounds.max_offset, 0)
                continue
            faults = find_faults(self._log.segments, sample.entries.physical_offsets, sample.entries.sizes)
            size_bytes = sample.record_bytes(faults.good)
            problem = self._problem(sample, faults)
            found[queue] = QueueSummary(
                queue.queue_id, bounds.min_offset, bounds.max_offset, size_bytes, problem=problem
            )
            if problem is not None or not sample.is_complete:
                inexact.add(queue.topic)
            edges.append(queue)
            offsets += [int(sample.entries.physical_offsets[at]) for at in (0, -1)]
            sizes += [int(sample.entries.sizes[at]) for at in (0, -1)]
        _, stored = header_times(self._log, np.array(offsets, np.int64), np.array(sizes, np.int64))
        for queue, times_ms in zip(edges, stored.reshape(-1, 2).tolist(), strict=True):
            first_ms, last_ms = (None if time_ms == NO_TIME else time_ms for time_ms in times_ms)
            found[queue] = replace(found[queue], first_ms=first_ms, last_ms=last_ms)
        return tuple(
            TopicSummary(topic, tuple(found[queue] for queue in self.queues(topic)), topic not in inexact)
            for topic in topics
        )

    def _problem(self, sample: EntrySample, faults: EntryFaults) -> str | None:
        """Return a text about the damage of a queue that its entries show, or None if they show no damage."""
        least = "" if sample.is_complete else "at least "
        parts = []
        if count := int(np.count_nonzero(faults.without_segment)):
            physical_offset = int(sample.entries.physical_offsets[np.argmax(faults.without_segment)])
            what = f"{least}{count_text(count, 'record')} in a segment of the log that is missing"
            parts.append(f"{what}: {self._log.missing_segment(physical_offset)}")
        if count := int(np.count_nonzero(faults.wrong_size)):
            noun = "consume-queue entry" if count == 1 else "consume-queue entries"
            parts.append(f"{least}{count:,} {noun} with a size that no record there can have")
        return f"damaged, see rmq_spark.check: {'; '.join(parts)}" if parts else None

    def __repr__(self) -> str:
        # The summary is not included, because it reads from the disk, and a debugger or a log line must not do that.
        state = "closed" if self._is_closed else "summary() shows its content"
        return f"<rmq_spark store at {self.path}: {state}>"

    def _repr_html_(self) -> str:
        if self._is_closed:
            return summary_html.closed_html(self.path)
        return self.summary()._repr_html_()
