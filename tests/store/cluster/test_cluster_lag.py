"""The lag of groups in a cluster: each column compared with what the brokers have, and what is null or left out."""

import logging
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any

import pytest

import rmq_spark
from rmq_spark.store.cluster import client
from rmq_spark.store.cluster.codes import RequestCode
from rmq_spark.store.errors import BackendUnavailableError, NoPermissionError, NotFoundError, OptionError
from rmq_spark.store.group_tables import CLUSTER_LAG
from rmq_spark.store.model import QueueKey
from rmq_spark.store.testing.brokers import Account, AccountTable, RunningCluster, faults

RunCluster = Callable[..., RunningCluster]
GROUP = "billing"
TERMS: dict[str, Any] = {"request_timeout_ms": 20_000}


def commit(cluster: RunningCluster, offsets: dict[tuple[str, str, int], int], group: str = GROUP) -> None:
    """Commit offsets, by broker, topic and queue id."""
    for (broker, topic, queue_id), offset in offsets.items():
        cluster.brokers[broker].groups.add(group)
        cluster.brokers[broker].offsets.commit(group, QueueKey(topic, queue_id), offset)


@pytest.fixture(params=["5.3", "4.9"])
def cluster(request: pytest.FixtureRequest, run_cluster: RunCluster) -> Iterator[RunningCluster]:
    """Two brokers. At each, orders/0 has 6 messages, and the first two have expired in broker-b; orders/1 has 4."""
    cluster = run_cluster(release=request.param, brokers=2)
    cluster.create_topic("orders", queues=2)
    cluster.create_topic("other", queues=1, brokers=["broker-a"])
    for name, broker in cluster.brokers.items():
        for queue_id, count in ((0, 6), (1, 4)):
            cluster.send("orders", *[b"x" * 100] * count, broker=name, queue_id=queue_id)
        if name == "broker-b":
            broker.expire("orders", 0, 2)
    yield cluster
    client._idle.forget()


def rows(cluster: RunningCluster, group: str | None = GROUP, **terms: Any) -> dict[str, dict[str, Any]]:
    """Return the rows of the lag by `topic/broker:id`, after the group if it is that of all groups."""
    table = rmq_spark.group_lag(name_server=cluster.address, group=group, **{**TERMS, **terms})
    assert table.schema == CLUSTER_LAG
    return {
        f"{'' if group else row['group'] + ' '}{QueueKey(row['topic'], row['queueId'], row['brokerName'])}": row
        for row in table.to_pylist()
    }


def stored_ms(cluster: RunningCluster, broker: str, queue_id: int, offset: int) -> int:
    """Return the store time of a message."""
    of = cluster.brokers[broker]
    return int(of.loop.run(of.store.store_time, QueueKey("orders", queue_id), offset))


def test_each_queue_of_the_topics_of_a_group_has_a_row(cluster: RunningCluster) -> None:
    commit(
        cluster,
        {
            ("broker-a", "orders", 0): 2,
            ("broker-a", "orders", 1): 4,
            ("broker-b", "orders", 0): 1,
            ("broker-b", "orders", 1): 9,
        },
    )
    now_ms = stored_ms(cluster, "broker-a", 0, 2) + 5_000
    found = rows(cluster, now_ms=now_ms)
    names = ("state", "groupOffset", "minOffset", "maxOffset", "lagMessages", "expiredMessages")
    assert {queue: tuple(row[name] for name in names) for queue, row in found.items()} == {
        "orders/broker-a:0": ("ok", 2, 0, 6, 4, 0),
        "orders/broker-a:1": ("ok", 4, 0, 4, 0, 0),
        "orders/broker-b:0": ("expired", 1, 2, 6, 4, 1),
        "orders/broker-b:1": ("ahead", 9, 0, 4, 0, 0),
    }
    assert found["orders/broker-a:0"]["secondsBehind"] == 5.0
    assert found["orders/broker-b:0"]["secondsBehind"] == max(0, now_ms - stored_ms(cluster, "broker-b", 0, 2)) / 1000
    assert found["orders/broker-a:1"]["secondsBehind"] == found["orders/broker-b:1"]["secondsBehind"] == 0.0
    last = found["orders/broker-a:0"]["lastConsumedTimestamp"]
    assert last == datetime.fromtimestamp(stored_ms(cluster, "broker-a", 0, 1) / 1000, UTC)
    assert found["orders/broker-b:1"]["lastConsumedTimestamp"] is None, "the message before this offset does not exist"
    assert {row[name] for row in found.values() for name in ("lastCommitTimestamp", "member")} == {None}


