"""Sending failed messages back: their check at the brokers that store them, and the requests that copy them.

The broker that stores a message makes the copy, for the retry topic or the dead letters of the group. It copies
whatever record is at the physical offset in the request, without a look at topic and queue. So the record is read first
and compared with the row:

| the broker has at the row's physical offset | the row |
| --- | --- |
| the record of the row's topic, queue, queue offset and reconsumeTimes | is sent back |
| another record | is an error: not a message of this cluster |
| no record, and the queue begins after the row's queue offset | has expired: an error, or is sent from the row |
| no record, though the queue has the row's queue offset, or never had it | is an error |

All rows are checked before the first one is sent. Requests that send back cannot be recognised by a broker, so a
request with an unknown outcome is sent again, and its message is copied twice: at least once. (`sent_copies` finds the
copies of an earlier attempt.) A broker does not store why a message failed, so the column error is only logged.

Source: DefaultMQPushConsumerImpl#sendMessageBack, AbstractSendMessageProcessor#consumerSendMsgBack (4.9, 5.3).
"""

import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rmq_spark.store.batch_sink import SendBackTerms
from rmq_spark.store.cluster.address import DEFAULT_PULL_GROUP
from rmq_spark.store.cluster.broker_calls import BrokerCalls, Call
from rmq_spark.store.cluster.client import ClusterClient
from rmq_spark.store.cluster.namespace import unwrap_name, wrap_name
from rmq_spark.store.cluster.positions import read_look
from rmq_spark.store.cluster.requests import MaxOffsetRequest, PullRequest, RecordAtRequest
from rmq_spark.store.cluster.resent_messages import (
    FIRST_LEVEL,
    ORIGIN_MESSAGE_ID,
    Resender,
    ResentMessage,
)
from rmq_spark.store.cluster.responses import OffsetResponse, PullResponse, RecordsResponse
from rmq_spark.store.cluster.send_requests import SendBackRequest, SendRequest
from rmq_spark.store.cluster.write_routes import WriteRoutes
from rmq_spark.store.errors import NoPermissionError, NotFoundError, OptionError, RmqError
from rmq_spark.store.format.failed_rows import FailedRows
from rmq_spark.store.format.java import decode_host
from rmq_spark.store.format.message_columns import RowFault
from rmq_spark.store.format.message_ids import OffsetMessageId
from rmq_spark.store.format.properties import RETRY_TOPIC, UNIQ_KEY, parse
from rmq_spark.store.format.record import INNER_BATCH, Record, decode_record
from rmq_spark.store.model import QueueKey
from rmq_spark.store.names import CLOSED_TOPICS, RETRY_TOPIC_PREFIX, dlq_topic, retry_topic

_LOG = logging.getLogger("rmq_spark")

Identity: TypeAlias = tuple[str, int, int]  # broker, physical offset and queue offset of a message
_NO_END = 1 << 62
_SHOWN = 3  # errors in the log, and rows in an error
# The columns of the table that `send_back` returns. `topic` is null where the limit of the group itself decides. The
# level of a dead letter is 0.
SENT_BACK = pa.schema(
    [
        ("topic", pa.string()),
        ("brokerName", pa.string()),
        ("delayLevel", pa.int32()),
        ("reconsumeTimes", pa.int32()),
    ]
)


class BackRow(NamedTuple):
    """A row that was checked: its message (`queue` without namespace), and how it is sent back.

    `size` is that of the record in bytes. If `resent` is not None, the message has expired and is sent again.
    `message_id` is the UNIQ_KEY of the message, or "". `origin_id` is the ORIGIN_MESSAGE_ID that a copy of it has, and
    `reconsume_times` the number of its own retries.
    """

    queue: QueueKey
    queue_offset: int
    physical_offset: int
    delay_level: int
    message_id: str
    size: int
    resent: ResentMessage | None = None
    origin_id: str = ""
    reconsume_times: int = 0

    @property
    def identity(self) -> Identity:
        """Broker and offsets, which rows of the same message share."""
        return self.queue.broker, self.physical_offset, self.queue_offset


