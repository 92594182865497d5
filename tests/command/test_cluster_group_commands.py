"""`rmq groups`, `lag`, `reset` and `dlq` with `--name-server`: what they print of a cluster, and what they change."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support.failed_messages import batch_of

import rmq_spark
from rmq_spark.store.cluster import client
from rmq_spark.store.cluster.codes import RequestCode
from rmq_spark.store.model import QueueKey
from rmq_spark.store.testing.brokers import RELEASES, Account, AccountTable, Answer, RunningCluster
from rmq_spark.store.testing.brokers.wire import loose_json

Rmq = Callable[..., Any]
GROUP = "billing"
AWAY = ("--broker-addresses", "broker-b=127.0.0.1:1")


@pytest.fixture(params=sorted(RELEASES))
def cluster(request: pytest.FixtureRequest, run_cluster: Callable[..., RunningCluster]) -> Iterator[RunningCluster]:
    """Two brokers with three messages each in orders/0. The group billing has consumed one of each."""
    cluster = run_cluster(release=request.param, brokers=2)
    cluster.create_topic("orders", queues=1)
    for name, broker in cluster.brokers.items():
        for number in range(3):
            cluster.send("orders", f"{name[-1]}{number}", broker=name, tags="ab"[number % 2], keys=f"k{number}")
        broker.groups.add(GROUP)
        broker.offsets.commit(GROUP, QueueKey("orders", 0), 1)
    yield cluster
    client._idle.forget()


@pytest.fixture
def rmq_n(rmq: Rmq, cluster: RunningCluster) -> Rmq:
    """A function that runs a command, whose name may have two words, with the cluster's name server."""
    return lambda name, *words: rmq(*name.split(), "-n", cluster.address, *words)


def test_groups_of_a_cluster(rmq_n: Rmq, cluster: RunningCluster) -> None:
    connection = {"clientId": "one@1", "clientAddr": "h:1", "language": "JAVA", "version": 407}
    body = loose_json({"connectionSet": [connection], "subscriptionTable": {}}).encode()
    cluster.brokers["broker-b"].fail(
        RequestCode.GET_CONSUMER_CONNECTION_LIST, lambda call, _: call.answer(Answer(body=body))
    )
    ran = rmq_n("groups")
    assert (ran.status, ran.err) == (0, "")
    head, line = (one.split() for one in ran.out.splitlines())
    assert head == ["group", "topics", "queues", "lagMessages", "lagBytes", "behind", "members"]
    assert line[:4] == [GROUP, "orders", "2", "4"]
    assert line[-1] == "1"
    (row,) = rmq_n("groups", "--json").rows
    assert (row["topics"], row["queues"], row["lagMessages"], row["members"]) == (["orders"], 2, 4, ["one@1"])
    assert row["lagBytes"] > 0
    assert row["secondsBehind"] >= 0


def test_a_cluster_without_groups(rmq: Rmq, run_cluster: Callable[..., RunningCluster]) -> None:
    ran = rmq("groups", "-n", run_cluster().address)
    assert (ran.status, ran.out, ran.err) == (0, "", "The cluster has no consumer groups.\n")
    ran = rmq("lag", "-n", run_cluster().address)
    assert (ran.status, ran.err) == (0, "No group has committed an offset.\n")


def test_lag_of_a_cluster(rmq_n: Rmq) -> None:
    ran = rmq_n("lag", GROUP)
    assert (ran.status, ran.err) == (0, "")
    head, first, second = (line.split() for line in ran.out.splitlines())
    assert head == [
        *("topic", "brokerName", "queueId", "state", "groupOffset", "maxOffset"),
        *("lagMessages", "lagBytes", "behind"),
    ]
    assert (first[:7], second[:7]) == (
        ["orders", "broker-a", "0", "ok", "1", "3", "2"],
        ["orders", "broker-b", "0", "ok", "1", "3", "2"],
    )
    assert rmq_n("lag").out.startswith("group ")
    assert [row["brokerName"] for row in rmq_n("lag", "--json").rows] == ["broker-a", "broker-b"]
    ran = rmq_n("lag", "biling")
    assert (ran.status, ran.out) == (1, "")
    assert "Did you mean billing?" in ran.err


def test_lag_of_a_broker_that_is_away(rmq_n: Rmq) -> None:
    ran = rmq_n("lag", *AWAY, GROUP)
    assert ran.status == 0
    assert [line.split()[3] for line in ran.out.splitlines()[1:]] == ["ok", "away"]
    (row,) = rmq_n("groups", *AWAY, "--json").rows
    assert (row["queues"], row["lagMessages"], row["unknownQueues"]) == (2, 2, 1)
    ran = rmq_n("groups", *AWAY)
    head, line = (line.split() for line in ran.out.splitlines())
    assert dict(zip(head[:5], line, strict=False)) | {"lagMessages": "2", "unknownQueues": "1"} == dict(
        zip(head[:5], line, strict=False)
    )
    assert "  lag ≥ 2" in rmq_n("watch", *AWAY, "--interval", 0.01, "--count", 1).out
    assert "unknownQueues" not in rmq_n("groups").out


