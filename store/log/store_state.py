"""The state of a store: its folders, settings, watermark and checkpoint, and how its last writer left it.

- Store state: whether the store is in use, was shut down cleanly or crashed, and up to where the watermark guarantees
  the log.
- `rmq/settings.json` marks a store that our writers use. It contains the version of our side files (those in `rmq/`),
  the store's id, retention and delays.
- `rmq/broker.conf` is for people. It has the lines that a broker's configuration needs, so that the broker can load
  files of these sizes and delivers at the same times as rmq-spark.
- Broker version: which brokers a store is for, if its settings do not say it. It is found by the files that only
  RocketMQ 5 writes. A 4.9 broker delivers messages of SCHEDULE_TOPIC_XXXX, but has no timer, so it would never deliver
  messages of rmq_sys_wheel_timer.
- Store kind: whether a folder is a store that this project can read.
"""

import zlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

from rmq_spark.store.disk import files, host
from rmq_spark.store.disk.locks import seems_locked
from rmq_spark.store.disk.write import Disk
from rmq_spark.store.errors import DamageError, StorePathError
from rmq_spark.store.format import file_names as filenames
from rmq_spark.store.format.checkpoint import Checkpoint, decode_checkpoint
from rmq_spark.store.format.own_files import (
    SLOT_BYTES,
    SLOT_COUNT,
    TIMER_MAX_DELAY_S,
    VERSION,
    OtherVersion,
    StoreSettings,
    Watermark,
    decode_settings,
    decode_slots,
    encode_settings,
    encode_slot,
)
from rmq_spark.store.format.record import RECORD_HEAD
from rmq_spark.store.format.side_file import decode_side_file
from rmq_spark.store.log.commit_log import CommitLog
from rmq_spark.store.log.record_chain import ShutdownState, StoreState
from rmq_spark.store.log.segments import FileSizes
from rmq_spark.store.log.topics import find_topics

T = TypeVar("T")
_ONLY_5 = ("timerwheel", "timerlog", "compaction", "abort.bak", filenames.BATCH_CONSUME_QUEUE)
_ONLY_5_CONFIG = (
    "timercheck",
    "timermetrics",
    "transactionMetrics",
    "consumerOrderInfo.json",
    "topicQueueMapping.json",
)
# A 5.x broker writes these fields into topics.json, a 4.9 broker does not (DataVersion, TopicConfig).
_ONLY_5_FIELDS = (b'"stateVersion"', b'"attributes"')


def found_broker_version(root: str, *, has_log: bool) -> str:
    """Return "5" or "4.9": the version of the brokers that a store is for, by its files.

    Call it before our writers write topics.json. If the store has a log or a topics.json, and no sign of RocketMQ 5,
    the result is "4.9". If the store is empty, it is "5". Raises the same errors as `find_topics`.
    """
    names = {name for name, _ in files.list_folder(root)}
    config_names = {name for name, _ in files.list_folder(files.join(root, filenames.CONFIG))}
    if not names.isdisjoint(_ONLY_5) or not config_names.isdisjoint(_ONLY_5_CONFIG):
        return "5"
    text = find_topics(root).text
    if text:
        return "5" if any(name in text for name in _ONLY_5_FIELDS) else "4.9"
    return "4.9" if has_log else "5"


SIDE_FOLDER = "rmq"  # a folder in the store's folder, which RocketMQ ignores
WATERMARK = "watermark"


def watermark_path(root: str) -> str:
    """Return the path of a store's watermark file."""
    return files.join(root, SIDE_FOLDER, WATERMARK)


def read_watermark(root: str) -> Watermark | None:
    """Return a store's newest watermark. Return None if there is none that is readable."""
    return read_watermarks(root)[0]


def read_watermarks(root: str) -> tuple[Watermark | None, Watermark | None]:
    """Return a store's newest watermark, and its newest settled one. Each is None if there is none that is readable.

    A settled watermark was written when the store was flushed and marked clean. Both come from the same read.
    """
    return decode_slots(files.read_small(watermark_path(root)) or b"")


def write_watermark(disk: Disk, root: str, watermark: Watermark) -> Watermark:
    """Write `watermark` as the store's next one, and return it with its number and boot id.

    A crash leaves the previous watermark or this one. A settled watermark is durable when this returns.
    """
    path = watermark_path(root)
    watermark = replace(
        watermark,
        boot=host.boot_id(),
        number=watermark.number + 1,
        settled_number=watermark.settled_number + watermark.is_settled,
    )
    position, slot = encode_slot(watermark)
    if files.file_size(path) < 0:
        disk.make_folder(files.parent(path))
        disk.create(path, SLOT_COUNT * SLOT_BYTES)
        disk.sync_folder(files.parent(path))
    with disk.open(path) as file:
        file.write(position, slot)
        if watermark.is_settled:
            file.sync()
    return watermark


def is_at_work(watermark: Watermark | None) -> bool:
    """Return whether our writers may still be at work: a write session has ended, and no clean shutdown has followed.

    If so, the store is complete up to the watermark, but maybe not synced.
    """
    return (
        watermark is not None
        and not watermark.is_open
        and not watermark.is_settled
        and bool(watermark.boot)
        and watermark.boot == host.boot_id()
    )