class _Original(NamedTuple):
    """The fields of a record that are compared with a row, and the size of the record (bytes)."""

    topic: str
    queue_id: int
    queue_offset: int
    reconsume_times: int
    sys_flag: int
    properties: bytes
    size: int
    offset_id: str


@dataclass(frozen=True, slots=True)
class _Places:
    """Where the messages of rows are, as the rows say: lists by row. `queues` have names without namespace."""

    failed: FailedRows
    queues: list[QueueKey]
    queue_offsets: list[int]
    physical_offsets: list[int]

    @classmethod
    def of(cls, failed: FailedRows, group: str) -> "_Places":
        """Return the places of rows. Raises OptionError or RowFault if a row does not name its broker."""
        brokers, retry = _read_brokers(failed), retry_topic(group)
        unnamed: list[str | None] = [None] * len(failed)
        physical = unnamed if failed.physical_topics is None else failed.physical_topics.to_pylist()
        seen = unnamed if failed.topics is None else failed.topics.to_pylist()
        queues = [
            # A consumer sees a retried message in its first topic.
            QueueKey(stored or (retry if times > 0 else str(topic)), queue_id, broker)
            for stored, topic, times, queue_id, broker in zip(
                physical, seen, failed.reconsume_times.tolist(), failed.queue_ids.tolist(), brokers, strict=True
            )
        ]
        return cls(failed, queues, failed.queue_offsets.tolist(), failed.physical_offsets.tolist())

    def identity(self, row: int) -> Identity:
        """Return what rows of the same message have in common."""
        return self.queues[row].broker, self.physical_offsets[row], self.queue_offsets[row]


