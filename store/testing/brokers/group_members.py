"""The members of consumer groups at one broker, as their heartbeats register them.

A member is a connection that has sent a heartbeat for the group. What members must agree on belongs to the group, and
the last heartbeat decides it. Source: ConsumerManager, ConsumerGroupInfo, ClientHousekeepingService (4.9, 5.3).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

from rmq_spark.store.cluster.codes import BrokerRequestCode
from rmq_spark.store.disk.clock import wall_clock_ms
from rmq_spark.store.filter.row_filter import ALL, TAG
from rmq_spark.store.names import retry_topic
from rmq_spark.store.testing.brokers.connection import Connection
from rmq_spark.store.testing.brokers.event_loop import Timer
from rmq_spark.store.testing.brokers.member_calls import OnAnswer
from rmq_spark.store.testing.brokers.server import in_loop

if TYPE_CHECKING:
    from rmq_spark.store.testing.brokers.broker import Broker

CONSUME_PASSIVELY, CONSUME_POP = "CONSUME_PASSIVELY", "CONSUME_POP"
CLUSTERING, BROADCASTING = "CLUSTERING", "BROADCASTING"
CONSUME_FROM_LAST_OFFSET = "CONSUME_FROM_LAST_OFFSET"
_FOREIGN_ADDRESS = "192.0.2.1:40000"
_SCANS_IN_IDLE_TIME = 4


@dataclass(slots=True, eq=False)
class Member:
    """One member of a group (ClientChannelInfo). Without a connection, it was added by a test and never falls silent.

    `heard_s` is when the last heartbeat came, by the broker's clock.
    """

    client_id: str
    connection: Connection | None
    address: str
    language: str
    version: int
    heard_s: float

    @property
    def key(self) -> Connection | str:
        """The broker knows it by its connection, or its client id if it has none."""
        return self.client_id if self.connection is None else self.connection


@dataclass(frozen=True, slots=True)
class ConsumerData:
    """The part of a heartbeat about one group (ConsumerData). `subscriptions` are SubscriptionData by topic."""

    group: str
    consume_type: str
    message_model: str
    consume_from_where: str
    subscriptions: Mapping[str, Mapping[str, Any]]

    @classmethod
    def of(
        cls,
        group: str,
        subscription: Mapping[str, str],
        *,
        expression_type: str = TAG,
        sub_version: int | None = None,
        consume_type: str = CONSUME_PASSIVELY,
        message_model: str = CLUSTERING,
        consume_from_where: str = CONSUME_FROM_LAST_OFFSET,
    ) -> Self:
        """Return what a consumer of Java says. `subscription` has expressions by topic.

        `sub_version` is now by default, in ms since the epoch. The retry topic is added, except for broadcasting.
        """
        version = wall_clock_ms() if sub_version is None else sub_version
        subscriptions = {
            topic: subscription_data(topic, subString=text, expressionType=expression_type, subVersion=version)
            for topic, text in subscription.items()
        }
        if message_model == CLUSTERING:
            retries = retry_topic(group)
            subscriptions[retries] = subscription_data(retries, subString=ALL, subVersion=version)
        return cls(group, consume_type, message_model, consume_from_where, subscriptions)

    @classmethod
    def read(cls, data: Mapping[str, Any]) -> Self:
        """Return the element of a heartbeat's consumerDataSet. Fields of subscriptions may be missing."""
        return cls(
            data["groupName"],
            data["consumeType"],
            data["messageModel"],
            data["consumeFromWhere"],
            {one["topic"]: subscription_data(**one) for one in data["subscriptionDataSet"]},
        )

    def write(self) -> dict[str, Any]:
        """Return the element of a heartbeat's consumerDataSet."""
        return {
            "groupName": self.group,
            "consumeType": self.consume_type,
            "messageModel": self.message_model,
            "consumeFromWhere": self.consume_from_where,
            "subscriptionDataSet": list(self.subscriptions.values()),
            "unitMode": False,
        }


def subscription_data(topic: str, **fields: Any) -> dict[str, Any]:
    """Return the SubscriptionData of a topic, as a heartbeat and the answer to 203 show it."""
    defaults = {
        "classFilterMode": False,
        "codeSet": [],
        "expressionType": TAG,
        "subVersion": wall_clock_ms(),
        "tagsSet": [],
        "topic": topic,
    }
    return defaults | fields


@dataclass(slots=True)
class MemberGroup:
    """A group that has members (ConsumerGroupInfo). `members` is keyed by connection, or by client id without one."""

    consume_type: str = ""
    message_model: str = ""
    consume_from_where: str = ""
    subscriptions: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    members: dict[Connection | str, Member] = field(default_factory=dict)

    def register(self, member: Member, data: ConsumerData) -> bool:
        """Take a heartbeat. Return whether the set of members or of topics has changed.

        A subscription replaces an older one only if its version is higher, and this alone is not a change.
        """
        self.consume_type, self.message_model = data.consume_type, data.message_model
        self.consume_from_where = data.consume_from_where
        is_changed = member.key not in self.members or set(self.subscriptions) != set(data.subscriptions)
        self.members[member.key] = member
        known, self.subscriptions = self.subscriptions, {}
        for topic, new in data.subscriptions.items():
            old = known.get(topic)
            self.subscriptions[topic] = new if old is None or new["subVersion"] > old["subVersion"] else old
        return is_changed


