"""The pull consumer: one object that lists queues, pulls messages, commits a group's offsets and sends messages.

The consumer is not a member of its group: it takes no part in rebalances, so other readers may read the same queues.
`group.pull` does one pull, and `group.offset_file` commits offsets. Source: DefaultMQPullConsumer (4.9.8).
"""

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from datetime import datetime
from functools import partial
from types import TracebackType
from typing import Any

import pyarrow as pa

from rmq_spark.store.argument_checks import check_integer, check_offset, check_time
from rmq_spark.store.arrival import wait_for_arrival
from rmq_spark.store.client.producer import Producer
from rmq_spark.store.delivery.scheduler import DeliveryScheduler
from rmq_spark.store.disk import files
from rmq_spark.store.disk.clock import wall_clock_ms
from rmq_spark.store.disk.host import host_name
from rmq_spark.store.disk.write import Disk
from rmq_spark.store.errors import OptionError, StoreError
from rmq_spark.store.filter.row_filter import RowFilter, compile_filter, make_expression
from rmq_spark.store.format.columns import COLUMNS
from rmq_spark.store.group.group_files import GroupLock, GroupPaths, write_commit_stamp
from rmq_spark.store.group.offset_file import (
    OffsetFile,
    Outcome,
    SeenEnds,
    Stamp,
    read_group_offsets,
    refuse_commit,
    stamp_of_ends,
)
from rmq_spark.store.group.pull import DEFAULT_COLUMNS, has_wanted, pull
from rmq_spark.store.group.pull_limits import LongPoll, PullLimits, hold_ms, limits_of_broker
from rmq_spark.store.group.pull_reader import PullReader
from rmq_spark.store.group.read_rights import (
    GroupRights,
    describe_beyond,
    describe_closed,
    is_beyond,
    is_closed,
    refuse_queue,
    refuse_topic,
)
from rmq_spark.store.log.store_writer import WriterSettings
from rmq_spark.store.model import MAX_DECOMPRESSED_BYTES, QueueKey
from rmq_spark.store.names import check_consumer_group
from rmq_spark.store.offset_memory import OffsetMemory
from rmq_spark.store.pull_result import HOLD_MS, PULL_MESSAGES, Accept, PullResult, PullStatus, check_columns
from rmq_spark.store.send_result import SendResult
from rmq_spark.store.synchronized import Synchronized, synchronized
from rmq_spark.store.transaction.sink import RecordBuilderSettings

_LOG = logging.getLogger("rmq_spark")


