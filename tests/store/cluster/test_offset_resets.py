"""Resets of groups in a cluster: the new offsets at the brokers, what members are sent, and resets that fail."""

from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any

import pytest

import rmq_spark
from rmq_spark.store.cluster import client
from rmq_spark.store.cluster.codes import BrokerRequestCode, RequestCode, ResponseCode
from rmq_spark.store.cluster.offset_resets import name_queues
from rmq_spark.store.errors import (
    BackendUnavailableError,
    BrokerError,
    GroupConflictError,
    NoPermissionError,
    NotFoundError,
    OffsetRangeError,
    OptionError,
    RmqError,
    StoreError,
)
from rmq_spark.store.format import fastjson
from rmq_spark.store.model import QueueKey
from rmq_spark.store.testing.brokers import Account, AccountTable, Broker, ConsumerData, RunningCluster, faults
from rmq_spark.store.testing.brokers.raw_client import RawClient
from rmq_spark.store.testing.brokers.wire import Call

RunCluster = Callable[..., RunningCluster]
GROUP = "billing"
RESET = RequestCode.INVOKE_BROKER_TO_RESET_OFFSET
TERMS: dict[str, Any] = {"group": GROUP, "request_timeout_ms": 20_000}
ENDS = {"broker-a:0": 3, "broker-a:1": 2, "broker-b:0": 3, "broker-b:1": 2}
# What a broker does: set the offsets (5.3), or send those that are committed to the members (4.9, 5.3 if so set).
KINDS = {"5.3": ("5.3", True), "5.3 that sends": ("5.3", False), "4.9": ("4.9", True)}


@pytest.fixture(params=sorted(KINDS))
def cluster(request: pytest.FixtureRequest, run_cluster: RunCluster) -> Iterator[RunningCluster]:
    """Two brokers with orders/0 (3 messages) and orders/1 (2 messages). The group has the offset 1 in all."""
    release, resets_at_broker = KINDS[request.param]
    cluster = run_cluster(release=release, brokers=2, is_light=True)
    cluster.create_topic("orders", queues=2)
    cluster.create_topic("returns", queues=1, brokers=["broker-a"])
    for name, broker in cluster.brokers.items():
        broker.settings.resets_at_broker = resets_at_broker
        cluster.advance("orders", 3, broker=name, queue_id=0)
        cluster.advance("orders", 2, broker=name, queue_id=1)
        broker.groups.add(GROUP)
        for queue_id in (0, 1):
            broker.offsets.commit(GROUP, QueueKey("orders", queue_id), 1)
    yield cluster
    client._idle.forget()


def reset(cluster: RunningCluster, to: Any, **given: Any) -> dict[str, dict[str, int]]:
    return rmq_spark.reset_offsets(name_server=cluster.address, to=to, **{**TERMS, **given})


def committed(cluster: RunningCluster, topic: str = "orders", group: str = GROUP) -> dict[str, int | None]:
    """Return the offset of each queue at its broker."""
    return {
        f"{name}:{queue_id}": broker.offsets.find(group, QueueKey(topic, queue_id))
        for name, broker in cluster.brokers.items()
        for queue_id in (0, 1)
    }


def has_resets(broker: Broker) -> bool:
    """Return whether the broker sets offsets."""
    return broker.release.is_5 and broker.settings.resets_at_broker


class Members:
    """A member of the group at each broker, which sees the resets that the broker sends."""

    def __init__(self, cluster: RunningCluster, **terms: Any) -> None:
        self._clients = {name: RawClient(broker.address) for name, broker in cluster.brokers.items()}
        for raw in self._clients.values():
            raw.heartbeat("one@1", ConsumerData.of(GROUP, {"orders": "*"}, **terms))

    def sent(self, broker: str) -> list[tuple[str, str, dict[int, int]]]:
        """Return group, topic and offsets by queue id of each reset that a broker has sent."""
        raw = self._clients[broker]
        raw.call(RequestCode.GET_MAX_OFFSET, {"topic": "orders", "queueId": 0})
        found = []
        for command in raw.requests:
            if command.code == BrokerRequestCode.RESET_CONSUMER_CLIENT_OFFSET:
                table = fastjson.parse(bytes(command.body).decode())["offsetTable"]
                offsets = {fastjson.parse(key)["queueId"]: offset for key, offset in table.items()}
                found.append((command.fields["group"], command.fields["topic"], offsets))
        return found

    def close(self) -> None:
        """Leave the group."""
        for raw in self._clients.values():
            raw.close()


