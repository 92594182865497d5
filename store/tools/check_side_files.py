"""Checks of small files: checkpoint, abort, lock, and the files of rmq-spark in `rmq/`.

Most files in `rmq/` are read with the functions that the engine uses. If such a function raises an error, the error
becomes a finding.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from rmq_spark.store.delivery.send_back_ledger import look_at_sent_files
from rmq_spark.store.delivery.timer_state import TimerOwnershipFile
from rmq_spark.store.disk import files
from rmq_spark.store.disk.clock import wall_clock_ms
from rmq_spark.store.disk.locks import seems_locked
from rmq_spark.store.disk.write import Disk
from rmq_spark.store.errors import StoreChangedError, StoreError
from rmq_spark.store.format import file_names as filenames
from rmq_spark.store.format.checkpoint import (
    CHECKPOINT_FIELDS,
    CHECKPOINT_FILE_BYTES,
    CLOCKS_DIFFER_MS,
    Checkpoint,
    decode_checkpoint,
)
from rmq_spark.store.format.own_files import SLOT_BYTES, SLOT_COUNT, decode_holder, decode_slots
from rmq_spark.store.format.queue_registry import decode_registry
from rmq_spark.store.group.claims import read_claims
from rmq_spark.store.group.group_files import GroupPaths, list_group_names, read_commit_stamp
from rmq_spark.store.group.member_lease import read_member
from rmq_spark.store.group.resets import read_resets, read_suspended
from rmq_spark.store.log.queue_registry import registry_path
from rmq_spark.store.log.rebuild import read_rebuild, rebuild_path
from rmq_spark.store.log.record_chain import ShutdownState
from rmq_spark.store.log.store_state import (
    SETTINGS,
    SIDE_FOLDER,
    has_failed_sync,
    read_settings,
    side_path,
    watermark_path,
)
from rmq_spark.store.tools.finding import Action, Area, Finding, Severity, error_finding, field_position, utc_text
from rmq_spark.store.transaction.intents import Intents
from rmq_spark.store.transaction.ledger import LEDGER, STAGING, Ledger

_TIMES = ("physic_msg_timestamp", "logics_msg_timestamp", "index_msg_timestamp")
_CHECKPOINT_STEP = "Recovery depends on it. rmq_spark.repair writes it again."
_RECOVER_STEP = "The next writer fixes it; rmq_spark.repair does it now."
_NO_WRITER = "No broker and no writer starts on it."


def check_small_files(root: str, shutdown: ShutdownState, newest_ms: int | None) -> Iterator[Finding]:
    """Yield the findings about the checkpoint, abort and lock files, and about a store time ahead of the clock.

    `newest_ms` is the store time of the last message (ms), or None if it is not known.
    """
    if shutdown is ShutdownState.CRASHED:
        yield Finding(
            severity=Severity.REPAIRABLE,
            area=Area.STORE,
            what="the store was not shut down cleanly: its last writer died, or the power failed",
            path=files.join(root, filenames.ABORT),
            expected="no such file",
            found="abort",
            next_step=_RECOVER_STEP,
            action=Action.RECOVER,
        )
    elif shutdown is ShutdownState.LIVE:
        yield Finding(
            severity=Severity.NOTE,
            area=Area.STORE,
            what="a broker or writer is running, or a writer has not closed the store",
            path=files.join(root, filenames.ABORT),
        )
    if newest_ms is not None and newest_ms > wall_clock_ms() + CLOCKS_DIFFER_MS:
        yield Finding(
            severity=Severity.REPAIRABLE,
            area=Area.STORE,
            what=f"the last message was stored at {utc_text(newest_ms)}, ahead of this machine's clock: a clock was "
            "wrong. New messages get the same store time until the clock reaches it, and retention by age keeps them "
            "that long",
            path=files.join(root, filenames.COMMIT_LOG),
            next_step="Check this machine's clock. Then rmq_spark.repair sets the store times of these messages back.",
            action=Action.CLOCK,
        )
    path = files.join(root, filenames.LOCK)
    if files.is_folder(path):
        yield Finding(
            severity=Severity.DAMAGE,
            area=Area.STORE,
            what="the lock file",
            path=path,
            expected="a file",
            found="a folder",
            next_step=f"{_NO_WRITER} Remove it while none is running.",
        )
    elif (files.read_small(path) or b"").strip(b"\0") not in (b"", b"lock"):
        what = "the content of the lock file is unusual; it is not used"
        yield Finding(severity=Severity.NOTE, area=Area.STORE, what=what, path=path)
    path = files.join(root, filenames.CHECKPOINT)
    if files.is_folder(path):
        yield Finding(
            severity=Severity.DAMAGE,
            area=Area.CHECKPOINT,
            what="the checkpoint",
            path=path,
            expected="a file",
            found="a folder",
            next_step=f"{_NO_WRITER} Remove it; then rmq_spark.repair writes the checkpoint again.",
        )
    else:
        yield from _check_checkpoint(path, shutdown, newest_ms)


def _check_checkpoint(path: str, shutdown: ShutdownState, newest_ms: int | None) -> Iterator[Finding]:
    page = files.read_small(path)
    closed_ms = newest_ms if shutdown is ShutdownState.CLOSED else None  # a clean shutdown writes this time
    if page is None or not page:
        if closed_ms is not None and closed_ms >= 0:
            found = "no such file" if page is None else "an empty file"
            yield _checkpoint_finding("the store has messages and no checkpoint", path, 0, "a page", found)
        return
    if len(page) != CHECKPOINT_FILE_BYTES:
        expected = f"{CHECKPOINT_FILE_BYTES} bytes"
        yield _checkpoint_finding("the length of the checkpoint", path, len(page), expected, str(len(page)))
    checkpoint = decode_checkpoint(page)
    latest_ms = max(newest_ms or 0, wall_clock_ms()) + CLOCKS_DIFFER_MS
    for name in CHECKPOINT_FIELDS.names or ():
        at = field_position(CHECKPOINT_FIELDS, name)
        value = getattr(checkpoint, name)
        if value < 0:
            yield _checkpoint_finding(f"the field {name} of the checkpoint", path, at, "at least 0", str(value))
        elif name in _TIMES and value > latest_ms and closed_ms is None:
            what = f"the field {name} of the checkpoint is in the future"
            yield _checkpoint_finding(what, path, at, f"at most {latest_ms}", str(value))
    if closed_ms is not None:
        yield from _compare_times(path, checkpoint, closed_ms)
    if page[CHECKPOINT_FIELDS.itemsize :].strip(b"\0"):
        yield Finding(
            severity=Severity.NOTE,
            area=Area.CHECKPOINT,
            what="bytes after the fields of the checkpoint, which are never read",
            path=path,
            position=CHECKPOINT_FIELDS.itemsize,
        )


def _compare_times(path: str, checkpoint: Checkpoint, newest_ms: int) -> Iterator[Finding]:
    """Yield the times in the checkpoint that differ from `newest_ms`, the store time of the last message.

    Call this only for a store that was cleanly shut down.
    """
    for name in _TIMES:
        value, at = getattr(checkpoint, name), field_position(CHECKPOINT_FIELDS, name)
        if value > max(newest_ms, 0):
            what = f"the field {name} of the checkpoint is later than the last message"
            yield _checkpoint_finding(what, path, at, f"at most {max(newest_ms, 0)}", str(value))
    if 0 < newest_ms != checkpoint.logics_msg_timestamp < newest_ms:
        at = field_position(CHECKPOINT_FIELDS, "logics_msg_timestamp")
        what = "the checkpoint of a cleanly shut down store is earlier than its last message"
        yield _checkpoint_finding(what, path, at, str(newest_ms), str(checkpoint.logics_msg_timestamp))


def _checkpoint_finding(what: str, path: str, position: int, expected: str, found: str) -> Finding:
    return Finding(
        severity=Severity.REPAIRABLE,
        area=Area.CHECKPOINT,
        what=what,
        path=path,
        position=position,
        expected=expected,
        found=found,
        next_step=_CHECKPOINT_STEP,
        action=Action.CHECKPOINT,
    )


def check_side_files(root: str, shutdown: ShutdownState) -> Iterator[Finding]:
    """Yield the findings about the files of rmq-spark in `rmq/`."""
    yield from _try_reading(lambda: read_settings(root), files.join(root, SIDE_FOLDER, SETTINGS))
    yield from _check_watermark(root)
    yield from _check_registry(root)
    yield from _check_rebuild(root)
    holder = files.join(root, SIDE_FOLDER, "holder.json")
    data = files.read_small(holder)
    if data and decode_holder(data) is None:
        yield Finding(
            severity=Severity.REPAIRABLE,
            area=Area.RMQ,
            what="the record of the lock's holder; the next writer replaces it",
            path=holder,
            expected="JSON",
            found="something else",
            action=Action.RECOVER,
        )
    yield from _check_intents(root, shutdown)
    ledger = Ledger(root, Disk())
    folder = side_path(root, LEDGER)
    for name, is_folder in files.list_folder(folder):
        if not is_folder and name.endswith(".json"):
            path = files.join(folder, name)
            yield from _try_reading(lambda name=name: ledger.read_named(name.removesuffix(".json")), path)  # type: ignore[misc]
    for path, error in look_at_sent_files(root):
        yield error_finding(error, Area.RMQ, path)
    ownership = files.join(root, SIDE_FOLDER, "delivery", "timer.json")
    if files.file_size(ownership) >= 0 and TimerOwnershipFile(root, Disk()).read() is None:
        yield Finding(
            severity=Severity.NOTE,
            area=Area.RMQ,
            what="the record of which timer files rmq-spark wrote cannot be read: the next delivery first searches for "
            "messages that a broker may have delivered",
            path=ownership,
        )
    for group in list_group_names(root):
        yield from _check_group(root, group)


def _check_watermark(root: str) -> Iterator[Finding]:
    path = watermark_path(root)
    data = files.read_small(path)
    if data is None:
        return
    if has_failed_sync(root):
        yield Finding(
            severity=Severity.REPAIRABLE,
            area=Area.RMQ,
            what="a sync failed, or its writer died during it: recent writes may be in memory only, and may be lost",
            path=path,
            expected="a completed sync",
            found="none",
            next_step="The next writer writes the data again and syncs it; rmq_spark.close(path) and rmq_spark.repair "
            "do it now.",
            action=Action.RECOVER,
        )
    finding = Finding(
        severity=Severity.REPAIRABLE,
        area=Area.RMQ,
        what="the length of the watermark",
        path=path,
        expected=f"{SLOT_COUNT * SLOT_BYTES} bytes",
        found=str(len(data)),
        next_step=_RECOVER_STEP,
        action=Action.WATERMARK,
    )
    if len(data) != SLOT_COUNT * SLOT_BYTES:
        yield finding
    for number in range(SLOT_COUNT):
        begin = number * SLOT_BYTES
        slot = data[begin : begin + SLOT_BYTES]
        if slot.strip(b"\0") and decode_slots(slot.ljust(SLOT_BYTES, b"\0"))[0] is None:
            yield replace(
                finding,
                what=f"slot {number} of the watermark",
                position=begin,
                expected="a line of JSON with its CRC",
                found="something else",
                next_step=f"Writers use the other slots, or scan the log. {_RECOVER_STEP}",
            )


def _check_registry(root: str) -> Iterator[Finding]:
    path = registry_path(root)
    data = files.read_small(path) or b""
    length = decode_registry(data)[1]
    if length < len(data) or (not data and files.file_size(path) == 0):
        yield Finding(
            severity=Severity.REPAIRABLE,
            area=Area.RMQ,
            what="the registry of queues: it cannot be read from this position, and a lost queue may go unnoticed",
            path=path,
            position=length,
            expected="a line of JSON with its CRC",
            found="something else",
            next_step=f"A writer rebuilds it from the folders. {_RECOVER_STEP}",
            action=Action.WATERMARK,
        )


def _check_rebuild(root: str) -> Iterator[Finding]:
    rebuild = read_rebuild(root)
    if rebuild is None:
        return
    names = [f"queue {key}" for key in sorted(rebuild.queues)] + ["the key index"] * rebuild.has_index
    what = f"a repair has not finished; it rebuilds: {', '.join(names[:10]) or 'nothing'}"
    what += f" and {len(names) - 10} more" if len(names) > 10 else ""
    finding = Finding(severity=Severity.NOTE, area=Area.RMQ, what=what, path=rebuild_path(root))
    if seems_locked(files.join(root, filenames.LOCK)):
        yield finding
    elif read_rebuild(root) is not None:  # the repair has not finished since the file was read above
        yield replace(finding, severity=Severity.REPAIRABLE, next_step=_RECOVER_STEP, action=Action.RECOVER)


def _check_intents(root: str, shutdown: ShutdownState) -> Iterator[Finding]:
    intents = Intents(root, Disk())
    committed: set[str] = set()  # names of folders whose staged rows were committed
    yield from _try_reading(intents.read_all, intents.folder)
    try:
        found = intents.read_all()
    except StoreError:
        return  # reported above
    for intent in found:
        committed.update(file.name.partition("/")[0] for file in intent.files)
        path = intents.path(intent.key.query_id)
        if shutdown is not ShutdownState.LIVE:
            yield Finding(
                severity=Severity.REPAIRABLE,
                area=Area.RMQ,
                what=f"{intent.key}: {intent.rows} rows were committed, and may not all be in the store: the writer "
                "died",
                path=path,
                messages=intent.rows,
                next_step=_RECOVER_STEP,
                action=Action.RECOVER,
            )
        # Imported here, because this module loads the whole write path and intents are rare.
        from rmq_spark.store.transaction.staging import check_staged

        for file in intent.files:
            try:
                check_staged(root, file)
            except StoreError as error:
                yield Finding(
                    severity=Severity.DAMAGE,
                    area=Area.RMQ,
                    what=f"{intent.key}: committed rows cannot be read",
                    path=path,
                    messages=file.rows,
                    next_step=str(error),
                )
    left = [name for name, _ in files.list_folder(side_path(root, STAGING)) if name not in committed]
    if left:
        what = f"{len(left)} folders of staged rows that no commit references: writers remove old ones"
        yield Finding(severity=Severity.NOTE, area=Area.RMQ, what=what, path=side_path(root, STAGING))


def _check_group(root: str, group: str) -> Iterator[Finding]:
    paths = GroupPaths(root, group)
    for read, path in (
        (read_claims, paths.claims),
        (read_resets, paths.resets),
        (read_commit_stamp, paths.published),
    ):
        yield from _try_reading(lambda read=read, path=path: read(path), path)  # type: ignore[misc]
    yield from _try_reading(lambda: read_suspended(root, group), paths.suspended)
    for name, is_folder in files.list_folder(paths.members):
        if not is_folder and name.endswith(".json"):
            path = files.join(paths.members, name)
            yield from _try_reading(lambda path=path: read_member(path), path)  # type: ignore[misc]


def _try_reading(read: Callable[[], Any], path: str) -> Iterator[Finding]:
    try:
        read()
    except StoreChangedError:
        return  # the owner of the file removed it meanwhile
    except StoreError as error:
        yield error_finding(error, Area.RMQ, path)
