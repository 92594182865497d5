"""A whole broker on a store that we wrote: it serves, finds, filters, appends and deletes; then we append again.

The tests of one version share one broker and run in the order of this file.
"""

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from compat_kit import our_stores
from compat_kit.rocketmq import Broker, Client, Java, Line, Request, Verifier
from compat_kit.rows import Rows, count, differences, our_bounds, our_rows, their_rows

import rmq_spark
from rmq_spark.store.model import QueueKey

pytestmark = pytest.mark.compat

# Topics for push consumers. 4.9's dies of an empty body (ProcessQueue#putMessage: NullPointerException): it skips all
# that came with it, up to 32 messages. Its pull consumer, and 5.3's of both kinds, take it.
PUSHED = ("orders", "p")
HOURS = ";".join(f"{hour:02d}" for hour in range(24))


@dataclass
class Served:
    """A store of ours, with a broker and a client that use it. `written` are our messages."""

    store: Path
    broker: Broker
    client: Client
    written: Rows

    def pull(self, topic: str, **fields: object) -> list[Line]:
        """Return the messages that a pull consumer gets from a topic."""
        return self.client("pull", topic=topic, group="compat_pull", **fields)

    def pull_all(self) -> Rows:
        """Return the messages that pull consumers get from all our topics."""
        return their_rows(line for topic in our_stores.TOPICS for line in self.pull(topic))


