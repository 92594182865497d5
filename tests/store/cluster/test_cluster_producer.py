"""The producer of a cluster for programs: what it sends, where it says that messages are, and its errors."""

import functools
import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from support.sent_messages import read_bodies, read_rows

from rmq_spark.store import SendResult, open_store
from rmq_spark.store.cluster.codes import RequestCode
from rmq_spark.store.cluster.message_spool import MessageSpool
from rmq_spark.store.cluster.producer import SENT, ClusterProducer, find_physical_offsets
from rmq_spark.store.disk.clock import wall_clock_ms
from rmq_spark.store.errors import (
    BrokerError,
    NoPermissionError,
    NotFoundError,
    OptionError,
)
from rmq_spark.store.format.java import string_hash
from rmq_spark.store.model import QueueBounds, QueueKey
from rmq_spark.store.send_result import SendStatus
from rmq_spark.store.testing.brokers import Account, AccountTable, RunningCluster

BATCH, SINGLE, ROUTE = (
    RequestCode.SEND_BATCH_MESSAGE, RequestCode.SEND_MESSAGE_V2, RequestCode.GET_ROUTEINFO_BY_TOPIC
)  # fmt: skip
SHORT_MS = 1000
Open = Callable[..., ClusterProducer]


@pytest.fixture(params=["5.3", "4.9"])
def cluster(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[RunningCluster]:
    with RunningCluster(tmp_path / "cluster", release=request.param, brokers=2) as cluster:
        cluster.create_topic("orders", queues=2)
        yield cluster


@pytest.fixture
def open_producer(cluster: RunningCluster) -> Iterator[Open]:
    """A function that opens a producer, which is closed at the end."""
    opened = []

    def open_one(**options: Any) -> ClusterProducer:
        opened.append(open_store(name_server=cluster.address, **options))
        return opened[-1]

    yield open_one
    for producer in opened:
        producer.close()


@pytest.fixture
def producer(open_producer: Open) -> ClusterProducer:
    return open_producer()


def find(cluster: RunningCluster, result: SendResult) -> dict[str, Any]:
    """Return the message at the place of a result. Checks that it is this message."""
    queue = QueueKey(result.topic, result.queue_id, result.broker)
    row = read_rows(cluster, result.topic)[queue][result.queue_offset]
    assert row["queueOffset"] == result.queue_offset
    assert row["commitLogOffset"] == result.commit_log_offset
    assert row["msgId"] == result.message_id
    return row


def own_properties(row: dict[str, Any]) -> dict[str, str]:
    """Return the properties of a row without those that a broker adds."""
    added = {"CLUSTER", "MSG_REGION", "TRACE_ON", "UNIQ_KEY"}
    return {name: value for name, value in row["properties"] if name not in added}


def check_places(cluster: RunningCluster, sent: pa.Table, bodies: list[bytes]) -> None:
    """Check that each message is where the table says, and no other message is there."""
    topics = set(sent["topic"].to_pylist())
    stored = {topic: read_rows(cluster, topic) for topic in topics}
    rows = sent.to_pylist()
    assert len(rows) == len(bodies)
    for row, body in zip(rows, bodies, strict=True):
        queue = QueueKey(row["topic"], row["queueId"], row["brokerName"])
        found = stored[row["topic"]][queue][row["queueOffset"]]
        place = found["body"], found["queueOffset"], found["commitLogOffset"], found["msgId"]
        assert place == (body, row["queueOffset"], row["commitLogOffset"], row["msgId"])
    assert sum(len(one) for queues in stored.values() for one in queues.values()) == len(rows)


def table_of(bodies: list[bytes], **columns: Any) -> pa.Table:
    return pa.table({"topic": ["orders"] * len(bodies), "body": pa.array(bodies, pa.binary()), **columns})


def bodies_of(count: int) -> list[bytes]:
    return [b"%05d" % number for number in range(count)]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({}, {}),
        ({"tags": "A", "keys": "k1 k2"}, {"tags": "A", "keys": "k1 k2"}),
        ({"keys": ["k1", "标签"]}, {"keys": "k1 标签"}),
        ({"properties": {"a": '"b\\', "标": "\x7f\u2028", "TAGS": "T"}}, {"tags": "T"}),
        ({"flag": -7, "sharding_key": "s"}, {"flag": -7}),
        ({"body": b""}, {"body": b""}),
        ({"body": "标签😀"}, {"body": "标签😀".encode()}),
        ({"body": bytes(range(256)), "queue_id": 1, "broker_name": "broker-b"}, {"body": bytes(range(256))}),
    ],
)
def test_send_stores_what_was_given(
    cluster: RunningCluster, producer: ClusterProducer, arguments: dict[str, Any], expected: dict[str, Any]
) -> None:
    arguments = {"body": b"x", **arguments}
    for _ in range(2):
        result = producer.send("orders", **arguments)
        row = find(cluster, result)
        assert {name: row[name] for name in expected} == expected
        given = {name: value for name, value in (arguments.get("properties") or {}).items() if name != "TAGS"}
        assert {name: own_properties(row).get(name) for name in given} == given
        assert result.status is SendStatus.SEND_OK
        if "broker_name" in arguments:
            assert (result.broker, result.queue_id) == ("broker-b", 1)
        if "sharding_key" in arguments:
            number = abs(string_hash("s")) % 4
            assert (result.broker, result.queue_id) == (("broker-a", "broker-b")[number // 2], number % 2)


def test_send_goes_round_the_queues(cluster: RunningCluster, producer: ClusterProducer) -> None:
    results = [producer.send("orders", b"%d" % number) for number in range(8)]
    assert set(Counter((one.broker, one.queue_id) for one in results).values()) == {2}
    for result in results:
        find(cluster, result)
    assert len({one.message_id for one in results}) == 8


@pytest.mark.parametrize("options", [{}, {"compression": "zlib", "compress_over": 30}], ids=["plain", "zlib"])
def test_send_many_returns_where_messages_are(
    cluster: RunningCluster, open_producer: Open, options: dict[str, Any]
) -> None:
    producer, bodies = open_producer(**options), bodies_of(300)
    bodies[7], bodies[8], bodies[200] = b"", b"word " * 100, b"x" * 200
    columns = {
        "tags": [f"t{number}" for number in range(300)],
        "keys": [[f"k{number}"] for number in range(300)],
        "shardingKey": [None if number % 3 else f"key-{number}" for number in range(300)],
        "properties": pa.array([[("p", str(number))] for number in range(300)], pa.map_(pa.string(), pa.string())),
        "flag": list(range(300)),
    }
    sent = producer.send_many(table_of(bodies, **columns))
    assert sent.schema == SENT
    check_places(cluster, sent, bodies)
    by_id = {row["msgId"]: row for rows in read_rows(cluster, "orders").values() for row in rows}
    for number, message_id in enumerate(sent["msgId"].to_pylist()):
        row = by_id[message_id]
        assert (row["tags"], row["keys"], row["flag"]) == (f"t{number}", f"k{number}", number)
        assert own_properties(row)["p"] == str(number)


def test_send_many_keeps_the_order_of_queues_and_keys(cluster: RunningCluster, producer: ClusterProducer) -> None:
    for broker in cluster.brokers.values():
        broker.settings.holds_sends_ms = 5
    bodies = bodies_of(3000)
    keys = [f"key-{number % 7}" if number % 2 else None for number in range(len(bodies))]
    sent = producer.send_many(table_of(bodies, shardingKey=keys))
    for found in read_bodies(cluster, "orders").values():
        assert found == sorted(found)
    places: dict[str, set[tuple[str, int]]] = {}
    for key, row in zip(keys, sent.to_pylist(), strict=True):
        if key is not None:
            places.setdefault(key, set()).add((row["brokerName"], row["queueId"]))
    assert all(len(queues) == 1 for queues in places.values())
    check_places(cluster, sent, bodies)


def test_send_many_to_queues_and_topics(cluster: RunningCluster, producer: ClusterProducer) -> None:
    cluster.create_topic("other", queues=1, brokers=["broker-b"])
    table = pa.table(
        {
            "topic": ["orders", "other", "orders", "other"],
            "body": pa.array(bodies_of(4), pa.binary()),
            "queueId": pa.array([1, None, 0, 0], pa.int32()),
            "brokerName": ["broker-a", None, "broker-b", None],
        }
    )
    sent = producer.send_many(table)
    places = list(
        zip(sent["topic"].to_pylist(), sent["brokerName"].to_pylist(), sent["queueId"].to_pylist(), strict=True)
    )
    assert places == [
        ("orders", "broker-a", 1),
        ("other", "broker-b", 0),
        ("orders", "broker-b", 0),
        ("other", "broker-b", 0),
    ]
    check_places(cluster, sent, bodies_of(4))


@pytest.mark.parametrize("rows", [0, 1])
def test_send_many_of_few_rows(cluster: RunningCluster, producer: ClusterProducer, rows: int) -> None:
    sent = producer.send_many(table_of(bodies_of(rows)).to_batches()[0] if rows else table_of([]))
    assert sent.schema == SENT
    if rows:
        check_places(cluster, sent, bodies_of(rows))
    other = producer.send_many(pa.table({"body": pa.array(bodies_of(rows), pa.binary())}), topic="orders")
    assert other["topic"].to_pylist() == ["orders"] * rows


@pytest.mark.slow
def test_send_many_of_several_pieces_uses_a_file(
    cluster: RunningCluster, producer: ClusterProducer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rmq_spark.store.cluster.producer._PIECE_ROWS", 1000)
    monkeypatch.setattr("rmq_spark.store.cluster.producer._PIECE_BYTES", 60_000)
    monkeypatch.setattr(
        "rmq_spark.store.cluster.producer.MessageSpool", functools.partial(MessageSpool, memory_bytes=100_000)
    )
    bodies = [b"%05d" % number * (1 + number % 40) for number in range(5000)]
    keys = [f"key-{number % 7}" for number in range(len(bodies))]
    check_places(cluster, producer.send_many(table_of(bodies, shardingKey=keys)), bodies)
    for found in read_bodies(cluster, "orders").values():
        assert [body[:5] for body in found] == sorted(body[:5] for body in found)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"topic": "a b"}, "topic 'a b' is not a topic's name"),
        ({"topic": 7}, "invalid message: topic"),
        ({"topic": "SCHEDULE_TOPIC_XXXX"}, "internal topic"),
        ({"body": None}, "its body is null"),
        ({"body": 7}, "invalid message: body"),
        ({"body": b"x" * 2001}, "expected at most 2000"),
        ({"tags": "a\x02b"}, "tags holds the character"),
        ({"properties": {"p": "x" * 32_500}}, "expected at most 32500"),
        ({"properties": {"a\x01": "b"}}, "is not a property name"),
        ({"queue_id": 0}, "several brokers: broker-a"),
        ({"queue_id": 7, "broker_name": "broker-a"}, "queue_id 7 of broker broker-a is not a queue"),
        ({"queue_id": True, "broker_name": "broker-a"}, "invalid message: queueId"),
        (
            {"queue_id": 0, "broker_name": "broker-x"},
            "broker broker-x is not listed .* leave out queue_id and broker_name",
        ),
        ({"broker_name": "broker-a"}, "broker_name and no queue_id"),
        ({"queue_id": 0}, "queue_id 0 and no broker_name, .* Give broker_name, or leave queue_id out"),
        ({"flag": 1 << 31}, "invalid message: flag"),
        ({"deliver_at_ms": 1_700_000_000}, r"^[^N]*Multiply seconds by 1000[^N]*Nothing was appended\.$"),
        ({"body": b"", "delay_level": 1}, "its body is empty"),
    ],
)
def test_send_refuses_an_invalid_message(
    cluster: RunningCluster, open_producer: Open, arguments: dict[str, Any], text: str
) -> None:
    producer = open_producer(max_message_size=2000)
    with pytest.raises(OptionError, match=text):
        producer.send(**{"topic": "orders", "body": b"x", **arguments})
    assert read_bodies(cluster, "orders") == {}
    find(cluster, producer.send("orders", b"after"))


