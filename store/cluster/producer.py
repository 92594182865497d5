"""The producer of a live cluster: it sends messages, sends failed messages back, and creates topics.

A request whose outcome is not known is not repeated: the message may be stored. The caller gets UnknownOutcomeError
with the message ids, and can look for them. A request after which nothing can have been stored is repeated, at another
broker if no queue id and no sharding key bind the message to its queue.

Source: DefaultMQProducerImpl (4.9, 5.3), which repeats requests with unknown outcomes too.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from types import TracebackType

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rmq_spark.store.batch_sink import check_send_back
from rmq_spark.store.cluster.address import ClusterAddress
from rmq_spark.store.cluster.backend import ClusterBackend
from rmq_spark.store.cluster.broker_calls import BrokerCalls
from rmq_spark.store.cluster.client import borrowed_client, monotonic_ms, now_ms
from rmq_spark.store.cluster.message_spool import MessageSpool
from rmq_spark.store.cluster.send_back import send_back
from rmq_spark.store.cluster.send_requests import SendRequest, SendResponse
from rmq_spark.store.cluster.sender import OnStored, Outgoing, Sender, SendTerms, note_refused, report_unknown
from rmq_spark.store.cluster.sink import TaskRoutes, refuse_timers
from rmq_spark.store.cluster.write_routes import NewTopics, WriteRoutes
from rmq_spark.store.errors import (
    BackendUnavailableError,
    BrokerError,
    NotFoundError,
    RmqError,
    StoreError,
    UnknownOutcomeError,
)
from rmq_spark.store.format.batch_items import (
    BROKER_NAME,
    MAX_ITEM_PROPERTIES_BYTES,
    ItemEncoder,
    encode_item,
)
from rmq_spark.store.format.body_codec import BodyRules
from rmq_spark.store.format.broker_router import BrokerRouter
from rmq_spark.store.format.byte_ranges import Bytes
from rmq_spark.store.format.config_json import PERM_READ, PERM_WRITE, TopicConfig
from rmq_spark.store.format.failed_rows import failed_rows_of
from rmq_spark.store.format.message_ids import UniqueIds
from rmq_spark.store.format.message_table import check_new_topic, check_topic, message_of, messages_of
from rmq_spark.store.format.properties import UNIQ_KEY
from rmq_spark.store.format.single_message import PlainMessage, SingleMessage
from rmq_spark.store.html_tables import box
from rmq_spark.store.model import QueueBounds, QueueKey
from rmq_spark.store.names import RETRY_TOPIC_PREFIX
from rmq_spark.store.send_result import SendResult, SendStatus
from rmq_spark.store.synchronized import Synchronized, synchronized

_ROUTES_MS = 30_000.0  # the interval at which routes are asked for again (ClientConfig#pollNameServerInterval)
_PIECE_ROWS, _PIECE_BYTES = 1 << 15, 64 << 20
_HEX_CHARS = 16  # of the physical offset at the end of an offsetMsgId
_ONE_ID = re.compile(r"[0-9A-F]{16,40}[0-7][0-9A-F]{15}")
_NO_DIGIT, _SIGN = 16, 8
_NIBBLES = np.full(256, _NO_DIGIT, np.uint8)
for _digits in (b"0123456789ABCDEF", b"0123456789abcdef"):
    _NIBBLES[np.frombuffer(_digits, np.uint8)] = np.arange(16)
_SHIFTS = np.arange(4 * (_HEX_CHARS - 1), -1, -4)
_MAX_PAIRS_BYTES = MAX_ITEM_PROPERTIES_BYTES - len(UNIQ_KEY) - 2  # of a properties string, without the id
_STATUSES = {status.name: status for status in SendStatus}

# The columns of the table that `send_many` returns. The table has one row for each message. `msgId` is the UNIQ_KEY.
# The last three columns are null where the broker's answer has no valid value.
SENT = pa.schema(
    [
        ("topic", pa.string()),
        ("brokerName", pa.string()),
        ("queueId", pa.int32()),
        ("msgId", pa.string()),
        ("queueOffset", pa.int64()),
        ("commitLogOffset", pa.int64()),
    ]
)


@dataclass(frozen=True, slots=True)
class ProducerSettings:
    """How a producer sends. `wait_ms` is how long a call waits for a broker that stores nothing."""

    body_rules: BodyRules
    new_topics: NewTopics
    wait_ms: float = 3000


class ClusterProducer(Synchronized):
    """A live cluster that is open for sending. Use it in `with`, or call `close`.

    It has the methods of `Producer`, which are described there, except those for files of a store. Several threads may
    share one producer: its methods run one at a time. A forked child may use it too. Routes are asked for again every
    30 s, and when a broker does not answer. When a call returns, the broker has stored the messages. Whether they
    survive the death of the broker's machine depends on its settings (flushDiskType, brokerRole).

    `send` and `send_many` raise UnknownOutcomeError if a broker may have stored messages and its answer is missing; the
    error has their ids. They raise BackendUnavailableError if no broker has stored them within the request timeout,
    NoPermissionError, NotFoundError and BrokerError if a broker refuses, and OptionError for an invalid message.
    """

    def __init__(
        self, address: ClusterAddress, settings: ProducerSettings, open_ids: Callable[[], UniqueIds], start: int
    ) -> None:
        """Make a producer for the cluster at `address`. It connects at its first call.

        `open_ids` returns a maker of ids that no other producer has. Round-robin over queues begins at `start`.
        """
        super().__init__()
        self._address, self._settings = address, settings
        self._open_ids, self._ids = open_ids, open_ids()
        self._held = ExitStack()
        self._opened: TaskRoutes | None = None
        self._routes_ms = 0.0
        self._router = BrokerRouter(lambda topic: self._connected().routes.queues(topic), start)
        self._encoder = ItemEncoder(settings.body_rules, lambda topics: refuse_timers(self._connected().routes, topics))
        self._is_closed = False

    def __enter__(self) -> "ClusterProducer":
        self._check_open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the producer."""
        self.close()

    def __repr__(self) -> str:
        return f"<ClusterProducer of {self._address.describe()}>"

    def _repr_html_(self) -> str:
        # Without topics: a producer may have rights to send only, and connects at its first call.
        return box("RocketMQ cluster", self._address.describe(), {"producer": "closed" if self._is_closed else "open"})

    @synchronized
    def send(
        self,
        topic: str,
        body: bytes | str,
        *,
        tags: str | None = None,
        keys: str | Sequence[str] | None = None,
        properties: Mapping[str, str] | None = None,
        queue_id: int | None = None,
        broker_name: str | None = None,
        sharding_key: str | None = None,
        flag: int = 0,
        delay_level: int | None = None,
        deliver_at_ms: int | None = None,
    ) -> SendResult:
        """Send one message, and return where it was stored. A body of type str is sent as UTF-8.

        The arguments are those of `Producer.send`. If the topic has queues on several brokers, `queue_id` needs
        `broker_name`. The broker delivers a message with a `delay_level` or with `deliver_at_ms` (5.x) later; the
        result is then the position where it waits.
        """
        with self._sending() as connected:
            message = SingleMessage(topic, body, tags, keys, properties, sharding_key, queue_id, flag)
            is_plain = delay_level is None and deliver_at_ms is None
            plain = PlainMessage.of(message, self._settings.body_rules) if is_plain else None
            sent = None if plain is None else self._send_plain(connected, plain, queue_id, broker_name)
            message_id, stored_in, answer = sent or self._send_any(
                connected, message, broker_name, delay_level, deliver_at_ms
            )
        offset, physical_offset = answer.queue_offset, int(find_physical_offsets(answer.ids, 1)[0])
        if offset is None or physical_offset < 0:
            raise BrokerError(
                int(answer.status),
                f"the message {message_id} is stored in queue {stored_in}, but the answer of the broker has no valid "
                "position; expected queueOffset and msgId. Do not send the message again. Look for its id.",
            )
        return SendResult(
            topic,
            stored_in.queue_id,
            offset,
            physical_offset,
            message_id,
            stored_in.broker,
            _STATUSES.get(answer.status.name, SendStatus.SEND_OK),
        )

    @synchronized
    def send_many(self, messages: pa.Table | pa.RecordBatch, *, topic: str | None = None) -> pa.Table:
        """Send each row of a table as a message, and return where each message was stored.

        Columns and arguments are those of `Producer.send_many`, and the column brokerName, which a queueId needs if the
        topic has queues on several brokers. All rows are checked before the first one is sent. They are sent in
        batches, to all queues in parallel; the rows of a queue keep their order, except that rows without queueId and
        shardingKey may go to a queue of another broker while theirs stores nothing. The returned table has the columns
        of `SENT`, and one row for each message, in the same order.

        If the call fails, some rows may be stored: a note on the error has their number.
        """
        table = messages_of(messages, topic, has_brokers=True)
        with self._sending() as connected, MessageSpool(keeps_ids=True) as spool:
            for batch in _cut(table):
                spool.add(self._encoder.encode(batch, self._router, self._make_ids, now_ms(), spool.count))
            sent = _Positions(spool)
            try:
                self._send(connected, spool, sent.note)
            except RmqError as error:
                if spool.count > 1:
                    error.add_note(
                        f"rmq: {sent.count} of {spool.count} messages of the call are stored. {_count_unknown(error)}"
                        "The others were not sent."
                    )
                raise
            return sent.table(table.column("topic"))

    @synchronized
    def send_back(
        self,
        rows: pa.Table | pa.RecordBatch | list[dict[str, object]],
        group: str,
        delay_level: int = 0,
        max_reconsume_times: int | None = None,
        *,
        expired_original: str = "error",
    ) -> pa.Table:
        """Send back messages that the consumer group `group` failed to consume, and return where their copies go.

        Arguments and errors are those of `Producer.send_back`, and the column brokerName is required, the broker that
        stores the message. All rows are checked before the first one is sent. The returned table has one row for each
        row, with the columns of `send_back.SENT_BACK`. A request with an unknown outcome is repeated, so a message may
        be copied twice. If the call fails, some rows may be sent back: a note on the error has their number.
        """
        terms = check_send_back(group, delay_level, max_reconsume_times, expired_original)
        batch = failed_rows_of(rows)
        with self._sending() as connected:
            calls = BrokerCalls(connected.client, connected.routes, self._settings.wait_ms, monotonic_ms)
            return send_back(connected.client, connected.routes, calls, batch, terms, now_ms(), delay_level)

    @synchronized
    def create_topic(self, topic: str, queues: int = 4, *, perm: int = PERM_READ | PERM_WRITE) -> int:
        """Create a topic on every master that lacks it, and return the number of the topic's queues for writing.

        `queues` is the number on each master, and `perm` as in `Producer.create_topic`. A broker that has the topic
        keeps it unchanged. Raises OptionError for an invalid name or number, and NoPermissionError if the account may
        not create topics; the error has the command for an administrator.
        """
        check_new_topic(topic, queues, perm)
        with self._sending() as connected:
            masters = connected.routes.create(TopicConfig(topic, queues, queues, perm))
            self._forget_routes()
            return len(connected.routes.wait_for(topic, masters)) if perm & PERM_WRITE else 0

    @synchronized
    def topics(self) -> list[str]:
        """Return the sorted names of all topics, RocketMQ's own included."""
        self._check_open()
        with closing(ClusterBackend(self._address)) as reader:
            return reader.topics()

    @synchronized
    def bounds(self, topic: str) -> dict[QueueKey, QueueBounds]:
        """Return for each queue of the topic the range of queue offsets that can be read.

        Raises NotFoundError if the topic does not exist, and BackendUnavailableError if a broker does not answer.
        """
        check_topic(topic)
        self._check_open()
        with closing(ClusterBackend(self._address)) as reader:
            try:
                queues = reader.queues([topic])[topic]
            except NotFoundError as error:
                raise NotFoundError(str(error).replace(" (option subscribe)", "")) from None
            return {queue: reader.look_at_bounds(queue) for queue in queues}

    @synchronized
    def close(self) -> None:
        """Release the connections. A second call does nothing."""
        self._is_closed = True
        self._held.close()
        self._opened = None

    def _after_fork(self) -> None:
        self._ids = self._open_ids()  # the parent continues with the others

    def _check_open(self) -> None:
        if self._is_closed:
            raise StoreError(f"{self!r} is closed; expected an open one. Open it again with open_store.")

    def _connected(self) -> TaskRoutes:
        if self._opened is None:
            client = self._held.enter_context(borrowed_client(self._address))
            self._opened = TaskRoutes(client, WriteRoutes(client, monotonic_ms, self._settings.new_topics))
            self._forget_routes()
        return self._opened

    def _forget_routes(self) -> None:
        self._router.forget()
        if self._opened is not None:
            self._opened.routes.forget()
        self._routes_ms = monotonic_ms()

    @contextmanager
    def _sending(self) -> Iterator[TaskRoutes]:
        """Return what a call needs to send. After an interrupt the next call connects again."""
        self._check_open()
        try:
            connected = self._connected()
            if monotonic_ms() - self._routes_ms >= _ROUTES_MS:
                self._forget_routes()
            yield connected
        except RmqError:
            self._forget_routes()
            raise
        except BaseException as error:
            self._opened = None
            self._held.__exit__(type(error), error, error.__traceback__)
            self._held = ExitStack()
            raise

    def _send(self, connected: TaskRoutes, spool: MessageSpool, on_stored: OnStored) -> None:
        terms = SendTerms(self._settings.wait_ms)
        Sender(connected.client, connected.routes, terms, monotonic_ms, now_ms, on_stored).send(spool)

    def _make_ids(self, count: int, _: object) -> Bytes:
        return self._ids.take(count, now_ms()).texts()

    def _send_plain(
        self, connected: TaskRoutes, plain: PlainMessage, queue_id: int | None, broker: str | None
    ) -> tuple[str, QueueKey, SendResponse] | None:
        """Send a usual message without Arrow, by one request. Return its id, its queue, and the answer.

        Return None if `_send_any` must encode or refuse the message. If nothing was stored, send it again.
        """
        queue = None
        if plain.body and len(plain.pairs) <= _MAX_PAIRS_BYTES - self._ids.width:
            queue = self._router.route_one(plain.topic, queue_id, broker, plain.key_hash)
        if queue is None or plain.topic.startswith(RETRY_TOPIC_PREFIX):
            return None
        client, routes = connected
        born_ms = now_ms()
        message_id = self._ids.take_one(born_ms)
        properties = f"{UNIQ_KEY}\x01{message_id}\x02".encode() + plain.pairs
        stored = QueueKey(routes.topic_of(plain.topic), queue.queue_id, queue.broker)
        request = SendRequest(stored, plain.body, properties.decode(), born_ms, plain.flag)
        try:
            return message_id, queue, client.call(routes.address(queue.broker), request)
        except UnknownOutcomeError as error:
            raise report_unknown(error, (message_id,)) from None
        except BrokerError as error:
            note_refused(error, f"message {message_id}")
            raise
        except BackendUnavailableError:
            with MessageSpool(keeps_ids=True) as spool:
                is_free = queue_id is None and plain.key_hash is None
                spool.add_one(queue, encode_item(plain.flag, plain.body, properties), message_id, is_free=is_free)
                return self._send_spool(connected, spool)

    def _send_any(
        self,
        connected: TaskRoutes,
        message: SingleMessage,
        broker: str | None,
        delay_level: int | None,
        deliver_at_ms: int | None,
    ) -> tuple[str, QueueKey, SendResponse]:
        """Send a message of any kind, and return its id, its queue, and the answer. Raises OptionError."""
        row = {
            "topic": message.topic,
            "body": message.body,
            "tags": message.tags,
            "keys": message.keys,
            "properties": message.properties,
            "shardingKey": message.sharding_key,
            "queueId": message.queue_id,
            BROKER_NAME: broker,
            "flag": message.flag,
            "delayLevel": delay_level,
            "deliverTimestamp": deliver_at_ms,
        }
        with MessageSpool(keeps_ids=True) as spool:
            spool.add(self._encoder.encode(message_of(row), self._router, self._make_ids, now_ms(), None))
            return self._send_spool(connected, spool)

    def _send_spool(self, connected: TaskRoutes, spool: MessageSpool) -> tuple[str, QueueKey, SendResponse]:
        """Send the only message of a spool."""
        found: list[tuple[QueueKey, SendResponse]] = []
        self._send(connected, spool, lambda sent, answer: found.append((sent.queue, answer)))
        ((queue, answer),) = found
        return spool.ids(np.zeros(1, np.int64))[0], queue, answer