def has_failed_sync(root: str) -> bool:
    """Say whether a sync of the store's files has failed since the machine started, and was not repeated."""
    watermark = read_watermark(root)
    if watermark is None or not watermark.is_syncing or watermark.boot != host.boot_id():
        return False
    # A live writer syncs while it holds the lock, and writes the next watermark before it releases it.
    return not seems_locked(files.join(root, filenames.LOCK)) and read_watermark(root) == watermark


def read_store_state(path: str) -> StoreState:
    """Return how the last writer left the store at `path`, and when, from `lock`, `abort` and the watermark."""
    lock, abort = files.join(path, filenames.LOCK), files.join(path, filenames.ABORT)
    if seems_locked(lock):
        return StoreState(ShutdownState.LIVE, files.modified_ms(lock), files.modified_ms(abort))
    checkpoint_ms = files.modified_ms(files.join(path, filenames.CHECKPOINT))
    lock_ms, started_ms = files.modified_ms(lock), files.modified_ms(abort)
    clean = files.file_size(abort) < 0
    if not clean and is_at_work(read_watermark(path)):
        return StoreState(ShutdownState.LIVE, lock_ms, started_ms)
    return StoreState(
        ShutdownState.CLOSED if clean else ShutdownState.CRASHED, lock_ms + started_ms + checkpoint_ms, started_ms
    )


def read_checkpoint(path: str) -> Checkpoint:
    """Return the checkpoint of the store at `path`. Return an empty checkpoint if there is no file."""
    checkpoint = files.join(path, filenames.CHECKPOINT)
    return decode_checkpoint(files.read_small(checkpoint) or b"", checkpoint)


def vouched_end(path: str, log: CommitLog) -> int | None:
    """Return the physical offset up to which the watermark guarantees that every message has an entry.

    Return None if the watermark is not valid, because a broker ran since: brokers write the checkpoint. After a power
    cut only the settled watermark is used. Our next writer makes no entries for messages before the returned offset.
    """
    watermark = read_watermark(path)
    if watermark is not None and watermark.boot != host.boot_id():
        watermark = read_watermarks(path)[1]
    if watermark is None or not watermark.boot:
        return None
    return watermark.end if _is_of(path, log, watermark) else None


def durable_end(path: str, log: CommitLog) -> int | None:
    """Return the physical offset up to which the watermark guarantees that the log survived a power cut.

    Return None if the machine has not been restarted since, or if a broker has written. Recovery truncates what a power
    cut tore after the returned offset. No caller was told that messages after this offset are durable.
    """
    watermark, settled = read_watermarks(path)
    if watermark is None or settled is None or watermark.boot == host.boot_id() or settled.end < log.segments.begin:
        return None
    return settled.end if _is_of(path, log, settled) else None


def logged_end(path: str, log: CommitLog) -> int | None:
    """Return the physical offset after which one of our writers was writing when it died.

    Return None if no writer died, or if the machine was restarted since. The next writer clears what follows the
    returned offset, unless an entry points to it, because a broker has then written in between.
    """
    watermark = read_watermark(path)
    if watermark is None or not watermark.is_open or watermark.boot != host.boot_id():
        return None
    return max(watermark.end, watermark.logged_end) if _is_of(path, log, watermark) else None


def _is_of(path: str, log: CommitLog, watermark: Watermark) -> bool:
    """Say whether a watermark matches the store.

    It does if the checkpoint is unchanged and the watermark's last record is still at its position.
    """
    page = files.read_small(files.join(path, filenames.CHECKPOINT)) or b""
    is_same_log = (
        watermark.last_place < 0 or log.bytes_at(watermark.last_place, RECORD_HEAD.itemsize) == watermark.last_head
    )
    return zlib.crc32(page) == watermark.checkpoint_crc and is_same_log


def index_safe_until_ms(path: str) -> int | None:
    """Return the store time (ms) up to which the key index is safe after a crash.

    Return None if the store did not crash.
    """
    crashed = read_store_state(path).closing is ShutdownState.CRASHED
    return read_checkpoint(path).index_msg_timestamp if crashed else None


SETTINGS = "settings.json"
BROKER_CONF = "broker.conf"
_NEXT_STEP = (
    "Restore the file from a copy, or remove it. Without it the next write creates a new one: the store gets another "
    "id, no retention until set_retention is called again, and RocketMQ's delay levels until others are set."
)


def check_settings(root: str) -> StoreSettings | None:
    """Return the store's settings. Return None if it has none, because only brokers have used it.

    Raises StorePathError if the settings are of another version of ours, and DamageError if they cannot be read.
    """
    found = read_settings(root)
    if isinstance(found, OtherVersion):
        path = files.join(root, SIDE_FOLDER, SETTINGS)
        raise StorePathError(
            f"{path} is of version {found.version!r}; expected {VERSION}. Write to the store with the release that "
            "created it, or a newer one. Reading works with any release."
        )
    return found


