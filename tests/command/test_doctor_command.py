"""`rmq doctor`: findings as text and as JSON, exit status, and options."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rmq_spark.store.testing.brokers import Account, AccountTable, RunningCluster


@pytest.fixture
def cluster(run_cluster: Callable[..., RunningCluster]) -> RunningCluster:
    """One broker with the topic orders."""
    cluster = run_cluster()
    cluster.create_topic("orders", queues=2)
    return cluster


def test_doctor_of_a_healthy_cluster_has_status_0(rmq: Callable[..., Any], cluster: RunningCluster) -> None:
    ran = rmq("doctor", "-n", cluster.address, "--topic", "orders", "--group", "billing")
    assert (ran.status, ran.err) == (0, "A query can run. Rights for writing were not tried.\n")
    assert f"ok       broker broker-a at {cluster.broker.address}: it answers as RocketMQ 5.3.3.\n" in ran.out
    assert "ok       topic orders on broker-a: committed offsets of a group: " in ran.out


def test_doctor_prints_the_next_step_of_what_is_missing(rmq: Callable[..., Any], cluster: RunningCluster) -> None:
    ran = rmq("doctor", "--name-server", cluster.address, "--topic", "orderz")
    assert (ran.status, ran.err) == (1, "A query cannot run: 1 missing.\n")
    line = ran.out.index("missing  topic orderz: no name server has a route of the topic orderz.\n")
    assert "\n         Check the name of the topic" in ran.out[line:]


def test_doctor_prints_json(rmq: Callable[..., Any], cluster: RunningCluster) -> None:
    ran = rmq("doctor", "-n", "127.0.0.1:1", "--json")
    assert (ran.status, ran.err) == (1, "")
    (row,) = ran.rows
    assert list(row) == ["what", "state", "why", "nextStep"]
    assert (row["what"], row["state"]) == ("name server 127.0.0.1:1", "missing")


def test_doctor_signs_with_keys_of_the_environment_and_of_a_file(
    rmq: Callable[..., Any], cluster: RunningCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.broker.accounts = AccountTable(Account("reader", "planted", is_admin=True))
    keys = tmp_path / "keys"
    keys.write_text("accessKey: reader\nsecretKey: planted\n")
    assert rmq("doctor", "-n", cluster.address, "--credentials-file", keys).status == 0
    assert rmq("doctor", "-n", cluster.address).status == 1
    monkeypatch.setenv("RMQ_SECRET_KEY", "planted")
    ran = rmq("doctor", "-n", cluster.address, "--access-key", "reader")
    assert ran.status == 0
    assert "planted" not in ran.out + ran.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "cannot find the cluster: found no -n HOST:PORT"),
        (["-n", "ns:1", "--tls-verify", "none"], "--tls-verify without --tls has no effect"),
        (["-n", "ns:1", "--access-key", "a"], "environment variable RMQ_SECRET_KEY is missing"),
        (["-n", "ns:1", "--access-key", "a", "--credentials-file", __file__], "cannot be combined"),
    ],
)
def test_doctor_refuses_options_that_do_not_fit(
    rmq: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, words: list[str], said: str
) -> None:
    monkeypatch.delenv("RMQ_SECRET_KEY", raising=False)
    ran = rmq("doctor", *words)
    assert ran.status == 2
    assert said in ran.err


def test_doctor_takes_a_time_for_requests(rmq: Callable[..., Any], cluster: RunningCluster) -> None:
    cluster.name_servers[0].freeze()
    ran = rmq("doctor", "-n", cluster.address, "--request-timeout", "0.2")
    assert ran.status == 1
    assert "did not answer within 200 ms" in ran.out
    cluster.name_servers[0].thaw()
