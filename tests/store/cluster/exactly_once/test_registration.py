"""The registration of a session at brokers in this process: it is listed, lives, and ends with its first connection."""

from collections.abc import Callable, Iterator
from time import monotonic

import pytest
from support.cluster_fixtures import address_of

from rmq_spark.store.cluster.address import ClusterAddress, Credentials, parse_name_servers
from rmq_spark.store.cluster.codes import RequestCode, ResponseCode
from rmq_spark.store.cluster.exactly_once import registration as module
from rmq_spark.store.cluster.exactly_once.registration import MAX_TRIES, Registration
from rmq_spark.store.cluster.exactly_once.target_calls import SessionOverError
from rmq_spark.store.cluster.requests import MaxOffsetRequest
from rmq_spark.store.cluster.responses import OffsetResponse
from rmq_spark.store.cluster.ticket import Ticket
from rmq_spark.store.errors import BrokerError, NoPermissionError
from rmq_spark.store.model import QueueKey
from rmq_spark.store.testing.backend_groups import eventually
from rmq_spark.store.testing.brokers import Account, AccountTable, RunningCluster, faults
from rmq_spark.store.testing.brokers.raw_client import RawClient
from rmq_spark.store.testing.brokers.wire import Call

GROUP, SESSION = "RMQ_SPARK_0123", "session-1"
HEARTBEAT, PRODUCERS, MAX_OFFSET = (
    RequestCode.HEART_BEAT,
    RequestCode.GET_PRODUCER_CONNECTION_LIST,
    RequestCode.GET_MAX_OFFSET,
)
A, B = "broker-a", "broker-b"
ASK = MaxOffsetRequest(QueueKey("orders", 0, A))


class Clock:
    """A clock that runs as the system's, and can be put forward."""

    def __init__(self) -> None:
        self.ahead_s = 0.0

    def __call__(self) -> float:
        return monotonic() + self.ahead_s


@pytest.fixture(params=["4.9", "5.3"])
def cluster(run_cluster: Callable[..., RunningCluster], request: pytest.FixtureRequest) -> RunningCluster:
    cluster = run_cluster(release=request.param, brokers=2, is_light=True)
    cluster.create_topic("orders", queues=1)
    return cluster


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def session(cluster: RunningCluster, clock: Clock) -> Iterator[Registration]:
    with Registration(address_of(cluster), GROUP, SESSION, clock) as session:
        yield session


def masters(cluster: RunningCluster) -> dict[str, str]:
    return {name: broker.address for name, broker in cluster.brokers.items()}


def listed(cluster: RunningCluster, group: str = GROUP) -> list[list[str]]:
    return [broker.producers.ids(group) for broker in cluster.brokers.values()]


def heartbeats(cluster: RunningCluster) -> list[int]:
    return [broker.requests[HEARTBEAT] for broker in cluster.brokers.values()]


def connections(cluster: RunningCluster) -> list[int]:
    return [broker.connection_count for broker in cluster.brokers.values()]


def is_over(session: Registration) -> bool:
    try:
        session.check()
    except SessionOverError:
        return True
    return False


def test_register_returns_when_each_broker_lists_the_session_on_one_connection(
    cluster: RunningCluster, session: Registration
) -> None:
    session.register(masters(cluster))
    assert (listed(cluster), heartbeats(cluster), connections(cluster)) == ([[SESSION]] * 2, [1, 1], [1, 1])
    session.register(masters(cluster))
    session.register_again()
    assert (listed(cluster), heartbeats(cluster), connections(cluster)) == ([[SESSION]] * 2, [2, 2], [1, 1])
    assert all(broker.requests[PRODUCERS] == 2 for broker in cluster.brokers.values())


def test_register_adds_brokers(cluster: RunningCluster, session: Registration) -> None:
    session.register({A: cluster.brokers[A].address})
    session.register(masters(cluster))
    assert (listed(cluster), heartbeats(cluster)) == ([[SESSION]] * 2, [1, 1])


def test_the_group_has_the_namespace_of_the_cluster(cluster: RunningCluster) -> None:
    address = ClusterAddress(parse_name_servers(cluster.address), namespace="ns")
    with Registration(address, GROUP, SESSION) as session:
        session.register(masters(cluster))
        assert listed(cluster, f"ns%{GROUP}") == [[SESSION]] * 2
        assert session.producers([A])[A].keys() == {SESSION}


def test_producers_are_all_sessions_with_their_addresses(cluster: RunningCluster, session: Registration) -> None:
    session.register(masters(cluster))
    with RawClient(cluster.brokers[A].address) as other:
        other.produce("session-0", GROUP)
        found = session.producers([A, B])
        assert (found[A].keys(), found[A]["session-0"]) == ({"session-0", SESSION}, other.address)
        assert list(found[B]) == [SESSION]
    assert eventually(lambda: list(session.producers([A])[A]) == [SESSION])