def test_bytes_are_an_estimate_from_the_next_messages(cluster: RunningCluster) -> None:
    commit(cluster, {("broker-a", "orders", 0): 2, ("broker-a", "orders", 1): 4})
    record = cluster.brokers["broker-a"].copy_store(cluster.folder / "copy")
    with rmq_spark.open_reader(record) as reader:
        size = reader.record_bytes(QueueKey("orders", 0), 0, 1)
    found = rows(cluster)
    assert found["orders/broker-a:0"]["lagBytes"] == pytest.approx(4 * size, rel=0.1)
    assert found["orders/broker-a:1"]["lagBytes"] == 0


def test_a_queue_without_an_offset_counts_if_the_group_has_one_elsewhere(cluster: RunningCluster) -> None:
    commit(cluster, {("broker-a", "orders", 0): 6})
    found = rows(cluster)
    assert len(found) == 4
    young = found["orders/broker-a:1"]
    assert (young["state"], young["groupOffset"]) == (("none", None) if cluster.release.is_5 else ("ok", 0))
    assert (young["lagMessages"], young["expiredMessages"]) == (4, 0)
    for queue, messages in (("orders/broker-b:0", 4), ("orders/broker-b:1", 4)):
        assert (found[queue]["state"], found[queue]["groupOffset"], found[queue]["lagMessages"]) == (
            "none",
            None,
            messages,
        )


def test_offset_0_that_was_committed_is_an_offset(cluster: RunningCluster) -> None:
    commit(cluster, {("broker-a", "orders", 0): 0, ("broker-b", "orders", 0): 0})
    found = rows(cluster)
    assert (found["orders/broker-a:0"]["state"], found["orders/broker-a:0"]["groupOffset"]) == ("ok", 0)
    assert (found["orders/broker-b:0"]["state"], found["orders/broker-b:0"]["expiredMessages"]) == ("expired", 2)
    assert rmq_spark.group_offsets(name_server=cluster.address, group=GROUP, **TERMS)["orders"]["broker-b:0"] == 0


def test_all_groups_have_their_rows(cluster: RunningCluster) -> None:
    commit(cluster, {("broker-a", "orders", 0): 6})
    commit(cluster, {("broker-a", "other", 0): 0}, "audit")
    assert rmq_spark.groups(name_server=cluster.address, **TERMS) == ["audit", GROUP]
    found = rows(cluster, None)
    assert {queue.split("/")[0] for queue in found} == {"audit other", "billing orders"}
    assert list(found) == sorted(found)
    assert rmq_spark.group_offsets(name_server=cluster.address, group="audit", **TERMS) == {"other": {"broker-a:0": 0}}


def test_a_namespace_hides_the_names_of_others(cluster: RunningCluster) -> None:
    cluster.create_topic("team%jobs", queues=1, brokers=["broker-a"])
    commit(cluster, {("broker-a", "team%jobs", 0): 0}, "team%billing")
    commit(cluster, {("broker-a", "orders", 0): 0}, "audit")
    given = {"name_server": cluster.address, "namespace": "team", **TERMS}
    assert rmq_spark.groups(**given) == [GROUP]
    (row,) = rmq_spark.group_lag(**given, group=GROUP).to_pylist()
    assert (row["group"], row["topic"], row["queueId"]) == (GROUP, "jobs", 0)