@pytest.mark.parametrize(
    ("columns", "text"),
    [
        ({"tags": ["A", "a\x02b"]}, "row 1, topic 'orders': tags holds"),
        ({"queueId": [0, 0]}, "row 0, topic 'orders': it has queueId 0 and no brokerName"),
        ({"brokerName": [None, "broker-a"]}, "row 1, topic 'orders': it has a brokerName and no queueId"),
        ({"odd": [1, 2]}, "no such column: odd. Columns are: .*, queueId, .*brokerName; body"),
        ({"key": ["a", "b"]}, r"no such column: key\. Did you mean keys\?"),
        ({"flag": ["a", "b"]}, "column flag"),
        ({"topic": ["orders", None]}, "row 1: its topic is null"),
    ],
)
def test_send_many_refuses_all_rows(
    cluster: RunningCluster, producer: ClusterProducer, columns: dict[str, Any], text: str
) -> None:
    with pytest.raises(OptionError, match=text):
        producer.send_many(pa.table({"topic": ["orders"] * 2, "body": pa.array([b"a", b"b"]), **columns}))
    assert read_bodies(cluster, "orders") == {}


def test_delayed_messages_are_delivered_later(cluster: RunningCluster, producer: ClusterProducer) -> None:
    for broker in cluster.brokers.values():
        broker.settings.delivers = False
    result = producer.send("orders", b"one", delay_level=3, tags="A")
    sent = producer.send_many(table_of([b"two", b"now"], delayLevel=[2, 0]))
    assert [rows[0]["body"] for rows in read_rows(cluster, "orders").values()] == [b"now"]
    for broker in cluster.brokers.values():
        broker.deliver_due(wall_clock_ms() + 60_000)
    found = {row["msgId"]: row for rows in read_rows(cluster, "orders").values() for row in rows}
    assert found[result.message_id]["body"] == b"one"
    assert found[result.message_id]["tags"] == "A"
    assert found[sent["msgId"][0].as_py()]["body"] == b"two"


