"""The result of a consumer's pull, from the answer of a broker.

The broker may filter, and everything is tested again here. An answer may begin above the offset that was asked for, if
earlier messages have expired; after its first message it must be complete, unless the broker has filtered.

Source: PullAPIWrapper#processPullResult, MQClientAPIImpl#processPullResponse (4.9, 5.3).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rmq_spark.store.backend import COLUMNS
from rmq_spark.store.cluster import codes
from rmq_spark.store.cluster.pull_pipeline import Pulled
from rmq_spark.store.cluster.pulled_records import PulledQueue, decode_pulled
from rmq_spark.store.cluster.requests import PullRequest
from rmq_spark.store.cluster.responses import PullResponse
from rmq_spark.store.errors import BackendUnavailableError
from rmq_spark.store.filter.row_filter import TAG, Expression, RowFilter
from rmq_spark.store.format.java import string_hash
from rmq_spark.store.format.record import Record, decode_record
from rmq_spark.store.format.rows import DecodeLimits
from rmq_spark.store.model import QueueBounds, QueueKey
from rmq_spark.store.pull_result import Accept, GetMessageStatus, PullResult, PullStatus

# The remarks of a master that found no matching message. A slave answers the same code with other remarks.
_SEARCHED = (GetMessageStatus.NO_MATCHED_MESSAGE, GetMessageStatus.MESSAGE_WAS_REMOVING, "")
# What a client must assume of an answer without a status of the broker's store.
_ASSUMED = {
    codes.PullStatus.FOUND: GetMessageStatus.FOUND,
    codes.PullStatus.NO_NEW_MSG: GetMessageStatus.OFFSET_OVERFLOW_ONE,
    codes.PullStatus.NO_MATCHED_MSG: GetMessageStatus.NO_MATCHED_MESSAGE,
    codes.PullStatus.OFFSET_ILLEGAL: GetMessageStatus.OFFSET_OVERFLOW_BADLY,
}


@dataclass(frozen=True, slots=True)
class ConsumerPull:
    """A pull with its filters. The broker tests `expression`, and `wanted` and `accept` are tested here."""

    queue: QueueKey
    offset: int
    request: PullRequest
    expression: Expression | None = None
    wanted: RowFilter | None = None
    accept: Accept | None = None

    @property
    def is_filtered_here(self) -> bool:
        """Whether more is tested here than tags, whose hashes the broker has compared."""
        has_tested_tags = self.expression is not None and self.expression.kind == TAG
        return self.accept is not None or (self.wanted is not None and not has_tested_tags)


def answer_of_master(pull: ConsumerPull, to: str, answer: PullResponse) -> PullResponse:
    """Return the answer of the broker at the address `to`.

    Raises BackendUnavailableError if it is that of a slave, which sends the client to its master.
    """
    is_searched = answer.status is codes.PullStatus.NO_MATCHED_MSG
    if is_searched and (answer.reason not in _SEARCHED or answer.next_offset <= pull.offset):
        raise BackendUnavailableError(
            f"broker {pull.queue.broker} at {to} answered {answer.status.name} {answer.reason} for offset "
            f"{pull.offset} of queue {pull.queue}; expected the answer of a master. Check brokerAddresses."
        )
    return answer


def make_result(
    pull: ConsumerPull, answer: PullResponse, columns: Sequence[str], limits: DecodeLimits, namespace: str = ""
) -> PullResult:
    """Return the result of a pull, with these columns of the messages that are wanted.

    A result without messages has the status FOUND only if tags had equal hashes. Raises DamageError if a record is
    damaged or of another queue, and StoreChangedError if messages are missing between others.
    """
    status, pull_status = _status_of(pull, answer), PullStatus[answer.status.name]
    messages = _no_messages(columns)
    if answer.status is codes.PullStatus.FOUND:
        messages = _messages(pull, answer, columns, limits, namespace)
        if not messages.num_rows and pull.is_filtered_here:
            status, pull_status = GetMessageStatus.NO_MATCHED_MESSAGE, PullStatus.NO_MATCHED_MSG
    return PullResult(status, pull_status, answer.next_offset, answer.min_offset, answer.max_offset, messages)


def expired_result(bounds: QueueBounds, columns: Sequence[str]) -> PullResult:
    """Return the result of a pull from below the first message of a queue with these bounds."""
    status, begin = GetMessageStatus.OFFSET_TOO_SMALL, bounds.min_offset
    return PullResult(status, PullStatus.OFFSET_ILLEGAL, begin, begin, bounds.max_offset, _no_messages(columns))


def _status_of(pull: ConsumerPull, answer: PullResponse) -> GetMessageStatus:
    """Return the status of the broker's store, or what a client must assume if the answer does not tell."""
    if answer.reason in list(GetMessageStatus):
        return GetMessageStatus(answer.reason)
    if answer.max_offset == 0:
        return GetMessageStatus.NO_MESSAGE_IN_QUEUE
    is_below = answer.status is codes.PullStatus.OFFSET_ILLEGAL and pull.offset < answer.min_offset
    return GetMessageStatus.OFFSET_TOO_SMALL if is_below else _ASSUMED[answer.status]


def _messages(
    pull: ConsumerPull, answer: PullResponse, columns: Sequence[str], limits: DecodeLimits, namespace: str
) -> pa.Table:
    """Return the messages of an answer that are wanted."""
    record, begin = decode_record(answer.records), pull.offset
    if isinstance(record, Record) and begin < record.queue_offset < answer.next_offset:
        begin = record.queue_offset
    source = PulledQueue(pull.queue, pull.request.queue.topic, namespace)
    pulled = [Pulled(begin, answer.next_offset, answer.records)]
    read = columns if pull.accept is None else [*dict.fromkeys([*columns, "tags"])]
    batches = decode_pulled(source, pulled, read, limits, pull.wanted, is_filtered=pull.expression is not None)
    found = pa.Table.from_batches([batch.batch for batch in batches]).combine_chunks()
    if pull.accept is None:
        return found
    are_wanted = pull.accept(_tags_codes(found.column("tags")))
    return found.select(list(columns)).filter(pa.array(are_wanted, pa.bool_()))


def _tags_codes(tags: pa.ChunkedArray) -> NDArray[np.int64]:
    """Return the tags code of each message: Java's hash of its tag, or 0 if it has none."""
    encoded = tags.combine_chunks().dictionary_encode()
    hashes = np.array([*(string_hash(tag) for tag in encoded.dictionary.to_pylist()), 0], np.int64)
    codes_of_rows: NDArray[np.int64] = hashes[np.asarray(encoded.indices.fill_null(len(hashes) - 1))]
    return codes_of_rows


def _no_messages(columns: Sequence[str]) -> pa.Table:
    return pa.schema([(name, COLUMNS[name]) for name in columns]).empty_table()
