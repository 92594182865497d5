"""What units mean that no record asked for: see `unit_verdicts.py`."""

from collections.abc import Iterator

from rmq_spark.store.explore.finding import DAMAGE, NOTE, REPAIRABLE, Finding
from rmq_spark.store.explore.log_walk import LogFault
from rmq_spark.store.explore.loose_units import LooseUnits
from rmq_spark.store.explore.seen_log import READ_AROUND, REBUILD_STEP, Seen, area_of
from rmq_spark.store.format import filenames
from rmq_spark.store.format.batch_unit import BATCH_UNIT
from rmq_spark.store.format.record import Record
from rmq_spark.store.log.chain import Closing
from rmq_spark.store.log.queues import ConsumeQueue
from rmq_spark.store.units import QueueKey

_LOOKED_UP = 5_000  # units of which the records are looked at one by one: bounds the time where all is damaged
_NOT_ON_DISK = (
    "They were not on disk when the power went. Restore the log from a copy, or let a writer go on without them."
)
_TAKEN_BACK = (
    "They were not on disk when the power went, and no writer had said that they were. The next writer takes the units "
    "back; rmq_spark.repair does it now."
)

# What a unit is that no record asked for. In the middle of a queue the record of its queue offset tells of it.
_BEHIND, _GARBAGE, _EARLY, _NAMED, _TOLD = "behind the log's end", "no unit", "before the first", "named", "told"


def loose_verdicts(
    seen: Seen, queue: ConsumeQueue, loose: LooseUnits, blamed: set[int], lost: dict[QueueKey, list[tuple[int, int]]]
) -> Iterator[Finding]:
    """Yield what loose units of one queue tell.

    Places of records that are not what their unit says go into `blamed`, queue offsets that are told as lost into
    `lost`.
    """
    offsets, counts = loose.offsets(), loose.counts()
    in_faults: list[tuple[LogFault, int, int]] = []
    first: dict[str, int] = {}
    count: dict[str, int] = {}
    for at in range(len(loose.numbers)):
        kind = _kind_of(seen, queue, loose, at)
        if isinstance(kind, LogFault):
            in_faults.append((kind, int(offsets[at]), int(offsets[at] + counts[at])))
            continue
        if kind == _NAMED:
            finding, is_stale = _of_misnamed(seen, queue, loose, at, blamed)
            if finding is not None:
                yield finding
            kind = _GARBAGE if is_stale else _TOLD
        first.setdefault(kind, int(loose.numbers[at]))
        count[kind] = count.get(kind, 0) + 1
    for fault, begin, end in _merged(in_faults):
        lost.setdefault(queue.key, []).append((begin, end))
        segment = seen.log.segments.holding(fault.begin)
        where = "lie in damaged bytes" if segment else "lay in a segment that is missing"
        yield Finding(
            DAMAGE,
            filenames.COMMIT_LOG,
            f"messages whose records {where}, physical offsets [{fault.begin}, {fault.end})",
            segment.path if segment else seen.log.missing_path(fault.begin),
            fault.begin - segment.begin if segment else 0,
            fault.expected,
            fault.found,
            queue.key.topic,
            queue.key.queue_id,
            begin,
            end,
            end - begin,
            READ_AROUND,
            "lost",
        )
    for kind, number in first.items():
        if kind != _TOLD:
            yield _of_kind(seen, queue, kind, number, count[kind])


