"""A consumer for programs that pull: queues, messages, a group's offsets, and sending, in one object.

It is no member of its group: it takes part in no rebalance, and nobody is kept from reading what it reads. Beside it
stand `pull` (what one pull finds), `pull_hold` and `arrival_wait` (waiting), `offset_memory` and `offset_file`.
Follows DefaultMQPullConsumer (4.9.8).
"""

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from datetime import datetime
from types import TracebackType
from typing import Any, Protocol

import pyarrow as pa

from rmq_spark.store.commit.message_store import MessageStore, SendResult
from rmq_spark.store.commit.outbox import OutboxSettings
from rmq_spark.store.disk import files
from rmq_spark.store.disk.chance import wall_clock_ms
from rmq_spark.store.disk.changing import Disk
from rmq_spark.store.disk.host import host_name
from rmq_spark.store.disk.synchronized import Synchronized, synchronized
from rmq_spark.store.errors import OptionError, StoreError
from rmq_spark.store.filter.row_filter import RowFilter, compile_filter, make_expression
from rmq_spark.store.group.arrival_wait import wait_for_arrival
from rmq_spark.store.group.group_name import check_consumer_group
from rmq_spark.store.group.group_paths import GroupPaths, GroupTurn
from rmq_spark.store.group.offset_file import OffsetFile, Outcome, read_group_offsets, refuse_commit
from rmq_spark.store.group.offset_memory import OffsetMemory
from rmq_spark.store.group.published import write_published
from rmq_spark.store.group.pull import DEFAULT_COLUMNS, Accept, PullResult, check_columns, has_wanted, pull
from rmq_spark.store.group.pull_hold import PullHold, hold_ms
from rmq_spark.store.group.pull_limits import PullLimits, limits_of_broker
from rmq_spark.store.group.pull_reader import PullReader
from rmq_spark.store.group.pull_status import PullStatus
from rmq_spark.store.group.read_rights import (
    GroupRights,
    describe_beyond,
    describe_closed,
    is_beyond,
    is_closed,
    refuse_queue,
    refuse_topic,
)
from rmq_spark.store.group.seen_ends import SeenEnds, Stamp, stamp_of_ends
from rmq_spark.store.group.whole_number import MAX_LONG, as_ms, check_offset, check_whole
from rmq_spark.store.log.store_writer import WriterSettings
from rmq_spark.store.options import MAX_DECOMPRESSED_BYTES
from rmq_spark.store.units import QueueKey, describe_unit, is_in_another_unit

__all__ = ["DEFAULT_COLUMNS", "HOLD_MS", "PULL_MESSAGES", "PullConsumer"]

_LOG = logging.getLogger("rmq_spark")

PULL_MESSAGES = 32
HOLD_MS = 20_000  # DefaultMQPullConsumer#brokerSuspendMaxTimeMillis


class Ticking(Protocol):
    """What delivers messages that waited: `store.delivery.ticker.Ticker`, or a test's."""

    def tick_now(self) -> float | None:
        """Deliver what is due; return in how many ms to do it again, None for not before the store has moved."""

    def close(self) -> None:
        """Let go of files."""


