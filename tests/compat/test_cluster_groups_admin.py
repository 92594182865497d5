"""Groups of a live cluster that we look at and reset, while Java consumers are their members and while nobody is.

A Java consumer consumes and commits, we compare the lag with what a Java client says, and after each reset a Java
consumer gets the messages from the new offsets on.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from compat_kit import secured
from compat_kit.clusters import NAMES, TwoBrokers, run_reader
from compat_kit.deliveries import Delivery, begin_push, finish_push
from compat_kit.rocketmq import Client, Java
from compat_kit.secured import READ, RESET_GROUP, SECRET, SecuredBroker
from compat_kit.their_lives import CONF

from rmq_spark.store.disk.clock import wall_clock_ms

pytestmark = pytest.mark.compat

TOPIC, QUEUES = "administered", 2
EARLY, LATE = 24, 12  # messages before and after a pause
MESSAGES = EARLY + LATE
_TIMEOUT_MS = 180_000  # a Java consumer pauses for up to 30 s after a reset


class Served:
    """A cluster of two brokers with messages, a Java client of it, and two for consumers that run side by side."""

    def __init__(self, cluster: TwoBrokers, client: Client, others: tuple[Client, Client]) -> None:
        self.cluster, self.client, self._others = cluster, client, others
        client("create-topic", topic=TOPIC, queues=QUEUES)
        for number in range(EARLY):
            client("produce", topic=TOPIC, text=f"m{number}", tags="a")
        time.sleep(2)
        self.late_ms = wall_clock_ms()
        time.sleep(1)
        for number in range(LATE):
            client("produce", topic=TOPIC, text=f"late {number}", tags="b")

    def ask(self, *calls: tuple[str, dict[str, Any]]) -> list[Any]:
        """Return what functions of rmq_spark return, or the texts of their errors."""
        found: list[Any] = self.cluster.read("administrate", calls=list(calls))
        return found

    def reset(self, group: str, to: Any, **given: Any) -> dict[str, dict[str, int]]:
        """Reset a group, and return the new offsets."""
        (found,) = self.ask(("reset_offsets", {"group": group, "to": to, **given}))
        assert isinstance(found, dict), found
        return found

    def committed_by_java(self, group: str) -> Counter[tuple[int, int, int]]:
        """Return queue id, committed and max offset of each queue as a Java client reads them."""
        lines = self.client("offsets", topic=TOPIC, group=group)
        return Counter((line["queueId"], line["committed"], line["max"]) for line in lines if line["event"] == "group")

    def begin(self, counts: Mapping[str, int]) -> Callable[[], dict[str, list[Delivery]]]:
        """Begin a Java push consumer of each group, which ends when it has this many messages. Return how to wait."""
        begun = dict(zip(counts, self._others, strict=False))
        for group, client in begun.items():
            begin_push(client, TOPIC, group, counts[group], timeout_ms=_TIMEOUT_MS)
        return lambda: {group: finish_push(client) for group, client in begun.items()}

    def consume(self, counts: Mapping[str, int]) -> dict[str, list[Delivery]]:
        """Return what Java push consumers of the groups get until each has this many messages."""
        return self.begin(counts)()

    def ends(self) -> dict[str, int]:
        """Return the end of each queue."""
        (rows,) = self.ask(("group_lag", {"group": "filled"}))
        return {f"{row['brokerName']}:{row['queueId']}": row["maxOffset"] for row in rows}


@pytest.fixture(scope="module")
def served(java: Java, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp(f"administered-{java.version}")
    with ExitStack() as stack:
        cluster = stack.enter_context(TwoBrokers(java, folder, **CONF))
        client, one, other = (stack.enter_context(cluster.client()) for _ in range(3))
        served = Served(cluster, client, (one, other))
        client("pull", topic=TOPIC, group="filled", commit=True)
        yield served


def places(deliveries: list[Delivery]) -> Counter[tuple[str, int]]:
    """Return how often each message was delivered, by queue and queue offset."""
    return Counter((f"{one.broker}:{one.queue_id}", one.queue_offset) for one in deliveries)


def from_offsets(begins: dict[str, int], ends: dict[str, int]) -> Counter[tuple[str, int]]:
    """Return each message of queues from given offsets on, once."""
    return Counter((queue, offset) for queue, begin in begins.items() for offset in range(begin, ends[queue]))


def test_lag_is_what_a_java_consumer_left(served: Served) -> None:
    served.client("pull", topic=TOPIC, group="pulled", commit=True)
    assert places(served.consume({"pushed": MESSAGES})["pushed"]).total() == MESSAGES
    for group in ("pulled", "pushed"):
        (lag,) = served.ask(("await_lag", {"group": group}))
        rows = [row for row in lag if row["topic"] == TOPIC]
        assert len(rows) == QUEUES * len(NAMES)
        assert Counter((row["queueId"], row["groupOffset"], row["maxOffset"]) for row in rows) == (
            served.committed_by_java(group)
        )
        for row in rows:
            assert (row["state"], row["lagMessages"], row["lagBytes"], row["secondsBehind"]) == ("ok", 0, 0, 0.0)
            assert row["lastConsumedTimestamp"] > datetime.fromtimestamp(served.late_ms / 1000, UTC)
    names, offsets = served.ask(("groups", {}), ("group_offsets", {"group": "pushed"}))
    assert {"pulled", "pushed", "filled"} <= set(names)
    assert offsets[TOPIC] == served.ends()


def test_lag_after_a_reset_is_what_is_unread(served: Served) -> None:
    served.client("pull", topic=TOPIC, group="behind", commit=True)
    to = dict.fromkeys(served.ends(), 2)
    assert served.reset("behind", {TOPIC: to}) == {TOPIC: to}
    (lag,) = served.ask(("group_lag", {"group": "behind"}))
    rows = [row for row in lag if row["topic"] == TOPIC]
    assert sum(row["lagMessages"] for row in rows) == MESSAGES - 2 * len(to)
    for row in rows:
        assert 100 < row["lagBytes"] / row["lagMessages"] < 1000
        assert 0 < row["secondsBehind"] < 3600
    assert served.committed_by_java("behind") == Counter((row["queueId"], 2, row["maxOffset"]) for row in rows)


def test_resets_without_members_move_where_java_consumers_begin(served: Served) -> None:
    ends = served.ends()
    groups = ("idle", "fresh")  # one has consumed, and the other one is new to the brokers
    assert places(served.consume({"idle": MESSAGES})["idle"]).total() == MESSAGES
    half = {queue: end // 2 for queue, end in ends.items()}
    for group in groups:
        assert served.reset(group, {TOPIC: half}) == {TOPIC: half}
    expected = from_offsets(half, ends)
    for found in served.consume(dict.fromkeys(groups, expected.total())).values():
        assert places(found) == expected
    late, again = (served.reset(group, served.late_ms, topics=TOPIC)[TOPIC] for group in groups)
    assert again == late
    for found in served.consume(dict.fromkeys(groups, LATE)).values():
        assert {one.tags for one in found} == {"b"}
        assert places(found) == from_offsets(late, ends)
    begins = dict.fromkeys(ends, 0)
    for group in groups:
        assert served.reset(group, "latest", topics=[TOPIC]) == {TOPIC: ends}
        assert served.reset(group, "earliest", topics=[TOPIC]) == {TOPIC: begins}
    for found in served.consume(dict.fromkeys(groups, MESSAGES)).values():
        assert places(found) == from_offsets(begins, ends)


def test_resets_of_all_queues_and_of_one_move_running_java_consumers(served: Served) -> None:
    ends = served.ends()
    queue, begins = f"{NAMES[1]}:1", dict.fromkeys(ends, 0)
    begin = ends[queue] // 2
    finish = served.begin({"running": 2 * MESSAGES, "partly": MESSAGES + ends[queue] - begin})
    served.ask(("await_lag", {"group": "running"}), ("await_lag", {"group": "partly"}))
    (members,) = served.ask(("group_members", {"group": "running"}))
    (member,) = members
    assert (member["language"], member["version"]) == ("JAVA", served.cluster.java.version)
    assert (member["consumeType"], member["messageModel"]) == ("CONSUME_PASSIVELY", "CLUSTERING")
    assert (member["subscription"], member["brokers"]) == (f"{TOPIC}: *", list(NAMES))
    assert served.reset("running", "earliest") == {TOPIC: begins}
    assert served.reset("partly", {TOPIC: {queue: begin}}) == {TOPIC: {queue: begin}}
    found = {group: places(deliveries) for group, deliveries in finish().items()}
    everything = from_offsets(begins, ends)
    assert found["running"].keys() == everything.keys()
    assert set(found["running"].values()) == {2}
    assert found["partly"] == everything + from_offsets({queue: begin}, ends), "only that queue moves"
    (lag,) = served.ask(("await_lag", {"group": "running"}))
    assert {row["lagMessages"] for row in lag} == {0}


def test_unknown_groups_and_offsets_are_refused(served: Served) -> None:
    lag, reset, beyond = served.ask(
        ("group_lag", {"group": "nobody"}),
        ("reset_offsets", {"group": "nobody", "to": "latest"}),
        ("reset_offsets", {"group": "filled", "to": {TOPIC: {f"{NAMES[0]}:0": 1 << 40}}}),
    )
    assert lag.startswith('NotFoundError: no consumer group "nobody"')
    assert reset.startswith('NotFoundError: no consumer group "nobody"')
    assert beyond.startswith(f"OffsetRangeError: queue {TOPIC}/{NAMES[0]}:0 holds")


@pytest.fixture(scope="module")
def guarded(java: Java, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecuredBroker]:
    """A broker that checks accounts, with the accounts of `secured.RIGHTS`."""
    found = secured.with_accounts(java, tmp_path_factory.mktemp(f"guarded-{java.version}"))
    with found.broker:
        if java.is_5:
            users = dict.fromkeys(secured.RIGHTS, SECRET)
            found.call("create_users", broker=found.address, keys=secured.ADMIN, users=users, policies=secured.RIGHTS)
        yield found


def test_the_rights_of_an_operator_suffice(guarded: SecuredBroker, java: Java, tmp_path: Path) -> None:
    def ask(account: str, *calls: tuple[str, dict[str, Any]]) -> list[Any]:
        keys = {"access_key": account, "secret_key": SECRET}
        signed = [(name, {**keys, **given}) for name, given in calls]
        found: list[Any] = run_reader(java, guarded.broker.namesrv, tmp_path, "administrate", calls=signed)
        return found

    group = {"group": RESET_GROUP}
    latest, begins, offsets, lag, members = ask(
        "operator",
        ("reset_offsets", {**group, "to": "latest", "topics": READ}),
        ("reset_offsets", {**group, "to": datetime(2000, 1, 1, tzinfo=UTC), "topics": READ}),
        ("group_offsets", group),
        ("group_lag", group),
        ("group_members", group),
    )
    assert latest == {READ: {"broker-a:0": 30, "broker-a:1": 30}}, latest
    assert begins == offsets == {READ: {"broker-a:0": 0, "broker-a:1": 0}}
    assert [(row["lagMessages"], row["secondsBehind"] > 0, row["lagBytes"] > 0) for row in lag] == [
        (30, True, True)
    ] * 2
    assert members == []
    reset, lag = ask("half-operator", ("reset_offsets", {**group, "to": "latest"}), ("group_lag", group))
    assert [row["topic"] for row in lag] == [READ] * 2, lag
    if java.is_5:
        assert reset.startswith("NoPermissionError: "), reset
        assert "Update of the topic and of the group" in reset
    else:  # no right is checked but that of the commit
        assert reset == latest
    (names,) = ask("bare-reader", ("groups", {}))
    assert RESET_GROUP in names or java.is_5, names
    (refused,) = ask("bare-reader", ("group_lag", group))
    if java.is_5:
        assert refused.startswith("NoPermissionError: "), refused
        assert "the right: Get of the group" in refused
