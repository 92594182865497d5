"""The note of a rebuild, read and written, and the files that it names taken away: see `store/format/rebuild_note.py`.

Readers refuse the queues that the note names, as they may have a part of their units. The next writer removes what is
left of them, and makes them from the log: `store/log/recovery.py`.
"""

from collections.abc import Callable

from rmq_spark.store.disk import files
from rmq_spark.store.disk.changing import Disk
from rmq_spark.store.errors import DamageError
from rmq_spark.store.format import filenames
from rmq_spark.store.format.rebuild_note import Rebuild, decode_rebuild, encode_rebuild
from rmq_spark.store.log.watermark_file import SIDE_FOLDER
from rmq_spark.store.units import QueueKey

REBUILD = "rebuild"
_TREES = (filenames.CONSUME_QUEUE, filenames.BATCH_CONSUME_QUEUE, filenames.CONSUME_QUEUE_EXT)


def rebuild_path(root: str) -> str:
    """Return the path of a store's note of a rebuild."""
    return files.join(root, SIDE_FOLDER, REBUILD)


def read_rebuild(root: str) -> Rebuild | None:
    """Return what is being made anew in a store, None without a note. A damaged note names nothing."""
    data = files.read_small(rebuild_path(root))
    return None if data is None else decode_rebuild(data) or Rebuild()


def write_rebuild(disk: Disk, root: str, rebuild: Rebuild) -> None:
    """Write the note, durably. What an earlier one names stays in it."""
    before = read_rebuild(root) or Rebuild()
    disk.make_folder(files.join(root, SIDE_FOLDER))
    disk.sync_folder(root)
    joined = Rebuild(before.queues | rebuild.queues, before.has_index or rebuild.has_index)
    disk.replace(rebuild_path(root), encode_rebuild(joined))


def remove_rebuild(disk: Disk, root: str) -> None:
    """Remove the note, durably: all that it names is complete."""
    path = rebuild_path(root)
    disk.remove(path)
    disk.sync_folder(files.parent(path))


def take_away(disk: Disk, root: str, rebuild: Rebuild, note_progress: Callable[[], None]) -> None:
    """Remove the files that the note names, durably: all of them are removed before anything is made."""
    for key in sorted(rebuild.queues):
        for tree in _TREES:
            note_progress()
            empty_folder(disk, files.join(root, filenames.queue_folder(key.topic, key.queue_id, tree)))
    if rebuild.has_index:
        empty_folder(disk, files.join(root, filenames.INDEX))


def empty_folder(disk: Disk, folder: str) -> None:
    """Remove the files of a queue, or of the key index, durably. Files with other names stay."""
    listed = files.list_folder(folder)
    names = [
        name
        for name, is_folder in listed
        if not is_folder and (filenames.parse_segment_name(name) is not None or filenames.is_index_name(name))
    ]
    # Newest first: a crash in between leaves the begin of a queue, and no gap.
    for name in reversed(names):
        disk.remove(files.join(folder, name))
    if names:
        disk.sync_folder(folder)


def being_rebuilt(root: str, key: QueueKey) -> DamageError:
    """Return the error for a queue that the note names."""
    folder = files.join(root, filenames.CONSUME_QUEUE, key.topic, str(key.queue_id))
    return DamageError(
        f"a repair makes queue {key} anew from the log, and has not finished",
        folder,
        0,
        "all units of the queue",
        "a part of them",
        "Wait until the repair has finished. If it was interrupted, run rmq_spark.repair again.",
    )
