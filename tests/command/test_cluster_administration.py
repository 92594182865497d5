"""`rmq brokers`, `route`, `stats`, `members`, `create -n` and `delete`: what administrators do every day."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rmq_spark.store.model import QueueKey
from rmq_spark.store.testing.brokers import RELEASES, RunningCluster
from rmq_spark.store.testing.brokers.accounts import Account, AccountTable
from rmq_spark.store.testing.brokers.topics import Topic

Rmq = Callable[..., Any]
RunCluster = Callable[..., RunningCluster]
each_release = pytest.mark.parametrize("release", sorted(RELEASES))


def topics_of(cluster: RunningCluster, name: str) -> dict[str, Topic | None]:
    return {broker: one.topics.get(name) for broker, one in cluster.brokers.items()}


@each_release
def test_brokers_lists_masters_and_slaves(run_cluster: RunCluster, rmq: Rmq, release: str) -> None:
    cluster = run_cluster(release=release, brokers=2)
    cluster.add_slave("broker-a")
    rows = rmq("brokers", "-n", cluster.address, "--json").rows
    assert [(row["brokerName"], row["brokerId"]) for row in rows] == [("broker-a", 0), ("broker-a", 1), ("broker-b", 0)]
    first = rows[0]
    assert first["version"] == {"4.9": "4.9.7", "5.3": "5.3.3"}[release]
    assert (first["inRate"], first["outRate"], first["inToday"]) == (12.5, 4.0, 60)
    assert (first["diskUsed"], first["earliestTimestamp"]) == (0.25, None)
    assert first["bootTimestamp"] == "2023-11-14T22:13:20.000Z"
    assert first["isActive"] is (True if release == "5.3" else None)
    cluster.brokers["broker-b"].freeze()
    ran = rmq("brokers", "-n", cluster.address, "--request-timeout", 0.3)
    assert ran.status == 0
    assert "broker-b 0: " in ran.err
    assert "12.5" in ran.out
    assert "25%" in ran.out


@each_release
def test_route_joins_the_answers_of_all_name_servers(run_cluster: RunCluster, rmq: Rmq, release: str) -> None:
    cluster = run_cluster(release=release, brokers=2, name_servers=2)
    cluster.create_topic("orders", queues=2)
    cluster.name_servers[0].forget("broker-a")
    rows = rmq("route", "-n", cluster.address, "orders", "--json").rows
    assert [(row["brokerName"], row["perm"], row["readQueues"], row["writeQueues"]) for row in rows] == [
        ("broker-a", "rw", 2, 2),
        ("broker-b", "rw", 2, 2),
    ]
    assert rows[0]["master"] == cluster.brokers["broker-a"].address
    ran = rmq("route", "-n", cluster.address, "order")
    assert ran.status == 1
    assert "order" in ran.err


@each_release
def test_stats_adds_what_all_masters_have_counted(run_cluster: RunCluster, rmq: Rmq, release: str) -> None:
    cluster = run_cluster(release=release, brokers=2)
    cluster.create_topic("orders", queues=1)
    cluster.create_topic("quiet", queues=1)
    for name, broker in cluster.brokers.items():
        cluster.send("orders", *([b"x"] * 5), broker=name, queue_id=0)
        broker.offsets.commit("billing", QueueKey("orders", 0), 2)
        broker.settings.statistics = {
            ("TOPIC_PUT_NUMS", "orders"): (1.5, 50),
            ("TOPIC_PUT_SIZE", "orders"): (300.0, 10_000),
            ("GROUP_GET_NUMS", "orders@billing"): (0.5, 20),
        }
    rows = rmq("stats", "-n", cluster.address, "--json").rows
    assert rows == [
        {
            "topic": "orders",
            "group": "billing",
            "inRate": 3.0,
            "inBytesRate": 600.0,
            "outRate": 1.0,
            "inDay": 100,
            "outDay": 40,
            "lagMessages": 6,
            "problem": None,
        },
        {
            "topic": "quiet",
            "group": None,
            "inRate": 0.0,
            "inBytesRate": 0.0,
            "outRate": None,
            "inDay": 0,
            "outDay": None,
            "lagMessages": None,
            "problem": None,
        },
    ]
    assert [row["topic"] for row in rmq("stats", "-n", cluster.address, "--active", "--json").rows] == ["orders"]


@each_release
def test_stats_counts_the_masters_that_answer(run_cluster: RunCluster, rmq: Rmq, release: str) -> None:
    cluster = run_cluster(release=release, brokers=2)
    for topic in ("orders", "payments", "refunds"):
        cluster.create_topic(topic, queues=1)
    cluster.create_topic("local", queues=1, brokers=["broker-b"])
    for broker in cluster.brokers.values():
        broker.settings.statistics = {("TOPIC_PUT_NUMS", "orders"): (1.5, 50)}
    cluster.brokers["broker-b"].freeze()
    ran = rmq("stats", "-n", cluster.address, "--request-timeout", 0.3, "--json")
    assert ran.status == 0
    found = {row["topic"]: row for row in ran.rows}
    assert (found["orders"]["inRate"], found["orders"]["inDay"]) == (1.5, 50)
    assert (found["local"]["inRate"], found["payments"]["inRate"]) == (None, 0)
    assert all("broker-b" in row["problem"] for row in ran.rows)
    assert ran.err.count("\n") == 1, ran.err
    ran = rmq("stats", "-n", cluster.address, "--request-timeout", 0.3, "local")
    assert (ran.status, ran.out) == (1, "")


def test_stats_takes_patterns_and_lists(run_cluster: RunCluster, rmq: Rmq) -> None:
    cluster = run_cluster(release="5.3")
    for topic in ("orders", "orders-eu", "payments", "refunds"):
        cluster.create_topic(topic, queues=1)
    rows = rmq("stats", "-n", cluster.address, "order*,refunds", "--json").rows
    assert [row["topic"] for row in rows] == ["orders", "orders-eu", "refunds"]
    ran = rmq("stats", "-n", cluster.address, "absent*")
    assert (ran.status, "pattern 'absent*': no topic matches it" in ran.err) == (1, True)
    assert rmq("stats", "-n", cluster.address, ",").status == 2


def test_stats_shows_the_other_topics_if_one_is_unknown(run_cluster: RunCluster, rmq: Rmq) -> None:
    cluster = run_cluster(release="5.3", name_servers=2)
    cluster.create_topic("orders", queues=1)
    ran = rmq("stats", "-n", cluster.address, "gone", "orders")
    assert (ran.status, ran.out.count("orders")) == (0, 1)
    assert ran.err.startswith("gone: ")
    (row,) = rmq("stats", "-n", cluster.address, "gone", "orders", "--active", "--json").rows
    assert (row["topic"], row["problem"] is None) == ("gone", False)
    ran = rmq("stats", "-n", cluster.address, "gone")
    assert (ran.status, ran.out) == (1, "")


def test_stats_names_a_broker_without_a_master_once(run_cluster: RunCluster, rmq: Rmq) -> None:
    cluster = run_cluster(release="5.3", brokers=2)
    for topic in ("orders", "payments", "refunds"):
        cluster.create_topic(topic, queues=1)
    cluster.add_slave("broker-b")
    cluster.brokers["broker-b"].kill()
    ran = rmq("stats", "-n", cluster.address)
    assert ran.status == 0
    assert "orders and 2 more topics: broker broker-b is not counted: no name server lists its master" in ran.err


@each_release
def test_what_was_done_is_shown_if_a_later_topic_fails(run_cluster: RunCluster, rmq: Rmq, release: str) -> None:
    cluster = run_cluster(release=release)
    ran = rmq("create", "-n", cluster.address, "orders", "SCHEDULE_TOPIC_XXXX", "--json")
    assert (ran.status, [row["topic"] for row in ran.rows]) == (1, ["orders"])
    assert "topic SCHEDULE_TOPIC_XXXX is an internal topic" in ran.err
    ran = rmq("delete", "-n", cluster.address, "orders", "gone", "--yes", "--json")
    assert (ran.status, [row["topic"] for row in ran.rows]) == (1, ["orders"])
    assert "topic gone cannot be deleted" in ran.err
    ran = rmq("delete", "-n", cluster.address, "gone", "--yes", "--json")
    assert (ran.status, ran.out) == (1, "")


@each_release
def test_members_of_a_cluster(run_cluster: RunCluster, rmq: Rmq, release: str) -> None:
    cluster = run_cluster(release=release)
    cluster.create_topic("orders", queues=1)
    cluster.broker.members.add("billing", "10.0.0.9@1", {"orders": "a || b"})
    (row,) = rmq("members", "-n", cluster.address, "billing", "--json").rows
    assert (row["member"], row["subscription"], row["messageModel"]) == ("10.0.0.9@1", "orders: a || b", "CLUSTERING")
    assert "10.0.0.9@1" in rmq("members", "-n", cluster.address, "billing").out
    assert rmq("members", "-n", cluster.address, "nobody").err == "No member is connected.\n"


def test_members_of_a_store_without_queries(rmq: Rmq, demo: object) -> None:
    ran = rmq("members", demo, "audit")
    assert (ran.status, ran.out, ran.err) == (0, "", "No member is connected.\n")


@each_release
def test_create_creates_and_leaves_existing_topics(run_cluster: RunCluster, rmq: Rmq, release: str) -> None:
    cluster = run_cluster(release=release, brokers=2)
    cluster.create_topic("orders", queues=2, brokers=["broker-a"])
    ran = rmq("create", "-n", cluster.address, "orders", "--queues", 3)
    assert ran.status == 0
    assert "--alter changes them" in ran.err
    topics = topics_of(cluster, "orders")
    assert [one.read_queues for one in topics.values() if one] == [2, 3]
    rows = rmq("create", "-n", cluster.address, "new", "--broker", "broker-b", "--perm", "r", "--json").rows
    assert [(row["brokerName"], row["change"], row["readQueues"], row["perm"]) for row in rows] == [
        ("broker-b", "created", 4, "r")
    ]
    assert topics_of(cluster, "new")["broker-a"] is None


@pytest.mark.parametrize(
    ("words", "found", "advice"),
    [
        (("route", "orders"), "no -n HOST:PORT", "Add -n HOST:PORT"),
        (("route", "{demo}", "orders"), "the store {demo} and no -n HOST:PORT", "For a store use `rmq queues`."),
        (("stats", "{demo}"), "the store {demo} and no -n HOST:PORT", "For a store use `rmq watch`."),
        (("brokers", "{demo}"), "the store {demo} and no -n HOST:PORT", "Add -n HOST:PORT"),
        (("delete", "./none", "orders"), "the store ./none and no -n HOST:PORT", "Add -n HOST:PORT"),
    ],
)
def test_a_command_for_clusters_explains_that_none_is_given(
    rmq: Rmq, demo: Path, words: tuple[str, ...], found: str, advice: str
) -> None:
    ran = rmq(*(word.format(demo=demo) for word in words))
    assert (ran.status, ran.out) == (2, "")
    assert f"Usage: rmq {words[0]} [OPTIONS] -n HOST:PORT" in ran.err
    assert f"cannot find the cluster: found {found.format(demo=demo)}; expected the name server" in ran.err
    assert advice in ran.err


@pytest.mark.parametrize("perm", range(8))
def test_a_permission_is_given_as_it_is_printed(run_cluster: RunCluster, rmq: Rmq, perm: int) -> None:
    cluster = run_cluster(release="5.3")
    cluster.create_topic("orders", queues=1, perm=perm)
    (row,) = rmq("route", "-n", cluster.address, "orders", "--json").rows
    assert row["perm"] == ("none", "x", "w", "wx", "r", "rx", "rw", "rwx")[perm]
    (row,) = rmq("create", "-n", cluster.address, "again", "--perm", row["perm"], "--json").rows
    topic = topics_of(cluster, "again")["broker-a"]
    assert topic is not None
    assert (topic.perm, row["perm"]) == (perm, ("none", "x", "w", "wx", "r", "rx", "rw", "rwx")[perm])


@each_release
def test_alter_changes_only_what_is_given(run_cluster: RunCluster, rmq: Rmq, release: str) -> None:
    cluster = run_cluster(release=release)
    cluster.create_topic("orders", queues=2, perm=4, sys_flag=1)
    (row,) = rmq("create", "-n", cluster.address, "orders", "--alter", "--read-queues", 5, "--json").rows
    assert (row["change"], row["readQueues"], row["writeQueues"], row["perm"]) == ("altered", 5, 2, "r")
    topic = topics_of(cluster, "orders")["broker-a"]
    assert topic is not None
    assert (topic.read_queues, topic.write_queues, topic.perm, topic.sys_flag) == (5, 2, 4, 1)


def test_attributes_are_only_for_5(run_cluster: RunCluster, rmq: Rmq) -> None:
    new, old = run_cluster(release="5.3"), run_cluster(release="4.9")
    rmq("create", "-n", new.address, "orders", "--attribute", "message.type=FIFO")
    rmq("create", "-n", new.address, "orders", "--alter", "--perm", "r")
    topic = topics_of(new, "orders")["broker-a"]
    assert topic is not None
    assert (topic.attributes, topic.perm) == ({"message.type": "FIFO"}, 4)
    ran = rmq("create", "-n", old.address, "orders", "--attribute", "message.type=FIFO")
    assert ran.status == 1
    assert "has RocketMQ 4.9; expected 5.x" in ran.err
    assert topics_of(old, "orders") == {"broker-a": None}


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("orders", "--segment-bytes", "1m"), "--segment-bytes is for a store at PATH"),
        (("orders", "--lock-timeout", "1"), "--lock-timeout is for a store at PATH"),
        ((), "Missing argument 'TOPIC...'"),
        (("orders", "--attribute", "x"), "expected NAME=VALUE"),
    ],
)
def test_create_refuses_what_is_for_stores(
    run_cluster: RunCluster, rmq: Rmq, words: tuple[str, ...], expected: str
) -> None:
    ran = rmq("create", "-n", run_cluster().address, *words)
    assert ran.status == 2
    assert expected in ran.err


def test_create_refuses_in_a_store_what_is_for_clusters(rmq: Rmq, tmp_path: object) -> None:
    ran = rmq("create", tmp_path, "orders", "--alter")
    assert ran.status == 2
    assert "--alter is for a cluster, but PATH is a store" in ran.err


@each_release
def test_unknown_brokers_and_system_topics_are_refused(run_cluster: RunCluster, rmq: Rmq, release: str) -> None:
    cluster = run_cluster(release=release)
    ran = rmq("create", "-n", cluster.address, "orders", "--broker", "broker-x")
    assert (ran.status, "broker broker-x was not found" in ran.err) == (1, True)
    ran = rmq("create", "-n", cluster.address, "orders", "--cluster", "east")
    assert (ran.status, "cluster east was not found" in ran.err) == (1, True)
    ran = rmq("delete", "-n", cluster.address, "TBW102", "--yes")
    assert (ran.status, "it is a topic of RocketMQ itself" in ran.err) == (1, True)
    for words in (("delete", "RMQ_SPARK_LEDGER", "--yes"), ("create", "RMQ_SPARK_LEDGER")):
        ran = rmq(words[0], "-n", cluster.address, *words[1:])
        assert (ran.status, "it belongs to exactly-once writes" in ran.err) == (1, True)
    ran = rmq("delete", "-n", cluster.address, "missing", "--yes")
    assert (ran.status, "no name server lists it" in ran.err) == (1, True)


def test_create_refuses_a_broker_of_another_cluster(run_cluster: RunCluster, rmq: Rmq) -> None:
    cluster = run_cluster(brokers=["broker-a"])
    cluster.cluster = "east"  # of the brokers that are added
    cluster.add_broker("broker-b")
    ran = rmq("create", "-n", cluster.address, "orders", "--cluster", "DefaultCluster", "--broker", "broker-b")
    assert ran.status == 1
    assert "broker broker-b was not found in cluster DefaultCluster: it belongs to cluster east" in ran.err
    assert topics_of(cluster, "orders") == {"broker-a": None, "broker-b": None}
    rmq("create", "-n", cluster.address, "orders", "--cluster", "east", "--broker", "broker-b")
    assert [one is None for one in topics_of(cluster, "orders").values()] == [True, False]


@pytest.mark.parametrize("words", [("--read-queues", 2_000_000), ("--write-queues", -5), ("--queues", 65_537)])
def test_create_refuses_impossible_numbers_of_queues(
    run_cluster: RunCluster, rmq: Rmq, words: tuple[object, ...]
) -> None:
    cluster = run_cluster()
    ran = rmq("create", "-n", cluster.address, "orders", *words)
    assert ran.status == 2
    assert topics_of(cluster, "orders") == {"broker-a": None}


@each_release
def test_a_topic_with_impossible_queues_is_a_problem_of_its_own(
    run_cluster: RunCluster, rmq: Rmq, release: str
) -> None:
    cluster = run_cluster(release=release)
    cluster.create_topic("orders", queues=1)
    cluster.create_topic("bad", queues=1)
    cluster.send("orders", b"x")
    cluster.broker.set_topic("bad", read_queues=-5)
    ran = rmq("topics", "-n", cluster.address, "--json")
    assert ran.status == 0
    assert {row["topic"]: row["messages"] for row in ran.rows} == {"orders": 1, "bad": 0}
    assert "topic bad has -5 read queues" in ran.err
    ran = rmq("watch", "-n", cluster.address, "--count", 1, "--interval", 0.1, "--json")
    assert [one["topic"] for one in ran.rows["topics"]] == ["orders"]
    assert "topic bad has -5 read queues" in ran.err
    assert rmq("route", "-n", cluster.address, "bad", "--json").rows[0]["readQueues"] == -5
    ran = rmq("create", "-n", cluster.address, "bad", "--alter", "--read-queues", 2, "--json")
    assert (ran.status, ran.rows[0]["readQueues"]) == (0, 2)
    assert rmq("topics", "-n", cluster.address).err == ""
    cluster.broker.set_topic("bad", read_queues=-5)
    assert rmq("delete", "-n", cluster.address, "bad", "--yes").status == 0
    assert topics_of(cluster, "bad") == {"broker-a": None}


@each_release
def test_delete_removes_a_topic_from_brokers_and_name_servers(run_cluster: RunCluster, rmq: Rmq, release: str) -> None:
    cluster = run_cluster(release=release, brokers=2, name_servers=2)
    cluster.create_topic("orders", queues=1)
    ran = rmq("delete", "-n", cluster.address, "orders")
    assert (ran.status, "Add --yes" in ran.err) == (2, True)
    ran = rmq("delete", "-n", cluster.address, "orders", typed="n\n")
    assert ran.status == 1
    assert "orders: 2 queues on broker-a, broker-b" in ran.err
    assert "Nothing was deleted." in ran.err
    assert all(topics_of(cluster, "orders").values())
    (row,) = rmq("delete", "-n", cluster.address, "orders", "--yes", "--json").rows
    assert row["brokers"] == ["broker-a", "broker-b"]
    assert len(row["nameServers"]) == 2
    assert not any(topics_of(cluster, "orders").values())
    assert all(server.routes.route("orders") is None for server in cluster.name_servers)


def test_delete_names_a_broker_that_registers_the_topic_again(run_cluster: RunCluster, rmq: Rmq) -> None:
    cluster = run_cluster(brokers=2)
    cluster.create_topic("orders", queues=1)
    cluster.add_slave("broker-b")
    cluster.brokers["broker-b"].kill()
    ran = rmq("delete", "-n", cluster.address, "orders", "--yes")
    assert ran.status == 0
    assert "orders: broker-b had no master, and registers the topic again when it is back." in ran.err


@each_release
def test_a_broker_that_refuses_keeps_the_route(run_cluster: RunCluster, rmq: Rmq, release: str) -> None:
    cluster = run_cluster(release=release, brokers=2)
    cluster.create_topic("orders", queues=1)
    account = Account("ops", "secret", is_admin=True)
    cluster.brokers["broker-b"].accounts = AccountTable(account)
    ran = rmq("delete", "-n", cluster.address, "orders", "--yes")
    assert ran.status == 1
    assert "was not deleted from every broker, so the name servers keep its route" in ran.err
    assert cluster.name_servers[0].routes.route("orders") is not None


@each_release
@pytest.mark.parametrize(
    ("words", "right"),
    [
        (("delete", "orders", "--yes"), {"4.9": "an account with admin: true", "5.3": "Delete of the topic"}),
        (("create", "new"), {"4.9": "an account with admin: true", "5.3": "Get of the topic"}),
        (("stats", "orders"), {"5.3": "Get of the topic"}),
    ],
)
def test_a_right_that_the_account_lacks_is_named(
    run_cluster: RunCluster,
    rmq: Rmq,
    monkeypatch: pytest.MonkeyPatch,
    release: str,
    words: tuple[str, ...],
    right: dict[str, str],
) -> None:
    cluster = run_cluster(release=release)
    cluster.create_topic("orders", queues=1)
    cluster.broker.accounts = AccountTable(Account("reader", "secret-key", topics={"orders": "SUB"}))
    monkeypatch.setenv("RMQ_ACCESS_KEY", "reader")
    monkeypatch.setenv("RMQ_SECRET_KEY", "secret-key")
    name, *rest = words
    ran = rmq(name, "-n", cluster.address, *rest)
    if release not in right:
        assert ran.status == 0
        return
    assert ran.status == 1
    assert right[release] in ran.err.replace("\n", " ")
