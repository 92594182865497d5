"""What it means that records and units do not agree, once all of the log has been seen.

The log is the truth: a whole record whose unit is missing or wrong can have a new one (repairable). A unit that names a
record which is not there, or which says that it is another queue's, tells of a message that is lost (damage).
"""

from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from rmq_spark.store.explore.finding import DAMAGE, NOTE, REPAIRABLE, Finding
from rmq_spark.store.explore.log_walk import LogFault
from rmq_spark.store.explore.loose_units import LooseUnits, find_loose
from rmq_spark.store.explore.sound_log import SoundLog
from rmq_spark.store.explore.unit_join import NO_QUEUE, NO_UNIT, OTHER_TAGS, OTHER_UNIT, Joined, Unmet
from rmq_spark.store.format import filenames
from rmq_spark.store.format.batch_unit import BATCH_UNIT
from rmq_spark.store.format.record import Record
from rmq_spark.store.log.chain import Closing
from rmq_spark.store.log.queues import ConsumeQueue
from rmq_spark.store.units import QueueKey

READ_AROUND = (
    "Restore the file from a copy. Else read around the place: startingOffsets and endingOffsets of the source, or "
    "failOnDataLoss=false where whole queues end before it"
)
_REBUILD = "rmq_spark.repair makes the queue anew from the log."
_RECOVER = "The next writer dispatches them, as a broker does when it starts; rmq_spark.repair does it now."
_LOOKED_UP = 5_000  # units of which the records are looked at one by one: bounds the time where all is damaged


@dataclass(slots=True)
class Seen:
    """What verdicts go by. `may_exist` says whether topics.json, if it is there, still names a topic.

    `[begin, end)` is the log, `faults` what of it is no record. `unread` are queues whose files cannot be read.
    """

    log: SoundLog
    queues: dict[QueueKey, ConsumeQueue]
    unread: set[QueueKey]
    joined: Joined
    faults: list[LogFault]
    closing: Closing
    may_exist: Callable[[str], bool]
    folder_of: Callable[[QueueKey], str]
    begin: int
    end: int
    units: int = 0  # that were looked at
    looked_up: int = 0
    fault_begins: list[int] = field(default_factory=list)

    def fault_at(self, place: int) -> LogFault | None:
        """Return the fault in whose extent a physical offset lies."""
        if not self.fault_begins:
            self.fault_begins = [fault.begin for fault in self.faults]
        at = bisect_right(self.fault_begins, place) - 1
        return self.faults[at] if at >= 0 and place < self.faults[at].end else None

    def has_fault_between(self, first: int, last: int) -> bool:
        """Say whether bytes between two records are no record."""
        return any(first < fault.end and fault.begin <= last and fault.begin < fault.end for fault in self.faults)

    def queue_end(self, key: QueueKey) -> int:
        """Return the number behind the last unit of a queue that agrees with a record."""
        return self.joined.ranges.end(key)


def verdicts(seen: Seen) -> Iterator[Finding]:
    """Yield what is wrong with units, queue by queue, and with the order of records in the log."""
    blamed: set[int] = set()  # places of records that are not what their unit says
    lost: dict[QueueKey, list[tuple[int, int]]] = {}
    for key, queue in seen.queues.items():
        if key in seen.unread:
            continue
        for loose in find_loose(queue, seen.joined.ranges, seen.begin):
            seen.units += len(loose.numbers) + loose.expired + loose.fill
            yield from _of_loose(seen, queue, loose, blamed, lost)
    for unmet in seen.joined.unmet:
        if unmet.count > 1 or unmet.first not in blamed:
            yield from _of_unmet(seen, unmet)
    yield from _of_steps(seen, blamed, lost)


