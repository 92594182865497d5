"""What it means that records and units do not agree, once all of the log has been seen.

The log is the truth: a whole record whose unit is missing or wrong can have a new one (repairable). A unit that names a
record which is not there, or which says that it is another queue's, tells of a message that is lost (damage).
"""

from collections.abc import Iterator
from dataclasses import replace

from rmq_spark.store.explore.finding import DAMAGE, DOUBLED, NOTE, REPAIRABLE, Finding
from rmq_spark.store.explore.loose_units import find_loose
from rmq_spark.store.explore.loose_verdicts import loose_verdicts
from rmq_spark.store.explore.seen_log import READ_AROUND, REBUILD_STEP, Seen, area_of
from rmq_spark.store.explore.unmet import NO_QUEUE, NO_UNIT, OTHER_TAGS, OTHER_UNIT, Unmet
from rmq_spark.store.format import filenames
from rmq_spark.store.format.batch_unit import BATCH_UNIT
from rmq_spark.store.log.chain import Closing
from rmq_spark.store.log.queues import ConsumeQueue
from rmq_spark.store.units import QueueKey

_RECOVER = "The next writer dispatches them, as a broker does when it starts; rmq_spark.repair does it now."
_RESTORE = (
    "Newer messages have their queue offsets, so no repair makes units for them. rmq_spark.dump shows their records. "
    "To read them, restore a copy of the store from before the loss"
)


def verdicts(seen: Seen) -> Iterator[Finding]:
    """Yield what is wrong with units, queue by queue, and with the order of records in the log."""
    blamed: set[int] = set()  # places of records that are not what their unit says
    lost: dict[QueueKey, list[tuple[int, int]]] = {}
    for key, queue in seen.queues.items():
        if key in seen.unread:
            continue
        yield from _joined(_of_loose(seen, queue, blamed, lost))
    earlier: dict[QueueKey, list[Unmet]] = {}
    for unmet in seen.joined.unmet:
        if unmet.last < seen.joined.lives.get(unmet.key, 0):
            earlier.setdefault(unmet.key, []).append(unmet)
        elif (unmet.count > 1 or unmet.first not in blamed) and not _is_doubled(seen, unmet):
            yield from _of_unmet(seen, unmet)
    yield from (_of_earlier(seen, key, runs) for key, runs in earlier.items() if seen.may_exist(key.topic))
    yield from _of_steps(seen, blamed, lost)
    yield from _of_doubled(seen, blamed)
    if seen.expired:
        what = f"the log begins at physical offset {seen.begin}: {seen.expired} messages before it, which units still "
        what += "name, have expired, unless somebody took the file away"
        path = seen.log.segments.segments[0].path if seen.log.segments.segments else ""
        yield Finding(NOTE, filenames.COMMIT_LOG, what, path)


def _of_loose(
    seen: Seen, queue: ConsumeQueue, blamed: set[int], lost: dict[QueueKey, list[tuple[int, int]]]
) -> Iterator[Finding]:
    """Yield what the units of one queue tell that no record asked for, piece by piece."""
    for loose in find_loose(queue, seen.joined.ranges, seen.begin):
        seen.units += len(loose.numbers) + loose.expired + loose.fill
        seen.expired += loose.expired
        yield from loose_verdicts(seen, queue, loose, blamed, lost)


def _joined(found: Iterator[Finding]) -> Iterator[Finding]:
    """Join what one damage took, where it was seen in pieces that touch."""
    before: Finding | None = None
    for one in found:
        if before is not None and one.action == "lost" and (before.key, before.end) == (one.key, one.begin):
            before = replace(before, end=one.end, messages=before.messages + one.messages)
            continue
        if before is not None:
            yield before
        before = one
    if before is not None:
        yield before


def _of_earlier(seen: Seen, key: QueueKey, runs: list[Unmet]) -> Finding:
    """Return what messages are that a queue had before it began again at queue offset 0.

    Either its topic was deleted and created again, or its files were lost. Only a broker deletes a topic, with all its
    queues: where another queue of the topic has older messages, the files were lost.
    """
    last = max(run.last for run in runs)
    is_lost = seen.is_ours_alone or any(
        seen.first_place(other) < last for other in seen.queues if other.topic == key.topic and other != key
    )
    why = "its files were lost" if is_lost else "its topic was deleted and created again, or its files were lost"
    return Finding(
        DAMAGE if is_lost else NOTE,
        "consumequeue",
        f"messages of queue {key} from before it began again at queue offset 0 have no units: {why}",
        seen.folder_of(key),
        0,
        topic=key.topic,
        queue_id=key.queue_id,
        begin=min(run.begin for run in runs),
        end=max(run.end for run in runs),
        messages=sum(run.end - run.begin for run in runs),
        next_step=_RESTORE if is_lost else "",
    )


