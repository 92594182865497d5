"""What is old goes: whole segments of the log, then the files of queues and of the key index that only spoke of them.

Only this module deletes messages, and only when it is called or a setting of ours says so. Age is the store time of
the messages, not that of the file: in a store that was copied all files are young, in an unpacked archive all old.
Source: MappedFileQueue#deleteExpiredFileByTime, CleanConsumeQueueService, IndexService#deleteExpiredFile (5.3).
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass

from rmq_spark.store.disk import files
from rmq_spark.store.format.record import Record
from rmq_spark.store.log.segments import Segment
from rmq_spark.store.log.store_files import StoreFiles
from rmq_spark.store.log.topics import TopicTable

_LOG = logging.getLogger("rmq_spark")


@dataclass(frozen=True, slots=True)
class Expired:
    """What retention deleted: segments of the log, files of queues and of the index, and bytes of all the segments.

    Where somebody needed segments that were to go: the file that says so, their bytes, and whether that is not only for
    a while: somebody has to mend something first.
    """

    segments: int = 0
    queue_files: int = 0
    index_files: int = 0
    size_bytes: int = 0
    held_by: str | None = None
    held_bytes: int = 0
    is_held_for_good: bool = False


@dataclass(frozen=True, slots=True)
class Needed:
    """From which physical offset on the log is needed, and for what: the path of the file that says so."""

    physical_offset: int
    path: str
    is_stuck: bool = False  # not only for a while: somebody has to mend something first


def expire(
    store: StoreFiles,
    max_age_ms: int | None = None,
    max_bytes: int | None = None,
    needed_from: Callable[[], Needed | None] = lambda: None,
) -> Expired:
    """Delete the oldest segments whose messages are all older than `max_age_ms`, and those beyond `max_bytes` of log.

    The last segment stays in any case, and so does the one that holds the physical offset `needed_from` with all
    behind it: somebody has yet to look there. It is asked only if there is something to delete, and what is returned
    names it if it held something back. A file that a reader
    holds open stays readable for that reader. A crash on the way leaves files of queues that speak of nothing; the
    next call deletes them.
    """
    segments = store.log.segments.segments
    keep = old = _first_kept(store, segments, max_age_ms, max_bytes)
    needed = needed_from() if keep else None
    if needed is not None:
        keep = min(keep, sum(segment.end <= needed.physical_offset for segment in segments))
    held_bytes = sum(segment.size for segment in segments[keep:old])
    held = (needed.path, held_bytes, needed.is_stuck) if needed is not None and held_bytes else (None, 0, False)
    if not keep:
        return Expired(0, 0, 0, 0, *held)
    size_bytes = 0
    for segment in segments[:keep]:
        size_bytes += segment.size
        store.disk.remove(segment.path)
    for folder in sorted({files.parent(segment.path) for segment in segments[:keep]}):
        store.disk.sync_folder(folder)
    store.log_writer.close()
    store.log.look()
    begin = store.log.segments.begin
    queue_files = _expire_queues(store, begin)
    index_files = store.index.expire(begin)
    store.sync_changes()
    store.queues.forget()
    found = Expired(keep, queue_files, index_files, size_bytes, *held)
    _LOG.info("rmq: retention in %s: the log begins at %d now, %s", store.root, begin, found)
    return found


def _first_kept(store: StoreFiles, segments: tuple[Segment, ...], max_age_ms: int | None, max_bytes: int | None) -> int:
    """Return how many segments, from the oldest on, are to go."""
    # The segment with the last message stays, though the log may end at the begin of the next one.
    last = max((at for at, segment in enumerate(segments) if segment.begin < max(store.note.end, 1)), default=0)
    keep = 0
    if max_bytes is not None:
        held = store.note.end - (segments[0].begin if segments else 0)
        while keep < last and held > max_bytes:
            held -= segments[keep].size
            keep += 1
    if max_age_ms is not None:
        while keep < last:
            # Store times never run back, so the next segment's first one is an upper bound for all of these.
            following = store.log.record_at(segments[keep + 1].begin)
            if not isinstance(following, Record) or following.store_timestamp + max_age_ms > store.now_ms():
                break
            keep += 1
    return keep


def _expire_queues(store: StoreFiles, log_begin: int) -> int:
    """Delete leading files of queues of which the last unit lies before the log, never a queue's last file."""
    count = 0
    for queue in TopicTable(store.root).queues.values():
        segments, unit_bytes = queue.run.segments, queue.layout.itemsize
        gone = 0
        for segment in segments[:-1]:
            unit = segment.end // unit_bytes - 1
            units = queue.run.read(unit, unit + 1)
            if not len(units) or int(units[0]["physical_offset"]) >= log_begin:
                break
            store.disk.remove(segment.path)
            gone += 1
        if gone:
            store.disk.sync_folder(queue.run.folder)
        queue.run.close()
        count += gone
    return count