class RowCheck:
    """The check of rows at their brokers. For one thread. `now_ms` is the current time, in ms since the epoch."""

    def __init__(
        self, client: ClusterClient, routes: WriteRoutes, calls: BrokerCalls, terms: SendBackTerms, now_ms: int
    ) -> None:
        self._routes, self._calls, self._terms = routes, calls, terms
        self._namespace = client.address.namespace
        self._pull_group = wrap_name(self._namespace, client.address.pull_group or DEFAULT_PULL_GROUP)
        self._resender = Resender(terms, routes.topic_of, now_ms)

    def check(
        self,
        rows: pa.RecordBatch,
        delay_level: int = 0,
        first_row: int | None = 0,
        known: set[Identity] | None = None,
    ) -> list[BackRow]:
        """Return how each row is sent back, in the order of the rows.

        `delay_level` applies to rows without a level of their own. If `known` is given, rows with an identity in it are
        left out, so that of several rows of a message only the first stays; the identities of the others are added.
        Raises OptionError if a row does not identify a message of the cluster, and NotFoundError if its message has
        expired. The error text contains the number of the row; the first row has the number `first_row` (None: no
        number). Raises the errors of brokers that refuse or stay away.
        """
        try:
            places = _Places.of(FailedRows.of(rows, delay_level), self._terms.group)
            chosen = list(range(rows.num_rows)) if known is None else _without(places, known)
            originals, expired = self._find(places, chosen)
            if expired and self._terms.expired_original != "resend":
                raise _expired(places, expired[0])
            resent = {
                row: self._resender.encode(
                    rows, places.failed, row, places.queues[row], None if first_row is None else first_row + row
                )
                for row in expired
            }
        except RowFault as fault:
            row = "" if first_row is None else f"row {first_row + fault.row}: "
            kind = NotFoundError if isinstance(fault, _ExpiredFault) else OptionError
            raise kind(f"{row}{fault.what}") from None
        return [self._back_row(places, row, originals.get(row), resent.get(row)) for row in chosen]

    def _find(self, places: _Places, chosen: Sequence[int]) -> tuple[dict[int, _Original], list[int]]:
        """Return the records of rows, and the rows whose message has expired.

        Raises RowFault for the first row that is not that of a message.
        """
        originals, faults = dict[int, _Original](), dict[int, RowFault]()

        def make(number: int) -> Call:
            queue = places.queues[chosen[number]]
            stored = self._routes.topic_of(queue.topic)
            request = RecordAtRequest(places.physical_offsets[chosen[number]], stored, queue.broker)
            return Call(queue.topic, queue.broker, request)

        def on_response(number: int, response: RecordsResponse) -> None:
            row = chosen[number]
            original = _read_original(response, places.physical_offsets[row])
            if original is None:
                return
            fault = self._compare(places, row, original)
            if fault is None:
                originals[row] = original
            else:
                faults[row] = fault

        self._calls.run([places.queues[row].broker for row in chosen], make, on_response)
        missing = [row for row in chosen if row not in originals and row not in faults]
        expired = self._find_expired(places, missing) if missing else set()
        for row in missing:
            if row not in expired:
                why = f"no message begins at its commitLogOffset on broker {places.queues[row].broker}"
                faults[row] = _not_of_cluster(places, row, why)
        if faults:
            raise faults[min(faults)]
        return originals, sorted(expired)

    def _find_expired(self, places: _Places, missing: Sequence[int]) -> set[int]:
        """Return those of the rows without a record whose queue begins after them, so that it had them."""
        ends = dict[QueueKey, int]()
        queues = sorted({places.queues[row] for row in missing})

        def ask_end(number: int) -> Call:
            queue = queues[number]
            return Call(queue.topic, queue.broker, MaxOffsetRequest(self._stored(queue)))

        def note_end(number: int, response: OffsetResponse) -> None:
            ends[queues[number]] = response.offset

        # A pull beyond the end would make a broker of 4.9 write a message (OFFSET_MOVED_EVENT).
        with suppress(NoPermissionError):  # 5.3 asks for the right Get, which a reader may lack
            self._calls.run([queue.broker for queue in queues], ask_end, note_end)
        held = [row for row in missing if places.queue_offsets[row] < ends.get(places.queues[row], _NO_END)]
        expired = set[int]()

        def pull(number: int) -> Call:
            row = held[number]
            queue = places.queues[row]
            request = PullRequest(self._stored(queue), places.queue_offsets[row], 1, self._pull_group)
            return Call(queue.topic, queue.broker, request)

        def note_first(number: int, response: PullResponse) -> None:
            row = held[number]
            offset = places.queue_offsets[row]
            if read_look(self._stored(places.queues[row]), offset, response).first > offset:
                expired.add(row)

        self._calls.run([places.queues[row].broker for row in held], pull, note_first)
        return expired

    def _stored(self, queue: QueueKey) -> QueueKey:
        return QueueKey(self._routes.topic_of(queue.topic), queue.queue_id, queue.broker)

    def _compare(self, places: _Places, row: int, original: _Original) -> RowFault | None:
        """Return the fault of a row that does not agree with its record, or None."""
        shown = places.failed.describe(row)
        if original.topic in CLOSED_TOPICS:
            return RowFault(
                row,
                f"{shown} cannot be sent back: its topic is RocketMQ's own, and no group consumes that. Leave the row "
                "out.",
            )
        if original.sys_flag & INNER_BATCH:
            return RowFault(
                row,
                f"{shown} cannot be sent back: its record contains several messages (an inner batch), and a record is "
                "copied as a whole. Leave the row out.",
            )
        for what, agrees in (
            ("queueId", original.queue_id == places.queues[row].queue_id),
            ("queueOffset", original.queue_offset == places.queue_offsets[row]),
            ("reconsumeTimes", original.reconsume_times == places.failed.reconsume_times[row]),
            ("topic", self._topics_agree(places, row, original)),
        ):
            if not agrees:
                return _not_of_cluster(
                    places,
                    row,
                    f"the record at its commitLogOffset has another {what}; found {original.topic}/{original.queue_id} "
                    f"at queue offset {original.queue_offset}, reconsumeTimes {original.reconsume_times}",
                )
        return None

    def _topics_agree(self, places: _Places, row: int, original: _Original) -> bool:
        """Return whether the row's topic is that of its record: the physical one, or the one that a consumer sees."""
        failed, stored_name = places.failed, self._routes.topic_of
        if failed.physical_topics is not None and failed.physical_topics[row].is_valid:
            return stored_name(failed.physical_topics[row].as_py()) == original.topic
        assert failed.topics is not None, row
        seen = original.topic
        if seen.startswith(RETRY_TOPIC_PREFIX):
            seen = parse(original.properties).get(RETRY_TOPIC, seen)
        return stored_name(failed.topics[row].as_py()) == stored_name(unwrap_name(self._namespace, seen))

    def _back_row(self, places: _Places, row: int, original: _Original | None, resent: ResentMessage | None) -> BackRow:
        queue = places.queues[row]
        message_id, origin_id, size = "", "", 0 if resent is None else len(resent.body)
        if original is not None:
            queue = QueueKey(unwrap_name(self._namespace, original.topic), queue.queue_id, queue.broker)
            properties = parse(original.properties)
            message_id, size = properties.get(UNIQ_KEY, ""), original.size
            origin_id = properties.get(ORIGIN_MESSAGE_ID, original.offset_id)
        return BackRow(
            queue,
            places.queue_offsets[row],
            places.physical_offsets[row],
            int(places.failed.asked_levels[row]),
            message_id,
            size,
            resent,
            origin_id,
            int(places.failed.reconsume_times[row]),
        )


