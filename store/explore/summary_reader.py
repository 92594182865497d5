"""A store opened for reading that shows itself: what it holds, one topic, one message, the lag of a group.

Whatever is shown is read from units and from few records; no message is decoded to show a store.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import PurePath

import numpy as np
import pyarrow as pa

from rmq_spark.store.disk.chance import wall_clock_ms
from rmq_spark.store.disk.kernel_errors import is_unreadable
from rmq_spark.store.errors import DamageError, OptionError, StoreError, StorePathError
from rmq_spark.store.explore import summary_html
from rmq_spark.store.explore.message_view import Message, message_of
from rmq_spark.store.explore.outside import refuse_in_store
from rmq_spark.store.explore.summary import GroupLag, QueueSummary, StoreSummary, TopicSummary
from rmq_spark.store.explore.summary_text import count_text
from rmq_spark.store.explore.summary_units import (
    NO_TIME,
    Numbers,
    SampleSize,
    UnitFaults,
    UnitSample,
    find_faults,
    head_times,
    sample_units,
)
from rmq_spark.store.format.columns import COLUMNS
from rmq_spark.store.log.commit_log import CommitLog
from rmq_spark.store.log.left_behind import how_left
from rmq_spark.store.log.queues import Units
from rmq_spark.store.log.store_reader import StoreReader
from rmq_spark.store.units import QueueKey

_ALL_UNITS = 1 << 21  # of all queues that are shown: 40 MiB of them are read to know bytes exactly
_RUNS, _RUN_UNITS = 8, 64  # of a queue that has more than its share: 1,000 queues cost 0.1 s


class StoreExplorer(StoreReader):
    """A StoreReader with `summary`, `topic`, `message` and `lag`; in a notebook it shows what the store holds.

    One thread at a time, as a StoreReader.
    """

    def __init__(self, path: str, *, commit_log_path: str | None = None, read_mode: str = "auto") -> None:
        super().__init__(path, commit_log_path=commit_log_path, read_mode=read_mode)
        self._opened_with = commit_log_path, read_mode

    @property
    def log(self) -> CommitLog:
        """The commit log's files, for what draws them."""
        self._refuse_if_closed()
        return self._log

    def refuse_inside(self, target: str | PurePath) -> None:
        """Raise OptionError for a file that lies in this store or in another: who reads writes nothing there."""
        refuse_in_store(target, self.path, self._opened_with[0])

    def summary(self) -> StoreSummary:
        """Return what the store holds now, topic by topic.

        Bytes of queues with very many messages are estimated. A queue that is damaged says so; DamageError is raised
        only where the end of the log cannot be told.
        """
        self.refresh()
        topics = self._summaries(self.topics())
        run = self._log.segments
        state = how_left(self.path).closing.name.lower()
        begin = min(run.begin, self.log_end)
        return StoreSummary(self.path, topics, begin, self.log_end, len(run.segments), run.size, state)

    def topic(self, name: str) -> TopicSummary:
        """Return what a topic holds now, queue by queue. Raises NotFoundError, which names others."""
        self.refresh()
        self.queues(name)
        return self._summaries([name])[0]

    def message(self, queue: QueueKey, queue_offset: int) -> Message:
        """Return one message, decoded whole: `reader.message(*reader.find_key("orders", "order-1")[0])`.

        Raises NotFoundError for a queue that is not there, OffsetRangeError, which names the offsets that are,
        DamageError.
        """
        if isinstance(queue_offset, bool) or not isinstance(queue_offset, int):
            raise OptionError(f"queue_offset={queue_offset!r} is no whole number. Queue offsets count messages from 0.")
        (batch,) = self.read(queue, queue_offset, queue_offset + 1, list(COLUMNS))
        return message_of(pa.Table.from_batches([batch]))

    def lag(self, group: str | None = None) -> GroupLag:
        """Return how far a group, or each one, is behind now: `rmq_spark.group_lag` as a value that shows itself.

        Raises what that raises.
        """
        # Not with the module: a task of Spark, which only reads messages, would wait for it.
        from rmq_spark.store.group.admin import group_lag

        self._refuse_if_closed()
        commit_log_path, read_mode = self._opened_with
        now_ms = wall_clock_ms()
        table = group_lag(self.path, group, now_ms=now_ms, commit_log_path=commit_log_path, read_mode=read_mode)
        return GroupLag(self.path, group, now_ms, table)

    def sample(self, queue: QueueKey, size: SampleSize) -> UnitSample:
        """Return units of a queue that stand for all of them, as of the last refresh. Raises DamageError."""
        files_of = self._queue(queue)
        if files_of is None:
            none = np.zeros(0, np.int64)
            return UnitSample(Units(none, none, none, none, None), np.zeros(0), True)
        first, end = self._unit_bounds(files_of)
        found = sample_units(files_of, first, end, files_of.offset_of(end, end), size)
        files_of.run.close()  # there may be more queues than a process may have files open
        return found

    def units_between(self, queue: QueueKey, begin: int, end: int, at_once: int) -> Iterator[Units]:
        """Yield the queue's units whose records begin in [begin, end), physical offsets, up to `at_once` at a time.

        As of the last refresh. Raises DamageError.
        """
        files_of = self._queue(queue)
        if files_of is None:
            return
        first, units_end = self._unit_bounds(files_of)
        if first == units_end:
            return
        first, last = files_of.first_from(begin, units_end), files_of.first_from(end, units_end)
        for at in range(first, last, at_once):
            yield files_of.read(at, min(at + at_once, last))
        files_of.run.close()

    def times_of(self, units: Units) -> tuple[Numbers, Numbers]:
        """Return when the records of these units were born and stored, ms; NO_TIME for what is no such record."""
        return head_times(self._log, units.physical_offsets, units.sizes)

    def _summaries(self, topics: Sequence[str]) -> tuple[TopicSummary, ...]:
        """Return the topics' summaries: each queue's units, then all first and last heads at once."""
        queues = [queue for topic in topics for queue in self.queues(topic)]
        size = SampleSize(_ALL_UNITS // max(1, len(queues)), _RUNS, _RUN_UNITS)
        found: dict[QueueKey, QueueSummary] = {}
        inexact, places, sizes, edges = set(), [], [], []
        for queue in queues:
            try:
                bounds, sample = self._bounds(queue), self.sample(queue, size)
            except StoreError as error:
                if not (isinstance(error, DamageError | StorePathError) or is_unreadable(error)):
                    raise
                found[queue] = QueueSummary(queue.queue_id, problem=str(error))
                continue
            if not len(sample.units):
                found[queue] = QueueSummary(queue.queue_id, bounds.min_offset, bounds.max_offset, 0)
                continue
            faults = find_faults(self._log.segments, sample.units.physical_offsets, sample.units.sizes)
            held = sample.record_bytes(faults.good)
            problem = self._problem(sample, faults)
            found[queue] = QueueSummary(queue.queue_id, bounds.min_offset, bounds.max_offset, held, problem=problem)
            if problem is not None or not sample.is_whole:
                inexact.add(queue.topic)
            edges.append(queue)
            places += [int(sample.units.physical_offsets[at]) for at in (0, -1)]
            sizes += [int(sample.units.sizes[at]) for at in (0, -1)]
        _, stored = head_times(self._log, np.array(places, np.int64), np.array(sizes, np.int64))
        for queue, (first_ms, last_ms) in zip(edges, stored.reshape(-1, 2).tolist(), strict=True):
            found[queue] = replace(found[queue], first_ms=_known(first_ms), last_ms=_known(last_ms))
        return tuple(
            TopicSummary(topic, tuple(found[queue] for queue in self.queues(topic)), topic not in inexact)
            for topic in topics
        )

    def _problem(self, sample: UnitSample, faults: UnitFaults) -> str | None:
        """Return what is wrong with a queue by its units, None if nothing is seen."""
        least = "" if sample.is_whole else "at least "
        parts = []
        if count := int(np.count_nonzero(faults.without_segment)):
            place = int(sample.units.physical_offsets[np.argmax(faults.without_segment)])
            what = f"{least}{count_text(count, 'record')} of it lay in a segment of the log that is missing"
            parts.append(f"{what}: {self._log.missing_segment(place)}")
        if count := int(np.count_nonzero(faults.wrong_size)):
            parts.append(f"{least}{count_text(count, 'unit')} with a size that no record there can have")
        return f"damaged, see rmq_spark.check: {'; '.join(parts)}" if parts else None

    def __repr__(self) -> str:
        # Not what the store holds: whoever prints objects, a debugger or a log, must not read a disk.
        state = "closed" if self._is_closed else "summary() says what it holds"
        return f"<rmq_spark store at {self.path}: {state}>"

    def _repr_html_(self) -> str:
        if self._is_closed:
            return summary_html.closed_html(self.path)
        return self.summary()._repr_html_()


def _known(time_ms: int) -> int | None:
    return None if time_ms == NO_TIME else time_ms
