"""Our own files in `rmq/` looked at, and the small ones of the store: checkpoint, abort, lock.

Those in `rmq/` are read by those who use them, who raise an error with evidence for what is damaged.
"""

from collections.abc import Callable, Iterator
from typing import Any

from rmq_spark.store.commit.intents import Intents
from rmq_spark.store.commit.keys import LEDGER, STAGING, side_path
from rmq_spark.store.commit.ledger import Ledger
from rmq_spark.store.delivery.sent_rows import look_at_sent_files
from rmq_spark.store.delivery.timer_mark import TimerMarkFile
from rmq_spark.store.disk import files
from rmq_spark.store.disk.chance import wall_clock_ms
from rmq_spark.store.disk.changing import Disk
from rmq_spark.store.disk.lock_probe import seems_locked
from rmq_spark.store.errors import DamageError, StoreChangedError, StoreError
from rmq_spark.store.explore.finding import DAMAGE, NOTE, REPAIRABLE, Finding, utc_text
from rmq_spark.store.explore.layouts import field_position
from rmq_spark.store.format import filenames
from rmq_spark.store.format.checkpoint import (
    CHECKPOINT_FIELDS,
    CHECKPOINT_FILE_BYTES,
    CLOCKS_DIFFER_MS,
    Checkpoint,
    decode_checkpoint,
)
from rmq_spark.store.format.holder_file import decode_holder
from rmq_spark.store.format.queue_registry import decode_registry
from rmq_spark.store.format.watermark import SLOT_BYTES, SLOT_COUNT, decode_slots
from rmq_spark.store.group.claims import read_claims
from rmq_spark.store.group.group_paths import GroupPaths, list_group_names
from rmq_spark.store.group.member_file import read_member
from rmq_spark.store.group.published import read_published
from rmq_spark.store.group.resets import read_resets
from rmq_spark.store.group.suspended import read_suspended
from rmq_spark.store.log.chain import Closing
from rmq_spark.store.log.queue_registry import registry_path
from rmq_spark.store.log.rebuilding import read_rebuild, rebuild_path
from rmq_spark.store.log.settings_file import SETTINGS, read_settings
from rmq_spark.store.log.watermark_file import SIDE_FOLDER, has_failed_sync, watermark_path

_CHECKPOINT_STEP = "Recovery goes by it. rmq_spark.repair has a writer make it anew."
_TIMES = ("physic_msg_timestamp", "logics_msg_timestamp", "index_msg_timestamp")
_RECOVER = "The next writer sees to it; rmq_spark.repair does it now."


def look_at_small_files(root: str, closing: Closing, newest_ms: int | None) -> Iterator[Finding]:
    """Yield what is wrong with checkpoint, abort and lock. `newest_ms` is the last message's store time, if known."""
    abort = files.join(root, filenames.ABORT)
    if closing is Closing.CRASHED:
        what = "the store was not closed in order: who wrote last died, or the power went"
        yield Finding(
            REPAIRABLE, "store", what, abort, 0, "no such file", "abort", next_step=_RECOVER, action="recover"
        )
    elif closing is Closing.LIVE:
        what = "a broker or writer is at the store, or appended to it and did not close it"
        yield Finding(NOTE, "store", what, abort)
    if newest_ms is not None and newest_ms > wall_clock_ms() + CLOCKS_DIFFER_MS:
        what = (
            f"the last message was stored at {utc_text(newest_ms)}, ahead of this machine's clock: a clock was wrong. "
            "New messages get the same store time until the clock reaches it, and retention by age keeps them that long"
        )
        step = "See that this machine's clock is right. Then rmq_spark.repair gives these messages right store times."
        path = files.join(root, filenames.COMMIT_LOG)
        yield Finding(REPAIRABLE, "store", what, path, next_step=step, action="clock")
    path = files.join(root, filenames.LOCK)
    if files.is_folder(path):
        step = "No broker and no writer starts on it. Remove it while none is at the store."
        yield Finding(DAMAGE, "store", "the file that is locked", path, 0, "a file", "a folder", next_step=step)
    elif (files.read_small(path) or b"").strip(b"\0") not in (b"", b"lock"):
        yield Finding(NOTE, "store", "the file lock has another content; only its lock counts", path)
    if files.is_folder(path := files.join(root, filenames.CHECKPOINT)):
        step = "No broker and no writer starts on it. Remove it; then rmq_spark.repair has a writer make it anew."
        yield Finding(DAMAGE, filenames.CHECKPOINT, "the checkpoint", path, 0, "a file", "a folder", next_step=step)
    else:
        yield from _look_at_checkpoint(root, closing, newest_ms)