def test_timed_messages_need_brokers_of_5(cluster: RunningCluster, producer: ClusterProducer) -> None:
    for broker in cluster.brokers.values():
        broker.settings.delivers = False
    due_ms = wall_clock_ms() + 50_000
    if not cluster.release.is_5:
        with pytest.raises(OptionError, match=r"4.9, which have no timer .*broker-a, broker-b.* Use delay_level"):
            producer.send("orders", b"one", deliver_at_ms=due_ms)
        assert read_bodies(cluster, "orders") == {}
        return
    with pytest.raises(BrokerError, match=r"refuses the delivery time .* Give an earlier delivery time") as refused:
        producer.send("orders", b"one", deliver_at_ms=due_ms + 10 * 86_400_000)
    (note,) = refused.value.__notes__
    assert re.fullmatch(r"rmq: the broker refused message [0-9A-F]+\.", note)
    producer.send("orders", b"one", deliver_at_ms=due_ms)
    assert read_bodies(cluster, "orders") == {}
    assert sum(broker.deliver_due(due_ms + 2000) for broker in cluster.brokers.values()) == 1
    assert [*read_bodies(cluster, "orders").values()] == [[b"one"]]


def test_messages_to_a_retry_topic_are_sent_one_by_one(cluster: RunningCluster, producer: ClusterProducer) -> None:
    """A broker of 5.x accepts no batch of them."""
    cluster.create_topic("%RETRY%billing", queues=1, brokers=["broker-a"])
    producer.send("%RETRY%billing", b"1")
    sent = producer.send_many(pa.table({"body": pa.array([b"2", b"3"])}), topic="%RETRY%billing")
    assert [*read_bodies(cluster, "%RETRY%billing").values()] == [[b"1", b"2", b"3"]]
    assert sent["queueOffset"].to_pylist() == [1, 2]
    if cluster.release.is_5:
        with pytest.raises(OptionError, match="its body is empty"):
            producer.send("%RETRY%billing", b"")


