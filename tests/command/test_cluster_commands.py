"""`rmq topics`, `queues`, `count`, `cat` and `get` with `--name-server`: what they print of a cluster."""

import json
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import rmq_spark
from rmq_spark.store.testing.brokers import RELEASES, RunningCluster

Rmq = Callable[..., Any]
Process = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture(scope="module", params=sorted(RELEASES))
def cluster(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCluster]:
    """Two brokers with two queues each: six messages one after another, at the brokers alternately."""
    with RunningCluster(Path(tmp_path_factory.mktemp("cluster")), release=request.param, brokers=2) as cluster:
        cluster.create_topic("orders", queues=2)
        cluster.create_topic("returns", queues=1, brokers=["broker-a"])
        cluster.create_topic("news", queues=1)
        for number in range(6):
            cluster.send(
                "orders",
                f"body {number}",
                broker=("broker-b", "broker-a")[number % 2],
                queue_id=number % 2,
                tags=("paid", "sent")[number % 2],
                keys=f"k{number}",
            )
            time.sleep(0.002)  # so that store times differ
        yield cluster


@pytest.fixture
def rmq_n(rmq: Rmq, cluster: RunningCluster) -> Rmq:
    """A function that runs a command with the cluster's name server."""
    return lambda name, *words: rmq(name, "-n", cluster.address, *words)


def test_topics_of_a_cluster(rmq_n: Rmq) -> None:
    ran = rmq_n("topics")
    assert ran.status == 0
    assert [line.split() for line in ran.out.splitlines()] == [
        ["topic", "brokers", "queues", "messages"],
        ["news", "2", "2", "0"],
        ["orders", "2", "4", "6"],
        ["returns", "1", "1", "0"],
    ]
    assert ran.err == ""
    rows = {row["topic"]: row for row in rmq_n("topics", "--all", "--json").rows}
    assert rows["orders"] == {"topic": "orders", "isSystem": False, "brokers": 2, "queues": 4, "messages": 6}
    assert rows["SCHEDULE_TOPIC_XXXX"]["isSystem"]


def test_queues_of_a_cluster(rmq_n: Rmq) -> None:
    rows = rmq_n("queues", "orders", "--json").rows
    assert [
        (row["brokerName"], row["queueId"], row["minOffset"], row["maxOffset"], row["messages"]) for row in rows
    ] == [*(("broker-a", 0, 0, 0, 0), ("broker-a", 1, 0, 3, 3), ("broker-b", 0, 0, 3, 3), ("broker-b", 1, 0, 0, 0))]
    assert rmq_n("queues", "--json").rows == rows[1:3], "without TOPIC those that contain messages"
    head, line, *_ = rmq_n("queues", "orders").out.splitlines()
    assert head.split() == ["topic", "brokerName", "queueId", "minOffset", "maxOffset", "messages"]
    assert line.split() == ["orders", "broker-a", "0", "0", "0", "0"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ((), [("orders", 4, 6)]),
        (("orders", "returns"), [("orders", 4, 6), ("returns", 1, 0)]),
        (("orders", "--tags", "paid"), [("orders", 4, 3)]),
        (("orders", "--sql92", "TAGS = 'sent'", "--queue", "broker-b:0"), [("orders", 1, 0)]),
        (("orders", "--queue", "broker-a:1"), [("orders", 1, 3)]),
        (("orders", "--queue", "0"), [("orders", 2, 3)]),
        (("orders", "--to", "now-1h"), [("orders", 4, 0)]),
        (("orders", "--from", "now-1h"), [("orders", 4, 6)]),
    ],
)
def test_count_of_a_cluster(rmq_n: Rmq, words: tuple[str, ...], expected: list[tuple[str, int, int]]) -> None:
    ran = rmq_n("count", *words, "--json")
    assert (ran.status, ran.err) == (0, "")
    assert [(row["topic"], row["queues"], row["messages"]) for row in ran.rows] == expected


def test_count_by_bounds_pulls_no_message(rmq_n: Rmq, cluster: RunningCluster) -> None:
    rmq_n("count", "orders")
    cluster.clear_requests()
    assert rmq_n("count", "orders").out.split()[-3:] == ["orders", "4", "6"]
    assert not any(11 in counts for counts in cluster.clear_requests().values()), "PULL_MESSAGE"


def test_cat_of_a_cluster_is_ordered_by_store_time(rmq_n: Rmq) -> None:
    lines = rmq_n("cat", "orders").out.splitlines()
    assert [line.split("  ")[1:] for line in lines] == [
        ["orders/broker-b:0@0", "paid", "k0", "body 0"],
        ["orders/broker-a:1@0", "sent", "k1", "body 1"],
        ["orders/broker-b:0@1", "paid", "k2", "body 2"],
        ["orders/broker-a:1@1", "sent", "k3", "body 3"],
        ["orders/broker-b:0@2", "paid", "k4", "body 4"],
        ["orders/broker-a:1@2", "sent", "k5", "body 5"],
    ]


