"""Store times ahead of the clock: how a check finds them, and how a repair sets them back.

The store times in a log never decrease. So if one message is appended while the clock is wrong and ahead, all later
messages get at least that time, even after the clock was corrected. Search by time, retention by age and delay levels
then do not work until the clock reaches that time. A repair overwrites the eight bytes of the store time in each of
these records. No record moves, so offsets, entries and message ids remain valid.

A record whose time is not ahead of the clock keeps it. Any other record gets its born time, which comes from the clock
of its sender. If that is earlier than the previous record's time, it gets the previous record's time. If it is ahead of
this machine's clock, it gets the time of the clock. So times never decrease.

If times decrease and do not increase again, readers and recovery treat the rest of the log as not valid
(`log/record_chain.py`). So the last record keeps its time, which is the largest, until all other changes are on disk.
If the repair crashes before that, the last message is still ahead of the clock, so the next check finds it and the next
repair starts again.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import pyarrow.compute as pc
from numpy.typing import NDArray

from rmq_spark.store.disk import files
from rmq_spark.store.disk.write import Disk
from rmq_spark.store.errors import DamageError, StoreChangedError
from rmq_spark.store.format import file_names as filenames
from rmq_spark.store.format.consume_queue_entry import BATCH_UNIT
from rmq_spark.store.format.delay_levels import DelayLevels
from rmq_spark.store.format.properties import RECORD_CRC
from rmq_spark.store.format.record import RECORD_HEAD
from rmq_spark.store.format.record_batch import born_host_shift
from rmq_spark.store.log.commit_log_writer import DirtyFiles
from rmq_spark.store.log.consume_queue import ConsumeQueue
from rmq_spark.store.log.topics import TopicTable
from rmq_spark.store.model import LAST_SECONDS_MS, QueueKey
from rmq_spark.store.names import SCHEDULE_TOPIC
from rmq_spark.store.tools.finding import field_position
from rmq_spark.store.tools.log_walk import LogBlock, LogFault, LogWalk, TolerantCommitLog

_TIME_AT = field_position(RECORD_HEAD, "store_timestamp")
_TIME_BYTES = 8
_DECREASE_MS = 1000  # a broker's store times may decrease by less than this
_SECTOR_BYTES = 512  # the smallest unit that a disk writes
_CHUNK_ENTRIES = 1 << 16


@dataclass(frozen=True, slots=True)
class RetimedBlock:
    """A block of records, and the changes of their store times.

    `rows` are the indexes of the records that change, and `times` are their new store times (ms).
    """

    block: LogBlock
    rows: NDArray[np.intp]
    times: NDArray[np.int64]

    def time_positions(self) -> NDArray[np.int64]:
        """Return the position of the store time of each row, in the block's data (bytes)."""
        whole = self.block.whole
        positions = whole.positions[self.rows] + _TIME_AT + born_host_shift(whole.sys_flags[self.rows])
        return positions.astype(np.int64)


@dataclass
class WrongTimes:
    """The changes that a repair of the store times would make. One scan of the log counts them.

    `messages` is the number of records that change. `refusal` is the reason why the repair must not be done, or None if
    it may be done.
    """

    messages: int = 0
    begin: int = -1  # physical offset of the first record that changes
    last: int = -1  # physical offset of the log's last record
    refusal: str | None = None
    # Some consume-queue entries contain a time. For each queue with such entries: pairs of arrays with the physical
    # offsets of the records, and the new times in their entries.
    entries: dict[QueueKey, list[tuple[NDArray[np.int64], NDArray[np.int64]]]] = field(default_factory=dict)