def _of_kind(seen: Seen, queue: ConsumeQueue, kind: str, number: int, count: int) -> Finding:
    """Return what so many units of a kind mean, the first of which has that number."""
    if kind == _BEHIND:
        return _behind(seen, queue, number, count)
    path, position = queue.run.path_of(number)
    if kind == _EARLY:
        what = f"{count} units before the first message of queue {queue.key} that are neither fill nor expired"
        return Finding(
            REPAIRABLE,
            area_of(queue),
            what,
            path,
            position,
            f"fill, or a record before physical offset {seen.begin}",
            f"{tuple(queue.run.read(number, number + 1)[0])}",
            queue.key.topic,
            queue.key.queue_id,
            next_step=f"Readers may refuse the queue. {REBUILD_STEP}",
            action="rebuild",
        )
    is_next = number == seen.queue_end(queue.key)
    return Finding(
        REPAIRABLE if is_next and seen.closing is not Closing.LIVE else NOTE,
        area_of(queue),
        f"{count} units behind the last message of queue {queue.key} that name no record of it",
        path,
        position,
        "zeros",
        "units",
        queue.key.topic,
        queue.key.queue_id,
        next_step="A broker that starts may take them for messages. " + REBUILD_STEP if is_next else "",
        action="rebuild" if is_next else "leave",
    )


def _kind_of(seen: Seen, queue: ConsumeQueue, loose: LooseUnits, at: int) -> str | LogFault:
    """Return what a unit is; the damage in which its record lies."""
    place, number, size = int(loose.places[at]), int(loose.numbers[at]), int(loose.units["record_size"][at])
    fault = seen.fault_at(place) if place >= 0 else None
    if fault is not None:
        return fault
    if 0 <= place < seen.end and size > 0:
        return _NAMED
    if number >= seen.queue_end(queue.key):
        return _BEHIND if place >= 0 and size > 0 else _GARBAGE
    first_met = seen.joined.ranges.begin(queue.key)
    return _EARLY if first_met is None or number < first_met else _TOLD


def _behind(seen: Seen, queue: ConsumeQueue, number: int, count: int) -> Finding:
    """Units of records behind the log's end: a truncation left them, or a power cut took their records."""
    path, position = queue.run.path_of(number)
    place = int(queue.run.read(number, number + 1)["physical_offset"][0])
    record = seen.log.record_at(place)
    stale = isinstance(record, Record) and record.store_timestamp < seen.newest_ms
    stale |= seen.closing is not Closing.CRASHED
    is_taken_back = not stale and seen.durable_end is not None and place >= seen.durable_end
    if seen.closing is Closing.LIVE or stale:
        whose = "they came meanwhile, or nobody reads them" if seen.closing is Closing.LIVE else "nobody reads them"
        what = f"{count} units of queue {queue.key} for records behind the log's end: {whose}"
        return Finding(NOTE, area_of(queue), what, path, position, topic=queue.key.topic, queue_id=queue.key.queue_id)
    return Finding(
        REPAIRABLE if is_taken_back else DAMAGE,
        area_of(queue),
        f"units of queue {queue.key} whose records lie behind the end that a crash left",
        path,
        position,
        f"a record at physical offset {place}",
        getattr(record, "why", "a record behind bytes that are none"),
        queue.key.topic,
        queue.key.queue_id,
        number if queue.layout is not BATCH_UNIT else None,
        number + count if queue.layout is not BATCH_UNIT else None,
        count,
        _TAKEN_BACK if is_taken_back else _NOT_ON_DISK,
        action="recover",
    )


def _of_misnamed(
    seen: Seen, queue: ConsumeQueue, loose: LooseUnits, at: int, blamed: set[int]
) -> tuple[Finding | None, bool]:
    """Judge a unit that names a place within the log; the flag says that it is no more than stale."""
    is_tail = int(loose.numbers[at]) >= seen.queue_end(queue.key)
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
            *seen.place_of(place),
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


def _merged(found: list[tuple[LogFault, int, int]]) -> list[tuple[LogFault, int, int]]:
    """Join ranges of queue offsets that touch and lie in one fault."""
    joined: list[tuple[LogFault, int, int]] = []
    for fault, begin, end in found:
        if joined and joined[-1][0] is fault and joined[-1][2] == begin:
            joined[-1] = fault, joined[-1][1], end
        else:
            joined.append((fault, begin, end))
    return joined
