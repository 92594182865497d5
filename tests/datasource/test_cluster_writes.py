"""Writers of a cluster, called as by Spark but without it: what the driver asks, what tasks send, and their errors."""

import pickle
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.types import StructType
from support.cluster_fixtures import address_of

import rmq_spark
from rmq_spark.datasource.options.write_options import SinkOptions
from rmq_spark.datasource.spark.source import RmqDataSource
from rmq_spark.datasource.spark.task_writer import SinkTask, StagedRows, stage_rows
from rmq_spark.datasource.spark.writer import RmqStreamWriter
from rmq_spark.store.cluster import client
from rmq_spark.store.cluster.codes import RequestCode
from rmq_spark.store.errors import BackendUnavailableError, NotFoundError, OptionError, RmqError
from rmq_spark.store.model import CommitKey
from rmq_spark.store.testing.backend_fixtures import stored_rows
from rmq_spark.store.testing.brokers import RunningCluster, faults

BODY = StructType().add("body", "string")
ROUTE = RequestCode.GET_ROUTEINFO_BY_TOPIC
SENDS = (RequestCode.SEND_MESSAGE_V2, RequestCode.SEND_BATCH_MESSAGE)
KEY = CommitKey("query", 0)


@pytest.fixture
def cluster(run_cluster: Callable[..., RunningCluster]) -> Iterator[RunningCluster]:
    """Two brokers with two queues each of the topic orders."""
    cluster = run_cluster(brokers=2)
    cluster.create_topic("orders", queues=2)
    yield cluster
    client._idle.forget()


def source_of(cluster: RunningCluster, **given: str) -> RmqDataSource:
    """Return the data source of a write to the topic orders."""
    options = {"nameServer": cluster.address, "topic": "orders", "delivery": "atLeastOnce"}
    return RmqDataSource(options | {"brokerDownTimeout": "300ms"} | given)


def stream_writer(cluster: RunningCluster, **given: str) -> RmqStreamWriter:
    writer = source_of(cluster, **given).streamWriter(BODY, False)
    assert isinstance(writer, RmqStreamWriter)
    return writer


def options_of(cluster: RunningCluster, **given: str) -> SinkOptions:
    return stream_writer(cluster, **given)._options


def run_task(
    cluster: RunningCluster, rows: pa.RecordBatch, partition: int = 0, attempt: int = 0, **given: str
) -> StagedRows:
    """Run one attempt of a task with a pickled writer, as Spark does."""
    writer = pickle.loads(pickle.dumps(stream_writer(cluster, **given)))
    task = SinkTask(partition, attempt, attempt)
    return StagedRows(KEY, stage_rows([rows], writer._options, writer._token, KEY, task))


def rows(*bodies: str, **columns: Any) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict({"body": pa.array(bodies, pa.string())} | columns)


def stored(cluster: RunningCluster, *columns: str, topic: str = "orders") -> list[tuple[Any, ...]]:
    """Return the rows of a topic: these columns, sorted."""
    found = stored_rows(address_of(cluster), topic, columns)
    return sorted(tuple(row[name] for name in columns) for row in found)


# What the driver asks.


def test_streamWriter_asks_a_name_server_once_for_the_topic(cluster) -> None:
    stream_writer(cluster)
    cluster.clear_requests()
    writer = stream_writer(cluster)
    assert cluster.clear_requests() == {"name servers": {ROUTE: 1}}
    stage_rows([rows("a")], writer._options, writer._token, KEY, SinkTask(0, 0, 0))
    requests = cluster.clear_requests()
    assert "name servers" not in requests, "a task knows the queues and the addresses"
    assert sum(count[code] for count in requests.values() for code in SENDS) == 1
    writer.commit([StagedRows(KEY, options_of(cluster).sink().open_task(None, KEY, "", 0).finish())], 0)