@pytest.fixture
def join(cluster: RunningCluster) -> Iterator[Callable[..., Members]]:
    """A function that lets a client join the group. `terms` are those of `ConsumerData.of`."""
    joined: list[Members] = []

    def call(**terms: Any) -> Members:
        joined.append(Members(cluster, **terms))
        return joined[-1]

    yield call
    for members in joined:
        members.close()


def test_topics_that_are_left_out_are_told(
    cluster: RunningCluster, join: Callable[..., Members], caplog: pytest.LogCaptureFixture
) -> None:
    offsets = cluster.brokers["broker-a"].offsets
    for topic in ("returns", "deleted", "%RETRY%billing"):
        cluster.loop.run(offsets.commit, GROUP, QueueKey(topic, 0), 7)
    cluster.loop.run(offsets.commit, "another", QueueKey("returns", 0), 7)
    join()
    assert reset(cluster, "earliest").keys() == {"orders"}
    assert offsets.find(GROUP, QueueKey("returns", 0)) == 7
    (line,) = [line for line in caplog.messages if "leaves out topics" in line]
    assert "has members: returns. Name them" in line
    caplog.clear()
    assert reset(cluster, "earliest", topics=["orders"]).keys() == {"orders"}
    assert not [line for line in caplog.messages if "leaves out topics" in line]


@pytest.mark.parametrize("is_online", [False, True])
@pytest.mark.parametrize(
    ("to", "expected"),
    [
        ("earliest", dict.fromkeys(ENDS, 0)),
        ("latest", ENDS),
        (0, dict.fromkeys(ENDS, 0)),
        (datetime(2200, 1, 1, tzinfo=UTC), ENDS),
        ({"orders": {"broker-a:0": 2, "broker-b:1": 0}, "@": {}}, {"broker-a:0": 2, "broker-b:1": 0}),
    ],
)
def test_the_group_continues_where_it_was_told(
    cluster: RunningCluster, join: Callable[..., Members], to: Any, expected: dict[str, int], is_online: bool
) -> None:
    members = join() if is_online else None
    assert reset(cluster, to) == {"orders": expected}
    assert committed(cluster) == dict.fromkeys(ENDS, 1) | expected
    for name, broker in cluster.brokers.items():
        own = {int(queue[-1]): offset for queue, offset in expected.items() if queue.startswith(name)}
        if has_resets(broker):
            taken = {queue.queue_id: offset for (_, queue), offset in broker.offsets.resets.items()}
            assert (taken, members.sent(name) if members else []) == (own, [])
        else:
            sent = [(GROUP, "orders", {0: 1, 1: 1} | own)] if is_online else []
            assert broker.offsets.resets == {}
            assert (members.sent(name) if members else []) == sent, "once, and all queues together"


def test_a_time_is_the_first_message_stored_then_or_later(cluster: RunningCluster) -> None:
    queue = QueueKey("orders", 0)
    broker = cluster.brokers["broker-a"]
    stored_ms = broker.loop.run(broker.store.store_time, queue, 2)
    assert reset(cluster, stored_ms)["orders"]["broker-a:0"] == 2


def test_topics_may_be_new_to_the_group_and_the_group_new_to_the_brokers(cluster: RunningCluster) -> None:
    assert reset(cluster, "latest", topics="returns") == {"returns": {"broker-a:0": 0}}
    assert committed(cluster) == dict.fromkeys(ENDS, 1), "other topics stay"
    assert reset(cluster, "latest", group="fresh", topics=["orders"]) == {"orders": ENDS}
    assert committed(cluster, group="fresh") == ENDS
    assert reset(cluster, {"returns": {"0": 0}}, group="fresh") == {"returns": {"broker-a:0": 0}}
    assert rmq_spark.group_offsets(name_server=cluster.address, **{**TERMS, "group": "fresh"})["orders"] == ENDS


