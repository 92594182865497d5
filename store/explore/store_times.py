"""Store times that a wrong clock put ahead, and the times that a repair writes in their place.

Store times never step back. So after one append with a clock that is ahead, all later messages get that time: search by
time, retention by age and the delay levels wait for the clock to reach it. A repair changes the eight bytes of the
store time in each of these records. It moves no record, so offsets, units and message ids stay as they are.

A record keeps a time that is not ahead. Another one gets its born time, which its sender's clock gave, but at least the
time of the record before it, and at most the clock's. So times never step back.

Readers and recovery cut a log where times step back and do not come up again (`log/chain.py`). So the last record
keeps its time, the largest of all, until every other one is on disk. Whatever a crash leaves before that is a log whose
last message is ahead of the clock: the check finds it, and the next repair begins again.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import pyarrow.compute as pc
from numpy.typing import NDArray

from rmq_spark.store.disk import files
from rmq_spark.store.disk.changing import Disk
from rmq_spark.store.errors import DamageError, StoreChangedError
from rmq_spark.store.explore.layouts import field_position
from rmq_spark.store.explore.log_walk import LogBlock, LogFault, LogWalk
from rmq_spark.store.explore.sound_log import SoundLog
from rmq_spark.store.format import filenames
from rmq_spark.store.format.batch_unit import BATCH_UNIT
from rmq_spark.store.format.delay_levels import DelayLevels
from rmq_spark.store.format.filenames import SCHEDULE_TOPIC
from rmq_spark.store.format.record import RECORD_HEAD
from rmq_spark.store.format.whole_records import born_host_shift
from rmq_spark.store.log.changes import Changes
from rmq_spark.store.log.queues import ConsumeQueue
from rmq_spark.store.log.topics import TopicTable
from rmq_spark.store.units import LAST_SECONDS_MS, QueueKey

_TIME_AT = field_position(RECORD_HEAD, "store_timestamp")
_TIME_BYTES = 8
_STEP_MS = 1000  # by which a broker's store times may step back between messages
_SECTOR_BYTES = 512  # the least that a disk writes whole
_RECORD_CRC = "__CRC32#"  # property: checksum of the whole record, its store time too
_UNITS_AT_ONCE = 1 << 16


@dataclass(frozen=True, slots=True)
class RetimedBlock:
    """Records that lie one behind the other, of which `rows` get the store times `times` (ms)."""

    block: LogBlock
    rows: NDArray[np.intp]
    times: NDArray[np.int64]

    def time_positions(self) -> NDArray[np.int64]:
        """Return where in the block's data the store time of each of the rows is."""
        whole = self.block.whole
        positions = whole.positions[self.rows] + _TIME_AT + born_host_shift(whole.sys_flags[self.rows])
        return positions.astype(np.int64)


@dataclass
class WrongTimes:
    """What a repair of the store times would change, counted by one walk of the log that ends at `end`.

    `refusal` says why it must not be done, None if it may.
    """

    messages: int = 0
    begin: int = -1  # physical offset of the first record that changes
    last: int = -1  # of the log's last record
    refusal: str | None = None
    # By queue: physical offsets, and what the units of these records have to say.
    units: dict[QueueKey, list[tuple[NDArray[np.int64], NDArray[np.int64]]]] = field(default_factory=dict)


def find_wrong_times(root: str, log: SoundLog, levels: DelayLevels, end: int, now_ms: int) -> WrongTimes:
    """Count the records that were stored ahead of the clock, which says `now_ms`. Reads all of the log.

    Raises DamageError for a log that has something else than records.
    """
    found, batches = WrongTimes(), _batch_queues(root)
    newest_ms, last_ms, has_crc = -1, -1, False
    for retimed in _retimed(log, levels, end, now_ms):
        columns = retimed.block.columns
        newest_ms, last_ms = max(newest_ms, int(columns.store_times.max())), int(columns.store_times[-1])
        found.last = int(columns.places[-1])
        if not len(retimed.rows):
            continue
        found.begin = int(columns.places[retimed.rows[0]]) if not found.messages else found.begin
        found.messages += len(retimed.rows)
        has_crc = has_crc or pc.any(pc.match_substring(retimed.block.whole.texts(), _RECORD_CRC)).as_py() is True
        _note_units(found, retimed, batches)
    if now_ms < LAST_SECONDS_MS:
        found.refusal = "this machine's clock is before 2001: set it first"
    elif last_ms <= newest_ms - _STEP_MS:
        found.refusal = "the last message has an earlier store time than one before it: send a message, and plan again"
    elif has_crc:
        found.refusal = f"records have a checksum of their store time (property {_RECORD_CRC})"
    elif any(files.list_folder(files.join(root, filenames.CONSUME_QUEUE_EXT))):
        found.refusal = f"{filenames.CONSUME_QUEUE_EXT}/ has copies of the store times"
    return found


