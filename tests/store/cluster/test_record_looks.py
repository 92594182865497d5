"""What a pull of one message says about a queue offset, for every kind of answer."""

from dataclasses import replace

import pytest

from rmq_spark.store.cluster.codes import GetMessageStatus, PullStatus
from rmq_spark.store.cluster.positions import Look, read_look
from rmq_spark.store.cluster.responses import PullResponse
from rmq_spark.store.format.record import MAGIC_V1, Record, encode_record, record_size
from rmq_spark.store.model import QueueKey, RecordProof

QUEUE = QueueKey("orders", 1, "broker-a")


def record(offset: int, *, topic: str = "orders", queue_id: int = 1) -> bytes:
    one = Record(
        0, MAGIC_V1, 0, queue_id, 0, offset, 100 + offset, 0, 5, bytes(8), 1000 + offset, bytes(8), 0, 0, b"x",
        topic.encode(), b"",
    )  # fmt: skip
    return encode_record(replace(one, total_size=record_size(one)))


def found(body: bytes, next_offset: int) -> PullResponse:
    return PullResponse(PullStatus.FOUND, next_offset, 0, 9, body, "FOUND")


def refused(
    status: PullStatus, reason: GetMessageStatus, next_offset: int, low: int = 0, high: int = 9
) -> PullResponse:
    return PullResponse(status, next_offset, low, high, b"", reason)


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        (found(record(4), 5), Look(4, RecordProof(104, 1004))),
        (found(record(4) + record(5), 6), Look(4, RecordProof(104, 1004))),
        (found(record(7), 8), Look(7, RecordProof(107, 1007))),
        (found(record(4, topic="payments"), 5), Look(5, None)),
        (found(record(4, queue_id=0), 5), Look(5, None)),
        (found(record(2), 5), Look(5, None)),
        (found(record(4)[:40], 5), Look(4, None)),
        (refused(PullStatus.NO_NEW_MSG, GetMessageStatus.OFFSET_OVERFLOW_ONE, 4, 0, 4), Look(4, None)),
        (refused(PullStatus.NO_NEW_MSG, GetMessageStatus.OFFSET_FOUND_NULL, 6), Look(6, None)),
        (refused(PullStatus.NO_MATCHED_MSG, GetMessageStatus.MESSAGE_WAS_REMOVING, 8), Look(8, None)),
        (refused(PullStatus.NO_MATCHED_MSG, GetMessageStatus.NO_MATCHED_MESSAGE, 4), Look(4, None)),
        (refused(PullStatus.OFFSET_ILLEGAL, GetMessageStatus.OFFSET_TOO_SMALL, 6, 6), Look(6, None)),
        (refused(PullStatus.OFFSET_ILLEGAL, GetMessageStatus.OFFSET_OVERFLOW_BADLY, 3, 0, 3), Look(4, None)),
    ],
    ids=[
        "found", "found two", "jump", "another topic", "another queue", "an earlier message", "half a record",
        "at the end", "file missing", "removed", "from a slave", "expired", "beyond the end",
    ],
)  # fmt: skip
def test_read_look_believes_only_records_of_the_queue(response: PullResponse, expected: Look) -> None:
    assert read_look(QUEUE, 4, response) == expected