def test_an_unknown_group_is_an_error_that_lists_the_others(cluster: RunningCluster) -> None:
    commit(cluster, {("broker-a", "orders", 0): 6})
    with pytest.raises(
        NotFoundError, match=r'no consumer group "biling".*Did you mean billing\? Groups there: billing'
    ):
        rows(cluster, "biling")
    with pytest.raises(OptionError, match="is not a group's name"):
        rows(cluster, "a b")
    assert rmq_spark.group_offsets(name_server=cluster.address, group="biling", **TERMS) == {}
    cluster.create_topic("%RETRY%fresh", queues=1)
    assert rows(cluster, "fresh") == {}, "it has had a member"


def test_queues_of_a_broker_that_does_not_answer_are_away(
    cluster: RunningCluster, caplog: pytest.LogCaptureFixture
) -> None:
    commit(cluster, {(broker, "orders", 0): 6 for broker in cluster.brokers})
    cluster.brokers["broker-b"].freeze()
    given: dict[str, Any] = {"request_timeout_ms": 700}
    try:
        found = rows(cluster, **given)
        assert {queue: row["state"] for queue, row in found.items()}["orders/broker-b:0"] == "away"
        assert {found["orders/broker-b:1"][name] for name in ("maxOffset", "lagMessages", "secondsBehind")} == {None}
        assert found["orders/broker-a:0"]["lagMessages"] == 0
        assert "the lag in queues of some brokers is not known: broker-b does not answer" in caplog.text
        with pytest.raises(
            BackendUnavailableError, match=r"cannot read the offsets of group biling: broker-b does not"
        ):
            rows(cluster, "biling", **given)
        with pytest.raises(BackendUnavailableError, match="broker-b does not answer"):
            rmq_spark.group_offsets(name_server=cluster.address, group=GROUP, **given)
    finally:
        cluster.brokers["broker-b"].thaw()


def test_without_any_broker_there_is_an_error(cluster: RunningCluster) -> None:
    for broker in cluster.brokers.values():
        broker.kill()
    for call in (rmq_spark.groups, rmq_spark.group_lag, rmq_spark.group_members):
        with pytest.raises(BackendUnavailableError, match="no name server lists a broker"):
            call(name_server=cluster.address, **TERMS)


@pytest.fixture
def refused(cluster: RunningCluster) -> Callable[..., dict[str, Any]]:
    """A function that gives an account rights at both brokers, and returns the arguments that use it."""

    def give(topics: str, groups: dict[str, str], *, is_admin: bool = False) -> dict[str, Any]:
        for broker in cluster.brokers.values():
            rights = {"*": topics} if topics else {}
            account = Account("reader", "12345678", topics=rights, groups=groups, is_admin=is_admin)
            broker.accounts = AccountTable(account)
        return {"access_key": "reader", "secret_key": "12345678", **TERMS}

    return give


def test_without_a_right_on_the_group_the_lag_is_refused_by_name(
    cluster: RunningCluster, refused: Callable[..., dict[str, Any]], caplog: pytest.LogCaptureFixture
) -> None:
    commit(cluster, {("broker-a", "orders", 0): 2})
    commit(cluster, {("broker-a", "other", 0): 0}, "audit")
    for group in (GROUP, "audit"):
        cluster.create_topic(f"%RETRY%{group}", queues=1)
    account = refused("SUB|GET", {"*": "SUB"})
    if not cluster.release.is_5:  # it checks none of these rights
        assert rows(cluster, **account)["orders/broker-a:0"]["lagMessages"] == 4
        return
    with pytest.raises(NoPermissionError, match=r"get the progress of group billing .*the right: Get of the group"):
        rows(cluster, **account)
    with pytest.raises(NoPermissionError, match="Get of the group"):
        rows(cluster, None, **account)
    account = refused("SUB|GET", {GROUP: "SUB|GET", "rmq-spark-reader": "SUB"})
    assert rmq_spark.groups(name_server=cluster.address, **account) == ["audit", GROUP]
    assert "groups with a retry topic are listed, and others may be missing: cannot get the offsets of" in caplog.text
    assert "Get of the cluster" in caplog.text
    found = rows(cluster, None, **account)
    assert {queue.split(" ")[0] for queue in found} == {GROUP}
    assert "the lag of 1 of 2 groups is not known: cannot get the progress of group audit" in caplog.text


