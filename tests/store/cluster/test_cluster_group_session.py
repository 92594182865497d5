"""A query as a member of its group in a cluster: queues, offsets, resets and locks."""

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from support.cluster_fixtures import await_quiet, reset_offset

from rmq_spark.store.backend import GroupAssignment, GroupTerms
from rmq_spark.store.cluster.address import ClusterAddress, Credentials, parse_name_servers
from rmq_spark.store.cluster.backend import ClusterBackend
from rmq_spark.store.cluster.client import monotonic_ms, now_ms
from rmq_spark.store.cluster.codes import RequestCode
from rmq_spark.store.cluster.group_session import ClusterGroupSession
from rmq_spark.store.cluster.member_requests import make_client_id
from rmq_spark.store.errors import (
    BackendUnavailableError,
    BrokerError,
    GroupConflictError,
    NoPermissionError,
    OptionError,
    StoreError,
)
from rmq_spark.store.filter.row_filter import Expression
from rmq_spark.store.model import QueueKey
from rmq_spark.store.testing.backend_groups import eventually
from rmq_spark.store.testing.brokers import Account, AccountTable, Answer, Broker, RunningCluster, faults
from rmq_spark.store.testing.brokers.wire import Call, QueueId

A, B, GROUP = "broker-a", "broker-b", "billing"
Q = [QueueKey("orders", number, broker) for broker in (A, B) for number in range(2)]
EVERYTHING = Expression("TAG", "*")


class Query:
    """A query of the group: a backend and a session, with a clock that can be set forward."""

    def __init__(self, address: ClusterAddress, **terms: Any) -> None:
        self.passed_s = 0.0
        self.backend = ClusterBackend(address, now_ms, lambda: monotonic_ms() + self.passed_s * 1000)
        given = {"assignment": "shared", "expressions": (("orders", EVERYTHING),), **terms}
        session = self.backend.group(GroupTerms(GROUP, **given))
        assert isinstance(session, ClusterGroupSession)
        self.session = session
        self.applied: int | None = 0

    def queues(self, *topics: str) -> list[QueueKey]:
        """Return the queues that can be read now."""
        self.backend.refresh()
        found = self.backend.queues(topics or ["orders"], missing_ok=topics or ["orders"])
        queues = [queue for of_topic in found.values() for queue in of_topic]
        return [queue for queue, one in self.backend.bounds(queues).items() if hasattr(one, "max_offset")]

    def rebalance(
        self, finished: dict[QueueKey, int] | None = None, *topics: str, is_batch: bool = False
    ) -> GroupAssignment:
        """Rebalance, and settle as a query that has planned."""
        found = self.session.rebalance(self.queues(*topics), finished or {}, self.applied)
        self.applied = found.reset_number
        self.session.settle(is_batch=is_batch)
        return found

    def pass_time(self, passed_s: float) -> None:
        """Set the clock of the query forward, and wake the thread of its membership."""
        member = self.session._member
        if member is not None:
            await_quiet(member)
        self.passed_s += passed_s
        if member is not None:
            member._waker.wake()


Start = Callable[..., Query]