class PullConsumer(Synchronized):
    """A store to pull from, and a group whose offsets are read and set. Several threads may share it; use it in `with`.

    Its calls run one at a time, except that others may run while `pull_block_if_not_found` waits.
    Every call looks at the store as it is then, beside any writer, a broker too. Offsets that were updated are
    written by `commit`, and at the latest by `close`; a `with` whose body raises writes none.
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
        open_sender: Callable[[], MessageStore] | None = None,
        ticker: Ticking | None = None,
        now_ms: Callable[[], float] = lambda: time.monotonic() * 1000,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Open the store at `path`, as the group `group` if offsets are asked for.

        `limits` None: a broker's, on this machine. `settings` say how the store's lock is taken (offsets are written on
        network file systems too), `open_sender` opens the store for `send`. `ticker` is asked before every pull, and
        closed with the consumer. `now_ms` is a clock that nobody sets, `sleep` takes seconds. Raises OptionError for a
        group's name that RocketMQ refuses and for unknown columns, StorePathError where there is no store.
        """
        super().__init__()
        check_columns(columns)
        self.group = None if group is None else check_consumer_group(group)
        self._reader = PullReader(path, commit_log_path=commit_log_path, read_mode=read_mode)
        self._columns, self._long_polling = tuple(columns), long_polling
        self._limits = limits or limits_of_broker()
        self._check_crc, self._max_decompressed_bytes = check_crc, max_decompressed_bytes
        self._settings = settings or WriterSettings(commit_log_path=commit_log_path)
        self._open_sender = open_sender or self._open_store
        self._ticker = ticker
        self._now_ms, self._sleep = now_ms, sleep
        self._sender: MessageStore | None = None
        self._offset_file: OffsetFile | None = None
        self._turn: GroupTurn | None = None
        self._offsets = OffsetMemory()
        self._wanted: dict[str, RowFilter | None] = {}
        self._is_closed = False
        self._rights = None if group is None else GroupRights(self._reader.path, group, sleep=sleep)
        self._ends_stamp: Stamp = stamp_of_ends(self._reader.path)  # as of the last commit
        self._told: set[str] = set()  # topics of which was said that consumers may not read them

    def __enter__(self) -> "PullConsumer":
        self._refuse_if_closed()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close, and write updated offsets unless the body failed: what it did not finish is to come again.

        The body's error goes on; what fails here then is a note to it.
        """
        if error is None:
            self.close()
            return
        try:
            self._let_go(lambda: None)
        except StoreError as late:
            error.add_note(f"when the consumer of {self._reader.path} was closed after that: {late}")

    @synchronized
    def topics(self) -> list[str]:
        """Return the names of all topics, sorted."""
        self._look()
        return self._reader.topics()

    @synchronized
    def queues(self, topic: str) -> list[QueueKey]:
        """Return the topic's queues by queue id, with a group those that RocketMQ gives to consumers.

        Raises NotFoundError, which names other topics, and NoPermissionError for a topic that a group may not read.
        """
        return self._queues_of(topic)

    def _queues_of(self, topic: str) -> list[QueueKey]:
        self._look()
        queues = self._reader.queues(topic)
        if self.group is None:
            return queues
        configs = self._reader.topic_configs()
        refuse_topic(configs, topic, self.group)
        return [queue for queue in queues if not is_beyond(configs, queue)]

    @synchronized
    def min_offset(self, queue: QueueKey) -> int:
        """Return the queue offset of the first message that is still there. Raises NotFoundError."""
        self._look()
        return self._reader.bounds(queue).min_offset

    @synchronized
    def max_offset(self, queue: QueueKey) -> int:
        """Return the queue offset that the next message will get. Raises NotFoundError."""
        self._look()
        return self._reader.bounds(queue).max_offset

    @synchronized
    def search_offset(self, queue: QueueKey, at: int | datetime, rule: str = "lower") -> int:
        """Return the queue offset for a moment, in ms since the epoch or as a datetime with a time zone.

        "lower": the first message stored at or after it; "upper": the last one at or before it; "nearest": as
        RocketMQ 4.9 answers. Raises OptionError for another rule and for what is no time, seconds too, NotFoundError.
        """
        time_ms = check_whole("search_offset: at", as_ms("search_offset: at", at), -MAX_LONG)
        if is_in_another_unit(time_ms) and not isinstance(at, datetime):
            raise OptionError(f"search_offset: at={time_ms} {describe_unit(time_ms)}.")
        self._look()
        return self._reader.offset_at_time(queue, time_ms, rule)

    @synchronized
    def subscribe(self, topic: str, tags: str | None = None, *, sql92: str | None = None) -> None:
        """Have pulls from the topic give only messages that match: `tags`, as "A || B", or `sql92`, as "a > 5".

        None and "*" want all, and a later call overrides an earlier one. The queues of other topics, of a retry topic
        too, are not affected. It makes the consumer no member of its group. Raises OptionError for a wrong
        expression and for both, NotFoundError. Source: DefaultLitePullConsumer#subscribe, MessageSelector (4.9, 5.3).
        """
        wanted = compile_filter(make_expression(tags=tags, sql92=sql92))
        self._queues_of(topic)
        self._wanted[topic] = wanted

    def pull(
        self, queue: QueueKey, offset: int, max_messages: int = PULL_MESSAGES, *, accept: Accept | None = None
    ) -> PullResult:
        """Pull up to `max_messages` from a queue offset on, and return at once; see `pull.pull`.

        An offset outside the queue is answered by a status. What `subscribe` said of the topic holds; `accept` says of
        an array of tags codes which are wanted. Raises OptionError for what is no queue offset and for `max_messages`
        below 1, NotFoundError, NoPermissionError where a broker refuses the group, DamageError.
        """
        offset, max_messages = check_offset("pull", offset), check_whole("max_messages", max_messages, 1)
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
        """Do what `pull` does, but wait up to `timeout_ms` where there is nothing new (PullStatus.NO_NEW_MSG).

        Woken within milliseconds of an append by any process, a broker too. Messages that `accept` does not want wake
        it every 5 s only. The answer after the wait may be NO_NEW_MSG again. Without long polling the wait is 1 s.
        """
        timeout_ms = check_whole("timeout_ms", timeout_ms, 0)
        offset = check_offset("pull_block_if_not_found", offset)
        max_messages = check_whole("max_messages", max_messages, 1)
        found, due_ms = self._deliver_and_pull(queue, offset, max_messages, accept)
        held_ms = hold_ms(
            timeout_ms, is_not_found=found.pull_status is PullStatus.NO_NEW_MSG, long_polling=self._long_polling
        )
        if held_ms is None:
            return found
        hold = PullHold(offset, found.max_offset, self._now_ms(), held_ms, long_polling=self._long_polling)
        max_offset = found.max_offset

        def is_woken() -> bool:
            nonlocal max_offset, due_ms
            is_woken, max_offset, due_ms = self._look_for_arrival(hold, queue, max_offset, due_ms, accept)
            return is_woken

        # Other threads may use the consumer while this one sleeps.
        wait_for_arrival(is_woken, hold.until_ms, self._now_ms, self._sleep)
        return self._pull(queue, offset, max_messages, accept)

    @synchronized
    def fetch_consume_offset(self, queue: QueueKey, *, from_store: bool = False) -> int | None:
        """Return the next offset that the group is to consume of a queue, None if it has none.

        The one updated last here, else the one in the store; with `from_store` the store's, which counts from then on.
        Raises OptionError without a group, NotFoundError for a queue that is not there, DamageError.
        """
        group = self._group_for("offsets")
        self._check_queue(queue)
        known = self._offsets.get(queue)
        if known is not None and not from_store:
            return known
        offset = read_group_offsets(self._reader.path, group, self._sleep).get(queue)
        if offset is not None:
            self._offsets.learn(queue, offset)
        return offset

    @synchronized
    def update_consume_offset(self, queue: QueueKey, offset: int, *, increase_only: bool = False) -> None:
        """Have the group go on at `offset` in a queue; `commit` writes it. `increase_only` never goes back.

        An offset beyond the queue's end is taken like any other, as DefaultMQPullConsumer#updateConsumeOffset does. But
        if the store was repaired or recovered, or got a queue, since the last commit, `commit` writes at most the end.
        Raises OptionError without a group and for what is no queue offset, NotFoundError for a queue that is not there.
        """
        self._group_for("offsets")
        offset = check_offset("update_consume_offset", offset)
        self._check_queue(queue)
        self._offsets.update(queue, offset, increase_only=increase_only)

    @synchronized
    def commit(self, queues: Iterable[QueueKey] | None = None) -> dict[QueueKey, int]:
        """Write the updated offsets of these queues, or of all, into the store, and return those written.

        They overwrite what the store has, be it larger, and are there for good afterwards. Offsets that other
        programs wrote stay. Raises OptionError without a group, LockTimeoutError while a broker holds the store, and
        what `OffsetFile.commit` raises: nothing is written then, and the next commit tries again.
        """
        return self._commit(queues)

    def _commit(self, queues: Iterable[QueueKey] | None = None) -> dict[QueueKey, int]:
        group = self._group_for("offsets")
        self._refuse_if_closed()
        offsets = self._offsets.unwritten([queues] if isinstance(queues, QueueKey) else queues)
        if not offsets:
            return {}
        disk, root = Disk(), self._reader.path
        if self._offset_file is None:
            # Offsets are one small file that is replaced under the lock: of a network file system they ask no more than
            # a query does that publishes there.
            settings = replace(self._settings, allow_network_store=True)
            self._offset_file = OffsetFile(root, disk, settings, wall_clock_ms, self._sleep)
        paths = GroupPaths(root, group)
        self._turn = self._turn or GroupTurn(paths, disk, self._sleep, self._settings.lock_timeout_ms)
        with self._turn.hold():
            stamp = stamp_of_ends(root)
            ends = SeenEnds(root, self._ends_stamp)
            outcome = self._offset_file.commit(group, offsets, ends)
            if outcome is Outcome.BROKER:
                raise refuse_commit(root, group)
            if outcome is Outcome.WRITTEN:
                by = f"a pull consumer (process {files.process_id()} on host {host_name()})"
                write_published(paths, disk, wall_clock_ms(), by)
        self._ends_stamp = stamp
        if ends.corrected:
            held = read_group_offsets(root, group, self._sleep)
            for queue in ends.corrected:
                _LOG.warning(
                    "rmq: the offset %d of consumer group %s in queue %s is beyond the queue's end, which a repair "
                    "or a recovery may have moved back: the group stands at %s",
                    offsets[queue],
                    group,
                    queue,
                    held.get(queue, "no offset"),
                )
                del offsets[queue]
                self._offsets.forget(queue)
                if queue in held:
                    self._offsets.learn(queue, held[queue])
                    offsets[queue] = held[queue]
        self._offsets.mark_written(offsets)
        return offsets

    def send(self, topic: str, body: bytes | str, **fields: Any) -> SendResult:
        """Append one message and return where it went; fields and errors are those of `MessageStore.send`."""
        return self._sending().send(topic, body, **fields)

    def send_many(self, messages: pa.Table | pa.RecordBatch, *, topic: str | None = None) -> pa.Table:
        """Append the rows of a table and return where each went; see `MessageStore.send_many`."""
        return self._sending().send_many(messages, topic=topic)

    def close(self) -> None:
        """Write updated offsets, settle what was sent, and let go of the store. A second call does nothing.

        Files are closed after an error too. A `with` whose body fails does the same, but for the offsets. Raises what
        `commit` and `MessageStore.close` raise.
        """
        self._let_go(lambda: self.group is not None and self._commit())

    @synchronized
    def _let_go(self, finish: Callable[[], object]) -> None:
        if self._is_closed:
            return
        try:
            finish()
        finally:
            self._is_closed = True
            self._reader.close()
            if self._ticker is not None:
                self._ticker.close()
            if self._sender is not None:
                self._sender.close()

    def _look(self) -> None:
        """Bring the reader up to date."""
        self._refuse_if_closed()
        self._reader.refresh()

    def _deliver(self) -> float | None:
        """Deliver what waited and is due; return when to do it again, on the consumer's clock, None if nobody knows."""
        self._refuse_if_closed()
        wait_ms = None if self._ticker is None else self._ticker.tick_now()
        return None if wait_ms is None else self._now_ms() + wait_ms

    @synchronized
    def _deliver_and_pull(
        self, queue: QueueKey, offset: int, max_messages: int, accept: Accept | None
    ) -> tuple[PullResult, float | None]:
        """Return what a pull gives, and when to deliver again, on the consumer's clock."""
        due_ms = self._deliver()
        return self._look_and_pull(queue, offset, max_messages, accept), due_ms

    @synchronized
    def _pull(self, queue: QueueKey, offset: int, max_messages: int, accept: Accept | None) -> PullResult:
        return self._look_and_pull(queue, offset, max_messages, accept)

    @synchronized
    def _look_for_arrival(
        self, hold: PullHold, queue: QueueKey, max_offset: int, due_ms: float | None, accept: Accept | None
    ) -> tuple[bool, int, float | None]:
        """Say whether a waiting pull is woken; return where the queue ends, and when to deliver again."""
        self._refuse_if_closed()
        has_moved = self._reader.refresh()
        if has_moved or (due_ms is not None and self._now_ms() >= due_ms):
            due_ms = self._deliver()  # what came may be due before anything that was there
            has_moved = self._reader.refresh() or has_moved
        if has_moved:
            max_offset = self._reader.bounds(queue).max_offset
        wanted = self._wanted.get(queue.topic)
        is_woken = hold.is_woken(
            max_offset, self._now_ms(), lambda begin, end: has_wanted(self._reader, queue, begin, end, accept, wanted)
        )
        return is_woken, max_offset, due_ms

    def _check_rights(self, queue: QueueKey) -> None:
        """Raise what a broker refuses to the group; without a group say once what a broker would refuse."""
        configs = self._reader.topic_configs()
        if self._rights is not None and self.group is not None:
            self._rights.check()
            if is_beyond(configs, queue):
                self._reader.bounds(queue)  # a queue that does not exist is another error
            refuse_queue(configs, queue, self.group)
        elif queue.topic not in self._told and (is_closed(configs, queue.topic) or is_beyond(configs, queue)):
            self._told.add(queue.topic)
            closed = is_closed(configs, queue.topic)
            found = describe_closed(configs, queue.topic) if closed else describe_beyond(configs, queue)
            _LOG.warning("rmq: %s. Consumer groups may not read it; this reader has no group, and does", found)

    def _look_and_pull(self, queue: QueueKey, offset: int, max_messages: int, accept: Accept | None) -> PullResult:
        self._look()
        self._check_rights(queue)
        return pull(
            self._reader,
            queue,
            offset,
            max_messages,
            self._limits,
            accept,
            self._columns,
            wanted=self._wanted.get(queue.topic),
            check_crc=self._check_crc,
            max_decompressed_bytes=self._max_decompressed_bytes,
        )

    def _check_queue(self, queue: QueueKey) -> None:
        """Raise NotFoundError for a queue that is not there: a slip of the finger must not be waited for."""
        self._look()
        self._reader.bounds(queue)

    def _group_for(self, what: str) -> str:
        if self.group is None:
            raise OptionError(f"{what} are a group's: open the consumer with group=, the name of a consumer group.")
        return self.group

    @synchronized
    def _sending(self) -> MessageStore:
        self._refuse_if_closed()
        if self._sender is None:
            self._sender = self._open_sender()
        return self._sender

    def _open_store(self) -> MessageStore:
        outbox = OutboxSettings(self._settings.commit_log_path)
        return MessageStore(self._reader.path, self._settings, outbox, "async")

    def _release_locks(self) -> None:
        if self._offset_file is not None:
            self._offset_file.release()
        if self._turn is not None:
            self._turn.release()

    def _refuse_if_closed(self) -> None:
        if self._is_closed:
            raise StoreError(f'the consumer of the store at "{self._reader.path}" was closed. Open it again.')
