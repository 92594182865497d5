"""Tasks that stage their rows: what the stage topic holds, what the receipt says, and what is refused before a send."""

import pickle
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pytest
from support.sent_messages import address_of, read_rows
from support.sent_rows import COLUMNS

from rmq_spark.store.backend import CommitTerms, SinkTerms
from rmq_spark.store.cluster import client as cluster_client
from rmq_spark.store.cluster.codes import RequestCode
from rmq_spark.store.cluster.exactly_once import stage_task as module
from rmq_spark.store.cluster.exactly_once.run_packing import PackedBlob, pack_rows
from rmq_spark.store.cluster.exactly_once.stage_task import StageTask, make_ids
from rmq_spark.store.cluster.exactly_once.staged_batch import StagedRows
from rmq_spark.store.cluster.exactly_once.target_topics import OwnTopics, prepare_targets
from rmq_spark.store.cluster.message_spool import ItemRun, MessageSpool
from rmq_spark.store.cluster.sink import ClusterSink
from rmq_spark.store.disk.clock import wall_clock_ms
from rmq_spark.store.errors import (
    BackendUnavailableError,
    BrokerError,
    DiskFullError,
    NotFoundError,
    OptionError,
)
from rmq_spark.store.model import CommitKey, QueueKey
from rmq_spark.store.testing.brokers import RunningCluster, faults
from rmq_spark.store.testing.brokers.sent_message import Item, read_items

OWN = OwnTopics()
KEY = CommitKey("query", 7)
SEND = RequestCode.SEND_MESSAGE_V2
COUNT = 40
MIB = 1 << 20
SMALL = 5000  # limit of runs and blobs in some tests
Row = dict[str, Any]


