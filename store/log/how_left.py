"""How a store was left: by a lock, by `abort`, and by our own note. Asked without taking a lock."""

from rmq_spark.store.disk import files
from rmq_spark.store.disk.lock_probe import seems_locked
from rmq_spark.store.format import filenames
from rmq_spark.store.log.chain import Closing, Left
from rmq_spark.store.log.watermark_file import is_at_work, read_watermark


def how_left(root: str) -> Left:
    """Return how the store at `root` was left, and when its writers last said so."""
    lock, abort = files.join(root, filenames.LOCK), files.join(root, filenames.ABORT)
    if seems_locked(lock):
        return Left(Closing.LIVE, files.modified_ms(lock), files.modified_ms(abort))
    checkpoint_ms = files.modified_ms(files.join(root, filenames.CHECKPOINT))
    lock_ms, started_ms = files.modified_ms(lock), files.modified_ms(abort)
    clean = files.file_size(abort) < 0
    if not clean and is_at_work(read_watermark(root)):
        return Left(Closing.LIVE, lock_ms, started_ms)
    return Left(Closing.CLEAN if clean else Closing.CRASHED, lock_ms + started_ms + checkpoint_ms, started_ms)