class _ExpiredFault(RowFault):
    """The error of a row whose message is no longer in the log."""


def _read_brokers(failed: FailedRows) -> list[str]:
    if failed.brokers is None:
        raise OptionError(
            "rows cannot be sent back to a cluster without the column brokerName, the broker that stores the message; "
            "expected it. The source has this column by default: keep it."
        )
    if failed.brokers.null_count:
        row = failed.brokers.is_null().index(True).as_py()
        raise RowFault(row, "its brokerName is null; expected the broker that stores the message")
    names: list[str] = failed.brokers.to_pylist()
    return names


def _without(places: _Places, known: set[Identity]) -> list[int]:
    """Return the rows without an identity in `known`, and add theirs."""
    chosen = []
    for row in range(len(places.queues)):
        identity = places.identity(row)
        if identity not in known:
            known.add(identity)
            chosen.append(row)
    return chosen


def _read_original(response: RecordsResponse, physical_offset: int) -> _Original | None:
    """Return the record in a response, or None if there is none at this offset.

    A broker has none if the message has expired. At an offset inside of a record it may return any bytes.
    """
    record = decode_record(response.records) if len(response.records) else None
    if not isinstance(record, Record) or record.physical_offset != physical_offset:
        return None
    return _Original(
        record.topic.decode("utf-8", "replace"),
        record.queue_id,
        record.queue_offset,
        record.reconsume_times,
        record.sys_flag,
        bytes(record.properties),
        record.total_size,
        str(OffsetMessageId(decode_host(record.store_host), physical_offset)),
    )


def _not_of_cluster(places: _Places, row: int, why: str) -> RowFault:
    return RowFault(
        row,
        f"{places.failed.describe(row)} is not a message of this cluster: {why}. Send back rows as the source returns "
        "them, with brokerName, commitLogOffset, physicalTopic, queueId, queueOffset and reconsumeTimes unchanged, to "
        "the cluster that they were read from.",
    )


def _expired(places: _Places, row: int) -> _ExpiredFault:
    return _ExpiredFault(
        row,
        f"{places.failed.describe(row)} cannot be sent back: its message has expired from the broker's log. Set "
        "expiredOriginal=resend to send it from the row, which then needs the column body (and tags, keys, properties "
        "to keep them); or leave the row out.",
    )


