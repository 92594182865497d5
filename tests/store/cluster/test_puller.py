"""Reading planned ranges from the tests' brokers, which serve real records from store directories."""

import logging
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pyarrow as pa
import pytest

from rmq_spark.store.cluster.address import ClusterAddress
from rmq_spark.store.cluster.client import ClusterClient
from rmq_spark.store.cluster.codes import RequestCode, ResponseCode
from rmq_spark.store.cluster.puller import LOSS_AFTER_S, Puller, PullTerms
from rmq_spark.store.errors import (
    BackendUnavailableError,
    DamageError,
    OffsetRangeError,
    StoreChangedError,
    StoreError,
)
from rmq_spark.store.filter.row_filter import SQL92, TAG, Expression, compile_filter
from rmq_spark.store.format.columns import COLUMNS
from rmq_spark.store.format.rows import DecodeLimits
from rmq_spark.store.local.directory import StoreDirectory
from rmq_spark.store.model import QueueKey, QueueRange
from rmq_spark.store.testing.brokers import Answer, Broker, RunningCluster, faults

RunCluster = Callable[..., RunningCluster]
PULL = RequestCode.PULL_MESSAGE
LIMITS = DecodeLimits()
_TERMS = PullTerms("rmq-spark-reader")


@dataclass
class Reader:
    """A puller for a running cluster, with a clock that only its sleep moves. `on_sleep` is called in each sleep."""

    cluster: RunningCluster
    terms: PullTerms = _TERMS
    acting: set[str] = field(default_factory=set)
    on_sleep: Callable[[float], None] = lambda _: None
    now_s: float = 0.0
    slept: list[float] = field(default_factory=list)
    lookups: int = 0

    def __post_init__(self) -> None:
        self.client = ClusterClient(ClusterAddress(tuple(self.cluster.address.split(";"))))
        self.puller = Puller(
            self.client,
            self.address_of,
            self.terms,
            is_acting_master=self.acting.__contains__,
            monotonic_s=lambda: self.now_s,
            sleep=self.sleep,
        )

    def address_of(self, broker: str) -> str:
        self.lookups += 1
        found = self.cluster.brokers[broker]
        if broker in self.acting:
            found = self.cluster.slaves[broker, 1]
        if not found.is_running:
            raise BackendUnavailableError(f"no name server has a route to broker {broker}")
        address: str = found.address
        return address

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        self.slept.append(seconds)
        assert self.now_s < 3600, "waits for ever"
        self.on_sleep(self.now_s)

    def read(self, part: QueueRange, columns: Any = ("queueOffset",), text: str = "", kind: str = TAG) -> pa.Table:
        expression = Expression(kind, text) if text else None
        batches = self.puller.read(part, list(columns), LIMITS, compile_filter(expression), expression)
        return pa.Table.from_batches([batch for batch, _ in batches])

    def offsets(self, part: QueueRange, text: str = "", kind: str = TAG) -> list[int]:
        found: list[int] = self.read(part, text=text, kind=kind).column("queueOffset").to_pylist()
        return found


@pytest.fixture
def start(run_cluster: RunCluster) -> Iterator[Callable[..., Reader]]:
    """Start a cluster with a topic `orders`, whose queue 1 has `count` messages. Return a reader."""
    readers = []

    def begin(count: int = 100, terms: PullTerms | None = None, **cluster: Any) -> Reader:
        running = run_cluster(**cluster)
        for broker in running.brokers.values():
            fill(broker, count)
        readers.append(Reader(running) if terms is None else Reader(running, terms))
        return readers[-1]

    yield begin
    for reader in readers:
        reader.client.close()


def fill(broker: Broker, count: int, queue_id: int = 1, topic: str = "orders") -> None:
    rows = [
        {
            "topic": topic,
            "queueId": queue_id,
            "body": b"body %d" % number,
            "tags": ("red", "green", "Aa", "BB")[number % 4],
            "keys": f"k{number}",
            "properties": {"number": str(number)},
        }
        for number in range(count)
    ]
    if rows:
        broker.send_rows(rows)


def part(begin: int, end: int, queue_id: int = 1, broker: str = "broker-a", topic: str = "orders") -> QueueRange:
    return QueueRange(QueueKey(topic, queue_id, broker), begin, end)


