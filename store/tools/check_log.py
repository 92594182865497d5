"""Findings about the commit log: records with wrong fields, bytes that are not records, and files out of place."""

from collections.abc import Iterable, Iterator

from rmq_spark.store.format.record import Record
from rmq_spark.store.tools.check_context import READ_AROUND
from rmq_spark.store.tools.check_records import RecordFault
from rmq_spark.store.tools.finding import Action, Area, Finding, Severity
from rmq_spark.store.tools.log_walk import LogFault, OddFile, TolerantCommitLog


def record_finding(log: TolerantCommitLog, fault: RecordFault) -> Iterator[Finding]:
    """Yield the finding about a complete record that has a wrong field.

    Yields nothing if the record's segment was deleted meanwhile.
    """
    record, segment = log.record_at(fault.physical_offset), log.segments.holding(fault.physical_offset)
    if isinstance(record, Record) and segment is not None:
        yield Finding(
            severity=Severity.DAMAGE,
            area=Area.COMMIT_LOG,
            what=f"{fault.what} at physical offset {fault.physical_offset}",
            path=segment.path,
            position=fault.physical_offset - segment.begin + fault.position,
            expected=fault.expected,
            found=fault.found,
            topic=record.topic.decode("utf-8", "replace"),
            queue_id=record.queue_id,
            begin=record.queue_offset,
            end=record.queue_offset + 1,
            messages=1,
            next_step=f"One message is not what was sent; its neighbours are complete. {READ_AROUND}",
            action=fault.action,
        )


def fault_findings(log: TolerantCommitLog, faults: Iterable[LogFault]) -> Iterator[Finding]:
    """Yield a finding for each fault: bytes of the log that are not records, or a missing segment."""
    for fault in faults:
        segment, size = log.segments.holding(fault.begin), fault.end - fault.begin
        extent = f"{size} bytes of the log, physical offsets [{fault.begin}, {fault.end})"
        what = f"{extent}, are not records"
        if not size:
            what = "the filler at a segment's end: RocketMQ 5.3 ends the log there when it recovers"
        elif segment is None:
            first, last = log.missing_path(fault.begin), log.missing_path(fault.end - 1)
            names = " to ".join(dict.fromkeys(one.rpartition("/")[2] for one in (first, last)))
            what = f"{names} (missing): {extent}"
        yield Finding(
            severity=Severity.DAMAGE,
            area=Area.COMMIT_LOG,
            what=what,
            path=segment.path if segment else log.missing_path(fault.begin),
            position=fault.begin - segment.begin if segment else 0,
            expected=fault.expected,
            found=fault.found,
            next_step=READ_AROUND,
            action=Action.CUT if size and fault.expected != "a segment" else Action.LEAVE,
        )


def odd_file_findings(odd_files: Iterable[OddFile]) -> Iterator[Finding]:
    """Yield a finding for each file in the log's folders that keeps a broker from starting."""
    for odd in odd_files:
        what = "a file in the folder of the commit log that keeps a broker from starting"
        if odd.found == "a folder":
            what = "a folder with the name of a segment of the log"
        yield Finding(
            severity=Severity.DAMAGE,
            area=Area.COMMIT_LOG,
            what=what,
            path=odd.path,
            expected=odd.expected,
            found=odd.found,
            next_step="Move it away if it does not belong there, else restore it from a copy.",
        )