def test_without_rights_on_the_topic_the_lag_is_that_of_the_answer_about_the_group(
    run_cluster: RunCluster, caplog: pytest.LogCaptureFixture
) -> None:
    cluster = run_cluster(release="5.3")
    cluster.create_topic("orders", queues=2)
    cluster.send("orders", *[b"x"] * 6, queue_id=0)
    cluster.broker.expire("orders", 0, 1)
    commit(cluster, {("broker-a", "orders", 0): 2})
    cluster.broker.accounts = AccountTable(Account("reader", "12345678", groups={GROUP: "GET"}))
    found = rows(cluster, access_key="reader", secret_key="12345678")
    row = found["orders/broker-a:0"]
    assert (row["state"], row["groupOffset"], row["maxOffset"], row["lagMessages"]) == ("ok", 2, 6, 4)
    assert {row[name] for name in ("minOffset", "expiredMessages", "lagBytes", "secondsBehind")} == {None}
    assert found["orders/broker-a:1"]["state"] == "none"


def test_without_the_right_to_pull_times_and_sizes_are_not_known(
    run_cluster: RunCluster, caplog: pytest.LogCaptureFixture
) -> None:
    cluster = run_cluster(release="5.3")
    cluster.create_topic("orders", queues=1)
    cluster.send("orders", *[b"x"] * 6)
    commit(cluster, {("broker-a", "orders", 0): 2})
    cluster.broker.accounts = AccountTable(Account("reader", "12345678", topics={"*": "GET"}, groups={GROUP: "GET"}))
    (row,) = rows(cluster, access_key="reader", secret_key="12345678").values()
    assert (row["minOffset"], row["lagMessages"], row["secondsBehind"], row["lagBytes"]) == (0, 4, None, None)
    assert "secondsBehind and lagBytes are not known: cannot pull from queue orders/broker-a:0" in caplog.text
    cluster.broker.expire("orders", 0, 3)  # then a pull would prove the minimum
    (row,) = rows(cluster, access_key="reader", secret_key="12345678").values()
    assert (row["minOffset"], row["maxOffset"], row["lagMessages"], row["expiredMessages"]) == (3, 6, 3, 1)


def test_a_topic_that_cannot_be_read_spoils_only_its_own_rows(
    run_cluster: RunCluster, caplog: pytest.LogCaptureFixture
) -> None:
    cluster = run_cluster(release="5.3")
    cluster.create_topic("orders", queues=1)
    cluster.create_topic("compacted", queues=1, attributes={"cleanup.policy": "COMPACTION"})
    commit(cluster, {("broker-a", "orders", 0): 0, ("broker-a", "compacted", 0): 0})
    assert list(rows(cluster, None)) == ["billing orders/broker-a:0"]
    assert "the lag in topic compacted is not known: topic compacted has cleanup.policy=COMPACTION" in caplog.text
    with pytest.raises(OptionError, match="has cleanup"):
        rows(cluster)


def test_one_pull_for_each_queue_with_unread_messages(
    cluster: RunningCluster, caplog: pytest.LogCaptureFixture
) -> None:
    commit(cluster, {("broker-a", "orders", 0): 2, ("broker-a", "orders", 1): 4, ("broker-b", "orders", 0): 3})
    cluster.clear_requests()
    with caplog.at_level(logging.INFO):
        rows(cluster)
    counts = cluster.clear_requests()
    # The first message of a queue whose minimum is above 0 is looked at too: it may have expired.
    assert [counts[broker][RequestCode.PULL_MESSAGE] for broker in ("broker-a", "broker-b")] == [1, 3]
    assert [counts[broker][RequestCode.GET_CONSUME_STATS] for broker in ("broker-a", "broker-b")] == [1, 1]
    assert not caplog.text, "an estimate for batches is not announced"