def _look_at_checkpoint(root: str, closing: Closing, newest_ms: int | None) -> Iterator[Finding]:
    path = files.join(root, filenames.CHECKPOINT)
    page = files.read_small(path)
    step = _CHECKPOINT_STEP
    if page is None or not page:
        if closing is Closing.CLOSED and newest_ms is not None and newest_ms >= 0:
            found = "no such file" if page is None else "an empty one"
            what = "the store has messages and no checkpoint"
            yield _checkpoint(what, path, 0, "a page", found, step)
        return
    if len(page) != CHECKPOINT_FILE_BYTES:
        expected = f"{CHECKPOINT_FILE_BYTES} bytes"
        yield _checkpoint("the length of the checkpoint", path, len(page), expected, str(len(page)), step)
    checkpoint = decode_checkpoint(page)
    latest_ms = max(newest_ms or 0, wall_clock_ms()) + CLOCKS_DIFFER_MS
    is_compared = closing is Closing.CLOSED and newest_ms is not None
    for name in CHECKPOINT_FIELDS.names or ():
        at = field_position(CHECKPOINT_FIELDS, name)
        value = getattr(checkpoint, name)
        if value < 0:
            yield _checkpoint(f"the field {name} of the checkpoint", path, at, "0 or more", str(value), step)
        elif name in _TIMES and value > latest_ms and not is_compared:
            what = f"the field {name} of the checkpoint is a time to come"
            yield _checkpoint(what, path, at, f"at most {latest_ms}", str(value), step)
    if closing is Closing.CLOSED and newest_ms is not None:
        yield from _compare_times(path, checkpoint, newest_ms)
    if page[CHECKPOINT_FIELDS.itemsize :].strip(b"\0"):
        what = "bytes behind the fields of the checkpoint, which nobody reads"
        yield Finding(NOTE, filenames.CHECKPOINT, what, path, CHECKPOINT_FIELDS.itemsize)


def _compare_times(path: str, checkpoint: Checkpoint, newest_ms: int) -> Iterator[Finding]:
    """Compare the times in the checkpoint of a store that was closed in order with that of its last message."""
    for name in _TIMES:
        value, at = getattr(checkpoint, name), field_position(CHECKPOINT_FIELDS, name)
        if value > max(newest_ms, 0):
            what = f"the field {name} of the checkpoint names a message that is not there"
            yield _checkpoint(what, path, at, f"at most {max(newest_ms, 0)}", str(value), _CHECKPOINT_STEP)
    if 0 < newest_ms != checkpoint.logics_msg_timestamp < newest_ms:
        at = field_position(CHECKPOINT_FIELDS, "logics_msg_timestamp")
        what = "the checkpoint of a store that was closed in order does not name the last message"
        yield _checkpoint(what, path, at, str(newest_ms), str(checkpoint.logics_msg_timestamp), _CHECKPOINT_STEP)


def _checkpoint(what: str, path: str, position: int, expected: str, found: str, step: str) -> Finding:
    return Finding(
        REPAIRABLE, filenames.CHECKPOINT, what, path, position, expected, found, next_step=step, action="checkpoint"
    )


def look_at_side_files(root: str, closing: Closing) -> Iterator[Finding]:
    """Yield what is wrong with the files in `rmq/`."""
    yield from _read(lambda: read_settings(root), files.join(root, SIDE_FOLDER, SETTINGS))
    yield from _look_at_watermark(root)
    yield from _look_at_registry(root)
    yield from _look_at_rebuild(root)
    holder = files.join(root, SIDE_FOLDER, "holder.json")
    data = files.read_small(holder)
    if data and decode_holder(data) is None:
        what = "the note of who holds the store's lock; the next writer writes it anew"
        yield Finding(REPAIRABLE, SIDE_FOLDER, what, holder, 0, "JSON", "something else", action="recover")
    yield from _look_at_intents(root, closing)
    ledger = Ledger(root, Disk())
    folder = side_path(root, LEDGER)
    for name, is_folder in files.list_folder(folder):
        if not is_folder and name.endswith(".json"):
            yield from _read(lambda name=name: ledger.read_named(name.removesuffix(".json")), files.join(folder, name))  # type: ignore[misc]
    for path, error in look_at_sent_files(root):
        yield _of_error(error, path)
    mark = files.join(root, SIDE_FOLDER, "delivery", "timer.json")
    if files.file_size(mark) >= 0 and TimerMarkFile(root, Disk()).read() is None:
        what = "the note of what we wrote of the timer: without it what a broker may have delivered is looked for first"
        yield Finding(NOTE, SIDE_FOLDER, what, mark)
    for group in list_group_names(root):
        yield from _look_at_group(root, group)