@pytest.mark.parametrize("release", ["4.9", "5.3"])
@pytest.mark.parametrize("on_disk", [False, True])
def test_rows_equal_those_of_the_brokers_directory(start: Callable[..., Reader], release: str, on_disk: bool) -> None:
    reader = start(700, release=release)
    broker = reader.cluster.broker
    broker.settings.on_disk = on_disk
    columns = [*COLUMNS, "brokerName"]
    found = reader.read(part(3, 699), columns)
    path = broker.copy_store(reader.cluster.folder / "copy")
    directory = StoreDirectory(str(path)).open()
    directory.refresh()
    local = QueueRange(QueueKey("orders", 1), 3, 699)
    expected = pa.Table.from_batches([batch for batch, _ in directory.read(local, list(COLUMNS), LIMITS, None)])
    directory.close()
    assert found.drop_columns("brokerName").equals(expected)
    assert set(found.column("brokerName").to_pylist()) == {"broker-a"}
    assert broker.moved_event_count == 0


@pytest.mark.parametrize("text", ["red", "red || Aa", "nothing"])
def test_broker_filters_by_tags_and_the_tags_are_compared_again(start: Callable[..., Reader], text: str) -> None:
    reader = start(1000)
    wanted = [{"red": 0, "green": 1, "Aa": 2, "BB": 3}.get(tag) for tag in text.split(" || ")]
    assert reader.offsets(part(10, 990), text) == [n for n in range(10, 990) if n % 4 in wanted]


def test_broker_filters_by_sql92(start: Callable[..., Reader]) -> None:
    reader = start(300)
    assert reader.offsets(part(0, 300), "number >= 290", SQL92) == list(range(290, 300))


def test_broker_that_filters_less_is_filtered_here(start: Callable[..., Reader]) -> None:
    reader = start(300)
    wanted, everything = compile_filter(Expression(TAG, "red")), Expression(SQL92, "number >= 0")
    batches = reader.puller.read(part(0, 300), ["queueOffset"], LIMITS, wanted, everything)
    found = [row for batch, _ in batches for row in batch.column("queueOffset").to_pylist()]
    assert found == list(range(0, 300, 4))


def test_ranges_of_several_queues_and_brokers_come_one_after_another(start: Callable[..., Reader]) -> None:
    reader = start(100, brokers=2)
    for broker in reader.cluster.brokers.values():
        fill(broker, 50, queue_id=2)
    parts = [part(0, 100), part(5, 5), part(7, 50, 2), part(0, 100, 1, "broker-b"), part(1, 2, 2, "broker-b")]
    found: dict[QueueRange, list[int]] = {}
    for one, (batch, next_offset) in reader.puller.read_all(parts, ["queueOffset"], LIMITS):
        found.setdefault(one, []).extend(batch.column("queueOffset").to_pylist())
        assert next_offset == one.end
    assert list(found) == [parts[0], parts[2], parts[3], parts[4]]
    assert all(offsets == list(range(one.begin, one.end)) for one, offsets in found.items())
    assert reader.lookups == 2


def test_namespaces_are_in_requests_and_not_in_rows(start: Callable[..., Reader]) -> None:
    reader = start(0, terms=PullTerms("reader", "team"))
    fill(reader.cluster.broker, 40, topic="team%orders")
    found = reader.read(part(0, 40), ["topic", "physicalTopic", "queueOffset"])
    assert set(found.column("topic").to_pylist()) == set(found.column("physicalTopic").to_pylist()) == {"orders"}
    assert "team%reader" in reader.cluster.broker.groups


def test_read_is_an_error_if_messages_have_expired(start: Callable[..., Reader]) -> None:
    reader = start(100)
    reader.cluster.broker.expire("orders", 1, 60)
    with pytest.raises(OffsetRangeError) as caught:
        reader.read(part(40, 100))
    error = caught.value
    assert (error.begin, error.end, error.min_offset, error.max_offset) == (40, 100, 60, 100)
    assert error.queue == "orders/broker-a:1"


@pytest.mark.parametrize("text", ["", "red"])
def test_read_is_an_error_if_messages_have_expired_and_the_minimum_is_old(
    start: Callable[..., Reader], text: str
) -> None:
    reader = start(100)
    reader.cluster.broker.expire("orders", 1, 61, keeps_minimum=True)
    with pytest.raises(OffsetRangeError) as caught:
        reader.offsets(part(40, 100), text)
    assert (caught.value.begin, caught.value.end) == (40, 100)
    assert caught.value.min_offset > 40
    assert reader.offsets(part(61, 100), text) == [n for n in range(61, 100) if not text or n % 4 == 0]


