"""The producers of groups at one broker, as their heartbeats register them.

A producer is a connection that has sent a heartbeat for the group. Source: ProducerManager, ClientHousekeepingService
(4.9, 5.3).
"""

from typing import TYPE_CHECKING

from rmq_spark.store.testing.brokers.connection import Connection
from rmq_spark.store.testing.brokers.event_loop import Timer
from rmq_spark.store.testing.brokers.group_members import Member
from rmq_spark.store.testing.brokers.server import in_loop

if TYPE_CHECKING:
    from rmq_spark.store.testing.brokers.broker import Broker

_SCANS_IN_IDLE_TIME = 4


class Producers:
    """The producers of all groups at one broker.

    A test may call `add`, `remove` and `ids` from any thread. All else is only for the loop's thread.
    """

    def __init__(self, broker: "Broker") -> None:
        self.loop = broker.loop
        self._broker = broker
        self._groups: dict[str, dict[Connection | str, Member]] = {}
        self._timer: Timer | None = None

    @in_loop
    def add(self, group: str, client_id: str, address: str = "192.0.2.1:40000") -> None:
        """Add a producer that has no connection: a foreign one, or one whose connection has ended. It stays."""
        number = self._broker.release.number
        self.register(group, Member(client_id, None, address, "JAVA", number, self._broker.now_s()))

    @in_loop
    def remove(self, group: str, client_id: str) -> None:
        """Lose a producer. Its connection stays open, and its next heartbeat registers it again."""
        producers = self._groups[group]
        (key,) = (key for key, one in producers.items() if one.client_id == client_id)
        self.unregister(group, key)

    @in_loop
    def ids(self, group: str) -> list[str]:
        """Return the client ids of a group's producers, sorted."""
        return sorted(one.client_id for one in self._groups.get(group, {}).values())

    def of(self, group: str) -> list[Member] | None:
        """Return the producers of a group. None if the broker does not know it.

        5.3 forgets a group with its last producer, and 4.9 does not.
        """
        producers = self._groups.get(group)
        return None if producers is None else list(producers.values())

    def register(self, group: str, producer: Member) -> None:
        """Take a heartbeat for one group."""
        self._groups.setdefault(group, {})[producer.key] = producer
        if self._timer is None:
            self._start_timer()

    def unregister(self, group: str, key: Connection | str) -> None:
        """Remove a producer, if it is one."""
        producers = self._groups.get(group)
        if producers is not None:
            producers.pop(key, None)
            if not producers and self._broker.release.is_5:
                del self._groups[group]

    def forget(self, connection: Connection) -> None:
        """Remove a closed connection from its groups."""
        for group in list(self._groups):
            self.unregister(group, connection)

    def clear(self) -> None:
        """Forget all producers, as a process does that ends."""
        self._groups.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def look(self) -> None:
        """Close the connections of producers that have sent no heartbeat for too long (#scanNotActiveChannel)."""
        now_s, idle_s = self._broker.now_s(), self._broker.settings.member_idle_s
        producers = [one for group in self._groups.values() for one in group.values()]
        for one in producers:
            if one.connection is not None and now_s - one.heard_s > idle_s:
                one.connection.close()

    def _tick(self) -> None:
        self._timer = None
        if not self._broker.is_frozen:
            self.look()
        if any(self._groups.values()):
            self._start_timer()

    def _start_timer(self) -> None:
        delay_s = self._broker.settings.member_idle_s / _SCANS_IN_IDLE_TIME
        self._timer = self._broker.loop.call_later(delay_s, self._tick)