def _look_at_watermark(root: str) -> Iterator[Finding]:
    path = watermark_path(root)
    data = files.read_small(path)
    if data is None:
        return
    if has_failed_sync(root):
        what = "a sync failed, or its writer died in it: what was written since may be in memory only, and lost with it"
        step = "The next writer writes it again and syncs it; rmq_spark.close(path) and rmq_spark.repair do it now."
        yield Finding(
            REPAIRABLE, SIDE_FOLDER, what, path, 0, "a sync that ended", "none", next_step=step, action="recover"
        )
    if len(data) != SLOT_COUNT * SLOT_BYTES:
        expected = f"{SLOT_COUNT * SLOT_BYTES} bytes"
        what = "the length of the note of how far the store was written"
        yield Finding(
            REPAIRABLE, SIDE_FOLDER, what, path, 0, expected, str(len(data)), next_step=_RECOVER, action="watermark"
        )
    for number in range(SLOT_COUNT):
        begin = number * SLOT_BYTES
        slot = data[begin : begin + SLOT_BYTES]
        if slot.strip(b"\0") and decode_slots(slot.ljust(SLOT_BYTES, b"\0"))[0] is None:
            what = f"slot {number} of the note of how far the store was written"
            expected, found = "a line of JSON with its CRC", "something else"
            step = "A writer goes by the other slots, or looks at the log. " + _RECOVER
            yield Finding(
                REPAIRABLE, SIDE_FOLDER, what, path, begin, expected, found, next_step=step, action="watermark"
            )


def _look_at_registry(root: str) -> Iterator[Finding]:
    path = registry_path(root)
    data = files.read_small(path) or b""
    length = decode_registry(data)[1]
    if length < len(data) or (not data and files.file_size(path) == 0):
        what = "the registry of queues: what follows is not read, and a queue that is lost may be missed"
        expected, step = "a line of JSON with its CRC", "A writer makes it again from the folders. " + _RECOVER
        yield Finding(
            REPAIRABLE, SIDE_FOLDER, what, path, length, expected, "something else", next_step=step, action="watermark"
        )


def _look_at_rebuild(root: str) -> Iterator[Finding]:
    rebuild = read_rebuild(root)
    if rebuild is None:
        return
    names = [f"queue {key}" for key in sorted(rebuild.queues)] + ["the key index"] * rebuild.has_index
    what = f"a repair has not finished; it makes anew: {', '.join(names[:10]) or 'nothing'}"
    what += f" and {len(names) - 10} more" if len(names) > 10 else ""
    if seems_locked(files.join(root, filenames.LOCK)):
        yield Finding(NOTE, SIDE_FOLDER, what, rebuild_path(root))
    elif read_rebuild(root) is not None:  # it has not finished meanwhile
        yield Finding(REPAIRABLE, SIDE_FOLDER, what, rebuild_path(root), next_step=_RECOVER, action="recover")


def _look_at_intents(root: str, closing: Closing) -> Iterator[Finding]:
    intents = Intents(root, Disk())
    named: set[str] = set()
    yield from _read(intents.read_all, intents.folder)
    try:
        found = intents.read_all()
    except StoreError:
        return  # told
    for intent in found:
        named.update(file.name.partition("/")[0] for file in intent.files)
        path = intents.path(intent.key.query_id)
        if closing is not Closing.LIVE:
            what = f"{intent.key}: {intent.rows} rows were promised, and maybe not all are there: its writer died"
            yield Finding(
                REPAIRABLE, SIDE_FOLDER, what, path, messages=intent.rows, next_step=_RECOVER, action="recover"
            )
        # With it comes all that appends, and it is rarely asked.
        from rmq_spark.store.commit.staging import check_staged

        for file in intent.files:
            try:
                check_staged(root, file)
            except StoreError as error:
                what = f"{intent.key}: rows that were promised cannot be read"
                step = f"{error}"
                yield Finding(DAMAGE, SIDE_FOLDER, what, path, messages=file.rows, next_step=step)
    left = [name for name, _ in files.list_folder(side_path(root, STAGING)) if name not in named]
    if left:
        what = f"{len(left)} folders of staged rows that no commit has named yet: a writer takes old ones away"
        yield Finding(NOTE, SIDE_FOLDER, what, side_path(root, STAGING))


def _look_at_group(root: str, group: str) -> Iterator[Finding]:
    paths = GroupPaths(root, group)
    for read, path in (
        (read_claims, paths.claims),
        (read_resets, paths.resets),
        (read_published, paths.published),
    ):
        yield from _read(lambda read=read, path=path: read(path), path)  # type: ignore[misc]
    yield from _read(lambda: read_suspended(root, group), paths.suspended)
    for name, is_folder in files.list_folder(paths.members):
        if not is_folder and name.endswith(".json"):
            path = files.join(paths.members, name)
            yield from _read(lambda path=path: read_member(path), path)  # type: ignore[misc]


def _read(read: Callable[[], Any], path: str) -> Iterator[Finding]:
    try:
        read()
    except StoreChangedError:
        return  # gone meanwhile: its owner took it away
    except StoreError as error:
        yield _of_error(error, path)


def _of_error(error: StoreError, path: str) -> Finding:
    if not isinstance(error, DamageError):
        return Finding(DAMAGE, SIDE_FOLDER, str(error), path)
    return Finding(
        DAMAGE, SIDE_FOLDER, error.what, error.path, error.position, str(error.expected), str(error.found),
        next_step=error.next_step,
    )  # fmt: skip