def _of_loose(
    seen: Seen, queue: ConsumeQueue, loose: LooseUnits, blamed: set[int], lost: dict[QueueKey, list[tuple[int, int]]]
) -> Iterator[Finding]:
    offsets, counts, places = loose.offsets(), loose.counts(), loose.places
    in_faults: list[tuple[LogFault, int, int]] = []
    behind = garbage = 0
    first_behind = first_garbage = -1
    for at in range(len(places)):
        place, number = int(places[at]), int(loose.numbers[at])
        size = int(loose.units["record_size"][at])
        is_tail = number >= seen.queue_end(queue.key)
        fault = seen.fault_at(place)
        if fault is not None and place >= 0:
            in_faults.append((fault, int(offsets[at]), int(offsets[at] + counts[at])))
        elif place >= seen.end or place < 0 or size <= 0:
            if is_tail and place >= 0 and size > 0:
                first_behind = number if not behind else first_behind
                behind += 1
            elif is_tail:
                first_garbage = number if not garbage else first_garbage
                garbage += 1
            # In the middle: the record of that queue offset says that its unit is another.
        else:
            finding, is_stale = _of_misnamed(seen, queue, loose, at, is_tail, blamed)
            if finding is not None:
                yield finding
            elif is_stale:
                first_garbage = number if not garbage else first_garbage
                garbage += 1
    for fault, begin, end in _merged(in_faults):
        lost.setdefault(queue.key, []).append((begin, end))
        segment = seen.log.segments.holding(fault.begin)
        yield Finding(
            DAMAGE,
            filenames.COMMIT_LOG,
            f"messages whose records lie in damaged bytes, physical offsets [{fault.begin}, {fault.end})",
            segment.path if segment else seen.folder_of(queue.key),
            fault.begin - (segment.begin if segment else 0),
            fault.expected,
            fault.found,
            queue.key.topic,
            queue.key.queue_id,
            begin,
            end,
            end - begin,
            READ_AROUND,
        )
    if behind:
        yield _behind(seen, queue, first_behind, behind)
    if garbage:
        path, position = queue.run.path_of(first_garbage)
        is_next = first_garbage == seen.queue_end(queue.key)
        yield Finding(
            REPAIRABLE if is_next and seen.closing is not Closing.LIVE else NOTE,
            _area(queue),
            f"{garbage} units behind the last message of queue {queue.key} that name no record of it",
            path,
            position,
            "zeros",
            "units",
            queue.key.topic,
            queue.key.queue_id,
            next_step="A broker that starts may take them for messages. " + _REBUILD if is_next else "",
            action="rebuild" if is_next else "leave",
        )


def _behind(seen: Seen, queue: ConsumeQueue, number: int, count: int) -> Finding:
    """Units of records behind the log's end: a truncation left them, or a power cut took their records."""
    path, position = queue.run.path_of(number)
    place = int(queue.run.read(number, number + 1)["physical_offset"][0])
    record = seen.log.record_at(place)
    stale = isinstance(record, Record) or seen.closing is not Closing.CRASHED
    if seen.closing is Closing.LIVE or stale:
        what = f"{count} units of queue {queue.key} for records behind the log's end: nobody reads them"
        return Finding(NOTE, _area(queue), what, path, position, topic=queue.key.topic, queue_id=queue.key.queue_id)
    return Finding(
        DAMAGE,
        _area(queue),
        f"units of queue {queue.key} whose records the crash has taken",
        path,
        position,
        f"a record at physical offset {place}",
        getattr(record, "why", "none"),
        queue.key.topic,
        queue.key.queue_id,
        number if queue.layout is not BATCH_UNIT else None,
        number + count if queue.layout is not BATCH_UNIT else None,
        count,
        "They were not on disk when the power went. Restore the log from a copy, or let a writer go on without them.",
        action="recover",
    )


