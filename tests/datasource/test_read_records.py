"""The records in the offsets of a stream, by which a restarted query recognises the stores of brokers."""

from collections.abc import Collection, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from support.broker_place import FIRST_MS, BrokerPlace, fill
from support.dict_backend import PLACES

from rmq_spark.datasource.plan.offsets import StreamOffset
from rmq_spark.datasource.spark.partition import Piece, RmqPartition
from rmq_spark.datasource.spark.read_records import ReadRecords
from rmq_spark.store.model import QueueBounds, QueueKey, RecordProof

A0, A1, B0 = QueueKey("orders", 0, "a"), QueueKey("orders", 1, "a"), QueueKey("orders", 0, "b")
P0 = QueueKey("payments", 0, "a")


@pytest.fixture(autouse=True)
def _place() -> Iterator[None]:
    yield
    PLACES.clear()


class View:
    """A view of queues of nine messages each."""

    def __init__(self, *queues: QueueKey, has_brokers: bool = True) -> None:
        for queue in queues:
            fill(queue.broker, queue.queue_id, 9, queue.topic)
        self.has_brokers = has_brokers
        self.bounds = dict.fromkeys(queues, QueueBounds(0, 9))
        self.backend = BrokerPlace("main").open()
        self.asked: list[tuple[QueueKey, int]] = []
        positions = self.backend.positions

        def count(at: Collection[tuple[QueueKey, int]]) -> Any:
            self.asked += at
            return positions(at)

        self.backend.positions = count  # type: ignore[method-assign]

    def records(self) -> ReadRecords:
        return ReadRecords(self)  # type: ignore[arg-type]


def proof(offset: int) -> RecordProof:
    """Return the proof of the message with this queue offset, in any queue."""
    return RecordProof(offset * 100, FIRST_MS + offset * 1000)


def offset_of(positions: dict[QueueKey, int], **records: int) -> StreamOffset:
    """Return an offset. The records are named by their queues."""
    queues = {"a0": A0, "a1": A1, "b0": B0, "p0": P0}
    return StreamOffset(positions, records={(queues[name], at): proof(at) for name, at in records.items()})


def planned(*ends: tuple[QueueKey, int]) -> list[Any]:
    """Return the partitions of a batch that ends at these positions."""
    return [RmqPartition(BrokerPlace("main"), (Piece(queue, 0, end, proof(0), proof(end - 1)),)) for queue, end in ends]


def test_add_to_looks_up_one_message_of_each_topic_and_broker_without_a_record() -> None:
    view = View(A0, A1, B0, P0)
    records = view.records()
    after = records.add_to(StreamOffset({}), offset_of({A0: 0, A1: 4, B0: 9, P0: 0}))
    assert after.records == {(A1, 3): proof(3), (B0, 8): proof(8)}
    assert view.asked == [(A1, 3), (B0, 8)]
    later = records.add_to(after, offset_of({A0: 5, A1: 5, B0: 9, P0: 0}))
    assert later.records == after.records
    assert len(view.asked) == 2


def test_add_to_takes_the_youngest_record_of_the_batch_before() -> None:
    view = View(A0, A1, B0)
    records = view.records()
    records.note_planned(planned((A0, 3), (A1, 7)))
    records.note_planned(planned((A0, 5)))
    before = offset_of({A0: 5, A1: 7, B0: 9}, a0=8, b0=2)
    after = records.add_to(before, offset_of({A0: 9, A1: 9, B0: 9}))
    assert after.records == {(A1, 6): proof(6), (B0, 2): proof(2)}
    assert not view.asked


def test_add_to_forgets_the_records_of_queues_that_were_dropped_or_went_back() -> None:
    view = View(B0)
    records = view.records()
    records.note_planned(planned((A0, 3)))
    after = records.add_to(offset_of({A0: 3, B0: 9, P0: 4}, b0=8, p0=3), offset_of({B0: 8, P0: 4}))
    assert after.records == {(B0, 7): proof(7), (P0, 3): proof(3)}, "the broker of P0 is away"
    assert records.add_to(after, offset_of({A0: 9, B0: 9, P0: 4})).records == after.records, "nor used later"


def test_add_to_leaves_out_what_cannot_be_looked_up() -> None:
    view = View(A0, B0)
    view.bounds = {A0: QueueBounds(4, 9)}
    assert view.records().add_to(StreamOffset({}), offset_of({A0: 4, B0: 9})).records == {}
    assert not view.asked


def test_begin_remembers_the_record_before_each_position_once() -> None:
    view = View(A0, A1, B0)
    records = view.records()
    records.begin({A0: 3, A1: 0, B0: 10})
    records.begin({A0: 3})
    assert view.asked == [(A0, 2)]
    after = records.add_to(offset_of({A0: 3, A1: 0, B0: 9}, a0=1), offset_of({A0: 4, A1: 0, B0: 10}, b0=1))
    assert after.records[A0, 2] == proof(2)


def test_recall_hands_records_to_the_place_until_the_first_plan() -> None:
    view = View(A0)
    records = view.records()
    assert not records.recall(offset_of({A0: 3}))
    for _ in range(2):
        assert records.recall(offset_of({A0: 3}, a0=2))
    records.begin({A0: 3})
    assert not records.recall(offset_of({A0: 3}, a0=2))
    assert view.backend.noted == [{(A0, 2): proof(2)}] * 2


def test_records_have_no_effect_in_a_place_without_broker_names() -> None:
    records = ReadRecords(SimpleNamespace(has_brokers=False))  # type: ignore[arg-type]
    after = offset_of({A0: 3})
    assert not records.recall(offset_of({A0: 3}, a0=2))
    records.begin({A0: 3})
    records.note_planned(planned((A0, 3)))
    assert records.add_to(offset_of({A0: 1}, a0=0), after) is after