def send_checked(calls: BrokerCalls, routes: WriteRoutes, terms: SendBackTerms, rows: Sequence[BackRow]) -> None:
    """Send rows back that were checked. Raises the first error of a broker, with a note of what was sent back."""
    group, retry = routes.topic_of(terms.group), retry_topic(terms.group)
    done = np.zeros(len(rows), np.bool_)

    def make(number: int) -> Call:
        row = rows[number]
        queue, broker = row.queue, row.queue.broker
        if row.resent is None:
            stored = QueueKey(routes.topic_of(queue.topic), queue.queue_id, broker)
            return Call(
                queue.topic,
                broker,
                SendBackRequest(
                    stored, row.physical_offset, group, row.delay_level, row.message_id, terms.max_reconsume_times
                ),
            )
        message, to = row.resent, QueueKey(routes.topic_of(retry), 0, broker)
        request = SendRequest(
            to,
            message.body,
            message.properties,
            message.born_ms,
            message.flag,
            reconsume_times=message.times,
            max_reconsume_times=message.max_times,
        )
        return Call(queue.topic, broker, request)

    def on_response(number: int, _: object) -> None:
        done[number] = True

    try:
        calls.run([row.queue.broker for row in rows], make, on_response)
    except RmqError as error:
        error.add_note(_describe_rest(rows, done))
        raise


def _describe_rest(rows: Sequence[BackRow], done: NDArray[np.bool_]) -> str:
    rest = np.flatnonzero(~done).tolist()
    shown = ", ".join(f"{rows[at].queue} at queue offset {rows[at].queue_offset}" for at in rest[:_SHOWN])
    more = f" and {len(rest) - _SHOWN} more" if len(rest) > _SHOWN else ""
    return f"rmq: {len(rows) - len(rest)} of {len(rows)} rows were sent back before that. Not sent back: {shown}{more}."


def log_errors(rows: pa.RecordBatch, *, is_first: bool = True) -> None:
    """Log the first values of the column error, which a broker does not store. Only if these rows are the first."""
    if not is_first or "error" not in rows.schema.names:
        return
    errors = rows.column("error").drop_null()
    if len(errors):
        shown = "; ".join(errors.slice(0, _SHOWN).to_pylist())
        _LOG.warning("rmq: rows are sent back with errors, which brokers do not store. The first: %s", shown)


def send_back(
    client: ClusterClient,
    routes: WriteRoutes,
    calls: BrokerCalls,
    rows: pa.RecordBatch,
    terms: SendBackTerms,
    now_ms: int,
    delay_level: int = 0,
) -> pa.Table:
    """Check rows, then send all of them back. Return a table with the columns `SENT_BACK`, one row for each row.

    `rows` have the types that `failed_rows_of` gives them. Raises the errors of `RowCheck.check` before anything is
    sent, and those of `send_checked`. For programs; a repeated call sends the rows back again.
    """
    checked = RowCheck(client, routes, calls, terms, now_ms).check(rows, delay_level)
    log_errors(rows)
    send_checked(calls, routes, terms, checked)
    failed, limit = FailedRows.of(rows, delay_level), terms.max_reconsume_times
    are_dead = failed.asked_levels < 0
    if limit is not None:
        are_dead |= failed.reconsume_times >= limit
    levels = np.where(
        failed.asked_levels == 0, FIRST_LEVEL + np.maximum(failed.reconsume_times, 0), failed.asked_levels
    )
    topics: list[str | None] = [
        dlq_topic(terms.group) if is_dead else None if limit is None else retry_topic(terms.group)
        for is_dead in are_dead.tolist()
    ]
    levels[are_dead] = 0
    columns = [pa.array(topics), failed.brokers, pa.array(levels), pa.array(failed.copy_times)]
    return pa.table([one.cast(kind.type) for one, kind in zip(columns, SENT_BACK, strict=True)], schema=SENT_BACK)