def find_wrong_times(root: str, log: TolerantCommitLog, levels: DelayLevels, end: int, now_ms: int) -> WrongTimes:
    """Return the changes that set store times ahead of the clock back. Changes nothing.

    `now_ms` is the time of the clock. The whole log is read up to its end, `end` (physical offset). Raises DamageError
    if the log has bytes that are not records.
    """
    found = WrongTimes()
    batches = {key for key, queue in TopicTable(root).queues.items() if queue.layout is BATCH_UNIT}
    newest_ms, last_ms, has_crc = -1, -1, False
    for retimed in _retimed_blocks(log, levels, end, now_ms):
        columns = retimed.block.columns
        newest_ms, last_ms = max(newest_ms, int(columns.store_times.max())), int(columns.store_times[-1])
        found.last = int(columns.places[-1])
        if not len(retimed.rows):
            continue
        found.begin = int(columns.places[retimed.rows[0]]) if not found.messages else found.begin
        found.messages += len(retimed.rows)
        has_crc = has_crc or pc.any(pc.match_substring(retimed.block.whole.texts(), RECORD_CRC)).as_py() is True
        _add_entries(found, retimed, batches)
    if now_ms < LAST_SECONDS_MS:
        found.refusal = "this machine's clock is before 2001: set it first"
    elif last_ms <= newest_ms - _DECREASE_MS:
        found.refusal = "the last message has an earlier store time than a previous one: send a message, and plan again"
    elif has_crc:
        found.refusal = f"records have a checksum of their store time (property {RECORD_CRC})"
    elif any(files.list_folder(files.join(root, filenames.CONSUME_QUEUE_EXT))):
        found.refusal = f"{filenames.CONSUME_QUEUE_EXT}/ has copies of the store times"
    return found


def write_times(
    root: str,
    disk: Disk,
    log: TolerantCommitLog,
    levels: DelayLevels,
    end: int,
    now_ms: int,
    heartbeat: Callable[[], None],
) -> None:
    """Write the new store times into the log, which ends at `end`, and into the entries that contain them.

    The caller must hold the store's lock. `abort` must exist, and the checkpoint must not contain any of these times.
    When this returns, all changes are on disk. Raises StoreChangedError if the changes are refused
    (`WrongTimes.refusal`), because the plan was made for another state of the store.
    """
    found = find_wrong_times(root, log, levels, end, now_ms)
    if found.refusal is not None:
        raise StoreChangedError(
            f"cannot set the store times of {root} back: another program wrote to the store since the plan was made; "
            f"expected the store of the plan. {found.refusal}. Plan the repair again."
        )
    changes = DirtyFiles(disk, (root,), heartbeat=heartbeat)
    # Write entries first: after a crash, a record with a right time is not changed again, so its entry must be right.
    queues = TopicTable(root).queues
    for key, parts in found.entries.items():
        if key in queues:
            offsets, values = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
            _write_entries(disk, queues[key], offsets, values, changes)
    changes.sync()
    last: tuple[int, int] | None = None
    for retimed in _retimed_blocks(log, levels, end, now_ms):
        heartbeat()
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


def _blocks(log: TolerantCommitLog, levels: DelayLevels, end: int) -> Iterator[LogBlock]:
    for step in LogWalk(log, levels).run(log.segments.begin, end):
        if isinstance(step, LogFault):
            segment = log.segments.holding(step.begin)
            raise DamageError(
                "bytes of the commit log that are not records",
                segment.path if segment else filenames.COMMIT_LOG,
                step.begin - (segment.begin if segment else 0),
                step.expected,
                step.found,
            )
        yield step


def _retimed_blocks(log: TolerantCommitLog, levels: DelayLevels, end: int, now_ms: int) -> Iterator[RetimedBlock]:
    """Yield all blocks of the log, each with the changes of its store times. A block may have no changes."""
    previous_ms, is_ahead = -1, False
    for block in _blocks(log, levels, end):
        stored, first = block.columns.store_times, 0
        if not is_ahead:
            ahead = stored > now_ms
            is_ahead = bool(ahead.any())
            first = int(np.argmax(ahead)) if is_ahead else len(stored)
            previous_ms = max(previous_ms, int(stored[:first].max(initial=-1)))
        if first == len(stored):
            yield RetimedBlock(block, np.zeros(0, np.intp), np.zeros(0, np.int64))
            continue
        born = block.whole.field("born_timestamp").astype(np.int64)[first:]
        # A born time before 2001 is not used, because the clock of the sender was never set.
        fallback_ms = previous_ms if previous_ms >= 0 else now_ms
        born = np.where(born < LAST_SECONDS_MS, fallback_ms, np.minimum(born, now_ms))
        wanted = np.where(stored[first:] <= now_ms, stored[first:], born)
        times = np.maximum.accumulate(np.maximum(wanted, previous_ms))
        previous_ms = int(times[-1])
        rows = np.flatnonzero(times != stored[first:])
        yield RetimedBlock(block, first + rows, times[rows])


