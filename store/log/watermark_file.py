"""Where the watermark lies, read and written: see `store/format/watermark.py` for what it says."""

from dataclasses import replace

from rmq_spark.store.disk import files, host
from rmq_spark.store.disk.changing import Disk
from rmq_spark.store.disk.lock_probe import seems_locked
from rmq_spark.store.format import filenames
from rmq_spark.store.format.watermark import SLOT_BYTES, SLOT_COUNT, Watermark, decode_slots, encode_slot

SIDE_FOLDER = "rmq"  # below the store's folder: what RocketMQ does not know
WATERMARK = "watermark"


def watermark_path(root: str) -> str:
    """Return the path of a store's watermark."""
    return files.join(root, SIDE_FOLDER, WATERMARK)


def read_watermark(root: str) -> Watermark | None:
    """Return a store's newest watermark, None without one that can be read."""
    return read_watermarks(root)[0]


def read_watermarks(root: str) -> tuple[Watermark | None, Watermark | None]:
    """Return a store's newest watermark and its newest settled one, from one look at the file; None without one."""
    return decode_slots(files.read_small(watermark_path(root)) or b"")


def read_settled_watermark(root: str) -> Watermark | None:
    """Return the watermark of the last time that the store was settled, None without one."""
    return read_watermarks(root)[1]


def write_watermark(disk: Disk, root: str, note: Watermark) -> Watermark:
    """Write the note that follows the last one, and return it. A crash leaves the one before it or this one.

    A settled one is on disk for good when this returns.
    """
    path = watermark_path(root)
    note = replace(
        note, boot=host.boot_id(), number=note.number + 1, settled_number=note.settled_number + note.is_settled
    )
    position, slot = encode_slot(note)
    if files.file_size(path) < 0:
        disk.make_folder(files.parent(path))
        disk.create(path, SLOT_COUNT * SLOT_BYTES)
        disk.sync_folder(files.parent(path))
    with disk.open(path) as file:
        file.write(position, slot)
        if note.is_settled:
            file.sync()
    return note


def is_at_work(note: Watermark | None) -> bool:
    """Say whether our writers are at work, between two sections: all up to the watermark is whole, if not synced."""
    return (
        note is not None
        and not note.is_open
        and not note.is_settled
        and bool(note.boot)
        and note.boot == host.boot_id()
    )


def has_failed_sync(root: str) -> bool:
    """Say whether a sync of the store's files failed in this boot, and nobody has repeated it."""
    note = read_watermark(root)
    if note is None or not note.is_syncing or note.boot != host.boot_id():
        return False
    # A writer at work syncs while it holds the lock, and writes the next note before it releases it.
    return not seems_locked(files.join(root, filenames.LOCK)) and read_watermark(root) == note
