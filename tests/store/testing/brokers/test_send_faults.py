"""What can go wrong with a send to the tests' brokers: lost answers, refusals, wrong answers, and another order."""

from collections.abc import Callable
from typing import Any

import pytest

from rmq_spark.store.cluster.codes import ResponseCode
from rmq_spark.store.cluster.frame import Command, FrameError, encode_command
from rmq_spark.store.cluster.signing import sign_command
from rmq_spark.store.model import QueueKey
from rmq_spark.store.testing.brokers import Account, AccountTable, Broker, RunningCluster, faults
from rmq_spark.store.testing.brokers.raw_client import RawClient
from rmq_spark.store.testing.brokers.send_order import ARRIVAL, NEWEST_FIRST, SHUFFLED
from rmq_spark.store.testing.brokers.sent_message import SEND_BATCH_MESSAGE, SEND_MESSAGE_V2, Item
from rmq_spark.store.testing.brokers.wire import text_of

RunCluster = Callable[..., RunningCluster]
NOBODY_ANSWERS_S = 0.2
FIELDS = {"a": "group", "b": "orders", "e": 0, "f": 0, "g": 1, "h": 0, "i": ""}
ITEMS = [Item(0, b"one", b""), Item(0, b"two", b"p\x01v"), Item(0, b"three", b"")]
BATCH = b"".join(item.encode() for item in ITEMS)


@pytest.fixture
def broker(run_cluster: RunCluster) -> Broker:
    """A broker of 5.3 with the topic orders, which has two queues."""
    cluster = run_cluster()
    cluster.create_topic("orders", 2)
    return cluster.broker


def send(broker: Broker, *, timeout_s: float = 10, **terms: Any) -> Command:
    with RawClient(broker.address, timeout_s=timeout_s) as client:
        return client.call(SEND_MESSAGE_V2, FIELDS | terms, b"x")


def stored(broker: Broker) -> int:
    return broker.bounds("orders")[0].max_offset


@pytest.mark.parametrize("executes", [True, False])
@pytest.mark.parametrize(
    ("make", "error"),
    [(faults.nothing, TimeoutError), (faults.closes_connection, ConnectionError), (faults.garbage, FrameError)],
)
def test_an_answer_is_lost_after_or_before_the_message_was_stored(
    broker: Broker, make: Callable[..., faults.Fault], error: type[Exception], executes: bool
) -> None:
    broker.fail(SEND_MESSAGE_V2, make(executes=executes), times=1)
    with pytest.raises(error):
        send(broker, timeout_s=NOBODY_ANSWERS_S if error is TimeoutError else 10)
    assert stored(broker) == executes
    assert send(broker).code == 0


def test_an_answer_is_lost_after_a_held_message_was_stored(broker: Broker) -> None:
    broker.settings.holds_sends_ms = 20
    broker.fail(SEND_MESSAGE_V2, faults.closes_connection(), times=1)
    with pytest.raises(ConnectionError):
        send(broker)
    assert stored(broker) == 1


@pytest.mark.parametrize(
    ("fault", "code", "begin"),
    [
        (faults.busy(), ResponseCode.SYSTEM_BUSY, "[TIMEOUT_CLEAN_QUEUE]broker busy"),
        (faults.disk_full(), ResponseCode.SERVICE_NOT_AVAILABLE, "service not available now."),
    ],
)
def test_a_refused_message_is_not_stored(broker: Broker, fault: faults.Fault, code: int, begin: str) -> None:
    broker.fail(SEND_MESSAGE_V2, fault, times=1)
    answer = send(broker)
    assert (answer.code, (answer.remark or "").startswith(begin)) == (code, True)
    assert ("MSG_REGION" in answer.fields) == (code == ResponseCode.SERVICE_NOT_AVAILABLE)
    assert stored(broker) == 0
    assert send(broker).code == 0


@pytest.mark.parametrize("code", [10, 11, 12])
def test_a_message_whose_flush_is_late_is_stored(broker: Broker, code: int) -> None:
    broker.fail(SEND_MESSAGE_V2, faults.stored_late(code), times=2)
    answer = send(broker)
    assert (answer.code, answer.fields["queueOffset"]) == (code, "0")
    assert len(answer.fields["msgId"]) == 32
    assert stored(broker) == 1
    assert send(broker, b="payments").code == ResponseCode.TOPIC_NOT_EXIST


def test_fields_of_an_answer_are_wrong_or_missing(broker: Broker) -> None:
    broker.fail(SEND_MESSAGE_V2, faults.with_fields(msgId=None, queueOffset="many"))
    answer = send(broker)
    assert answer.code == 0
    assert ("msgId" in answer.fields, answer.fields["queueOffset"]) == (False, "many")
    assert stored(broker) == 1


@pytest.mark.parametrize("count", [0, 2])
def test_a_broker_is_killed_in_the_middle_of_a_batch(broker: Broker, count: int) -> None:
    broker.fail(SEND_BATCH_MESSAGE, faults.killed_in_batch(count), times=1)
    with RawClient(broker.address) as client:
        client.send(SEND_BATCH_MESSAGE, FIELDS | {"m": True}, BATCH)
        with pytest.raises(ConnectionError):
            client.receive()
    assert not broker.is_running
    broker.restart()
    assert stored(broker) == count


