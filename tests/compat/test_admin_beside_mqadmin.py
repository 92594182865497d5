"""`rmq` and mqadmin about the same cluster: brokers, routes, statistics, members, and changes of topics."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from compat_kit.clusters import NAMES, TwoBrokers
from compat_kit.members import AdminTool, Connection, JavaMember
from compat_kit.rocketmq import Client, Java
from compat_kit.their_lives import CONF

from rmq_spark.store.testing.backend_groups import eventually

pytestmark = pytest.mark.compat

TOPIC, GROUP, QUEUES, MESSAGES = "administered", "billing", 2, 12
# A look runs commands, so 300 looks take minutes. A broker adds its statistics up every 10 s, and the tool shows them
# when it has two sums.
_LIMIT_S = 3
Rows = list[dict[str, Any]]


class Served:
    """Two brokers with messages and a group, mqadmin, and our command."""

    def __init__(self, cluster: TwoBrokers, mqadmin: AdminTool) -> None:
        self.cluster, self.mqadmin = cluster, mqadmin

    def rmq(self, *words: object) -> "subprocess.CompletedProcess[str]":
        """Run our command beside the cluster."""
        name, *rest = map(str, words)
        module = [sys.executable, "-P", "-m", "rmq_spark.command"]
        command = [*self.cluster.java.network.prefix, *module, name, "-n", self.cluster.address, *rest]
        return subprocess.run(command, env=os.environ, capture_output=True, text=True, check=False)

    def rows(self, *words: object) -> Rows:
        """Return the output of our command."""
        done = self.rmq(*words, "--json")
        assert done.returncode == 0, done.stderr
        found: Rows = json.loads(done.stdout)
        return found

    def table(self, *words: str) -> list[list[str]]:
        """Return the lines that mqadmin prints, without its head, as words."""
        lines = [line for line in self.mqadmin(*words).splitlines() if line.strip() and not line.startswith("#")]
        return [line.split() for line in lines]

    def route(self, topic: str) -> dict[str, Any]:
        """Return the route of a topic that mqadmin shows, {} if it finds none."""
        try:
            text = self.mqadmin("topicRoute", "-t", topic)
        except RuntimeError as error:
            if "No topic route info" not in str(error):
                raise
            return {}
        found: dict[str, Any] = json.loads(re.sub(r"([{,]\s*)(\d+):", r'\1"\2":', text[text.index("{") :]))
        return found


@pytest.fixture(scope="module")
def served(java: Java, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with ExitStack() as stack:
        folder = tmp_path_factory.mktemp(f"beside-{java.version}")
        cluster = stack.enter_context(TwoBrokers(java, folder, **CONF))
        client: Client = stack.enter_context(cluster.client())
        mqadmin = stack.enter_context(AdminTool(java, cluster.address))
        client("create-topic", topic=TOPIC, queues=QUEUES)
        for number in range(MESSAGES):
            client("produce", topic=TOPIC, text=f"m{number}")
        client("pull", topic=TOPIC, group=GROUP, commit=True)
        yield Served(cluster, mqadmin)


def await_equal(look: Callable[[], tuple[object, object]]) -> None:
    """Look until ours and theirs are equal: what both of them show moves on every few seconds."""
    seen: list[tuple[object, object]] = []

    def is_equal() -> bool:
        seen.append(look())
        return seen[-1][0] == seen[-1][1]

    assert eventually(is_equal, _LIMIT_S), seen[-1]


def _plain(version: str) -> str:
    """Return a version as we print it: 5.3.3 for V5_3_3."""
    return version.removeprefix("V").replace("_", ".")


def test_brokers_are_those_of_cluster_list(served: Served, java: Java) -> None:
    def words_of(line: list[str]) -> tuple[str, int, str, str]:
        return line[1], int(line[2]), line[3], _plain(line[4])

    theirs = {words_of(line) for line in served.table("clusterList")}
    ours = served.rows("brokers")
    assert {(row["brokerName"], row["brokerId"], row["address"], row["version"]) for row in ours} == theirs
    assert [row["brokerName"] for row in ours] == list(NAMES)
    assert all(row["inToday"] is not None for row in ours)
    assert all(row["bootTimestamp"] for row in ours)
    # A broker of 4.9 does not tell the time of its first message while its log is small.
    assert all(row["earliestTimestamp"] for row in ours) or not java.is_5


def test_topics_are_those_of_topic_list(served: Served) -> None:
    theirs = {line[0] for line in served.table("topicList")}
    own = {*NAMES, "compat", "DefaultCluster"}
    assert {row["topic"] for row in served.rows("topics", "--all")} | own == theirs | own


def test_the_route_is_that_of_topic_route(served: Served) -> None:
    theirs = served.route(TOPIC)
    addresses = {one["brokerName"]: one["brokerAddrs"]["0"] for one in theirs["brokerDatas"]}
    assert {
        (row["brokerName"], row["perm"], row["readQueues"], row["writeQueues"], row["master"])
        for row in served.rows("route", TOPIC)
    } == {
        (name, {4: "r", 2: "w", 6: "rw"}[one["perm"]], one["readQueueNums"], one["writeQueueNums"], addresses[name])
        for one in theirs["queueDatas"]
        for name in (one["brokerName"],)
    }


def test_queues_are_those_of_topic_status(served: Served) -> None:
    theirs = {tuple(line[:4]) for line in served.table("topicStatus", "-t", TOPIC) if line[0] in NAMES}
    names = ("brokerName", "queueId", "minOffset", "maxOffset")
    assert {tuple(str(row[name]) for name in names) for row in served.rows("queues", TOPIC)} == theirs
    assert len(theirs) == 2 * QUEUES


def test_stats_are_those_of_stats_all(served: Served) -> None:
    def look() -> tuple[object, object]:
        lines = [line for line in served.table("statsAll", "-t", TOPIC) if line[0] == TOPIC]
        theirs = {(line[1], int(line[2]), int(line[5]), int(line[6])) for line in lines}
        rows = served.rows("stats", TOPIC)
        ours = {(row["group"], row["lagMessages"], row["inDay"], row["outDay"]) for row in rows}
        return ours, theirs if any(line[2] > 0 for line in theirs) else None

    await_equal(look)
    # A broker tells no rate of 10 s before it has run for 10 s.
    names = ("inRate", "outRate")
    await_equal(lambda: ({float}, {type(row[name]) for row in served.rows("brokers") for name in names}))


def test_members_are_those_of_consumer_connection(served: Served, java: Java, tmp_path: Path) -> None:
    assert served.rows("members", GROUP) == []
    assert served.mqadmin.connections(GROUP) == []
    ledger, address = tmp_path / "ledger", served.cluster.address
    with JavaMember(java, address, ledger, group=GROUP, topic=TOPIC, name="member") as member:

        def look() -> tuple[object, object]:
            rows = served.rows("members", GROUP)
            ours = [Connection(row["member"], row["language"], row["version"]) for row in rows]
            theirs = [replace(one, version=_plain(one.version)) for one in served.mqadmin.connections(GROUP)]
            return ours, theirs if member.client_id in {one.client_id for one in theirs} else None

        await_equal(look)
    await_equal(lambda: (served.rows("members", GROUP), []))


def test_a_topic_that_we_create_alter_and_delete_is_so_in_mqadmin(served: Served) -> None:
    assert served.rmq("create", "made", "--queues", 3, "--broker", NAMES[0]).returncode == 0
    (queues,) = served.route("made")["queueDatas"]
    assert (queues["brokerName"], queues["readQueueNums"], queues["perm"]) == (NAMES[0], 3, 6)
    (row,) = served.rows("create", "made", "--broker", NAMES[0], "--alter", "--perm", "r", "--read-queues", 5)
    assert (row["change"], row["readQueues"], row["writeQueues"], row["perm"]) == ("altered", 5, 3, "r")

    def look() -> tuple[object, object]:
        (queues,) = served.route("made")["queueDatas"]
        return (5, 3, 4), (queues["readQueueNums"], queues["writeQueueNums"], queues["perm"])

    await_equal(look)
    (row,) = served.rows("delete", "made", "--yes")
    assert (row["brokers"], len(row["nameServers"])) == ([NAMES[0]], 2)
    assert served.route("made") == {}
    assert "no name server lists it" in served.rmq("delete", "made", "--yes").stderr


def test_a_topic_of_update_topic_can_be_altered_and_deleted(served: Served, java: Java) -> None:
    served.mqadmin("updateTopic", "-c", served.rows("brokers")[0]["cluster"], "-t", "theirs", "-r", "6", "-w", "4")
    rows = served.rows("create", "theirs", "--alter", "--write-queues", 2)
    assert [(row["change"], row["readQueues"], row["writeQueues"]) for row in rows] == [("altered", 6, 2)] * 2
    attributes = served.rmq("create", "typed", "--attribute", "message.type=FIFO")
    assert attributes.returncode == (0 if java.is_5 else 1), attributes.stderr
    for topic in ("theirs", "typed") if java.is_5 else ("theirs",):
        assert served.rmq("delete", topic, "--yes").returncode == 0
        assert served.route(topic) == {}
    refused = served.rmq("delete", "TBW102", "--yes")
    assert "it is a topic of RocketMQ itself" in refused.stderr