def _add_entries(found: WrongTimes, retimed: RetimedBlock, batches: set[QueueKey]) -> None:
    """Add the new times for the consume-queue entries of the records that change to `found`.

    Entries of delay levels contain a due time, and entries of batch queues contain the store time. Other entries
    contain no time.
    """
    columns, rows = retimed.block.columns, retimed.rows
    batch_topics = {key.topic for key in batches}
    for at, topic in enumerate(columns.topics):
        is_level = topic == SCHEDULE_TOPIC
        if not is_level and topic not in batch_topics:
            continue
        of_topic = np.flatnonzero(columns.topic_numbers[rows] == at)
        for queue_id in np.unique(columns.queue_ids[rows[of_topic]]).tolist():
            chosen = of_topic[columns.queue_ids[rows[of_topic]] == queue_id]
            values, key = retimed.times[chosen], QueueKey(topic, queue_id)
            if is_level:
                delays = columns.tags_codes[rows[chosen]] - columns.store_times[rows[chosen]]
                chosen, values = chosen[delays >= 0], (values + delays)[delays >= 0]  # skip messages without a level
            if len(chosen) and (is_level or key in batches):
                found.entries.setdefault(key, []).append((columns.places[rows[chosen]], values))


def _write_entries(
    disk: Disk, queue: ConsumeQueue, offsets: NDArray[np.int64], values: NDArray[np.int64], changes: DirtyFiles
) -> None:
    """Write new times into the entries of one queue.

    `offsets` are the physical offsets of the entries' records, ascending, and `values` are the new times (ms).
    """
    name = "store_timestamp" if queue.layout is BATCH_UNIT else "tags_code"
    end, size = queue.search_written_end(), queue.layout.itemsize
    first = queue.first_from(int(offsets[0]), end)
    for segment in queue.run.segments:
        begin, until = max(first, -(-segment.begin // size)), min(end, segment.end // size)
        for at in range(begin, until, _CHUNK_ENTRIES):
            entries = queue.run.read(at, min(at + _CHUNK_ENTRIES, until)).copy()
            found = entries["physical_offset"].astype(np.int64)
            rows = np.minimum(np.searchsorted(offsets, found), len(offsets) - 1)
            wrong = (offsets[rows] == found) & (entries[name] != values[rows])
            if wrong.any():
                entries[name][wrong] = values[rows][wrong]
                with disk.open(segment.path) as file:
                    file.write(at * size - segment.begin, entries.tobytes())
                changes.note_file(segment.path)
    queue.run.close()


def _write_block(disk: Disk, log: TolerantCommitLog, retimed: RetimedBlock, changes: DirtyFiles) -> None:
    """Write the new store times of one block. The bytes between them are written again, unchanged."""
    whole, positions = retimed.block.whole, retimed.time_positions()
    begin, end = int(positions[0]), int(positions[-1]) + _TIME_BYTES
    data = whole.data[begin:end].copy()
    numbers: NDArray[np.int64] = np.ndarray((len(data) - _TIME_BYTES + 1,), ">i8", data, strides=(1,))
    numbers[positions - begin] = retimed.times
    physical_offset = retimed.block.begin + begin
    segment = log.segments.holding(physical_offset)
    assert segment is not None, physical_offset
    with disk.open(segment.path) as file:
        file.write(physical_offset - segment.begin, data)
    changes.note_file(segment.path)


def _write_last(disk: Disk, log: TolerantCommitLog, physical_offset: int, time_ms: int) -> None:
    """Write the store time of the log's last record, and sync it.

    If the eight bytes are in two sectors of the disk, a power failure could leave one half of the old time and one half
    of the new one. So the low bytes are written and synced before the high bytes. Then such a mixed time is at least
    as large as the new time, so it is not less than the times of earlier records.
    """
    segment = log.segments.holding(physical_offset)
    assert segment is not None, physical_offset
    position, data = physical_offset - segment.begin, time_ms.to_bytes(_TIME_BYTES, "big")
    high = min(_SECTOR_BYTES - position % _SECTOR_BYTES, _TIME_BYTES)
    with disk.open(segment.path) as file:
        if high < _TIME_BYTES:
            file.write(position + high, data[high:])
            file.sync()
        file.write(position, data[:high])
        file.sync()
