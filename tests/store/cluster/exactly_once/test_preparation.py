"""The topics of the sink before a batch: what is missing is refused by name, or created where that is safe."""

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
from support import exact_commits as commits
from support.exact_commits import LEDGER, STAGE, TOPIC
from support.sent_messages import address_of

import rmq_spark
from rmq_spark.store.backend import SinkTerms
from rmq_spark.store.cluster.address import Credentials
from rmq_spark.store.cluster.codes import RequestCode
from rmq_spark.store.cluster.exactly_once.marks import READING_GROUP
from rmq_spark.store.cluster.exactly_once.preparation import add_stage, check_prepared, prepare_sink
from rmq_spark.store.errors import (
    BackendUnavailableError,
    BrokerError,
    NoPermissionError,
    NotFoundError,
    OptionError,
)
from rmq_spark.store.testing.brokers import Account, AccountTable, RunningCluster


@pytest.fixture(params=["5.3", "4.9"])
def cluster(run_cluster: Callable[..., RunningCluster], request: pytest.FixtureRequest) -> RunningCluster:
    cluster = run_cluster(release=request.param, brokers=2)
    cluster.create_topic(TOPIC, queues=1)
    return cluster


def prepare(cluster: RunningCluster) -> str | None:
    return commits.make_sink(cluster).prepare()


def holders(cluster: RunningCluster, topic: str) -> list[str]:
    return [name for name, broker in cluster.brokers.items() if topic in broker.topics]


def test_a_prepared_cluster_is_ready(cluster: RunningCluster) -> None:
    prepare_sink(address_of(cluster), "broker-b")
    token = prepare(cluster)
    assert token is not None
    assert token == prepare(cluster)
    assert (holders(cluster, LEDGER), holders(cluster, STAGE)) == (["broker-b"], ["broker-a", "broker-b"])


def test_a_batch_costs_two_requests_more(cluster: RunningCluster) -> None:
    """Spark prepares each batch twice."""
    prepare_sink(address_of(cluster), "broker-a")
    prepare(cluster)
    cluster.clear_requests()
    assert check_prepared(commits.make_sink(cluster).address) == {"broker-a", "broker-b"}
    assert cluster.clear_requests() == {"name servers": Counter({RequestCode.GET_ROUTEINFO_BY_TOPIC: 2})}


def test_a_cluster_that_was_never_prepared_is_refused(cluster: RunningCluster) -> None:
    with pytest.raises(NotFoundError, match=rf"{STAGE} .* and {LEDGER} .* do not exist: .* rmq prepare-sink"):
        prepare(cluster)
    assert holders(cluster, LEDGER) == holders(cluster, STAGE) == []


def test_a_refused_write_creates_no_topic(cluster: RunningCluster) -> None:
    prepare_sink(address_of(cluster), "broker-a")
    for topic, namespace, found in (("new", "elsewhere", "elsewhere%new"), (TOPIC, "elsewhere", f"elsewhere%{TOPIC}")):
        sink = replace(commits.make_sink(cluster), address=address_of(cluster, namespace=namespace))
        command = f"rmq prepare-sink -n NAMESERVER --ledger-broker BROKER --namespace {namespace}"
        with pytest.raises(NotFoundError, match=rf"do not exist in the namespace {namespace}: .*{command}"):
            replace(sink, terms=SinkTerms(topic)).prepare()
        assert holders(cluster, found) == []


def test_a_ledger_that_is_away_is_left_to_the_commit(cluster: RunningCluster, caplog: pytest.LogCaptureFixture) -> None:
    prepare_sink(address_of(cluster), "broker-b")
    cluster.brokers["broker-b"].kill()
    with caplog.at_level(logging.WARNING, "rmq_spark"):
        assert prepare(cluster) is not None
    assert "commits will wait: the ledger RMQ_SPARK_LEDGER is" in caplog.text
    assert "Start the broker of the ledger." in caplog.text
    assert "prepare-sink" not in caplog.text, "a second ledger would let batches be stored twice"
    assert holders(cluster, LEDGER) == ["broker-b"]


