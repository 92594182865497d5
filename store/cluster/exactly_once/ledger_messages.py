"""The messages of the ledger: the request that appends a row, its errors, and the rows in the records of a pull."""

import re
from dataclasses import dataclass
from typing import Self

from rmq_spark.store.cluster.codes import ResponseCode
from rmq_spark.store.cluster.exactly_once.ledger_rows import Done, Intent, LedgerRow, PlacedRow, decode_row, tag_of
from rmq_spark.store.cluster.send_requests import SendRequest
from rmq_spark.store.errors import BackendUnavailableError, BrokerError, RmqError, StoreError, UnknownOutcomeError
from rmq_spark.store.format.properties import KEYS, TAGS
from rmq_spark.store.format.record import Record, decode_record
from rmq_spark.store.format.side_file import safe_name
from rmq_spark.store.model import QueueKey

_PLAIN_KEY = re.compile(r"[!-~]{1,255}")  # without blanks, which separate keys


@dataclass(frozen=True, slots=True)
class AppendRequest(SendRequest):
    """One row for the ledger (SEND_MESSAGE_V2)."""

    @classmethod
    def of_row(cls, queue: QueueKey, row: LedgerRow, encoded: bytes, born_ms: int) -> Self:
        """Return the request for a row whose body is `encoded`. `queue` has the cluster's name of the topic."""
        query_id = row.key.query_id
        key = query_id if _PLAIN_KEY.fullmatch(query_id) else safe_name(query_id)  # to find rows by key
        return cls(queue, encoded, f"{KEYS}\x01{key}\x02{TAGS}\x01{tag_of(query_id)}\x02", born_ms)

    @property
    def purpose(self) -> str:
        return f"append a row to the ledger {self.queue}"


def read_rows(
    records: bytes | memoryview, stored_topic: str, begin: int, query_id: str | None, place: str
) -> list[PlacedRow]:
    """Return the rows of a query, or of all, in the records of a pull at the ledger offset `begin`, in their order.

    A broker compares hashes of tags, so rows of other queries may be among them. It may return records that it has
    deleted meanwhile, which are others by now; they are left out. `place` names the queue in errors. Raises StoreError
    if a record is damaged, or if a row cannot be read.
    """
    rows: list[PlacedRow] = []
    at = 0
    while at < len(records):
        record = decode_record(records[at:])
        if not isinstance(record, Record):
            raise StoreError(
                f"the ledger cannot be read: {place} answered {len(records) - at} bytes that are not a record, after "
                f"{at} bytes of the pull at ledger offset {begin}; expected whole records. Repair the broker's store."
            )
        at += record.total_size
        if not _is_of_ledger(record, stored_topic) or record.queue_offset < begin:
            continue
        where = f"the message at ledger offset {record.queue_offset} in {place}"
        if not record.crc_matches:
            raise StoreError(
                f"the ledger is damaged: {where} has a body with a wrong CRC; expected {record.body_crc:#010x}. Repair "
                "the broker's store."
            )
        row = decode_row(record.body, query_id, where)
        if row is not None:
            rows.append(PlacedRow(record.queue_offset, row))
    return rows


def is_row_at(records: bytes | memoryview, stored_topic: str, offset: int) -> bool:
    """Return whether the first record is the message of the ledger at an offset."""
    record = decode_record(records)
    return isinstance(record, Record) and _is_of_ledger(record, stored_topic) and record.queue_offset == offset


def _is_of_ledger(record: Record, stored_topic: str) -> bool:
    return record.topic == stored_topic.encode() and record.queue_id == 0


def half_stored(row: LedgerRow, status: ResponseCode, waited_ms: int) -> BrokerError:
    """Return the error for a row that a broker has stored, and answered 10, 11 or 12 for `waited_ms`."""
    return BrokerError(
        status,
        f"a row of {row.key} is not safe in the ledger: for {waited_ms} ms its broker answered {status:d} "
        f"{status.name} ({_LATE[status]}); expected {ResponseCode.SUCCESS:d} SUCCESS. {_what_is_stored(row)} The row "
        "may count nevertheless, and the next commit of the query will find out. Start the slave of the broker, or set "
        "brokerRole=ASYNC_MASTER if it has none; if its disk is late, check the load, or raise syncFlushTimeout.",
    )


def _what_is_stored(row: LedgerRow) -> str:
    """Return what a row of the ledger is for, and which rows of its batch are in their queues."""
    if isinstance(row, Intent):
        return "The row begins the batch: none of its rows is in its queue yet."
    if isinstance(row, Done):
        written = row.rows if row.written is None else row.written
        return f"The row ends the batch: {written} of its rows are in their queues."
    return (
        "The row takes the batch over: an earlier session has begun it, and may have stored a part of its rows, which "
        "`rmq intents --count-rows` counts."
    )


_LATE = {
    ResponseCode.FLUSH_DISK_TIMEOUT: "stored, but its copy on the disk is late",
    ResponseCode.SLAVE_NOT_AVAILABLE: "stored, but there is no slave to copy it to, as for a SYNC_MASTER without one",
    ResponseCode.FLUSH_SLAVE_TIMEOUT: "stored, but the copy at its slave is late",
}


def not_stored(row: LedgerRow, last: RmqError | None, *, may_be_stored: bool) -> RmqError:
    """Return the error for a row to which no broker has answered 0."""
    if may_be_stored:
        return UnknownOutcomeError(
            f"a row of {row.key} may be in the ledger or not, and it may appear later: {last} The next commit of the "
            "query will find out."
        )
    return BackendUnavailableError(f"a row of {row.key} cannot be stored in the ledger: {last}")
