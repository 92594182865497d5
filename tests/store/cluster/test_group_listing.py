"""The members of groups in a cluster, as brokers list them."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

import rmq_spark
from rmq_spark.store.cluster import client
from rmq_spark.store.cluster.codes import RequestCode
from rmq_spark.store.errors import BackendUnavailableError, NoPermissionError, OptionError
from rmq_spark.store.group_tables import CLUSTER_MEMBERS
from rmq_spark.store.model import QueueKey
from rmq_spark.store.testing.brokers import Account, AccountTable, Answer, Broker, RunningCluster, faults
from rmq_spark.store.testing.brokers.wire import loose_json

RunCluster = Callable[..., RunningCluster]
GROUP, TERMS = "billing", {"request_timeout_ms": 20_000}
JAVA, OURS, OTHER = "10.0.0.5@4711#1234567890", "10.0.0.6@12#rmq-spark#late#1#00ff00ff", "10.0.0.7@lite@STREAM"


def subscription(topic: str, text: str, kind: str = "TAG") -> dict[str, Any]:
    return {"topic": topic, "subString": text, "expressionType": kind, "subVersion": 1, "tagsSet": [], "codeSet": []}


def let_join(broker: Broker, *members: tuple[str, str, str, int]) -> None:
    """Let a broker list members of the group: client id, address, language and version of each."""
    names = ("clientId", "clientAddr", "language", "version")
    topics = (
        subscription("orders", "a || b"),
        subscription("jobs", "a > 5", "SQL92"),
        subscription("%RETRY%billing", "*"),
    )
    body = {
        "connectionSet": [dict(zip(names, member, strict=True)) for member in members],
        "consumeFromWhere": "CONSUME_FROM_LAST_OFFSET",
        "consumeType": "CONSUME_PASSIVELY",
        "messageModel": "CLUSTERING",
        "subscriptionTable": {one["topic"]: one for one in topics},
    }

    def answer(code: RequestCode, found: dict[str, Any]) -> None:
        data = loose_json(found).encode()
        broker.fail(
            code, lambda call, _: call.answer(Answer(body=data)), when=lambda call: call.text("consumerGroup") == GROUP
        )

    answer(RequestCode.GET_CONSUMER_CONNECTION_LIST, body)
    answer(RequestCode.GET_CONSUMER_LIST_BY_GROUP, {"consumerIdList": [member[0] for member in members]})


@pytest.fixture(params=["5.3", "4.9"])
def cluster(request: pytest.FixtureRequest, run_cluster: RunCluster) -> Iterator[RunningCluster]:
    """Two brokers. A Java client and a query of ours are members at both, and another client at the second one."""
    cluster = run_cluster(release=request.param, brokers=2, is_light=True)
    cluster.create_topic("orders", queues=1)
    for name, broker in cluster.brokers.items():
        broker.offsets.commit(GROUP, QueueKey("orders", 0), 0)
        broker.offsets.commit("idle", QueueKey("orders", 0), 0)
        more = [(OTHER, "[fe80::1]:4000", "CPP", 407)] if name == "broker-b" else []
        let_join(broker, (OURS, "10.0.0.6:3000", "PYTHON", 407), *more, (JAVA, "10.0.0.5:2000", "JAVA", 479))
    yield cluster
    client._idle.forget()


def test_each_member_of_a_group_has_a_row(cluster: RunningCluster) -> None:
    table = rmq_spark.group_members(name_server=cluster.address, group=GROUP, **TERMS)
    assert table.schema == CLUSTER_MEMBERS
    java, ours, other = table.to_pylist()
    agreed = {"subscription": "jobs: SQL92 a > 5; orders: a || b", "consumeType": "CONSUME_PASSIVELY"}
    agreed |= {"messageModel": "CLUSTERING", "group": GROUP}
    nothing = dict.fromkeys(("queues", "assignment", "allocateStrategy", "since"))
    both = ["broker-a", "broker-b"]
    assert java == agreed | nothing | {
        "member": JAVA,
        "queryName": None,
        "application": None,
        "host": "10.0.0.5",
        "processId": 4711,
        "address": "10.0.0.5:2000",
        "language": "JAVA",
        "version": "5.3.3",
        "brokers": both,
    }
    assert (ours["queryName"], ours["application"], ours["processId"]) == ("late#1", "rmq-spark", 12)
    assert (ours["language"], ours["version"], ours["brokers"]) == ("PYTHON", "4.9.7", both)
    assert (other["member"], other["host"], other["processId"], other["brokers"]) == (OTHER, "fe80::1", None, both[1:])


def test_all_groups_have_their_members(cluster: RunningCluster) -> None:
    table = rmq_spark.group_members(name_server=cluster.address, **TERMS)
    assert [(row["group"], row["member"]) for row in table.to_pylist()] == [(GROUP, one) for one in (JAVA, OURS, OTHER)]
    assert rmq_spark.group_members(name_server=cluster.address, group="idle", **TERMS).num_rows == 0
    with pytest.raises(OptionError, match="is not a group's name"):
        rmq_spark.group_members(name_server=cluster.address, group="a b", **TERMS)


def test_a_broker_that_does_not_answer_is_named(cluster: RunningCluster, caplog: pytest.LogCaptureFixture) -> None:
    cluster.brokers["broker-b"].freeze()
    try:
        table = rmq_spark.group_members(name_server=cluster.address, group=GROUP, request_timeout_ms=500)
    finally:
        cluster.brokers["broker-b"].thaw()
    assert table["member"].to_pylist() == [JAVA, OURS]
    assert "members may be missing: broker-b does not answer" in caplog.text
    cluster.brokers["broker-a"].kill()
    cluster.brokers["broker-b"].kill()
    with pytest.raises(BackendUnavailableError):
        rmq_spark.group_members(name_server=cluster.address, group=GROUP, **TERMS)


def test_with_fewer_rights_only_the_client_ids_are_known(
    run_cluster: RunCluster, caplog: pytest.LogCaptureFixture
) -> None:
    cluster = run_cluster(release="5.3", is_light=True)
    account = {"access_key": "reader", "secret_key": "12345678", **TERMS}
    cluster.broker.accounts = AccountTable(Account("reader", "12345678", groups={GROUP: "SUB"}))
    assert rmq_spark.group_members(name_server=cluster.address, group=GROUP, **account).num_rows == 0
    refusal = "User:reader has no permission to access Group:billing from 127.0.0.1, no matched policies."
    cluster.broker.fail(RequestCode.GET_CONSUMER_CONNECTION_LIST, faults.with_code(16, refusal))
    let_join(cluster.broker, (JAVA, "10.0.0.5:2000", "JAVA", 479))
    (row,) = rmq_spark.group_members(name_server=cluster.address, group=GROUP, **account).to_pylist()
    assert (row["member"], row["processId"], row["brokers"]) == (JAVA, 4711, ["broker-a"])
    assert {row[name] for name in ("address", "language", "version", "subscription", "consumeType", "host")} == {None}
    assert "only the client ids of the members of group billing are known" in caplog.text
    assert "the right: Get of the group" in caplog.text
    cluster.broker.accounts = AccountTable(Account("reader", "12345678"))
    cluster.broker.heal()
    with pytest.raises(NoPermissionError, match="Get of the group"):
        rmq_spark.group_members(name_server=cluster.address, group=GROUP, **account)
