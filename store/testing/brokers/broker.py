"""A broker: topics, messages, offsets of groups, and the table of its handlers.

Source: BrokerController (4.9, 5.3). To add requests, write a module with a `HandlerTable` and name it in
`HANDLER_TABLES`.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from rmq_spark.store.cluster.frame import Command
from rmq_spark.store.disk.clock import wall_clock_ms
from rmq_spark.store.filter.row_filter import RowFilter
from rmq_spark.store.format.config_json import PERM_READ
from rmq_spark.store.format.record import Record
from rmq_spark.store.group.pull_limits import PullLimits
from rmq_spark.store.model import QueueBounds, QueueKey
from rmq_spark.store.testing.brokers import (
    group_requests,
    lock_requests,
    member_requests,
    message_requests,
    offset_requests,
    pull_requests,
    relay_requests,
    reset_requests,
    send_back_requests,
    send_requests,
    statistics_requests,
    topic_requests,
)
from rmq_spark.store.testing.brokers.accounts import AccountTable
from rmq_spark.store.testing.brokers.connection import Connection
from rmq_spark.store.testing.brokers.deliveries import Deliveries
from rmq_spark.store.testing.brokers.event_loop import EventLoop
from rmq_spark.store.testing.brokers.group_members import GroupMembers
from rmq_spark.store.testing.brokers.group_offsets import GroupOffsets
from rmq_spark.store.testing.brokers.held_pulls import HeldPulls
from rmq_spark.store.testing.brokers.member_calls import MemberCalls
from rmq_spark.store.testing.brokers.message_store import Found, MessageStore, Places
from rmq_spark.store.testing.brokers.name_server import MASTER_ID, NameServer, Registration
from rmq_spark.store.testing.brokers.producers import Producers
from rmq_spark.store.testing.brokers.queue_locks import QueueLocks
from rmq_spark.store.testing.brokers.releases import Release
from rmq_spark.store.testing.brokers.send_order import NEWEST_FIRST, SendOrder
from rmq_spark.store.testing.brokers.server import HandlerTable, Server, in_loop
from rmq_spark.store.testing.brokers.topics import Topic, system_topics
from rmq_spark.store.testing.brokers.wire import Answer, Call, text_of
from rmq_spark.store.testing.sample_message import SampleMessage

HANDLER_TABLES = (
    offset_requests.HANDLERS,
    pull_requests.HANDLERS,
    message_requests.HANDLERS,
    group_requests.HANDLERS,
    member_requests.HANDLERS,
    lock_requests.HANDLERS,
    reset_requests.HANDLERS,
    relay_requests.HANDLERS,
    topic_requests.HANDLERS,
    statistics_requests.HANDLERS,
    send_requests.HANDLERS,
    send_back_requests.HANDLERS,
)
_ENOUGH_MEMORY_BYTES = 1 << 50  # no record is so far from the log's end that it counts as on disk


class Messages(Protocol):
    """The messages of a broker: a `MessageStore`, or a `LightStore` that only counts."""

    def close(self) -> None: ...
    def set_topic(self, topic: str, queue_count: int) -> None: ...
    def delete_topic(self, topic: str) -> None: ...
    def expire(self, queue: QueueKey, before: int, *, keeps_minimum: bool = False) -> None: ...
    def append(self, messages: Sequence[SampleMessage]) -> Places: ...
    def note_change(self) -> None: ...
    def bounds(self, queue: QueueKey) -> QueueBounds: ...
    def get(
        self, queue: QueueKey, offset: int, max_messages: int, limits: PullLimits, wanted: RowFilter | None
    ) -> Found: ...
    def has_wanted(self, queue: QueueKey, begin: int, end: int, wanted: RowFilter | None) -> bool: ...
    def store_time(self, queue: QueueKey, offset: int) -> int: ...
    def last_store_time(self, queue: QueueKey) -> int: ...
    def offset_at_time(self, queue: QueueKey, time_ms: int, rule: str) -> int: ...
    def record_at(self, physical_offset: int) -> bytes | None: ...
    def records_with_key(self, topic: str, key: str, begin_ms: int, end_ms: int) -> list[bytes]: ...


@dataclass
class BrokerSettings:
    """The settings of a broker, which a test may change at any time.

    `tick_ms` is how often held pulls are checked: 5000 in a broker. `on_disk` makes all messages count as far from the
    log's end, so that a pull returns 8 of them. `limits` are the limits of a pull.

    `holds_sends_ms` is how long sends of one queue are collected before they are executed in `send_order`: see
    `send_order`. `dispatch_delay_ms` is how long after its answer a message becomes visible.
    """

    tick_ms: int = 100
    on_disk: bool = False
    limits: PullLimits = field(default_factory=lambda: PullLimits(memory_bytes=_ENOUGH_MEMORY_BYTES))
    is_readable: bool = True  # brokerPermission has the bit 4
    filters_by_properties: bool = True  # enablePropertyFilter, false by default in a broker
    creates_groups: bool = True  # autoCreateSubscriptionGroup
    forbidden_groups: frozenset[str] = frozenset()  # consumeEnable=false
    slave_read: bool = False  # slaveReadEnable
    max_message_bytes: int = 4 << 20  # maxMessageSize: of a body, or of a batch
    creates_topics: bool = False  # autoCreateTopicEnable, true by default in a broker
    holds_sends_ms: int = 0
    send_order: str = NEWEST_FIRST
    dispatch_delay_ms: int = 0
    delivers: bool = True  # messages that wait are delivered when they are due
    resets_at_broker: bool = True  # useServerSideResetOffset (5.3)
    notifies_members: bool = True  # notifyConsumerIdsChangedEnable
    member_answer_s: float = 10  # how long the broker waits for a member's answer: for a request 223 it is 5 s
    config: Mapping[str, str] = field(default_factory=dict)  # further settings that the broker tells
    statistics: Mapping[tuple[str, str], tuple[float, int]] = field(default_factory=dict)  # rate and day's sum
    member_idle_s: float = 120  # channelExpiredTimeout: the connection of a silent member or producer is closed then

    @property
    def pull_limits(self) -> PullLimits:
        """The limits of a pull, with regard to `on_disk`."""
        return replace(self.limits, memory_bytes=1, memory_ratio_percent=1) if self.on_disk else self.limits


class Broker(Server):
    """A master (id 0) or a slave. `advertised` replaces its address in routes.

    `groups` are the consumer groups that it knows. `sent_resets` are the resets that it has sent to members: group,
    topic, and offsets by queue id. `moved_event_count` counts the pulls for which 4.9 writes a message
    to the topic OFFSET_MOVED_EVENT.
    """

    def __init__(
        self,
        loop: EventLoop,
        release: Release,
        name: str,
        store: Messages,
        name_servers: Sequence[NameServer],
        *,
        cluster: str = "DefaultCluster",
        broker_id: int = MASTER_ID,
        settings: BrokerSettings | None = None,
    ) -> None:
        handlers = HandlerTable()
        for table in HANDLER_TABLES:
            handlers.update(table)
        super().__init__(loop, release, handlers)
        self.name, self.cluster, self.broker_id, self.name_servers = name, cluster, broker_id, name_servers
        self.store, self.settings = store, settings or BrokerSettings()
        self.topics = {topic.name: topic for topic in system_topics(release, cluster, name)}
        self.groups: set[str] = set()
        self.offsets = GroupOffsets()
        self.accounts: AccountTable | None = None
        self.held = HeldPulls(self)
        self.sends = SendOrder(self)
        self.deliveries = Deliveries(self)
        self.calls = MemberCalls(self)
        self.members = GroupMembers(self)
        self.producers = Producers(self)
        self.locks = QueueLocks(self.now_s)
        self.advertised: str | None = None
        self.acts_as_master = False
        self.moved_event_count = 0
        self.sent_resets: list[tuple[str, str, dict[int, int]]] = []

    @property
    def is_slave(self) -> bool:
        """Whether it is a slave. An acting master is one too."""
        return self.broker_id != MASTER_ID

    def handle(self, call: Call) -> Answer | None:
        """Check the rights of the account, and let the handler answer."""
        if self.accounts is not None:
            self.accounts.check(self, call)
        return super().handle(call)

    @in_loop
    def register(self) -> None:
        """Register at all name servers that run, as a broker does every 30 s and after each change of a topic."""
        self._register(tuple(self.topics.values()))

    @in_loop
    def advertise(self, address: str | None) -> None:
        """Register with this address instead of the one that the broker listens on (brokerIP1). None: its own again."""
        self.advertised = address
        self.register()

    @in_loop
    def set_topic(self, name: str, queues: int | None = None, **changes: Any) -> Topic:
        """Create a topic, or change its settings, and register it. `queues` sets the read and the write queues.

        `changes` are other fields of `Topic`.
        """
        if queues is not None:
            changes |= {"read_queues": queues, "write_queues": queues}
        topic = replace(self.topics.get(name) or Topic(name), **changes)
        most = max(topic.queue_count, self.topics[name].queue_count if name in self.topics else 0)
        self.store.set_topic(name, most)
        self.topics[name] = topic
        self._register((topic,))
        return topic

    @in_loop
    def delete_topic(self, name: str) -> None:
        """Delete a topic at this broker. Name servers keep its route (AdminBrokerProcessor#deleteTopic)."""
        self.topics.pop(name, None)
        self.store.delete_topic(name)
        self.offsets.delete_topic(name)

    @in_loop
    def send(
        self,
        topic: str,
        *bodies: bytes | str,
        queue_id: int | None = None,
        compression: str | None = None,
        compress_over: int = 1,
        **columns: Any,
    ) -> list[tuple[QueueKey, int]]:
        """Append messages with these bodies, and return the queue and queue offset of each. Creates a missing topic.

        `columns` are other columns of `Producer.send_many` (tags, keys, properties, flag, delayLevel,
        deliverTimestamp, …), the same for all messages. `compression` is zlib, lz4 or zstd. Wakes the pulls that wait.
        """
        rows = [
            {"topic": topic, "body": body.encode() if isinstance(body, str) else body, "queueId": queue_id, **columns}
            for body in bodies
        ]
        return self.send_rows(rows, compression=compression, compress_over=compress_over)

    @in_loop
    def send_rows(
        self, rows: Sequence[dict[str, Any]], *, compression: str | None = None, compress_over: int = 1
    ) -> list[tuple[QueueKey, int]]:
        """Append rows with the columns of `Producer.send_many`, like `send`."""
        for name in {str(row["topic"]) for row in rows} - self.topics.keys():
            self.set_topic(name)
        assert isinstance(self.store, MessageStore), "a light broker has no messages"
        places = self.store.send(rows, compression=compression, compress_over=compress_over)
        self.note_arrivals()
        return places

    @in_loop
    def append(self, messages: Sequence[SampleMessage]) -> Places:
        """Append messages as a client's send does, and return where they are. Their topics must exist.

        They are visible at once, or after `dispatch_delay_ms`.
        """
        places = self.store.append(messages)
        if self.settings.dispatch_delay_ms:
            self.loop.call_later(self.settings.dispatch_delay_ms / 1000, self._dispatch)
        else:
            self._dispatch()
        return places

    @in_loop
    def find_original(self, physical_offset: int) -> Record | None:
        """Return the record at a physical offset, for a send-back: see `MessageStore.find_original`."""
        assert isinstance(self.store, MessageStore), "a light broker has no messages"
        return self.store.find_original(physical_offset)

    @in_loop
    def send_back(self, original: Record, group: str, delay_level: int, max_reconsume_times: int | None) -> None:
        """Store the copy of a message that a group sends back, and deliver it when it is due."""
        assert isinstance(self.store, MessageStore), "a light broker has no messages"
        self.store.send_back(original, group, delay_level, max_reconsume_times)
        self._dispatch()
        self.deliveries.look()

    @in_loop
    def deliver_due(self, now_ms: int | None = None) -> int:
        """Deliver the waiting messages that are due at a time (ms since the epoch), by default now.

        Return how many these are.
        """
        return self.deliveries.deliver(wall_clock_ms() if now_ms is None else now_ms)

    @in_loop
    def write(self, write: Callable[[Path], object]) -> None:
        """Let a function change the store's directory with the engine, and read it again.

        Use it for what has no method here, such as `rmq_spark.store.delivery`: deliveries, send-backs, transactions.
        """
        assert isinstance(self.store, MessageStore), "a light broker has no directory"
        self.store.producer().settle()
        write(self.store.path)
        self.store.note_change()
        self.note_arrivals()

    @in_loop
    def bounds(self, topic: str) -> dict[int, QueueBounds]:
        """Return the queue offsets of each queue of a topic, by queue id."""
        count = self.topics[topic].queue_count
        return {number: self.store.bounds(QueueKey(topic, number)) for number in range(count)}

    @in_loop
    def expire(self, topic: str, queue_id: int, before: int, *, keeps_minimum: bool = False) -> None:
        """Expire the messages of a queue before a queue offset: see `MessageStore.expire`."""
        self.store.expire(QueueKey(topic, queue_id), before, keeps_minimum=keeps_minimum)

    @in_loop
    def copy_store(self, path: Path) -> Path:
        """Copy the store's directory as it is now, for `replace_store` or to read it as a directory."""
        assert isinstance(self.store, MessageStore), "a light broker has no directory"
        return self.store.copy_to(path)

    @in_loop
    def replace_store(self, path: Path) -> None:
        """Serve another store: an older copy, or an empty one if `path` does not exist. Topics stay."""
        self.store.close()
        self.store = MessageStore(path)
        for topic in self.topics.values():
            if topic.name not in {one.name for one in system_topics(self.release, self.cluster, self.name)}:
                self.store.set_topic(topic.name, topic.queue_count)

    @in_loop
    def act_as_master(self) -> None:
        """Let a slave be shown with the id 0 and without write permission while its master is away (5.x).

        Source: enableSlaveActingMaster, RouteInfoManager#pickupTopicRouteData (5.3).
        """
        assert self.is_slave
        self.acts_as_master = True
        self.settings = dataclasses.replace(self.settings, slave_read=True)
        self.register()

    @in_loop
    def restart(self, *, new_port: bool = False) -> None:
        """Start again after `stop` or `kill`, on the same port or on another one, and register."""
        self.start(0 if new_port else None)

    def can_read(self, topic: Topic) -> bool:
        """Return whether clients may pull from a topic."""
        return bool(topic.perm & PERM_READ)

    def note_arrivals(self) -> None:
        """Answer the held pulls for which messages have arrived."""
        self.held.look_at_arrivals()

    def on_started(self) -> None:
        """Register at the name servers, and continue to deliver."""
        self.register()
        self.deliveries.resume()

    def on_stopped(self) -> None:
        """Vanish from the routes, because the name servers see that the connection is closed."""
        self.held.clear()
        self.sends.clear()
        self.deliveries.clear()
        self.calls.clear()
        self.members.clear()
        self.producers.clear()
        self.locks.held.clear()
        self.offsets.resets.clear()
        for server in self.name_servers:
            server.routes.remove(self.name, self.broker_id)

    def on_thawed(self) -> None:
        """Register again, continue to deliver, and look for silent members and producers."""
        self.register()
        self.deliveries.resume()
        self._look_for_silence()

    def on_time_passed(self) -> None:
        """Look for silent members and producers, unless the broker is frozen."""
        if not self.is_frozen:
            self._look_for_silence()

    def on_connection_closed(self, connection: Connection) -> None:
        """Remove the connection from its groups, unless the broker itself ends."""
        if self.is_running:
            self.members.forget(connection)
            self.producers.forget(connection)

    def on_response(self, connection: Connection, command: Command) -> None:
        """Take an answer of a client."""
        self.calls.take(connection, command)

    def ask_member(
        self, group: str, client_id: str, code: int, fields: Mapping[str, object] | None = None, body: bytes = b""
    ) -> Command:
        """Send the broker's own request to a member, and return the member's answer. Not for the loop's thread.

        Raises TimeoutError if it does not answer within `member_answer_s`.
        """
        texts = {name: text_of(value) for name, value in (fields or {}).items()}
        future: Future[Command | None] = Future()

        def ask() -> None:
            member = self.members.find(group, client_id)
            assert member is not None, f"{client_id} is not a member of {group}"
            self.members.ask(member, code, texts, body, future.set_result)

        self.loop.run(ask)
        answer = future.result()
        if answer is None:
            raise TimeoutError(f"{client_id} does not answer request {code}")
        return answer

    def _look_for_silence(self) -> None:
        self.members.look()
        self.producers.look()

    def _dispatch(self) -> None:
        self.store.note_change()
        self.note_arrivals()

    def _register(self, topics: tuple[Topic, ...]) -> None:
        if not self.is_running or self.is_frozen:
            return
        address = self.advertised or self.address
        registration = Registration(
            self.cluster, self.name, self.broker_id, address, topics, acts_as_master=self.acts_as_master
        )
        for server in self.name_servers:
            if server.is_running and not server.is_frozen:
                server.routes.register(registration)