class PullConsumer(Synchronized):
    """A consumer that pulls messages from a store, and reads and commits the offsets of a group. Use it in `with`.

    Several threads may share one consumer. Its methods run one at a time, but other methods may run while
    `pull_block_if_not_found` waits. Every call sees the current state of the store, even while a writer or a broker
    runs. `commit` writes the offsets that were updated, and `close` writes those that are not committed yet. If the
    body of `with` raises an error, the offsets that are not committed yet are not written.
    """

    def __init__(
        self,
        path: str,
        group: str | None = None,
        *,
        columns: Sequence[str] = DEFAULT_COLUMNS,
        limits: PullLimits | None = None,
        long_polling: bool = True,
        commit_log_path: str | None = None,
        read_mode: str = "auto",
        check_crc: bool = False,
        max_decompressed_bytes: int = MAX_DECOMPRESSED_BYTES,
        settings: WriterSettings | None = None,
        open_producer: Callable[[], Producer] | None = None,
        scheduler: DeliveryScheduler | None = None,
        now_ms: Callable[[], float] = lambda: time.monotonic() * 1000,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Open the store at `path`. With `group`, the consumer can read and commit the offsets of that group.

        `limits` are the limits of one pull, by default those of a broker on this machine. `settings` configure the
        store's lock for commits; offsets are committed on network file systems too. `open_producer` is called to open
        the store when a message is sent. `scheduler` delivers delayed messages that are due before every pull, and is
        closed with the consumer. `now_ms` is a monotonic clock in ms, and `sleep` takes seconds.

        Raises OptionError for an invalid group name or an unknown column, and StorePathError if `path` is not a store.
        """
        super().__init__()
        check_columns(columns, COLUMNS)
        self.group = None if group is None else check_consumer_group(group)
        self._reader = PullReader(path, commit_log_path=commit_log_path, read_mode=read_mode)
        self._columns, self._long_polling = tuple(columns), long_polling
        self._limits = limits or limits_of_broker()
        self._check_crc, self._max_decompressed_bytes = check_crc, max_decompressed_bytes
        self._settings = settings or WriterSettings(commit_log_path=commit_log_path)
        builder = RecordBuilderSettings(self._settings.commit_log_path)
        self._open_producer = open_producer or partial(Producer, self._reader.path, self._settings, builder, "async")
        self._scheduler = scheduler
        self._now_ms, self._sleep = now_ms, sleep
        self._producer: Producer | None = None
        self._offset_file: OffsetFile | None = None
        self._lock: GroupLock | None = None
        self._offsets = OffsetMemory()
        self._filters: dict[str, RowFilter | None] = {}
        self._is_closed = False
        self._rights = None if group is None else GroupRights(self._reader.path, group, sleep=sleep)
        self._ends_stamp: Stamp = stamp_of_ends(self._reader.path)  # as of the last commit
        self._logged_topics: set[str] = set()  # topics that consumers may not read, and that were logged already

    def __enter__(self) -> "PullConsumer":
        self._check_open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the consumer, and commit the updated offsets if the body of `with` did not raise an error.

        After an error in the body nothing is committed, so that messages that were not finished are pulled again. The
        body's error is raised. If closing fails too, that failure becomes a note on the error.
        """
        if error is None:
            self.close()
            return
        try:
            self._close(lambda: None)
        except StoreError as late:
            error.add_note(f"closing the consumer of {self._reader.path} after that failed too: {late}")

    @synchronized
    def topics(self) -> list[str]:
        """Return the names of all topics, sorted."""
        self._refresh()
        return self._reader.topics()

    @synchronized
    def queues(self, topic: str) -> list[QueueKey]:
        """Return the topic's queues, sorted by queue id.

        If the consumer has a group, only the queues that RocketMQ assigns to consumers are returned. Raises
        NotFoundError if the topic does not exist (the error names other topics), and NoPermissionError if the group may
        not read the topic.
        """
        return self._queues_of(topic)

    def _queues_of(self, topic: str) -> list[QueueKey]:
        self._refresh()
        queues = self._reader.queues(topic)
        if self.group is None:
            return queues
        configs = self._reader.topic_configs()
        refuse_topic(configs, topic, self.group)
        return [queue for queue in queues if not is_beyond(configs, queue)]

    @synchronized
    def min_offset(self, queue: QueueKey) -> int:
        """Return the offset of the first message that has not expired. Raises NotFoundError for a missing queue."""
        self._refresh()
        return self._reader.bounds(queue).min_offset

    @synchronized
    def max_offset(self, queue: QueueKey) -> int:
        """Return the queue offset that the next message will get. Raises NotFoundError if the queue does not exist."""
        self._refresh()
        return self._reader.bounds(queue).max_offset

    @synchronized
    def search_offset(self, queue: QueueKey, at: int | datetime, rule: str = "lower") -> int:
        """Return the queue offset of the message that was stored at the time `at`.

        `at` is in ms since the epoch, or a datetime with a time zone. `rule` chooses the message: "lower" is the first
        message stored at or after `at` (the queue's end if there is none), "upper" is the last message stored at or
        before `at`, and "nearest" is the message that RocketMQ 4.9 would choose.

        Raises OptionError if the rule or the time is invalid or the time is in seconds, and NotFoundError if the queue
        does not exist.
        """
        time_ms = check_time("search_offset: at", at)
        self._refresh()
        return self._reader.offset_at_time(queue, time_ms, rule)

    @synchronized
    def subscribe(self, topic: str, tags: str | None = None, *, sql92: str | None = None) -> None:
        """Set a filter: from now on, pulls from `topic` return only the messages that match.

        The filter is either `tags`, such as "A || B", or an SQL92 expression `sql92`, such as "a > 5". None and "*"
        match all messages. A later call for the same topic replaces the filter. Other topics are not affected, and
        neither is the group's retry topic. The consumer does not become a member of its group.

        Raises OptionError if the expression is invalid or both arguments are given, and the errors of `queues`.
        Source: DefaultLitePullConsumer#subscribe, MessageSelector (4.9, 5.3).
        """
        row_filter = compile_filter(make_expression(tags=tags, sql92=sql92))
        self._queues_of(topic)
        self._filters[topic] = row_filter

    def pull(
        self, queue: QueueKey, offset: int, max_messages: int = PULL_MESSAGES, *, accept: Accept | None = None
    ) -> PullResult:
        """Pull up to `max_messages` messages, starting at the queue offset `offset`. Does not wait for messages.

        An offset outside the queue is not an error: the result then has a status that describes it. Only messages that
        match the topic's filter (`subscribe`) are returned. `accept` is a further filter: it gets an array with the
        tags code of each message and returns which of them are wanted. See `group.pull.pull`.

        Raises OptionError for an invalid queue offset or a `max_messages` below 1, NotFoundError if the queue does not
        exist, NoPermissionError if a broker would not let the group read the queue, and DamageError if a file of the
        queue or the log is damaged.
        """
        offset, max_messages = check_offset("pull", offset), check_integer("max_messages", max_messages, 1)
        return self._deliver_and_pull(queue, offset, max_messages, accept)[0]

    def pull_block_if_not_found(
        self,
        queue: QueueKey,
        offset: int,
        max_messages: int = PULL_MESSAGES,
        timeout_ms: int = HOLD_MS,
        *,
        accept: Accept | None = None,
    ) -> PullResult:
        """Pull like `pull`, but if there is no new message (PullStatus.NO_NEW_MSG), wait for one up to `timeout_ms`.

        When any process appends a message, even a broker, the wait ends within milliseconds. If the filters reject all
        new messages, the wait may end only at the next check, which comes every 5 s. The status after the wait may be
        NO_NEW_MSG again. If the consumer was opened without long polling, the wait is 1 s instead of `timeout_ms`.
        """
        timeout_ms = check_integer("timeout_ms", timeout_ms, 0)
        offset = check_offset("pull_block_if_not_found", offset)
        max_messages = check_integer("max_messages", max_messages, 1)
        found, due_ms = self._deliver_and_pull(queue, offset, max_messages, accept)
        held_ms = hold_ms(
            timeout_ms, is_not_found=found.pull_status is PullStatus.NO_NEW_MSG, long_polling=self._long_polling
        )
        if held_ms is None:
            return found
        hold = LongPoll(offset, found.max_offset, self._now_ms(), held_ms, long_polling=self._long_polling)
        max_offset = found.max_offset

        def is_woken() -> bool:
            nonlocal max_offset, due_ms
            is_woken, max_offset, due_ms = self._check_arrival(hold, queue, max_offset, due_ms, accept)
            return is_woken

        # Other threads may use the consumer while this one sleeps.
        wait_for_arrival(is_woken, hold.until_ms, self._now_ms, self._sleep)
        return self._pull(queue, offset, max_messages, accept)

    @synchronized
    def fetch_consume_offset(self, queue: QueueKey, *, from_store: bool = False) -> int | None:
        """Return the queue offset of the next message that the group will consume, or None if the group has no offset.

        This is the last offset that `update_consume_offset` set in this object, or else the committed offset. With
        `from_store` it is always the committed offset. A committed offset that was read replaces the one in this
        object.

        Raises OptionError if the consumer has no group, NotFoundError if the queue does not exist, and DamageError if
        the offset file is damaged.
        """
        group = self._group_for("offsets")
        self._check_queue(queue)
        updated = self._offsets.get(queue)
        if updated is not None and not from_store:
            return updated
        offset = read_group_offsets(self._reader.path, group, self._sleep).get(queue)
        if offset is not None:
            self._offsets.set_committed(queue, offset)
        return offset

    @synchronized
    def update_consume_offset(self, queue: QueueKey, offset: int, *, increase_only: bool = False) -> None:
        """Set the group's next offset in a queue. Call `commit` to write it to the store.

        With `increase_only`, a lower offset than the present one is ignored. An offset beyond the queue's end is
        accepted, as in DefaultMQPullConsumer#updateConsumeOffset. But if the store was repaired or recovered, or a
        queue was added, since the last commit, `commit` writes the queue's end instead of an offset beyond it.

        Raises OptionError if the consumer has no group or the queue offset is invalid, and NotFoundError if the queue
        does not exist.
        """
        self._group_for("offsets")
        offset = check_offset("update_consume_offset", offset)
        self._check_queue(queue)
        self._offsets.update(queue, offset, increase_only=increase_only)

    @synchronized
    def commit(self, queues: Iterable[QueueKey] | None = None) -> dict[QueueKey, int]:
        """Write the offsets that were updated since the last commit to the store, and return the offsets written.

        With `queues`, only the offsets of these queues are written. The offsets are durable when this returns. They
        replace the committed offsets of their queues, even larger ones. Returns {} if there was nothing to write.

        Raises OptionError if the consumer has no group, LockTimeoutError while a broker holds the store, and the errors
        of `OffsetFile.commit`. After an error nothing is written, and the next commit tries again.
        """
        return self._commit(queues)

    def _commit(self, queues: Iterable[QueueKey] | None = None) -> dict[QueueKey, int]:
        group = self._group_for("offsets")
        self._check_open()
        offsets = self._offsets.uncommitted([queues] if isinstance(queues, QueueKey) else queues)
        if not offsets:
            return {}
        disk, root = Disk(), self._reader.path
        if self._offset_file is None:
            # Allowed on a network file system, as for a query's commit: only one small file is replaced under the lock.
            settings = replace(self._settings, allow_network_store=True)
            self._offset_file = OffsetFile(root, disk, settings, wall_clock_ms, self._sleep)
        paths = GroupPaths(root, group)
        self._lock = self._lock or GroupLock(paths, disk, self._sleep, self._settings.lock_timeout_ms)
        with self._lock.hold():
            stamp = stamp_of_ends(root)
            ends = SeenEnds(root, self._ends_stamp)
            outcome = self._offset_file.commit(group, offsets, ends)
            if outcome is Outcome.BROKER:
                raise refuse_commit(root, group)
            if outcome is Outcome.WRITTEN:
                by = f"a pull consumer (process {files.process_id()} on host {host_name()})"
                write_commit_stamp(paths, disk, wall_clock_ms(), by)
        self._ends_stamp = stamp
        if ends.corrected:
            committed = read_group_offsets(root, group, self._sleep)
            for queue in ends.corrected:
                _LOG.warning(
                    "rmq: the offset %d of consumer group %s in queue %s is beyond the queue's end, which a repair "
                    "or a recovery may have truncated: the group's committed offset is %s",
                    *(offsets[queue], group, queue, committed.get(queue, "missing")),
                )
                del offsets[queue]
                self._offsets.forget(queue)
                if queue in committed:
                    self._offsets.set_committed(queue, committed[queue])
                    offsets[queue] = committed[queue]
        self._offsets.mark_committed(offsets)
        return offsets

    def send(self, topic: str, body: bytes | str, **fields: Any) -> SendResult:
        """Append one message and return where it was stored. `fields` and the errors are those of `Producer.send`."""
        return self._opened_producer().send(topic, body, **fields)

    def send_many(self, messages: pa.Table | pa.RecordBatch, *, topic: str | None = None) -> pa.Table:
        """Append each row of a table as a message, and return where each was stored. See `Producer.send_many`."""
        return self._opened_producer().send_many(messages, topic=topic)

    def send_back(
        self,
        messages: PullResult | pa.Table | pa.RecordBatch | list[dict[str, object]],
        delay_level: int = 0,
        max_reconsume_times: int | None = None,
        *,
        expired_original: str = "error",
    ) -> pa.Table:
        """Send back messages that the group failed to consume, and return where their copies are.

        `messages` is the result of a pull, or some of its rows. The copies are delivered in the topic %RETRY%group.
        Pull the queues of that topic like those of any other. `Producer.send_back` describes the other arguments, the
        result and the errors. Raises OptionError also if the consumer has no group.
        Source: DefaultMQPullConsumer#sendMessageBack.
        """
        group = self._group_for("retries")
        rows = messages.messages if isinstance(messages, PullResult) else messages
        return self._opened_producer().send_back(
            rows, group, delay_level, max_reconsume_times, expired_original=expired_original
        )

    def close(self) -> None:
        """Commit the updated offsets, make sent messages durable, and release the store. A second call does nothing.

        All files are closed even if this raises an error. Raises the errors of `commit` and `Producer.close`.
        """
        self._close(lambda: self.group is not None and self._commit())

    @synchronized
    def _close(self, finish: Callable[[], object]) -> None:
        if self._is_closed:
            return
        try:
            finish()
        finally:
            self._is_closed = True
            self._reader.close()
            if self._scheduler is not None:
                self._scheduler.close()
            if self._producer is not None:
                self._producer.close()

    def _refresh(self) -> None:
        self._check_open()
        self._reader.refresh()

    def _deliver(self) -> float | None:
        """Deliver due messages. Return when to deliver again (in ms, by `now_ms`), or None if that is unknown."""
        self._check_open()
        wait_ms = None if self._scheduler is None else self._scheduler.tick_now()
        return None if wait_ms is None else self._now_ms() + wait_ms

    @synchronized
    def _deliver_and_pull(
        self, queue: QueueKey, offset: int, max_messages: int, accept: Accept | None
    ) -> tuple[PullResult, float | None]:
        """Deliver due messages, then pull. Return the result of the pull, and what `_deliver` returned."""
        due_ms = self._deliver()
        return self._refresh_and_pull(queue, offset, max_messages, accept), due_ms

    @synchronized
    def _pull(self, queue: QueueKey, offset: int, max_messages: int, accept: Accept | None) -> PullResult:
        return self._refresh_and_pull(queue, offset, max_messages, accept)

    @synchronized
    def _check_arrival(
        self, hold: LongPoll, queue: QueueKey, max_offset: int, due_ms: float | None, accept: Accept | None
    ) -> tuple[bool, int, float | None]:
        """Return whether to repeat the pull now, the queue's end, and when the next delayed message is due or None."""
        self._check_open()
        has_moved = self._reader.refresh()
        if has_moved or (due_ms is not None and self._now_ms() >= due_ms):
            due_ms = self._deliver()  # a new message may be due earlier than those known before
            has_moved = self._reader.refresh() or has_moved
        if has_moved:
            max_offset = self._reader.bounds(queue).max_offset
        row_filter = self._filters.get(queue.topic)
        is_woken = hold.is_woken(
            max_offset,
            self._now_ms(),
            lambda begin, end: has_wanted(self._reader, queue, begin, end, accept, row_filter),
        )
        return is_woken, max_offset, due_ms

    def _check_rights(self, queue: QueueKey) -> None:
        """Raise an error if a broker would not let the group read the queue. Without a group only log it, once."""
        configs = self._reader.topic_configs()
        if self._rights is not None and self.group is not None:
            self._rights.check()
            if is_beyond(configs, queue):
                self._reader.bounds(queue)  # raises another error for a missing queue
            refuse_queue(configs, queue, self.group)
        elif queue.topic not in self._logged_topics and (is_closed(configs, queue.topic) or is_beyond(configs, queue)):
            self._logged_topics.add(queue.topic)
            closed = is_closed(configs, queue.topic)
            found = describe_closed(configs, queue.topic) if closed else describe_beyond(configs, queue)
            _LOG.warning("rmq: %s. Consumer groups may not read it; this reader has no group, and may", found)

    def _refresh_and_pull(self, queue: QueueKey, offset: int, max_messages: int, accept: Accept | None) -> PullResult:
        self._refresh()
        self._check_rights(queue)
        return pull(
            self._reader,
            queue,
            offset,
            max_messages,
            self._limits,
            accept,
            self._columns,
            wanted=self._filters.get(queue.topic),
            check_crc=self._check_crc,
            max_decompressed_bytes=self._max_decompressed_bytes,
        )

    def _check_queue(self, queue: QueueKey) -> None:
        """Raise NotFoundError if the queue does not exist, so that a misspelt topic is not waited for."""
        self._refresh()
        self._reader.bounds(queue)

    def _group_for(self, what: str) -> str:
        if self.group is None:
            raise OptionError(f"{what} need a consumer group: open the consumer with group=, the group's name.")
        return self.group

    @synchronized
    def _opened_producer(self) -> Producer:
        self._check_open()
        if self._producer is None:
            self._producer = self._open_producer()
        return self._producer

    def _release_locks(self) -> None:
        if self._offset_file is not None:
            self._offset_file.release()
        if self._lock is not None:
            self._lock.release()

    def _check_open(self) -> None:
        if self._is_closed:
            raise StoreError(f'the consumer of the store at "{self._reader.path}" was closed. Open it again.')


__all__ = ["DEFAULT_COLUMNS", "PullConsumer"]