def test_reset_of_a_cluster(rmq_n: Rmq, cluster: RunningCluster) -> None:
    ran = rmq_n("reset", GROUP, "earliest")
    assert (ran.status, ran.err) == (0, "")
    assert [line.split() for line in ran.out.splitlines()] == [
        ["topic", "brokerName", "queueId", "oldGroupOffset", "groupOffset"],
        ["orders", "broker-a", "0", "1", "0"],
        ["orders", "broker-b", "0", "1", "0"],
    ]
    (row,) = rmq_n("reset", GROUP, '{"orders": {"broker-b:0": 3}}', "--json").rows
    assert row == {
        **{"group": GROUP, "topic": "orders", "brokerName": "broker-b", "queueId": 0},
        **{"oldGroupOffset": 0, "groupOffset": 3},
    }
    ran = rmq_n("reset", "fresh", "latest")
    assert (ran.status, ran.out) == (1, "")
    assert 'no consumer group "fresh"' in ran.err
    assert ran.err.endswith("Name the topics to reset with --topic.\n")
    assert len(rmq_n("reset", "fresh", "latest", "--topic", "orders", "--json").rows) == 2
    assert rmq_spark.group_offsets(name_server=cluster.address, group="fresh")["orders"]["broker-a:0"] == 3
    ran = rmq_n("reset", GROUP, "now+1h")
    assert [line.split()[-1] for line in ran.out.splitlines()[1:]] == ["3", "3"]


def test_reset_that_reached_only_some_brokers(rmq_n: Rmq, cluster: RunningCluster) -> None:
    cluster.brokers["broker-b"].fail(
        RequestCode.INVOKE_BROKER_TO_RESET_OFFSET, lambda call, _: call.answer(Answer(1, remark="a planted fault"))
    )
    ran = rmq_n("reset", GROUP, "earliest")
    assert (ran.status, ran.out) == (1, "")
    assert "found the queues orders/broker-b:0 not reset" in ran.err
    assert "Reset were orders/broker-a:0." in ran.err


def test_reset_while_a_broker_is_away(rmq_n: Rmq) -> None:
    ran = rmq_n("reset", *AWAY, GROUP, "latest")
    assert (ran.status, ran.out) == (1, "")
    assert "Nothing was changed" in ran.err
    ran = rmq_n("reset", *AWAY, GROUP, '{"orders": {"broker-a:0": 2}}', "--json")
    assert ran.status == 0
    assert (ran.rows[0]["oldGroupOffset"], ran.rows[0]["groupOffset"]) == (None, 2)
    assert "The previous offsets are not known: cannot read the offsets of group billing: broker-b does not" in ran.err


@pytest.fixture
def failed(cluster: RunningCluster) -> RunningCluster:
    """The group billing has given up all six messages."""
    for broker in cluster.brokers.values():
        broker.settings.delivers = False
    with rmq_spark.open_reader(name_server=cluster.address) as reader:
        rows = [
            row
            for queue in reader.queues("orders")
            for batch in reader.read(queue, 0, 3, [*rmq_spark.COLUMNS, "brokerName"])
            for row in batch.to_pylist()
        ]
    with rmq_spark.open_store(name_server=cluster.address, request_timeout_ms=20_000) as producer:
        producer.send_back(batch_of(rows), GROUP, -1)
    return cluster


def test_dead_letters_of_a_cluster_are_listed(rmq_n: Rmq, failed: RunningCluster) -> None:
    ran = rmq_n("dlq list")
    assert (ran.status, ran.err) == (0, "")
    assert [line.split() for line in ran.out.splitlines()] == [["group", "brokers", "messages"], [GROUP, "2", "6"]]
    rows = rmq_n("dlq list", GROUP, "--json").rows
    assert sorted(row["body"] for row in rows) == ["a0", "a1", "a2", "b0", "b1", "b2"]
    assert {(row["topic"], row["physicalTopic"]) for row in rows} == {("orders", "%DLQ%billing")}
    assert [row["storeTimestamp"] for row in rows] == sorted(row["storeTimestamp"] for row in rows)
    ran = rmq_n("dlq list", GROUP, "-n", 2)
    assert ran.out.split()[:2] == ["brokerName", "queueOffset"]
    assert len(ran.out.splitlines()) == 3
    assert ran.err == "These are the last 2 of 6. --limit 6 shows all.\n"


def test_dead_letters_of_a_broker_that_is_away_are_named(rmq_n: Rmq, failed: RunningCluster) -> None:
    ran = rmq_n("dlq list", *AWAY, GROUP, "--json")
    assert [row["brokerName"] for row in ran.rows] == ["broker-a"] * 3
    assert "%DLQ%billing/broker-b:0: away since" in ran.err
    ran = rmq_n("dlq list", *AWAY, "--json")
    assert (ran.rows[0]["messages"], ran.rows[0]["brokers"]) == (3, 2)
    assert "%DLQ%billing/broker-b:0: away since" in ran.err