def write_times(
    root: str, disk: Disk, log: SoundLog, levels: DelayLevels, end: int, now_ms: int, note_progress: Callable[[], None]
) -> None:
    """Write right store times into the log, which ends at `end`, and into the units that have them. Under the lock.

    `abort` must be there, and the checkpoint must not speak of any of these times. All of it is on disk when this
    returns.
    """
    found = find_wrong_times(root, log, levels, end, now_ms)
    if found.refusal is not None:
        raise StoreChangedError(
            f"the store times of {root} cannot be set back: somebody wrote to the store since the plan was made; "
            f"expected the store of the plan. {found.refusal}. Plan the repair again."
        )
    changes = Changes(disk, (root,), note_progress=note_progress)
    # Units first: a record whose time is right counts as done, and its unit must be.
    queues = TopicTable(root).queues
    for key, parts in found.units.items():
        if key in queues:
            _write_units(disk, queues[key], np.concatenate([one for one, _ in parts]),
                         np.concatenate([one for _, one in parts]), changes)  # fmt: skip
    changes.sync()
    last: tuple[int, int] | None = None
    for retimed in _retimed(log, levels, end, now_ms):
        note_progress()
        if not len(retimed.rows):
            continue
        if int(retimed.block.columns.places[retimed.rows[-1]]) == found.last:
            at = retimed.time_positions()[-1]
            last = retimed.block.begin + int(at), int(retimed.times[-1])
            retimed = RetimedBlock(retimed.block, retimed.rows[:-1], retimed.times[:-1])
        if len(retimed.rows):
            _write_block(disk, log, retimed, changes)
    changes.sync()
    if last is not None:
        _write_last(disk, log, *last)


def _walk(log: SoundLog, levels: DelayLevels, end: int) -> Iterator[LogBlock]:
    for step in LogWalk(log, levels).run(log.segments.begin, end):
        if isinstance(step, LogFault):
            segment = log.segments.holding(step.begin)
            raise DamageError(
                "what stands before the log's end",
                segment.path if segment else filenames.COMMIT_LOG,
                step.begin - (segment.begin if segment else 0),
                step.expected,
                step.found,
            )
        yield step


def _retimed(log: SoundLog, levels: DelayLevels, end: int, now_ms: int) -> Iterator[RetimedBlock]:
    """Yield the blocks of the log with those of their records whose store times are wrong, which may be none."""
    before_ms, is_ahead = -1, False
    for block in _walk(log, levels, end):
        held, first = block.columns.store_times, 0
        if not is_ahead:
            ahead = held > now_ms
            is_ahead = bool(ahead.any())
            first = int(np.argmax(ahead)) if is_ahead else len(held)
            before_ms = max(before_ms, int(held[:first].max(initial=-1)))
        if first == len(held):
            yield RetimedBlock(block, np.zeros(0, np.intp), np.zeros(0, np.int64))
            continue
        born = block.whole.field("born_timestamp").astype(np.int64)[first:]
        # A sender without a clock says nothing.
        born = np.where(born < LAST_SECONDS_MS, before_ms if before_ms >= 0 else now_ms, np.minimum(born, now_ms))
        wanted = np.where(held[first:] <= now_ms, held[first:], born)
        times = np.maximum.accumulate(np.maximum(wanted, before_ms))
        before_ms = int(times[-1])
        rows = np.flatnonzero(times != held[first:])
        yield RetimedBlock(block, first + rows, times[rows])