@pytest.fixture(scope="module")
def served(java: Java, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    store = tmp_path_factory.mktemp(f"served-{java.version}") / "store"
    our_stores.fill(store, count=400, seed=6, with_bodies=PUSHED)
    written = our_rows(store)
    conf = our_stores.broker_conf() | {"fileReservedTime": 1, "deleteWhen": HOURS}
    with Broker(java, store, **conf) as broker, Client(broker) as client:
        yield Served(store, broker, client, written)


def test_pull_consumers_get_every_message(served: Served) -> None:
    assert differences(served.written, served.pull_all()) == []
    assert count(served.written) == 400


@pytest.mark.parametrize(("topic", "orderly"), list(zip(PUSHED, (False, True), strict=True)))
def test_push_consumers_get_every_message_once(served: Served, topic: str, orderly: bool) -> None:
    ours = {queue: rows for queue, rows in served.written.items() if queue.topic == topic}
    group = f"push_{topic}"
    lines = served.client("push", topic=topic, group=group, count=count(ours), timeoutMs=60_000, orderly=orderly)
    assert differences(ours, their_rows(lines)) == []
    assert len(lines) == count(ours)
    if orderly:
        assert [line["queueOffset"] for line in lines] == list(range(len(lines)))


def test_messages_are_found_by_key_id_and_time(served: Served) -> None:
    rule = "lower" if served.broker.java.is_5 else "nearest"
    with rmq_spark.open_reader(str(served.store)) as reader:
        for queue, rows in served.written.items():
            for row in rows[:: max(len(rows) // 3, 1)]:
                (by_id,) = served.client("find", topic=queue.topic, msgId=row["msgId"])
                (by_place,) = served.client("find", topic=queue.topic, physicalOffset=row["commitLogOffset"])
                for found in (by_id, by_place):
                    assert differences({queue: [row]}, their_rows([found])) == []
                for key in (row["keys"] or "").split():
                    by_key = served.client("find", topic=queue.topic, key=key)
                    ours = reader.find_key(queue.topic, key)
                    assert sorted((one["queueId"], one["queueOffset"]) for one in by_key) == [
                        (place.queue_id, offset) for place, offset in ours
                    ]
                (by_time,) = _offset_at(served, queue, row["storeTimestamp"])
                assert by_time == reader.offset_at_time(queue, row["storeTimestamp"], rule)


def _offset_at(served: Served, queue: QueueKey, timestamp: int) -> list[int]:
    lines = served.client("find", topic=queue.topic, queueId=queue.queue_id, timestamp=timestamp)
    return [line["offset"] for line in lines]


@pytest.mark.parametrize(
    ("expression", "kind", "column", "accepted"),
    [
        ("a", "TAG", "tags", {"a"}),
        ("标签 || " + "T" * 300, "TAG", "tags", {"标签", "T" * 300}),
        ("region = 'eu'", "SQL92", "region", {"eu"}),
        ("p7 IS NOT NULL AND p39 = 39", "SQL92", "p39", {"39"}),
    ],
)
def test_filters_pass_what_they_should(
    served: Served, expression: str, kind: str, column: str, accepted: set[str]
) -> None:
    for topic in our_stores.TOPICS:
        expected = {
            queue: [row for row in rows if row.get(column, row["properties"].get(column)) in accepted]
            for queue, rows in served.written.items()
            if queue.topic == topic
        }
        assert count(expected)
        assert differences(expected, their_rows(served.pull(topic, expr=expression, exprType=kind))) == []


def test_our_sends_fail_and_say_why_and_our_reads_do_not(served: Served) -> None:
    before = (served.store / "checkpoint").read_bytes()[:8]
    with pytest.raises(rmq_spark.LockTimeoutError, match="broker") as error:
        our_stores.open_small(served.store).send("orders", b"no")
    if served.broker.java.is_5:  # `abort` has its number; 4.9 leaves it empty
        assert str(served.broker.pid) in str(error.value)
    assert differences(our_rows(served.store), served.pull_all()) == []
    assert (served.store / "checkpoint").read_bytes()[:8] == before


def test_it_appends_where_we_ended_and_our_reader_follows(served: Served) -> None:
    with rmq_spark.open_reader(str(served.store)) as reader:
        reader.refresh()
        for topic, queues in our_stores.TOPICS.items():
            for queue_id in range(queues):
                queue = QueueKey(topic, queue_id)
                end = reader.bounds(queue).max_offset
                (sent,) = served.client(
                    "produce", topic=topic, text="theirs", queueId=queue_id, tags="a", keys="theirs"
                )
                assert sent["queueOffset"] == end
                wait_until(lambda queue=queue, end=end: reader.refresh() and reader.bounds(queue).max_offset == end + 1)
        assert len(reader.find_key("orders", "theirs")) == our_stores.TOPICS["orders"]
    ours = our_rows(served.store)
    assert differences(ours, served.pull_all()) == []
    assert count(ours) == 400 + sum(our_stores.TOPICS.values())


def test_it_deletes_our_oldest_segments(served: Served) -> None:
    segments = sorted((served.store / "commitlog").iterdir())
    for segment in segments[:2]:
        os.utime(segment, (1, 1))
    assert served.broker.expire() == 2 * our_stores.SMALL.segment_bytes
    assert not segments[1].exists()
    for topic in our_stores.TOPICS:
        bounds = our_bounds(served.store)
        for line in served.client("offsets", topic=topic):
            queue = QueueKey(topic, line["queueId"])
            assert bounds[queue] == (line["min"], line["max"]), queue
    assert any(first for first, _ in our_bounds(served.store).values())
    assert differences(our_rows(served.store), served.pull_all()) == []


def test_we_go_on_when_it_has_stopped(served: Served, verifier: Verifier) -> None:
    before = our_rows(served.store)
    served.client.program.end()
    served.broker.stop()
    assert differences(our_rows(served.store), before) == []
    with our_stores.open_small(served.store) as writer:
        for topic, queues in our_stores.TOPICS.items():
            for queue_id in range(queues):
                end = our_bounds(served.store)[QueueKey(topic, queue_id)][1]
                assert writer.send(topic, b"ours again", queue_id=queue_id, keys="again").queue_offset == end
    after = our_rows(served.store)
    assert count(after) == count(before) + sum(our_stores.TOPICS.values())
    (report,) = verifier.verify([Request(served.store, our_stores.index_conf(our_stores.SMALL))])
    assert report["recovered"]["truncated"] == 0
    assert not report["recovered"]["abortFile"]
    assert differences(after, their_rows(report["messages"])) == []


def wait_until(holds: object, timeout_s: float = 10) -> None:
    """Wait for a delayed effect of a broker. Raises AssertionError if it does not occur."""
    assert callable(holds)
    end = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.02)
