"""The pull consumer of a live cluster: lists queues, pulls messages, and reads and commits the offsets of a group.

The consumer is not a member of its group: it sends no heartbeat and takes no part in rebalances. It asks the master of
a queue's broker, and pulls in the name of its group, as RocketMQ's pull consumer does. So it takes the resets that an
administrator leaves for the group's next pull (5.x).

Source: DefaultMQPullConsumerImpl, PullAPIWrapper, RemoteBrokerOffsetStore (4.9, 5.3).
"""

import logging
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from types import TracebackType
from typing import Any, NoReturn

import pyarrow as pa

from rmq_spark.store.argument_checks import check_integer, check_offset, check_time
from rmq_spark.store.backend import BROKER_NAME, COLUMNS
from rmq_spark.store.batch_sink import check_send_back
from rmq_spark.store.cluster.address import DEFAULT_PULL_GROUP, ClusterAddress
from rmq_spark.store.cluster.backend import ClusterBackend
from rmq_spark.store.cluster.broker_calls import BrokerCalls
from rmq_spark.store.cluster.client import ask_master, borrowed_client, monotonic_ms, now_ms
from rmq_spark.store.cluster.offset_commits import OffsetCommits, Outcome
from rmq_spark.store.cluster.pull_answers import ConsumerPull, answer_of_master, expired_result, make_result
from rmq_spark.store.cluster.puller import PullTerms
from rmq_spark.store.cluster.requests import PullRequest
from rmq_spark.store.cluster.responses import PullResponse
from rmq_spark.store.cluster.send_back import send_back
from rmq_spark.store.cluster.write_routes import NewTopics, WriteRoutes
from rmq_spark.store.errors import (
    DamageError,
    OptionError,
    RmqError,
    StoreError,
)
from rmq_spark.store.filter.row_filter import ALL, TAG, RowFilter, compile_filter, make_expression
from rmq_spark.store.format.columns import COLUMNS as RECORD_COLUMNS
from rmq_spark.store.format.failed_rows import failed_rows_of
from rmq_spark.store.format.rows import DecodeLimits
from rmq_spark.store.model import MAX_DECOMPRESSED_BYTES, QueueBounds, QueueKey
from rmq_spark.store.names import check_consumer_group
from rmq_spark.store.offset_memory import OffsetMemory
from rmq_spark.store.pull_result import (
    HOLD_MS,
    PULL_MESSAGES,
    Accept,
    GetMessageStatus,
    PullResult,
    PullStatus,
    check_columns,
)
from rmq_spark.store.synchronized import Synchronized, synchronized

_LOG = logging.getLogger("rmq_spark")

DEFAULT_COLUMNS = (*tuple(RECORD_COLUMNS)[:10], BROKER_NAME)
_MAX_MESSAGES = (1 << 31) - 1  # of Java's int, in which a pull states it
_SHORT_POLLING_S = 1.0  # how long a pull waits without long polling
_CLOSE_MS = 200  # how often a pull that a broker holds looks whether the consumer was closed