def test_the_retry_topic_is_reset_only_by_name(cluster: RunningCluster) -> None:
    retries = f"%RETRY%{GROUP}"
    cluster.create_topic(retries, queues=1, brokers=["broker-b"])
    cluster.advance(retries, 1, broker="broker-b")
    cluster.brokers["broker-b"].offsets.commit(GROUP, QueueKey(retries, 0), 1)
    assert reset(cluster, "earliest").keys() == {"orders"}
    assert reset(cluster, "earliest", topics=retries) == {retries: {"broker-b:0": 0}}


def test_a_namespace_is_added_to_topic_and_group(cluster: RunningCluster) -> None:
    cluster.create_topic("team%jobs", queues=2)
    for broker in cluster.brokers.values():
        broker.groups.add("team%billing")
        for queue_id in (0, 1):
            broker.offsets.commit("team%billing", QueueKey("team%jobs", queue_id), 7)
    found = reset(cluster, "earliest", namespace="team")
    assert found == {"jobs": dict.fromkeys(ENDS, 0)}
    assert committed(cluster, "team%jobs", "team%billing") == dict.fromkeys(ENDS, 0)


@pytest.mark.parametrize(
    ("to", "given", "error", "said"),
    [
        ("newest", {}, OptionError, "'newest' is none of"),
        ("latest", {"topics": "nothing"}, NotFoundError, 'has a route of topic "nothing"'),
        ("latest", {"group": "nobody"}, NotFoundError, 'no consumer group "nobody".*Groups there: billing'),
        ("latest", {"group": "CID_RMQ_SYS_TRANS"}, OptionError, "is a broker's own"),
        ("latest", {"topics": []}, OptionError, "empty list of `topics`"),
        ({"orders": {"0": 1}}, {}, OptionError, r'queue id 0 of topic "orders" without a broker.*"broker-a:0"'),
        ({"orders": {"broker-a:7": 1}}, {}, NotFoundError, 'topic "orders" has no queue broker-a:7. Its queues are'),
        ({"orders": {"broker-c:0": 1}}, {}, NotFoundError, "has no queue broker-c:0"),
        ({"orders": {"broker-a": 1}}, {}, OptionError, "has the key 'broker-a'; expected a queue as \"broker-a:0\""),
        ({"orders": {"broker-a:0": 4}}, {}, OffsetRangeError, r'orders/broker-a:0 holds.*"latest" is 3 now'),
        ({"orders": {"broker-a:0": 1}}, {"topics": "orders"}, OptionError, "Leave `topics` out"),
        ({"returns": {"0": 0, "broker-a:0": 0}}, {}, OptionError, "names the queue broker-a:0 twice"),
    ],
)
def test_what_cannot_be_reset_is_refused_before_anything_changes(
    cluster: RunningCluster, to: Any, given: dict[str, Any], error: type[RmqError], said: str
) -> None:
    with pytest.raises(error, match=said):
        reset(cluster, to, **given)
    assert committed(cluster) == dict.fromkeys(ENDS, 1)
    assert not any(counts[RESET] for counts in cluster.clear_requests().values())


def test_a_broker_that_does_not_answer_prevents_the_reset(cluster: RunningCluster) -> None:
    cluster.brokers["broker-b"].freeze()
    try:
        with pytest.raises(BackendUnavailableError, match=r"billing: broker-b does not answer.*Nothing was changed"):
            reset(cluster, "latest", request_timeout_ms=500)
        with pytest.raises(BackendUnavailableError, match="cannot read queue orders/broker-b:0"):
            reset(cluster, "latest", topics="orders", request_timeout_ms=500)
        assert committed(cluster)["broker-a:0"] == 1
        reset(cluster, {"orders": {"broker-a:0": 3}}, request_timeout_ms=500)
        assert committed(cluster)["broker-a:0"] == 3, "broker-b is not needed for this"
    finally:
        cluster.brokers["broker-b"].thaw()


