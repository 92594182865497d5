"""`rmq/before-repair/`: what config files held before a repair, or a recovery, replaced them."""

from rmq_spark.store.disk import files
from rmq_spark.store.disk.changing import Disk
from rmq_spark.store.log.watermark_file import SIDE_FOLDER

KEPT = "before-repair"


def keep_file(disk: Disk, root: str, path: str, now_ms: int) -> None:
    """Keep what a file holds that is about to be replaced: half of a file may still tell more than the whole one."""
    held = files.read_small(path)
    if held:
        folder = files.join(root, SIDE_FOLDER, KEPT)
        disk.make_folder(folder)
        # The new file must not be on disk before the folder of the old one is: a power cut would leave neither name
        # nor bytes of what was replaced. `replace` below syncs the file and its name in that folder.
        disk.sync_folder(files.join(root, SIDE_FOLDER))
        disk.replace(files.join(folder, f"{path.rpartition('/')[2]}.{now_ms}"), held)
