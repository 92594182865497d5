"""The thread of a member: heartbeats, notes of what brokers say, and answers to them."""

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.cluster_fixtures import await_quiet
from support.forked import run_forked

from rmq_spark.store.cluster import membership as module
from rmq_spark.store.cluster.address import ClusterAddress, parse_name_servers
from rmq_spark.store.cluster.broker_requests import MemberStatus, QueueStatus
from rmq_spark.store.cluster.client import ClusterClient, monotonic_ms
from rmq_spark.store.cluster.codes import RequestCode
from rmq_spark.store.cluster.heartbeats import HeartbeatSchedule
from rmq_spark.store.cluster.member_requests import LockRequest
from rmq_spark.store.cluster.membership import BrokerOfGroup, MemberNews, Membership
from rmq_spark.store.cluster.responses import Subscription
from rmq_spark.store.errors import BackendUnavailableError, StoreError
from rmq_spark.store.format import fastjson
from rmq_spark.store.model import QueueKey
from rmq_spark.store.testing.backend_groups import eventually
from rmq_spark.store.testing.brokers import Broker, RunningCluster, faults
from rmq_spark.store.testing.brokers.raw_client import RawClient
from rmq_spark.store.testing.brokers.wire import QueueId, loose_json

A, B = "broker-a", "broker-b"
GROUP, ID = "billing", "192.0.2.1@7#rmq-spark#-#01234567"
SUBSCRIPTIONS = (Subscription("%RETRY%billing", "*"), Subscription("orders", "A || B"))
ONE, TWO = QueueKey("orders", 0, A), QueueKey("orders", 1, A)


class Clock:
    """A monotonic clock in s that can be set forward."""

    def __init__(self) -> None:
        self.passed_s = 0.0

    def __call__(self) -> float:
        return monotonic_ms() / 1000 + self.passed_s


class Rig:
    """A cluster of two brokers, and a member that is not registered yet."""

    def __init__(self, cluster: RunningCluster) -> None:
        self.cluster, self.clock = cluster, Clock()
        self.address = ClusterAddress(parse_name_servers(cluster.address), request_timeout_ms=500)
        status = MemberStatus(ID, GROUP, (), 1_800_000_000_000, cluster.address)
        self.member = Membership(self.address, status, self.clock)

    @property
    def a(self) -> Broker:
        return self.cluster.brokers[A]

    def register(self, *brokers: str, subscriptions: tuple[Subscription, ...] = SUBSCRIPTIONS) -> None:
        """Register at brokers, and forget what they told meanwhile."""
        known = {name: BrokerOfGroup("orders", self.cluster.brokers[name].address) for name in brokers}
        self.member.register(known, subscriptions)
        assert self.member.beat(brokers) == dict.fromkeys(brokers)
        assert eventually(lambda: all(self.ids(name) == [ID] for name in brokers))
        self.member.take_news()

    def ids(self, broker: str) -> list[str]:
        return self.cluster.brokers[broker].members.ids(GROUP)

    def pass_time(self, passed_s: float) -> None:
        """Set the member's clock forward."""
        await_quiet(self.member)
        self.clock.passed_s += passed_s
        self.member._waker.wake()

    def heartbeats(self, broker: str = A) -> int:
        return self.cluster.brokers[broker].requests[RequestCode.HEART_BEAT]


