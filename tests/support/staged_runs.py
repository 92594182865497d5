"""Runs that a test stages in a cluster of this process, and the connections of a session to it."""

import zlib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from support.sent_messages import address_of

from rmq_spark.store.cluster.client import ClusterClient
from rmq_spark.store.cluster.exactly_once.staged_batch import StagedRun
from rmq_spark.store.cluster.exactly_once.target_calls import SessionOverError
from rmq_spark.store.cluster.puller import PullTerms
from rmq_spark.store.cluster.requests import Request
from rmq_spark.store.cluster.ticket import Ticket
from rmq_spark.store.format.consume_queue_entry import Item, encode_items
from rmq_spark.store.format.record_batch import walk_records
from rmq_spark.store.model import QueueKey
from rmq_spark.store.testing.brokers import Broker, RunningCluster

STAGE = "RMQ_SPARK_STAGE"
TERMS = PullTerms("RMQ_SPARK_reader")
PREFIX = "0A0000011234DEADBEEF"  # of the ids of one attempt: address, process and random bits
OTHER_PREFIX = "0A0000011234FEEDF00D"


def make_id(number: int, prefix: str = PREFIX) -> str:
    """Return the id of a row."""
    return f"{prefix}{number:012X}"


def make_item(
    number: int, body: bytes, prefix: str = PREFIX, more: bytes = b"TAGS\x01A\x02colour\x01red\x02", flag: int = 0
) -> Item:
    """Return the item of a row: the id is its first property, as the sink encodes it."""
    return Item(flag, body, f"UNIQ_KEY\x01{make_id(number, prefix)}\x02".encode() + more)


def run_of(queue: QueueKey, items: Sequence[Item], stage: QueueKey, offset: int, begin: int = 0) -> StagedRun:
    """Return the run of items that are in a blob at `begin`."""
    data = encode_items(items)
    first_id = items[0].properties[9:41].decode()
    return StagedRun(queue, stage, offset, begin, len(data), zlib.crc32(data), first_id, len(items))


class Staging:
    """Stages rows in the stage topic of a cluster. Each row gets the next number as its id."""

    def __init__(self, cluster: RunningCluster, prefix: str = PREFIX) -> None:
        self._cluster, self._prefix = cluster, prefix
        self._numbers = count(7 << 16)
        for name, broker in cluster.brokers.items():
            if STAGE not in broker.topics:
                cluster.create_topic(STAGE, queues=1, brokers=[name])

    def items(self, bodies: Iterable[bytes]) -> list[Item]:
        """Return the items of rows."""
        return [make_item(next(self._numbers), body, self._prefix) for body in bodies]

    def add(self, queue: QueueKey, bodies: Iterable[bytes], on: str | None = None) -> StagedRun:
        """Stage a run as a blob of its own, on the target queue's broker or on the broker `on`."""
        return self.add_together([(queue, bodies)], on)[0]

    def add_together(self, parts: Sequence[tuple[QueueKey, Iterable[bytes]]], on: str | None = None) -> list[StagedRun]:
        """Stage small runs in one blob."""
        broker = parts[0][0].broker if on is None else on
        lists = [(queue, self.items(bodies)) for queue, bodies in parts]
        blob = b"".join(encode_items(items) for _, items in lists)
        ((_, offset),) = self._cluster.send(STAGE, blob, broker=broker, queue_id=0)
        runs, begin = [], 0
        for queue, items in lists:
            runs.append(run_of(queue, items, QueueKey(STAGE, 0, broker), offset, begin))
            begin += runs[-1].size
        return runs


class SessionCalls:
    """The connections of a session: each broker is connected to once. `beats` counts how often heartbeats were due."""

    def __init__(self, cluster: RunningCluster, timeout_ms: int = 30_000) -> None:
        self._cluster = cluster
        self.client = ClusterClient(address_of(cluster, request_timeout_ms=timeout_ms))
        self._numbers: dict[str, int] = {}
        self.beats = 0
        self.sent: dict[str, list[Request[Any]]] = defaultdict(list)

    def address(self, broker: str) -> str:
        """Return the address of a broker."""
        return self._cluster.brokers[broker].address

    def submit_all(
        self,
        broker: str,
        requests: Sequence[Request[Any]],
        timeout_ms: int | None = None,
        done: list[Ticket[Any]] | None = None,
    ) -> list[Ticket[Any]]:
        """Send requests to a broker."""
        self.sent[broker] += requests
        to = self.address(broker)
        tickets = self.client.submit_all(to, requests, timeout_ms, done)
        self._numbers.setdefault(to, self.client.connection_number(to))
        return tickets

    def take_done(self, done: list[Ticket[Any]], timeout_ms: float) -> list[Ticket[Any]]:
        """Return what is in `done`."""
        return self.client.take_done(done, timeout_ms)

    def beat(self) -> None:
        """Count the call."""
        self.beats += 1

    def check(self) -> None:
        """Raise SessionOverError if a connection was lost or made again."""
        for to, number in self._numbers.items():
            if not self.client.is_connected(to) or self.client.connection_number(to) != number:
                raise SessionOverError(f"the connection to {to} is lost")

    def close(self) -> None:
        """Close all connections."""
        self.client.close()


def tear_last_record(broker: Broker, queue: QueueKey, cut: int, path: Path) -> None:
    """Kill a broker while it appends the last record of its log, and start it again with a store at `path`.

    Only the first `cut` bytes of the record were written, and zeros are in the place of the rest. The record is the
    last one of `queue`. It has no consume-queue entry yet, so recovery decides whether it stays.
    """
    last = broker.bounds(queue.topic)[queue.queue_id].max_offset - 1
    broker.copy_store(path)
    (log,) = (path / "commitlog").iterdir()
    data = log.read_bytes()
    positions, end = walk_records(data)
    begin = int(positions[-1])
    assert 0 <= cut <= end - begin, (cut, end - begin)
    log.write_bytes(data[: begin + cut] + bytes(len(data) - begin - cut))
    entries = path / "consumequeue" / queue.topic / str(queue.queue_id) / f"{0:020}"
    found = entries.read_bytes()
    assert int.from_bytes(found[20 * last : 20 * last + 8], "big") == begin, "the last record is of another queue"
    entries.write_bytes(found[: 20 * last] + bytes(len(found) - 20 * last))
    (path / "rmq" / "watermark").unlink()  # a broker does not have it
    (path / "abort").touch()
    broker.replace_store(path)
