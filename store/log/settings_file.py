"""`rmq/settings.json`, which marks a store as one that we wrote to, and `rmq/broker.conf` beside it.

The first says which version of our own side files the store has, its id, and what retention may delete. The second is
for people: the lines that a broker's configuration needs to load a store with files of these sizes.
"""

import json
from dataclasses import dataclass
from typing import Any

from rmq_spark.store.disk import files
from rmq_spark.store.disk.changing import Disk
from rmq_spark.store.errors import DamageError, StorePathError
from rmq_spark.store.log.store_files import FileSizes
from rmq_spark.store.log.watermark_file import SIDE_FOLDER

VERSION = 1
SETTINGS = "settings.json"
BROKER_CONF = "broker.conf"


@dataclass(frozen=True, slots=True)
class StoreSettings:
    """What `rmq/settings.json` says: the store's id, and limits of retention (ms, bytes), None for none."""

    store_id: str
    retention_ms: int | None = None
    retention_bytes: int | None = None


def check_settings(root: str) -> StoreSettings | None:
    """Return what the store's settings say, None for a store that has none: a broker's own.

    Raises StorePathError for another version of ours and DamageError for a file that is not readable.
    """
    path = files.join(root, SIDE_FOLDER, SETTINGS)
    data = files.read_small(path)
    if not data:
        return None
    try:
        value: dict[str, Any] = json.loads(data)
        version = value["v"]
        if version == VERSION:
            return StoreSettings(value["storeId"], value.get("retentionMs"), value.get("retentionBytes"))
    except (ValueError, KeyError, TypeError) as error:
        raise DamageError("not the settings of a store", path, 0, "JSON", str(error)) from error
    raise StorePathError(
        f"{path} is of version {version!r}; this release writes version {VERSION}. Write to the store with the release "
        "that made it, or with a newer one. Reading works with any."
    )


def write_settings(disk: Disk, root: str, settings: StoreSettings, sizes: FileSizes | None = None) -> None:
    """Write the settings of a store, and with `sizes` the fragment for a broker. Only under the store's lock."""
    value = {
        "v": VERSION,
        "storeId": settings.store_id,
        "retentionMs": settings.retention_ms,
        "retentionBytes": settings.retention_bytes,
    }
    folder = files.join(root, SIDE_FOLDER)
    disk.make_folder(folder)
    if sizes is not None:
        disk.replace(files.join(folder, BROKER_CONF), _broker_conf(root, sizes).encode())
    disk.replace(files.join(folder, SETTINGS), json.dumps(value, indent=2).encode() + b"\n")


def _broker_conf(root: str, sizes: FileSizes) -> str:
    lines = {
        "storePathRootDir": root,
        "mappedFileSizeCommitLog": sizes.segment_bytes,
        "mappedFileSizeConsumeQueue": sizes.queue_file_bytes,
        "mapperFileSizeBatchConsumeQueue": sizes.batch_queue_file_bytes,
        "maxHashSlotNum": sizes.index.slot_count,
        "maxIndexNum": sizes.index.unit_count,
    }
    return "".join(f"{name}={value}\n" for name, value in lines.items())