def test_cat_of_a_cluster_has_the_name_of_the_broker(rmq_n: Rmq, tmp_path: Path) -> None:
    row = rmq_n("cat", "orders", "--limit", 1, "--json").rows[0]
    assert list(row)[:4] == ["topic", "brokerName", "queueId", "queueOffset"]
    assert row["brokerName"] == "broker-b"
    assert rmq_n("cat", "orders", "-n", 1, "--columns", "brokerName,body").out == "broker-b\tbody 0\n"
    assert list(rmq_n("cat", "orders", "-n1", "--columns", "*", "--json").rows[0]) == [
        *rmq_spark.COLUMNS,
        "brokerName",
    ]
    rmq_n("cat", "returns", "--format", "arrow", "--output", tmp_path / "empty")
    assert "brokerName" in pa.ipc.open_stream(tmp_path / "empty").schema.names


@pytest.mark.parametrize(
    ("words", "bodies"),
    [
        (("--last", "3"), [3, 4, 5]),
        (("--last", "2", "--tags", "paid"), [2, 4]),
        (("--queue", "broker-b:0", "--offset", "1"), [2, 4]),
        (("--queue", "1"), [1, 3, 5]),
        (("--sql92", "KEYS = 'k3'"), [3]),
        (("--to", "now-1h"), []),
        (("-n", "2"), [0, 1]),
    ],
)
def test_cat_of_a_cluster_chooses(rmq_n: Rmq, words: tuple[str, ...], bodies: list[int]) -> None:
    rows = rmq_n("cat", "orders", *words, "--json").rows
    assert [row["body"] for row in rows] == [f"body {number}" for number in bodies]


def test_cat_of_a_cluster_begins_and_ends_at_times(rmq_n: Rmq) -> None:
    every = rmq_n("cat", "orders", "--json").rows
    moment = every[3]["storeTimestamp"]
    assert rmq_n("cat", "orders", "--from", moment, "--json").rows == every[3:]
    assert rmq_n("cat", "orders", "--to", moment, "--json").rows == every[:3]


def test_get_of_a_cluster_by_offset(rmq_n: Rmq) -> None:
    words = ("get", "--topic", "orders", "--queue", "broker-b:0", "--offset")
    ran = rmq_n(*words, 1)
    assert ran.status == 0
    assert "in orders/broker-b:0, queue offset 1, physical offset" in ran.out
    assert ran.out.endswith("body, 6 B of text:\nbody 2\n")
    (row,) = rmq_n(*words, 1, "--json").rows
    assert (row["brokerName"], row["queueOffset"], row["body"]) == ("broker-b", 1, "body 2")
    ran = rmq_n(*words, 3)
    assert (ran.status, ran.out) == (3, "")
    assert "orders/broker-b:0 contains the queue offsets [0, 3)" in ran.err


@pytest.mark.parametrize("name", ["0", "broker-c:0", "broker-a:7"])
def test_get_of_a_cluster_needs_one_queue(rmq_n: Rmq, name: str) -> None:
    ran = rmq_n("get", "--topic", "orders", "--queue", name, "--offset", 0)
    assert ran.status == 2
    assert f"--queue {name} {'names several queues' if name == '0' else 'does not exist'} in topic orders" in ran.err
    assert "Its queues: broker-a:0, broker-a:1, broker-b:0, broker-b:1." in ran.err


def test_cat_follows_a_cluster(process: Process, cluster: RunningCluster) -> None:
    words = ("--follow", "--last", 0, "--columns", "body,brokerName")
    for broker in cluster.brokers:
        cluster.send("news", "old", broker=broker)
    cluster.clear_requests()
    started = process("cat", "-n", cluster.address, "news", *words)
    assert started.stdout is not None
    while not all(broker.seen_requests(11) for broker in cluster.brokers.values()):
        time.sleep(0.01)  # until the brokers hold its pulls
        assert started.poll() is None
    for number in range(3):
        for broker in cluster.brokers:
            cluster.send("news", f"new {number}", broker=broker)
            assert started.stdout.readline() == f"new {number}\t{broker}\n".encode()
    started.send_signal(signal.SIGINT)
    out, err = started.communicate(timeout=60)
    assert (started.returncode, out, err) == (130, b"", b"")


def test_cat_follows_a_cluster_as_json_until_its_limit(process: Process, cluster: RunningCluster) -> None:
    started = process("cat", "-n", cluster.address, "orders", "--follow", "--json", "--limit", 4)
    out, err = started.communicate(timeout=60)
    assert (started.returncode, err) == (0, b"")
    assert [json.loads(line)["body"] for line in out.splitlines()] == [f"body {number}" for number in range(4)]


def test_get_of_a_cluster_by_key_and_id(rmq_n: Rmq) -> None:
    (row,) = rmq_n("get", "--key", "k3", "--json").rows
    assert (row["brokerName"], row["queueId"], row["body"]) == ("broker-a", 1, "body 3")
    assert rmq_n("get", "--key", "k3", "--topic", "orders", "--json").rows == [row]
    assert rmq_n("get", "--id", row["msgId"], "--json").rows == [row]
    assert "in orders/broker-a:1, queue offset 1" in rmq_n("get", "--id", row["msgId"], "--topic", "orders").out
    assert rmq_n("get", "--key", "k3", "--topic", "returns", "--json").status == 3
    ran = rmq_n("get", "--key", "absent")
    assert (ran.status, ran.out, ran.err) == (3, "", "No message found.\n")
