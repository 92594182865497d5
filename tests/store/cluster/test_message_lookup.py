"""Messages by key and id at the brokers."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from rmq_spark.store.cluster import client
from rmq_spark.store.cluster.address import ClusterAddress, parse_name_servers
from rmq_spark.store.cluster.message_lookup import BrokerSearch, MessageLookup, TimeSpan, split_records
from rmq_spark.store.cluster.reader import ClusterReader
from rmq_spark.store.cluster.requests import RecordAtRequest
from rmq_spark.store.cluster.responses import RecordsResponse
from rmq_spark.store.errors import BackendUnavailableError, DamageError, NotFoundError
from rmq_spark.store.format.java import Host, encode_host
from rmq_spark.store.format.message_ids import OffsetMessageId
from rmq_spark.store.format.record import Record, decode_record, encode_record
from rmq_spark.store.log.store_reader import StoreReader
from rmq_spark.store.model import QueueKey
from rmq_spark.store.testing.brokers import RunningCluster
from rmq_spark.store.testing.brokers.broker import Broker
from rmq_spark.store.testing.sample_message import SampleMessage

A, B = QueueKey("orders", 0, "broker-a"), QueueKey("orders", 0, "broker-b")
START_MS = 1_700_000_000_000


class Clock:
    """The wall clock of all brokers, in ms."""

    now_ms = START_MS

    def __call__(self) -> int:
        return self.now_ms


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("rmq_spark.store.client.producer.wall_clock_ms", clock)
    return clock


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a broker return at most 8 messages, instead of 64."""
    monkeypatch.setattr("rmq_spark.store.testing.brokers.message_requests._MAX_MESSAGES", 8)
    monkeypatch.setattr("rmq_spark.store.cluster.message_lookup._ANSWER_MAX", 8)


@pytest.fixture
def cluster(tmp_path: Path, clock: Clock) -> Iterator[RunningCluster]:
    with RunningCluster(tmp_path / "cluster", brokers=2) as cluster:
        cluster.create_topic("orders", queues=1)
        yield cluster
        client._idle.forget()


@pytest.fixture
def reader(cluster: RunningCluster) -> Iterator[ClusterReader]:
    with ClusterReader(ClusterAddress(parse_name_servers(cluster.address), request_timeout_ms=20_000)) as reader:
        yield reader


def ids_of(broker: Broker, queue_id: int, offset: int) -> tuple[str, str]:
    """Return msgId and offsetMsgId of a message, read from the broker's directory."""
    found: list[tuple[str, str]] = []

    def read(path: Path) -> None:
        with StoreReader(str(path)) as reader:
            reader.refresh()
            columns = ["msgId", "offsetMsgId"]
            for batch in reader.read(QueueKey("orders", queue_id), offset, offset + 1, columns):
                found.extend((row["msgId"], row["offsetMsgId"]) for row in batch.to_pylist())

    broker.write(read)
    return found[0]


def test_key_is_found_on_all_brokers(cluster: RunningCluster, reader: ClusterReader) -> None:
    for broker in cluster.brokers:
        cluster.send("orders", b"0", keys="k1 k2", broker=broker)
        cluster.send("orders", b"1", keys="k2", broker=broker)
    assert reader.find_key("orders", "k1") == [(A, 0), (B, 0)]
    assert reader.find_key("orders", "k2") == [(A, 0), (A, 1), (B, 0), (B, 1)]
    assert reader.find_key("orders", "k") == []


def test_key_with_the_hash_of_another_is_not_found(cluster: RunningCluster, reader: ClusterReader) -> None:
    cluster.send("orders", b"0", keys="Aa", broker="broker-a")
    cluster.send("orders", b"1", keys="BB", broker="broker-a")
    assert reader.find_key("orders", "Aa") == [(A, 0)]
    assert reader.find_key("orders", "BB") == [(A, 1)]


@pytest.mark.usefixtures("few")
def test_key_of_many_messages_is_found_in_all(cluster: RunningCluster, reader: ClusterReader, clock: Clock) -> None:
    for _ in range(5):
        cluster.send("orders", *[b""] * 5, keys="k", broker="broker-a")
        clock.now_ms += 1_500
    assert reader.find_key("orders", "k") == [(A, offset) for offset in range(25)]


@pytest.mark.usefixtures("few")
def test_key_of_more_messages_of_one_second_than_a_broker_returns(
    cluster: RunningCluster, reader: ClusterReader, clock: Clock
) -> None:
    cluster.send("orders", b"first", keys="k", broker="broker-a")
    clock.now_ms += 5_000
    for number in range(4):
        cluster.send("orders", *[b""] * 5, keys="other" if number == 2 else "k", broker="broker-a")
        clock.now_ms += 1
    clock.now_ms += 5_000
    cluster.send("orders", b"last", keys="k", broker="broker-a")
    assert reader.find_key("orders", "k") == [(A, number) for number in range(22) if not 11 <= number < 16]