class GroupMembers:
    """The members of all groups at one broker.

    `groups` has the groups with at least one member. A test may call `add`, `remove`, `expire` and `ids` from any
    thread. All else is only for the loop's thread.
    """

    def __init__(self, broker: "Broker") -> None:
        self.groups: dict[str, MemberGroup] = {}
        self.loop = broker.loop
        self._broker = broker
        self._timer: Timer | None = None

    @in_loop
    def add(
        self,
        group: str,
        client_id: str,
        subscription: Mapping[str, str],
        *,
        language: str = "JAVA",
        version: int | None = None,
        address: str = _FOREIGN_ADDRESS,
        **terms: Any,
    ) -> None:
        """Let a consumer that has no connection send a heartbeat. It stays a member until it is removed.

        `subscription` and `terms` are as in `ConsumerData.of`. Call it again for another heartbeat.
        """
        number = self._broker.release.number if version is None else version
        member = Member(client_id, None, address, language, number, self._broker.now_s())
        self.heartbeat(member, ConsumerData.of(group, subscription, **terms))

    @in_loop
    def remove(self, group: str, client_id: str) -> None:
        """Let a member unregister, and notify the others."""
        member = self.find(group, client_id)
        assert member is not None, f"{client_id} is not a member of {group}"
        self.unregister(group, member.key)

    @in_loop
    def expire(self, group: str, client_id: str) -> None:
        """Let a member be silent for too long: close its connection, and notify the others."""
        member = self.find(group, client_id)
        assert member is not None, f"{client_id} is not a member of {group}"
        if member.connection is None:
            self.unregister(group, client_id)
        else:
            member.connection.close()

    @in_loop
    def ids(self, group: str) -> list[str]:
        """Return the client ids of a group's members, sorted."""
        return sorted(member.client_id for member in self.groups.get(group, MemberGroup()).members.values())

    def ask(self, member: Member, code: int, fields: Mapping[str, str], body: bytes, on_answer: OnAnswer) -> None:
        """Ask a member: see `MemberCalls.ask`. The time of one without a connection is over at once."""
        if member.connection is None:
            on_answer(None)
        else:
            self._broker.calls.ask(member.connection, code, fields, body, on_answer)

    def heartbeat(self, member: Member, data: ConsumerData) -> None:
        """Take a heartbeat for one group. Create the group and its retry topic.

        A group that must not be created gets no member in 5.3, and a member without a retry topic in 4.9.
        """
        broker, retries = self._broker, retry_topic(data.group)
        if data.group in broker.groups or broker.settings.creates_groups:
            broker.groups.add(data.group)
            if retries not in broker.topics:
                broker.set_topic(retries, 1)
        elif broker.release.is_5:
            return
        self.register(member, data)

    def register(self, member: Member, data: ConsumerData) -> None:
        """Take a heartbeat for one group, and notify all members, this one too, if something has changed."""
        if self.groups.setdefault(data.group, MemberGroup()).register(member, data):
            self._notify(data.group, self.groups[data.group])
        if self._timer is None:
            self._start_timer()

    def unregister(self, group: str, key: Connection | str) -> None:
        """Remove a member, if it is one, and notify the others of the group in any case."""
        known = self.groups.get(group)
        if known is not None:
            known.members.pop(key, None)
            self._drop_empty(group)
            self._notify(group, known)

    def forget(self, connection: Connection) -> None:
        """Remove a closed connection from its groups, and notify the other members."""
        for name, group in list(self.groups.items()):
            if connection in group.members:
                self.unregister(name, connection)

    def find(self, group: str, client_id: str) -> Member | None:
        """Return a member with this client id."""
        known = self.groups.get(group, MemberGroup())
        return next((one for one in known.members.values() if one.client_id == client_id), None)

    def subscription(self, group: str, topic: str) -> Mapping[str, Any] | None:
        """Return a group's subscription of a topic."""
        return self.groups.get(group, MemberGroup()).subscriptions.get(topic)

    def clear(self) -> None:
        """Forget all members, as a process does that ends."""
        self.groups.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def look(self) -> None:
        """Close the connections of members that were silent for too long.

        The others are notified if nothing moved on the connection (#onChannelIdle). They are not notified of a member
        that still sends other requests: it was removed before its connection is closed (#scanNotActiveChannel).
        """
        now_s, idle_s = self._broker.now_s(), self._broker.settings.member_idle_s
        silent: set[Connection] = set()
        for name, group in list(self.groups.items()):
            for connection in [
                member.connection
                for member in group.members.values()
                if member.connection is not None and now_s - member.heard_s > idle_s
            ]:
                silent.add(connection)
                if now_s - connection.moved_s <= idle_s:
                    del group.members[connection]
            self._drop_empty(name)
        for connection in silent:
            connection.close()

    def _drop_empty(self, group: str) -> None:
        if not self.groups[group].members:
            del self.groups[group]

    def _notify(self, name: str, group: MemberGroup) -> None:
        if not self._broker.settings.notifies_members:
            return
        if self._broker.release.is_5 and group.message_model == BROADCASTING:
            return
        for member in list(group.members.values()):
            if member.connection is not None:
                code = BrokerRequestCode.NOTIFY_CONSUMER_IDS_CHANGED
                self._broker.calls.tell(member.connection, code, {"consumerGroup": name})

    def _tick(self) -> None:
        self._timer = None
        if not self._broker.is_frozen:
            self.look()
        if self.groups:
            self._start_timer()

    def _start_timer(self) -> None:
        delay_s = self._broker.settings.member_idle_s / _SCANS_IN_IDLE_TIME
        self._timer = self._broker.loop.call_later(delay_s, self._tick)