@pytest.fixture(params=["5.3", "4.9"])
def cluster(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[RunningCluster]:
    """Two brokers, each with two queues of the topic orders with ten messages each."""
    with RunningCluster(tmp_path / "cluster", release=request.param, brokers=2, is_light=True) as cluster:
        cluster.create_topic("orders", queues=2)
        for name in cluster.brokers:
            cluster.advance("orders", 10, broker=name)
        yield cluster


@pytest.fixture
def start(cluster: RunningCluster) -> Iterator[Start]:
    """A function that starts a query."""
    with ExitStack() as stack:

        def start(**terms: Any) -> Query:
            address = ClusterAddress(
                parse_name_servers(cluster.address),
                request_timeout_ms=terms.pop("timeout_ms", 3000),
                namespace=terms.pop("namespace", ""),
                pull_group=terms.pop("pull_group", ""),
                credentials=terms.pop("credentials", None),
            )
            query = Query(address, **terms)
            stack.callback(query.backend.close)
            return query

        yield start


def offset_of(cluster: RunningCluster, queue: QueueKey) -> int | None:
    return cluster.brokers[queue.broker].offsets.find(GROUP, QueueKey(queue.topic, queue.queue_id))


def commit(cluster: RunningCluster, queue: QueueKey, offset: int) -> None:
    """Let another member commit an offset."""
    offsets = cluster.brokers[queue.broker].offsets
    cluster.loop.run(offsets.commit, GROUP, QueueKey(queue.topic, queue.queue_id), offset)


def add_java(cluster: RunningCluster, client_id: str, *brokers: str, **terms: Any) -> None:
    """Let a Java consumer join at brokers, by default at all."""
    for name in brokers or cluster.brokers:
        cluster.brokers[name].members.add(GROUP, client_id, {"orders": "*"}, **terms)


def drop_java(cluster: RunningCluster, client_id: str, *brokers: str) -> None:
    for name in brokers or cluster.brokers:
        cluster.brokers[name].members.remove(GROUP, client_id)


def settled(start: Start, **terms: Any) -> Query:
    """Return a query that owns all queues and has nothing to do."""
    query = start(**terms)
    assert set(query.rebalance().owned) == set(Q)
    while query.session.has_changed():
        query.rebalance()
    return query


# Joining.


def test_a_member_id_begins_with_machine_and_process() -> None:
    assert make_client_id("192.0.2.1", 77, "daily sums/€", "0a1b2c3d") == "192.0.2.1@77#rmq-spark#daily_sums__#0a1b2c3d"
    assert make_client_id("::1", 1, "", "0a1b2c3d") == "::1@1#rmq-spark#-#0a1b2c3d"


def test_join_registers_at_the_brokers_of_the_named_topics(cluster: RunningCluster, start: Start) -> None:
    query = start(query_name="sums")
    query.session.join()
    assert query.session.member_id.startswith("127.0.0.1@")
    assert "#rmq-spark#sums#" in query.session.member_id
    for broker in cluster.brokers.values():
        assert broker.members.ids(GROUP) == [query.session.member_id]
        assert broker.members.groups[GROUP].subscriptions.keys() == {"orders", "%RETRY%billing"}


def test_join_with_filters_tells_them(cluster: RunningCluster, start: Start) -> None:
    expressions = (("orders", Expression("TAG", "A || B")), ("payments", Expression("SQL92", "a > 1")))
    cluster.create_topic("payments", queues=1)
    start(expressions=expressions).session.join()
    found = cluster.brokers[A].members.groups[GROUP].subscriptions
    assert (found["orders"]["subString"], found["orders"]["expressionType"]) == ("A || B", "TAG")
    assert (found["payments"]["subString"], found["payments"]["expressionType"]) == ("a > 1", "SQL92")


@pytest.mark.parametrize(
    ("fallback", "shown"), [("earliest", "CONSUME_FROM_FIRST_OFFSET"), ("timestamp", "CONSUME_FROM_TIMESTAMP")]
)
def test_join_shows_where_the_query_begins(cluster: RunningCluster, start: Start, fallback: str, shown: str) -> None:
    start(fallback=fallback).session.join()
    assert cluster.brokers[A].members.groups[GROUP].consume_from_where == shown


def test_assignment_all_is_refused(start: Start) -> None:
    with pytest.raises(OptionError, match="expected assignment=shared"):
        start(assignment="all")


@pytest.mark.parametrize(
    ("subscription", "terms", "words"),
    [
        ({"payments": "*"}, {}, "subscribes to payments, and this query to orders"),
        ({"orders": "A"}, {}, 'subscribes to orders (tags="A"), and this query to orders'),
        ({"orders": "*"}, {"message_model": "BROADCASTING"}, "messageModel=BROADCASTING"),
    ],
)
def test_join_of_a_group_with_others_is_a_conflict(
    cluster: RunningCluster, start: Start, subscription: dict[str, str], terms: dict[str, str], words: str
) -> None:
    cluster.brokers[B].members.add(GROUP, "192.0.2.9@1", subscription, **terms)
    before = dict(cluster.brokers[B].members.groups[GROUP].subscriptions)
    query = start()
    with pytest.raises(GroupConflictError) as caught:
        query.session.join()
    for word in (words, "192.0.2.9@1", "broker-b", query.session.member_id):
        assert word in str(caught.value)
    assert cluster.brokers[B].members.ids(GROUP) == ["192.0.2.9@1"], "it sent no heartbeat"
    assert cluster.brokers[B].members.groups[GROUP].subscriptions == before


@pytest.mark.parametrize(("mode", "is_refused"), [("POP", True), ("PULL", False)])
def test_join_of_a_group_that_consumes_by_pop_is_a_conflict(
    cluster: RunningCluster, start: Start, mode: str, is_refused: bool
) -> None:
    body = b'{"messageQueueAssignments":[{"messageQueue":{"brokerName":"b","queueId":0,"topic":"t"},"mode":"%b"}]}'

    def answer(call: Call, serve: Callable[[], None]) -> None:
        asked = json.loads(call.command.body)
        assert (asked["consumerGroup"], asked["messageModel"]) == (GROUP, "BROADCASTING")
        call.answer(Answer(body=body % mode.encode() if asked["topic"] == "orders" else b"{}"))

    cluster.brokers[B].fail(RequestCode.QUERY_ASSIGNMENT, answer)
    query = start()
    if is_refused:
        with pytest.raises(GroupConflictError, match="broker broker-b lets the group consume topic orders by POP"):
            query.session.join()
    else:
        query.session.join()
    assert bool(cluster.brokers[A].members.ids(GROUP)) != is_refused


def test_join_finds_members_of_other_topics_at_the_brokers_of_the_retry_topic(
    cluster: RunningCluster, start: Start
) -> None:
    cluster.create_topic("payments", queues=1, brokers=[B])
    cluster.create_topic("invoices", queues=1, brokers=[A])
    start(expressions=(("payments", EVERYTHING),)).session.join()
    with pytest.raises(GroupConflictError, match="subscribes to payments, and this query to invoices"):
        start(expressions=(("invoices", EVERYTHING),)).session.join()


def test_join_finds_a_member_that_joins_at_the_same_time(cluster: RunningCluster, start: Start) -> None:
    def serve_and_add(call: Call, serve: Callable[[], None]) -> None:
        serve()
        cluster.brokers[A].members.add(GROUP, "192.0.2.9@1", {"payments": "*"})

    cluster.brokers[A].fail(RequestCode.HEART_BEAT, serve_and_add)  # the newest heartbeat counts
    with pytest.raises(GroupConflictError, match="subscribes to payments"):
        start().session.join()
    assert eventually(lambda: cluster.brokers[A].members.ids(GROUP) == ["192.0.2.9@1"])


def test_a_broker_that_does_not_know_the_group_is_left_out(cluster: RunningCluster, start: Start) -> None:
    cluster.brokers[B].fail(RequestCode.HEART_BEAT, faults.with_code(0))
    query = start()
    assert set(query.rebalance().owned) == set(Q)
    assert cluster.brokers[B].members.ids(GROUP) == []


def test_members_that_join_later_with_another_subscription_are_reported(
    cluster: RunningCluster, start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    query = settled(start)
    cluster.brokers[A].members.add(GROUP, "192.0.2.9@1", {"payments": "*"})
    for _ in range(3):
        query.rebalance()
    assert caplog.text.count("the members of consumer group billing do not agree") == 1
    assert "192.0.2.9@1" in caplog.text


def test_a_comparison_that_fails_later_is_a_warning(
    cluster: RunningCluster, start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    query = settled(start)
    rule = cluster.brokers[A].fail(RequestCode.GET_CONSUMER_CONNECTION_LIST, faults.with_code(1, "a planted fault"))
    cluster.brokers[A].members.add(GROUP, "192.0.2.9@1", {"payments": "*"})
    for _ in range(3):
        assert set(query.rebalance().owned) == set(Q[:2])
    assert caplog.text.count("have the same subscription is not known: ") == 1
    cluster.brokers[A].heal(rule)
    query.rebalance()
    assert caplog.text.count("the members of consumer group billing do not agree") == 1


def test_queries_with_a_pattern_may_have_seen_other_topics(
    cluster: RunningCluster, start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    pattern = (("", EVERYTHING),)
    cluster.create_topic("orders-late", queues=1)
    query = start(expressions=pattern)
    query.rebalance(None, "orders", "orders-late")
    other = start(expressions=pattern)
    other.rebalance()
    assert len(cluster.brokers[A].members.ids(GROUP)) == 2
    assert "do not agree" in caplog.text
    with pytest.raises(GroupConflictError, match=r'and this query to orders \(tags="A"\)'):
        start(expressions=(("", Expression("TAG", "A")),)).rebalance()
    cluster.create_topic("payments", queues=1)
    with pytest.raises(GroupConflictError, match="and this query to payments"):
        start(expressions=pattern).rebalance(None, "payments")


def test_a_topic_that_was_deleted_leaves_the_subscription_of_a_pattern(cluster: RunningCluster, start: Start) -> None:
    cluster.create_topic("orders-late", queues=1)
    query = start(expressions=(("", EVERYTHING),))
    query.rebalance(None, "orders", "orders-late")
    assert "orders-late" in cluster.brokers[A].members.groups[GROUP].subscriptions
    for broker in cluster.brokers.values():
        broker.delete_topic("orders-late")
    query.backend.reopen()
    found = query.rebalance(None, "orders", "orders-late")
    assert {queue.topic for queue in query.session.epochs} == {"orders"}
    assert {queue.topic for queue in found.lost} == {"orders-late"}
    for broker in cluster.brokers.values():
        assert eventually(lambda broker=broker: "orders-late" not in broker.members.groups[GROUP].subscriptions)


def test_a_topic_whose_brokers_are_away_stays_in_the_subscription_of_a_pattern(
    cluster: RunningCluster, start: Start
) -> None:
    cluster.create_topic("orders-late", queues=1, brokers=[B])
    query = start(expressions=(("", EVERYTHING),), timeout_ms=300)
    query.rebalance(None, "orders", "orders-late")
    broker = cluster.brokers[B]
    broker.kill()
    cluster.forget(broker)
    query.backend.reopen()
    query.rebalance(None, "orders", "orders-late")
    assert "orders-late" in cluster.brokers[A].members.groups[GROUP].subscriptions


def test_a_broker_that_has_left_gets_no_heartbeats(cluster: RunningCluster, start: Start) -> None:
    query = settled(start)
    member = query.session._member
    assert member is not None
    assert set(member._schedule.brokers) == {A, B}
    cluster.brokers[B].kill()
    cluster.forget(cluster.brokers[B])
    query.backend.reopen()
    query.rebalance()
    assert set(member._schedule.brokers) == {A}
    cluster.brokers[B].restart()
    query.backend.reopen()
    assert eventually(lambda: set(query.rebalance().owned) == set(Q))
    assert cluster.brokers[B].members.ids(GROUP) == [query.session.member_id]


def test_a_registration_that_a_broker_has_lost_is_repeated(cluster: RunningCluster, start: Start) -> None:
    cluster.brokers[A].fail(RequestCode.HEART_BEAT, faults.with_code(0), times=1)
    query = start()
    query.session.join()
    assert cluster.brokers[A].members.ids(GROUP) == [query.session.member_id]
    assert set(query.rebalance().owned) == set(Q)


def test_a_group_that_is_not_created_is_an_error(cluster: RunningCluster, start: Start) -> None:
    for broker in cluster.brokers.values():
        broker.fail(RequestCode.HEART_BEAT, faults.with_code(0))
    query = start()
    with pytest.raises(NoPermissionError, match="autoCreateSubscriptionGroup=false"):
        query.session.join()
    assert query.session._member is None, "the thread has ended"


def test_join_without_any_broker_is_an_error_that_may_pass(cluster: RunningCluster, start: Start) -> None:
    query = start(timeout_ms=300)
    for broker in cluster.brokers.values():
        broker.kill()
    query.session.join()
    assert query.session.rebalance([], {}, 0) == GroupAssignment((), (), {}, (), {}, 0)
    assert not query.session.has_changed()
    for broker in cluster.brokers.values():
        broker.restart()
    query.backend.reopen()
    assert set(query.rebalance().owned) == set(Q)


def test_join_with_brokers_that_do_not_answer_raises(cluster: RunningCluster, start: Start) -> None:
    query = start(timeout_ms=300)
    query.queues()
    for broker in cluster.brokers.values():
        broker.freeze()
    with pytest.raises(BackendUnavailableError, match=r"broker-[ab]"):
        query.session.join()
    for broker in cluster.brokers.values():
        broker.thaw()
    query.session.join()
    assert query.session.member_id in cluster.brokers[A].members.ids(GROUP)


def test_a_broker_that_is_away_does_not_keep_a_query_from_joining(cluster: RunningCluster, start: Start) -> None:
    query = start(timeout_ms=300)
    query.queues()
    cluster.brokers[B].freeze()
    assert set(query.rebalance().owned) == set(Q[:2])
    cluster.brokers[B].thaw()
    assert eventually(lambda: query.session.member_id in cluster.brokers[B].members.ids(GROUP))
    assert eventually(lambda: set(query.rebalance().owned) == set(Q))


def test_a_refused_heartbeat_is_raised(cluster: RunningCluster, start: Start) -> None:
    cluster.brokers[B].fail(RequestCode.HEART_BEAT, faults.with_code(1, "a planted fault"))
    with pytest.raises(BrokerError, match="a planted fault"):
        start().session.join()
    assert eventually(lambda: cluster.brokers[A].members.ids(GROUP) == [])


def test_the_rights_of_a_member_are_named(cluster: RunningCluster, start: Start) -> None:
    reader = Account("reader", "s", topics={"*": "SUB|GET"}, groups={"rmq-spark-reader": "SUB"})
    member = Account("member", "s", topics={"*": "SUB|GET"}, groups={"billing": "SUB|GET", "rmq-spark-reader": "SUB"})
    for broker in cluster.brokers.values():
        broker.accounts = AccountTable(reader, member)
    with pytest.raises(NoPermissionError, match=r"A query that joins also needs|the rights of a member"):
        start(credentials=Credentials("reader", "s")).rebalance()
    assert set(start(credentials=Credentials("member", "s")).rebalance().owned) == set(Q)


def test_a_query_with_a_pattern_subscribes_to_new_topics(cluster: RunningCluster, start: Start) -> None:
    query = start(expressions=(("", EVERYTHING),))
    query.session.join()
    assert cluster.brokers[A].members.ids(GROUP) == [], "its topics are not known yet"
    assert set(query.rebalance().owned) == set(Q)
    cluster.create_topic("payments", queues=1, brokers=[A])
    query.backend.reopen()
    found = query.rebalance(None, "orders", "payments")
    assert found.gained == (QueueKey("payments", 0, A),)
    for broker in cluster.brokers.values():
        assert eventually(lambda broker=broker: "payments" in broker.members.groups[GROUP].subscriptions)


def test_names_of_a_namespace_are_wrapped(cluster: RunningCluster, start: Start) -> None:
    cluster.create_topic("ns%orders", queues=2)
    query = start(namespace="ns")
    assert set(query.rebalance().owned) == set(Q)
    group = cluster.brokers[A].members.groups["ns%billing"]
    assert group.subscriptions.keys() == {"ns%orders", "%RETRY%ns%billing"}
    query.session.publish({Q[0]: 0, Q[1]: 7})
    assert cluster.brokers[A].offsets.find("ns%billing", QueueKey("ns%orders", 1)) == 7


# Sharing.


def test_queues_are_shared_with_a_java_consumer(cluster: RunningCluster, start: Start) -> None:
    query = settled(start)
    add_java(cluster, "192.0.2.9@1")  # behind 127.0.0.1, so the query has the first half
    assert eventually(query.session.has_changed)
    found = query.rebalance(dict.fromkeys(Q, 4))
    assert (set(found.owned), set(found.lost)) == (set(Q[:2]), set(Q[2:]))
    assert [offset_of(cluster, queue) for queue in Q[2:]] == [4, 4], "published before they are given up"
    drop_java(cluster, "192.0.2.9@1")
    commit(cluster, Q[2], 6)
    assert eventually(query.session.has_changed)
    found = query.rebalance(dict.fromkeys(Q, 4))
    assert set(found.gained) == set(Q[2:])
    assert found.held == {Q[2]: 6, Q[3]: 4}


def test_a_lost_queue_that_another_member_has_advanced_is_not_published(cluster: RunningCluster, start: Start) -> None:
    query = settled(start)
    query.session.publish(dict.fromkeys(Q, 1))
    add_java(cluster, "192.0.2.9@1")
    commit(cluster, Q[2], 8)
    query.rebalance(dict.fromkeys(Q, 4))
    assert [offset_of(cluster, queue) for queue in Q] == [1, 1, 8, 4]


def test_queues_of_a_broker_that_the_routes_have_are_shared_even_if_it_is_frozen(
    cluster: RunningCluster, start: Start
) -> None:
    query = settled(start, timeout_ms=300)
    add_java(cluster, "192.0.2.9@1")
    cluster.brokers[B].freeze()
    found = query.rebalance()
    assert set(found.owned) == set(Q[:2]), "the java consumer has those of the frozen broker"
    cluster.brokers[B].thaw()


def test_members_at_one_broker_only_count_for_all_queues(cluster: RunningCluster, start: Start) -> None:
    query = settled(start)
    add_java(cluster, "192.0.2.9@1", B)
    assert set(query.rebalance().owned) == set(Q[:2])


def test_a_member_that_a_broker_has_dropped_registers_again(cluster: RunningCluster, start: Start) -> None:
    query = settled(start)
    cluster.brokers[B].members.remove(GROUP, query.session.member_id)
    assert set(query.rebalance().owned) == set(Q)
    assert cluster.brokers[B].members.ids(GROUP) == [query.session.member_id]


def test_a_member_that_a_broker_does_not_list_owns_nothing(cluster: RunningCluster, start: Start) -> None:
    query = settled(start)
    add_java(cluster, "192.0.2.9@1")
    cluster.brokers[B].members.remove(GROUP, query.session.member_id)
    cluster.brokers[B].fail(RequestCode.HEART_BEAT, faults.with_code(0))
    found = query.rebalance(dict.fromkeys(Q, 4))
    assert (found.owned, set(found.lost)) == ((), set(Q))
    cluster.brokers[B].heal()
    query.pass_time(1.1)
    assert query.session.has_changed()
    assert set(query.rebalance().owned) == set(Q[:2])


def test_a_look_is_due_after_20_s_and_at_brokers_that_keep_resets_after_5_s(
    cluster: RunningCluster, start: Start
) -> None:
    query = settled(start)
    query.pass_time(4.9)
    assert not query.session.has_changed()
    query.pass_time(14.1)
    assert query.session.has_changed() == cluster.release.is_5
    query.pass_time(1.1)
    assert query.session.has_changed()
    query.rebalance()
    assert not query.session.has_changed()


def test_a_question_for_changes_asks_no_broker(cluster: RunningCluster, start: Start) -> None:
    query = settled(start)
    member = query.session._member
    assert member is not None
    cluster.clear_requests()
    for passed_s in (0, 5.1, 20, 0):
        query.passed_s += passed_s
        query.session.has_changed()
    counts = cluster.clear_requests()
    assert {code for count in counts.values() for code in count} <= {RequestCode.HEART_BEAT}


def test_a_queue_whose_offset_cannot_be_read_is_not_owned_until_it_can(cluster: RunningCluster, start: Start) -> None:
    is_first = lambda call: call.command.fields["queueId"] == "0"  # noqa: E731
    fault = faults.with_code(14, "service not available")
    cluster.brokers[A].fail(RequestCode.QUERY_CONSUMER_OFFSET, fault, when=is_first)
    query = start()
    found = query.rebalance()
    assert set(found.owned) == set(found.gained) == set(Q[1:])
    cluster.brokers[A].heal()
    query.pass_time(1.1)
    assert query.session.has_changed()
    found = query.rebalance()
    assert (set(found.owned), found.gained) == (set(Q), (Q[0],))


def test_a_refused_offset_is_raised(cluster: RunningCluster, start: Start) -> None:
    cluster.brokers[A].fail(RequestCode.QUERY_CONSUMER_OFFSET, faults.with_code(16, "no"))
    with pytest.raises(NoPermissionError):
        start().rebalance()


def test_a_strategy_that_leaves_queues_out_is_reported(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    query = start(strategy="machineRoom:north")
    assert query.rebalance().owned == ()
    query.rebalance()
    assert caplog.text.count("gives these queues to nobody") == 1


# Doubt.


def lose_connection(cluster: RunningCluster, query: Query, broker: str = A) -> None:
    """Close the member's connection at a broker, and wait until it is registered again."""
    count = cluster.brokers[broker].requests[RequestCode.HEART_BEAT]
    cluster.brokers[broker].members.expire(GROUP, query.session.member_id)
    assert eventually(lambda: cluster.brokers[broker].requests[RequestCode.HEART_BEAT] > count)
    member = query.session._member
    assert member is not None
    assert eventually(lambda: member.registered([broker]) == [broker])


def test_a_queue_that_nobody_advanced_meanwhile_stays(cluster: RunningCluster, start: Start) -> None:
    query = settled(start)
    query.session.publish(dict.fromkeys(Q, 2))
    lose_connection(cluster, query)
    assert query.session.has_changed()
    found = query.rebalance(dict.fromkeys(Q, 5))
    assert (set(found.owned), found.gained, found.resets) == (set(Q), (), {})


@pytest.mark.parametrize("broker", [A, B])
def test_a_queue_that_another_member_advanced_is_gained_again(
    cluster: RunningCluster, start: Start, broker: str, caplog: pytest.LogCaptureFixture
) -> None:
    query = settled(start)
    query.session.publish(dict.fromkeys(Q, 2))
    lose_connection(cluster, query, broker)  # a java consumer asks one broker for all members
    commit(cluster, Q[0], 7)
    found = query.rebalance(dict.fromkeys(Q, 5))
    assert (found.gained, found.held) == ((Q[0],), {Q[0]: 7})
    assert set(found.owned) == set(Q)
    assert "another member has read queue orders/broker-a:0 up to offset 7" in caplog.text
    query.session.publish({**dict.fromkeys(Q, 5), Q[0]: 7})
    assert offset_of(cluster, Q[0]) == 7


def test_a_queue_that_another_member_advanced_less_stays(cluster: RunningCluster, start: Start) -> None:
    query = settled(start)
    query.session.publish(dict.fromkeys(Q, 2))
    lose_connection(cluster, query)
    commit(cluster, Q[0], 3)
    found = query.rebalance(dict.fromkeys(Q, 5))
    assert (found.gained, found.resets) == ((), {})


def test_an_offset_below_all_own_ones_is_a_reset(cluster: RunningCluster, start: Start) -> None:
    commit(cluster, Q[0], 3)
    query = settled(start)
    query.session.publish(dict.fromkeys(Q, 6))
    lose_connection(cluster, query)
    commit(cluster, Q[0], 1)
    found = query.rebalance(dict.fromkeys(Q, 7))
    assert (found.gained, found.resets) == ((), {Q[0]: 1})


def test_an_offset_that_a_killed_broker_has_forgotten_is_no_reset(cluster: RunningCluster, start: Start) -> None:
    commit(cluster, Q[0], 3)
    query = settled(start)
    query.session.publish(dict.fromkeys(Q, 6))
    lose_connection(cluster, query)
    commit(cluster, Q[0], 3)  # as 5 s ago
    found = query.rebalance(dict.fromkeys(Q, 7))
    assert (found.gained, found.resets) == ((), {})


@pytest.mark.parametrize("is_notified", [True, False])
def test_a_member_that_came_and_went_while_a_batch_ran_is_not_overwritten(
    cluster: RunningCluster, start: Start, is_notified: bool
) -> None:
    query = settled(start)
    query.session.publish(dict.fromkeys(Q, 2))
    if is_notified:
        add_java(cluster, "192.0.2.9@1")
        commit(cluster, Q[3], 9)
        drop_java(cluster, "192.0.2.9@1")
        assert eventually(query.session.has_changed)
    else:  # the query has seen other members at its last look
        member = query.session._member
        assert member is not None
        add_java(cluster, "192.0.2.9@1", A)
        query.rebalance(dict.fromkeys(Q, 2))
        assert set(query.session.epochs) == set(Q[:2])
        commit(cluster, Q[3], 9)
        commit(cluster, Q[1], 8)
        drop_java(cluster, "192.0.2.9@1", A)
        assert eventually(lambda: member.news().has_notice)
        member.take_news()  # as if it was lost
    found = query.rebalance(dict.fromkeys(Q, 5))
    gained = {Q[3]: 9} if is_notified else {Q[1]: 8, Q[2]: 2, Q[3]: 9}
    assert (set(found.owned), found.held) == (set(Q), gained)
    assert (found.gained, found.resets) == (tuple(gained), {})
    query.session.publish({**dict.fromkeys(Q, 5), **gained})
    assert [offset_of(cluster, queue) for queue in Q] == [5, gained.get(Q[1], 5), gained.get(Q[2], 5), 9]


def test_publish_does_not_overwrite_a_member_that_joins_after_the_rebalance(
    cluster: RunningCluster, start: Start
) -> None:
    query = settled(start)
    query.session.publish(dict.fromkeys(Q, 2))
    query.rebalance(dict.fromkeys(Q, 5))
    add_java(cluster, "192.0.2.9@1")
    commit(cluster, Q[3], 9)
    member = query.session._member
    assert member is not None
    assert eventually(lambda: member.news().has_notice)
    query.session.publish(dict.fromkeys(Q, 5))
    assert [offset_of(cluster, queue) for queue in Q] == [5, 5, 5, 9]


def test_an_old_offset_of_a_member_that_is_late_to_leave_a_queue_is_no_reset(
    cluster: RunningCluster, start: Start
) -> None:
    query = settled(start)
    query.session.publish(dict.fromkeys(Q, 6))
    commit(cluster, Q[0], 1)
    add_java(cluster, "192.0.2.9@1")
    found = query.rebalance(dict.fromkeys(Q, 7))
    assert (set(found.owned), found.gained, found.resets) == (set(Q[:2]), (), {})


def test_a_process_that_was_stopped_looks_again(cluster: RunningCluster, start: Start) -> None:
    query = settled(start)
    query.session.publish(dict.fromkeys(Q, 2))
    commit(cluster, Q[1], 8)
    query.passed_s += 101
    assert query.session.has_changed()
    found = query.rebalance(dict.fromkeys(Q, 5))
    assert (found.gained, found.held) == ((Q[1],), {Q[1]: 8})
    query.session.publish({**dict.fromkeys(Q, 5), Q[1]: 8})
    assert not query.session.has_changed()


def test_a_doubtful_queue_is_not_owned_while_its_offset_cannot_be_read(cluster: RunningCluster, start: Start) -> None:
    query = settled(start)
    lose_connection(cluster, query)
    cluster.brokers[A].fail(RequestCode.QUERY_CONSUMER_OFFSET, faults.with_code(14, "service not available"))
    found = query.rebalance(dict.fromkeys(Q, 5))
    assert (set(found.owned), found.lost) == (set(Q[2:]), ())
    cluster.brokers[A].heal()
    query.pass_time(1.1)
    assert query.session.has_changed()
    found = query.rebalance(dict.fromkeys(Q, 5))
    assert (set(found.owned), found.gained) == (set(Q), ())


def test_a_broker_that_restarts_elsewhere_gets_the_member_back(cluster: RunningCluster, start: Start) -> None:
    query = settled(start)
    query.session.publish(dict.fromkeys(Q, 2))
    cluster.brokers[A].kill()
    assert eventually(query.session.has_changed)
    assert set(query.rebalance(dict.fromkeys(Q, 5)).owned) == set(Q[2:])
    cluster.brokers[A].restart(new_port=True)

    def is_back() -> bool:
        query.pass_time(0.5)
        return query.session.member_id in cluster.brokers[A].members.ids(GROUP)

    assert eventually(is_back)
    query.backend.reopen()
    commit(cluster, Q[1], 9)  # by another member that came first
    found = query.rebalance(dict.fromkeys(Q, 5))
    assert (set(found.owned), found.gained, found.held) == (set(Q), (Q[1],), {Q[1]: 9})


# Brokers that hang.


@pytest.mark.parametrize("is_orderly", [False, True])
def test_a_broker_that_hangs_is_asked_nothing_until_it_answers(
    cluster: RunningCluster, start: Start, is_orderly: bool
) -> None:
    query = settled(start, timeout_ms=300, is_orderly=is_orderly)
    session, member = query.session, query.session._member
    assert member is not None
    session.publish(dict.fromkeys(Q, 4))
    reset_offset(cluster.brokers[B], GROUP, Q[3], 1)
    query.pass_time(5.1)
    assert query.rebalance(dict.fromkeys(Q, 4)).resets == {Q[3]: 1}
    seen = note_requests(query)
    cluster.brokers[B].freeze()

    def rebalance() -> set[QueueKey]:
        """Rebalance as a query that knows that the broker hangs."""
        assert session.has_changed()
        found = session.rebalance(Q[:2], dict.fromkeys(Q[:2], 5), query.applied)
        session.settle(is_batch=False)
        session.publish(dict.fromkeys(Q[:2], 5))
        return set(found.owned)

    query.pass_time(5.1)
    session.rebalance(Q[:2], dict.fromkeys(Q[:2], 5), query.applied)
    query.pass_time(101)  # the process was frozen, so that the brokers may have forgotten the member
    assert rebalance() == set(Q[:2])
    assert eventually(lambda: member._schedule.has_failed(B))
    while session.has_changed():
        assert rebalance() == set(Q[:2])
    query.pass_time(20.1)
    assert rebalance() == set(Q[:2])
    add_java(cluster, "192.0.2.9@1", A)
    assert eventually(session.has_changed)
    assert rebalance() == set(Q[:2])
    assert session._owned.keys() == set(Q[:2])
    assert cluster.brokers[B].address not in seen
    assert cluster.brokers[A].address in seen
    cluster.brokers[B].thaw()
    drop_java(cluster, "192.0.2.9@1", A)
    query.pass_time(5.1)
    assert eventually(lambda: member.registered([B]) == [B])
    assert eventually(lambda: set(query.rebalance(dict.fromkeys(Q, 5)).owned) == set(Q))


def note_requests(query: Query) -> list[str]:
    """Return a list that gets the address of each request of the query, without those of its membership."""
    client: Any = query.backend.client
    submit_all, seen = client.submit_all, []

    def note_and_submit(to: str, *arguments: Any, **more: Any) -> Any:
        seen.append(to)
        return submit_all(to, *arguments, **more)

    client.submit_all = note_and_submit
    return seen


def test_a_doubt_about_a_queue_of_a_broker_that_hangs_waits_for_the_broker(
    cluster: RunningCluster, start: Start
) -> None:
    query = settled(start, timeout_ms=300)
    session = query.session
    session.publish(dict.fromkeys(Q, 4))
    lose_connection(cluster, query, B)
    cluster.brokers[B].freeze()
    commit(cluster, Q[3], 8)
    found = session.rebalance(Q[:2], dict.fromkeys(Q[:2], 5), query.applied)
    assert set(found.owned) == set(Q[:2])
    assert session._again_ms is None, "the broker will be news"
    cluster.brokers[B].thaw()
    found = session.rebalance(Q, dict.fromkeys(Q, 5), query.applied)
    assert (set(found.owned), found.held) == (set(Q), {Q[3]: 8})


def test_a_queue_that_cannot_be_read_before_an_offset_has_it_is_gained_anew(
    cluster: RunningCluster, start: Start
) -> None:
    query = start()
    session = query.session
    assert set(session.rebalance(query.queues(), {}, 0).gained) == set(Q)  # and planning fails
    assert session.rebalance(Q[:2], {}, 0).gained == tuple(Q[:2])
    session.settle()
    commit(cluster, Q[3], 8)
    found = session.rebalance(Q, {}, 0)
    assert (set(found.gained), found.held[Q[3]]) == (set(Q[2:]), 8)


def test_publish_commits_what_moved_every_5_s(cluster: RunningCluster, start: Start) -> None:
    query = settled(start)
    cluster.clear_requests()

    def commits() -> int:
        return sum(broker.requests[RequestCode.UPDATE_CONSUMER_OFFSET] for broker in cluster.brokers.values())

    query.session.publish(dict.fromkeys(Q, 3))
    assert commits() == 4
    assert query.session.published == dict.fromkeys(Q, 3)
    query.session.publish({**dict.fromkeys(Q, 3), Q[0]: 4})
    assert commits() == 4, "too early"
    assert not query.session.has_changed()
    query.pass_time(5.1)
    assert query.session.has_changed(), "an offset waits"
    query.session.publish({**dict.fromkeys(Q, 3), Q[0]: 4})
    assert commits() == 5
    assert query.session.published == {**dict.fromkeys(Q, 3), Q[0]: 4}
    query.rebalance({**dict.fromkeys(Q, 3), Q[0]: 4})
    assert not query.session.has_changed()


def test_publish_is_urgent_while_members_join(cluster: RunningCluster, start: Start) -> None:
    query = settled(start)
    query.session.publish(dict.fromkeys(Q, 3))
    add_java(cluster, "192.0.2.9@1")
    assert eventually(query.session.has_changed)
    query.session.publish(dict.fromkeys(Q, 4))
    assert [offset_of(cluster, queue) for queue in Q] == [4] * 4
    query.rebalance(dict.fromkeys(Q, 5))
    query.session.publish(dict.fromkeys(Q, 5))
    assert [offset_of(cluster, queue) for queue in Q] == [5] * 4, "also right after the rebalance"


def test_commit_off_commits_nothing(cluster: RunningCluster, start: Start) -> None:
    query = start(commit="off")
    query.rebalance()
    query.session.begin(dict.fromkeys(Q, 3))
    query.session.publish(dict.fromkeys(Q, 3))
    query.session.leave(dict.fromkeys(Q, 4))
    assert [offset_of(cluster, queue) for queue in Q] == [None] * 4


def test_a_failed_commit_is_logged_once_and_repeated(
    cluster: RunningCluster, start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    query = settled(start)
    cluster.brokers[A].fail(RequestCode.UPDATE_CONSUMER_OFFSET, faults.with_code(1, "a planted fault"))
    for _ in range(3):
        query.session.publish(dict.fromkeys(Q, 3))
        query.pass_time(5.1)
    assert caplog.text.count("offsets of consumer group billing are not published") == 1
    assert [offset_of(cluster, queue) for queue in Q] == [None, None, 3, 3]
    assert query.session.has_changed()
    cluster.brokers[A].heal()
    query.session.publish(dict.fromkeys(Q, 3))
    assert [offset_of(cluster, queue) for queue in Q] == [3] * 4


def test_a_failed_commit_is_raised_if_commits_are_required(cluster: RunningCluster, start: Start) -> None:
    query = settled(start, commit="required")
    cluster.brokers[A].fail(RequestCode.UPDATE_CONSUMER_OFFSET, faults.with_code(1, "a planted fault"))
    with pytest.raises(BrokerError, match="a planted fault"):
        query.session.publish(dict.fromkeys(Q, 3))


def test_published_is_what_the_broker_has_told_or_accepted(cluster: RunningCluster, start: Start) -> None:
    commit(cluster, Q[0], 3)
    query = start()
    found = query.rebalance()
    assert query.session.published == found.held
    assert query.session.published[Q[0]] == 3
    query.session.publish({Q[1]: 5})
    assert query.session.published == {**found.held, Q[1]: 5}
    add_java(cluster, "192.0.2.9@1")
    query.rebalance()
    assert query.session.published.keys() <= set(Q[:2])


def test_an_unsettled_queue_is_given_up_without_a_commit(cluster: RunningCluster, start: Start) -> None:
    commit(cluster, Q[3], 8)
    query = start()
    query.session.rebalance(query.queues(), dict.fromkeys(Q, 2), 0)  # and planning fails
    add_java(cluster, "192.0.2.9@1")
    query.rebalance(dict.fromkeys(Q, 2))
    assert offset_of(cluster, Q[3]) == 8


def test_leave_commits_and_unregisters(cluster: RunningCluster, start: Start) -> None:
    query = settled(start)
    query.session.publish(dict.fromkeys(Q, 3))
    query.session.leave(dict.fromkeys(Q, 4))
    assert [offset_of(cluster, queue) for queue in Q] == [4] * 4
    assert [broker.members.ids(GROUP) for broker in cluster.brokers.values()] == [[], []]
    query.session.leave(dict.fromkeys(Q, 9))
    query.session.publish(dict.fromkeys(Q, 9))
    assert [offset_of(cluster, queue) for queue in Q] == [4] * 4
    assert not query.session.has_changed()


def test_closing_the_backend_ends_the_membership(cluster: RunningCluster, start: Start) -> None:
    query = settled(start)
    query.backend.close()
    assert eventually(lambda: cluster.brokers[A].members.ids(GROUP) == [])
    query.session.close()
    assert query.session.epochs == {}
    assert set(query.rebalance().gained) == set(Q), "it joins again"


def test_a_session_that_nobody_has_any_more_ends_its_membership(cluster: RunningCluster, start: Start) -> None:
    query = settled(start)
    member = query.session._member
    assert member is not None
    del query.session
    assert eventually(lambda: not member._thread.is_alive())
    assert cluster.brokers[A].members.ids(GROUP) == []


def test_an_error_of_the_thread_is_raised_by_the_session(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    query = settled(start)

    def fail(schedule: Any, now_s: float) -> list[str]:
        raise ZeroDivisionError("a planted fault")

    monkeypatch.setattr("rmq_spark.store.cluster.heartbeats.HeartbeatSchedule.take_due", fail)
    query.pass_time(0)
    member = query.session._member
    assert member is not None
    assert eventually(lambda: not member._thread.is_alive())
    for call in (query.session.join, query.session.has_changed, query.rebalance):
        with pytest.raises(StoreError, match="a planted fault"):
            call()


# Resets.


def test_a_reset_while_offsets_are_published(cluster: RunningCluster, start: Start) -> None:
    query = settled(start)
    query.session.publish(dict.fromkeys(Q, 4))
    reset_offset(cluster.brokers[A], GROUP, Q[0], 1)
    query.pass_time(5.1)
    query.session.publish(dict.fromkeys(Q, 5))
    assert [offset_of(cluster, queue) for queue in Q] == [1, 5, 5, 5], "the reset is not undone"
    assert query.session.has_changed()
    found = query.rebalance(dict.fromkeys(Q, 5))
    assert found.resets == {Q[0]: 1}
    query.pass_time(5.1)
    query.session.publish({**dict.fromkeys(Q, 5), Q[0]: 1})
    query.rebalance({**dict.fromkeys(Q, 5), Q[0]: 1})
    query.pass_time(5.1)
    query.session.publish({**dict.fromkeys(Q, 5), Q[0]: 3})
    assert offset_of(cluster, Q[0]) == 3
    assert query.rebalance({**dict.fromkeys(Q, 5), Q[0]: 3}).resets == {}
    assert not query.session.has_changed()


def test_a_refused_commit_tells_of_a_reset(cluster: RunningCluster, start: Start) -> None:
    if not cluster.brokers[A].release.is_5:
        pytest.skip("a broker of 4.9 tells of resets")
    query = settled(start)
    query.session.publish(dict.fromkeys(Q, 4))
    reset_offset(cluster.brokers[A], GROUP, Q[0], 4)  # to the offset that it has
    query.pass_time(5.1)
    query.rebalance(dict.fromkeys(Q, 5), is_batch=True)
    assert not query.session._progress.resets.queues
    query.session.publish(dict.fromkeys(Q, 5))
    assert query.session.has_changed(), "while a batch runs, nothing else looks for resets"
    assert query.rebalance(dict.fromkeys(Q, 5)).resets == {Q[0]: 4}


def test_an_idle_query_finds_a_reset_within_5_s(cluster: RunningCluster, start: Start) -> None:
    query = settled(start)
    query.session.publish(dict.fromkeys(Q, 4))
    reset_offset(cluster.brokers[B], GROUP, Q[3], 2)
    query.pass_time(5.1)
    assert eventually(query.session.has_changed)
    assert query.rebalance(dict.fromkeys(Q, 4)).resets == {Q[3]: 2}


class OwnEverything:
    """The history of a query that has set all offsets up to its position, and has applied no reset."""

    def is_own(self, queue: QueueKey, committed: int) -> bool:
        return True

    def has_applied(self, queue: QueueKey, target: int) -> bool:
        return False


def commit_after_read(cluster: RunningCluster, queue: QueueKey, offset: int) -> None:
    """Let the driver commit an offset, as soon as the broker has told the offset before it."""

    def answer(call: Call, serve: Callable[[], None]) -> None:
        serve()
        cluster.brokers[queue.broker].offsets.commit(GROUP, QueueKey(queue.topic, queue.queue_id), offset)

    is_queue = lambda call: call.command.fields["queueId"] == str(queue.queue_id)  # noqa: E731
    cluster.brokers[queue.broker].fail(RequestCode.QUERY_CONSUMER_OFFSET, answer, when=is_queue, times=1)


def test_a_look_for_resets_does_not_move_the_group_back(cluster: RunningCluster, start: Start) -> None:
    query = settled(start)
    query.session.publish(dict.fromkeys(Q, 4))
    query.rebalance(dict.fromkeys(Q, 8))
    commit(cluster, Q[3], 6)  # by the driver, after an earlier batch
    query.pass_time(5.1)
    commit_after_read(cluster, Q[3], 8)
    query.rebalance(dict.fromkeys(Q, 8))
    if not cluster.brokers[A].release.is_5:
        assert offset_of(cluster, Q[3]) == 6, "a broker of 4.9 is not asked"
        return
    assert offset_of(cluster, Q[3]) == 8
    assert not query.session._progress.resets.queues


def test_a_gained_queue_is_not_moved_back(cluster: RunningCluster, start: Start) -> None:
    for queue in Q:
        commit(cluster, queue, 4)
    query = start()
    commit_after_read(cluster, Q[3], 8)  # by the driver of the run before, at its end
    found = query.session.rebalance(query.queues(), dict.fromkeys(Q, 8), 0, OwnEverything())
    assert (found.held[Q[3]], found.resets) == (4, {})
    assert eventually(lambda: offset_of(cluster, Q[3]) == 8)
    query.session.publish(dict.fromkeys(Q, 8))
    assert [offset_of(cluster, queue) for queue in Q] == [8] * 4


def test_an_offset_beyond_the_position_is_followed_without_a_commit(cluster: RunningCluster, start: Start) -> None:
    if not cluster.brokers[A].release.is_5:
        pytest.skip("a broker of 4.9 is not asked")
    query = settled(start)
    query.session.publish(dict.fromkeys(Q, 4))
    commit(cluster, Q[3], 7)  # by another member
    query.pass_time(5.1)
    commit_after_read(cluster, Q[3], 9)
    assert query.session.has_changed()
    assert query.rebalance(dict.fromkeys(Q, 4)).resets == {Q[3]: 7}
    assert offset_of(cluster, Q[3]) == 9


def test_an_offset_that_another_client_has_set_is_no_reset(cluster: RunningCluster, start: Start) -> None:
    query = settled(start)
    query.session.publish(dict.fromkeys(Q, 4))
    commit(cluster, Q[3], 2)
    query.pass_time(5.1)
    assert query.rebalance(dict.fromkeys(Q, 4)).resets == {}
    query.session.publish(dict.fromkeys(Q, 5))
    assert offset_of(cluster, Q[3]) == 5


def test_a_reset_before_the_first_plan_is_told_with_the_offset(cluster: RunningCluster, start: Start) -> None:
    commit(cluster, Q[0], 5)
    reset_offset(cluster.brokers[A], GROUP, Q[0], 3)
    query = start()
    query.applied = 7  # of an earlier run
    found = query.rebalance(dict.fromkeys(Q, 5))
    assert found.held[Q[0]] == 3
    if cluster.brokers[A].release.is_5:
        assert (found.resets, found.reset_number) == ({Q[0]: 3}, 8)
        assert cluster.brokers[A].offsets.has_reset(GROUP, QueueKey("orders", 0)), "until Spark has logged it"
    query.rebalance({**dict.fromkeys(Q, 5), Q[0]: 3})
    assert not cluster.brokers[A].offsets.has_reset(GROUP, QueueKey("orders", 0))
    query.session.publish({Q[0]: 4})
    assert offset_of(cluster, Q[0]) == 4


def test_a_queue_with_a_reset_is_lost_without_a_commit(cluster: RunningCluster, start: Start) -> None:
    query = settled(start)
    query.session.publish(dict.fromkeys(Q, 4))
    reset_offset(cluster.brokers[B], GROUP, Q[3], 2)
    add_java(cluster, "192.0.2.9@1")
    query.rebalance(dict.fromkeys(Q, 6))
    assert [offset_of(cluster, queue) for queue in Q[2:]] == [6, 2]
    drop_java(cluster, "192.0.2.9@1")
    found = query.rebalance(dict.fromkeys(Q, 6))
    assert found.held[Q[3]] == 2


def test_a_reset_that_came_while_another_was_taken_is_told_next(cluster: RunningCluster, start: Start) -> None:
    if not cluster.brokers[A].release.is_5:
        pytest.skip("a broker of 4.9 keeps no resets")
    query = settled(start)
    query.session.publish(dict.fromkeys(Q, 4))
    reset_offset(cluster.brokers[A], GROUP, Q[0], 2)
    query.pass_time(5.1)
    assert query.rebalance(dict.fromkeys(Q, 4)).resets == {Q[0]: 2}
    reset_offset(cluster.brokers[A], GROUP, Q[0], 7)
    found = query.rebalance({**dict.fromkeys(Q, 4), Q[0]: 2})
    assert (found.resets, found.reset_number) == ({Q[0]: 7}, 2)
    query.session.publish({**dict.fromkeys(Q, 4), Q[0]: 2})
    assert offset_of(cluster, Q[0]) == 7
    query.rebalance({**dict.fromkeys(Q, 4), Q[0]: 7})
    query.pass_time(5.1)
    query.session.publish({**dict.fromkeys(Q, 4), Q[0]: 8})
    assert offset_of(cluster, Q[0]) == 8


def test_a_reset_that_a_task_has_taken_is_not_undone(cluster: RunningCluster, start: Start) -> None:
    query = settled(start, pull_group=GROUP)
    query.session.publish(dict.fromkeys(Q, 4))
    commit(cluster, Q[0], 1)  # a task of the query got OFFSET_RESET, and has stored the target
    query.pass_time(5.1)
    query.session.publish(dict.fromkeys(Q, 5))
    assert [offset_of(cluster, queue) for queue in Q] == [1, 5, 5, 5]
    assert query.session.has_changed()
    assert query.rebalance(dict.fromkeys(Q, 5)).resets == {Q[0]: 1}
    query.rebalance({**dict.fromkeys(Q, 5), Q[0]: 1})
    query.pass_time(5.1)
    query.session.publish({**dict.fromkeys(Q, 5), Q[0]: 3})
    assert offset_of(cluster, Q[0]) == 3


def test_an_idle_query_that_pulls_as_the_group_finds_what_a_task_has_stored(
    cluster: RunningCluster, start: Start
) -> None:
    if not cluster.brokers[A].release.is_5:
        pytest.skip("a broker of 4.9 tells no pull of a reset")
    query = settled(start, pull_group=GROUP)
    query.session.publish(dict.fromkeys(Q, 4))
    commit(cluster, Q[0], 1)
    query.pass_time(5.1)
    assert query.session.has_changed()
    assert query.rebalance(dict.fromkeys(Q, 4)).resets == {Q[0]: 1}


def test_looks_for_resets_in_many_queues_take_turns(
    cluster: RunningCluster, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not cluster.brokers[A].release.is_5:
        pytest.skip("a broker of 4.9 tells of resets")
    monkeypatch.setattr("rmq_spark.store.cluster.member_progress._LOOKED_QUEUES", 3)
    query = settled(start)
    query.session.publish(dict.fromkeys(Q, 4))
    for queue in Q:
        reset_offset(cluster.brokers[queue.broker], GROUP, queue, 1)
    found = []
    for _ in range(3):
        query.pass_time(5.1)
        found.append(set(query.rebalance(dict.fromkeys(Q, 4)).resets))
    assert set().union(*found) == set(Q)
    assert max(map(len, found)) == 3


def test_a_reset_that_cannot_be_taken_is_taken_later(
    cluster: RunningCluster, start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    if not cluster.brokers[A].release.is_5:
        pytest.skip("a broker of 4.9 keeps no resets")
    query = settled(start)
    reset_offset(cluster.brokers[A], GROUP, Q[0], 2)
    query.pass_time(5.1)
    query.rebalance(dict.fromkeys(Q, 4))
    cluster.brokers[A].fail(RequestCode.PULL_MESSAGE, faults.with_code(14, "service not available"))
    for _ in range(2):
        query.rebalance({**dict.fromkeys(Q, 4), Q[0]: 2})
    assert not query.session.has_changed()
    query.pass_time(1.1)
    assert query.session.has_changed()
    cluster.brokers[A].heal()
    assert query.rebalance({**dict.fromkeys(Q, 4), Q[0]: 2}).resets == {}
    assert caplog.text.count("until the broker takes a pull of the group") == 1
    assert not cluster.brokers[A].offsets.has_reset(GROUP, QueueKey("orders", 0))


# Locks.


def owner_of(broker: Broker, queue: QueueKey) -> str | None:
    return broker.locks.owner(GROUP, QueueId(queue.topic, queue.broker, queue.queue_id))


def take_lock(broker: Broker, queue: QueueKey, client_id: str) -> None:
    """Give the lock of a queue to another client, as if it had expired."""
    broker.locks.held[GROUP, QueueId(queue.topic, queue.broker, queue.queue_id)] = client_id, broker.now_s()


def test_an_orderly_query_owns_locked_queues_only(cluster: RunningCluster, start: Start) -> None:
    take_lock(cluster.brokers[A], Q[0], "other")
    query = start(is_orderly=True)
    assert set(query.rebalance().owned) == set(Q[1:])
    assert [owner_of(cluster.brokers[queue.broker], queue) for queue in Q[1:]] == [query.session.member_id] * 3
    assert query.session.epochs == dict.fromkeys(Q[1:], 0)
    cluster.brokers[A].locks.held.clear()
    query.pass_time(1.1)
    assert query.session.has_changed()
    assert query.rebalance().gained == (Q[0],)


def test_a_lost_lock_is_published_only_if_the_offset_is_own_and_gained_again_later(
    cluster: RunningCluster, start: Start
) -> None:
    query = settled(start, is_orderly=True)
    query.session.publish(dict.fromkeys(Q, 2))
    for queue in Q[:2]:
        take_lock(cluster.brokers[A], queue, "other")
    commit(cluster, Q[0], 6)
    query.pass_time(20)
    member = query.session._member
    assert member is not None
    assert eventually(lambda: member.news().lost_locks == set(Q[:2]))
    assert query.session.has_changed()
    found = query.rebalance(dict.fromkeys(Q, 4))
    assert (set(found.owned), set(found.lost)) == (set(Q[2:]), set(Q[:2]))
    assert [offset_of(cluster, queue) for queue in Q[:2]] == [6, 4]
    cluster.brokers[A].locks.held.clear()
    query.pass_time(1.1)
    found = query.rebalance(dict.fromkeys(Q, 4))
    assert (set(found.gained), found.held) == (set(Q[:2]), {Q[0]: 6, Q[1]: 4})


def test_a_lock_that_was_lost_and_is_free_again_is_gained_at_once(cluster: RunningCluster, start: Start) -> None:
    query = settled(start, is_orderly=True)
    query.passed_s += 61  # the process was stopped
    assert query.session.has_changed()
    commit(cluster, Q[0], 6)
    found = query.rebalance(dict.fromkeys(Q, 4))
    assert (set(found.owned), set(found.gained), found.lost) == (set(Q), set(Q), ())
    assert found.held[Q[0]] == 6


def test_locks_are_released_with_the_queues(cluster: RunningCluster, start: Start) -> None:
    query = settled(start, is_orderly=True)
    add_java(cluster, "192.0.2.9@1")
    query.rebalance()
    assert [owner_of(cluster.brokers[B], queue) for queue in Q[2:]] == [None, None]
    renewals = cluster.brokers[A].requests[RequestCode.LOCK_BATCH_MQ]
    query.pass_time(20)
    assert eventually(lambda: cluster.brokers[A].requests[RequestCode.LOCK_BATCH_MQ] > renewals)
    assert [owner_of(cluster.brokers[B], queue) for queue in Q[2:]] == [None, None], "they are not renewed"
    assert [owner_of(cluster.brokers[A], queue) for queue in Q[:2]] == [query.session.member_id] * 2
    query.session.leave({})
    assert cluster.brokers[A].locks.held == {}


def test_a_query_that_is_not_orderly_locks_nothing(cluster: RunningCluster, start: Start) -> None:
    settled(start)
    assert [broker.requests[RequestCode.LOCK_BATCH_MQ] for broker in cluster.brokers.values()] == [0, 0]


def locks_of(cluster: RunningCluster, query: Query) -> set[QueueKey]:
    """Return the queues that brokers have locked for a query. Its thread renews no others."""
    member = query.session._member
    assert member is None or member._locks.queues <= set(Q), "the thread renews these"
    renewed = set() if member is None else set(member._locks.queues)
    locked = {queue for queue in Q if owner_of(cluster.brokers[queue.broker], queue) == query.session.member_id}
    assert renewed == locked
    return locked


def test_a_locked_queue_whose_offset_cannot_be_read_is_unlocked(cluster: RunningCluster, start: Start) -> None:
    query = settled(start, is_orderly=True)
    add_java(cluster, "192.0.2.9@1")
    query.rebalance()
    drop_java(cluster, "192.0.2.9@1")
    rule = cluster.brokers[B].fail(RequestCode.QUERY_CONSUMER_OFFSET, faults.with_code(14, "service not available"))
    assert set(query.rebalance().owned) == set(Q[:2])
    assert locks_of(cluster, query) == set(Q[:2]), "the other member could never lock them"
    cluster.brokers[B].heal(rule)
    assert set(query.rebalance().owned) == locks_of(cluster, query) == set(Q)


@pytest.mark.parametrize(
    ("broker", "code"),
    [(A, RequestCode.QUERY_CONSUMER_OFFSET), (B, RequestCode.LOCK_BATCH_MQ)],
    ids=["an offset is refused", "another broker refuses locks"],
)
def test_locks_of_a_rebalance_that_fails_are_released(
    cluster: RunningCluster, start: Start, broker: str, code: RequestCode
) -> None:
    cluster.brokers[broker].fail(code, faults.with_code(16, "no"))
    query = start(is_orderly=True)
    with pytest.raises(NoPermissionError):
        query.rebalance()
    assert locks_of(cluster, query) == set()


def test_leave_releases_locks_though_the_last_commit_fails(cluster: RunningCluster, start: Start) -> None:
    query = settled(start, is_orderly=True, commit="required")
    query.session.publish(dict.fromkeys(Q, 2))
    assert locks_of(cluster, query) == set(Q)
    cluster.brokers[A].fail(RequestCode.UPDATE_CONSUMER_OFFSET, faults.with_code(1, "a planted fault"))
    with pytest.raises(BrokerError, match="a planted fault"):
        query.session.leave(dict.fromkeys(Q, 4))
    assert locks_of(cluster, query) == set()