def bodies(broker: Broker, queue_id: int = 0) -> list[int]:
    """Return the flags of the messages of a queue, which tell in what order they were sent."""
    count = broker.bounds("orders")[queue_id].max_offset
    return [flag_of(broker, QueueKey("orders", queue_id), offset) for offset in range(count)]


def flag_of(broker: Broker, queue: QueueKey, offset: int) -> int:
    found = broker.loop.run(broker.store.get, queue, offset, 1, broker.settings.pull_limits, None)
    return int.from_bytes(found.body[16:20], "big")


@pytest.mark.parametrize("order", [NEWEST_FIRST, SHUFFLED, ARRIVAL])
def test_sends_in_flight_together_are_stored_in_another_order(broker: Broker, order: str) -> None:
    broker.settings.holds_sends_ms, broker.settings.send_order = 30, order
    with RawClient(broker.address) as client:
        for number in range(6):
            client.send(SEND_MESSAGE_V2, FIELDS | {"h": number}, b"x")
        client.send(SEND_MESSAGE_V2, FIELDS | {"h": 9, "e": 1}, b"x")
        answers = [client.receive() for _ in range(7)]
    assert all(answer.code == 0 for answer in answers)
    found = bodies(broker)
    assert sorted(found) == list(range(6))
    assert (found == list(range(6))) == (order == ARRIVAL)
    assert (found == list(range(6))[::-1]) == (order == NEWEST_FIRST)
    offset_of = {answer.opaque - 1: int(answer.fields["queueOffset"]) for answer in answers}
    assert [offset_of[number] for number in range(6)] == [found.index(number) for number in range(6)]
    assert broker.sends.most_in_flight == {QueueKey("orders", 0): 6, QueueKey("orders", 1): 1}


def test_batches_in_flight_together_stay_whole(broker: Broker) -> None:
    broker.settings.holds_sends_ms = 30
    with RawClient(broker.address) as client:
        for number in range(3):
            body = b"".join(Item(10 * number + item, b"x", b"").encode() for item in range(3))
            client.send(SEND_BATCH_MESSAGE, FIELDS | {"m": True}, body)
        assert [client.receive().code for _ in range(3)] == [0, 0, 0]
    assert bodies(broker) == [20, 21, 22, 10, 11, 12, 0, 1, 2]


def test_one_send_in_flight_keeps_its_order(broker: Broker) -> None:
    broker.settings.holds_sends_ms = 5
    for number in range(4):
        send(broker, h=number)
    assert bodies(broker) == [0, 1, 2, 3]
    assert broker.sends.most_in_flight == {QueueKey("orders", 0): 1}


def test_held_sends_are_refused_one_by_one(broker: Broker) -> None:
    broker.settings.holds_sends_ms = 5
    with RawClient(broker.address) as client:
        client.send(SEND_MESSAGE_V2, FIELDS | {"e": 7}, b"x")
        client.send(SEND_MESSAGE_V2, FIELDS | {"e": 7}, b"x")
        assert [client.receive().code for _ in range(2)] == [ResponseCode.INVALID_PARAMETER] * 2


def test_held_sends_are_lost_with_their_broker(broker: Broker) -> None:
    broker.settings.holds_sends_ms = 20
    with RawClient(broker.address) as client:
        client.send(SEND_MESSAGE_V2, FIELDS, b"x")
        while not broker.sends.most_in_flight:
            pass
        broker.kill()
    broker.restart()
    assert send(broker, e=1).code == 0  # held later than the lost one
    assert stored(broker) == 0


WRITER = Account("writer", "a secret", topics={"orders": "PUB"})
RETRIER = Account("retrier", "a secret", groups={"billing": "SUB"})


@pytest.mark.parametrize(
    ("signer", "code", "changes", "allowed"),
    [
        (WRITER, SEND_MESSAGE_V2, {}, {"4.9", "5.3"}),
        (WRITER, SEND_BATCH_MESSAGE, {"m": True}, {"4.9", "5.3"}),
        (WRITER, SEND_MESSAGE_V2, {"b": "payments"}, set()),
        (RETRIER, SEND_MESSAGE_V2, {}, set()),
        (RETRIER, SEND_BATCH_MESSAGE, {"m": True}, {"4.9"}),
        (RETRIER, SEND_MESSAGE_V2, {"a": "billing", "b": "%RETRY%billing"}, {"4.9", "5.3"}),
        (WRITER, SEND_MESSAGE_V2, {"a": "billing", "b": "%RETRY%billing"}, set()),
    ],
)
def test_an_account_needs_the_right_to_send(
    run_cluster: RunCluster, signer: Account, code: int, changes: dict[str, Any], allowed: set[str]
) -> None:
    for release, refused in (("4.9", ResponseCode.SYSTEM_ERROR), ("5.3", ResponseCode.NO_PERMISSION)):
        cluster = run_cluster(release=release)
        cluster.create_topic("orders", 2)
        cluster.create_topic("payments", 2)
        cluster.broker.accounts = AccountTable(WRITER, RETRIER)
        fields = {name: text_of(value) for name, value in (FIELDS | changes).items()}
        command = sign_command(Command(code, 1, fields, BATCH), signer.access_key, signer.secret_key, "")
        with RawClient(cluster.broker.address) as client:
            client.send_bytes(encode_command(command))
            answer = client.receive()
        assert answer.code == (0 if release in allowed else refused), (release, answer)