def test_read_asks_for_the_group_of_the_terms_and_names_the_broker(start: Callable[..., Reader]) -> None:
    reader = start(10)
    reader.read(part(0, 10))
    (request,) = [one for one in reader.cluster.broker.seen_requests(PULL)]
    assert request.fields["consumerGroup"] == "rmq-spark-reader"
    assert request.fields["bname"] == "broker-a"


def test_refused_reads_raise_their_error(start: Callable[..., Reader]) -> None:
    reader = start(10)
    reader.cluster.broker.settings.is_readable = False
    with pytest.raises(StoreError, match="forbidden"):
        reader.read(part(0, 10))


# Brokers that are away.


def test_read_goes_on_after_a_restart_of_the_broker(
    start: Callable[..., Reader], caplog: pytest.LogCaptureFixture
) -> None:
    reader = start(3000)
    broker = reader.cluster.broker

    def restart(now_s: float) -> None:
        if now_s > 20 and not broker.is_running:
            broker.restart(new_port=True)

    reader.on_sleep = restart
    with caplog.at_level(logging.INFO, "rmq_spark"):
        batches = reader.puller.read(part(0, 3000), ["queueOffset"], LIMITS)
        broker.fail(PULL, faults.closes_connection(), times=1, when=lambda call: stop(broker))
        found = [row for batch, _ in batches for row in batch.column("queueOffset").to_pylist()]
    assert found == list(range(3000))
    assert [record.getMessage().split(":")[1].split(";")[0] for record in caplog.records] == [
        " reading from broker broker-a waits",
        " broker broker-a answers again",
    ]


def stop(broker: Broker) -> bool:
    broker.loop.call_later(0, broker.kill)
    return True


def test_a_lost_connection_is_no_reason_to_wait(start: Callable[..., Reader], caplog: pytest.LogCaptureFixture) -> None:
    reader = start(3000)
    reader.read(part(0, 10))
    reader.cluster.broker.fail(PULL, faults.closes_connection(), times=1)
    assert reader.offsets(part(0, 3000)) == list(range(3000))
    assert not reader.slept
    assert not caplog.records


def test_a_broker_that_is_back_at_once_is_not_waited_for(
    start: Callable[..., Reader], caplog: pytest.LogCaptureFixture
) -> None:
    reader = start(100)
    broker = reader.cluster.broker
    addresses = iter([broker.address])

    def find(name: str) -> str:
        found = next(addresses, None)
        if found is None:
            broker.restart(new_port=True)
            return reader.address_of(name)
        broker.kill()
        return found

    reader.puller.broker_address = find
    assert reader.offsets(part(0, 100)) == list(range(100))
    assert not reader.slept
    assert not caplog.records


def test_read_fails_after_the_time_for_a_broker_that_is_away(start: Callable[..., Reader]) -> None:
    reader = start(100, terms=PullTerms("reader", broker_down_timeout_ms=60_000))
    reader.cluster.broker.kill()
    with pytest.raises(BackendUnavailableError, match=r"broker broker-a: for 60 s .* brokerDownTimeout") as caught:
        reader.read(part(0, 100))
    assert "no name server has a route" in str(caught.value)
    assert reader.now_s == pytest.approx(60)
    assert len(reader.slept) < 30


def test_read_waits_while_a_slave_answers_without_messages(start: Callable[..., Reader]) -> None:
    reader = start(100, release="4.9")
    slave = reader.cluster.add_slave("broker-a")
    masters = dict(reader.cluster.brokers)
    reader.cluster.brokers["broker-a"] = slave
    reader.on_sleep = lambda now_s: reader.cluster.brokers.update(masters if now_s > 5 else {})
    assert reader.offsets(part(0, 100)) == list(range(100))
    assert reader.now_s > 5


def test_busy_brokers_are_asked_again(start: Callable[..., Reader]) -> None:
    reader = start(500)
    reader.cluster.broker.fail(PULL, faults.busy(), times=10)
    assert reader.offsets(part(0, 500)) == list(range(500))


def test_abandoned_read_forgets_its_pulls(start: Callable[..., Reader]) -> None:
    reader = start(2000)
    batches = reader.puller.read_all([part(0, 40), part(0, 2000)], ["queueOffset"], LIMITS)
    next(batches)
    assert isinstance(batches, Generator)
    batches.close()
    assert reader.offsets(part(0, 2000)) == list(range(2000))


