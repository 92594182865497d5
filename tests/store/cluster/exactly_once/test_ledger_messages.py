"""The messages of the ledger: which records of a pull are rows of a query."""

from dataclasses import replace

import pytest

from rmq_spark.store.cluster.exactly_once.ledger_messages import AppendRequest, is_row_at, read_rows
from rmq_spark.store.cluster.exactly_once.ledger_rows import LedgerRow, PlacedRow, Take, encode_row
from rmq_spark.store.cluster.frame import FrameReader
from rmq_spark.store.errors import StoreError
from rmq_spark.store.format.record import Record, encode_record
from rmq_spark.store.model import CommitKey, QueueKey
from rmq_spark.store.testing.sample_message import SampleMessage

TOPIC, QUERY = "shop%RMQ_SPARK_LEDGER", "q"
FIRST, SECOND = Take(CommitKey(QUERY, 1), "e1", 0), Take(CommitKey(QUERY, 1), "e2", 0)


def record(row: LedgerRow, offset: int, *, topic: str = TOPIC, queue_id: int = 0) -> Record:
    return SampleMessage(topic, queue_id, encode_row(row)).as_record(offset, 1000 * offset, 1_700_000_000_000)


def read(*records: Record, begin: int = 5) -> list[PlacedRow]:
    return read_rows(b"".join(map(encode_record, records)), TOPIC, begin, QUERY, "queue L/0 of broker b")


def test_rows_are_read_with_their_offsets() -> None:
    other = Take(CommitKey("another", 1), "e1", 0)
    assert read(record(FIRST, 5), record(other, 6), record(SECOND, 9)) == [PlacedRow(5, FIRST), PlacedRow(9, SECOND)]
    assert read_rows(memoryview(encode_record(record(FIRST, 5))), TOPIC, 5, QUERY, "q") == [PlacedRow(5, FIRST)]
    assert read() == []


@pytest.mark.parametrize("changes", [{"topic": "orders"}, {"queue_id": 1}])
def test_records_that_a_broker_has_deleted_meanwhile_are_left_out(changes: dict[str, object]) -> None:
    strange = record(FIRST, 6, **changes)  # type: ignore[arg-type]
    assert read(strange, record(SECOND, 7)) == [PlacedRow(7, SECOND)]
    assert not is_row_at(encode_record(strange), TOPIC, 6)


def test_a_record_before_the_offset_of_the_pull_is_left_out() -> None:
    assert read(record(FIRST, 4), record(SECOND, 7)) == [PlacedRow(7, SECOND)]


def test_a_damaged_body_is_an_error() -> None:
    damaged = replace(record(FIRST, 5), body=encode_row(FIRST).replace(b"e1", b"e7"))
    with pytest.raises(
        StoreError, match="the message at ledger offset 5 in queue L/0 of broker b has a body with a wr"
    ):
        read(damaged)


def test_half_a_record_is_an_error() -> None:
    whole = encode_record(record(FIRST, 5))
    with pytest.raises(StoreError, match="that are not a record"):
        read_rows(whole + whole[:20], TOPIC, 5, QUERY, "queue")


def test_a_row_is_at_an_offset_if_the_first_record_has_it() -> None:
    data = encode_record(record(FIRST, 5)) + encode_record(record(SECOND, 6))
    assert is_row_at(data, TOPIC, 5)
    assert not is_row_at(data, TOPIC, 6)
    assert not is_row_at(data, TOPIC, 4)
    assert not is_row_at(b"", TOPIC, 0)


def test_an_append_names_no_topic_to_inherit_from() -> None:
    queue = QueueKey(TOPIC, 0, "broker-a")
    request = AppendRequest.of_row(queue, FIRST, encode_row(FIRST), 1_700_000_000_000)
    (command,) = FrameReader().feed(request.frame(7))
    assert (command.fields["b"], command.fields["c"], command.opaque) == (TOPIC, TOPIC, 7)
    assert bytes(command.body) == encode_row(FIRST)
    assert request.purpose == "append a row to the ledger shop%RMQ_SPARK_LEDGER/broker-a:0"