@pytest.mark.parametrize(
    ("begin_ms", "end_ms", "expected"),
    [(2_500, 7_500, [1, 2]), (2_501, 7_499, []), (0, 2_499, [0]), (7_500, 1 << 62, [2, 3])],
)
def test_key_is_found_within_the_wanted_time(
    cluster: RunningCluster, reader: ClusterReader, clock: Clock, begin_ms: int, end_ms: int, expected: list[int]
) -> None:
    for _ in range(4):
        cluster.send("orders", b"", keys="k", broker="broker-a")
        clock.now_ms += 2_500 if clock.now_ms < START_MS + 2_500 else 5_000
    found = reader.find_key("orders", "k", START_MS + begin_ms, START_MS + end_ms)
    assert [offset for _, offset in found] == expected


@pytest.mark.usefixtures("few")
def test_hidden_messages_are_read_within_the_wanted_time(
    cluster: RunningCluster, reader: ClusterReader, clock: Clock
) -> None:
    for _ in range(5):
        cluster.send("orders", *[b""] * 5, keys="k", broker="broker-a")
        clock.now_ms += 1
    found = reader.find_key("orders", "k", START_MS + 1, START_MS + 3)
    assert [offset for _, offset in found] == list(range(5, 20))


def test_key_of_expired_messages_is_not_found(cluster: RunningCluster, reader: ClusterReader) -> None:
    cluster.send("orders", b"0", b"1", b"2", keys="k", broker="broker-a")
    cluster.brokers["broker-a"].expire("orders", 0, 2)
    assert reader.find_key("orders", "k") == [(A, 2)]


def test_key_in_a_topic_that_does_not_exist(reader: ClusterReader) -> None:
    with pytest.raises(NotFoundError, match="absent"):
        reader.find_key("absent", "k")


@pytest.mark.parametrize("word", ["k", str(OffsetMessageId(Host("10.0.0.1", 10911), 0))], ids=["key", "id"])
def test_broker_that_is_away_is_an_error(cluster: RunningCluster, reader: ClusterReader, word: str) -> None:
    reader.queues("orders")
    cluster.brokers["broker-b"].kill()
    with pytest.raises(BackendUnavailableError):
        reader.find_key("orders", word)
    with pytest.raises(BackendUnavailableError):
        reader.find_message_id(word, ["orders"])


@pytest.mark.parametrize("word", ["k", str(OffsetMessageId(Host("10.0.0.1", 10911), 0))], ids=["key", "id"])
def test_broker_without_a_master_is_named(cluster: RunningCluster, reader: ClusterReader, word: str) -> None:
    cluster.add_slave("broker-b")
    cluster.brokers["broker-b"].kill()
    cluster.forget("broker-b")
    for find in (partial(reader.find_key, "orders", word), partial(reader.find_message_id, word, ["orders"])):
        with pytest.raises(BackendUnavailableError, match="messages of broker broker-b: no name server lists a master"):
            find()


def test_id_of_the_producer_is_found(cluster: RunningCluster, reader: ClusterReader) -> None:
    for broker in cluster.brokers:
        cluster.send("orders", b"0", b"1", broker=broker)
    unique, _ = ids_of(cluster.brokers["broker-b"], 0, 1)
    assert reader.find_message_id(unique, ["orders"]) == [(B, 1)]
    assert reader.find_message_id(unique[:-1] + "x", ["orders"]) == []
    cluster.send("orders", b"2", keys=unique, broker="broker-a")
    assert reader.find_message_id(unique, ["orders"]) == [(B, 1)], "a key is no id"


def test_id_of_the_broker_is_found_wherever_the_broker_is(cluster: RunningCluster, reader: ClusterReader) -> None:
    """The id has the address at which the broker stored the message. Clients may reach it at another one."""
    cluster.send("orders", b"a longer body", b"1", broker="broker-a")
    cluster.send("orders", b"0", b"1", broker="broker-b")
    _, stored = ids_of(cluster.brokers["broker-b"], 0, 1)
    assert reader.find_message_id(stored, ["orders"]) == [(B, 1)]
    assert reader.find_message_id(stored.lower(), ["orders"]) == [(B, 1)]