def test_a_session_that_a_broker_does_not_list_registers_again(cluster: RunningCluster, session: Registration) -> None:
    cluster.brokers[B].fail(HEARTBEAT, faults.with_code(0), times=MAX_TRIES - 1)
    session.register(masters(cluster))
    assert (listed(cluster), heartbeats(cluster)) == ([[SESSION]] * 2, [1, MAX_TRIES])


def test_a_session_that_a_broker_never_lists_is_refused_by_name(
    cluster: RunningCluster, session: Registration, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_PAUSE_MS", 1.0)
    cluster.brokers[B].fail(HEARTBEAT, faults.with_code(0))
    with pytest.raises(
        BrokerError, match=f"broker {B} at .* does not list .* {GROUP}, after 5 heartbeats of {SESSION}"
    ):
        session.register(masters(cluster))
    assert heartbeats(cluster) == [1, MAX_TRIES]


def test_a_session_whose_entry_is_lost_is_over(cluster: RunningCluster, session: Registration) -> None:
    """Others may have looked for it meanwhile. So it must not register again, and go on."""
    session.register(masters(cluster))
    cluster.brokers[A].producers.add(GROUP, "session-0")
    cluster.brokers[A].producers.remove(GROUP, SESSION)
    with pytest.raises(SessionOverError, match=f"broker {A} at .* does not list it any more"):
        session.producers([A, B])
    assert heartbeats(cluster) == [1, 1]


@pytest.mark.parametrize("end", ["stop", "kill", "close_connections"])
def test_a_session_is_over_when_any_connection_ends_and_never_connects_again(
    cluster: RunningCluster, session: Registration, end: str
) -> None:
    session.register(masters(cluster))
    session.check()
    getattr(cluster.brokers[B], end)()
    if end != "close_connections":
        cluster.brokers[B].restart()
    calls: list[Callable[[], object]] = [
        session.check,
        session.beat,
        session.register_again,
        lambda: session.producers([A]),
        lambda: session.register({"broker-c": cluster.brokers[A].address}),
        lambda: session.call(A, ASK),
        lambda: session.submit(A, ASK),
        lambda: session.take_done([], 0),
        lambda: session.wait(0),
    ]
    cluster.clear_requests()
    assert eventually(lambda: is_over(session)), "the notice may still be on its way"
    for call in calls:
        with pytest.raises(SessionOverError, match=f"connection to broker {B} at .* has ended: "):
            call()
    assert cluster.clear_requests() == {}
    assert connections(cluster)[1] == 1
    session.close(unregisters=True)
    assert connections(cluster)[1] == 1


def test_a_session_is_over_when_a_request_is_lost(cluster: RunningCluster, session: Registration) -> None:
    session.register(masters(cluster))
    done: list[Ticket[OffsetResponse]] = []

    def close_later(call: Call, serve: Callable[[], None]) -> None:
        call.server.loop.call_later(0.2, call.connection.close)

    cluster.brokers[A].fail(MAX_OFFSET, close_later)
    session.submit(A, ASK, done=done)
    with pytest.raises(SessionOverError, match=A):
        session.take_done(done, 10_000)


def test_a_broker_that_is_away_ends_the_session(cluster: RunningCluster, session: Registration) -> None:
    cluster.brokers[A].stop()
    with pytest.raises(SessionOverError, match=f"broker {A} at .*connection refused"):
        session.register(masters(cluster))


def test_calls_go_on_the_registered_connections(cluster: RunningCluster, session: Registration) -> None:
    session.register(masters(cluster))
    cluster.advance("orders", 7, broker=A)
    assert session.call(A, ASK).offset == 7
    done: list[Ticket[OffsetResponse]] = []
    tickets = session.submit_all(A, [ASK] * 3, done=done)
    found: list[Ticket[OffsetResponse]] = []
    while len(found) < 3:
        found += session.take_done(done, 10_000)
    assert [ticket.result().offset for ticket in tickets] == [7] * 3
    cluster.brokers[A].fail(MAX_OFFSET, faults.with_code(1, "broken"), times=1)
    with pytest.raises(BrokerError, match="broken"):
        session.call(A, ASK)
    assert connections(cluster) == [1, 1]


def test_requests_have_five_times_the_usual_time(cluster: RunningCluster) -> None:
    address = ClusterAddress(parse_name_servers(cluster.address), request_timeout_ms=200)
    with Registration(address, GROUP, SESSION) as session:
        session.register(masters(cluster))
        for code in (HEARTBEAT, PRODUCERS, MAX_OFFSET):
            cluster.brokers[A].fail(code, faults.slowly(300))
        session.register_again()
        assert session.call(A, ASK).offset == 0


def test_heartbeats_are_sent_every_30_s_by_whatever_waits(
    cluster: RunningCluster, session: Registration, clock: Clock
) -> None:
    session.register(masters(cluster))
    for number in range(1, 4):
        clock.ahead_s += 25
        session.wait(0)
        session.call(A, ASK)
        assert heartbeats(cluster) == [number, number]
        clock.ahead_s += 6
        session.call(A, ASK)
        assert eventually(lambda number=number: heartbeats(cluster) == [number + 1] * 2)  # type: ignore[misc]
        session.wait(50)
    assert connections(cluster) == [1, 1]


def test_a_refused_heartbeat_is_repeated(cluster: RunningCluster, session: Registration, clock: Clock) -> None:
    session.register(masters(cluster))
    cluster.brokers[A].fail(HEARTBEAT, faults.with_code(ResponseCode.SYSTEM_ERROR, "no"), times=1)
    clock.ahead_s += 31
    assert eventually(lambda: session.wait(10) or A in session._refusals)
    assert heartbeats(cluster) == [2, 2]
    clock.ahead_s += 2
    assert eventually(lambda: session.wait(10) or heartbeats(cluster) == [3, 2])


def test_a_session_is_over_when_no_heartbeat_is_acknowledged_for_long(
    cluster: RunningCluster, session: Registration, clock: Clock
) -> None:
    session.register(masters(cluster))
    cluster.brokers[A].fail(HEARTBEAT, faults.with_code(ResponseCode.SYSTEM_ERROR, "no"))
    for _ in range(3):
        clock.ahead_s += 31
        session.beat()
        session.call(B, ASK)
        session.call(A, ASK)
    clock.ahead_s += 8
    with pytest.raises(SessionOverError, match=f"broker {A} has acknowledged no heartbeat for 100 s"):
        session.check()


def test_a_broker_that_refuses_a_heartbeat_is_named(cluster: RunningCluster, session: Registration) -> None:
    cluster.brokers[A].fail(HEARTBEAT, faults.with_code(ResponseCode.SYSTEM_ERROR, "no"))
    with pytest.raises(BrokerError, match=f"cannot register {SESSION} as a producer .* broker {A} at .*no"):
        session.register(masters(cluster))


def test_a_proxy_is_refused(cluster: RunningCluster, session: Registration) -> None:
    cluster.brokers[A].fail(PRODUCERS, faults.with_code(3, "request type 204 not supported"))
    with pytest.raises(BrokerError, match=r"a proxy; expected a broker.*delivery=atLeastOnce"):
        session.register(masters(cluster))


@pytest.mark.parametrize("is_admin", [False, True])
def test_accounts_need_the_right_to_list_producers(run_cluster: Callable[..., RunningCluster], is_admin: bool) -> None:
    cluster = run_cluster(release="5.3", is_light=True)
    cluster.broker.accounts = AccountTable(Account("me", "secret", is_admin=is_admin))
    address = ClusterAddress(parse_name_servers(cluster.address), credentials=Credentials("me", "secret"))
    with Registration(address, GROUP, SESSION) as session:
        if is_admin:
            session.register(masters(cluster))
            return
        with pytest.raises(NoPermissionError, match=r"Get of the cluster \(5\.3\).*delivery=atLeastOnce"):
            session.register(masters(cluster))


def test_close_with_a_farewell_removes_the_entry_before_it_returns(
    cluster: RunningCluster, session: Registration
) -> None:
    session.register(masters(cluster))
    session.close(unregisters=True)
    assert listed(cluster) == [[], []]
    assert [broker.requests[RequestCode.UNREGISTER_CLIENT] for broker in cluster.brokers.values()] == [1, 1]
    session.close(unregisters=True)


def test_close_without_a_farewell_says_nothing(cluster: RunningCluster, session: Registration) -> None:
    session.register(masters(cluster))
    session.close(unregisters=False)
    assert eventually(lambda: listed(cluster) == [[], []])
    assert not any(broker.requests[RequestCode.UNREGISTER_CLIENT] for broker in cluster.brokers.values())


def test_close_does_not_need_the_answer_of_a_broker_that_is_frozen(
    cluster: RunningCluster, session: Registration, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_FAREWELL_MS", 50)
    session.register(masters(cluster))
    cluster.brokers[A].freeze()
    session.close(unregisters=True)
    assert listed(cluster)[1] == []
    cluster.brokers[A].thaw()
    assert eventually(lambda: listed(cluster) == [[], []])