def _batch_queues(root: str) -> set[QueueKey]:
    return {key for key, queue in TopicTable(root).queues.items() if queue.layout is BATCH_UNIT}


def _note_units(found: WrongTimes, retimed: RetimedBlock, batches: set[QueueKey]) -> None:
    """Note what the units of some records say of their store times: when a delayed one is due, or the time itself."""
    columns, rows = retimed.block.columns, retimed.rows
    timed = [at for at, topic in enumerate(columns.topics) if topic == SCHEDULE_TOPIC or _is_in(topic, batches)]
    for at in timed:
        of_topic = np.flatnonzero(columns.topic_numbers[rows] == at)
        is_level = columns.topics[at] == SCHEDULE_TOPIC
        for queue_id in np.unique(columns.queue_ids[rows[of_topic]]).tolist():
            mine = of_topic[columns.queue_ids[rows[of_topic]] == queue_id]
            values, key = retimed.times[mine], QueueKey(columns.topics[at], queue_id)
            if is_level:
                delays = columns.tags_codes[rows[mine]] - columns.store_times[rows[mine]]
                mine, values = mine[delays >= 0], (values + delays)[delays >= 0]  # else the record names no level
            if len(mine) and (is_level or key in batches):
                found.units.setdefault(key, []).append((columns.places[rows[mine]], values))


def _is_in(topic: str, keys: set[QueueKey]) -> bool:
    return any(key.topic == topic for key in keys)


def _write_units(
    disk: Disk, queue: ConsumeQueue, places: NDArray[np.int64], values: NDArray[np.int64], changes: Changes
) -> None:
    """Have the units of the records at `places`, which ascend, say `values`."""
    name = "store_timestamp" if queue.layout is BATCH_UNIT else "tags_code"
    end, size = queue.search_written_end(), queue.layout.itemsize
    first = queue.first_from(int(places[0]), end)
    for segment in queue.run.segments:
        begin, until = max(first, -(-segment.begin // size)), min(end, segment.end // size)
        for at in range(begin, until, _UNITS_AT_ONCE):
            units = queue.run.read(at, min(at + _UNITS_AT_ONCE, until)).copy()
            found = units["physical_offset"].astype(np.int64)
            rows = np.minimum(np.searchsorted(places, found), len(places) - 1)
            wrong = (places[rows] == found) & (units[name] != values[rows])
            if wrong.any():
                units[name][wrong] = values[rows][wrong]
                with disk.open(segment.path) as file:
                    file.write(at * size - segment.begin, units.tobytes())
                changes.note_file(segment.path)
    queue.run.close()


def _write_block(disk: Disk, log: SoundLog, retimed: RetimedBlock, changes: Changes) -> None:
    """Write the records from the first to the last one that changes: the same bytes but for their store times."""
    whole, positions = retimed.block.whole, retimed.time_positions()
    begin, end = int(positions[0]), int(positions[-1]) + _TIME_BYTES
    data = whole.data[begin:end].copy()
    numbers: NDArray[np.int64] = np.ndarray((len(data) - _TIME_BYTES + 1,), ">i8", data, strides=(1,))
    numbers[positions - begin] = retimed.times
    place = retimed.block.begin + begin
    segment = log.segments.holding(place)
    assert segment is not None, place
    with disk.open(segment.path) as file:
        file.write(place - segment.begin, data)
    changes.note_file(segment.path)


def _write_last(disk: Disk, log: SoundLog, place: int, time_ms: int) -> None:
    """Write the store time of the last record, for good.

    Where it lies across a sector's edge a power cut could leave parts of two times. So the part with the low digits is
    on disk before the other one is written: then the time is never less than those before it.
    """
    segment = log.segments.holding(place)
    assert segment is not None, place
    position, data = place - segment.begin, time_ms.to_bytes(_TIME_BYTES, "big")
    high = min(_SECTOR_BYTES - position % _SECTOR_BYTES, _TIME_BYTES)
    with disk.open(segment.path) as file:
        if high < _TIME_BYTES:
            file.write(position + high, data[high:])
            file.sync()
        file.write(position, data[:high])
        file.sync()
