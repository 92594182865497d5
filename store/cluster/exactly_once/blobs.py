"""Blobs of the stage topic, and the runs in them.

A blob is pulled by its queue offset, one message a pull. It counts only if the record has the topic, the queue and the
queue offset that were asked for, and the CRC of its body is right: a broker of 4.9 may answer other bytes for a message
that has expired. A run counts only if its bytes have the CRC of its intent.
"""

import zlib
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from rmq_spark.store.cluster.codes import GetMessageStatus, PullStatus
from rmq_spark.store.cluster.exactly_once.staged_batch import StagedRun
from rmq_spark.store.cluster.exactly_once.target_calls import TargetCalls, call_all
from rmq_spark.store.cluster.puller import PullTerms
from rmq_spark.store.cluster.requests import PullRequest
from rmq_spark.store.cluster.responses import PullResponse
from rmq_spark.store.errors import NoPermissionError, NotFoundError, RmqError
from rmq_spark.store.format.consume_queue_entry import Item, decode_items, encode_items
from rmq_spark.store.format.record import Record, decode_record
from rmq_spark.store.model import QueueKey

_RESETS = 3  # pulls that get a reset of their group's offset instead of an answer: each reset is answered once


class BlobKey(NamedTuple):
    """The place of a blob: the queue of the stage topic, without the namespace, and the queue offset in it."""

    stage: QueueKey
    offset: int

    @classmethod
    def of(cls, run: StagedRun) -> "BlobKey":
        """Return the place of the blob that has a run."""
        return cls(run.stage, run.offset)

    def __str__(self) -> str:
        return f"the blob at offset {self.offset} of queue {self.stage}"


@dataclass(frozen=True, slots=True)
class NoBlob:
    """A blob or a run that is gone or damaged. `reason` says what was found, and is a text for errors."""

    reason: str


Blob: TypeAlias = bytes | NoBlob


def blob_request(key: BlobKey, terms: PullTerms) -> PullRequest:
    """Return the request for a blob, which must be below the end of its queue."""
    return PullRequest(terms.stored_queue(key.stage), key.offset, 1, terms.stored_group)


def read_blob(key: BlobKey, terms: PullTerms, outcome: Any) -> Blob | None:
    """Return the body of a blob by the outcome of its request. None: the request must be sent again.

    Raises the RmqError of a broker that did not answer.
    """
    if isinstance(outcome, NotFoundError | NoPermissionError):
        return NoBlob(f"{key} cannot be read: {outcome}")
    if isinstance(outcome, RmqError):
        raise outcome
    answer: PullResponse = outcome
    if answer.reason == GetMessageStatus.OFFSET_RESET:
        return None
    if answer.status is not PullStatus.FOUND:
        found = f"{answer.status.name} {answer.reason}".strip()
        return NoBlob(
            f"{key} is missing: the broker answered {found}, and the queue has the offsets [{answer.min_offset}, "
            f"{answer.max_offset}); expected a blob that has not expired"
        )
    record = decode_record(answer.records)
    queue = terms.stored_queue(key.stage)
    if not isinstance(record, Record):
        return NoBlob(f"{key} is damaged: {record}; expected a complete record")
    if (record.topic, record.queue_id, record.queue_offset) != (queue.topic.encode(), queue.queue_id, key.offset):
        return NoBlob(
            f"{key} is missing: the broker answered the message at offset {record.queue_offset} of "
            f"{record.topic.decode('utf-8', 'replace')}/{record.queue_id}; expected a blob that has not expired"
        )
    if not record.crc_matches:
        return NoBlob(f"{key} is damaged: the CRC of its body is not that of its header")
    return record.body


def read_run(run: StagedRun, blob: Blob) -> memoryview | NoBlob:
    """Return the bytes of a run in its blob."""
    if isinstance(blob, NoBlob):
        return blob
    data = memoryview(blob)[run.begin : run.begin + run.size]
    if len(data) != run.size or zlib.crc32(data) != run.crc32:
        where = f"bytes {run.begin} to {run.begin + run.size} of {BlobKey.of(run)}"
        return NoBlob(f"{where} are not the rows of the batch: their CRC is another; the stage topic was replaced")
    return data


def read_items(run: StagedRun, data: memoryview) -> list[Item]:
    """Return the rows of a run. Their CRC is right, so they are those that the task has encoded."""
    items, fault = decode_items(bytes(data))
    assert fault is None, (run, fault)
    assert len(items) == run.rows, (run, len(items))
    return items


def rest_of(run: StagedRun, data: memoryview, count: int) -> bytes | memoryview:
    """Return the bytes of a run from its item number `count` to its end."""
    return data if not count else encode_items(read_items(run, data)[count:])


class BlobReader:
    """Reads blobs one by one, and keeps the last ones. For one thread."""

    def __init__(self, calls: TargetCalls, terms: PullTerms, kept_bytes: int = 16 << 20) -> None:
        self._calls, self._terms, self._kept_bytes = calls, terms, kept_bytes
        self._blobs: dict[BlobKey, Blob] = {}

    def read(self, run: StagedRun) -> memoryview | NoBlob:
        """Return the bytes of a run. Raises the RmqError of a broker that does not answer, and SessionOverError."""
        key = BlobKey.of(run)
        if key not in self._blobs:
            self._make_room()
            self._blobs[key] = self._fetch(key)
        return read_run(run, self._blobs[key])

    def _fetch(self, key: BlobKey) -> Blob:
        for _ in range(_RESETS):
            (outcome,) = call_all(self._calls, [(key.stage.broker, blob_request(key, self._terms))])
            blob = read_blob(key, self._terms, outcome)
            if blob is not None:
                return blob
        return NoBlob(f"{key} cannot be read: the broker answers resets of group {self._terms.stored_group} only")

    def _make_room(self) -> None:
        size = sum(len(blob) for blob in self._blobs.values() if not isinstance(blob, NoBlob))
        while self._blobs and size > self._kept_bytes:
            first = self._blobs.pop(next(iter(self._blobs)))
            size -= 0 if isinstance(first, NoBlob) else len(first)
