"""Reading a store directory through the contract of `store.backend`.

A file that retention deletes during a call gives StoreChangedError; `reopen` makes the next call open all files again.
The parts for groups and for delivery are imported when they are first used, because tasks need neither.
"""

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import pyarrow as pa

from rmq_spark.store.arrival import Polling
from rmq_spark.store.backend import (
    BROKER_NAME,
    Barrier,
    Fence,
    FinalCommit,
    GroupTerms,
    Location,
    ReadBatch,
    SearchAnswer,
)
from rmq_spark.store.errors import OffsetRangeError, StoreChangedError
from rmq_spark.store.filter.row_filter import KeyLookup, RowFilter
from rmq_spark.store.format.rows import DecodeLimits
from rmq_spark.store.local.paths import StorePaths
from rmq_spark.store.log.store_reader import StoreReader
from rmq_spark.store.model import QueueBounds, QueueKey, QueueRange, RecordProof

if TYPE_CHECKING:
    from rmq_spark.store.delivery.scheduler import DeliveryScheduler
    from rmq_spark.store.group.group_session import GroupSession
    from rmq_spark.store.group.read_rights import GroupRights

_FEW = 2  # this many positions or ranges are read faster one by one


class LocalBackend:
    """A store directory that is open for reading. It implements `Backend`, `SizeReader` and `KeySearch`."""

    def __init__(
        self,
        location: Location,
        paths: StorePaths,
        monotonic_ms: Callable[[], float] = lambda: time.monotonic() * 1000,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._location, self._paths = location, paths
        self._polling = Polling(monotonic_ms, sleep)
        self._opened: StoreReader | None = None
        self._ends_stamp: tuple[int, int, int] | None = None  # not newer than the bounds that were returned last
        self._scheduler: DeliveryScheduler | None = None
        self._rights: dict[tuple[str, bool], GroupRights] = {}
        self._barriers: dict[QueueKey, Barrier] = {}
        self._barriers_of: tuple[object, ...] | None = None  # what they were determined for

    @property
    def location(self) -> Location:
        """Where the store is."""
        return self._location

    @property
    def sizes(self) -> "LocalBackend":
        """The sizes of records, which the consume queues contain."""
        return self

    @property
    def size_estimates(self) -> "LocalBackend":
        """The sizes of records, which are exact."""
        return self

    @property
    def keys(self) -> "LocalBackend":
        """The search in the key index."""
        return self

    @property
    def _reader(self) -> StoreReader:
        """The reader, which is opened if it is not open. Raises StorePathError if the store is missing."""
        if self._opened is None:
            paths = self._paths
            self._opened = StoreReader(paths.path, commit_log_path=paths.commit_log_path, read_mode=paths.read_mode)
        return self._opened

    def reopen(self) -> None:
        """Close all files. The next call opens them again, and looks at the whole store."""
        if self._opened is not None:
            self._opened.close()
        self._opened = None

    def close(self) -> None:
        """Close all files, and end the deliveries."""
        self.reopen()
        if self._scheduler is not None:
            self._scheduler.close()
        self._scheduler = None

    def identity(self) -> str | None:
        """Return the id that our writers gave the store. Return None if only brokers have written to it."""
        return self._reader.store_id()

    def refresh(self) -> bool:
        """Read the store's state again. See `StoreReader.refresh`."""
        return self._reader.refresh()

    def wait_for_messages(self, after: Mapping[QueueKey, int], timeout_ms: float) -> bool:
        """Pause, then read the store's state again. The pauses become longer with the time without changes."""
        return self._polling.poll(self.refresh, timeout_ms)

    def topics(self) -> list[str]:
        """Return the sorted names of all topics."""
        return self._reader.topics()

    def queues(self, topics: Collection[str], *, missing_ok: Collection[str] = ()) -> dict[str, list[QueueKey]]:
        """Return the sorted queues of each topic. A missing topic is left out if it is in `missing_ok`."""
        known = set(self._reader.topics()) if missing_ok else set()
        missing = {topic for topic in missing_ok if topic not in known}
        return {topic: self._reader.queues(topic) for topic in topics if topic not in missing}

    def bounds(self, queues: Collection[QueueKey]) -> dict[QueueKey, QueueBounds]:
        """Return the range of queue offsets that can be read in each queue."""
        reader = self._reader
        found = {queue: reader.bounds(queue) for queue in queues}
        self._ends_stamp = reader.registry_stamp
        return found

    def offsets_at(self, times_ms: Mapping[QueueKey, int]) -> dict[QueueKey, int]:
        """Return the offset of the first message stored at or after the time of each queue."""
        return {queue: self._reader.offset_at_time(queue, time_ms) for queue, time_ms in times_ms.items()}

    def positions(self, at: Collection[tuple[QueueKey, int]]) -> dict[tuple[QueueKey, int], RecordProof]:
        """Return physical offset and store time of the messages that are still in the log."""
        together = self._reader.small_ranges.proofs(at) if len(at) > _FEW else None
        if together is not None:
            return together
        found = {}
        for queue, offset in at:
            try:
                found[queue, offset] = self._reader.proof(queue, offset)
            except (OffsetRangeError, StoreChangedError):
                continue
        return found

    def note_read(self, records: Mapping[tuple[QueueKey, int], RecordProof]) -> None:
        """Do nothing, because a directory has no broker names."""

    def read(
        self, part: QueueRange, columns: Sequence[str], limits: DecodeLimits, wanted: RowFilter | None
    ) -> Iterator[ReadBatch]:
        """Yield the messages of a range in order. The column brokerName is null: a directory has no broker names."""
        stored = _stored(columns)
        found = self._reader.read_with_progress(part.queue, part.begin, part.end, stored, limits, wanted)
        for batch, next_offset in found:
            yield ReadBatch(_with_brokers(batch, columns), next_offset)

    def read_together(
        self, parts: Sequence[QueueRange], columns: Sequence[str], limits: DecodeLimits, wanted: RowFilter | None
    ) -> pa.RecordBatch | None:
        """Return the messages of small ranges as one batch. See `small_ranges`."""
        batch = self._reader.small_ranges.read(parts, _stored(columns), limits, wanted)
        return None if batch is None else _with_brokers(batch, columns)

    def measure(self, parts: Collection[QueueRange]) -> dict[QueueRange, int]:
        """Return the size of the records of each range in bytes."""
        together = self._reader.small_ranges.record_bytes(parts) if len(parts) > _FEW else None
        if together is not None:
            return together
        return {part: self._reader.record_bytes(part.queue, part.begin, part.end) for part in parts}

    def fit(self, max_bytes: Mapping[QueueRange, int]) -> dict[QueueRange, int]:
        """Return the end of the longest prefix of each range whose records have at most the given size in bytes."""
        reader = self._reader
        return {
            part: reader.offset_within_bytes(part.queue, part.begin, part.end, maximum)
            for part, maximum in max_bytes.items()
        }

    def share_wanted(self, part: QueueRange, wanted: RowFilter, samples: int) -> float:
        """Estimate the share of the messages that pass a filter. See `StoreReader.wanted_share`."""
        return self._reader.wanted_share(part.queue, part.begin, part.end, wanted, samples)

    def search(self, parts: Sequence[QueueRange], lookup: KeyLookup) -> SearchAnswer:
        """Return the messages in the ranges that have one of the keys or ids. See `StoreReader.search`."""
        return self._reader.search(parts, lookup)

    def barriers(
        self, queues: Collection[QueueKey], group: str | None, *, is_broadcasting: bool
    ) -> Mapping[QueueKey, Barrier]:
        """Return the queues that topics.json closes to consumers. See `group.read_rights`."""
        from rmq_spark.store.group.read_rights import GroupRights, queue_barrier

        if group is not None:
            if (group, is_broadcasting) not in self._rights:
                rights = GroupRights(self._paths.path, group, is_broadcasting=is_broadcasting)
                self._rights[group, is_broadcasting] = rights
            self._rights[group, is_broadcasting].check()
        configs = self._reader.topic_configs()
        asked = configs, queues, group
        before = self._barriers_of
        if before is None or any(one is not other for one, other in zip(before, asked, strict=True)):
            self._barriers = {queue: barrier for queue in queues if (barrier := queue_barrier(configs, queue, group))}
            self._barriers_of = asked
        return self._barriers

    def deliver_due(self, now_ms: int) -> int | None:
        """Deliver the delayed messages that are due, and return when the next one is due. See `DeliveryScheduler`."""
        if self._scheduler is None:
            from rmq_spark.store.delivery.scheduler import DeliveryScheduler

            paths = self._paths
            self._scheduler = DeliveryScheduler(paths.path, commit_log_path=paths.commit_log_path)
        return self._scheduler.tick(now_ms).next_due_ms

    def group(self, terms: GroupTerms) -> "GroupSession":
        """Return the membership of a query in its group, whose state is in files of the store."""
        from rmq_spark.store.group.group_session import GroupSession

        return GroupSession(self._paths.path, terms, lambda: self._ends_stamp)

    def committed_offsets(self, group: str, queues: Collection[QueueKey]) -> dict[QueueKey, int]:
        """Return the group's offsets in config/consumerOffset.json, those of other queues too."""
        from rmq_spark.store.group.offset_file import read_group_offsets

        return read_group_offsets(self._paths.path, group, time.sleep)

    def start_offsets(
        self,
        group: str,
        bounds: Mapping[QueueKey, QueueBounds],
        committed: Mapping[QueueKey, int],
        fallback: str,
        times_ms: Mapping[QueueKey, int],
    ) -> dict[QueueKey, int]:
        """Return where a group starts in each queue. See `group.start_offsets`."""
        from rmq_spark.store.group.start_offsets import resolve_start_offsets

        return resolve_start_offsets(self._reader, bounds, committed, fallback, times_ms.get)

    def check_fence(self, fence: Fence, queue: QueueKey) -> None:
        """Raise GroupConflictError if the queue has another owner or epoch than the fence."""
        from rmq_spark.store.group.assignment import check_epochs

        check_epochs(self._paths.path, fence.group, fence.member_id, {queue: fence.epoch})

    def commit_final(self, final: FinalCommit) -> bool:
        """Commit the offsets of a member whose batch has ended. See `group.final_commit`."""
        from rmq_spark.store.group.final_commit import commit_final_offsets

        return commit_final_offsets(
            self._paths.path,
            final.group,
            final.member_id,
            final.offsets,
            final.applied_reset,
            final.applied_suspension,
            final.last_batch,
            finished_batch=final.finished_batch,
            commit_log_path=self._paths.commit_log_path,
        )


def _stored(columns: Sequence[str]) -> list[str]:
    """Return the columns that come from the store."""
    return [name for name in columns if name != BROKER_NAME]


def _with_brokers(batch: pa.RecordBatch, columns: Sequence[str]) -> pa.RecordBatch:
    """Return a batch of the stored `columns` with all `columns`. A directory has no names of brokers."""
    if BROKER_NAME not in columns:
        return batch
    nulls = pa.nulls(batch.num_rows, pa.string())
    arrays = [nulls if name == BROKER_NAME else batch.column(name) for name in columns]
    return pa.RecordBatch.from_arrays(arrays, names=list(columns))
