"""A store and a cluster that last as long as a test: what the fixtures `rmq_store` and `rmq_cluster` return.

Both send and read through the public functions of `rmq_spark.store`, as any program does.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol, Self

import pyarrow as pa

from rmq_spark.store import create_store, open_reader, open_store
from rmq_spark.store.cluster.producer import ClusterProducer
from rmq_spark.store.errors import OptionError
from rmq_spark.store.format.message_table import MESSAGE_TYPES
from rmq_spark.store.model import QueueKey
from rmq_spark.store.testing.brokers import RunningCluster
from rmq_spark.store.view.cluster_explorer import ClusterExplorer

_SEGMENT_BYTES = 64 << 20
_DEFAULT_COLUMNS = ("topic", "queueId", "queueOffset", "tags", "keys", "body", "properties")


class EmbeddedStore:
    """A store directory of a test. `path` is the value of the option `path`, and `options` has it for Spark.

    Any program may read and change the directory. The store is closed after each call, so no lock is held between two.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = str(path)
        create_store(self.path, segment_bytes=_SEGMENT_BYTES)

    @property
    def options(self) -> dict[str, str]:
        """The options with which Spark reads and writes this store: `.options(**rmq_store.options)`."""
        return {"path": self.path}

    def create_topic(self, topic: str, queues: int = 4) -> None:
        """Create a topic. Raises OptionError for an invalid name or an impossible number of queues."""
        with open_store(self.path) as producer:
            producer.create_topic(topic, queues)

    def send(self, topic: str, *bodies: bytes | str, **columns: Any) -> list[tuple[int, int]]:
        """Append one message for each body. Return queue id and queue offset of each. Creates a missing topic.

        A body of type str is sent as UTF-8. `columns` are other columns of `Producer.send_many`: tags, keys,
        properties (a dict), shardingKey, queueId, flag, delayLevel and deliverTimestamp (ms since the epoch). Each
        value is that of all these messages. Raises OptionError for an unknown column or an invalid message.
        """
        with open_store(self.path) as producer:
            return _places(producer.send_many(_message_table(topic, bodies, columns)))

    def messages(self, topic: str, *, columns: Sequence[str] = _DEFAULT_COLUMNS) -> list[dict[str, Any]]:
        """Return the messages of a topic as dicts by column, sorted by queue and queue offset.

        `columns` are columns of the data source. A body is bytes, `properties` is a dict, and a time is a datetime in
        UTC. Raises NotFoundError if there is no such topic, and OptionError for an unknown column.
        """
        with open_reader(self.path) as reader:
            return _read_rows(reader, topic, columns)


class EmbeddedCluster:
    """A name server and brokers in the process of a test, on 127.0.0.1. Use it in `with`, or call `close`.

    `name_server` is the value of the option `nameServer`, and `options` has it for Spark. `running` is the
    RunningCluster, which can do more: kill brokers, plant faults, count requests.

    Programs connect as they do to a real cluster. Threads end at `close`, and connections are closed.
    """

    def __init__(self, folder: Path | str, **settings: Any) -> None:
        """Start it, with its files in `folder`. `settings` are arguments of RunningCluster, such as `brokers=2`."""
        self.running = RunningCluster(Path(folder), **settings)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self.running.__exit__(kind, error, trace)

    def close(self) -> None:
        """Stop all servers. Raises the first error that a server met."""
        self.running.close()

    @property
    def name_server(self) -> str:
        """The address of the name server, or the addresses of several, with a semicolon between two."""
        return self.running.address

    @property
    def options(self) -> dict[str, str]:
        """The options with which Spark reads and writes this cluster: `.options(**rmq_cluster.options)`."""
        return {"nameServer": self.name_server}

    def create_topic(self, topic: str, queues: int = 4) -> None:
        """Create a topic with `queues` queues on each broker. Raises OptionError for an invalid name or number."""
        with self._open_producer() as producer:
            producer.create_topic(topic, queues)

    def send(self, topic: str, *bodies: bytes | str, **columns: Any) -> list[tuple[str, int, int]]:
        """Send one message for each body. Return broker name, queue id and queue offset of each.

        The arguments and errors are those of `EmbeddedStore.send`. A missing topic is created on each broker. If a
        broker is away, BackendUnavailableError is raised after 3 s.
        """
        table = _message_table(topic, bodies, columns)
        with self._open_producer() as producer:
            sent = producer.send_many(table)
        names = sent.column("brokerName").to_pylist()
        return [(name, *place) for name, place in zip(names, _places(sent), strict=True)]

    def messages(self, topic: str, *, columns: Sequence[str] = _DEFAULT_COLUMNS) -> list[dict[str, Any]]:
        """Return the messages of a topic as dicts by column, sorted by broker, queue and queue offset.

        The arguments and errors are those of `EmbeddedStore.messages`. `brokerName` is another possible column.
        """
        with open_reader(name_server=self.name_server) as reader:
            assert isinstance(reader, ClusterExplorer)
            return _read_rows(reader, topic, columns)

    def _open_producer(self) -> ClusterProducer:
        return open_store(name_server=self.name_server)


class _Reader(Protocol):
    """The part of a reader that `messages` needs, of a store and of a cluster."""

    def queues(self, topic: str) -> list[QueueKey]:
        """Return the queues of a topic."""

    def bounds(self, queue: QueueKey) -> Any:
        """Return the bounds of a queue."""

    def read(self, queue: QueueKey, begin: int, end: int, columns: Sequence[str]) -> Iterable[pa.RecordBatch]:
        """Yield the messages of a range."""


def _read_rows(reader: _Reader, topic: str, columns: Sequence[str]) -> list[dict[str, Any]]:
    rows = []
    for queue in reader.queues(topic):
        bounds = reader.bounds(queue)
        for batch in reader.read(queue, bounds.min_offset, bounds.max_offset, columns):
            rows += batch.to_pylist(maps_as_pydicts="strict")
    return rows


def _message_table(topic: str, bodies: Sequence[bytes | str], columns: dict[str, Any]) -> pa.Table:
    unknown = columns.keys() - (MESSAGE_TYPES.keys() - {"topic", "body"})
    if unknown:
        known = ", ".join(name for name in MESSAGE_TYPES if name not in ("topic", "body"))
        raise OptionError(f"send: no such column: {', '.join(sorted(unknown))}; expected columns of {known}.")
    values = {name: [_value(name, value)] * len(bodies) for name, value in columns.items()}
    encoded = [body.encode() if isinstance(body, str) else body for body in bodies]
    types = {name: kind for name, kind in MESSAGE_TYPES.items() if name in columns}
    given = {name: pa.array(values[name], kind) for name, kind in types.items()}
    return pa.table({"topic": [topic] * len(bodies), "body": pa.array(encoded, pa.binary()), **given})


def _value(name: str, value: Any) -> Any:
    if name == "keys" and isinstance(value, list | tuple):
        return " ".join(value)
    return list(value.items()) if name == "properties" and value is not None else value


def _places(sent: pa.Table) -> list[tuple[int, int]]:
    return list(zip(sent.column("queueId").to_pylist(), sent.column("queueOffset").to_pylist(), strict=True))
