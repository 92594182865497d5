"""A repeated batch finds the copies of its failed rows that its first attempt sent back, and no others."""

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from support.failed_messages import DEAD, GROUP, RETRY, Row, address_of, batch_of, rows_of

from rmq_spark.store.backend import CommitTerms, RepeatedBatch, SendBackTerms
from rmq_spark.store.cluster import broker_calls
from rmq_spark.store.cluster import client as cluster_client
from rmq_spark.store.cluster.address import Credentials
from rmq_spark.store.cluster.codes import RequestCode, ResponseCode
from rmq_spark.store.cluster.send_back import BackRow
from rmq_spark.store.cluster.send_back_sink import ClusterSendBackSink
from rmq_spark.store.cluster.sent_copies import SentCopies, is_copy
from rmq_spark.store.disk.clock import wall_clock_ms
from rmq_spark.store.format.properties import encode
from rmq_spark.store.format.record import Record
from rmq_spark.store.model import CommitKey, QueueKey
from rmq_spark.store.names import SCHEDULE_TOPIC
from rmq_spark.store.testing.brokers import Account, AccountTable, RunningCluster, faults
from rmq_spark.store.testing.sample_message import SampleMessage

RunCluster = Callable[..., RunningCluster]
KEY = CommitKey("query", 7)
SEND_BACK, QUERY = RequestCode.CONSUMER_SEND_MSG_BACK, RequestCode.QUERY_MESSAGE
FUTURE_MS = 3 * 3600 * 1000


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(broker_calls, "_LAST_PAUSE_MS", 50.0)
    monkeypatch.setattr("rmq_spark.store.cluster.write_routes._RENEW_MS", 20.0)
    yield
    cluster_client._idle.forget()


BOTH = pytest.mark.parametrize("cluster", ["4.9", "5.3"], indirect=True)


@pytest.fixture
def cluster(request: pytest.FixtureRequest, run_cluster: RunCluster) -> RunningCluster:
    """Two brokers. Queue 0 of the topic orders has the messages a0 to a2, or b0 to b2, at equal offsets."""
    cluster = run_cluster(release=getattr(request, "param", "5.3"), brokers=2)
    cluster.create_topic("orders", queues=1)
    for name, broker in cluster.brokers.items():
        broker.settings.delivers = False
        cluster.send("orders", *(f"{name[-1]}{number}" for number in range(3)), broker=name, queue_id=0, keys="k")
    return cluster


def commit(
    cluster: RunningCluster, *rows: Row, planned_ms: int | None = 0, key: CommitKey = KEY, group: str = GROUP, **at: Any
) -> int:
    """Commit failed rows as the batch 7, which was planned at a time and is repeated. None: it is not repeated.

    Return the number of rows that were sent back.
    """
    repeated = None if planned_ms is None else RepeatedBatch(7, planned_ms)
    sink = ClusterSendBackSink(address_of(cluster, **at), SendBackTerms(group, repeated=repeated), CommitTerms())
    task = sink.open_task(None, key, "task", 0)
    task.write(batch_of([{"delayLevel": 0} | row for row in rows]))
    return sink.commit(key, [task.finish()]).rows


def requests(cluster: RunningCluster, code: int) -> int:
    return sum(broker.requests[code] for broker in cluster.brokers.values())


def deliver(cluster: RunningCluster) -> None:
    for broker in cluster.brokers.values():
        broker.deliver_due(wall_clock_ms() + FUTURE_MS)


def dead(rows: list[Row]) -> list[Row]:
    return [row | {"delayLevel": -1} for row in rows]


def copies(cluster: RunningCluster) -> list[tuple[bytes, int, str]]:
    """Return body, reconsumeTimes and kind of all copies that were made for the group."""
    deliver(cluster)
    found = [(row, kind) for topic, kind in ((RETRY, "retry"), (DEAD, "dead")) for row in there(cluster, topic)]
    return sorted((row["body"], row["reconsumeTimes"], kind) for row, kind in found)


def there(cluster: RunningCluster, topic: str) -> list[Row]:
    return rows_of(cluster, topic) if any(topic in broker.topics for broker in cluster.brokers.values()) else []


@BOTH
def test_repeated_batch_sends_back_only_what_its_first_attempt_did_not(cluster: RunningCluster) -> None:
    rows = rows_of(cluster)
    assert commit(cluster, *rows[:2], *dead(rows[2:4])) == 4
    assert commit(cluster, *rows[:2], *dead(rows[2:])) == 2
    assert commit(cluster, *rows) == 0
    waited = [(name, 1, "retry") for name in (b"a0", b"a1")]
    assert copies(cluster) == [*waited, *((name, 1, "dead") for name in (b"a2", b"b0", b"b1", b"b2"))]


def test_copy_is_found_after_its_delivery(cluster: RunningCluster) -> None:
    rows = rows_of(cluster)
    commit(cluster, *rows)
    deliver(cluster)
    assert commit(cluster, *rows) == 0