def test_compressed_bodies_are_read_back(cluster: RunningCluster, open_producer: Open) -> None:
    producer = open_producer(compression="lz4", compress_over=30)
    body = b"word " * 100
    assert find(cluster, producer.send("orders", body))["body"] == body
    assert find(cluster, producer.send("orders", b"short"))["body"] == b"short"


def test_a_namespace_is_added_to_topics(cluster: RunningCluster, open_producer: Open) -> None:
    cluster.create_topic("shop%orders", queues=1)
    producer = open_producer(namespace="shop")
    result = producer.send("orders", b"x")
    sent = producer.send_many(table_of([b"y", b"z"]))
    assert (result.topic, set(sent["topic"].to_pylist())) == ("orders", {"orders"})
    found = [body for bodies in read_bodies(cluster, "shop%orders").values() for body in bodies]
    assert sorted(found) == [b"x", b"y", b"z"]
    assert read_bodies(cluster, "orders") == {}
    assert producer.create_topic("new", 2) == 4
    assert "shop%new" in cluster.brokers["broker-a"].topics
    assert sum(bounds.max_offset for bounds in producer.bounds("orders").values()) == 3


def test_create_topic_and_bounds(cluster: RunningCluster, producer: ClusterProducer) -> None:
    assert producer.create_topic("new", 3) == 6
    assert producer.create_topic("new", 5) == 6, "it stays unchanged"
    assert producer.create_topic("read", 3, perm=4) == 0
    assert {"new", "read", "orders"} <= set(producer.topics())
    result = producer.send("new", b"x")
    bounds = producer.bounds("new")
    assert bounds[QueueKey("new", result.queue_id, result.broker)] == QueueBounds(0, 1)
    assert len(bounds) == 6
    with pytest.raises(NoPermissionError, match="topic read accepts no messages"):
        producer.send("read", b"x")
    for arguments in (("a b",), ("x", 0), ("x", 1, 7)):
        with pytest.raises(OptionError):
            producer.create_topic(*arguments[:2], **({"perm": arguments[2]} if len(arguments) > 2 else {}))
    with pytest.raises(NotFoundError, match="absent") as missing:
        producer.bounds("absent")
    assert "subscribe" not in str(missing.value)


