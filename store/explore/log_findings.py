"""Findings of the log and of files as such: from what a walk met to words."""

from collections.abc import Iterable, Iterator

from rmq_spark.store.disk.kernel_errors import is_unreadable
from rmq_spark.store.errors import DamageError, StoreError
from rmq_spark.store.explore.finding import DAMAGE, Finding
from rmq_spark.store.explore.log_walk import LogFault
from rmq_spark.store.explore.record_check import RecordFault
from rmq_spark.store.explore.seen_log import READ_AROUND
from rmq_spark.store.explore.sound_log import OddFile, SoundLog
from rmq_spark.store.format import filenames
from rmq_spark.store.format.record import Record


def of_record(log: SoundLog, fault: RecordFault) -> Iterator[Finding]:
    """Yield the finding of one record that is whole and yet not right."""
    record, segment = log.record_at(fault.place), log.segments.holding(fault.place)
    if isinstance(record, Record) and segment is not None:
        yield Finding(
            DAMAGE,
            filenames.COMMIT_LOG,
            f"{fault.what} at physical offset {fault.place}",
            segment.path,
            fault.place - segment.begin + fault.position,
            fault.expected,
            fault.found,
            record.topic.decode("utf-8", "replace"),
            record.queue_id,
            record.queue_offset,
            record.queue_offset + 1,
            1,
            f"One message is not what was sent; those around it are whole. {READ_AROUND}",
            fault.action,
        )


def of_faults(log: SoundLog, faults: Iterable[LogFault]) -> Iterator[Finding]:
    """Yield the findings of bytes of the log that are no records."""
    for fault in faults:
        segment, size = log.segments.holding(fault.begin), fault.end - fault.begin
        what = f"{size} bytes of the log, physical offsets [{fault.begin}, {fault.end}), are no records"
        if not size:
            what = "the filler at a segment's end: RocketMQ 5.3 ends the log there when it recovers"
        elif segment is None:
            path, last = log.missing_path(fault.begin), log.missing_path(fault.end - 1)
            names = " to ".join(dict.fromkeys(one.rpartition("/")[2] for one in (path, last)))
            what = f"{names} (missing): {size} bytes of the log, physical offsets [{fault.begin}, {fault.end})"
        yield Finding(
            DAMAGE,
            filenames.COMMIT_LOG,
            what,
            segment.path if segment else log.missing_path(fault.begin),
            fault.begin - segment.begin if segment else 0,
            fault.expected,
            fault.found,
            next_step=READ_AROUND,
            action="cut" if size and fault.expected != "a segment" else "leave",
        )


def of_odd_files(odd_files: Iterable[OddFile]) -> Iterator[Finding]:
    """Yield the findings of files in the log's folders on which no broker starts."""
    for odd in odd_files:
        what = "a file in the folder of the commit log on which no broker starts"
        if odd.found == "a folder":
            what = "a folder that is named as a segment of the log is"
        step = "Move it away if it does not belong there, else restore it from a copy."
        yield Finding(DAMAGE, filenames.COMMIT_LOG, what, odd.path, 0, odd.expected, odd.found, next_step=step)


def of_error(error: StoreError, area: str, path: str = "") -> Finding:
    """Return what an error says as a finding; `path` is for one that names no file of its own."""
    if not isinstance(error, DamageError):
        step = "Give the user who checks the right to read it, and see that it is a file."
        if is_unreadable(error):
            step = ""  # an error of the kernel says itself what to do
        return Finding(DAMAGE, area, str(error), path, next_step=step)
    expected = "" if error.expected is None else str(error.expected)
    found = "" if error.expected is None else str(error.found)
    return Finding(DAMAGE, area, error.what, error.path, error.position, expected, found, next_step=error.next_step)
