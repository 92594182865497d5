"""A streaming query of ours and a Java consumer in one group of a live cluster: shares, mqadmin, resets, and turns."""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from compat_kit import our_stores
from compat_kit.clusters import NAMES, TwoBrokers
from compat_kit.members import AdminTool, Consumed, JavaMember, Member, Place, QueryMember
from compat_kit.rocketmq import Client, Java

import rmq_spark
from rmq_spark.store.disk.clock import wall_clock_ms

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.compat

QUEUES = 4  # of each broker
LIMIT_S = 180.0
CONF = our_stores.broker_conf() | {"flushConsumerOffsetInterval": 200}
Key = tuple[str, int, int]


class Cluster:
    """Two brokers, a Java client of them, and mqadmin."""

    def __init__(self, brokers: TwoBrokers, client: Client, admin: AdminTool, folder: Path) -> None:
        self.brokers, self.client, self.admin, self._folder = brokers, client, admin, folder

    def create(self, topic: str, group: str) -> None:
        """Create a topic, and a group's retry topic, of which consumers otherwise learn late."""
        self.client("create-topic", topic=topic, queues=QUEUES)
        self.client("create-topic", topic=f"%RETRY%{group}", queues=1)

    def send(self, topic: str, count: int) -> set[Key]:
        """Send this number of messages to each queue. Return their places."""
        rows = [
            {"body": b"%d" % number, "brokerName": name, "queueId": queue_id}
            for name in NAMES
            for queue_id in range(QUEUES)
            for number in range(count)
        ]
        sent = self.brokers.write("send_table", topic=topic, rows=rows, settings={})
        return {(row["brokerName"], row["queueId"], row["queueOffset"]) for row in sent}

    def java(self, topic: str, group: str, name: str = "java") -> JavaMember:
        """Return a Java consumer that was not started."""
        ledger = self._folder / f"{topic}-{name}.ledger"
        return JavaMember(self.brokers.java, self.brokers.address, ledger, group=group, topic=topic, name=name)

    def query(self, topic: str, group: str, name: str = "query", **options: str) -> QueryMember:
        """Return a query on Spark that was not started."""
        folder = self._folder / topic
        folder.mkdir(exist_ok=True)
        given = {"subscribe": topic, "consumerGroup": group, "groupFallback": "earliest", **options}
        return QueryMember(self.brokers.java, self.brokers.address, folder, given, name=name)

    def committed(self, topic: str, group: str) -> dict[Place, int]:
        """Return the committed offsets of a group, as consumerProgress shows them."""
        try:
            lines = self.admin("consumerProgress", "-g", group).splitlines()
        except RuntimeError as error:
            if "return offset table is empty" not in str(error):  # 4.9, before the first commit
                raise
            return {}
        rows = [line.split() for line in lines if line.startswith(f"{topic} ")]
        return {Place(row[1], int(row[2])): int(row[4]) for row in rows}


def until(holds: Callable[[], bool], *members: Member) -> None:
    """Wait until something holds. A query that has failed ends the wait."""
    give_up = time.monotonic() + LIMIT_S
    while not holds():
        for member in members:
            if isinstance(member, QueryMember):
                member.check()
        assert time.monotonic() < give_up, "does not happen"
        time.sleep(0.5)


def keys(consumed: Iterable[Consumed]) -> Counter[Key]:
    """Return how often messages were consumed."""
    return Counter((*one.place, one.offset) for one in consumed)


