"""What an exactly-once sink refuses before it writes: options, and topics by name, route and settings."""

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from support.sent_messages import address_of

from rmq_spark.store.backend import CommitTerms, SinkTerms
from rmq_spark.store.cluster import client as cluster_client
from rmq_spark.store.cluster.address import Credentials
from rmq_spark.store.cluster.codes import RequestCode
from rmq_spark.store.cluster.exactly_once import target_topics as module
from rmq_spark.store.cluster.exactly_once.sink import ExactSink
from rmq_spark.store.cluster.exactly_once.target_topics import (
    LEDGER_TOPIC,
    STAGE_TOPIC,
    OwnTopics,
    TargetTopics,
    check_write,
    checked_topics,
    prepare_targets,
)
from rmq_spark.store.cluster.sink import ClusterSink
from rmq_spark.store.cluster.write_routes import WriteRoutes
from rmq_spark.store.errors import BackendUnavailableError, NoPermissionError, NotFoundError, OptionError
from rmq_spark.store.model import QueueKey
from rmq_spark.store.testing.brokers import Account, AccountTable, RunningCluster, faults

CONFIG = RequestCode.GET_TOPIC_CONFIG
OWN = OwnTopics()


@pytest.fixture(autouse=True)
def _no_idle_clients(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(module, "_PAUSE_MS", 10.0)
    yield
    cluster_client._idle.forget()


@pytest.fixture(params=["4.9", "5.3"])
def cluster(run_cluster: Callable[..., RunningCluster], request: pytest.FixtureRequest) -> RunningCluster:
    cluster = run_cluster(release=request.param, brokers=2, is_light=True)
    cluster.create_topic("orders", queues=2)
    return cluster


@pytest.fixture
def cluster_5(run_cluster: Callable[..., RunningCluster]) -> RunningCluster:
    cluster = run_cluster(brokers=2, is_light=True)
    cluster.create_topic("orders", queues=2)
    return cluster


def sink_of(cluster: RunningCluster, topic: str | None = "orders", wait_ms: int = 10_000, **at: Any) -> ClusterSink:
    at.setdefault("broker_down_timeout_ms", wait_ms)
    terms = SinkTerms(topic=topic, creates_topics=False)
    return ClusterSink(address_of(cluster, **at), terms, CommitTerms())


@pytest.mark.parametrize(
    ("topic", "why"),
    [
        (STAGE_TOPIC, r"the sink itself stages rows \(stageTopic\)"),
        (f"ns%{STAGE_TOPIC}", r"the sink itself stages rows \(stageTopic\)"),
        (LEDGER_TOPIC, r"the ledger of the sink itself \(ledgerTopic\)"),
        ("%RETRY%billing", "the retry topic of a group.*delivery=atLeastOnce"),
        ("%DLQ%billing", "a topic of RocketMQ itself.*delivery=atLeastOnce"),
        ("RMQ_SYS_TRACE_TOPIC", "a topic of RocketMQ itself"),
        ("TBW102", "a topic of RocketMQ itself"),
        ("SCHEDULE_TOPIC_XXXX", "internal topic"),
        ("%LMQ%one", "light message queue"),
        ("a b", "not a topic's name"),
    ],
)
def test_a_target_is_refused_by_its_name(topic: str, why: str) -> None:
    with pytest.raises(OptionError, match=why):
        check_write(SinkTerms(topic=topic), OWN, "ns")
    check_write(SinkTerms(topic=topic and "orders"), OWN, "ns")


def test_the_sink_s_own_topics_are_those_of_the_options() -> None:
    with pytest.raises(OptionError, match=f"topic {STAGE_TOPIC} is the stage or the ledger of other queries"):
        check_write(SinkTerms(topic=STAGE_TOPIC), OwnTopics("a", "b"), "")
    with pytest.raises(OptionError, match="stageTopic"):
        check_write(SinkTerms(topic="a"), OwnTopics("a", "b"), "")
    with pytest.raises(OptionError, match="are the same topic a"):
        check_write(SinkTerms(), OwnTopics("a", "ns%a"), "ns")
    with pytest.raises(OptionError, match="stageTopic=%RETRY%g is a topic of RocketMQ"):
        check_write(SinkTerms(), OwnTopics(stage="%RETRY%g"), "")
    with pytest.raises(OptionError, match="topic 'a b' is not a topic's name"):
        check_write(SinkTerms(), OwnTopics(ledger="a b"), "")


def test_compression_is_refused() -> None:
    with pytest.raises(OptionError, match=r"compression=lz4 cannot be used .*; expected .*delivery=atLeastOnce"):
        check_write(SinkTerms(compression="lz4"), OWN, "")


def test_prepare_fixes_the_queues_of_the_topic(cluster: RunningCluster) -> None:
    token = prepare_targets(sink_of(cluster), OWN)
    assert json.loads(token or "")["queues"] == [[f"broker-{name}", number] for name in "ab" for number in (0, 1)]
    assert [broker.requests[CONFIG] for broker in cluster.brokers.values()] == [1, 1]


def test_prepare_asks_no_server_for_topics_in_rows(cluster: RunningCluster) -> None:
    assert prepare_targets(sink_of(cluster, None), OWN) is None
    assert cluster.clear_requests() == {}


def test_prepare_checks_names_before_it_asks_a_server(cluster: RunningCluster) -> None:
    sink = sink_of(cluster, LEDGER_TOPIC)
    with pytest.raises(OptionError, match="ledger"):
        ExactSink(sink.address, sink.terms, sink.commit_terms).prepare()
    assert cluster.clear_requests() == {}
    with pytest.raises(NotFoundError, match="topic nothing does not exist"):
        prepare_targets(sink_of(cluster, "nothing"), OWN)


@pytest.mark.parametrize(
    ("attributes", "why"),
    [({"queue.type": "BatchCQ"}, "queue.type=BatchCQ"), ({"cleanup.policy": "COMPACTION"}, "cleanup.policy=COMP")],
)
def test_a_target_is_refused_by_its_settings(cluster_5: RunningCluster, attributes: dict[str, str], why: str) -> None:
    cluster_5.create_topic("odd", queues=1, brokers=["broker-b"], attributes=attributes)
    with pytest.raises(OptionError, match=f"topic odd has {why}"):
        prepare_targets(sink_of(cluster_5, "odd"), OWN)


def test_a_static_target_is_refused(cluster: RunningCluster) -> None:
    cluster.name_servers[0].add_to_route("orders", topicQueueMappingByBroker={"broker-a": {}})
    with pytest.raises(OptionError, match="static topic"):
        prepare_targets(sink_of(cluster), OWN)


def test_settings_that_a_broker_does_not_tell_are_left_to_the_tasks(
    cluster_5: RunningCluster, caplog: pytest.LogCaptureFixture
) -> None:
    cluster_5.brokers["broker-b"].fail(CONFIG, faults.closes_connection(executes=False), times=3)
    sink = sink_of(cluster_5)
    token = prepare_targets(sink, OWN)
    assert "the tasks of this batch will wait: broker broker-b" in caplog.text
    assert [broker.requests[CONFIG] for broker in cluster_5.brokers.values()] == [1, 1]
    with ExitStack() as held:
        TargetTopics(sink.open_routes(held, token), OWN, checked_topics(sink, token), 10_000).queues("orders")
    assert [broker.requests[CONFIG] for broker in cluster_5.brokers.values()] == [2, 4]
    assert caplog.text.count("a task waits for the settings of topic orders: broker broker-b") == 1
    assert checked_topics(sink, prepare_targets(sink, OWN)) == ("orders",)


def test_a_broker_of_an_ordered_topic_that_is_not_listed_is_waited_for(
    cluster_5: RunningCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its queues stay in the order of the topic (orderTopicConf)."""
    renew = WriteRoutes.renew

    def renew_later(routes: WriteRoutes, topic: str) -> None:
        cluster_5.register_all()
        routes._asked_ms.clear()
        renew(routes, topic)

    cluster_5.name_servers[0].add_to_route("orders", orderTopicConf="broker-a:2;broker-b:2")
    cluster_5.name_servers[0].forget("broker-b")
    sink = sink_of(cluster_5)
    token = prepare_targets(sink, OWN)
    with ExitStack() as held:
        targets = TargetTopics(sink.open_routes(held, token), OWN, checked_topics(sink, token), 10_000)
        monkeypatch.setattr(WriteRoutes, "renew", renew_later)
        assert len(targets.queues("orders")) == 4


def test_settings_that_stay_unknown_are_an_error_of_a_task(cluster_5: RunningCluster) -> None:
    cluster_5.brokers["broker-b"].fail(CONFIG, faults.closes_connection(executes=False))
    with ExitStack() as held, pytest.raises(BackendUnavailableError, match="broker-b"):
        TargetTopics(sink_of(cluster_5).open_routes(held, None), OWN, (), 50).queues("orders")


def test_settings_need_a_right(cluster_5: RunningCluster) -> None:
    for broker in cluster_5.brokers.values():
        broker.accounts = AccountTable(Account("me", "secret", topics={"orders": "PUB|SUB"}))
    with pytest.raises(NoPermissionError, match="Get of the topic"):
        prepare_targets(sink_of(cluster_5, credentials=Credentials("me", "secret")), OWN)


def test_a_task_checks_each_topic_once_and_notes_its_queues(cluster: RunningCluster) -> None:
    cluster.create_topic("fixed", queues=1)
    with ExitStack() as held:
        targets = TargetTopics(sink_of(cluster).open_routes(held, None), OWN, ("fixed",), 10_000)
        queues = tuple(QueueKey("orders", number, f"broker-{name}") for name in "ab" for number in (0, 1))
        for _ in range(2):
            assert targets.queues("orders") == queues
            targets.queues("fixed")
        assert targets.used.keys() == {"orders", "fixed"}
        assert targets.used["orders"] == queues
        assert [broker.requests[CONFIG] for broker in cluster.brokers.values()] == [1, 1]
        with pytest.raises(OptionError, match="stages rows"):
            targets.queues(STAGE_TOPIC)
        assert STAGE_TOPIC not in targets.used