def test_commit_of_a_stream_needs_no_server(cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rmq_spark.datasource.spark.source._SERVERS_MS", 0)
    message = run_task(cluster, rows("a", "b"))
    for server in [*cluster.name_servers, *cluster.brokers.values()]:
        server.kill()
    writer = stream_writer(cluster)
    writer.commit([message], 0)
    writer.abort([message, None], 0)
    with pytest.raises(BackendUnavailableError, match="Check the option nameServer"):
        pickle.loads(pickle.dumps(writer)).write(iter([rows("c")]))
    with pytest.raises(BackendUnavailableError, match="Check the option nameServer"):
        source_of(cluster).writer(BODY, False)


def test_commit_of_an_exactly_once_stream_waits_for_servers_itself(cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tasks have staged all rows, so the batch may not fail before brokerDownTimeout."""
    monkeypatch.setattr("rmq_spark.datasource.spark.source._SERVERS_MS", 0)
    rmq_spark.prepare_sink(cluster.address, "broker-a")
    exact = {"delivery": "exactlyOnce", "settleTime": "1ms", "brokerDownTimeout": "1m"}
    message = run_task(cluster, rows("a", "b"), **exact)
    (server,) = cluster.name_servers
    server.kill()
    writer = stream_writer(cluster, **exact)
    assert isinstance(writer._away, BackendUnavailableError)
    server.restart()
    cluster.register_all()
    writer.commit([message], 0)
    assert stored(cluster, "body") == [(b"a",), (b"b",)]


def test_commit_of_an_exactly_once_stream_waits_for_brokers_that_have_not_registered_yet(cluster) -> None:
    """After a restart of the name servers. Brokers register one after the other."""
    cluster.create_topic("here", queues=1, brokers=["broker-a"])
    rmq_spark.prepare_sink(cluster.address, "broker-b")
    exact = {"delivery": "exactlyOnce", "settleTime": "1ms", "brokerDownTimeout": "1m"}
    exact |= {"topic": "here", "createTopic": "false"}
    message = run_task(cluster, rows("a", "b"), **exact)
    (server,) = cluster.name_servers
    server.forget("broker-a")
    client._idle.forget()  # Spark calls it in another process
    writer = stream_writer(cluster, **exact)
    with pytest.raises(NotFoundError, match="topic here does not exist"):
        pickle.loads(pickle.dumps(writer)).write(iter([rows("c")]))
    with ThreadPoolExecutor() as pool:
        commit = pool.submit(writer.commit, [message], 0)
        cluster.register_all()
        commit.result()
    assert stored(cluster, "body", topic="here") == [(b"a",), (b"b",)]


def test_streamWriter_waits_while_all_name_servers_restart(cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    (server,) = cluster.name_servers
    server.kill()
    pauses = []

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 2:
            server.restart()
            cluster.register_all()

    monkeypatch.setattr("rmq_spark.datasource.spark.clocks.sleep", sleep)
    writer = stream_writer(cluster)
    assert len(pauses) == 2
    assert writer._away is None
    assert writer._token is not None


def test_commit_of_a_stream_needs_no_route(cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    message = run_task(cluster, rows("a", "b"))
    for server in cluster.name_servers:
        server.restart()
    monkeypatch.setattr("rmq_spark.datasource.spark.source._SERVERS_MS", 0)
    writer = stream_writer(cluster, createTopic="false")
    writer.commit([message], 0)
    with pytest.raises((BackendUnavailableError, NotFoundError), match="topic"):
        pickle.loads(pickle.dumps(writer)).write(iter([rows("c")]))


def test_writer_creates_a_missing_topic_on_every_broker(cluster) -> None:
    source_of(cluster, topic="new", queues="3").writer(BODY, False)
    assert [broker.topics["new"].queue_count for broker in cluster.brokers.values()] == [3, 3]
    with pytest.raises(NotFoundError, match=r"topic other does not exist: .*createTopic=true in Spark"):
        source_of(cluster, topic="other", createTopic="false").writer(BODY, False)


@pytest.mark.parametrize(
    ("make", "remedy"),
    [
        pytest.param(
            "writer",
            'Write with .mode("append"), or save(…, mode="append"). (If the mode is missing, Spark suggests Overwrite '
            "too, without asking the source.)",
            id="batch",
        ),
        pytest.param(
            "streamWriter",
            'Write with .outputMode("append"). (For an aggregation that needs the mode complete, write each batch in '
            "foreachBatch.)",
            id="stream",
        ),
    ],
)
def test_overwriting_is_refused_before_a_server_is_asked(cluster, make, remedy) -> None:
    source = source_of(cluster)
    cluster.clear_requests()
    with pytest.raises(OptionError) as caught:
        getattr(source, make)(BODY, True)
    assert str(caught.value) == (
        f"a topic supports appending only, no message can be overwritten. {remedy} For an empty topic write to another "
        "topic or to another place."
    )
    assert cluster.clear_requests() == {}


# What tasks send.


def test_attempts_of_a_task_send_the_same_ids_in_any_order(cluster) -> None:
    run_task(cluster, rows("a", "b", "a"), partition=7, attempt=1)
    run_task(cluster, rows("a", "a", "b"), partition=7, attempt=2)
    found = stored(cluster, "msgId", "body")
    assert len(found) == 6
    assert sorted(body for _, body in set(found)) == [b"a", b"a", b"b"]
    assert found == sorted([*set(found), *set(found)])
    run_task(cluster, rows("a", "b", "a"), partition=8)
    assert len({one for one, _ in stored(cluster, "msgId", "body")}) == 6


def test_brokerName_and_queueId_choose_the_queue(cluster) -> None:
    places = [("broker-b", 1), ("broker-a", 0), ("broker-b", 0), ("broker-b", 1)]
    brokers, numbers = zip(*places, strict=True)
    given = {"brokerName": pa.array(brokers), "queueId": pa.array(numbers, pa.int32())}
    run_task(cluster, rows("0", "1", "2", "3", **given))
    found = stored_rows(address_of(cluster), "orders", ["brokerName", "queueId", "body"])
    assert [(row["brokerName"], row["queueId"], row["body"]) for row in found] == [
        ("broker-a", 0, b"1"),
        ("broker-b", 0, b"2"),
        ("broker-b", 1, b"0"),
        ("broker-b", 1, b"3"),
    ]


def test_topics_in_rows_go_to_their_topics(cluster) -> None:
    source = RmqDataSource({"nameServer": cluster.address, "delivery": "atLeastOnce", "queues": "1"})
    schema = StructType().add("topic", "string").add("body", "string")
    options = source.streamWriter(schema, False)._options
    given = rows("a", "b", "c", topic=pa.array(["orders", "new", "orders"]))
    stage_rows([given], options, None, KEY, SinkTask(0, 0, 0))
    assert [stored(cluster, "body", topic=topic) for topic in ("orders", "new")] == [[(b"a",), (b"c",)], [(b"b",)]]


# Rows and servers that fail a task.

INVALID: dict[str, tuple[dict[str, Any], dict[str, str], str]] = {
    "a body that is too large": ({"body": ["x" * 1001]}, {"maxMessageSize": "1000"}, "its body has 1001 bytes"),
    "a body that is null": ({"body": [None]}, {}, "its body is null"),
    "a property without a name": ({"properties": [[("", "x")]]}, {}, "'' is not a property name"),
    "long properties": ({"properties": [[("a", "x" * 32_500)]]}, {}, "expected at most 32500, because the broker"),
    "a queue without its broker": ({"queueId": [0]}, {}, "it has queueId 0 and no brokerName"),
    "a broker without a queue": ({"brokerName": ["broker-a"]}, {}, "it has a brokerName and no queueId"),
    "a missing queue": (
        {"brokerName": ["broker-a"], "queueId": [2]},
        {},
        "queueId 2 of broker broker-a is not a queue to which messages of the topic are sent",
    ),
    "an unknown broker": (
        {"brokerName": ["broker-x"], "queueId": [0]},
        {},
        "broker broker-x is not listed with the topic now",
    ),
}
TYPES = {
    "body": pa.string(),
    "queueId": pa.int32(),
    "brokerName": pa.string(),
    "properties": pa.map_(pa.string(), pa.string()),
}


@pytest.mark.parametrize(("columns", "given", "message"), INVALID.values(), ids=INVALID)
def test_invalid_row_at_the_end_of_a_task_stores_nothing(cluster, columns, given, message) -> None:
    names = {"body", *columns}
    valid = {name: [None] if name != "body" else ["valid"] for name in names}
    wrong = valid | columns
    schema = pa.schema([(name, TYPES[name]) for name in names])
    batches = [pa.RecordBatch.from_pydict(valid, schema)] * 3 + [pa.RecordBatch.from_pydict(wrong, schema)]
    writer = stream_writer(cluster, **given)
    with pytest.raises(OptionError) as caught:
        stage_rows(batches, writer._options, writer._token, KEY, SinkTask(5, 0, 0))
    assert str(caught.value).startswith("partition 5, row 3, topic 'orders': ")
    assert message in str(caught.value)
    assert stored(cluster, "body") == []


def failure(cluster: RunningCluster, given: pa.RecordBatch, **options: str) -> str:
    with pytest.raises(RmqError) as caught:
        run_task(cluster, given, **options)
    return f"{type(caught.value).__name__}: {caught.value}"


def test_task_waits_for_a_broker_only_if_its_rows_name_it(cluster) -> None:
    writer = stream_writer(cluster)
    cluster.brokers["broker-b"].kill()
    given = writer._options, writer._token, KEY
    assert stage_rows([rows(*"abcdef")], *given, SinkTask(0, 0, 0)).rows == 6
    pinned = {"brokerName": pa.array(["broker-b"]), "queueId": pa.array([0], pa.int32())}
    waited = r"broker broker-b has stored none for \d\.\d s \(brokerDownTimeout\); .* cannot be reached"
    with pytest.raises(BackendUnavailableError, match=rf"^cannot send 1 message to queue orders/broker-b:0: {waited}"):
        stage_rows([rows("g", **pinned)], *given, SinkTask(1, 0, 0))
    assert [body for (body,) in stored(cluster, "body")] == [b"%c" % one for one in b"abcdef"]


def test_task_fails_with_the_answer_of_a_broker_that_refuses_a_message(cluster) -> None:
    for broker in cluster.brokers.values():
        broker.settings.max_message_bytes = 500
    message = failure(cluster, rows("x" * 501))
    assert message.startswith("BrokerError: ")
    assert "raise maxMessageSize at the broker" in message


def test_task_sends_a_request_again_whose_answer_was_lost(cluster) -> None:
    for broker in cluster.brokers.values():
        for code in SENDS:
            broker.fail(code, faults.closes_connection(executes=True), times=1)
    receipt = run_task(cluster, rows("a", "b"), brokerDownTimeout="1m").receipt
    assert receipt.rows == 2
    found = stored(cluster, "msgId", "body")
    assert len(found) > 2
    assert sorted(body for _, body in set(found)) == [b"a", b"b"]