@BOTH
def test_copies_of_retries_are_told_apart_by_the_number_of_the_retry(cluster: RunningCluster) -> None:
    first = rows_of(cluster)
    assert commit(cluster, *first) == 6
    deliver(cluster)
    second = rows_of(cluster, RETRY)
    assert commit(cluster, *second) == 6
    deliver(cluster)
    third = [row for row in rows_of(cluster, RETRY) if row["reconsumeTimes"] == 2]
    assert commit(cluster, *dead(third)) == 6
    for rows in (first, second, third):
        assert commit(cluster, *rows) == 0


def test_another_batch_than_the_repeated_one_looks_for_nothing(cluster: RunningCluster) -> None:
    rows = rows_of(cluster)
    commit(cluster, *rows, planned_ms=None)
    assert commit(cluster, *rows, planned_ms=None) == 6
    assert commit(cluster, *rows, key=CommitKey("query", 8)) == 6
    assert requests(cluster, QUERY) == 0


def test_copy_that_is_older_than_the_plan_of_the_batch_does_not_count(cluster: RunningCluster) -> None:
    """Such a message was delivered before, and again after a reset of the group."""
    (row, *_) = rows_of(cluster)
    commit(cluster, row)
    store = cluster.brokers["broker-a"].store
    stored_ms = cluster.loop.run(store.store_time, QueueKey(SCHEDULE_TOPIC, 2), 0)
    assert commit(cluster, row, planned_ms=stored_ms) == 0
    assert commit(cluster, row, planned_ms=stored_ms + 1) == 1


def test_delivery_of_an_older_copy_after_the_plan_does_not_count(cluster: RunningCluster) -> None:
    (row, *_) = rows_of(cluster)
    commit(cluster, row)
    store = cluster.brokers["broker-a"].store
    planned_ms = cluster.loop.run(store.store_time, QueueKey(SCHEDULE_TOPIC, 2), 0) + 1
    deliver(cluster)
    assert cluster.loop.run(store.store_time, QueueKey(RETRY, 0), 0) >= planned_ms
    assert commit(cluster, row, planned_ms=planned_ms) == 1


def test_copy_of_another_group_does_not_count(cluster: RunningCluster) -> None:
    rows = rows_of(cluster)[:2]
    commit(cluster, rows[0], *dead(rows[1:]), group="shipping")
    assert commit(cluster, rows[0], *dead(rows[1:])) == 2


ROW = BackRow(QueueKey("orders", 0, "broker-a"), 5, 700, 0, "id-1", 99, origin_id="origin-1", reconsume_times=2)
WAITING = {
    "UNIQ_KEY": "id-1",
    "ORIGIN_MESSAGE_ID": "origin-1",
    "RETRY_TOPIC": "orders",
    "REAL_TOPIC": RETRY,
    "REAL_QID": "0",
    "DELAY": "5",
}
PLANNED_MS = 1_795_000_000_000


def copy_of(properties: dict[str, str], topic: str = SCHEDULE_TOPIC, times: int = 3, ms: int = PLANNED_MS) -> Record:
    record = SampleMessage(topic=topic, reconsume_times=times).as_record(0, 0, 0)
    return replace(record, store_timestamp=ms, properties=encode(properties))


def is_copy_of_row(record: Record) -> bool:
    return is_copy(record, ROW, RETRY, DEAD, PLANNED_MS)


@pytest.mark.parametrize(
    "record",
    [
        copy_of(WAITING),
        copy_of(WAITING, ms=PLANNED_MS + 1),
        copy_of(WAITING, DEAD),  # a dead letter that was retried before keeps the old REAL_TOPIC
        copy_of({name: value for name, value in WAITING.items() if not name.startswith("REAL")}, DEAD),
    ],
)
def test_record_that_agrees_in_all_is_a_copy(record: Record) -> None:
    assert is_copy_of_row(record)


@pytest.mark.parametrize("topic", [SCHEDULE_TOPIC, DEAD])
@pytest.mark.parametrize("name", ["UNIQ_KEY", "ORIGIN_MESSAGE_ID"])
@pytest.mark.parametrize("value", ["another", "id-11", "origin-11", None])
def test_copy_of_another_message_is_none(topic: str, name: str, value: str | None) -> None:
    properties = {key: text for key, text in (WAITING | {name: value}).items() if text is not None}
    assert not is_copy_of_row(copy_of(properties, topic))


@pytest.mark.parametrize("topic", [SCHEDULE_TOPIC, DEAD])
@pytest.mark.parametrize("times", [0, 1, 2, 4, 16])
def test_copy_of_another_retry_is_none(topic: str, times: int) -> None:
    assert not is_copy_of_row(copy_of(WAITING, topic, times))


@pytest.mark.parametrize("topic", [SCHEDULE_TOPIC, DEAD])
def test_copy_that_was_stored_before_the_plan_is_none(topic: str) -> None:
    assert not is_copy_of_row(copy_of(WAITING, topic, ms=PLANNED_MS - 1))