class _Positions:
    """Where the messages of one call were stored."""

    def __init__(self, spool: MessageSpool) -> None:
        self._spool = spool
        self.count = 0  # stored messages
        self._queues: dict[QueueKey, int] = {}
        self._numbers = np.full(spool.count, -1, np.int32)  # of each message's queue in `_queues`
        self._offsets, self._physical_offsets = np.full((2, spool.count), -1, np.int64)

    def note(self, sent: Outgoing, answer: SendResponse) -> None:
        """Note a request that was stored."""
        rows = sent.rows
        self.count += len(rows)
        self._numbers[rows] = self._queues.setdefault(sent.queue, len(self._queues))
        if answer.queue_offset is not None:
            self._offsets[rows] = answer.queue_offset + np.arange(len(rows))
        self._physical_offsets[rows] = find_physical_offsets(answer.ids, len(rows))

    def table(self, topics: pa.ChunkedArray) -> pa.Table:
        """Return the table of `SENT`."""
        numbers = pa.array(self._numbers)
        columns = [
            topics,
            pa.array([queue.broker for queue in self._queues], pa.string()).take(numbers),
            pa.array([queue.queue_id for queue in self._queues], pa.int32()).take(numbers),
            self._spool.id_column(),
            *(pa.array(values, mask=values < 0) for values in (self._offsets, self._physical_offsets)),
        ]
        return pa.table([one.cast(field.type) for one, field in zip(columns, SENT, strict=True)], schema=SENT)


