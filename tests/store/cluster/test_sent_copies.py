"""A repeated batch finds the copies of its failed rows that its first attempt sent back, and no others."""

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from brokers import Account, AccountTable, RunningCluster, faults
from support.failed_messages import DEAD, GROUP, RETRY, Row, address_of, batch_of, rows_of

from rmq_spark.store.backend import CommitTerms, RepeatedBatch, SendBackTerms
from rmq_spark.store.cluster import broker_calls
from rmq_spark.store.cluster import client as cluster_client
from rmq_spark.store.cluster.address import Credentials
from rmq_spark.store.cluster.codes import RequestCode, ResponseCode
from rmq_spark.store.cluster.send_back_sink import ClusterSendBackSink
from rmq_spark.store.cluster.sent_copies import SentCopies
from rmq_spark.store.disk.clock import wall_clock_ms
from rmq_spark.store.format.properties import encode, parse
from rmq_spark.store.format.record import Record, decode_record, encode_record
from rmq_spark.store.model import CommitKey, QueueKey
from rmq_spark.store.names import SCHEDULE_TOPIC

RunCluster = Callable[..., RunningCluster]
Change = Callable[[Record], Record]
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


def changed_copy(change: Change) -> Any:
    """Return a fault that changes the records in the answers."""

    def alter(answer: Any) -> Any:
        record = decode_record(answer.body)
        if not isinstance(record, Record):
            return answer
        return replace(answer, body=encode_record(change(record)))

    return faults.changed(alter)


def with_properties(**values: str | None) -> Change:
    def change(record: Record) -> Record:
        found = {name: value for name, value in (parse(record.properties) | values).items() if value is not None}
        return replace(record, properties=encode(found))

    return change


@pytest.mark.parametrize(
    "change",
    [
        with_properties(UNIQ_KEY="another"),
        with_properties(UNIQ_KEY=None),
        with_properties(ORIGIN_MESSAGE_ID="7F0000010000D9030000000000000007"),
        with_properties(ORIGIN_MESSAGE_ID=None),
        with_properties(REAL_TOPIC="%RETRY%billing2"),
        with_properties(REAL_TOPIC=None),
        lambda record: replace(record, reconsume_times=2),
        lambda record: replace(record, reconsume_times=0),
        lambda record: replace(record, topic=b"%RETRY%billing"),
        lambda record: replace(record, topic=b"%DLQ%billing2"),
        lambda record: replace(record, store_timestamp=1),
    ],
)
def test_record_that_differs_in_one_respect_is_no_copy(cluster: RunningCluster, change: Change) -> None:
    row = rows_of(cluster)[0]
    planned_ms = wall_clock_ms() - 60_000
    commit(cluster, row)
    cluster.brokers["broker-a"].fail(QUERY, changed_copy(lambda record: record), times=1)
    assert commit(cluster, row, planned_ms=planned_ms) == 0
    cluster.brokers["broker-a"].fail(QUERY, changed_copy(change), times=1)
    assert commit(cluster, row, planned_ms=planned_ms) == 1


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
