"""`rmq/settings.json`, which marks a store as one that we wrote to, and `rmq/broker.conf` beside it.

The first says which version of our own side files the store has, its id, what retention may delete, and how messages
are delayed. The second is for people: the lines that a broker's configuration needs to load a store with files of these
sizes, and to deliver when we would.
"""

from rmq_spark.store.disk import files
from rmq_spark.store.disk.changing import Disk
from rmq_spark.store.errors import DamageError, StorePathError
from rmq_spark.store.format.store_settings import (
    TIMER_MAX_DELAY_S,
    VERSION,
    OtherVersion,
    StoreSettings,
    decode_settings,
    encode_settings,
)
from rmq_spark.store.log.file_sizes import FileSizes
from rmq_spark.store.log.watermark_file import SIDE_FOLDER

SETTINGS = "settings.json"
BROKER_CONF = "broker.conf"
_NEXT_STEP = (
    "Restore the file from a copy. Or remove it: the next write makes a new one, in which the store has another id, no "
    "retention until set_retention is called again, and RocketMQ's table of delay levels until another one is given."
)


def check_settings(root: str) -> StoreSettings | None:
    """Return what the store's settings say, None for a store that has none: a broker's own.

    Raises StorePathError for another version of ours and DamageError for a file that is not readable.
    """
    found = read_settings(root)
    if isinstance(found, OtherVersion):
        path = files.join(root, SIDE_FOLDER, SETTINGS)
        raise StorePathError(
            f"{path} is of version {found.version!r}; this release writes version {VERSION}. Write to the store with "
            "the release that made it, or with a newer one. Reading works with any."
        )
    return found


def read_settings(root: str) -> StoreSettings | OtherVersion | None:
    """Return the same for readers, whom another version does not concern. Raises DamageError."""
    path = files.join(root, SIDE_FOLDER, SETTINGS)
    data = files.read_small(path)
    if not data:
        return None
    try:
        return decode_settings(data)
    except ValueError as error:
        raise DamageError("not the settings of a store", path, 0, "JSON", str(error), _NEXT_STEP) from error


def settings_stamp(root: str) -> tuple[int, int]:
    """Return by what changed settings are told from those that were read: length and time of the file."""
    path = files.join(root, SIDE_FOLDER, SETTINGS)
    return files.file_size(path), files.modified_ms(path)


def write_settings(disk: Disk, root: str, settings: StoreSettings, sizes: FileSizes | None = None) -> None:
    """Write the settings of a store, and with `sizes` the fragment for a broker. Only under the store's lock."""
    folder = files.join(root, SIDE_FOLDER)
    disk.make_folder(folder)
    if sizes is not None:
        disk.replace(files.join(folder, BROKER_CONF), _broker_conf(root, sizes, settings).encode())
    disk.replace(files.join(folder, SETTINGS), encode_settings(settings))


def _broker_conf(root: str, sizes: FileSizes, settings: StoreSettings) -> str:
    longest_s = TIMER_MAX_DELAY_S if settings.timer_max_delay_s is None else settings.timer_max_delay_s
    lines = {
        "storePathRootDir": root,
        "mappedFileSizeCommitLog": sizes.segment_bytes,
        "mappedFileSizeConsumeQueue": sizes.queue_file_bytes,
        "mapperFileSizeBatchConsumeQueue": sizes.batch_queue_file_bytes,
        "maxHashSlotNum": sizes.index.slot_count,
        "maxIndexNum": sizes.index.unit_count,
        # Else a broker that recovers after a crash drops index files and puts only its last segment's keys again.
        "messageIndexSafe": "true",
        # With another table a broker delivers at other times, and leaves levels that it does not have undelivered.
        "messageDelayLevel": settings.levels.text,
        "timerMaxDelaySec": longest_s,  # 4.9 passes over it
    }
    return "".join(f"{name}={value}\n" for name, value in lines.items())