def test_brokers_that_are_all_away_are_waited_for(cluster: RunningCluster) -> None:
    """The name servers know no topic then, as just after their own start."""
    prepare_sink(address_of(cluster), "broker-b")
    for broker in cluster.brokers.values():
        broker.kill()
    with pytest.raises(BackendUnavailableError, match=r"the name servers list no master; .*wait 30 s"):
        prepare(cluster)
    cluster.brokers["broker-a"].restart()
    assert prepare(cluster) is not None


def test_no_second_ledger_is_created_while_the_broker_of_the_first_one_is_away(cluster: RunningCluster) -> None:
    """Name servers forget a broker that is down. The stage tells that the cluster was prepared."""
    prepare_sink(address_of(cluster), "broker-b")
    cluster.brokers["broker-b"].kill()
    with pytest.raises(
        BackendUnavailableError,
        match=f"no ledger was created: broker broker-a has the topic {STAGE}, .* no broker that runs has the ledger "
        f"{LEDGER}; .* Start the broker of the ledger. .* with --replace-ledger",
    ):
        prepare_sink(address_of(cluster), "broker-a")
    assert holders(cluster, LEDGER) == ["broker-b"]
    cluster.brokers["broker-b"].restart()
    assert not prepare_sink(address_of(cluster), "broker-b").is_new


def test_a_ledger_that_is_lost_is_replaced_on_request(cluster: RunningCluster) -> None:
    prepare_sink(address_of(cluster), "broker-b")
    assert not rmq_spark.prepare_sink(cluster.address, "broker-b", replace_ledger=True).is_new
    with pytest.raises(OptionError, match="is on broker broker-b already"):
        rmq_spark.prepare_sink(cluster.address, "broker-a", replace_ledger=True)
    cluster.brokers["broker-b"].kill()
    done = rmq_spark.prepare_sink(cluster.address, "broker-a", replace_ledger=True)
    assert (done.is_new, done.ledger_broker, done.stage_brokers) == (True, "broker-a", ("broker-a",))
    assert "broker-a" in holders(cluster, LEDGER)


def test_two_ledgers_are_refused(cluster: RunningCluster) -> None:
    prepare_sink(address_of(cluster), "broker-a")
    cluster.create_topic(LEDGER, queues=3, brokers=["broker-b"])
    with pytest.raises(BrokerError, match=r"there are two ledgers: .*broker-a, broker-b"):
        prepare(cluster)


def test_the_stage_is_created_at_a_broker_that_was_added_later(cluster: RunningCluster) -> None:
    prepare_sink(address_of(cluster), "broker-a")
    cluster.add_broker("broker-c")
    cluster.create_topic(TOPIC, queues=1, brokers=["broker-c"])
    assert prepare(cluster) is not None
    assert holders(cluster, STAGE) == ["broker-a", "broker-b", "broker-c"]
    assert holders(cluster, LEDGER) == ["broker-a"]


def test_the_group_of_pulls_is_created_together_with_the_stage(cluster: RunningCluster) -> None:
    prepare_sink(address_of(cluster), "broker-a")
    new = cluster.add_broker("broker-c")
    new.settings.creates_groups = False
    cluster.create_topic(TOPIC, queues=1, brokers=["broker-c"])
    assert prepare(cluster) is not None
    assert READING_GROUP in new.groups


def test_a_group_that_exists_keeps_its_settings(cluster: RunningCluster) -> None:
    for broker in cluster.brokers.values():
        broker.settings.creates_groups = False
    assert prepare_sink(address_of(cluster), "broker-a").is_new
    cluster.clear_requests()
    assert not prepare_sink(address_of(cluster), "broker-a").is_new
    sent = sum(cluster.clear_requests().values(), Counter())
    assert RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP not in sent


def test_a_missing_right_to_create_the_stage_is_named(cluster: RunningCluster) -> None:
    prepare_sink(address_of(cluster), "broker-a")
    new = cluster.add_broker("broker-c")
    cluster.create_topic(TOPIC, queues=1, brokers=["broker-c"])
    new.accounts = AccountTable(Account("writer", "secret", topics={"*": "PUB|SUB|GET"}))
    address = address_of(cluster, credentials=Credentials("writer", "secret"))
    with pytest.raises(NoPermissionError, match=f"topic {STAGE} does not exist and cannot be created"):
        add_stage(address, STAGE, ["broker-c"])