def test_an_answer_that_is_none_is_an_error(cluster: RunningCluster) -> None:
    cluster.brokers["broker-a"].fail(RequestCode.GET_CONSUME_STATS, faults.with_code(1, "a planted fault"))
    with pytest.raises(rmq_spark.BrokerError, match="a planted fault"):
        rows(cluster)


def test_a_reader_shows_the_lag_and_measures_it_anew(cluster: RunningCluster) -> None:
    commit(cluster, {("broker-a", "orders", 0): 2})
    with rmq_spark.open_reader(name_server=cluster.address, request_timeout_ms=20_000) as reader:
        lag = reader.lag(GROUP)
        assert lag.messages == 16
        assert "  orders/broker-a:0 ok, 4 messages" in repr(lag)
        assert ">broker-a:0</td>" in lag._repr_html_()
        cluster.send("orders", b"x", broker="broker-a", queue_id=0)
        assert reader.lag().messages == 17
        with pytest.raises(NotFoundError):
            reader.lag("nobody")


def test_queues_of_a_deleted_topic_are_gone(cluster: RunningCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rmq_spark.store.cluster.queue_answers.DELETION_MS", 0)
    commit(cluster, {("broker-a", "orders", 0): 2, ("broker-b", "orders", 0): 2})
    with rmq_spark.open_reader(name_server=cluster.address, request_timeout_ms=20_000) as reader:
        reader.lag(GROUP)
        cluster.brokers["broker-b"].delete_topic("orders")  # the name servers still list it
        for _ in range(2):  # a broker is believed when it says so again
            found = {
                QueueKey("", row["queueId"], row["brokerName"]): row for row in reader.lag(GROUP).table.to_pylist()
            }
    row = found[QueueKey("", 0, "broker-b")]
    assert (row["state"], row["lagMessages"], row["maxOffset"]) == ("gone", None, None)
    assert found[QueueKey("", 0, "broker-a")]["state"] == "ok"


@pytest.mark.parametrize(
    ("call", "given", "said"),
    [
        (rmq_spark.group_lag, {}, "neither path nor name_server was given"),
        (rmq_spark.group_lag, {"path": "x", "name_server": "ns:9876"}, "path and name_server were both given"),
        (rmq_spark.group_lag, {"name_server": "ns:9876", "read_mode": "mmap"}, "read_mode is for a store directory"),
        (rmq_spark.groups, {"name_server": "ns:9876", "commit_log_path": "x"}, "commit_log_path is for a store"),
        (rmq_spark.groups, {"path": "x", "tls": True}, "tls is for a cluster"),
        (rmq_spark.groups, {"name_server": "ns:9876", "tlss": True}, "unknown argument tlss. Did you mean tls"),
        (rmq_spark.group_offsets, {"name_server": "ns:9876"}, "a consumer group's name is a text, found None"),
        (rmq_spark.group_members, {"name_server": "ns"}, "'ns' is not an address"),
        (rmq_spark.reset_offsets, {"name_server": "ns:9876", "group": "g", "lock_timeout_ms": 1}, "lock_timeout_ms is"),
        (rmq_spark.reset_offsets, {"path": "x", "group": "g", "to": "latest", "namespace": "n"}, "namespace is for a"),
        (rmq_spark.reset_offsets, {"name_server": "ns:9876", "group": "g"}, "to=None is none of"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(call: Callable[..., Any], given: dict[str, Any], said: str) -> None:
    with pytest.raises(OptionError, match=said):
        call(**given)
