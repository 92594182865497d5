"""The doctor of the exactly-once sink: what is missing, with the remedy, and that it leaves no row in the target."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest
from support.sent_messages import address_of, read_bodies

import rmq_spark
from rmq_spark.store.cluster import client as cluster_client
from rmq_spark.store.cluster.codes import RequestCode
from rmq_spark.store.cluster.diagnosis import ClusterFinding, State
from rmq_spark.store.cluster.exactly_once.marks import READING_GROUP, marks_group
from rmq_spark.store.cluster.exactly_once.preparation import prepare_sink
from rmq_spark.store.testing.brokers import Account, AccountTable, RunningCluster, faults

A, B = "broker-a", "broker-b"
STAGE, LEDGER = "RMQ_SPARK_STAGE", "RMQ_SPARK_LEDGER"
MARKS = marks_group("rmq-spark-doctor")
TOPICS = {"orders": "PUB|SUB|GET", STAGE: "PUB|SUB|GET", LEDGER: "PUB|SUB|GET"}


@pytest.fixture(params=["5.3", "4.9"])
def cluster(run_cluster: Callable[..., RunningCluster], request: pytest.FixtureRequest) -> Iterator[RunningCluster]:
    """Two brokers with the topic orders, and without the topics of the sink."""
    cluster = run_cluster(release=request.param, brokers=2)
    cluster.create_topic("orders", queues=2)
    yield cluster
    cluster_client._idle.forget()


@pytest.fixture
def prepared(cluster: RunningCluster) -> RunningCluster:
    """The cluster after `prepare_sink`."""
    prepare_sink(address_of(cluster), A)
    return cluster


def examine(cluster: RunningCluster, topic: str = "orders", **arguments: Any) -> list[ClusterFinding]:
    return rmq_spark.examine_cluster(
        cluster.address, sink_topics=[topic], **{"request_timeout_ms": 10_000, **arguments}
    )


def missing(findings: list[ClusterFinding]) -> dict[str, ClusterFinding]:
    return {one.what: one for one in findings if one.state is not State.OK}


def give(cluster: RunningCluster, topics: Mapping[str, str]) -> None:
    """Let all brokers check accounts: there is one, with these rights."""
    for broker in cluster.brokers.values():
        broker.accounts = AccountTable(Account("writer", "s", topics=topics, groups={"*": "SUB"}))


def test_a_prepared_cluster_lacks_nothing(prepared: RunningCluster) -> None:
    findings = examine(prepared)
    assert missing(findings) == {}
    found = {one.what for one in findings}
    assert {
        f"ledger {LEDGER}: marks",
        f"sink topic orders on {B}: publish",
        f"stage {STAGE} on {B}: write and read",
    } <= found
    assert missing(examine(prepared)) == {}, "a second time"


def test_no_message_is_stored_in_the_target_and_no_producer_stays(prepared: RunningCluster) -> None:
    examine(prepared)
    assert not any(read_bodies(prepared, "orders").values())
    for broker in prepared.brokers.values():
        assert broker.producers.ids(MARKS) == []
        assert broker.requests[RequestCode.UNREGISTER_CLIENT] == 1


def test_a_cluster_without_the_topics_of_the_sink(cluster: RunningCluster) -> None:
    found = missing(examine(cluster))
    assert set(found) == {f"ledger {LEDGER}", f"stage {STAGE} on {A}", f"stage {STAGE} on {B}"}
    assert all("rmq prepare-sink" in f"{one.why}{one.next_step}" for one in found.values())


def test_a_topic_that_is_refused_or_does_not_exist(prepared: RunningCluster) -> None:
    for topic, why in (
        ("%RETRY%billing", "is the retry topic of a group"),
        (STAGE, "the topic in which the sink itself stages rows"),
        ("nothing", "does not exist"),
    ):
        found = missing(examine(prepared, topic))
        assert list(found) == [f"sink topic {topic}"]
        assert why in found[f"sink topic {topic}"].why


def test_a_topic_that_accepts_no_messages(prepared: RunningCluster) -> None:
    prepared.create_topic("closed", queues=1, perm=4)
    found = missing(examine(prepared, "closed"))
    assert "accepts no messages" in found["sink topic closed"].why
    assert "updateTopicPerm" in found["sink topic closed"].next_step


@pytest.mark.parametrize(
    ("config", "setting", "condition"),
    [
        ({"transientStorePoolEnable": "true"}, "transientStorePoolEnable=true", "C1"),
        ({"enableControllerMode": "true"}, "enableControllerMode=true", "C2"),
        ({"enableDLegerCommitLog": "true"}, "enableDLegerCommitLog=true", "C2"),
        ({"enableBuildConsumeQueueConcurrently": "true"}, "enableBuildConsumeQueueConcurrently=true", "C3"),
    ],
)
def test_a_setting_that_breaks_the_promise_is_a_warning(
    prepared: RunningCluster, config: dict[str, str], setting: str, condition: str
) -> None:
    broker = prepared.brokers[B]
    broker.settings = replace(broker.settings, config={"flushDiskType": "ASYNC_FLUSH", **config})
    found = missing(examine(prepared))
    assert list(found) == [f"sink topic orders on {B}: settings"]
    (one,) = found.values()
    assert one.state is State.WARNING
    assert f"{setting} (condition {condition})" in one.why
    assert one.next_step


def test_settings_that_cannot_be_seen_are_a_warning(prepared: RunningCluster) -> None:
    prepared.brokers[B].fail(RequestCode.GET_BROKER_CONFIG, faults.with_code(3, "not supported"))
    found = missing(examine(prepared))
    assert {what: one.state for what, one in found.items()} == {f"sink topic orders on {B}: settings": State.WARNING}


def test_a_broker_that_does_not_list_producers(prepared: RunningCluster) -> None:
    prepared.brokers[B].fail(RequestCode.GET_PRODUCER_CONNECTION_LIST, faults.with_code(3, "not supported"))
    assert list(missing(examine(prepared))) == [f"sink topic orders on {B}: registration"]


def test_marks_that_a_broker_drops(prepared: RunningCluster) -> None:
    prepared.brokers[A].fail(RequestCode.UPDATE_CONSUMER_OFFSET, faults.with_code(0))
    assert list(missing(examine(prepared))) == [f"ledger {LEDGER}: marks"]


@pytest.mark.parametrize(
    ("topic", "rights", "what"),
    [
        ("orders", "SUB|GET", {"publish"}),
        ("orders", "PUB|GET", {"pull"}),
        (LEDGER, "SUB|GET", {"write and read"}),
        (STAGE, "SUB|GET", {"write and read"}),
    ],
)
def test_a_right_that_is_missing_is_named(prepared: RunningCluster, topic: str, rights: str, what: set[str]) -> None:
    examine(prepared)  # creates the groups
    given = {"access_key": "writer", "secret_key": "s"}
    give(prepared, {**TOPICS, topic: rights})
    found = missing(examine(prepared, **given))
    if prepared.release.is_5:
        # The right Get of the cluster, which the accounts of these brokers cannot have.
        what = what | {"registration", "settings"}
    assert {one.rpartition(": ")[2] for one in found} == what, found
    states = {what.endswith(": settings"): one.state for what, one in found.items()}
    assert states in ({False: State.MISSING}, {False: State.MISSING, True: State.WARNING})
    assert all(one.next_step for one in found.values())


def test_the_group_of_pulls_is_created_with_the_topics(prepared: RunningCluster) -> None:
    for broker in prepared.brokers.values():
        assert READING_GROUP in broker.groups


def test_prepare_sink_without_the_right_to_create_groups(cluster: RunningCluster) -> None:
    refusal = faults.with_code(16, "a planted refusal")
    cluster.brokers[B].settings.creates_groups = False
    cluster.brokers[B].fail(RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, refusal)
    done = rmq_spark.prepare_sink(cluster.address, A)
    assert (done.ledger_broker, done.is_new, done.stage_brokers, done.group) == (A, True, (A, B), READING_GROUP)
    assert list(done.refusals) == [B]
    assert "a planted refusal" in done.refusals[B]
    assert not rmq_spark.prepare_sink(cluster.address, A, pull_group="mine").is_new