@pytest.fixture(params=["5.3", "4.9"])
def cluster(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[RunningCluster]:
    with RunningCluster(tmp_path / "cluster", release=request.param, brokers=2, is_light=True) as cluster:
        cluster.create_topic("orders", queues=2)
        yield cluster


@pytest.fixture
def rig(cluster: RunningCluster) -> Iterator[Rig]:
    rig = Rig(cluster)
    yield rig
    rig.member.close()


# Heartbeats.


def test_a_member_registers_like_a_push_consumer(rig: Rig) -> None:
    rig.register(A, B)
    for name in (A, B):
        group = rig.cluster.brokers[name].members.groups[GROUP]
        assert (group.consume_type, group.message_model) == ("CONSUME_PASSIVELY", "CLUSTERING")
        assert group.consume_from_where == "CONSUME_FROM_LAST_OFFSET"
        assert {topic: one["subString"] for topic, one in group.subscriptions.items()} == {
            "%RETRY%billing": "*",
            "orders": "A || B",
        }
        assert group.subscriptions["orders"]["subVersion"] == 1_800_000_000_000
        (member,) = group.members.values()
        assert member.language == "PYTHON"
    assert rig.member.registered([A, B, "broker-c"]) == [A, B]
    assert rig.member.version_of(A) in (407, 479)
    assert rig.member.version_of("broker-c") == 0


def test_heartbeats_go_on_every_30_s_over_one_connection(rig: Rig) -> None:
    rig.register(A)
    before = rig.heartbeats()
    for number in range(1, 4):
        rig.pass_time(30)
        assert eventually(lambda number=number: rig.heartbeats() == before + number)
    assert {one.connection for one in rig.a.seen_requests(RequestCode.HEART_BEAT)} == {
        rig.a.seen_requests(RequestCode.HEART_BEAT)[0].connection
    }
    assert rig.member.news() == MemberNews()


def test_other_subscriptions_are_sent_at_once(rig: Rig) -> None:
    rig.register(A)
    count = rig.heartbeats()
    more = (*SUBSCRIPTIONS, Subscription("payments", "*"))
    rig.member.register({A: BrokerOfGroup("orders", rig.a.address)}, more)
    assert eventually(lambda: "payments" in rig.a.members.groups[GROUP].subscriptions)
    rig.member.register({A: BrokerOfGroup("orders", rig.a.address)}, more)
    rig.pass_time(0)
    assert rig.heartbeats() == count + 1, "nothing has changed the second time"


def test_beat_sends_a_heartbeat_even_if_one_is_in_flight(rig: Rig) -> None:
    rig.register(A)
    count = rig.heartbeats()
    rig.a.fail(RequestCode.HEART_BEAT, faults.slowly(100))
    rig.pass_time(30)
    assert eventually(lambda: rig.heartbeats() == count + 1)
    assert rig.member.beat([A, "broker-c"]) == {A: None}
    assert rig.heartbeats() == count + 2


def test_beat_tells_the_error_of_a_broker(rig: Rig) -> None:
    rig.cluster.brokers[B].kill()
    known = {name: BrokerOfGroup("orders", rig.cluster.brokers[name].address) for name in (A, B)}
    rig.member.register(known, SUBSCRIPTIONS)
    errors = rig.member.beat([A, B])
    assert errors[A] is None
    assert isinstance(errors[B], BackendUnavailableError)
    assert rig.member.registered([A, B]) == [A]


# Lost connections.


def test_a_lost_connection_is_noted_and_the_member_registers_again(rig: Rig) -> None:
    rig.register(A, B)
    rig.a.members.expire(GROUP, ID)  # closes the connection
    assert eventually(lambda: rig.ids(A) == [ID])
    assert eventually(lambda: rig.member.registered([A, B]) == [A, B])
    assert rig.member.take_news().lost_brokers == {A}
    assert rig.member.news().lost_brokers == frozenset()


def test_a_connection_that_is_lost_during_a_heartbeat_is_noted(rig: Rig) -> None:
    rig.register(A)
    count = rig.heartbeats()
    rig.a.fail(RequestCode.HEART_BEAT, faults.closes_connection(executes=False), times=1)
    rig.pass_time(30)
    assert eventually(lambda: rig.heartbeats() == count + 2), "the client repeats it"
    assert eventually(lambda: rig.member.news().lost_brokers == {A})
    assert rig.ids(A) == [ID]


def test_a_broker_that_comes_back_elsewhere_is_found_and_noted_again(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    rig.register(A)
    rig.a.kill()
    assert eventually(lambda: rig.member.news().lost_brokers == {A})
    assert rig.member.registered([A]) == []
    rig.member.take_news()
    assert eventually(lambda: "broker broker-a does not know this member" in caplog.text)
    rig.a.restart(new_port=True)

    def is_back() -> bool:
        rig.pass_time(0.1)
        return rig.ids(A) == [ID]

    assert eventually(is_back)
    assert eventually(lambda: rig.member.news().lost_brokers == {A}), "others have seen the broker without the member"
    assert caplog.text.count("does not know this member") == 1


def test_pauses_between_attempts_at_a_broker_that_is_away(rig: Rig) -> None:
    rig.register(A, B)
    rig.a.fail(RequestCode.HEART_BEAT, faults.with_code(1, "a planted fault"))
    count, others = rig.heartbeats(), rig.heartbeats(B)
    rig.pass_time(30)
    assert eventually(lambda: rig.heartbeats() == count + 1)
    rig.pass_time(0.5)
    assert eventually(lambda: rig.heartbeats(B) == others + 1)
    assert rig.heartbeats() == count + 1, "after 1 s"
    rig.pass_time(0.6)
    assert eventually(lambda: rig.heartbeats() == count + 2)
    rig.a.heal()
    rig.pass_time(2.1)
    assert eventually(lambda: rig.heartbeats() == count + 3)
    assert rig.member.news() == MemberNews(), "the connection was open all the time"


def test_a_member_that_could_not_send_is_forgotten(rig: Rig) -> None:
    rig.register(A)
    rig.a.freeze()
    rig.clock.passed_s += 100.5
    assert rig.member.take_news().lost_brokers == {A}
    assert rig.member.registered([A]) == []
    assert rig.member.news().lost_brokers == frozenset(), "it was noted"
    rig.a.thaw()
    rig.member.beat([A])
    assert rig.member.registered([A]) == [A]
    assert rig.member.take_news().lost_brokers == {A}, "others may have seen the broker without the member"


def test_a_broker_that_has_lapsed_is_left_to_the_thread_once_it_does_not_answer(rig: Rig) -> None:
    known = {name: BrokerOfGroup("orders", rig.cluster.brokers[name].address) for name in (A, B)}
    rig.register(A)
    rig.cluster.brokers[B].freeze()
    rig.member.register(known, SUBSCRIPTIONS)
    assert rig.member.lapsed([A, "broker-c"]) == []
    assert isinstance(rig.member.beat([B])[B], BackendUnavailableError)
    assert rig.member.lapsed([A, B]) == []
    rig.cluster.brokers[B].thaw()
    rig.member.beat([B])
    assert rig.member.registered([B]) == [B]
    rig.clock.passed_s += 100.5
    rig.member.take_news()
    assert set(rig.member.lapsed([A, B])) <= {A, B}


# Requests of brokers.


def test_other_members_are_noted_once(rig: Rig) -> None:
    rig.register(A)
    rig.a.members.add(GROUP, "other", {"orders": "A || B"})
    assert eventually(lambda: rig.member.news().has_notice)
    assert rig.member.take_news().has_notice
    assert not rig.member.news().has_notice


def test_notices_for_other_groups_are_skipped(rig: Rig) -> None:
    rig.register(A)
    connection = next(iter(rig.a.members.groups[GROUP].members))
    rig.cluster.loop.run(rig.a.calls.tell, connection, 40, {"consumerGroup": "another"})
    assert rig.member.beat([A]) == {A: None}
    assert not rig.member.news().has_notice


def ask(rig: Rig, code: int, fields: dict[str, object]) -> Any:
    with RawClient(rig.a.address) as client:
        return client.call(code, fields)


def test_administrators_get_the_state_of_the_member(rig: Rig) -> None:
    rig.register(A)
    rig.member.tell({ONE: QueueStatus(7, 1_800_000_000_001, 1_800_000_000_002), TWO: QueueStatus(-1, 1)})
    answer = ask(rig, 307, {"consumerGroup": GROUP, "clientId": ID, "jstackEnable": "false"})
    assert answer.code == 0
    body = fastjson.parse(str(answer.body, "utf-8"))
    assert body["properties"]["PROP_CONSUME_TYPE"] == "CONSUME_PASSIVELY"
    assert len(body["mqTable"]) == 2
    answer = ask(rig, 223, {"topic": "orders", "group": GROUP})
    table = fastjson.parse(str(answer.body, "utf-8"))["consumerTable"][ID]
    assert [fastjson.parse(queue)["queueId"] for queue in table] == [0]
    assert list(table.values()) == [7]


def test_a_demand_to_consume_a_message_is_refused(rig: Rig) -> None:
    rig.register(A)
    connection = next(iter(rig.a.members.groups[GROUP].members))
    answers: list[Any] = []
    rig.cluster.loop.run(rig.a.calls.ask, connection, 309, {"consumerGroup": GROUP}, b"", answers.append)
    rig.cluster.loop.run(rig.a.calls.ask, connection, 39, {}, b"", answers.append)
    assert eventually(lambda: len(answers) == 2)
    assert (answers[0].code, "cannot consume a message" in answers[0].remark) == (1, True)
    assert answers[1].code == 3


def push_reset(rig: Rig, offsets: dict[QueueKey, int], body: bytes | None = None) -> None:
    """Let the broker push a reset as 4.9 does."""
    table = {QueueId(queue.topic, queue.broker, queue.queue_id): offset for queue, offset in offsets.items()}
    connection = next(iter(rig.a.members.groups[GROUP].members))
    fields = {"topic": "orders", "group": GROUP, "timestamp": "0", "isForce": "false"}
    sent = loose_json({"offsetTable": table}).encode() if body is None else body
    rig.cluster.loop.run(rig.a.calls.tell, connection, 220, fields, sent)


def committed(rig: Rig, queue: QueueKey) -> int | None:
    return rig.a.offsets.find(GROUP, QueueKey(queue.topic, queue.queue_id))


def test_a_reset_is_noted_and_committed_in_own_queues_only(rig: Rig) -> None:
    rig.register(A)
    rig.member.tell({ONE: QueueStatus(7, 1)})
    push_reset(rig, {ONE: 3, TWO: 4})
    assert eventually(lambda: committed(rig, ONE) == 3)
    assert rig.member.take_news().resets == {ONE: 3}
    assert committed(rig, TWO) is None


def test_a_reset_is_committed_again_until_the_broker_accepts_it(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    rig.register(A)
    rig.member.tell({ONE: QueueStatus(7, 1), TWO: QueueStatus(7, 1)})
    rig.a.fail(RequestCode.UPDATE_CONSUMER_OFFSET, faults.with_code(1, "a planted fault"))
    push_reset(rig, {ONE: 3, TWO: 4})
    assert eventually(lambda: rig.a.requests[RequestCode.UPDATE_CONSUMER_OFFSET] == 2)
    rig.member.drop_resets([TWO])  # the query is past it
    rig.pass_time(1.1)
    assert eventually(lambda: rig.a.requests[RequestCode.UPDATE_CONSUMER_OFFSET] == 3)
    rig.a.heal()
    rig.pass_time(1.1)
    assert eventually(lambda: committed(rig, ONE) == 3)
    assert committed(rig, TWO) is None
    assert caplog.text.count("is not committed yet: ") == 1


def test_a_request_that_cannot_be_read_is_logged(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    rig.register(A)
    push_reset(rig, {}, b'{"offsetTable":{"x":1}}')
    assert eventually(lambda: "has sent a request that cannot be read" in caplog.text)
    assert rig.member.beat([A]) == {A: None}, "the thread lives"


# Locks.


def lock(rig: Rig, *queues: QueueKey) -> None:
    client = ClusterClient(rig.address, rig.clock)
    assert client.call(rig.a.address, LockRequest(ID, GROUP, queues)).locked == set(queues)
    rig.member.add_locks(queues, rig.clock())
    client.close()


def test_locks_are_renewed(rig: Rig) -> None:
    rig.register(A)
    lock(rig, ONE, TWO)
    for _ in range(4):
        rig.a.pass_time(20)
        rig.pass_time(20)
        assert eventually(lambda: (rig.member.lock_age_s(ONE) or 0) < 10)
    owner = rig.a.locks.owner
    assert {owner(GROUP, queue) for _, queue in rig.a.locks.held} == {ID}
    assert len(rig.a.locks.held) == 2
    rig.member.remove_locks([TWO])
    assert rig.member.lock_age_s(TWO) is None


def test_a_lock_that_another_member_has_taken_is_noted(rig: Rig) -> None:
    rig.register(A)
    lock(rig, ONE, TWO)
    stolen = next(queue for _, queue in rig.a.locks.held if queue.queue_id == ONE.queue_id)
    rig.a.locks.held[GROUP, stolen] = "other", rig.a.now_s()
    rig.pass_time(20)
    assert eventually(lambda: rig.member.news().lost_locks == {ONE})
    assert rig.member.lock_age_s(ONE) is None
    assert rig.member.lock_age_s(TWO) is not None
    assert rig.member.take_news().lost_locks == {ONE}


def test_a_lock_that_was_not_renewed_in_time_is_noted(rig: Rig) -> None:
    rig.register(A)
    lock(rig, ONE)
    rig.clock.passed_s += 61  # the thread is not woken, as if the process had been stopped
    assert rig.member.news().lost_locks == {ONE}


# The end.


def test_leave_unregisters_at_all_brokers(rig: Rig) -> None:
    rig.register(A, B)
    rig.member.leave()
    assert [broker.requests[RequestCode.UNREGISTER_CLIENT] for broker in rig.cluster.brokers.values()] == [1, 1]
    assert (rig.ids(A), rig.ids(B)) == ([], [])


def test_close_closes_the_connections(rig: Rig) -> None:
    rig.register(A)
    rig.member.close()
    rig.member.close()
    assert eventually(lambda: rig.ids(A) == [])
    assert not rig.member._thread.is_alive()


def test_an_error_of_the_thread_is_raised_at_the_next_call(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rig.register(A)

    def fail(schedule: HeartbeatSchedule, now_s: float) -> list[str]:
        raise ZeroDivisionError("a planted fault")

    monkeypatch.setattr(HeartbeatSchedule, "take_due", fail)
    with pytest.raises(StoreError, match="ZeroDivisionError: a planted fault"):
        rig.member.beat([A])
    with pytest.raises(StoreError, match="has ended by an error"):
        rig.member.check()
    assert [record.levelno for record in caplog.records] == [logging.ERROR]
    assert eventually(lambda: rig.ids(A) == []), "the brokers do not wait for it"


def test_a_forked_child_has_no_membership(rig: Rig) -> None:
    rig.register(A)

    def use() -> str:
        try:
            rig.member.check()
        except StoreError as error:
            return str(error)
        finally:
            rig.member.close()
        return ""

    ended = run_forked(use, 20)
    assert ended.how == "returned", ended.fault
    assert "in the parent of this process only" in ended.value
    assert rig.member.beat([A]) == {A: None}
    assert rig.ids(A) == [ID]


@pytest.mark.parametrize("wait", [module.Membership.close, module.Membership.leave])
def test_the_end_does_not_wait_for_a_frozen_broker_for_long(rig: Rig, wait: Callable[[Membership], None]) -> None:
    rig.register(A)
    rig.a.freeze()
    wait(rig.member)
    assert not rig.member._thread.is_alive()
    rig.a.thaw()
