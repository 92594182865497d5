"""Name servers and brokers that run in this process, and one object to control them."""

import contextlib
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Self

from rmq_spark.store.model import QueueKey
from rmq_spark.store.testing.brokers.broker import Broker, BrokerSettings
from rmq_spark.store.testing.brokers.event_loop import EventLoop
from rmq_spark.store.testing.brokers.light_store import LightStore
from rmq_spark.store.testing.brokers.message_store import MessageStore
from rmq_spark.store.testing.brokers.name_server import MASTER_ID, NameServer
from rmq_spark.store.testing.brokers.releases import RELEASES
from rmq_spark.store.testing.brokers.server import ServerTls


class RunningCluster:
    """A cluster on 127.0.0.1. Use it in `with`, or call `close`, which raises an error of the servers themselves.

    `release` is "4.9" or "5.3". `brokers` is a number of masters, which are named broker-a, broker-b and so on, or a
    list of names. Their stores are in `folder`, in folders with their names. With `is_light` the brokers count messages
    and store none.

    `name_servers` is a list, and `brokers` a dict by broker name. Their methods are controls for tests too.
    """

    def __init__(
        self,
        folder: Path,
        *,
        release: str = "5.3",
        name_servers: int = 1,
        brokers: int | Iterable[str] = 1,
        cluster: str = "DefaultCluster",
        is_light: bool = False,
        tls: ServerTls | None = None,
    ) -> None:
        if release not in RELEASES:
            raise ValueError(f"RunningCluster: release={release!r}; expected one of {', '.join(RELEASES)}.")
        self.folder, self.release, self.cluster = folder, RELEASES[release], cluster
        self._is_light, self._tls = is_light, tls
        folder.mkdir(parents=True, exist_ok=True)
        self.loop = EventLoop()
        self.loop.start()
        self.name_servers: list[NameServer] = []
        self.brokers: dict[str, Broker] = {}
        self.slaves: dict[tuple[str, int], Broker] = {}
        try:
            for _ in range(name_servers):
                server = NameServer(self.loop, self.release)
                server.tls = tls
                server.start()
                self.name_servers.append(server)
            for name in broker_names(brokers) if isinstance(brokers, int) else brokers:
                self.add_broker(name)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        try:
            self.close()
        except Exception:
            if error is None:
                raise

    def close(self) -> None:
        """Stop all servers and close all stores, also if one of them fails. Raises an error that a server met."""
        brokers = [*self.brokers.values(), *self.slaves.values()]
        with contextlib.ExitStack() as last_first:
            last_first.callback(self.loop.stop)
            for broker in brokers:
                last_first.callback(self.loop.run, broker.store.close)
            for server in [*brokers, *self.name_servers]:
                last_first.callback(server.stop)
        if self.loop.errors:
            raise self.loop.errors[0]

    @property
    def address(self) -> str:
        """The addresses of all name servers, as in the option `nameServer`."""
        return ";".join(server.address for server in self.name_servers)

    @property
    def broker(self) -> Broker:
        """The only broker."""
        (broker,) = self.brokers.values()
        return broker

    def add_broker(self, name: str, **settings: Any) -> Broker:
        """Start another master with an empty store. `settings` are fields of `BrokerSettings`."""
        assert name not in self.brokers, name
        store = self.loop.run(LightStore if self._is_light else lambda: MessageStore(self.folder / name))
        self.brokers[name] = self._start(name, MASTER_ID, store, BrokerSettings(**settings))
        return self.brokers[name]

    def add_slave(self, name: str, broker_id: int = 1, **settings: Any) -> Broker:
        """Start a slave of a broker, with a copy of its store. What the master stores later, the slave does not get."""
        master = self.brokers[name]
        path = master.copy_store(self.folder / f"{name}-{broker_id}")
        store = self.loop.run(MessageStore, path)
        slave = self._start(name, broker_id, store, BrokerSettings(**settings))
        self.loop.run(slave.topics.update, master.topics)
        self.slaves[name, broker_id] = slave
        slave.register()
        return slave

    def create_topic(self, name: str, queues: int = 4, *, brokers: Iterable[str] | None = None, **changes: Any) -> None:
        """Create a topic, or change it, on all masters or on those named. `changes` are other fields of `Topic`."""
        for broker in self.brokers if brokers is None else brokers:
            self.brokers[broker].set_topic(name, queues, **changes)

    def delete_topic(self, name: str) -> None:
        """Delete a topic at all masters and name servers, as `mqadmin deleteTopic` does."""
        for broker in self.brokers.values():
            broker.delete_topic(name)
        for server in self.name_servers:
            self.loop.run(server.routes.delete_topic, name)

    def send(
        self, topic: str, *bodies: bytes | str, broker: str | None = None, **columns: Any
    ) -> list[tuple[QueueKey, int]]:
        """Append messages at a broker, or at the only one: see `Broker.send`."""
        return (self.broker if broker is None else self.brokers[broker]).send(topic, *bodies, **columns)

    def advance(self, topic: str, count: int, *, broker: str | None = None, queue_id: int | None = None) -> None:
        """Let `count` messages arrive in one queue of a topic, or in each, at a light broker, or at the only one."""
        one = self.broker if broker is None else self.brokers[broker]
        queue_ids = range(one.topics[topic].queue_count) if queue_id is None else [queue_id]
        self.loop.run(self._advance, one, [QueueKey(topic, queue_id) for queue_id in queue_ids], count)

    def forget(self, broker: str, broker_id: int = MASTER_ID) -> None:
        """Let all name servers drop a broker that is frozen, as they do after 120 s."""
        for server in self.name_servers:
            server.forget(broker, broker_id)

    def register_all(self) -> None:
        """Let all brokers that run register at all name servers that run, as they do every 30 s."""
        for broker in [*self.brokers.values(), *self.slaves.values()]:
            if broker.is_running and not broker.is_frozen:
                broker.register()

    def clear_requests(self) -> dict[str, Counter[int]]:
        """Return the counts of requests by code for each broker name, and for the name servers as "name servers".

        Slaves count with their master. Counts begin at 0 again. Servers without a request are left out.
        """
        counts: dict[str, Counter[int]] = {}
        for name, server in [
            *(("name servers", server) for server in self.name_servers),
            *self.brokers.items(),
            *((name, slave) for (name, _), slave in self.slaves.items()),
        ]:
            counts.setdefault(name, Counter()).update(server.clear_requests())
        return {name: count for name, count in counts.items() if count}

    def _start(self, name: str, broker_id: int, store: Any, settings: BrokerSettings) -> Broker:
        broker = Broker(
            self.loop,
            self.release,
            name,
            store,
            self.name_servers,
            cluster=self.cluster,
            broker_id=broker_id,
            settings=settings,
        )
        broker.tls = self._tls
        broker.start()
        return broker

    def _advance(self, broker: Broker, queues: Iterable[QueueKey], count: int) -> None:
        assert isinstance(broker.store, LightStore)
        for queue in queues:
            broker.store.advance(queue, count)
        broker.note_arrivals()


def broker_names(count: int) -> list[str]:
    """Return names of brokers: broker-a to broker-z, and then broker-27 and so on."""
    return [f"broker-{chr(ord('a') + number) if number < 26 else number + 1}" for number in range(count)]
