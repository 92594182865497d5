"""Dead letters of a cluster that are republished: where they go, what is noted, and what a repeated call sends."""

from collections.abc import Callable, Iterator
from typing import Any

import pyarrow.compute as pc
import pytest
from support.failed_messages import DEAD, GROUP, batch_of, rows_of

from rmq_spark.store import ClusterRepublished, open_store, republish_dead_letters
from rmq_spark.store.cluster import client
from rmq_spark.store.cluster.codes import RequestCode
from rmq_spark.store.cluster.sender import Sender
from rmq_spark.store.errors import BackendUnavailableError, NotFoundError, OptionError, StoreChangedError
from rmq_spark.store.model import QueueKey
from rmq_spark.store.testing.brokers import RunningCluster, faults

RunCluster = Callable[..., RunningCluster]
A, B = QueueKey(DEAD, 0, "broker-a"), QueueKey(DEAD, 0, "broker-b")


@pytest.fixture(params=["5.3", "4.9"])
def cluster(request: pytest.FixtureRequest, run_cluster: RunCluster) -> Iterator[RunningCluster]:
    """Two brokers, each with the dead letters 0 and 1 (broker-a: tags A), whose originals are in the topic orders."""
    cluster = run_cluster(release=request.param, brokers=2)
    cluster.create_topic("orders", queues=2)
    for name, broker in cluster.brokers.items():
        broker.settings.delivers = False
        for number in range(2):
            given = {"properties": {"p": "v"}, "keys": "k", "flag": 3, "queue_id": 0, "tags": name[-1].upper()}
            cluster.send("orders", f"{name[-1]}{number}", broker=name, **given)
    with open_store(name_server=cluster.address, request_timeout_ms=20_000) as producer:
        producer.send_back(batch_of(rows_of(cluster)), GROUP, -1)
    yield cluster
    client._idle.forget()


def republish(cluster: RunningCluster, **given: Any) -> ClusterRepublished:
    terms = {"request_timeout_ms": 20_000, "broker_down_timeout_ms": 2000, "group": GROUP}
    return republish_dead_letters(name_server=cluster.address, **{**terms, **given})


def republished(cluster: RunningCluster, topic: str = "orders") -> list[dict[str, Any]]:
    rows = [row for row in rows_of(cluster, topic) if "REPUBLISHED_FROM" in row["properties"]]
    return sorted(rows, key=lambda row: (row["body"], row["brokerName"], row["queueOffset"]))


def test_dead_letters_go_to_their_topics_once(cluster: RunningCluster) -> None:
    assert republish(cluster) == ClusterRepublished(4, 0, {A: 2, B: 2})
    found, dead = republished(cluster), {row["body"]: row for row in rows_of(cluster, DEAD)}
    assert [row["body"] for row in found] == [b"a0", b"a1", b"b0", b"b1"]
    for row in found:
        letter = dead[row["body"]]
        assert (row["tags"], row["keys"], row["flag"], row["properties"]["p"]) == (letter["tags"], "k", 3, "v")
        assert (row["reconsumeTimes"], row["topic"]) == (0, "orders")
        assert row["properties"]["ORIGIN_MESSAGE_ID"] == letter["properties"]["ORIGIN_MESSAGE_ID"]
        assert row["properties"]["REPUBLISHED_FROM"] == f"{DEAD}/{letter['brokerName']}:0/{letter['queueOffset']}"
        assert "RETRY_TOPIC" not in row["properties"]
    assert len({row["msgId"] for row in found}) == 4
    assert republish(cluster) == ClusterRepublished(0, 0, {A: 2, B: 2})
    with open_store(name_server=cluster.address, request_timeout_ms=20_000) as producer:
        producer.send_back(batch_of(found[:1]), GROUP, -1)
    assert republish(cluster).sent == 1


def test_a_repeated_call_gives_letters_the_same_ids(cluster: RunningCluster) -> None:
    republish(cluster)
    first = {row["body"]: row["msgId"] for row in republished(cluster)}
    republish(cluster, progress=None, filter=pc.field("queueOffset") == 1)
    republish(cluster, begin={"broker-a": 0})
    again = republished(cluster)
    assert sorted(row["body"] for row in again) == sorted([*first, b"a1", b"b1", b"a0", b"a1"])
    assert all(row["msgId"] == first[row["body"]] for row in again)


