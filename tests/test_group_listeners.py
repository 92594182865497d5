"""Listeners for consumer groups, with the events that Spark sends them."""

import json
import logging
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

import rmq_spark
from rmq_spark.store import GroupSession, GroupTerms
from rmq_spark.store.cluster import client
from rmq_spark.store.group.resets import write_outcomes
from rmq_spark.store.model import CommitKey, QueueKey, Suspension
from rmq_spark.store.places import locate
from rmq_spark.store.testing.brokers import Account, AccountTable, RunningCluster

QUEUE = QueueKey("orders", 0)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A store with ten messages in the one queue of the topic orders."""
    with rmq_spark.open_store(tmp_path / "store", queues=1, segment_bytes=1 << 16) as messages:
        for _ in range(10):
            messages.send("orders", "x")
    return tmp_path / "store"


@pytest.fixture
def member(store: Path) -> Iterator[GroupSession]:
    """A query that has the queue, and began at its first message."""
    query = GroupSession(str(store), GroupTerms("g"))
    query.rebalance([QUEUE], {}, None)
    query.publish({QUEUE: 0})
    yield query
    query.leave({})


def progress(member: GroupSession, offset: int, commit: str = "auto", run: str = "r", **marks: str) -> Any:
    """Return the event of a batch that ended at `offset`, as Spark shows our offsets: as text."""
    mark = {"v": 1, "group": "g", "member": member.member_id, "path": member.root, "commit": commit} | marks
    ours = SimpleNamespace(
        latestOffset=json.dumps({"orders": {"0": 10}, "@": mark}),
        endOffset=json.dumps({"orders": {"0": offset}, "@": {"v": 1}}),
    )
    rate = SimpleNamespace(latestOffset="7", endOffset="7")
    return SimpleNamespace(progress=SimpleNamespace(sources=[rate, ours], runId=run, id="query", batchId=3))


def ended(run: str = "r") -> Any:
    return SimpleNamespace(runId=run)


def offset_of(store: Path) -> int:
    return rmq_spark.group_offsets(store, "g")["orders"][0]


@pytest.mark.parametrize(("batch_id", "offset"), [(3, 5), (4, 0)])
def test_a_queue_that_a_listener_stopped_counts_if_the_batch_that_stopped_it_is_known_to_be_finished(
    store: Path, member: GroupSession, batch_id: int, offset: int
) -> None:
    write_outcomes(str(store), "g", CommitKey("query", batch_id), {QUEUE: Suspension(5)})
    listener = rmq_spark.GroupOffsetListener()
    listener.onQueryProgress(progress(member, 8))
    listener.onQueryTerminated(ended())
    assert offset_of(store) == offset


def test_the_last_batch_of_a_query_that_ends_is_published(store: Path, member: GroupSession) -> None:
    listener = rmq_spark.GroupOffsetListener()
    listener.onQueryProgress(progress(member, 4))
    listener.onQueryProgress(progress(member, 6))
    listener.onQueryTerminated(ended("another"))
    assert offset_of(store) == 0
    listener.onQueryTerminated(ended())
    assert offset_of(store) == 6


def test_who_wants_no_offsets_published_has_none_published_in_the_end(store: Path, member: GroupSession) -> None:
    listener = rmq_spark.GroupOffsetListener()
    listener.onQueryProgress(progress(member, 6, commit="off"))
    listener.onQueryTerminated(ended())
    assert offset_of(store) == 0


def test_offsets_that_cannot_be_published_are_a_warning(
    store: Path, member: GroupSession, caplog: pytest.LogCaptureFixture
) -> None:
    listener = rmq_spark.GroupOffsetListener()
    listener.onQueryProgress(progress(member, 6))
    (store / "config" / "consumerOffset.json").write_text("{")
    (store / "config" / "consumerOffset.json.bak").unlink(missing_ok=True)
    listener.onQueryTerminated(ended())
    assert "the last offsets of consumer group g are not published" in caplog.text


def test_the_lag_of_a_querys_group_is_reported_after_each_batch(store: Path, member: GroupSession) -> None:
    seen: list[tuple[str, int]] = []

    def report(group: str, table: pa.Table) -> None:
        seen.append((group, table.column("lagMessages")[0].as_py()))

    rmq_spark.GroupLagListener(report).onQueryProgress(progress(member, 4, commit="off"))
    assert seen == [("g", 10)]


def test_the_lag_is_reported_where_the_log_lies_elsewhere(store: Path, member: GroupSession, tmp_path: Path) -> None:
    (store / "commitlog").rename(tmp_path / "log")
    seen: list[int] = []
    listener = rmq_spark.GroupLagListener(lambda group, table: seen.append(table.column("lagMessages")[0].as_py()))
    listener.onQueryProgress(progress(member, 4, commitLogPath=str(tmp_path / "log")))
    assert seen == [10]


def test_a_group_without_offsets_is_not_said_to_be_up_to_date(
    store: Path, member: GroupSession, caplog: pytest.LogCaptureFixture
) -> None:
    (store / "config" / "consumerOffset.json").write_text('{"offsetTable": {}}')
    with caplog.at_level(logging.INFO):
        rmq_spark.GroupLagListener().onQueryProgress(progress(member, 4))
    assert "consumer group g has no offsets yet" in caplog.text
    assert "0 messages" not in caplog.text


def test_a_report_that_raises_is_a_warning_and_one_line_is_the_default(
    store: Path, member: GroupSession, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        rmq_spark.GroupLagListener(lambda group, table: 1 / 0).onQueryProgress(progress(member, 4))
        rmq_spark.GroupLagListener().onQueryProgress(progress(member, 4))
    assert "the lag of consumer group g was not reported: division by zero" in caplog.text
    assert "consumer group g is 10 messages, " in caplog.text


def test_the_last_batch_is_published_where_the_log_lies_elsewhere_and_not_beyond_a_queues_end(
    store: Path, member: GroupSession, tmp_path: Path
) -> None:
    log = str(tmp_path / "log")
    (store / "commitlog").rename(tmp_path / "log")
    listener = rmq_spark.GroupOffsetListener()
    listener.onQueryProgress(progress(member, 6, commitLogPath=log))
    listener.onQueryTerminated(ended())
    assert rmq_spark.group_offsets(store, "g", commit_log_path=log)["orders"][0] == 6
    listener.onQueryProgress(progress(member, 41, commitLogPath=log))
    listener.onQueryTerminated(ended())
    assert rmq_spark.group_offsets(store, "g", commit_log_path=log)["orders"][0] == 6


def test_without_logging_set_up_the_default_line_goes_to_standard_error(
    store: Path, member: GroupSession, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("rmq_spark"), "propagate", False)  # off from the handlers of pytest
    rmq_spark.GroupLagListener().onQueryProgress(progress(member, 4))
    assert capsys.readouterr().err.startswith("rmq: consumer group g is 10 messages, ")


def test_the_example_of_the_document_reports(
    store: Path, member: GroupSession, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (Path(__file__).parents[1] / "docs" / "OPTIONS.md").read_text()
    code = text[text.index("def report(group, lag):") : text.index("```\n\nWithout `report`")]
    listeners: list[rmq_spark.GroupLagListener] = []
    spark = SimpleNamespace(streams=SimpleNamespace(addListener=listeners.append))
    exec(code, {"rmq_spark": rmq_spark, "spark": spark})
    listeners[0].onQueryProgress(progress(member, 4))
    assert capsys.readouterr().out == "g 10\n"


@pytest.fixture
def cluster(run_cluster: Callable[..., RunningCluster]) -> Iterator[RunningCluster]:
    """Two brokers with four messages each in a queue of the topic orders. The group g has consumed one of each."""
    cluster = run_cluster(brokers=2)
    cluster.create_topic("orders", queues=1)
    for name, broker in cluster.brokers.items():
        cluster.send("orders", *[b"x"] * 4, broker=name)
        broker.offsets.commit("g", QueueKey("orders", 0), 1)
    yield cluster
    client._idle.forget()


def progress_of(cluster: RunningCluster, **options: str) -> Any:
    """Return the event of a batch of a query that is a member of the group g in a cluster."""
    location = locate({"nameServer": cluster.address, **options}, {})
    assert location is not None
    mark = {"v": 2, "group": "g", "member": "m", **location.mark()}
    ours = SimpleNamespace(
        latestOffset=json.dumps({"orders": {"broker-a:0": 4, "broker-b:0": 4}, "@": mark}),
        endOffset=json.dumps({"orders": {"broker-a:0": 2, "broker-b:0": 1}, "@": {"v": 2}}),
    )
    return SimpleNamespace(progress=SimpleNamespace(sources=[ours], runId="r", id="query", batchId=3))


def test_the_lag_in_a_cluster_is_reported(cluster: RunningCluster, caplog: pytest.LogCaptureFixture) -> None:
    seen: list[tuple[str, list[tuple[str, int]]]] = []

    def report(group: str, table: pa.Table) -> None:
        seen.append((group, [(row["brokerName"], row["lagMessages"]) for row in table.to_pylist()]))

    rmq_spark.GroupLagListener(report).onQueryProgress(progress_of(cluster))
    assert seen == [("g", [("broker-a", 3), ("broker-b", 3)])]
    with caplog.at_level(logging.INFO):
        rmq_spark.GroupLagListener().onQueryProgress(progress_of(cluster))
        cluster.brokers["broker-b"].freeze()
        rmq_spark.GroupLagListener().onQueryProgress(progress_of(cluster))
        cluster.brokers["broker-b"].thaw()
    assert re.search(
        r"consumer group g is 6 messages, about \d+ bytes, \d+\.\d s behind in 2 queues$", caplog.text, re.M
    )
    assert "is at least 3 messages" in caplog.text
    assert "in 2 queues, of which 1 are away" in caplog.text


@pytest.mark.parametrize("is_in_file", [True, False])
def test_the_account_of_a_listener_comes_from_the_file_or_the_environment(
    cluster: RunningCluster,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    is_in_file: bool,
) -> None:
    rights = {"topics": {"*": "SUB|GET"}, "groups": {"g": "SUB|GET", "g-reader": "SUB"}}
    for broker in cluster.brokers.values():
        broker.accounts = AccountTable(Account("reader", "12345678", **rights))
    options = {"pullGroup": "g-reader"}
    if is_in_file:
        (tmp_path / "keys").write_text("accessKey: reader\nsecretKey: 12345678\n")
        options["credentialsFile"] = str(tmp_path / "keys")
    else:
        rmq_spark.GroupLagListener().onQueryProgress(progress_of(cluster, **options))
        assert "the lag of consumer group g was not reported" in caplog.text
        assert "Check the options accessKey, secretKey" in caplog.text
        monkeypatch.setenv("RMQ_ACCESS_KEY", "reader")
        monkeypatch.setenv("RMQ_SECRET_KEY", "12345678")
    seen: list[float] = []
    listener = rmq_spark.GroupLagListener(lambda _, table: seen.extend(table["secondsBehind"].to_pylist()))
    listener.onQueryProgress(progress_of(cluster, **options))
    assert len(seen) == 2
    assert None not in seen
