"""How whoever wrote a store last left it: at work, closed in order, or dead."""

from rmq_spark.store.disk import files
from rmq_spark.store.disk.lock_probe import seems_locked
from rmq_spark.store.format import filenames
from rmq_spark.store.format.checkpoint import Checkpoint, decode_checkpoint
from rmq_spark.store.log.chain import Closing, Left
from rmq_spark.store.log.watermark_file import is_at_work, read_watermark


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


def index_safe_until_ms(path: str) -> int | None:
    """Return up to which store time the key index of the store at `path` is safe after a crash, None without one."""
    crashed = how_left(path).closing is Closing.CRASHED
    return read_checkpoint(path).index_msg_timestamp if crashed else None