@pytest.fixture(scope="module")
def cluster(java: Java, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("group")
    with ExitStack() as stack:
        yield serve(stack, TwoBrokers(java, folder, **CONF), folder)


def serve(stack: ExitStack, brokers: TwoBrokers, folder: Path) -> Cluster:
    """Start two brokers, and what the tests need beside them, until the stack ends."""
    stack.enter_context(brokers)
    client, admin = stack.enter_context(brokers.client()), stack.enter_context(AdminTool(brokers.java, brokers.address))
    return Cluster(brokers, client, admin, folder)


def share_out(cluster: Cluster, topic: str, group: str, theirs: JavaMember, ours: QueryMember) -> dict[str, str]:
    """Wait until mqadmin shows that a consumer and a query share the queues. Return the ids of members by language."""

    def is_shared() -> bool:
        members = {one.language: one.client_id for one in cluster.admin.connections(group)}
        if sorted(members) != ["JAVA", "PYTHON"]:
            return False
        shares = [cluster.admin.queues(group, one, topic) for one in members.values()]
        return [len(share) for share in shares] == [QUEUES, QUEUES] and not shares[0] & shares[1]

    until(is_shared, theirs, ours)
    return {one.language: one.client_id for one in cluster.admin.connections(group)}


def sections(text: str) -> dict[str, list[str]]:
    """Return the lines of each section of consumerStatus, by the section's title."""
    found: dict[str, list[str]] = {}
    title = ""
    for line in text.splitlines():
        if line.startswith("#Consumer") and line.endswith("#"):
            title = line
            found[title] = []
        elif line.strip() and title and not line.startswith("#"):
            found[title].append(line)
    return found


@pytest.mark.release("4.9.7")
def test_query_and_java_consumer_share_the_queues_and_look_alike_in_mqadmin(cluster: Cluster) -> None:
    topic, group = "shared", "shared-group"
    cluster.create(topic, group)
    sent = cluster.send(topic, 20)
    with cluster.java(topic, group) as theirs, cluster.query(topic, group) as ours:
        until(lambda: keys(theirs.consumed()).keys() | keys(ours.consumed()).keys() == sent, ours)
        members = share_out(cluster, topic, group, theirs, ours)
        # The offsets of both are published, so that nothing is consumed twice from here on.
        _await_commits(cluster, topic, group, 20, ours)

        more = cluster.send(topic, 20)
        until(lambda: (keys(theirs.consumed()) + keys(ours.consumed())).keys() == sent | more, ours)
        again = keys(theirs.consumed()) + keys(ours.consumed())
        assert {key: count for key, count in again.items() if key in more and count != 1} == {}
        for member, name in ((theirs, "JAVA"), (ours, "PYTHON")):
            shared = cluster.admin.queues(group, members[name], topic)
            assert {Place(*key[:2]) for key in keys(member.consumed()) if key in more} == shared
        _await_commits(cluster, topic, group, 40, ours)

        status = cluster.admin("consumerStatus", "-g", group)
        assert "Same subscription in the same group of consumer" in status
        assert "Rebalance OK" in status
        texts = {name: cluster.admin("consumerStatus", "-g", group, "-i", members[name]) for name in members}
        java, python = sections(texts["JAVA"]), sections(texts["PYTHON"])
        assert python["#Consumer Subscription#"] == java["#Consumer Subscription#"]
        known = {line.split(":")[0] for line in java["#Consumer Properties#"]}
        assert {line.split(":")[0] for line in python["#Consumer Properties#"]} <= known
        offsets = [line.split() for line in (*java["#Consumer Offset#"], *python["#Consumer Offset#"])]
        assert sorted(row[1:] for row in offsets if row[0] == topic) == [
            [name, str(queue_id), "40"] for name in NAMES for queue_id in range(QUEUES)
        ]
        progress = cluster.admin("consumerProgress", "-g", group, "-s", "true")
        assert sum(line.startswith(f"{topic} ") and "N/A" not in line for line in progress.splitlines()) == 2 * QUEUES
        assert "#rmq-spark#query#" in members["PYTHON"]
    until(lambda: cluster.admin.connections(group) == [])


def test_reset_by_mqadmin_moves_a_query_that_runs_and_one_that_is_stopped(cluster: Cluster) -> None:
    topic, group = "reset", "reset-group"
    cluster.create(topic, group)
    first = cluster.send(topic, 10)
    time.sleep(1.5)  # 4.9 finds a neighbour of the time
    middle_ms = wall_clock_ms()
    time.sleep(1.5)
    sent = first | cluster.send(topic, 10)
    ours = cluster.query(topic, group)
    with ours:
        until(lambda: keys(ours.consumed()) == Counter(sent), ours)
        _await_commits(cluster, topic, group, 20, ours)
        expected = Counter(sent) + _follow(cluster, topic, group, middle_ms, ours)
        assert keys(ours.consumed()) == expected
        _await_commits(cluster, topic, group, 20, ours)
        # A query that is stopped does not tell a reset to the begin of its last batch, or to what it published then.
        for end in (21, 22):
            expected += Counter(cluster.send(topic, 1))
            _await_rows(ours, expected)
            _await_commits(cluster, topic, group, end, ours)
    until(lambda: cluster.admin.connections(group) == [])
    targets = cluster.admin.reset(group, topic, middle_ms)
    with ours:
        expected += _from(targets, 22)
        until(lambda: keys(ours.consumed()).total() >= expected.total(), ours)
        _await_commits(cluster, topic, group, 22, ours)
        assert keys(ours.consumed()) == expected
        sent = cluster.send(topic, 1)
        until(lambda: keys(ours.consumed()).total() >= expected.total() + len(sent), ours)
        assert keys(ours.consumed()) == expected + Counter(sent)


def _await_rows(ours: QueryMember, expected: Counter[Key]) -> None:
    until(lambda: keys(ours.consumed()) == expected, ours)


def _await_commits(cluster: Cluster, topic: str, group: str, end: int, *members: Member) -> None:
    """Wait until the group has committed the ends of all queues."""
    wanted = {Place(name, queue_id): end for name in NAMES for queue_id in range(QUEUES)}
    until(lambda: cluster.committed(topic, group) == wanted, *members)


def _follow(cluster: Cluster, topic: str, group: str, time_ms: int, ours: QueryMember) -> Counter[Key]:
    """Reset a query that runs, and wait until it has read on. Return the messages that it must have read again."""
    before = len(ours.consumed())
    again = _from(cluster.admin.reset(group, topic, time_ms), 20)
    until(lambda: len(ours.consumed()) >= before + again.total(), ours)
    rows = [(*one.place, one.offset) for one in ours.consumed()[before:]]
    assert Counter(rows) == again, "the next rows are those after the reset"
    return again


def _from(targets: Mapping[Place, int], end: int) -> Counter[Key]:
    assert len(targets) == 2 * QUEUES
    assert set(targets.values()) <= {9, 10}
    return Counter((*place, offset) for place, target in targets.items() for offset in range(target, end))


@pytest.mark.release("5.3.3")
def test_java_consumer_query_and_queries_of_the_directories_take_turns(
    spark: "SparkSession", java: Java, tmp_path: Path
) -> None:
    topic, group = "turns", "turns-group"
    found: dict[str, Counter[Key]] = {}
    sent: dict[str, set[Key]] = {}
    brokers = TwoBrokers(java, tmp_path, **CONF)

    with ExitStack() as stack:
        cluster = serve(stack, brokers, tmp_path)
        cluster.create(topic, group)
        sent["java"] = cluster.send(topic, 10)
        found["java"] = _take(cluster, cluster.java(topic, group), topic, group, 10)
        sent["query"] = cluster.send(topic, 10)
        found["query"] = _take(cluster, cluster.query(topic, group), topic, group, 20)
        sent["directories"] = cluster.send(topic, 10)
    found["directories"] = Counter[Key]()
    for name in NAMES:
        found["directories"] += _read_directory(spark, tmp_path, topic, group, name)
        offsets = rmq_spark.group_offsets(str(tmp_path / name), group)[topic]
        assert offsets == dict.fromkeys(range(QUEUES), 30)
    with ExitStack() as stack:
        cluster = serve(stack, brokers, tmp_path)
        assert cluster.committed(topic, group) == {Place(n, queue): 30 for n in NAMES for queue in range(QUEUES)}
        sent["query again"] = cluster.send(topic, 10)
        # Its checkpoint is at 20.
        found["query again"] = _take(cluster, cluster.query(topic, group), topic, group, 40) - found["query"]
        sent["java again"] = cluster.send(topic, 10)
        found["java again"] = _take(cluster, cluster.java(topic, group, "again"), topic, group, 50)
    assert found == {turn: Counter(places) for turn, places in sent.items()}


def _take(cluster: Cluster, member: Member, topic: str, group: str, end: int) -> Counter[Key]:
    """Let a member read to the ends of the queues and commit them. Return what it has consumed, in all its lives."""
    with member:
        _await_commits(cluster, topic, group, end, member)
    until(lambda: cluster.admin.connections(group) == [])
    return keys(member.consumed())


def _read_directory(spark: "SparkSession", folder: Path, topic: str, group: str, broker: str) -> Counter[Key]:
    """Let a query read a broker's directory to the end as the group. Return what it reads."""
    rows: Counter[Key] = Counter()

    def note(batch: "DataFrame", _: int) -> None:
        rows.update((broker, row.queueId, row.queueOffset) for row in batch.collect())

    reader = spark.readStream.format("rmq").options(subscribe=topic, consumerGroup=group, startingOffsets="group")
    writer = reader.option("commitOffsets", "required").load(str(folder / broker)).writeStream.foreachBatch(note)
    query = writer.option("checkpointLocation", str(folder / f"{broker}-checkpoint")).start()
    try:
        query.processAllAvailable()
    finally:
        query.stop()
    give_up = time.monotonic() + LIMIT_S
    while any(offset < 30 for offset in rmq_spark.group_offsets(str(folder / broker), group)[topic].values()):
        assert time.monotonic() < give_up
        time.sleep(0.2)
    return rows
