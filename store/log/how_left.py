"""How whoever wrote a store last has left it, as a reader sees it: open, closed in order, or crashed."""

from rmq_spark.store.disk import files
from rmq_spark.store.disk.lock_probe import seems_locked
from rmq_spark.store.format import filenames
from rmq_spark.store.format.checkpoint import Checkpoint, decode_checkpoint
from rmq_spark.store.log.chain import Closing, Left
from rmq_spark.store.log.watermark_file import is_at_work, read_watermark


def how_left(root: str) -> Left:
    """Return how the store was left, and when; two looks with nothing between them are equal."""
    lock, abort = files.join(root, filenames.LOCK), files.join(root, filenames.ABORT)
    if seems_locked(lock):
        return Left(Closing.LIVE, files.modified_ms(lock), files.modified_ms(abort))
    checkpoint_ms = files.modified_ms(files.join(root, filenames.CHECKPOINT))
    lock_ms, started_ms = files.modified_ms(lock), files.modified_ms(abort)
    clean = files.file_size(abort) < 0
    if not clean and is_at_work(read_watermark(root)):
        return Left(Closing.LIVE, lock_ms, started_ms)
    return Left(Closing.CLEAN if clean else Closing.CRASHED, lock_ms + started_ms + checkpoint_ms, started_ms)


def read_checkpoint(root: str) -> Checkpoint:
    """Return what the store's checkpoint says, all zero without one."""
    return decode_checkpoint(files.read_small(files.join(root, filenames.CHECKPOINT)) or b"")