class OneMessage:
    """A client of brokers at "host:1", "host:2" and so on, one of which has a message."""

    def __init__(self, holder: str, record: bytes) -> None:
        self.holder, self.record = holder, record
        self.asked: list[str] = []

    def call_all(self, calls: Sequence[tuple[str, RecordAtRequest]]) -> list[RecordsResponse]:
        self.asked += [to for to, _ in calls]
        return [RecordsResponse(self.record if to == self.holder else b"") for to, _ in calls]


def test_id_of_the_broker_is_asked_first_at_its_address() -> None:
    host, queue = Host("10.0.0.2", 10911), QueueKey("orders", 3, "b")
    sample = decode_record(encode_record(SampleMessage("orders", 3).as_record(7, 4096, START_MS)))
    assert isinstance(sample, Record)
    record = encode_record(replace(sample, store_host=encode_host(host)))
    addresses = {"a": "10.0.0.1:10911", "b": "10.0.0.2:10911", "c": "10.0.0.3:10911"}
    message_id, brokers = str(OffsetMessageId(host, 4096)), {"orders": list(addresses)}
    for holder, asked in (("b", ["b"]), ("c", ["b", "a", "c"])):
        client = OneMessage(addresses[holder], record)
        lookup = MessageLookup(client, addresses.get, str)  # type: ignore[arg-type]
        assert lookup.by_offset_id(brokers, message_id) == {(replace_broker(queue, holder), 7)}
        assert client.asked == [addresses[name] for name in asked]
    other = str(OffsetMessageId(Host("10.0.0.9", 10911), 4096))
    assert lookup.by_offset_id(brokers, other) == set()


def replace_broker(queue: QueueKey, broker: str) -> QueueKey:
    return QueueKey(queue.topic, queue.queue_id, broker)


def test_id_inside_of_a_record_is_not_found(cluster: RunningCluster, reader: ClusterReader) -> None:
    cluster.send("orders", b"0", broker="broker-a")
    _, stored = ids_of(cluster.brokers["broker-a"], 0, 0)
    wrong = f"{stored[:16]}{int(stored[16:], 16) + 8:016X}"
    assert reader.find_message_id(wrong, ["orders"]) == []


def test_id_in_other_topics_is_not_found(cluster: RunningCluster, reader: ClusterReader) -> None:
    cluster.create_topic("payments", queues=1)
    cluster.send("orders", b"0", broker="broker-a")
    for one in ids_of(cluster.brokers["broker-a"], 0, 0):
        assert reader.find_message_id(one, ["payments", "absent"]) == []
        assert reader.find_message_id(one, ["payments", "orders"]) == [(A, 0)]
        assert reader.find_message_id(one, []) == []


def records(*times_ms: int, first: int = 0) -> list[Record]:
    """Return records with these store times, the newest first."""
    message, made = SampleMessage("orders"), []
    for number, time_ms in enumerate(times_ms, first):
        made.append(message.as_record(number, 1000 * number, time_ms))
    return made[::-1]


def test_search_ends_with_an_answer_without_news() -> None:
    search = BrokerSearch("broker-a", 0, 1 << 62)
    search.note(records(5_000, 9_000))
    assert (search.end_ms, search.is_done) == (5_000, False)
    search.note(records(5_000))
    assert search.is_done
    assert (len(search.found), search.hidden) == (2, [])


def test_search_without_an_answer_is_done() -> None:
    search = BrokerSearch("broker-a", 0, 1 << 62)
    search.note([])
    assert (search.is_done, search.found, search.hidden) == (True, {}, [])


def test_search_notes_the_time_that_the_index_hides() -> None:
    search = BrokerSearch("broker-a", 1_000, 1 << 62)
    for _ in range(2):
        assert not search.is_done
        search.note(records(*[5_000] * 64, first=100))
    assert search.hidden == [TimeSpan("broker-a", 4_000, 6_000)]
    assert (search.end_ms, search.is_done) == (4_000, False)
    search.note(records(*[1_500] * 64))
    search.note(records(*[1_500] * 64))
    assert search.hidden[1:] == [TimeSpan("broker-a", 500, 2_500)]
    assert search.is_done, "nothing older is wanted"


def test_search_never_asks_for_newer_messages() -> None:
    search = BrokerSearch("broker-a", 0, 5_000)
    search.note(records(5_700, 5_900))
    assert search.end_ms == 5_000, "the index rounded their times down"


def test_answer_that_is_no_record_is_damage() -> None:
    (one,) = records(5_000)
    data = encode_record(one)
    assert list(split_records(data * 2, "broker-a")) == [one, one]
    with pytest.raises(DamageError, match="broker-a"):
        list(split_records(data + data[:-1], "broker-a"))