def _of_doubled(seen: Seen, blamed: set[int]) -> Iterator[Finding]:
    """Yield the queue offsets that two messages have: one of the two has no unit, and never gets one."""
    for key, runs in seen.joined.doubled.items():
        for run in runs:
            if run.place in blamed or run.place < seen.joined.lives.get(key, 0) or not seen.may_exist(key.topic):
                continue
            yield Finding(
                DAMAGE,
                filenames.COMMIT_LOG,
                f"messages of queue {key} with queue offsets that earlier messages have: one of each two is not read",
                *seen.place_of(run.place),
                f"queue offset {run.limit}",
                f"queue offset {run.begin}",
                key.topic,
                key.queue_id,
                run.begin,
                run.end,
                run.end - run.begin,
                "rmq_spark.dump shows the records of both. To read those without a unit, send them again.",
                DOUBLED,
            )


def _is_doubled(seen: Seen, unmet: Unmet) -> bool:
    """Say whether the units of these records are for others with the same queue offsets: a rebuild would swap them."""
    if unmet.kind != OTHER_UNIT:
        return False
    runs = seen.joined.doubled.get(unmet.key, [])
    return any(run.begin <= unmet.begin and unmet.end <= run.end for run in runs) and not any(
        other is not unmet and other.key == unmet.key and other.begin < unmet.end and unmet.begin < other.end
        for other in seen.joined.unmet
    )


def _of_unmet(seen: Seen, unmet: Unmet) -> Iterator[Finding]:
    path, position = seen.place_of(unmet.first)
    fields = dict(topic=unmet.key.topic, queue_id=unmet.key.queue_id, begin=unmet.begin, end=unmet.end)
    queue = seen.queues.get(unmet.key)
    is_tail = queue is not None and unmet.kind == NO_UNIT and unmet.begin >= seen.queue_end(unmet.key)
    if unmet.kind == NO_QUEUE and not seen.may_exist(unmet.key.topic):
        what = f"messages of queue {unmet.key}, which topics.json does not name any more"
        yield Finding(NOTE, "consumequeue", what, path, position, **fields, messages=unmet.end - unmet.begin)  # type: ignore[arg-type]
        return
    is_to_come = seen.closing is not Closing.CLOSED and unmet.first >= seen.dispatched_end
    if (is_tail or unmet.kind == NO_QUEUE) and is_to_come:
        is_live = seen.closing is Closing.LIVE
        yield Finding(
            NOTE if is_live else REPAIRABLE,
            "consumequeue",
            f"messages of queue {unmet.key} that no unit names yet: their writer {'is at it' if is_live else 'died'}",
            path,
            position,
            **fields,  # type: ignore[arg-type]
            messages=unmet.end - unmet.begin,
            next_step="" if is_live else _RECOVER,
            action="leave" if is_live else "recover",
        )
        return
    if queue is not None and queue.layout is not BATCH_UNIT and queue.run.begin <= unmet.begin < queue.run.end:
        path, position = queue.run.path_of(unmet.begin)
    elif queue is not None:
        path, position = queue.run.folder, 0
    else:
        path, position = seen.folder_of(unmet.key), 0
    what = {
        NO_QUEUE: f"queue {unmet.key} has no files, and messages",
        NO_UNIT: f"units of queue {unmet.key} are missing",
        OTHER_UNIT: f"units of queue {unmet.key} name something else than their records",
        OTHER_TAGS: f"units of queue {unmet.key} have a tags code that is not their records'",
    }[unmet.kind]
    yield Finding(
        REPAIRABLE,
        "consumequeue" if queue is None else area_of(queue),
        what,
        path,
        position,
        f"a unit for the record at {unmet.first} of {unmet.size} bytes",
        unmet.found or "nothing",
        **fields,  # type: ignore[arg-type]
        messages=unmet.end - unmet.begin,
        next_step=f"Readers refuse or miss these messages. {REBUILD_STEP}",
        action="rebuild",
    )


def _of_steps(seen: Seen, blamed: set[int], lost: dict[QueueKey, list[tuple[int, int]]]) -> Iterator[Finding]:
    """Judge records whose queue offset does not follow the one before it in their queue."""
    for step in seen.joined.steps:
        if step.place in blamed or step.found < step.expected:
            continue  # a record made of a damaged one, or offsets used again after a broker's crash
        if any(begin < step.found and step.expected < end for begin, end in lost.get(step.key, [])):
            continue  # told, with where they lie
        if any(step.before < place < step.place for place in blamed):
            continue
        was_damaged = seen.has_fault_between(step.before, step.place)
        what = "messages that lie in damaged bytes" if was_damaged else "messages that are not in the log"
        yield Finding(
            DAMAGE,
            filenames.COMMIT_LOG,
            f"{what}: queue {step.key} goes on behind them",
            *seen.place_of(step.place),
            f"queue offset {step.expected}",
            f"queue offset {step.found}",
            step.key.topic,
            step.key.queue_id,
            step.expected,
            step.found,
            step.found - step.expected,
            READ_AROUND,
            "lost" if was_damaged else "leave",
        )