@pytest.mark.parametrize(
    ("fault", "error", "cause"),
    [
        (faults.with_code(1, "a planted fault"), BrokerError, "a planted fault"),
        (faults.with_code(16, "User:u has no permission to access Topic:orders"), NoPermissionError, "Update of the"),
        (faults.with_code(14, "service not available now"), BackendUnavailableError, "service not available now"),
        (faults.with_code(3, " request type 222 not supported"), BrokerError, "does not know the request"),
    ],
)
def test_a_reset_that_reached_some_brokers_says_which(
    cluster: RunningCluster, fault: faults.Fault, error: type[RmqError], cause: str
) -> None:
    cluster.brokers["broker-b"].fail(RESET, fault)
    with pytest.raises(error) as caught:
        reset(cluster, "earliest")
    text = str(caught.value)
    assert "found the queues orders/broker-b:0-1 not reset, or only until a member commits; expected all" in text
    assert "Reset were orders/broker-a:0-1. Call it again" in text
    assert cause in text
    cluster.brokers["broker-b"].heal()
    assert reset(cluster, "earliest") == {"orders": dict.fromkeys(ENDS, 0)}


def test_a_commit_that_is_refused_is_no_reset(cluster: RunningCluster) -> None:
    fault = faults.with_code(1, "a planted fault")
    cluster.brokers["broker-b"].fail(RequestCode.UPDATE_CONSUMER_OFFSET, fault)
    with pytest.raises(BrokerError, match=r"the queues orders/broker-b:0-1 not reset.*Reset were orders/broker-a:0-1"):
        reset(cluster, "earliest")
    assert committed(cluster) == {"broker-a:0": 0, "broker-a:1": 0, "broker-b:0": 1, "broker-b:1": 1}


def commits_between(broker: Broker, times: int | None, offset: int = 2) -> None:
    """Let a member commit an offset in orders/0 between our commit and the broker's reset, a number of times."""

    def fail(call: Call, serve: Callable[[], None]) -> None:
        broker.offsets.commit(GROUP, QueueKey("orders", 0), offset)
        serve()

    broker.fail(RESET, fail, times=times)


@pytest.mark.parametrize("is_online", [False, True])
def test_a_member_that_commits_at_the_same_time_does_not_undo_the_reset(
    cluster: RunningCluster, join: Callable[..., Members], is_online: bool
) -> None:
    members = join() if is_online else None
    broker = cluster.brokers["broker-a"]
    commits_between(broker, 1)
    assert reset(cluster, "earliest") == {"orders": dict.fromkeys(ENDS, 0)}
    assert committed(cluster) == dict.fromkeys(ENDS, 0)
    if not has_resets(broker) and members is not None:
        assert members.sent("broker-a")[-1] == (GROUP, "orders", {0: 0, 1: 0})


def test_a_member_that_commits_again_and_again_is_named_as_the_cause(
    cluster: RunningCluster, join: Callable[..., Members]
) -> None:
    join()
    broker = cluster.brokers["broker-a"]
    commits_between(broker, None)
    if has_resets(broker):
        assert reset(cluster, "earliest") == {"orders": dict.fromkeys(ENDS, 0)}
        return
    with pytest.raises(GroupConflictError, match=r"queues orders/broker-a:0 not reset.*members of consumer group bil"):
        reset(cluster, "earliest")


def test_members_that_cannot_be_told_prevent_the_reset(cluster: RunningCluster, join: Callable[..., Members]) -> None:
    members = join()
    for broker in cluster.brokers.values():
        broker.offsets.committed.pop((GROUP, QueueKey("orders", 1)))
    to = {"orders": {"broker-a:0": 2, "broker-b:0": 2, "broker-b:1": 2}}
    if has_resets(cluster.brokers["broker-a"]):
        assert reset(cluster, to) == to
        return
    with pytest.raises(GroupConflictError) as caught:
        reset(cluster, to)
    assert "queues orders/broker-a:0 not reset" in str(caught.value)
    assert "has the member one@1, and lacks an offset in some queues of the topic" in str(caught.value)
    assert "Reset were orders/broker-b:0-1" in str(caught.value)
    members.close()
    assert reset(cluster, to) == to, "nobody needs to be told"