@pytest.mark.parametrize(
    "record",
    [
        copy_of(WAITING | {"REAL_TOPIC": "%RETRY%billing2"}),
        copy_of(WAITING | {"REAL_TOPIC": DEAD}),
        copy_of({name: value for name, value in WAITING.items() if name != "REAL_TOPIC"}),
        copy_of(WAITING, "%DLQ%billing2"),
    ],
)
def test_copy_for_another_group_is_none(record: Record) -> None:
    assert not is_copy_of_row(record)


@pytest.mark.parametrize("topic", [RETRY, "orders"])
def test_record_in_another_topic_is_no_copy(topic: str) -> None:
    assert not is_copy_of_row(copy_of(WAITING, topic))


def test_two_rows_that_could_have_the_same_copy_need_two(cluster: RunningCluster) -> None:
    """An answer was lost, so the message came twice; then only one of both was sent back."""
    row = rows_of(cluster)[0]
    commit(cluster, row, planned_ms=None)
    commit(cluster, row, planned_ms=None)
    deliver(cluster)
    twins = rows_of(cluster, RETRY)
    assert [one["reconsumeTimes"] for one in twins] == [1, 1]
    commit(cluster, twins[0])
    assert commit(cluster, *twins) == 1
    assert commit(cluster, *twins) == 0


def test_message_without_an_id_is_sent_back_again(cluster: RunningCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    row = rows_of(cluster)[0]
    commit(cluster, row, planned_ms=None)
    missing = SentCopies.missing
    monkeypatch.setattr(
        SentCopies, "missing", lambda self, rows: missing(self, [one._replace(message_id="") for one in rows])
    )
    assert commit(cluster, row) == 1
    assert requests(cluster, QUERY) == 0


def test_expired_message_is_sent_again(cluster: RunningCluster) -> None:
    row = rows_of(cluster)[0]
    cluster.brokers["broker-a"].expire("orders", 0, 1)
    terms = SendBackTerms(GROUP, expired_original="resend", repeated=RepeatedBatch(7, 0))
    for _ in range(2):
        sink = ClusterSendBackSink(address_of(cluster), terms, CommitTerms())
        task = sink.open_task(None, KEY, "task", 0)
        task.write(batch_of([row]))
        assert sink.commit(KEY, [task.finish()]).rows == 1


@pytest.mark.parametrize(
    ("fault", "is_told"),
    [
        (faults.with_code(ResponseCode.SYSTEM_ERROR, "a planted fault"), True),
        (faults.changed(lambda answer: replace(answer, body=b"no record")), True),
        (faults.with_code(ResponseCode.QUERY_NOT_FOUND, "there is no index"), False),
    ],
)
def test_rows_that_cannot_be_looked_up_are_sent_back(
    cluster: RunningCluster, fault: Any, is_told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [row for row in rows_of(cluster) if row["brokerName"] == "broker-b"]
    commit(cluster, *rows)
    cluster.brokers["broker-b"].fail(QUERY, fault)
    with caplog.at_level(logging.WARNING):
        assert commit(cluster, *rows) == 3
    assert copies(cluster) == sorted([(body, 1, "retry") for body in (b"b0", b"b1", b"b2")] * 2)
    assert any("may send them back twice" in line for line in caplog.messages) == is_told


def test_index_that_never_answers_ends_the_wait_and_rows_are_sent_back(cluster: RunningCluster) -> None:
    rows = [row for row in rows_of(cluster) if row["brokerName"] == "broker-b"]
    commit(cluster, *rows)
    cluster.brokers["broker-b"].fail(QUERY, faults.closes_connection(executes=False))
    assert commit(cluster, *rows, broker_down_timeout_ms=200) == 3


@BOTH
def test_account_that_may_not_read_the_waiting_copies_finds_dead_letters(
    cluster: RunningCluster, caplog: pytest.LogCaptureFixture
) -> None:
    rows = rows_of(cluster)
    commit(cluster, rows[0], *dead(rows[1:2]))
    groups = {GROUP: "SUB", "rmq-spark-reader": "SUB"}
    for broker in cluster.brokers.values():
        broker.accounts = AccountTable(
            Account("reader", "a secret", topics={"orders": "SUB", DEAD: "SUB"}, groups=groups)
        )
    at = {"credentials": Credentials("reader", "a secret")}
    assert commit(cluster, rows[0], *dead(rows[1:2]), **at) == 1
    assert any("may send them back twice" in line for line in caplog.messages)
    caplog.clear()
    for broker in cluster.brokers.values():
        topics = {"orders": "SUB", DEAD: "SUB", SCHEDULE_TOPIC: "SUB"}
        broker.accounts = AccountTable(Account("reader", "a secret", topics=topics, groups=groups))
    assert commit(cluster, rows[0], *dead(rows[1:2]), **at) == 0
    assert not any("may send them back twice" in line for line in caplog.messages)