@pytest.fixture(autouse=True)
def _no_idle_clients(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("rmq_spark.store.cluster.write_routes._RENEW_MS", 20.0)
    yield
    cluster_client._idle.forget()


@pytest.fixture
def run(run_cluster: Callable[..., RunningCluster]) -> Callable[..., RunningCluster]:
    """A function that starts two brokers with the topic orders and the stage topic."""

    def start(release: str = "5.3", stage: Sequence[str] = ("broker-a", "broker-b")) -> RunningCluster:
        cluster = run_cluster(release=release, brokers=2)
        cluster.create_topic("orders", queues=2)
        cluster.create_topic(OWN.stage, queues=3, brokers=stage)
        return cluster

    return start


@pytest.fixture(params=["4.9", "5.3"])
def cluster(run: Callable[..., RunningCluster], request: pytest.FixtureRequest) -> RunningCluster:
    return run(request.param)


def rows_of(count: int = COUNT, **columns: Any) -> list[Row]:
    """Return rows with the bodies 000, 001 and so on."""
    return [{"topic": "orders", "body": b"%03d" % number, **columns} for number in range(count)]


def batch_of(rows: Sequence[Row]) -> pa.RecordBatch:
    names = dict.fromkeys(name for row in rows for name in row) or ["topic"]
    return pa.RecordBatch.from_pylist(list(rows), pa.schema([(name, COLUMNS[name]) for name in names]))


def sink_of(cluster: RunningCluster, at: Mapping[str, Any] | None = None, **terms: Any) -> ClusterSink:
    return ClusterSink(address_of(cluster, **(at or {})), SinkTerms(creates_topics=False, **terms), CommitTerms())


def stage(
    cluster: RunningCluster,
    *batches: Sequence[Row],
    own: OwnTopics = OWN,
    token: str | None = None,
    before: Callable[[], None] = lambda: None,
    sink: ClusterSink | None = None,
) -> StagedRows:
    """Stage rows as one attempt of a task. `before` is called when all are encoded, and none was sent."""
    task = StageTask(sink or sink_of(cluster), own, KEY, token)
    try:
        for rows in batches:
            task.write(batch_of(rows))
        before()
        return task.finish()
    finally:
        task.discard()


def blobs_of(cluster: RunningCluster, topic: str = OWN.stage) -> dict[tuple[QueueKey, int], bytes]:
    """Return the bodies of all messages of the stage topic by queue and queue offset."""
    return {
        (queue, row["queueOffset"]): row["body"] for queue, rows in read_rows(cluster, topic).items() for row in rows
    }


def items_of(cluster: RunningCluster, staged: StagedRows) -> dict[QueueKey, list[Item]]:
    """Return the items that the runs of a receipt have for each target queue. Checks what it says of the runs."""
    blobs, found = blobs_of(cluster), dict[QueueKey, list[Item]]()
    for one in staged.runs:
        data = blobs[one.stage, one.offset][one.begin : one.begin + one.size]
        items = read_items(data)
        assert (len(data), zlib.crc32(data), len(items)) == (one.size, one.crc32, one.rows)
        assert id_of(items[0]) == one.first_id
        found.setdefault(one.queue, []).extend(items)
    assert sum(map(len, found.values())) == staged.rows
    return found


def id_of(item: Item) -> str:
    name, _, value = item.properties.partition(b"\x02")[0].partition(b"\x01")
    assert name == b"UNIQ_KEY"
    return value.decode()


def bodies_of(found: Mapping[QueueKey, Sequence[Item]]) -> list[bytes]:
    return sorted(item.body for items in found.values() for item in items)


def stored(cluster: RunningCluster, topic: str) -> int:
    """Return how many messages of a topic the brokers have stored."""
    return sum(
        one.max_offset
        for broker in cluster.brokers.values()
        if topic in broker.topics
        for one in broker.bounds(topic).values()
    )


def test_rows_are_staged_as_items_in_the_order_of_each_queue(cluster: RunningCluster) -> None:
    rows = rows_of(tags="A", keys="k", properties=[("p", "v")], flag=3)
    staged = stage(cluster, rows[:15], [], rows[15:])
    found = items_of(cluster, staged)
    assert (staged.key, staged.rows, len(found)) == (KEY, COUNT, 4)
    for items in found.values():
        assert [item.body for item in items] == sorted(item.body for item in items)
        assert [id_of(item) for item in items] == sorted(id_of(item) for item in items)
        assert {item.flag for item in items} == {3}
        assert all(b"TAGS\x01A\x02KEYS\x01k\x02p\x01v" in item.properties for item in items)
    assert bodies_of(found) == [row["body"] for row in rows]
    assert stored(cluster, "orders") == 0, "only the commit publishes"
    assert pickle.loads(pickle.dumps(staged)) == staged


def test_small_runs_share_the_blob_of_their_broker(cluster: RunningCluster) -> None:
    staged = stage(cluster, rows_of())
    assert len(staged.runs) == 4
    assert len({(one.stage, one.offset) for one in staged.runs}) == stored(cluster, OWN.stage) == 2
    assert staged.bytes == sum(len(blob) for blob in blobs_of(cluster).values())
    assert all(one.stage.broker == one.queue.broker for one in staged.runs)


def test_full_runs_have_blobs_of_their_own(cluster: RunningCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "pack_rows", partial(pack_rows, max_bytes=SMALL))
    rows = rows_of(9, queueId=1, brokerName="broker-b")
    for row in rows:
        row["body"] *= SMALL // 10
    staged = stage(cluster, rows[:2], rows[2:])
    assert [(one.queue, one.rows, one.begin) for one in staged.runs] == [(QueueKey("orders", 1, "broker-b"), 3, 0)] * 3
    assert all(SMALL * 0.9 < one.size <= SMALL for one in staged.runs)
    assert bodies_of(items_of(cluster, staged)) == [row["body"] for row in rows]
    assert stored(cluster, OWN.stage) == 3


def test_blobs_are_spread_over_the_queues_of_a_broker(
    run: Callable[..., RunningCluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "pack_rows", partial(pack_rows, max_bytes=1))
    cluster = run()
    rows = rows_of(6, queueId=0, brokerName="broker-a")
    staged = stage(cluster, rows)
    assert sorted(one.stage.queue_id for one in staged.runs) == [0, 0, 1, 1, 2, 2]
    assert [one.offset for one in staged.runs] == [0, 0, 0, 1, 1, 1]


def test_a_row_larger_than_a_run_is_staged_alone(cluster: RunningCluster) -> None:
    rows = rows_of(3, queueId=0, brokerName="broker-a")
    rows[1]["body"] = bytes(3 * MIB)
    staged = stage(cluster, rows)
    assert [one.rows for one in staged.runs] == [1, 1, 1]
    assert [items[1].body for items in items_of(cluster, staged).values()] == [rows[1]["body"]]


def test_rows_beyond_the_memory_are_kept_in_a_file(cluster: RunningCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MessageSpool.__init__.__kwdefaults__, "memory_bytes", 500)  # type: ignore[arg-type]
    parts: list[ItemRun] = []

    def pack(rows: Mapping[QueueKey, Sequence[ItemRun]]) -> list[PackedBlob]:
        parts.extend(part for of_queue in rows.values() for part in of_queue)
        return pack_rows(rows)

    monkeypatch.setattr(module, "pack_rows", pack)
    staged = stage(cluster, *(rows_of()[at : at + 5] for at in range(0, COUNT, 5)))
    assert {part.data is None for part in parts} == {True, False}
    assert len(bodies_of(items_of(cluster, staged))) == COUNT


def test_a_full_temporary_folder_stops_the_task_before_anything_was_sent(
    cluster: RunningCluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(MessageSpool.__init__.__kwdefaults__, "memory_bytes", 0)  # type: ignore[arg-type]
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "missing"))
    with pytest.raises(DiskFullError):
        stage(cluster, rows_of())
    assert stored(cluster, OWN.stage) == 0


def test_the_receipt_of_a_task_without_rows_is_empty(cluster: RunningCluster) -> None:
    staged = stage(cluster, [])
    assert staged == StagedRows(KEY, (), 0, 0, {})
    assert cluster.clear_requests() == {}


# The digest, ids and queues.


def test_the_digest_depends_on_the_rows_and_on_nothing_else(run_cluster: Callable[..., RunningCluster]) -> None:
    cluster = run_cluster(is_light=True)
    for topic in ("orders", OWN.stage):
        cluster.create_topic(topic, queues=2)
    rows = [
        *rows_of(10),
        *rows_of(10, keys="k", queueId=1, brokerName="broker-a"),
        *rows_of(5, shardingKey="s", tags="t", properties=[("p", "v")]),
    ]
    columns = ("topic", "body", "tags", "keys", "shardingKey", "queueId", "brokerName", "properties")
    rows = [{name: row.get(name) for name in columns} for row in rows]
    whole = stage(cluster, rows)
    mixed = list(rows)
    Random(3).shuffle(mixed)
    parts = [stage(cluster, mixed[:9]), stage(cluster, mixed[9:11], mixed[11:])]
    assert whole.digest == sum(one.digest for one in parts) % 2**64 != 0
    assert stage(cluster, rows, rows[:1]).digest != whole.digest
    for change in ({"body": b"x"}, {"keys": "x"}, {"tags": "x"}, {"shardingKey": "x"}, {"properties": [("p", "x")]}):
        assert stage(cluster, [*rows[:-1], rows[-1] | change]).digest != whole.digest, change


def test_no_two_attempts_have_an_id_in_common(cluster: RunningCluster) -> None:
    ids = [
        {id_of(item) for items in items_of(cluster, stage(cluster, rows_of())).values() for item in items}
        for _ in range(2)
    ]
    assert len(ids[0] | ids[1]) == 2 * COUNT
    assert {len(one) for one in ids[0]} == {32}
    assert len({one[:-12] for one in ids[0]}) == 1, "one prefix finds all rows of an attempt"


@pytest.mark.parametrize("ip", ["10.1.2.3", "2001:db8::a01:203", "fe80::a01:203%eth0"])
def test_ids_have_32_characters_whatever_the_address_of_the_machine(
    cluster: RunningCluster, monkeypatch: pytest.MonkeyPatch, ip: str
) -> None:
    monkeypatch.setattr(module, "find_own_ip", lambda towards: ip)
    ids = [make_ids(address_of(cluster)).take_one(wall_clock_ms()) for _ in range(2)]
    assert [one[:8] for one in ids] == ["0A010203"] * 2
    assert [len(one) for one in ids] == [32] * 2
    assert ids[0][:20] != ids[1][:20]


def test_the_receipt_has_the_lists_of_write_queues_in_their_order(cluster: RunningCluster) -> None:
    cluster.create_topic("sorted", queues=2)
    for server in cluster.name_servers:
        server.add_to_route("sorted", orderTopicConf="broker-b:2;broker-a:1")
    staged = stage(cluster, [*rows_of(3), *rows_of(3, topic="sorted")])
    assert staged.write_queues == {
        "orders": tuple(QueueKey("orders", number, f"broker-{name}") for name in "ab" for number in (0, 1)),
        "sorted": tuple(QueueKey("sorted", *at) for at in ((0, "broker-b"), (1, "broker-b"), (0, "broker-a"))),
    }


def test_the_driver_fixes_the_queues_of_the_option_topic(cluster: RunningCluster) -> None:
    sink = sink_of(cluster, topic="orders")
    token = prepare_targets(sink, OWN)
    cluster.create_topic("orders", queues=5)
    cluster.clear_requests()
    staged = stage(cluster, rows_of(), sink=sink, token=token)
    assert {one.queue.queue_id for one in staged.runs} == {0, 1}
    assert len(staged.write_queues["orders"]) == 4
    requests = cluster.clear_requests()
    assert requests["name servers"][RequestCode.GET_ROUTEINFO_BY_TOPIC] == 1, "for the stage"
    assert not any(count[RequestCode.GET_TOPIC_CONFIG] for count in requests.values())


def test_names_in_a_receipt_are_without_the_namespace(run_cluster: Callable[..., RunningCluster]) -> None:
    cluster = run_cluster()
    for topic in ("ns%orders", f"ns%{OWN.stage}"):
        cluster.create_topic(topic, queues=1)
    staged = stage(cluster, rows_of(), sink=sink_of(cluster, {"namespace": "ns"}))
    assert [(one.queue, one.stage.topic) for one in staged.runs] == [(QueueKey("orders", 0, "broker-a"), OWN.stage)]
    assert list(staged.write_queues) == ["orders"]
    assert stored(cluster, f"ns%{OWN.stage}") == 1
    with pytest.raises(OptionError, match="stages rows"):
        stage(cluster, rows_of(topic=f"ns%{OWN.stage}"), sink=sink_of(cluster, {"namespace": "ns"}))


# Refusals.


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"delayLevel": 3}, r"it has delayLevel 3; expected none .*Leave delayLevel out, or set delivery=atLeastOnce"),
        (
            {"deliverTimestamp": 1 << 50},
            "it has a deliverTimestamp in the future; expected none .*=atLeastOnce",
        ),
        ({"body": bytes(4 * MIB - 63)}, r"it takes 4194305 bytes in a batch, .*at most 4194304 \(maxMessageSize\)"),
        ({"body": bytes(4 * MIB + 1)}, r"its body has 4194305 bytes; .* \(maxMessageSize\)\. Split the message$"),
        ({"body": None}, "its body is null"),
        ({"properties": [("p", "v" * 32_500)]}, "properties, tags and keys take 32545 bytes; expected at most 32500"),
    ],
)
def test_a_row_that_cannot_be_stored_exactly_once_stops_the_task_before_it_sends(
    cluster: RunningCluster, row: Row, why: str
) -> None:
    rows = rows_of(5, **dict.fromkeys(row))
    rows = [one | {"body": one["body"] or b"x"} for one in rows]
    rows[3] |= row
    with pytest.raises(OptionError, match=f"^row 8, topic 'orders': {why}"):
        stage(cluster, rows_of(5), rows)
    assert stored(cluster, OWN.stage) == 0


