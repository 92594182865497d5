"""The doctor finds what a query of a cluster lacks, and changes nothing in the cluster."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rmq_spark.store.cluster.address import ClusterAddress, Credentials, parse_broker_addresses, parse_name_servers
from rmq_spark.store.cluster.codes import RequestCode
from rmq_spark.store.cluster.diagnosis import RIGHTS, ClusterFinding, State
from rmq_spark.store.cluster.doctor import diagnose_cluster
from rmq_spark.store.disk.clock import wall_clock_ms
from rmq_spark.store.testing.brokers import Account, AccountTable, RunningCluster, faults

READ_ONLY = {11, 12, 14, 29, 38, 46, 105, 106, 202, 203, 206, 351}
_UNUSED_PORT = "127.0.0.1:1"


@pytest.fixture(params=["5.3", "4.9"])
def cluster(request: pytest.FixtureRequest, run_cluster: Callable[..., RunningCluster]) -> RunningCluster:
    """Two brokers with a message of the topic orders."""
    cluster = run_cluster(release=request.param, brokers=2, name_servers=2)
    cluster.create_topic("orders", queues=2)
    for broker in cluster.brokers:
        cluster.send("orders", b"x", broker=broker, queue_id=1)
    return cluster


def examine(cluster: RunningCluster, *topics: str, group: str | None = None, **fields: Any) -> list[ClusterFinding]:
    fields = {"name_servers": parse_name_servers(cluster.address), "request_timeout_ms": 10_000} | fields
    if group is not None:
        fields["pull_group"] = f"{group}-reader"
    return diagnose_cluster(ClusterAddress(**fields), topics or ("orders",), group, now_ms=wall_clock_ms())


def worse(findings: list[ClusterFinding]) -> list[ClusterFinding]:
    return [one for one in findings if one.state is not State.OK]


def the(findings: list[ClusterFinding], what: str) -> ClusterFinding:
    (found,) = (one for one in worse(findings) if one.what.startswith(what))
    return found


def test_healthy_cluster_has_no_finding_to_act_on(cluster: RunningCluster) -> None:
    findings = examine(cluster, group="billing")
    assert worse(findings) == []
    texts = [f"{one.what}: {one.why}" for one in findings]
    version = {"5.3": "5.3.3", "4.9": "4.9.7"}[cluster.release.name]
    assert sum(f"RocketMQ {version}" in text for text in texts) == 4
    assert any(text.startswith("topic orders on broker-b: read a topic: 2 queues;") for text in texts)


def test_doctor_sends_only_requests_that_read_and_adds_no_group(cluster: RunningCluster) -> None:
    cluster.clear_requests()
    examine(cluster, group="billing")
    sent = {code for counts in cluster.clear_requests().values() for code in counts}
    assert sent <= READ_ONLY
    assert RequestCode.PULL_MESSAGE in sent
    for broker in cluster.brokers.values():
        assert broker.groups <= {"TOOLS_CONSUMER"}
        assert broker.offsets.table() == {}
        assert broker.moved_event_count == 0


def test_empty_queue_is_not_pulled_from(cluster: RunningCluster) -> None:
    cluster.create_topic("empty", queues=1)
    cluster.clear_requests()
    assert worse(examine(cluster, "empty")) == []
    assert not any(counts[RequestCode.PULL_MESSAGE] for counts in cluster.clear_requests().values())


def test_name_server_that_is_away_is_a_warning_unless_all_are(cluster: RunningCluster) -> None:
    cluster.name_servers[0].kill()
    found = the(examine(cluster), f"name server {cluster.name_servers[0].address}")
    assert found.state is State.WARNING
    assert found.why.endswith("connection refused; expected a server that listens at this port.")
    assert found.next_step.startswith("Check the option nameServer")
    cluster.name_servers[1].kill()
    assert [one.state for one in examine(cluster)] == [State.MISSING] * 2


def test_broker_as_name_server_is_recognised(cluster: RunningCluster) -> None:
    broker = cluster.brokers["broker-a"].address
    found = the(examine(cluster, name_servers=(broker,)), f"name server {broker}")
    assert (found.state, found.why) == (State.MISSING, "it does not answer for routes, so it is a broker.")
    assert "nameServer" in found.next_step


def test_proxy_as_name_server_is_recognised(cluster: RunningCluster) -> None:
    for server in cluster.name_servers:
        server.fail(RequestCode.GET_BROKER_CLUSTER_INFO, faults.with_code(3, "not supported"))
    findings = examine(cluster)
    assert [one.why.partition(":")[0] for one in worse(findings)] == [
        "it answers for routes and not for the list of brokers, so it is a proxy"
    ] * 2
    assert any(one.what.startswith("topic orders on broker-b: read") for one in findings)


def test_broker_that_one_name_server_does_not_list(cluster: RunningCluster) -> None:
    cluster.name_servers[1].forget("broker-b")
    findings = examine(cluster)
    assert [one.what for one in worse(findings)] == ["name servers: brokers", "name servers: brokers of topic orders"]
    for found in worse(findings):
        assert found.why == f"{cluster.name_servers[1].address} does not list broker-b."
        assert found.state is State.WARNING
        assert "namesrvAddr" in found.next_step


def test_address_that_leads_nowhere_has_the_option_to_set(cluster: RunningCluster) -> None:
    cluster.brokers["broker-b"].advertise(_UNUSED_PORT)
    found = the(examine(cluster), f"broker broker-b at {_UNUSED_PORT}")
    assert found.state is State.MISSING
    assert "brokerAddresses=broker-b=host:port" in found.next_step
    mapped = parse_broker_addresses(f"broker-b={cluster.brokers['broker-b'].address}")
    assert worse(examine(cluster, broker_addresses=mapped)) == []


def test_address_of_another_broker_and_misspelled_broker(cluster: RunningCluster) -> None:
    other = cluster.brokers["broker-a"].address
    mapped = parse_broker_addresses(f"broker-b={other};broker-x={other}")
    findings = examine(cluster, broker_addresses=mapped)
    assert the(findings, "broker broker-b").why == "the broker broker-a answers at this address."
    found = the(findings, "option brokerAddresses")
    assert found.why == "no name server lists the broker broker-x, only broker-a, broker-b."


def test_account_that_is_refused_is_one_finding_for_each_broker(cluster: RunningCluster) -> None:
    cluster.brokers["broker-a"].accounts = AccountTable(Account("reader", "s3cret", is_admin=True))
    for credentials in (None, Credentials("reader", "wrong")):
        (found,) = worse(examine(cluster, credentials=credentials))
        assert found.what.startswith("broker broker-a at ")
        assert "the account is unknown, or its key is wrong" in found.why
        assert found.next_step.startswith("Check the options accessKey, secretKey")
    assert worse(examine(cluster, credentials=Credentials("reader", "s3cret"))) == []


def test_rights_that_are_missing_are_named_by_feature(cluster: RunningCluster) -> None:
    table = AccountTable(
        Account("sub", "s", topics={"orders": "SUB"}, groups={"rmq-spark-reader": "SUB"}),
        Account("all", "s", topics={"orders": "SUB|GET"}, groups={"*": "SUB"}),
        Account("no-group", "s", topics={"orders": "SUB|GET"}),
        Account("no-topic", "s", topics={"other": "SUB"}, groups={"*": "SUB"}),
    )
    cluster.brokers["broker-a"].accounts = table
    of = {key: worse(examine(cluster, credentials=Credentials(key, "s"))) for key in ("sub", "all")}
    assert of["all"] == []
    features = [one.what.removeprefix("topic orders on broker-a: ") for one in of["sub"]]
    wanted = [one.feature for one in RIGHTS if one.acl_2 == "topic Get"] if cluster.release.is_5 else []
    assert features == wanted
    assert all(one.state is State.WARNING and "topic Get" in one.next_step for one in of["sub"])
    for key, of_what in (("no-group", "the group rmq-spark-reader"), ("no-topic", "the topic orders")):
        found = the(examine(cluster, credentials=Credentials(key, "s")), "topic orders on broker-a: read a topic")
        assert found.state is State.MISSING
        assert found.why == f"the account lacks the right to subscribe to {of_what}."
        assert "option pullGroup" in found.next_step


def test_the_right_to_be_a_member_is_tried_if_a_group_is_given(cluster: RunningCluster) -> None:
    groups = {"billing": "SUB", "billing-reader": "SUB"}
    cluster.brokers["broker-a"].accounts = AccountTable(
        Account("sub", "s", topics={"orders": "SUB|GET"}, groups=groups)
    )
    findings = worse(examine(cluster, group="billing", credentials=Credentials("sub", "s")))
    if not cluster.release.is_5:
        assert findings == []
        return
    (found,) = findings
    assert found.what == "topic orders on broker-a: be a member of a group"
    assert "a stream cannot join the group billing" in found.why
    assert "group Sub and Get" in found.next_step


def test_topics_that_cannot_be_read_say_why(cluster: RunningCluster) -> None:
    cluster.create_topic("write-only", queues=1, perm=2)
    cluster.create_topic("fewer", queues=4)
    cluster.send("fewer", b"1", b"2", broker="broker-a", queue_id=3)
    cluster.create_topic("fewer", read_queues=1, write_queues=4, queues=None)
    for server in cluster.name_servers:
        server.add_to_route("static", topicQueueMappingByBroker={"broker-a": {}})
    cluster.create_topic("static", queues=1)
    cluster.create_topic("team-a%moved", queues=1)
    findings = examine(cluster, "write-only", "fewer", "static", "%LMQ%one", "moved", "batch")
    assert the(findings, "topic write-only on broker-a").why == "it has no read permission (perm=2)."
    fewer = the(findings, "topic fewer on broker-a: queues")
    assert "from 1 on are not read (2 messages at present)" in fewer.why
    assert "static topic" in the(findings, "topic static").why
    assert "light message queue" in the(findings, "topic %LMQ%one").why
    assert (
        the(findings, "topic moved").next_step
        == "The topic exists in the namespace team-a: correct the option namespace."
    )
    assert the(findings, "topic batch").why == "no name server has a route of the topic batch."
    wrong = the(examine(cluster, "orders", namespace="team-b"), "topic orders")
    assert wrong.next_step == "The topic orders exists without a namespace: leave out namespace=team-b."


def test_batch_queues_are_refused_where_brokers_tell_settings(run_cluster: Callable[..., RunningCluster]) -> None:
    cluster = run_cluster()
    cluster.create_topic("orders", queues=1, attributes={"queue.type": "BatchCQ"})
    found = the(examine(cluster), "topic orders on broker-a")
    assert found.state is State.MISSING
    assert "queue.type=BatchCQ" in found.why


def test_broker_that_forbids_reading_or_filtering(cluster: RunningCluster) -> None:
    cluster.brokers["broker-a"].settings.filters_by_properties = False
    cluster.brokers["broker-b"].settings.is_readable = False
    findings = examine(cluster)
    assert the(findings, "topic orders on broker-a: sql92").next_step == "Set enablePropertyFilter=true at the broker."
    assert the(findings, "topic orders on broker-b: read a topic").state is State.MISSING


def test_group_that_was_not_tried_is_named(cluster: RunningCluster) -> None:
    findings = examine(cluster, group="billing")
    (found,) = (one for one in findings if one.what == "topic orders on broker-a: read a topic")
    assert "the group billing-reader. Whether the broker has this group, or creates it, was not tried." in found.why


def test_broker_with_a_clock_ahead(cluster: RunningCluster) -> None:
    fields = {"name_servers": parse_name_servers(cluster.address)}
    findings = diagnose_cluster(ClusterAddress(**fields), ["orders"], now_ms=wall_clock_ms() - 60_000)
    found = the(findings, f"broker broker-a at {cluster.brokers['broker-a'].address}: clock")
    assert re.search(r"stored \d+ s ahead of this machine's clock", found.why)


def test_silent_servers_cost_one_deadline_together(cluster: RunningCluster) -> None:
    for server in [*cluster.brokers.values(), cluster.name_servers[0]]:
        server.freeze()
    findings = examine(cluster, request_timeout_ms=1000)
    assert {one.state for one in findings if one.what.startswith("broker ")} == {State.MISSING}
    assert the(findings, f"name server {cluster.name_servers[0].address}").state is State.WARNING
    for server in [*cluster.brokers.values(), cluster.name_servers[0]]:
        server.thaw()


def test_docs_have_the_rights_that_the_doctor_names() -> None:
    page = (Path(__file__).parents[3] / "docs" / "CLUSTER.md").read_text()
    table = re.findall(r"^\| (.+) \| (.+) \| (.+) \|$", page.split("## Rights")[1].split("\n## ")[0], re.MULTILINE)
    rows = [tuple(cell.replace("`", "") for cell in row) for row in table[2:]]
    assert rows == [(one.feature, one.acl_1, one.acl_2) for one in RIGHTS]