def test_the_filter_selects_and_the_topic_replaces(cluster: RunningCluster) -> None:
    done = republish(cluster, filter=lambda batch: pc.equal(batch.column("tags"), "B"), topic="orders", progress="x")
    assert done == ClusterRepublished(2, 2, {A: 2, B: 2})
    assert [row["body"] for row in republished(cluster)] == [b"b0", b"b1"]
    offsets = cluster.brokers["broker-a"].offsets.table()
    assert offsets[f"{DEAD}@{GROUP}-republish-x"] == {0: 2}


def test_a_call_that_dies_repeats_and_loses_nothing(cluster: RunningCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    send, calls = Sender.send, []

    def die_after(self: Sender, spool: Any) -> None:
        calls.append(spool)
        send(self, spool)
        if len(calls) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(Sender, "send", die_after)
    with pytest.raises(KeyboardInterrupt):
        republish(cluster)
    assert republish(cluster) == ClusterRepublished(2, 0, {A: 2, B: 2})
    found = republished(cluster)
    assert [row["body"] for row in found] == [b"a0", b"a1", b"b0", b"b0", b"b1", b"b1"]
    assert len({row["msgId"] for row in found}) == 4


def test_an_answer_that_is_lost_doubles_a_message_with_its_id(cluster: RunningCluster) -> None:
    cluster.create_topic("single", queues=1, brokers=["broker-a"])
    for code in (RequestCode.SEND_MESSAGE_V2, RequestCode.SEND_BATCH_MESSAGE):
        cluster.brokers["broker-a"].fail(code, faults.closes_connection(executes=True), times=1)
    republish(cluster, topic="single")
    found = republished(cluster, "single")
    assert {row["body"] for row in found} == {b"a0", b"a1", b"b0", b"b1"}
    assert len({row["msgId"] for row in found}) == 4
    assert len(found) > 4


def test_what_stops_a_call(cluster: RunningCluster) -> None:
    for given, kind, message in (
        ({"topic": "absent"}, NotFoundError, "absent.*does not exist any more"),
        ({"begin": 3}, OptionError, "expected a dict"),
        ({"begin": {"broker-x": 0}}, OptionError, "no dead letters are on broker-x; .*: broker-a, broker-b"),
        ({"progress": "a b"}, OptionError, "is not a group's name"),
        ({"progress": ""}, OptionError, "is not a name"),
        ({"filter": pc.field("nothing") == 1}, OptionError, "Columns are: .*brokerName"),
        ({"commit_log_path": "/x"}, OptionError, "commit_log_path is for a store directory"),
        ({"group": "%DLQ%x"}, OptionError, "name of a topic"),
    ):
        with pytest.raises(kind, match=message):
            republish(cluster, **given)
    assert republished(cluster) == []


def test_letters_of_a_broker_that_is_away_are_sent_when_it_is_back(cluster: RunningCluster) -> None:
    broker = cluster.brokers["broker-b"]
    broker.freeze()
    with pytest.raises(BackendUnavailableError, match="broker-b"):
        republish(cluster, request_timeout_ms=500)
    broker.thaw()
    broker.kill()
    assert republish(cluster) == ClusterRepublished(2, 0, {A: 2})
    broker.restart(new_port=True)
    assert republish(cluster) == ClusterRepublished(2, 0, {A: 2, B: 2})
    assert [row["body"] for row in republished(cluster)] == [b"a0", b"a1", b"b0", b"b1"]


def test_progress_beyond_the_end_of_a_queue_is_an_error_before_anything_is_sent(cluster: RunningCluster) -> None:
    committed = cluster.brokers["broker-b"].offsets.committed
    republish(cluster, filter=pc.field("queueOffset") > 5)
    committed.update(dict.fromkeys(committed, 7))
    cluster.brokers["broker-a"].offsets.committed.clear()
    with pytest.raises(StoreChangedError) as caught:
        republish(cluster)
    for part in (str(B), "'default' is at queue offset 7,", "ends at 2;", 'begin={"broker-b": 0}', "Nothing was sent"):
        assert part in str(caught.value), part
    assert republished(cluster) == []
    assert republish(cluster, begin={"broker-b": 1}) == ClusterRepublished(3, 0, {A: 2, B: 2})
    assert republish(cluster) == ClusterRepublished(0, 0, {A: 2, B: 2})


def test_a_group_without_dead_letters(run_cluster: RunCluster) -> None:
    assert republish(run_cluster()) == ClusterRepublished(0, 0, {})
    client._idle.forget()