def _of_misnamed(
    seen: Seen, queue: ConsumeQueue, loose: LooseUnits, at: int, is_tail: bool, blamed: set[int]
) -> tuple[Finding | None, bool]:
    """Judge a unit that names a place within the log; the flag says that it is no more than stale."""
    place, number, offset = int(loose.places[at]), int(loose.numbers[at]), int(loose.offsets()[at])
    seen.looked_up += 1
    record = seen.log.record_at(place) if seen.looked_up <= _LOOKED_UP else None
    if not isinstance(record, Record) or record.total_size != int(loose.units["record_size"][at]):
        return None, is_tail
    owner = QueueKey(record.topic.decode("utf-8", "replace"), record.queue_id)
    is_own = owner == queue.key and record.queue_offset == offset
    has_other = owner in seen.queues and any(
        unmet.key == owner and unmet.first <= place <= unmet.last for unmet in seen.joined.unmet
    )
    if is_own or (owner in seen.queues and not has_other):
        return None, is_tail  # the record has a unit of its own: this one is stale, or its neighbour tells
    if place < seen.joined.lives.get(queue.key, 0):
        return None, is_tail
    blamed.add(place)
    path, position = queue.run.path_of(number)
    return (
        Finding(
            DAMAGE,
            filenames.COMMIT_LOG,
            f"a record whose head is not what its unit says ({path}, position {position})",
            *_place_of(seen, place),
            f"queue {queue.key}, queue offset {offset}",
            f"queue {owner}, queue offset {record.queue_offset}",
            queue.key.topic,
            queue.key.queue_id,
            offset,
            offset + int(loose.counts()[at]),
            int(loose.counts()[at]),
            READ_AROUND,
        ),
        False,
    )


def _of_unmet(seen: Seen, unmet: Unmet) -> Iterator[Finding]:
    if unmet.last < seen.joined.lives.get(unmet.key, 0):
        return  # its topic was deleted and made again since
    path, position = _place_of(seen, unmet.first)
    fields = dict(topic=unmet.key.topic, queue_id=unmet.key.queue_id, begin=unmet.begin, end=unmet.end)
    queue = seen.queues.get(unmet.key)
    is_tail = queue is not None and unmet.kind == NO_UNIT and unmet.begin >= seen.queue_end(unmet.key)
    if unmet.kind == NO_QUEUE and not seen.may_exist(unmet.key.topic):
        what = f"messages of queue {unmet.key}, which topics.json does not name any more"
        yield Finding(NOTE, "consumequeue", what, path, position, **fields, messages=unmet.end - unmet.begin)  # type: ignore[arg-type]
        return
    if (is_tail or unmet.kind == NO_QUEUE) and seen.closing is not Closing.CLEAN:
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
        "consumequeue" if queue is None else _area(queue),
        what,
        path,
        position,
        f"a unit for the record at {unmet.first} of {unmet.size} bytes",
        unmet.found or "nothing",
        **fields,  # type: ignore[arg-type]
        messages=unmet.end - unmet.begin,
        next_step=f"Readers refuse or miss these messages. {_REBUILD}",
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
            *_place_of(seen, step.place),
            f"queue offset {step.expected}",
            f"queue offset {step.found}",
            step.key.topic,
            step.key.queue_id,
            step.expected,
            step.found,
            step.found - step.expected,
            READ_AROUND,
        )


def _place_of(seen: Seen, place: int) -> tuple[str, int]:
    segment = seen.log.segments.holding(place)
    return (segment.path, place - segment.begin) if segment else ("", place)


def _area(queue: ConsumeQueue) -> str:
    return filenames.BATCH_CONSUME_QUEUE if queue.layout is BATCH_UNIT else filenames.CONSUME_QUEUE


def _merged(found: list[tuple[LogFault, int, int]]) -> list[tuple[LogFault, int, int]]:
    """Join ranges of queue offsets that touch and lie in one fault."""
    joined: list[tuple[LogFault, int, int]] = []
    for fault, begin, end in found:
        if joined and joined[-1][0] is fault and joined[-1][2] == begin:
            joined[-1] = fault, joined[-1][1], end
        else:
            joined.append((fault, begin, end))
    return joined