def find_physical_offsets(ids: str, count: int) -> NDArray[np.int64]:
    """Return the physical offsets at the end of `count` offsetMsgIds, joined by commas. -1 where there is none."""
    if count == 1 and _ONE_ID.fullmatch(ids):
        return np.array([int(ids[-_HEX_CHARS:], 16)])
    data = np.frombuffer(f"{ids},".encode(), np.uint8)
    width = len(data) // max(count, 1)
    if len(data) != width * count or width <= _HEX_CHARS:
        return np.full(count, -1, np.int64)
    digits = _NIBBLES[data.reshape(count, width)[:, -_HEX_CHARS - 1 : -1]]
    offsets = (digits.astype(np.int64) << _SHIFTS).sum(axis=1)
    return np.where((digits < _NO_DIGIT).all(axis=1) & (digits[:, 0] < _SIGN), offsets, -1)


def _cut(table: pa.Table) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a table in pieces of at most 32,768 rows, and 64 MiB unless a single row is larger."""
    for batch in table.combine_chunks().to_batches(max_chunksize=_PIECE_ROWS):
        yield from cut_batch(batch)


def cut_batch(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a batch in pieces of at most 64 MiB, unless a single row is larger."""
    if batch.num_rows <= 1 or batch.nbytes <= _PIECE_BYTES:
        if batch.num_rows:
            yield batch
        return
    middle = batch.num_rows // 2
    yield from cut_batch(batch.slice(0, middle))
    yield from cut_batch(batch.slice(middle))


def _count_unknown(error: RmqError) -> str:
    if isinstance(error, UnknownOutcomeError) and error.message_ids:
        return f"{len(error.message_ids)} are stored or not (UnknownOutcomeError.message_ids). "
    return ""