class ClusterConsumer(Synchronized):
    """A consumer that pulls messages from a live cluster, and reads and commits a group's offsets. Use it in `with`.

    It has the methods of `PullConsumer`, which are described there, except `send` and `send_many`: use `open_store`. It
    connects at its first call. Every call asks the brokers that it concerns. Several threads may share one consumer:
    its methods run one at a time, but other methods may run while `pull_block_if_not_found` waits.

    Every method raises BackendUnavailableError if a server that it needs does not answer within the request timeout;
    the error names the broker and its address. The next call may succeed. It raises NoPermissionError if the server
    refuses.
    """

    def __init__(
        self,
        address: ClusterAddress,
        group: str | None = None,
        *,
        columns: Sequence[str] = DEFAULT_COLUMNS,
        long_polling: bool = True,
        check_crc: bool = False,
        max_decompressed_bytes: int = MAX_DECOMPRESSED_BYTES,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Make a consumer of the cluster at `address`. With `group`, it can read and commit the offsets of that group.

        Without a group, messages are pulled in the name of the address's `pull_group`. `sleep` takes seconds. Raises
        OptionError for an invalid group name or an unknown column.
        """
        super().__init__()
        check_columns(columns, COLUMNS)
        self.group = None if group is None else check_consumer_group(group)
        self._address = address
        self._backend = ClusterBackend(address, sleep=sleep)
        self._terms = PullTerms(self.group or address.pull_group or DEFAULT_PULL_GROUP, address.namespace)
        self._columns, self._long_polling = tuple(columns), long_polling
        self._limits = DecodeLimits(check_crc, max_decompressed_bytes)
        self._sleep = sleep
        self._offsets = OffsetMemory()
        self._commits = OffsetCommits(self._backend, self._terms)
        self._filters: dict[str, RowFilter | None] = {}
        self._found: set[QueueKey] = set()  # queues that exist, as their brokers have said
        self._is_closed = False

    def __enter__(self) -> "ClusterConsumer":
        self._check_open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the consumer, and commit the updated offsets if the body of `with` did not raise an error."""
        if error is None:
            self.close()
        else:
            self._close(lambda: None)

    def __repr__(self) -> str:
        return f"<ClusterConsumer of {self._address.describe()}>"

    @synchronized
    def topics(self) -> list[str]:
        """Return the sorted names of all topics, RocketMQ's own included."""
        self._check_open()
        self._backend.reopen()
        return self._backend.topics()

    @synchronized
    def queues(self, topic: str) -> list[QueueKey]:
        """Return the topic's queues of all brokers, sorted by broker and queue id, also those of absent brokers.

        Raises NotFoundError if no name server lists the topic.
        """
        return self._queues_of(topic)

    def _queues_of(self, topic: str) -> list[QueueKey]:
        self._check_open()
        self._backend.reopen()
        return self._backend.queues([topic])[topic]

    @synchronized
    def min_offset(self, queue: QueueKey) -> int:
        """Return the offset of the first message that has not expired. Raises NotFoundError for a missing queue.

        For a while after retention a broker may name one that has; the pull from there says where to continue.
        """
        return self._bounds(queue).min_offset

    @synchronized
    def max_offset(self, queue: QueueKey) -> int:
        """Return the queue offset that the next message will get. Raises NotFoundError if the queue does not exist."""
        return self._bounds(queue).max_offset

    def _bounds(self, queue: QueueKey) -> QueueBounds:
        self._check_open()
        return self._backend.look_at_bounds(queue)

    @synchronized
    def search_offset(self, queue: QueueKey, at: int | datetime, rule: str = "lower") -> int:
        """Return the queue offset of the message that was stored at the time `at`, by one rule for all releases.

        `at` is in ms since the epoch, or a datetime with a time zone. `rule` chooses the message: "lower" is the first
        message stored at or after `at` (the queue's end if there is none), and "upper" is the last message stored at or
        before `at` (the first message if there is none). Brokers answer differently, so the place is found by pulls of
        single messages, in the name of the address's `pull_group`.

        Raises OptionError if the rule or the time is invalid or the time is in seconds, and NotFoundError if the queue
        does not exist.
        """
        time_ms = check_time("search_offset: at", at)
        if rule == "nearest":
            raise OptionError(
                'search_offset: rule="nearest" depends on files of the store; expected "lower" or "upper" in a cluster.'
            )
        if rule not in ("lower", "upper"):
            raise OptionError(f'rule="{rule}" is none of: lower, upper.')
        first = self._bounds(queue).min_offset
        if rule == "lower":
            return self._backend.offsets_at({queue: time_ms})[queue]
        return max(self._backend.offsets_at({queue: time_ms + 1})[queue] - 1, first)

    @synchronized
    def subscribe(self, topic: str, tags: str | None = None, *, sql92: str | None = None) -> None:
        """Set a filter: from now on, pulls from `topic` return only the messages that match.

        The filter is either `tags`, such as "A || B", or an SQL92 expression `sql92`, such as "a > 5". None and "*"
        match all messages. The broker filters, and all that comes is tested again. A broker that does not evaluate
        SQL92 (enablePropertyFilter=false) sends all messages. A later call for the same topic replaces the filter.

        Raises OptionError if the expression is invalid or both arguments are given, and the errors of `queues`.
        Source: DefaultLitePullConsumer#subscribe, MessageSelector (4.9, 5.3).
        """
        row_filter = compile_filter(make_expression(tags=tags, sql92=sql92))
        self._queues_of(topic)
        self._filters[topic] = row_filter

    @synchronized
    def pull(
        self, queue: QueueKey, offset: int, max_messages: int = PULL_MESSAGES, *, accept: Accept | None = None
    ) -> PullResult:
        """Pull up to `max_messages` messages, starting at the queue offset `offset`. Does not wait for messages.

        An offset outside the queue is not an error: the result then has a status that describes it. So has the first
        pull after an administrator has reset the group's offset: OFFSET_ILLEGAL, with the new offset as
        `next_begin_offset`. This also replaces an offset that was updated and not committed. Only messages that match
        the topic's filter (`subscribe`) are returned. `accept` is a further filter: it gets an array with the tags code
        of each message and returns which of them are wanted.

        Raises OptionError for an invalid queue offset or a `max_messages` below 1, NotFoundError if the queue does not
        exist, NoPermissionError if the broker refuses, and DamageError if a record is damaged.
        """
        offset, max_messages = check_offset("pull", offset), check_integer("max_messages", max_messages, 1)
        return self._pull(queue, offset, max_messages, accept)

    def _pull(self, queue: QueueKey, offset: int, max_messages: int, accept: Accept | None) -> PullResult:
        pull = self._make_pull(queue, offset, max_messages, 0, accept)
        client, timeout_ms = self._backend.client, self._address.request_timeout_ms
        answer = ask_master(
            lambda renews: self._backend.find_address(queue, renews=renews),
            lambda to: answer_of_master(pull, to, client.call(to, pull.request, timeout_ms)),
        )
        return self._result(pull, answer)

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

        The broker holds the pull, and answers within milliseconds after a message has arrived. It looks at the time of
        held pulls every 5 s only, so without a message the wait may take up to 5 s longer. If the filters of the broker
        reject all new messages, the wait ends at the next of these looks. `accept` is tested here, so any message ends
        the wait; the status is NO_MATCHED_MSG if none is wanted. If the consumer was opened without long polling, the
        wait is 1 s instead of `timeout_ms`. If the broker becomes silent, BackendUnavailableError is raised 10 s after
        the wait should have ended, or after the request timeout if that is longer.
        """
        timeout_ms = check_integer("timeout_ms", timeout_ms, 0)
        offset = check_offset("pull_block_if_not_found", offset)
        max_messages = check_integer("max_messages", max_messages, 1)
        if self._long_polling and timeout_ms:
            pull = self._begin_hold(queue, offset, max_messages, timeout_ms, accept)
            # Other threads may use the consumer while the broker holds this pull.
            answer = ask_master(
                lambda renews: self._find_address(queue, renews=renews), lambda to: self._hold(pull, to)
            )
            return self._end_hold(pull, answer)
        found = self.pull(queue, offset, max_messages, accept=accept)
        if self._long_polling or found.pull_status is not PullStatus.NO_NEW_MSG:
            return found
        self._sleep(_SHORT_POLLING_S)
        return self.pull(queue, offset, max_messages, accept=accept)

    @synchronized
    def _begin_hold(
        self, queue: QueueKey, offset: int, max_messages: int, hold_ms: int, accept: Accept | None
    ) -> ConsumerPull:
        return self._make_pull(queue, offset, max_messages, hold_ms, accept)

    @synchronized
    def _find_address(self, queue: QueueKey, *, renews: bool) -> str:
        self._check_open()
        return self._backend.find_address(queue, renews=renews)

    def _hold(self, pull: ConsumerPull, to: str) -> PullResponse:
        """Send a pull that the broker may hold, over a connection that no other thread uses, and return its answer."""
        with borrowed_client(self._address) as client:
            client.name_brokers({to: pull.queue.broker})
            ticket = client.submit(to, pull.request)
            while not ticket.is_done:
                client.wait([ticket], _CLOSE_MS)
                self._check_open()
            return answer_of_master(pull, to, ticket.result())

    @synchronized
    def _end_hold(self, pull: ConsumerPull, answer: PullResponse) -> PullResult:
        self._check_open()
        return self._result(pull, answer)

    def _make_pull(
        self, queue: QueueKey, offset: int, max_messages: int, hold_ms: int, accept: Accept | None
    ) -> ConsumerPull:
        self._check_queue(queue)
        wanted = self._filters.get(queue.topic)
        expression = self._backend.broker_filter(queue, wanted)
        request = PullRequest(
            self._terms.stored_queue(queue),
            offset,
            min(max_messages, _MAX_MESSAGES),
            self._terms.stored_group,
            *((ALL, TAG) if expression is None else (expression.text, expression.kind)),
            hold_ms,
        )
        return ConsumerPull(queue, offset, request, expression, wanted, accept)

    def _result(self, pull: ConsumerPull, answer: PullResponse) -> PullResult:
        """Return the result of a pull from the answer of the broker."""
        if answer.reason == GetMessageStatus.OFFSET_RESET:
            self._take_reset(pull.queue, answer.next_offset)
        try:
            return make_result(pull, answer, self._columns, self._limits, self._terms.namespace)
        except DamageError:
            # A broker of 4.9 may answer any bytes for a message that has expired.
            now = self._backend.look(pull.queue)
            if not isinstance(now, QueueBounds) or now.min_offset <= pull.offset:
                raise
            return expired_result(now, self._columns)

    def _take_reset(self, queue: QueueKey, offset: int) -> None:
        """Replace the offset in this object, which is from before the reset: the broker would accept it from now on."""
        if self._offsets.uncommitted([queue]):
            self._offsets.update(queue, offset)
        else:
            self._offsets.set_committed(queue, offset)

    @synchronized
    def fetch_consume_offset(self, queue: QueueKey, *, from_store: bool = False) -> int | None:
        """Return the queue offset of the next message that the group will consume, or None if the group has no offset.

        This is the last offset that `update_consume_offset` set in this object, or else the committed offset. With
        `from_store` it is always the committed offset. A committed offset that was read replaces the one in this
        object. A broker of 4.9 answers 0 instead of None if the queue's first message is recent.

        Raises OptionError if the consumer has no group, and NotFoundError if the queue does not exist.
        """
        self._group_for("offsets")
        self._check_queue(queue)
        updated = self._offsets.get(queue)
        if updated is not None and not from_store:
            return updated
        return self._read_offset(queue)

    def _read_offset(self, queue: QueueKey) -> int | None:
        offset = self._commits.read(queue)
        if offset is not None:
            self._offsets.set_committed(queue, offset)
        return offset

    @synchronized
    def update_consume_offset(self, queue: QueueKey, offset: int, *, increase_only: bool = False) -> None:
        """Set the group's next offset in a queue. Call `commit` to send it to the broker.

        With `increase_only`, a lower offset than the present one is ignored. An offset beyond the queue's end is
        accepted, as in DefaultMQPullConsumer#updateConsumeOffset.

        Raises OptionError if the consumer has no group or the queue offset is invalid, and NotFoundError if the queue
        does not exist.
        """
        self._group_for("offsets")
        offset = check_offset("update_consume_offset", offset)
        self._check_queue(queue)
        self._offsets.update(queue, offset, increase_only=increase_only)

    @synchronized
    def commit(self, queues: Iterable[QueueKey] | None = None) -> dict[QueueKey, int]:
        """Send the offsets that were updated since the last commit to the brokers, and return the offsets committed.

        With `queues`, only the offsets of these queues are sent. They replace the committed offsets of their queues,
        even larger ones. A broker writes them to its disk within 5 s. Returns {} if there was nothing to send.

        If an administrator has reset the group's offset in a queue, the broker ignores commits until the group's next
        pull from the queue (5.x). Then the result has the reset's offset, and the log says so.

        Raises OptionError if the consumer has no group, BackendUnavailableError if a broker does not answer, and
        NotFoundError if the topic was deleted. After an error the offsets in other brokers may have been committed; the
        next commit sends the rest again.
        """
        return self._commit(queues)

    def _commit(self, queues: Iterable[QueueKey] | None = None) -> dict[QueueKey, int]:
        self._group_for("offsets")
        self._check_open()
        offsets = self._offsets.uncommitted([queues] if isinstance(queues, QueueKey) else queues)
        outcomes = self._commits.send(offsets)
        committed = {queue: offsets[queue] for queue, outcome in outcomes.items() if outcome is Outcome.COMMITTED}
        self._offsets.mark_committed(committed)
        for outcome in outcomes.values():
            if isinstance(outcome, RmqError):
                raise outcome
        for queue in [queue for queue, outcome in outcomes.items() if outcome is Outcome.IGNORED]:
            self._offsets.forget(queue)
            offset = self._read_offset(queue)
            _LOG.warning(
                "rmq: an administrator has reset the offset of consumer group %s in queue %s: it is %s, and the broker "
                "ignores the offset %d until the group pulls from the queue",
                *(self.group, queue, offset, offsets[queue]),
            )
            if offset is not None:
                committed[queue] = offset
        return {queue: committed[queue] for queue in offsets if queue in committed}

    def send(self, topic: str, body: bytes | str, **fields: Any) -> NoReturn:
        """Raise OptionError, because this consumer sends no new messages."""
        _refuse_write("send")

    def send_many(self, messages: pa.Table | pa.RecordBatch, *, topic: str | None = None) -> NoReturn:
        """Raise OptionError, because this consumer sends no new messages."""
        _refuse_write("send_many")

    @synchronized
    def send_back(
        self,
        messages: PullResult | pa.Table | pa.RecordBatch | list[dict[str, object]],
        delay_level: int = 0,
        max_reconsume_times: int | None = None,
        *,
        expired_original: str = "error",
    ) -> pa.Table:
        """Send back messages that the group failed to consume, and return where their copies go.

        `messages` is the result of a pull, or some of its rows, with the column brokerName. The copies are delivered in
        the topic %RETRY%group. `ClusterProducer.send_back` describes the other arguments, the result and the errors.
        Raises OptionError also if the consumer has no group.
        """
        self._group_for("retries")
        self._check_open()
        terms = check_send_back(self.group, delay_level, max_reconsume_times, expired_original)
        batch = failed_rows_of(messages.messages if isinstance(messages, PullResult) else messages)
        client = self._backend.client
        routes = WriteRoutes(client, monotonic_ms, NewTopics(is_allowed=False))
        calls = BrokerCalls(client, routes, self._address.request_timeout_ms, monotonic_ms)
        return send_back(client, routes, calls, batch, terms, now_ms(), delay_level)

    def close(self) -> None:
        """Commit the updated offsets, and release the connections. A second call does nothing.

        The connections are released even if this raises an error. Raises the errors of `commit`.
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
            self._backend.close()

    def _check_queue(self, queue: QueueKey) -> None:
        """Raise NotFoundError if the queue does not exist. A broker that is away, or refuses, is not an error here."""
        self._check_open()
        if queue in self._found:
            return
        answer = self._backend.look(queue)
        if isinstance(answer, QueueBounds) or queue in self._backend.queues([queue.topic])[queue.topic]:
            self._found.add(queue)

    def _group_for(self, what: str) -> None:
        if self.group is None:
            raise OptionError(f"{what} need a consumer group: open the consumer with group=, the group's name.")

    def _release_locks(self) -> None:
        """Close the connections if an interrupt ended a call, because they may be in any state."""
        error = sys.exception()
        if error is not None and not isinstance(error, Exception):
            self._backend.abandon(error)

    def _check_open(self) -> None:
        if self._is_closed:
            raise StoreError(f"the consumer of {self._address.describe()} was closed. Open it again.")


def _refuse_write(call: str) -> NoReturn:
    raise OptionError(f"{call}: the consumer of a cluster sends no new messages; expected open_store(name_server=...).")


__all__ = ["DEFAULT_COLUMNS", "ClusterConsumer"]
