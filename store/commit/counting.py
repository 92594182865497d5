"""How many rows of an intent stand in the log: as somebody counted before, or by comparing records with staged ones."""

import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from rmq_spark.store.commit.intents import Count, Hint, Intent
from rmq_spark.store.commit.staged_file import StagedFile
from rmq_spark.store.commit.staging import read_chunks
from rmq_spark.store.disk import files
from rmq_spark.store.errors import DamageError
from rmq_spark.store.format.filenames import COMMIT_LOG
from rmq_spark.store.format.record import Record, decode_record
from rmq_spark.store.log.section import Section

_COMPARED_BYTES = 4 << 20  # of staged records, read at a time to be compared one by one
_PROGRESS_RECORDS = 5_000  # compared between two signs of life


def mark_of(record: Record) -> int:
    """Return by what a record is known again: another one in its place was stored at another time."""
    head = record.physical_offset, record.queue_offset, record.store_timestamp, record.body_crc, record.queue_id
    return zlib.crc32(record.properties, zlib.crc32(record.topic, zlib.crc32(repr(head).encode())))


@dataclass(frozen=True, slots=True)
class Tally:
    """A count that the log bears out, with its record: up to `seen` exactly the first `rows` rows are in the log."""

    rows: int = 0
    seen: Record | None = None
    is_whole: bool = False  # as in Count


def known_count(section: Section, count: Count | None) -> Tally | None:
    """Return a count if its record still stands in the log, and so all before it; else None."""
    if count is None:
        return None
    if count.physical_offset < 0:
        return Tally(count.rows, is_whole=True) if count.is_whole else None
    found = section.record_from(count.physical_offset)
    stands = found is not None and found.physical_offset == count.physical_offset and mark_of(found) == count.mark
    return Tally(count.rows, found, count.is_whole) if stands else None


def count_appended(
    section: Section,
    root: str,
    intent: Intent,
    hints: Sequence[Hint],
    known: Tally | None = None,
    keep: Callable[[Count], None] = lambda _: None,
) -> int:
    """Return how many of an intent's rows stand in the log, counted from the first: they are appended in order.

    Goes on behind a count that is known; else starts at the last hint that the log bears out, else where the log ended
    when the intent was made, and compares the log's records with the staged ones. Others' records may stand between.
    What it found is handed to `keep`, also what it found before an error. Raises DamageError for a log that cannot be
    read up to its end or has lost a row, and what `read_chunks` raises.

    An intent with a note delivers messages that wait in the store. A broker that had the store since may have delivered
    the same ones, in another order: that is no damage, and those that are not met in order come twice.
    """
    begin = known or _from_hints(section, root, intent, hints) or Tally()
    rows, row, seen = begin.rows, begin.seen, begin.seen  # `row`: the last one that was met; `seen`: the last record
    place = _behind(seen) if seen is not None else _first_record(section, intent.start)
    staged = _staged_records(root, intent.files, rows)
    wanted, following = next(staged, None), next(staged, None)
    records = enumerate(section.records_from(place))
    try:
        while wanted is not None and (found := next(records, None)) is not None:
            number, record = found
            if number % _PROGRESS_RECORDS == 0:
                section.note_progress()
            if _is_same(record, wanted):
                rows, row, seen = rows + 1, record, record
                wanted, following = following, next(staged, None)
            elif following is not None and not intent.note and _is_same(record, following):
                # Who mends the log may find the row anywhere between these two.
                seen = row
                raise _lost_row(root, intent, rows, row, record)
            else:
                seen = record
    except BaseException:
        if seen is not None and seen is not begin.seen:
            keep(Count(rows, seen.physical_offset, mark_of(seen)))
        raise
    # The last row is enough to know the count again. Rows that are not there cannot come without a count forgotten.
    keep(Count(rows, row.physical_offset, mark_of(row), True) if row is not None else Count(rows, is_whole=True))
    return rows


def _from_hints(section: Section, root: str, intent: Intent, hints: Sequence[Hint]) -> Tally | None:
    """Return the last hint that the log bears out, with the last row's record."""
    for hint in reversed(hints):
        if not 0 < hint.rows <= intent.rows or hint.physical_offset >= section.end:
            continue
        found = section.record_from(hint.physical_offset)
        if found is not None and _is_same(found, next(_staged_records(root, intent.files, hint.rows - 1))):
            return Tally(hint.rows, found)
    return None


def _behind(record: Record) -> int:
    return record.physical_offset + record.total_size


def _lost_row(root: str, intent: Intent, row: int, before: Record | None, found: Record) -> DamageError:
    """Return the error for a row that stands in the log without the one before it.

    Rows are appended in their order. What no CRC covers may be damaged: the row would come twice.
    """
    return DamageError(
        f"row {row + 1} of {intent.rows} of {intent.key}, and row {row} nowhere before it, counted from 0",
        files.join(root, COMMIT_LOG),
        found.physical_offset,
        f"row {row} between physical offset {_behind(before) if before is not None else intent.start} and this one",
        "none that is equal to the staged one",
    )


def _first_record(section: Section, physical_offset: int) -> int:
    """Return where to look from: a physical offset, or its segment's begin if no record starts there any more.

    After a power cut a broker may have taken back the log's end and written other messages in its place.
    """
    if physical_offset >= section.end or section.record_from(physical_offset) is not None:
        return physical_offset
    return physical_offset - physical_offset % section.segment_bytes


def _is_same(one: Record, other: Record) -> bool:
    """Say whether two records are the same message: the UNIQ_KEY is among the properties."""
    return (
        one.properties == other.properties
        and (one.topic, one.queue_id) == (other.topic, other.queue_id)
        and one.reconsume_times == other.reconsume_times
        and one.body == other.body
    )


def _staged_records(root: str, staged: Sequence[StagedFile], first_row: int) -> Iterator[Record]:
    """Yield the staged records from a row on, decoded one by one."""
    for records in read_chunks(root, staged, first_row, _COMPARED_BYTES):
        view, begin = records.data.data, 0
        for end in np.cumsum(records.sizes).tolist():
            record = decode_record(view[begin:end])
            assert isinstance(record, Record), record  # its checksum was right
            yield record
            begin = end
