"""The rebuild file of a store lists what a repair rebuilds from the log. Also keeps copies of replaced config files.

`rmq/rebuild` lists queues, and may list the key index. For its format see `store/format/own_files.py`. Readers refuse
the listed queues, because these may have only a part of their entries. The next writer removes the remaining files of
the listed queues and index, and rebuilds them from the log, see `store/log/recovery.py`.

`rmq/before-repair/` contains config files as they were before a repair or a recovery replaced them.
"""

from collections.abc import Callable

from rmq_spark.store.disk import files
from rmq_spark.store.disk.write import Disk
from rmq_spark.store.errors import DamageError
from rmq_spark.store.format import file_names as filenames
from rmq_spark.store.format.own_files import Rebuild, decode_rebuild, encode_rebuild
from rmq_spark.store.log.store_state import SIDE_FOLDER
from rmq_spark.store.model import QueueKey

KEPT = "before-repair"


def keep_file(disk: Disk, root: str, path: str, now_ms: int) -> None:
    """Copy a file that is about to be replaced, because even a damaged file may contain more than its replacement.

    The copy is in `rmq/before-repair/`, and its name ends with the time `now_ms`.
    """
    content = files.read_small(path)
    if content:
        folder = files.join(root, SIDE_FOLDER, KEPT)
        disk.make_folder(folder)
        # The copy's folder must be durable before the caller replaces the file. Otherwise a power cut could remove both
        # the copy and the replaced file. `replace` syncs the copy and its name in the folder.
        disk.sync_folder(files.join(root, SIDE_FOLDER))
        disk.replace(files.join(folder, f"{path.rpartition('/')[2]}.{now_ms}"), content)


REBUILD = "rebuild"
_TREES = (filenames.CONSUME_QUEUE, filenames.BATCH_CONSUME_QUEUE, filenames.CONSUME_QUEUE_EXT)


def rebuild_path(root: str) -> str:
    """Return the path of a store's rebuild file."""
    return files.join(root, SIDE_FOLDER, REBUILD)


def read_rebuild(root: str) -> Rebuild | None:
    """Return the content of a store's rebuild file.

    Return None if the file does not exist, and a Rebuild without queues if it is damaged.
    """
    data = files.read_small(rebuild_path(root))
    return None if data is None else decode_rebuild(data) or Rebuild()


def write_rebuild(disk: Disk, root: str, rebuild: Rebuild) -> None:
    """Add the queues and the index of `rebuild` to the rebuild file, durably. Create the file if it is missing."""
    before = read_rebuild(root) or Rebuild()
    disk.make_folder(files.join(root, SIDE_FOLDER))
    disk.sync_folder(root)
    joined = Rebuild(before.queues | rebuild.queues, before.has_index or rebuild.has_index)
    disk.replace(rebuild_path(root), encode_rebuild(joined))


def remove_rebuild(disk: Disk, root: str) -> None:
    """Remove the rebuild file, durably. Call it when everything that the file lists is complete."""
    path = rebuild_path(root)
    disk.remove(path)
    disk.sync_folder(files.parent(path))


def take_away(disk: Disk, root: str, rebuild: Rebuild, heartbeat: Callable[[], None]) -> None:
    """Remove the files of the listed queues, and of the key index if it is listed, durably.

    All of them are removed before any is rebuilt.
    """
    for key in sorted(rebuild.queues):
        for tree in _TREES:
            heartbeat()
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
    # Newest first, so that a crash in between leaves the beginning of a queue without a gap.
    for name in reversed(names):
        disk.remove(files.join(folder, name))
    if names:
        disk.sync_folder(folder)


def being_rebuilt(root: str, key: QueueKey) -> DamageError:
    """Return the error for a queue that is listed in the rebuild file."""
    folder = files.join(root, filenames.CONSUME_QUEUE, key.topic, str(key.queue_id))
    return DamageError(
        f"a repair is rebuilding queue {key} from the log, and has not finished",
        folder,
        0,
        "all entries of the queue",
        "a part of them",
        "Wait until the repair has finished. If it was interrupted, run rmq_spark.repair again.",
    )