def test_a_queue_to_which_nothing_is_written_is_not_told(cluster: RunningCluster, join: Callable[..., Members]) -> None:
    join()
    cluster.brokers["broker-a"].set_topic("orders", read_queues=2, write_queues=1)
    if has_resets(cluster.brokers["broker-a"]):
        assert reset(cluster, "earliest")["orders"] == dict.fromkeys(ENDS, 0)
        return
    with pytest.raises(StoreError, match=r"queues orders/broker-a:1 not reset.*writeQueueNums"):
        reset(cluster, "earliest")


def test_what_members_do_besides_is_logged(
    cluster: RunningCluster, join: Callable[..., Members], caplog: pytest.LogCaptureFixture
) -> None:
    join(consume_type="CONSUME_ACTIVELY")
    reset(cluster, {"orders": {"broker-a:0": 2}})
    if has_resets(cluster.brokers["broker-a"]):
        assert not caplog.text
        return
    assert "also return to their committed offsets in 1 other queues of topic orders on broker broker-a" in caplog.text
    assert (
        "the members of consumer group billing pull, so they ignore the reset, and commit over it: one@1" in caplog.text
    )


def test_a_reset_that_waits_is_replaced(cluster: RunningCluster) -> None:
    broker = cluster.brokers["broker-b"]
    reset(cluster, "latest")
    reset(cluster, "earliest")
    assert committed(cluster) == dict.fromkeys(ENDS, 0)
    assert broker.offsets.take_reset(GROUP, QueueKey("orders", 0)) == (0 if has_resets(broker) else None)


def test_the_account_needs_rights_on_topic_and_group(cluster: RunningCluster) -> None:
    account = {"access_key": "admin", "secret_key": "12345678"}

    def give(topics: str, groups: str) -> None:
        rights: dict[str, Any] = {"topics": {"orders": topics}, "groups": {GROUP: groups, "rmq-spark-reader": "SUB"}}
        for broker in cluster.brokers.values():
            broker.accounts = AccountTable(Account("admin", "12345678", **rights))

    give("SUB|GET|UPDATE", "SUB|GET|UPDATE")
    assert reset(cluster, "earliest", **account) == {"orders": dict.fromkeys(ENDS, 0)}
    assert reset(cluster, 0, topics="orders", **account) == {"orders": dict.fromkeys(ENDS, 0)}
    give("SUB|GET", "SUB|GET")
    if cluster.release.is_5:
        with pytest.raises(NoPermissionError, match=r"Update of the topic and of the group \(5\.3\)"):
            reset(cluster, "earliest", **account)


def test_a_broker_that_has_moved_is_found(cluster: RunningCluster) -> None:
    with rmq_spark.open_reader(name_server=cluster.address, request_timeout_ms=20_000) as reader:
        reader.lag(GROUP)
    cluster.brokers["broker-b"].kill()
    cluster.brokers["broker-b"].restart(new_port=True)
    assert reset(cluster, "earliest") == {"orders": dict.fromkeys(ENDS, 0)}


def test_names_of_queues_are_short() -> None:
    queues = [QueueKey("orders", number, "broker-a") for number in (3, 0, 1, 2, 7)]
    assert name_queues([*queues, QueueKey("orders", 0, "broker-b"), QueueKey("jobs", 4)]) == (
        "jobs/4, orders/broker-a:0-3, orders/broker-a:7, orders/broker-b:0"
    )
    assert name_queues([]) == ""


def test_the_code_of_a_broker_is_kept(cluster: RunningCluster) -> None:
    cluster.brokers["broker-b"].fail(RESET, faults.with_code(ResponseCode.SYSTEM_ERROR, "a planted fault"))
    with pytest.raises(BrokerError) as caught:
        reset(cluster, "earliest")
    assert caught.value.code == ResponseCode.SYSTEM_ERROR