def test_a_row_of_the_largest_size_is_staged(cluster: RunningCluster) -> None:
    rows = rows_of(1, queueId=0, brokerName="broker-a") * 2
    rows[1] = rows[1] | {"body": bytes(4 * MIB - 64)}
    staged = stage(cluster, rows)
    assert [one.size for one in staged.runs][1] == 4 * MIB


def test_rows_without_a_delay_or_with_a_passed_time_are_staged(cluster: RunningCluster) -> None:
    rows = rows_of(3, delayLevel=0, deliverTimestamp=wall_clock_ms() - 1000)
    rows[1] |= {"delayLevel": None, "deliverTimestamp": None}
    assert len(bodies_of(items_of(cluster, stage(cluster, rows)))) == 3


@pytest.mark.parametrize(
    ("topic", "why"),
    [
        (OWN.stage, "stages rows"),
        (OWN.ledger, "the ledger"),
        ("%RETRY%billing", "retry topic"),
        ("%DLQ%billing", "RocketMQ itself"),
        ("SCHEDULE_TOPIC_XXXX", "internal topic"),
        ("odd", "BatchCQ"),
    ],
)
def test_a_topic_in_a_row_is_refused(run: Callable[..., RunningCluster], topic: str, why: str) -> None:
    cluster = run()
    cluster.create_topic("odd", queues=1, attributes={"queue.type": "BatchCQ"})
    with pytest.raises(OptionError, match=why):
        stage(cluster, rows_of(), [*rows_of(1), *rows_of(2, topic=topic)])
    assert stored(cluster, OWN.stage) == 0