# Queues that are too short.


def test_short_queue_of_a_master_is_an_error_after_a_second_look(start: Callable[..., Reader]) -> None:
    reader = start(60, release="4.9")
    with pytest.raises(OffsetRangeError) as caught:
        reader.read(part(40, 100))
    assert (caught.value.begin, caught.value.min_offset, caught.value.max_offset) == (60, 0, 60)
    assert reader.now_s >= LOSS_AFTER_S
    assert reader.cluster.broker.moved_event_count <= 1, "the first pull may be beyond the end, the others are not"


def test_messages_below_the_end_of_a_short_queue_are_read_at_once(start: Callable[..., Reader]) -> None:
    reader = start(200, terms=PullTerms("reader", max_pulls=1))
    reader.on_sleep = lambda now_s: fill(reader.cluster.broker, 10) if now_s == 1 else None
    assert reader.offsets(part(0, 210)) == list(range(210))
    assert reader.slept == [1]


def test_short_queue_that_grows_is_read_on(start: Callable[..., Reader]) -> None:
    reader = start(60)
    reader.on_sleep = lambda now_s: fill(reader.cluster.broker, 10) if now_s % 4 == 0 else None
    assert reader.offsets(part(40, 100)) == list(range(40, 100))
    assert reader.now_s > LOSS_AFTER_S, "each look at a longer queue begins the wait again"


def test_acting_master_that_is_behind_is_waited_for(start: Callable[..., Reader]) -> None:
    reader = start(60)
    slave = reader.cluster.add_slave("broker-a")
    fill(reader.cluster.broker, 40)
    reader.cluster.broker.kill()
    slave.act_as_master()
    reader.acting.add("broker-a")

    def come_back(now_s: float) -> None:
        if now_s > 100 and reader.acting:
            reader.acting.clear()
            reader.cluster.broker.restart()
            slave.stop()

    reader.on_sleep = come_back
    assert reader.offsets(part(40, 100)) == list(range(40, 100))
    assert reader.now_s > 100


def test_replaced_store_is_an_error(start: Callable[..., Reader]) -> None:
    reader = start(60)
    reader.cluster.broker.replace_store(reader.cluster.folder / "empty")
    with pytest.raises(OffsetRangeError) as caught:
        reader.read(part(40, 60))
    assert caught.value.max_offset == 0


# Answers that are wrong.


def altered(change: Callable[[bytes], bytes], **fields: str) -> faults.Fault:
    """Return a fault that changes the records of an answer, and the given fields."""
    return faults.changed(lambda answer: replace(answer, body=change(answer.body), fields={**answer.fields, **fields}))


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        (altered(lambda body: body.replace(b"\x06orders", b"\x06orderx")), DamageError),
        (altered(lambda body: body[:-1]), DamageError),
        (altered(lambda body: body + body[:50]), DamageError),
        (altered(lambda body: b""), DamageError),
        (altered(lambda body: body, nextBeginOffset="0"), DamageError),
        (altered(lambda body: body, nextBeginOffset="20"), StoreChangedError),
        (altered(lambda body: body, nextBeginOffset="10000"), DamageError),
    ],
)
def test_wrong_answers_are_errors(start: Callable[..., Reader], fault: faults.Fault, error: type[Exception]) -> None:
    reader = start(10)
    reader.cluster.broker.fail(PULL, fault)
    with pytest.raises(error):
        reader.read(part(0, 10) if error is not StoreChangedError else part(0, 20))


def test_an_administrators_reset_is_stored_for_the_driver(start: Callable[..., Reader]) -> None:
    reader = start(50)
    reset = Answer(
        ResponseCode.PULL_OFFSET_MOVED,
        {"suggestWhichBrokerId": "0", "nextBeginOffset": "7", "maxOffset": "50", "minOffset": "0"},
        b"",
        "OFFSET_RESET",
    )
    reader.cluster.broker.fail(PULL, faults.changed(lambda _: reset), times=1)
    assert reader.offsets(part(10, 50)) == list(range(10, 50))
    (commit,) = reader.cluster.broker.seen_requests(RequestCode.UPDATE_CONSUMER_OFFSET)
    assert commit.fields["commitOffset"] == "7"
    assert commit.fields["consumerGroup"] == "rmq-spark-reader"
    assert commit.fields["queueId"] == "1"
