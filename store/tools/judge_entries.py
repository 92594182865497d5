"""Findings about consume-queue entries, made after all records of the commit log were compared with them.

If the entry of a complete record is missing or wrong, a repair can write it again, because entries are derived from the
commit log. So the finding is repairable. If an entry refers to a record that is missing, or that belongs to another
queue, a message is lost. So the finding is damage.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace

from rmq_spark.store.disk.kernel_errors import is_unreadable
from rmq_spark.store.errors import DamageError, StoreError
from rmq_spark.store.format.consume_queue_entry import BATCH_UNIT
from rmq_spark.store.format.delay_levels import DelayLevels
from rmq_spark.store.format.index_keys import tags_code_of
from rmq_spark.store.format.record import Record
from rmq_spark.store.log.commit_log import CommitLog
from rmq_spark.store.log.consume_queue import ConsumeQueue
from rmq_spark.store.log.record_chain import ShutdownState
from rmq_spark.store.model import QueueKey
from rmq_spark.store.names import SCHEDULE_TOPIC
from rmq_spark.store.tools.check_context import READ_AROUND, REBUILD_STEP, CheckContext, area_of
from rmq_spark.store.tools.finding import Action, Area, Finding, Severity
from rmq_spark.store.tools.join_entries import NO_ENTRY, NO_QUEUE, OTHER_ENTRY, OTHER_TAGS, JoinResult, Mismatch
from rmq_spark.store.tools.orphan_entries import find_orphans, orphan_findings

_TRIES = 4
_WAIT_S = 0.05  # doubled at each try
_RECHECKED_MAX = 10_000  # a mismatch with more records is not compared again
_NO_BROKER = "No broker starts on it."
_RESTORE_QUEUE_STEP = (
    "Restore the files from a copy. All messages of the queue have expired, so only these files record its next queue "
    "offset: a rebuilt queue would begin at 0, below the offsets of its groups. If the queue is not used, delete its "
    "folder."
)
_RECOVER_STEP = "The next writer or broker dispatches them when it starts; rmq_spark.repair does it now."
_RESTORE_STEP = (
    "No repair can add entries, because newer messages use the same queue offsets. rmq_spark.dump shows the records. "
    "To read the messages, restore a copy of the store from before the loss."
)


def recheck(
    joined: JoinResult,
    find_queue: Callable[[QueueKey], ConsumeQueue | None],
    log: CommitLog,
    levels: DelayLevels,
    sleep: Callable[[float], None],
) -> None:
    """Remove mismatches from `joined` whose entries are right by now. Call this only if a writer is running.

    The writer appends a record first and its entry later, so the scan may have read the record without its entry.
    """
    for attempt in range(_TRIES):
        if not joined.mismatches:
            return
        sleep(_WAIT_S * 2**attempt)
        joined.mismatches = [
            run for run in joined.mismatches if not _agrees_now(joined, find_queue(run.key), run, log, levels)
        ]


def _agrees_now(
    joined: JoinResult, queue: ConsumeQueue | None, mismatch: Mismatch, log: CommitLog, levels: DelayLevels
) -> bool:
    if queue is None or queue.layout is BATCH_UNIT or mismatch.count > _RECHECKED_MAX:
        return False
    queue.run.refresh()
    try:
        entries = queue.read(mismatch.begin, mismatch.end)
    except StoreError:
        return mismatch.last < log.segments.begin
    finally:
        queue.run.close()
    if len(entries) < mismatch.end - mismatch.begin:
        return False
    key = mismatch.key
    for at in range(len(entries)):
        record = log.record_at(int(entries.physical_offsets[at]))
        expected = (int(entries.sizes[at]), int(entries.queue_offsets[at]), key.topic, key.queue_id)
        if not isinstance(record, Record) or expected != (
            record.total_size,
            record.queue_offset,
            record.topic.decode("utf-8", "replace"),
            record.queue_id,
        ):
            return False
        if key.topic != SCHEDULE_TOPIC and int(entries.tags_codes[at]) != tags_code_of(record, levels):
            return False
    joined.matched.add(key, entries.queue_offsets)
    return True


def odd_due_times(
    odd_delays: Mapping[QueueKey, Mapping[int, tuple[int, int]]],
    joined: JoinResult,
    queues: Mapping[QueueKey, ConsumeQueue],
) -> Iterator[Finding]:
    """Yield a finding for each delay of delayed messages (in SCHEDULE_TOPIC_XXXX) that is not the delay of their level.

    `odd_delays` has for each queue these delays (ms), with the number of entries and the number of the first entry.
    """
    for key, delays in odd_delays.items():
        queue = queues[key]
        for delay_ms, (count, number) in delays.items():
            path, position = queue.run.path_of(number)
            is_single = count == 1 and joined.matched.end(key) - (joined.matched.begin(key) or 0) > 1
            yield Finding(
                severity=Severity.REPAIRABLE if is_single else Severity.NOTE,
                area=Area.CONSUME_QUEUE,
                what=f"{count} messages of delay level {key.queue_id + 1} are due after {delay_ms} ms, which is not "
                "the level's delay: the table of levels was another, or the entry is damaged",
                path=path,
                position=position,
                topic=key.topic,
                queue_id=key.queue_id,
                messages=count,
                next_step=REBUILD_STEP if is_single else "",
                action=Action.REBUILD if is_single else Action.LEAVE,
            )


def unreadable_queue(queue: ConsumeQueue, fault: StoreError) -> Finding:
    """Return the finding about a queue whose files cannot be read or are invalid. `fault` is the error."""
    key = queue.key
    if is_unreadable(fault):
        return Finding(
            severity=Severity.DAMAGE,
            area=area_of(queue),
            what=f"the files of queue {key} cannot be read, so their content was not checked: {fault}",
            path=queue.run.folder,
            topic=key.topic,
            queue_id=key.queue_id,
        )
    is_damaged = isinstance(fault, DamageError)
    step = REBUILD_STEP if is_damaged else "Move files that do not belong there to another folder."
    return Finding(
        severity=Severity.REPAIRABLE,
        area=area_of(queue),
        what=f"the files of queue {key} are invalid: {fault}",
        path=getattr(fault, "path", queue.run.folder),
        expected=str(getattr(fault, "expected", "")),
        found=str(getattr(fault, "found", "")),
        topic=key.topic,
        queue_id=key.queue_id,
        next_step=f"{_NO_BROKER} {step}",
        action=Action.REBUILD if is_damaged else Action.LEAVE,
    )


def odd_lengths(queues: Mapping[QueueKey, ConsumeQueue], unreadable: Iterable[QueueKey]) -> Iterator[Finding]:
    """Yield a finding for each queue whose files have another length than those of most queues of its kind.

    A broker uses one length for all plain queues, and one for all batch queues. Queues in `unreadable` are skipped.
    """
    skipped = set(unreadable)
    sizes = {
        key: queue.run.segments[0].size for key, queue in queues.items() if key not in skipped and queue.run.segments
    }
    for kind in {type(queues[key]) for key in sizes}:
        keys = [key for key in sizes if type(queues[key]) is kind]
        counts = Counter(sizes[key] for key in keys)
        usual = max(counts, key=lambda size: (counts[size], size))
        for key in keys:
            if sizes[key] != usual:
                yield Finding(
                    severity=Severity.REPAIRABLE,
                    area=area_of(queues[key]),
                    what=f"the length of the files of queue {key}",
                    path=queues[key].run.segments[0].path,
                    expected=f"{usual} bytes, like the files of other queues",
                    found=str(sizes[key]),
                    topic=key.topic,
                    queue_id=key.queue_id,
                    next_step=f"{_NO_BROKER} {REBUILD_STEP}",
                    action=Action.REBUILD,
                )


def forbid_renumbering(findings: Iterable[Finding], has_records: Callable[[QueueKey], bool]) -> Iterator[Finding]:
    """Yield all findings, but replace a planned rebuild of a queue that has no record in the log by advice.

    Such a queue must not be rebuilt, because it would begin at queue offset 0 again, below the offsets of its groups.
    """
    for one in findings:
        is_queue = one.action == Action.REBUILD and one.topic is not None and one.queue_id is not None
        is_rebuilt = is_queue and one.severity != Severity.NOTE
        if is_rebuilt and not has_records(QueueKey(one.topic or "", one.queue_id or 0)):
            yield replace(one, severity=Severity.DAMAGE, next_step=_RESTORE_QUEUE_STEP, action=Action.LEAVE)
        else:
            yield one


def entry_findings(context: CheckContext) -> Iterator[Finding]:
    """Yield the findings about wrong and missing entries, and about the queue offsets of records in the commit log."""
    blamed: set[int] = set()  # physical offsets of records with a finding, because their header differs from an entry
    lost: dict[QueueKey, list[tuple[int, int]]] = {}  # ranges of queue offsets of records in damaged bytes
    for queue in context.queues.values():
        if queue.key not in context.unreadable:
            yield from _joined(_orphans_of(context, queue, blamed, lost))
    older: dict[QueueKey, list[Mismatch]] = {}  # mismatches of records from before the queue restarted at 0
    for mismatch in context.joined.mismatches:
        if mismatch.last < context.joined.restarts.get(mismatch.key, 0):
            older.setdefault(mismatch.key, []).append(mismatch)
        elif (mismatch.count > 1 or mismatch.first not in blamed) and not _is_duplicate(context, mismatch):
            yield _mismatch_finding(context, mismatch)
    for key, runs in older.items():
        if context.may_exist(key.topic):
            yield _restarted_queue(context, key, runs)
    yield from _jump_findings(context, blamed, lost)
    yield from _duplicate_findings(context, blamed)
    if context.expired:
        segments = context.log.segments.segments
        yield Finding(
            severity=Severity.NOTE,
            area=Area.COMMIT_LOG,
            what=f"the commit log begins at physical offset {context.begin}: {context.expired} earlier messages that "
            "still have entries have expired, unless segments were deleted by hand",
            path=segments[0].path if segments else "",
        )


def _orphans_of(
    context: CheckContext, queue: ConsumeQueue, blamed: set[int], lost: dict[QueueKey, list[tuple[int, int]]]
) -> Iterator[Finding]:
    for orphans in find_orphans(queue, context.joined.matched, context.begin):
        context.orphan_count += len(orphans.numbers) + orphans.expired + orphans.fill
        context.expired += orphans.expired
        yield from orphan_findings(context, queue, orphans, blamed, lost)


def _joined(findings: Iterator[Finding]) -> Iterator[Finding]:
    """Yield the findings, but merge consecutive ones about the same damage if their queue offsets are adjacent."""
    previous: Finding | None = None
    for one in findings:
        if previous is not None and one.action == Action.LOST and (previous.key, previous.end) == (one.key, one.begin):
            previous = replace(previous, end=one.end, messages=previous.messages + one.messages)
            continue
        if previous is not None:
            yield previous
        previous = one
    if previous is not None:
        yield previous


def _restarted_queue(context: CheckContext, key: QueueKey, runs: list[Mismatch]) -> Finding:
    """Return the finding about messages from before a queue restarted at queue offset 0.

    A queue restarts if its topic was deleted and created again, or if its files were lost. Only a broker deletes a
    topic, and it deletes all queues of the topic. So the files were lost if no broker has written to the store, or if
    another queue of the topic still has older messages.
    """
    last = max(run.last for run in runs)
    is_lost = context.is_ours_alone or any(
        context.first_physical_offset(other) < last
        for other in context.queues
        if other.topic == key.topic and other != key
    )
    why = "its files were lost" if is_lost else "its topic was deleted and created again, or its files were lost"
    return Finding(
        severity=Severity.DAMAGE if is_lost else Severity.NOTE,
        area=Area.CONSUME_QUEUE,
        what=f"messages of queue {key} from before it restarted at queue offset 0 have no entries: {why}",
        path=context.folder_of(key),
        topic=key.topic,
        queue_id=key.queue_id,
        begin=min(run.begin for run in runs),
        end=max(run.end for run in runs),
        messages=sum(run.end - run.begin for run in runs),
        next_step=_RESTORE_STEP if is_lost else "",
    )


def _duplicate_findings(context: CheckContext, blamed: set[int]) -> Iterator[Finding]:
    """Yield a finding for each range of queue offsets that two messages have.

    One of the two messages has no entry and will not get one, so it cannot be read.
    """
    for key, runs in context.joined.duplicates.items():
        for run in runs:
            is_old = run.physical_offset < context.joined.restarts.get(key, 0)
            if run.physical_offset in blamed or is_old or not context.may_exist(key.topic):
                continue
            path, position = context.locate(run.physical_offset)
            yield Finding(
                severity=Severity.DAMAGE,
                area=Area.COMMIT_LOG,
                what=f"messages of queue {key} have queue offsets of earlier messages: one of each pair cannot be read",
                path=path,
                position=position,
                expected=f"queue offset {run.limit}",
                found=f"queue offset {run.begin}",
                topic=key.topic,
                queue_id=key.queue_id,
                begin=run.begin,
                end=run.end,
                messages=run.end - run.begin,
                next_step="rmq_spark.dump shows the records of both. To read those without an entry, send them again.",
                action=Action.DOUBLED,
            )


def _is_duplicate(context: CheckContext, mismatch: Mismatch) -> bool:
    """Return whether a mismatch only exists because two records have the same queue offset.

    Then the entry belongs to the other record. A rebuild would only swap the two, so it must not be planned.
    """
    if mismatch.kind != OTHER_ENTRY:
        return False
    runs = context.joined.duplicates.get(mismatch.key, [])
    return any(run.begin <= mismatch.begin and mismatch.end <= run.end for run in runs) and not any(
        other is not mismatch
        and other.key == mismatch.key
        and other.begin < mismatch.end
        and mismatch.begin < other.end
        for other in context.joined.mismatches
    )


def _mismatch_finding(context: CheckContext, mismatch: Mismatch) -> Finding:
    path, position = context.locate(mismatch.first)
    key = mismatch.key
    finding = Finding(
        severity=Severity.NOTE,
        area=Area.CONSUME_QUEUE,
        what=f"messages of queue {key}, whose topic is not in topics.json",
        path=path,
        position=position,
        topic=key.topic,
        queue_id=key.queue_id,
        begin=mismatch.begin,
        end=mismatch.end,
        messages=mismatch.end - mismatch.begin,
    )
    if mismatch.kind == NO_QUEUE and not context.may_exist(key.topic):
        return finding
    queue = context.queues.get(key)
    is_tail = queue is not None and mismatch.kind == NO_ENTRY and mismatch.begin >= context.queue_end(key)
    is_pending = context.shutdown is not ShutdownState.CLOSED and mismatch.first >= context.dispatched_end
    if (is_tail or mismatch.kind == NO_QUEUE) and is_pending:
        what = f"messages of queue {key} that have no entry yet: their writer"
        if context.shutdown is ShutdownState.LIVE:
            return replace(finding, what=f"{what} is running")
        return replace(
            finding,
            severity=Severity.REPAIRABLE,
            what=f"{what} died",
            next_step=_RECOVER_STEP,
            action=Action.RECOVER,
        )
    if queue is not None and queue.layout is not BATCH_UNIT and queue.run.begin <= mismatch.begin < queue.run.end:
        path, position = queue.run.path_of(mismatch.begin)
    else:
        path, position = context.folder_of(key) if queue is None else queue.run.folder, 0
    return replace(
        finding,
        severity=Severity.REPAIRABLE,
        area=Area.CONSUME_QUEUE if queue is None else area_of(queue),
        what={
            NO_QUEUE: f"queue {key} has messages and no files",
            NO_ENTRY: f"entries of queue {key} are missing",
            OTHER_ENTRY: f"entries of queue {key} differ from their records",
            OTHER_TAGS: f"entries of queue {key} have another tags code than their records",
        }[mismatch.kind],
        path=path,
        position=position,
        expected=f"an entry for the record of {mismatch.size} bytes at physical offset {mismatch.first}",
        found=mismatch.found or "nothing",
        next_step=f"Readers refuse or miss these messages. {REBUILD_STEP}",
        action=Action.REBUILD,
    )


def _jump_findings(
    context: CheckContext, blamed: set[int], lost: dict[QueueKey, list[tuple[int, int]]]
) -> Iterator[Finding]:
    """Yield a finding for each gap between the queue offsets of consecutive records of a queue.

    Gaps that another finding explains are skipped: those next to a record in `blamed`, and those in `lost`.
    """
    for jump in context.joined.jumps:
        if jump.physical_offset in blamed or jump.found < jump.expected:
            continue  # the record has a finding already, or a broker used its queue offset again after a crash
        if any(begin < jump.found and jump.expected < end for begin, end in lost.get(jump.key, [])):
            continue  # the finding about the damaged bytes has these queue offsets
        if any(jump.previous < physical_offset < jump.physical_offset for physical_offset in blamed):
            continue
        is_damaged = any(
            jump.previous < fault.end and fault.begin <= jump.physical_offset and fault.begin < fault.end
            for fault in context.faults
        )
        path, position = context.locate(jump.physical_offset)
        yield Finding(
            severity=Severity.DAMAGE,
            area=Area.COMMIT_LOG,
            what=f"messages of queue {jump.key} are {'in damaged bytes' if is_damaged else 'missing in the log'}; "
            "its later messages follow",
            path=path,
            position=position,
            expected=f"queue offset {jump.expected}",
            found=f"queue offset {jump.found}",
            topic=jump.key.topic,
            queue_id=jump.key.queue_id,
            begin=jump.expected,
            end=jump.found,
            messages=jump.found - jump.expected,
            next_step=READ_AROUND,
            action=Action.LOST if is_damaged else Action.LEAVE,
        )