def test_a_missing_stage_topic_is_named_with_its_command(run_cluster: Callable[..., RunningCluster]) -> None:
    cluster = run_cluster(is_light=True)
    cluster.create_topic("orders", queues=1)
    sink = sink_of(cluster)
    sink = replace(sink, terms=replace(sink.terms, creates_topics=True))
    task = StageTask(sink, OwnTopics(stage="mine"), KEY, None)
    with pytest.raises(NotFoundError, match=r"the topic mine \(stageTopic\).* rmq prepare-sink .*atLeastOnce"):
        task.write(batch_of(rows_of()))
    task.discard()
    assert "mine" not in cluster.broker.topics


# Brokers that are away, and lost answers.


def test_a_blob_goes_elsewhere_if_its_broker_has_no_stage_topic(run: Callable[..., RunningCluster]) -> None:
    cluster = run(stage=["broker-a"])
    staged = stage(cluster, rows_of())
    assert {one.queue.broker for one in staged.runs} == {"broker-a", "broker-b"}
    assert {one.stage.broker for one in staged.runs} == {"broker-a"}
    assert len(bodies_of(items_of(cluster, staged))) == COUNT


def test_a_blob_goes_elsewhere_while_its_broker_is_away(cluster: RunningCluster) -> None:
    staged = stage(cluster, rows_of(), before=cluster.brokers["broker-b"].stop)
    assert {one.queue.broker for one in staged.runs} == {"broker-a", "broker-b"}
    assert {one.stage.broker for one in staged.runs} == {"broker-a"}
    cluster.brokers["broker-b"].restart()
    assert len(bodies_of(items_of(cluster, staged))) == COUNT


