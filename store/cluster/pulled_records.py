"""The messages of pulled bodies, as record batches.

A body has records of the commit log, one directly after the other. Their begins are known only from the sizes of those
before. So all bodies are walked at once: one numpy step finds the next record in each. Large bodies are divided at
places that look like the begin of a record; a place is accepted only if the walk before it ends exactly there. Then the
engine's own columns are decoded from all records together, as from the log of a store directory.

Everything that a store directory proves by its consume queue is proved here by the answers: each record has the topic
and the queue that were asked for, queue offsets are dense (with a filter: they ascend within what was searched), and
physical offsets ascend.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from rmq_spark.store.backend import BROKER_NAME, COLUMNS, ReadBatch
from rmq_spark.store.cluster.pull_pipeline import Pulled
from rmq_spark.store.errors import DamageError, StoreChangedError
from rmq_spark.store.filter.row_filter import RowFilter
from rmq_spark.store.format.byte_ranges import Bytes, Positions
from rmq_spark.store.format.columns import decode
from rmq_spark.store.format.properties import INNER_NUM
from rmq_spark.store.format.record import HOST_BITS, INNER_BATCH, MAGIC_V1, MAGIC_V2, MIN_RECORD_BYTES, RECORD_HEAD
from rmq_spark.store.format.record_batch import NotWholeError, WholeRecords, field_shift, numbers_at, unaligned
from rmq_spark.store.format.record_headers import RecordFault, RecordRun, gather
from rmq_spark.store.format.rows import DecodeLimits
from rmq_spark.store.model import QueueKey
from rmq_spark.store.names import DLQ_TOPIC_PREFIX, RETRY_TOPIC_PREFIX

BATCH_ROWS = 8192  # between two batches the reader sends pulls and receives answers
_LANE_BYTES = 16 << 10  # a body is divided into parts of about this size,
_NO_END = 1 << 62  # `decode` returns it unless decompressed bodies filled the result
_LANE_RECORDS = 32  # or of this many records if they are large
_FIELDS: Any = RECORD_HEAD.fields
_BODY_SIZE: np.dtype[Any] = _FIELDS["body_size"][0]  # the last field of a header
_TOPIC_COLUMNS = ("topic", "physicalTopic")
_DERIVED = f"{RETRY_TOPIC_PREFIX}|{DLQ_TOPIC_PREFIX}"
_NEXT_STEP = "Read around the message with startingOffsets and endingOffsets, or repair the broker's store."


@dataclass(frozen=True, slots=True)
class PulledQueue:
    """A queue, and how its records name it.

    `stored_topic` is the topic in the records. It differs from the topic of `queue` if the cluster is read with a
    `namespace`, which the columns do not show.
    """

    queue: QueueKey
    stored_topic: str
    namespace: str = ""

    def damage(self, run: RecordRun, fault: RecordFault) -> DamageError:
        """Return the error for a damaged record of a run of this queue."""
        at, offset = int(run.physical_offsets[fault.row]), int(run.queue_offsets[fault.row])
        what = f"{fault.what}, message {offset} of queue {self.queue} at physical offset {at}"
        path = f"commit log of broker {self.queue.broker}"
        return DamageError(what, path, at, fault.expected, fault.found, _NEXT_STEP)


class NotARecordError(ValueError):
    """No complete record begins at `position` (bytes) of the data."""

    def __init__(self, position: int) -> None:
        super().__init__(position)
        self.position = position


def find_records(data: bytes, begins: Positions, ends: Positions) -> Positions:
    """Return the positions of all records in the stretches [begins, ends) of `data`, in ascending order.

    The stretches must not be empty, and must ascend without overlaps. Each must consist of complete records, by their
    sizes and magics. Raises NotARecordError for the first position where no record begins, or one that does not end
    inside of its stretch.
    """
    buffer = np.frombuffer(data, np.uint8)
    lanes = _divide(data, begins, ends)
    if len(lanes[0]) > len(begins):
        found, fault = _walk(buffer, *lanes)
        if fault is None:
            return found
        # A body may contain bytes that look like a record. Without divisions only true begins are found.
    found, fault = _walk(buffer, begins, ends)
    if fault is not None:
        raise NotARecordError(fault)
    return found


def _divide(data: bytes, begins: Positions, ends: Positions) -> tuple[Positions, Positions]:
    """Return the begins and ends of the parts into which large stretches are divided, all of them in order."""
    large = np.flatnonzero(ends - begins >= 2 * _LANE_BYTES)
    if not len(large):
        return begins, ends
    cuts: list[int] = []
    for stretch in large.tolist():
        begin, end = int(begins[stretch]), int(ends[stretch])
        magic = data[begin + 4 : begin + 8]
        lane_bytes = max(_LANE_BYTES, int.from_bytes(data[begin : begin + 4], "big") * _LANE_RECORDS)
        at = begin + lane_bytes
        while at + lane_bytes < end and (found := data.find(magic, at + 4, end)) >= 0:
            cuts.append(found - 4)
            at = found - 4 + lane_bytes
    if not cuts:
        return begins, ends
    starts = np.concatenate([begins, np.array(cuts, np.int64)])
    stops = np.concatenate([ends, starts[len(begins) :]])
    # All stretches together are divided by all begins and cuts: the n-th part ends at the n-th end or cut.
    return np.sort(starts), np.sort(stops)


def _walk(buffer: Bytes, at: Positions, stops: Positions) -> tuple[Positions, int | None]:
    """Return the positions of the records in all stretches [at, stops), and the first position without a record."""
    words = unaligned(buffer, np.dtype(">u8"))  # a record begins with its size and its magic
    steps: list[Positions] = []
    faults: list[int] = []
    while len(at):
        has_room = stops - at >= MIN_RECORD_BYTES
        if not has_room.all():
            faults.append(int(at[~has_room].min()))
            at, stops = at[has_room], stops[has_room]
        word = words[at]
        sizes = (word >> 32).astype(np.int64)
        magics = word & 0xFFFFFFFF
        following = at + sizes
        is_record = ((magics == MAGIC_V1) | (magics == MAGIC_V2)) & (sizes >= MIN_RECORD_BYTES) & (following <= stops)
        if not is_record.all():
            faults.append(int(at[~is_record].min()))
            at, stops, following = at[is_record], stops[is_record], following[is_record]
        steps.append(at)
        goes_on = following < stops
        at, stops = (following, stops) if goes_on.all() else (following[goes_on], stops[goes_on])
    found = np.concatenate(steps) if steps else np.zeros(0, np.int64)
    found.sort(kind="stable")  # merges the steps, each of which ascends
    return found, min(faults, default=None)


def decode_pulled(
    source: PulledQueue,
    pulled: Sequence[Pulled],
    columns: Sequence[str],
    limits: DecodeLimits,
    wanted: RowFilter | None = None,
    *,
    is_filtered: bool = False,
) -> Iterator[ReadBatch]:
    """Yield the messages of adjacent results of one queue in order, as batches of at most BATCH_ROWS records.

    `columns` are names in COLUMNS of the contract. If `wanted` is given, only messages that match it. `is_filtered`
    says that the broker has filtered the messages, so that some may be missing between those that came.

    Raises DamageError if a record is damaged, or is not of the queue or not at its offset, and StoreChangedError if
    messages are missing between others. All rows that were yielded before are correct.
    """
    begin, end = pulled[0].offset, pulled[-1].next_offset
    found = [part for part in pulled if len(part.body)]
    if not found:
        yield ReadBatch(_empty(columns), end)
        return
    data = b"".join([part.body for part in found])
    sizes = np.array([len(part.body) for part in found], np.int64)
    ends = np.cumsum(sizes)
    begins = ends - sizes
    try:
        positions = find_records(data, begins, ends)
    except NotARecordError as fault:
        number = int(np.searchsorted(begins, fault.position, "right")) - 1
        at = fault.position - int(begins[number])
        head = data[fault.position : fault.position + 8].hex(" ")
        path = f"the answer of broker {source.queue.broker} for queue offset {found[number].offset} of {source.queue}"
        left = f"{sizes[number] - at} bytes that begin with {head}"
        raise DamageError("records", path, at, "a complete record", left, _NEXT_STEP) from fault
    run = _run_of(source, data, positions)
    if is_filtered:
        numbers = np.searchsorted(begins, positions, "right") - 1
        run = _searched(source, run, numbers, found)
        if not len(run):
            yield ReadBatch(_empty(columns), end)
            return
    else:
        _check_density(source, run, begin, end)
    _check_places(source, run)
    for at in range(0, len(run), BATCH_ROWS):
        part = run.take(slice(at, at + BATCH_ROWS))
        until = int(run.queue_offsets[at + BATCH_ROWS]) if at + BATCH_ROWS < len(run) else end
        yield from _decode_run(source, part, columns, begin, until, limits, wanted, expects_all=is_filtered)


def decode_small_ranges(
    sources: Sequence[PulledQueue],
    pulled: Sequence[Sequence[Pulled]],
    columns: Sequence[str],
    limits: DecodeLimits,
    wanted: RowFilter | None = None,
    *,
    is_filtered: bool = False,
) -> pa.RecordBatch | None:
    """Return the messages of ranges of one topic of one broker, one range after another, as one batch.

    `pulled` has the adjacent results of each range, whose queue is in `sources`. The other arguments are those of
    `decode_pulled`, which finds the same messages.

    Returns None if anything is not as usual, or if decompressed bodies need several batches. Then decode the ranges
    one by one, which may raise the error that says what was found.
    """
    found = [(source, one) for source, parts in zip(sources, pulled, strict=True) for one in parts if len(one.body)]
    if not found:
        return _empty(columns)
    data = b"".join([one.body for _, one in found])
    ends = np.cumsum([len(one.body) for _, one in found])
    begins = np.append(0, ends[:-1])
    try:
        positions = find_records(data, begins, ends)
        numbers = np.searchsorted(begins, positions, "right") - 1  # of the answers
        queue_ids = np.array([source.queue.queue_id for source, _ in found], np.int64)[numbers]
        run = _run_of(sources[0], data, positions, queue_ids)
        chosen = _usual_records(run, numbers, [one for _, one in found], is_filtered=is_filtered)
        if chosen is None or not len(chosen):
            return None if chosen is None else _empty(columns)
        stored = [name for name in columns if name != BROKER_NAME]
        batch, next_offset = decode(run.take(chosen), stored, 0, _NO_END, limits, wanted, expects_all=is_filtered)
    except (NotARecordError, RecordFault, DamageError):
        return None
    return _with_names(sources[0], batch, columns) if next_offset == _NO_END else None


def _usual_records(
    run: RecordRun, numbers: Positions, found: Sequence[Pulled], *, is_filtered: bool
) -> NDArray[np.intp] | None:
    """Return the indices of the records that the answers `found` are about. Return None if anything is not as usual.

    `numbers` has the index in `found` of each record's answer.
    """
    offsets, places = run.queue_offsets, run.physical_offsets
    is_next = np.diff(run.queue_id) == 0  # of the same queue as the record before
    if run.message_counts is not None or places.min() < 0 or (is_next & (np.diff(places) <= 0)).any():
        return None
    begins, ends = (np.array([part[field] for part in found], np.int64)[numbers] for field in (0, 1))
    is_first = np.diff(numbers, prepend=-1) > 0
    expected = np.where(is_first, begins, np.append(0, offsets[:-1] + 1))
    if is_filtered:
        return np.flatnonzero(offsets < ends) if (offsets >= expected).all() else None
    is_last = np.append(is_first[1:], [True])
    is_complete = (offsets == expected).all() and (offsets[is_last] + 1 == ends[is_last]).all()
    return np.arange(len(run)) if is_complete and is_first.sum() == len(found) else None


def _decode_run(
    source: PulledQueue,
    run: RecordRun,
    columns: Sequence[str],
    begin: int,
    end: int,
    limits: DecodeLimits,
    wanted: RowFilter | None,
    *,
    expects_all: bool,
) -> Iterator[ReadBatch]:
    """Yield the messages of a checked run. These are several batches if decompressed bodies need much memory."""
    stored = [name for name in columns if name != BROKER_NAME]
    next_offset = begin
    while next_offset < end:
        try:
            batch, next_offset = decode(run, stored, begin, end, limits, wanted, expects_all=expects_all)
        except RecordFault as fault:
            raise source.damage(run, fault) from fault
        yield ReadBatch(_with_names(source, batch, columns), next_offset)
        if next_offset < end:
            run = run.take(slice(int(np.searchsorted(run.queue_offsets, next_offset)), None))


def _run_of(
    source: PulledQueue, data: bytes, positions: Positions, queue_ids: NDArray[np.int64] | None = None
) -> RecordRun:
    """Return the records as a run, after their topics were checked. Decoding checks the queue ids and the sizes.

    Without `queue_ids` all are of the queue of `source`.
    """
    buffer, ends = np.frombuffer(data, np.uint8), np.append(positions[1:], len(data))
    heads = gather(buffer, positions, RECORD_HEAD)
    run = RecordRun(
        buffer,
        positions,
        ends - positions,
        heads["physical_offset"].astype(np.int64),
        heads["queue_offset"].astype(np.int64),
        source.stored_topic,
        source.queue.queue_id if queue_ids is None else queue_ids,
    )
    _check_topics(source, run, heads)
    batches = np.flatnonzero(heads["sys_flag"] & INNER_BATCH)
    return replace(run, message_counts=_message_counts(source, run, batches)) if len(batches) else run


def _check_places(source: PulledQueue, run: RecordRun) -> None:
    """Check that the physical offsets ascend, as those of one queue do."""
    found = run.physical_offsets
    if (found[1:] > found[:-1]).all() and found[0] >= 0:
        return
    row = int(np.argmin(np.diff(found, prepend=-1) > 0))
    expected = f"more than {found[row - 1]}" if row else "at least 0"
    fault = RecordFault(row, "the record's physical offset", expected, int(found[row]))
    raise source.damage(run, fault)


def _check_density(source: PulledQueue, run: RecordRun, begin: int, end: int) -> None:
    """Check that the records are the messages with queue offsets [begin, end)."""
    offsets, counts = run.queue_offsets, run.message_counts
    following = offsets + (1 if counts is None else counts)
    expected = np.append(begin, following[:-1])
    is_right = offsets == expected
    if counts is not None:
        is_right[0] |= offsets[0] < begin < following[0]  # an answer may begin inside of an inner batch
    if is_right.all() and (following[-1] == end or (counts is not None and following[-1] > end)):
        return
    row = int(np.argmin(is_right))
    if is_right[row]:
        row, lost = len(run) - 1, (int(following[-1]), end)
    else:
        lost = int(expected[row]), int(offsets[row])
    if not lost[0] < lost[1] <= end:
        raise source.damage(run, RecordFault(row, "the record's queue offset", f"{expected[row]}", int(offsets[row])))
    raise StoreChangedError(
        f"cannot read queue {source.queue}: the queue offsets [{lost[0]}, {lost[1]}) are missing in the broker's "
        f"answers for [{begin}, {end}); expected all messages. A file of the broker's log is missing, or was deleted "
        "during the read. Plan the read again."
    )


def _searched(source: PulledQueue, run: RecordRun, numbers: Positions, found: Sequence[Pulled]) -> RecordRun:
    """Return the records of filtered answers that are below the next offset of their answer.

    `numbers` has the index in `found` of each record's answer. Checks that the queue offsets of each answer ascend.
    """
    offsets = run.queue_offsets
    begins, ends = (np.array([part[field] for part in found], np.int64) for field in (0, 1))
    is_first = np.diff(numbers, prepend=-1) > 0
    least = np.where(is_first, begins[numbers], np.append(0, offsets[:-1] + 1))
    if (offsets < least).any():
        row = int(np.argmax(offsets < least))
        fault = RecordFault(row, "the record's queue offset", f"at least {least[row]}", int(offsets[row]))
        raise source.damage(run, fault)
    return run.take(np.flatnonzero(offsets < ends[numbers]))


def _message_counts(source: PulledQueue, run: RecordRun, batches: NDArray[np.intp]) -> NDArray[np.int64]:
    """Return how many messages each record has. The records `batches` are inner batches, with a property INNER_NUM."""
    counts = np.ones(len(run), np.int64)
    begins = run.positions[batches]
    try:
        texts = WholeRecords.of(run.buffer, begins, begins + run.sizes[batches]).pairs().column(INNER_NUM).to_pylist()
    except NotWholeError as error:
        fault = RecordFault(int(batches[error.row]), "inner batch", "a complete record", "parts that do not fit")
        raise source.damage(run, fault) from error
    for row, text in zip(batches.tolist(), texts, strict=True):
        if text is None or not (text.isascii() and text.isdigit() and 0 < int(text) < 1 << 31):
            raise source.damage(run, RecordFault(row, "the property INNER_NUM", "a number of messages", text))
        counts[row] = int(text)
    return counts


def _check_topics(source: PulledQueue, run: RecordRun, heads: NDArray[np.void]) -> None:
    """Compare the topic of each record with the one that was asked for. `heads` are read as if all hosts were IPv4."""
    sys_flags = heads["sys_flag"]
    tails = run.positions + RECORD_HEAD.itemsize + heads["body_size"]
    if (sys_flags & HOST_BITS).any():
        shift = field_shift("body_size", sys_flags)
        shift = np.where(RECORD_HEAD.itemsize + shift < run.sizes, shift, 0)  # else decoding raises
        tails = run.positions + RECORD_HEAD.itemsize + shift
        tails += numbers_at(run.buffer, tails - _BODY_SIZE.itemsize, _BODY_SIZE)
    is_long = heads["magic"] == MAGIC_V2
    topic = source.stored_topic.encode()
    for length_bytes, chosen in [(1, ~is_long), (2, is_long)] if is_long.any() else [(1, None)]:
        rows = slice(None) if chosen is None else np.flatnonzero(chosen)
        if chosen is not None and not chosen.any():
            continue
        is_right = _have_text(run.take(rows), tails[rows], len(topic).to_bytes(length_bytes, "big") + topic)
        if not is_right.all():
            number = int(np.argmin(is_right))
            row = number if chosen is None else int(np.flatnonzero(chosen)[number])
            begin = max(int(tails[row]), 0) + length_bytes
            shown = run.buffer[begin : begin + len(topic)].tobytes().decode("utf-8", "replace")
            raise source.damage(run, RecordFault(row, "the record's topic", source.stored_topic, shown))


def _have_text(run: RecordRun, begins: Positions, text: bytes) -> NDArray[np.bool_]:
    """Return for each record whether it has `text` at the position in `begins`. Compares words of eight bytes.

    The first word may begin before the text, but never before the record.
    """
    ends = begins + len(text)
    is_right = (begins >= run.positions + RECORD_HEAD.itemsize) & (ends <= run.positions + run.sizes)
    if not is_right.all():
        ends = np.where(is_right, ends, run.positions + MIN_RECORD_BYTES)
        if len(text) + 8 > MIN_RECORD_BYTES:
            return is_right  # words of the substitutes might be outside of the buffer
    words = unaligned(run.buffer, np.dtype("<u8"))
    for end in range(len(text), 0, -8):
        part = text[max(end - 8, 0) : end]
        mask = int.from_bytes(bytes(8 - len(part)) + b"\xff" * len(part), "little")
        expected = int.from_bytes(part.rjust(8, b"\0"), "little")
        found = words[ends - (len(text) - end + 8)]
        is_right &= (found & np.uint64(mask)) == np.uint64(expected)
    return is_right


def _with_names(source: PulledQueue, batch: pa.RecordBatch, columns: Sequence[str]) -> pa.RecordBatch:
    """Return the batch with the column brokerName, if it is one of `columns`, and without the namespace in topics."""
    if BROKER_NAME not in columns and not source.namespace:
        return batch
    arrays = []
    for name in columns:
        if name == BROKER_NAME:
            arrays.append(pa.repeat(pa.scalar(source.queue.broker, pa.string()), batch.num_rows))
        elif source.namespace and name in _TOPIC_COLUMNS:
            arrays.append(_without_namespace(batch.column(name), source.namespace))
        else:
            arrays.append(batch.column(name))
    return pa.RecordBatch.from_arrays(arrays, schema=_schema(columns))


def _without_namespace(topics: pa.StringArray, namespace: str) -> pa.StringArray:
    """Return the topics without this namespace (NamespaceUtil#withoutNamespace)."""
    return pc.replace_substring_regex(topics, f"^({_DERIVED})?{re.escape(namespace)}%", r"\1")


def _schema(columns: Sequence[str]) -> pa.Schema:
    return pa.schema([(name, COLUMNS[name]) for name in columns])


def _empty(columns: Sequence[str]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist([], schema=_schema(columns))
