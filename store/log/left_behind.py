"""How whoever wrote a store last left it: at work, closed in order, or dead."""

import zlib

from rmq_spark.store.disk import files, host
from rmq_spark.store.disk.lock_probe import seems_locked
from rmq_spark.store.format import filenames
from rmq_spark.store.format.checkpoint import Checkpoint, decode_checkpoint
from rmq_spark.store.format.record import RECORD_HEAD
from rmq_spark.store.format.watermark import Watermark
from rmq_spark.store.log.chain import Closing, Left
from rmq_spark.store.log.commit_log import CommitLog
from rmq_spark.store.log.watermark_file import is_at_work, read_settled_watermark, read_watermark, read_watermarks


def how_left(path: str) -> Left:
    """Return how the store at `path` was left, and by when, as its `lock`, `abort` and watermark tell."""
    lock, abort = files.join(path, filenames.LOCK), files.join(path, filenames.ABORT)
    if seems_locked(lock):
        return Left(Closing.LIVE, files.modified_ms(lock), files.modified_ms(abort))
    checkpoint_ms = files.modified_ms(files.join(path, filenames.CHECKPOINT))
    lock_ms, started_ms = files.modified_ms(lock), files.modified_ms(abort)
    clean = files.file_size(abort) < 0
    if not clean and is_at_work(read_watermark(path)):
        return Left(Closing.LIVE, lock_ms, started_ms)
    return Left(Closing.CLOSED if clean else Closing.CRASHED, lock_ms + started_ms + checkpoint_ms, started_ms)


def read_checkpoint(path: str) -> Checkpoint:
    """Return what the checkpoint of the store at `path` says; an empty one where there is none."""
    checkpoint = files.join(path, filenames.CHECKPOINT)
    return decode_checkpoint(files.read_small(checkpoint) or b"", checkpoint)


def vouched_end(path: str, log: CommitLog) -> int | None:
    """Return the physical offset up to which our note guarantees every message its unit, None where it does not count.

    A broker that ran since has written the checkpoint. After a power cut only the note of what was settled counts. The
    next writer of ours makes no units for messages before this offset.
    """
    note = read_watermark(path)
    if note is not None and note.boot != host.boot_id():
        note = read_settled_watermark(path)
    if note is None or not note.boot:
        return None
    return note.end if _is_of(path, log, note) else None


def durable_end(path: str, log: CommitLog) -> int | None:
    """Return the physical offset up to which our note says that all was on disk for good before the power went.

    None if the machine has run on since the note, or it does not count: a broker has written. Recovery takes back what
    a power cut tore behind this offset; nobody was told that it would outlive one.
    """
    note, settled = read_watermarks(path)
    if note is None or settled is None or note.boot == host.boot_id() or settled.end < log.segments.begin:
        return None
    return settled.end if _is_of(path, log, settled) else None


def logged_end(path: str, log: CommitLog) -> int | None:
    """Return the physical offset behind which a writer of ours was at work when it died; None if none was.

    The machine has run on since. What stands behind it the next writer takes back, unless a unit speaks of it: then a
    broker has come in between.
    """
    note = read_watermark(path)
    if note is None or not note.is_open or note.boot != host.boot_id():
        return None
    return max(note.end, note.logged_end) if _is_of(path, log, note) else None


def _is_of(path: str, log: CommitLog, note: Watermark) -> bool:
    """Say whether a note speaks of the store as it is: its checkpoint and its last record are there."""
    page = files.read_small(files.join(path, filenames.CHECKPOINT)) or b""
    is_same_log = note.last_place < 0 or log.bytes_at(note.last_place, RECORD_HEAD.itemsize) == note.last_head
    return zlib.crc32(page) == note.checkpoint_crc and is_same_log


def index_safe_until_ms(path: str) -> int | None:
    """Return up to which store time the key index of the store at `path` is safe after a crash, None without one."""
    crashed = how_left(path).closing is Closing.CRASHED
    return read_checkpoint(path).index_msg_timestamp if crashed else None
