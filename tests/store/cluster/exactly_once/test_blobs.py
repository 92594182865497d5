"""Tests of blobs: which answers to a pull are the blob that was asked for."""

from dataclasses import replace

import pytest
from support.staged_runs import STAGE, TERMS, make_item, run_of

from rmq_spark.store.cluster.codes import PullStatus
from rmq_spark.store.cluster.exactly_once.blobs import Blob, BlobKey, NoBlob, blob_request, read_blob, read_run, rest_of
from rmq_spark.store.cluster.puller import PullTerms
from rmq_spark.store.cluster.responses import PullResponse
from rmq_spark.store.errors import BackendUnavailableError
from rmq_spark.store.format.consume_queue_entry import decode_items, encode_items
from rmq_spark.store.format.record import encode_record
from rmq_spark.store.model import QueueKey
from rmq_spark.store.testing.sample_message import SampleMessage

KEY = BlobKey(QueueKey(STAGE, 1, "broker-a"), 7)
RIGHT = SampleMessage(STAGE, 1, body=b"rows of a batch").as_record(7, 4096, 1_700_000_000_000)


def read(record: bytes) -> Blob | None:
    return read_blob(KEY, TERMS, PullResponse(PullStatus.FOUND, 8, 0, 9, record, "FOUND"))


def test_blob_is_the_body_of_the_message_that_was_asked_for() -> None:
    assert read(encode_record(RIGHT)) == b"rows of a batch"


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        (encode_record(replace(RIGHT, queue_offset=8)), "the message at offset 8 of RMQ_SPARK_STAGE/1"),
        (encode_record(replace(RIGHT, queue_id=0)), "the message at offset 7 of RMQ_SPARK_STAGE/0"),
        (encode_record(replace(RIGHT, topic=b"RMQ_SPARK_STAGF")), "the message at offset 7 of RMQ_SPARK_STAGF/1"),
        (encode_record(replace(RIGHT, body=b"rows of a botch")), "is damaged: the CRC of its body"),
        (encode_record(RIGHT)[:-1], "is damaged: "),
    ],
    ids=["offset", "queue", "topic", "body", "end"],
)
def test_other_bytes_are_no_blob(record: bytes, reason: str) -> None:
    found = read(record)
    assert isinstance(found, NoBlob)
    assert found.reason.startswith("the blob at offset 7 of queue RMQ_SPARK_STAGE/broker-a:1 is ")
    assert reason in found.reason


def test_broker_that_does_not_answer_raises_its_error() -> None:
    with pytest.raises(BackendUnavailableError, match="away"):
        read_blob(KEY, TERMS, BackendUnavailableError("away"))


def test_request_has_the_names_of_the_cluster() -> None:
    request = blob_request(KEY, PullTerms("group", "ns"))
    assert (request.queue, request.offset) == (QueueKey(f"ns%{STAGE}", 1, "broker-a"), 7)
    assert (request.max_messages, request.group) == (1, "ns%group")


def test_rest_of_a_run_begins_at_an_item() -> None:
    items = [make_item(number, b"row %d" % number) for number in range(4)]
    run = run_of(QueueKey("orders", 0, "broker-a"), items, KEY.stage, KEY.offset, 3)
    data = read_run(run, b"abc" + encode_items(items) + b"def")
    assert isinstance(data, memoryview)
    for count in range(4):
        assert decode_items(bytes(rest_of(run, data, count))) == (items[count:], None)
    assert isinstance(read_run(run, encode_items(items) + b"def"), NoBlob)