def test_a_missing_topic_is_created_or_an_error(cluster: RunningCluster, open_producer: Open) -> None:
    with pytest.raises(NotFoundError, match=r"topic new does not exist.*create_topic=True"):
        open_producer(create_topic=False).send("new", b"x")
    find(cluster, open_producer(queues=1).send("new", b"x"))
    assert cluster.brokers["broker-b"].topics["new"].write_queues == 1


def test_an_account_without_rights_is_told_what_to_ask_for(cluster: RunningCluster, open_producer: Open) -> None:
    for broker in cluster.brokers.values():
        broker.accounts = AccountTable(Account("reader", "s3cret", topics={"*": "SUB|GET"}, groups={"*": "SUB"}))
    producer = open_producer(access_key="reader", secret_key="s3cret")
    for send in (lambda: producer.send("orders", b"x"), lambda: producer.send("new", b"x")):
        with pytest.raises(NoPermissionError, match="Ask an administrator") as caught:
            send()
        assert "s3cret" not in str(caught.value)
    with pytest.raises(NoPermissionError, match="mqadmin updateTopic"):
        producer.create_topic("new")


def test_find_physical_offsets_reads_ids_of_one_width() -> None:
    host = "7F00000100002A9F"
    offsets = [0, 5, (1 << 63) - 1]
    ids = [f"{host}{offset:016X}" for offset in offsets]
    assert find_physical_offsets(",".join(ids), 3).tolist() == offsets
    assert find_physical_offsets(",".join(ids).lower(), 3).tolist() == offsets
    assert find_physical_offsets(",".join(ids), 2).tolist() == [-1, -1]
    for bad in ("", "x", f"{host}{1 << 63:016X}", f"{host}{5:015X}G", "标" * 32, f"{ids[1]},"):
        assert find_physical_offsets(bad, 1).tolist() == [-1], bad
    assert find_physical_offsets(f"{ids[1]},{host}{5:015X}G", 2).tolist() == [5, -1]
    for one, offset in zip(ids, offsets, strict=True):
        assert find_physical_offsets(one, 1).tolist() == [offset]