def read_settings(root: str) -> StoreSettings | OtherVersion | None:
    """Return the store's settings, for readers. Return None if it has none.

    Settings of another version do not matter to readers, so they are not an error. Raises DamageError if the settings
    cannot be decoded.
    """
    path = files.join(root, SIDE_FOLDER, SETTINGS)
    data = files.read_small(path)
    if not data:
        return None
    try:
        return decode_settings(data)
    except ValueError as error:
        raise DamageError("settings of a store", path, 0, "JSON", str(error), _NEXT_STEP) from error


def settings_stamp(root: str) -> tuple[int, int]:
    """Return the size (bytes) and the time (ms) of the settings file, to detect a change."""
    path = files.join(root, SIDE_FOLDER, SETTINGS)
    return files.file_size(path), files.modified_ms(path)


def write_settings(disk: Disk, root: str, settings: StoreSettings, sizes: FileSizes | None = None) -> None:
    """Write the settings of a store. If `sizes` is given, write `rmq/broker.conf` too.

    Call it only under the store's lock.
    """
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
        # Without messageIndexSafe, a broker that recovers after a crash removes index files, and adds only the keys of
        # its last segment again.
        "messageIndexSafe": "true",
        # With another table of levels, a broker delivers at other times, and never delivers levels that its table does
        # not have.
        "messageDelayLevel": settings.levels.text,
        "timerMaxDelaySec": longest_s,  # 4.9 ignores it
    }
    return "".join(f"{name}={value}\n" for name, value in lines.items())


def commit_log_folders(root: str, commit_log_path: str | None) -> tuple[str, ...]:
    """Return the folders of the commit log of the store at `root`.

    If they are not in `root`, `commit_log_path` lists them, separated by `,` (a broker's storePathCommitLog). Raises
    StorePathError if `root` is not a store, if it is a store of an unsupported kind, or if a listed folder does not
    exist.
    """
    if not files.is_folder(root):
        what = "is a file" if files.file_size(root) >= 0 else "does not exist"
        raise StorePathError(
            f'path="{root}" {what}. Give the folder that a broker calls storePathRootDir; on a cluster it must be '
            "visible under the same path on the driver and on every executor."
        )
    entries = dict(files.list_folder(root))
    _refuse_other_kinds(root, entries)
    if commit_log_path is not None:
        folders = tuple(files.absolute(part.strip()) for part in commit_log_path.split(",") if part.strip())
        for folder in folders:
            if not files.is_folder(folder):
                raise StorePathError(
                    f'commitLogPath: "{folder}" is not a folder; expected the folders with the segments, separated by '
                    "commas (a broker's storePathCommitLog)."
                )
        if folders:
            return folders
    if entries.get(filenames.COMMIT_LOG):
        return (files.join(root, filenames.COMMIT_LOG),)
    raise StorePathError(
        f'path="{root}" is not a RocketMQ store; expected a folder {filenames.COMMIT_LOG}/ with segments named by 20 '
        f"digits. {_hint(root, entries)}"
    )


def _refuse_other_kinds(root: str, entries: dict[str, bool]) -> None:
    kind = None
    queue_files = dict(files.list_folder(files.join(root, filenames.CONSUME_QUEUE)))
    if any(name.startswith("dledger-") for name in entries):
        kind = "a DLedger commit log (dledger-* folder)"
    elif any(not is_folder and name.startswith("MANIFEST-") for name, is_folder in queue_files.items()):
        kind = "consume queues in RocksDB (storeType=defaultRocksDB)"
    elif files.file_size(files.join(root, filenames.CONFIG, "tieredStoreMetadata.json")) >= 0:
        kind = "tiered storage (config/tieredStoreMetadata.json)"
    if kind is not None:
        raise StorePathError(
            f'path="{root}" is a store with {kind}, which is not supported; expected a file store: commitlog/, '
            "consumequeue/ and batchconsumequeue/. Let the broker copy the topics into such a store, and read that."
        )


def _hint(root: str, entries: dict[str, bool]) -> str:
    nested = files.join(root, "store")
    if files.is_folder(files.join(nested, filenames.COMMIT_LOG)):
        return f"{nested} is one: use that path."
    if any(not is_folder and len(name) == 20 and name.isdigit() for name, is_folder in entries.items()):
        return "It contains segments itself: use its parent folder."
    give = "Give the folder that a broker calls storePathRootDir."
    if not entries:
        return f"It is empty. {give}"
    contents = f"It contains: {', '.join(sorted(entries)[:8])}."
    if entries.get(filenames.CONSUME_QUEUE):
        return f"{contents} If its log is in another folder (a broker's storePathCommitLog), set commitLogPath to it."
    return f"{contents} {give}"


def side_path(root: str, *parts: str) -> str:
    """Return a path below `rmq/` in the store's folder."""
    return files.join(root, SIDE_FOLDER, *parts)


def read_side_file(path: str, what: str, next_step: str, build: Callable[[dict[str, Any]], T]) -> T | None:
    """Read a side file (one in `rmq/`), and return what `build` makes of its fields. Return None if it does not exist.

    `what` and `next_step` are for the error, as in `decode_side_file`, which raises the same errors.
    """
    data = files.read_small(path)
    return None if data is None else decode_side_file(data, path, what, next_step, build)