@pytest.mark.parametrize("executes", [True, False])
def test_a_blob_is_sent_again_when_its_outcome_is_not_known(cluster: RunningCluster, executes: bool) -> None:
    for broker in cluster.brokers.values():
        broker.fail(SEND, faults.closes_connection(executes=executes), times=2)
    staged = stage(cluster, rows_of())
    assert len(bodies_of(items_of(cluster, staged))) == COUNT
    assert (stored(cluster, OWN.stage) > 2) == executes


def test_the_task_fails_when_no_broker_stores_anything(cluster: RunningCluster) -> None:
    def stop() -> None:
        for broker in cluster.brokers.values():
            broker.stop()

    sink = sink_of(cluster, {"broker_down_timeout_ms": 100})
    with pytest.raises(BackendUnavailableError, match=f"queue {OWN.stage}/.*brokerDownTimeout"):
        stage(cluster, rows_of(), before=stop, sink=sink)


def test_an_answer_without_an_offset_stops_the_task(cluster: RunningCluster) -> None:
    cluster.brokers["broker-a"].fail(SEND, faults.with_fields(queueOffset="?"))
    with pytest.raises(BrokerError, match="has no valid queue offset"):
        stage(cluster, rows_of(queueId=0, brokerName="broker-a"))


def test_a_refused_blob_is_named_by_its_first_row(cluster: RunningCluster) -> None:
    cluster.brokers["broker-b"].fail(SEND, faults.with_code(13, "too large"))
    with pytest.raises(BrokerError, match="too large") as caught:
        stage(cluster, rows_of(3, queueId=0, brokerName="broker-a"), rows_of(3, queueId=0, brokerName="broker-b"))
    assert caught.value.__notes__ == ["rmq: the broker refused row 3."]


def test_a_discarded_task_has_sent_nothing(cluster: RunningCluster) -> None:
    task = StageTask(sink_of(cluster), OWN, KEY, None)
    task.write(batch_of(rows_of()))
    task.discard()
    task.discard()
    assert stored(cluster, OWN.stage) == 0