def test_dead_letters_of_a_cluster_are_sent_again(rmq_n: Rmq, failed: RunningCluster) -> None:
    (row,) = rmq_n("dlq republish", GROUP, "--tags", "a", "--json").rows
    assert row == {"group": GROUP, "sent": 4, "passedOver": 2, "nextOffsets": {"broker-a": 3, "broker-b": 3}}
    ran = rmq_n("dlq republish", GROUP)
    assert (ran.status, ran.out) == (0, "")
    assert ran.err == "0 sent, 0 skipped. The next call resumes at these offsets: broker-a: 3, broker-b: 3.\n"
    assert "2 sent, 4 skipped" in rmq_n("dlq republish", GROUP, "--key", "k1", "--progress", "k1").err
    bodies = [row["body"] for row in rmq_n("cat", "orders", "--json").rows]
    assert sorted(bodies) == sorted([*("a0", "a1", "a2", "b0", "b1", "b2"), *("a0", "a2", "b0", "b2"), "a1", "b1"])


def test_a_group_without_dead_letters(rmq_n: Rmq, cluster: RunningCluster) -> None:
    assert rmq_n("dlq list").err == "No dead letters.\n"
    ran = rmq_n("dlq list", GROUP)
    assert (ran.status, ran.err) == (0, "billing has no dead letters.\n")
    assert "There are none." in rmq_n("dlq republish", GROUP).err
    for words in (("dlq list", "biling"), ("dlq republish", "biling")):
        ran = rmq_n(*words)
        assert (ran.status, ran.out) == (1, "")
        assert 'no consumer group "biling"' in ran.err


def test_rights_of_an_account(rmq_n: Rmq, failed: RunningCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    def give(topics: str, groups: str) -> None:
        for broker in failed.brokers.values():
            rights = {"topics": {"*": topics}, "groups": {"*": groups}}
            broker.accounts = AccountTable(Account("admin", "12345678", **rights))

    monkeypatch.setenv("RMQ_ACCESS_KEY", "admin")
    monkeypatch.setenv("RMQ_SECRET_KEY", "12345678")
    give("SUB|PUB|GET|UPDATE", "SUB|GET|UPDATE")
    for words in (
        ("lag", GROUP),
        ("reset", GROUP, "earliest"),
        ("dlq list", GROUP),
        ("dlq republish", GROUP),
    ):
        ran = rmq_n(*words)
        assert ran.status == 0, ran.err
    if not failed.release.is_5:
        return
    give("SUB", "SUB")
    ran = rmq_n("lag", GROUP)
    assert (ran.status, ran.out) == (1, "")
    assert "Ask an administrator for the right: Get of the group (5.3)" in ran.err
    ran = rmq_n("reset", GROUP, "earliest", "--topic", "orders")
    assert ran.status == 1
    assert "The previous offsets are not known" not in ran.err
    assert "Update of the topic and of the group" in ran.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("lag", "./store", "billing", "-n", "ns:9876"), "cannot be combined: found PATH ./store"),
        (
            ("reset", "tests", "g", "latest", "-n", "ns:9876"),
            "cannot be combined: found PATH tests",
        ),
        (("lag", "tests", "billing", "-n", "ns:9876"), "cannot be combined: found PATH tests"),
        (("lag", "./store", "-n", "ns:9876"), "cannot be combined: found PATH ./store"),
        (("dlq", "list", "./store", "-n", "ns:9876"), "PATH and --name-server cannot be combined: found PATH ./store"),
        (("lag", "-n", "ns:9876", "billing", "extra"), "unexpected argument 'extra': found billing and extra beside"),
        (("reset", "-n", "ns:9876", "g", "latest", "extra"), "expected only GROUP and WHERE. Leave the other out"),
        (("dlq", "-n", "ns:9876", "list"), "-n: found an option before the command; expected list or republish first."),
        (("reset", "-n", "ns:9876", "g", "latest", "--lock-timeout", "1"), "--lock-timeout is for a store at PATH"),
        (("dlq", "republish", "-n", "ns:9876", "g", "--allow-network-store"), "--allow-network-store is for a store"),
        (("dlq", "list", "./store", "--tls"), "--tls: for a cluster, but PATH ./store is a store"),
        (("reset", "-n", "ns:9876", "g"), "Missing argument 'WHERE'"),
        (("reset", "-n", "ns:9876", "g", "soon"), "WHERE 'soon': expected earliest, latest, TIME"),
        (("lag",), "Missing argument 'PATH' or option '--name-server'"),
        (("groups", "-n", "ns:9876", "--commit-log-path", "x"), "--commit-log-path is for a store at PATH"),
    ],
)
def test_words_that_do_not_fit_are_refused(rmq: Rmq, words: tuple[str, ...], said: str) -> None:
    ran = rmq(*words)
    assert (ran.status, ran.out) == (2, "")
    assert said in ran.err
