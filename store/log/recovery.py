"""Recovery: makes the store consistent after a writer has taken the lock, and before it appends.

Recovery distinguishes nine cases by the file `abort`, by our watermark, and by the bytes at the watermark's end. A
watermark is settled if the store was then flushed and marked clean. To dispatch a record is to make its entry and its
keys.

| case | sign | action |
| --- | --- | --- |
| our clean state | the watermark matches the disk | none |
| our writer died | the watermark has an open session of this boot | dispatch its logged records, clear partial ones |
| newer watermarks may be lost | `StoreFiles.must_check_queues` is true | clear what follows the watermark |
| a repair began | the rebuild file exists | remove the files that it lists, then continue as after a crash |
| a sync failed | the watermark has `is_syncing` | write again and sync what may be missing on the disk |
| power cut | `abort` and a settled watermark | dispatch the complete records after it, clear the rest |
| lost memory | the same, and files that contradict the newest watermark of this boot | the same |
| crash | `abort` | find the end as readers do, clear what follows, make missing entries |
| a broker's store, or a new one | no `abort` | find the end as readers do, clear stale bytes after it |

Only this module truncates the log. It clears only bytes that were never acknowledged, or whose record has a torn body.
Source: CommitLog#recoverNormally, #recoverAbnormally, ConsumeQueueStore#recover, DefaultMessageStore#doReput (5.3).
"""

import logging
from dataclasses import replace
from enum import Enum
from functools import partial

from rmq_spark.store.disk import files, host
from rmq_spark.store.disk.write import Disk
from rmq_spark.store.format import file_names as filenames
from rmq_spark.store.format.index_file import IndexState
from rmq_spark.store.format.own_files import Rebuild, Watermark
from rmq_spark.store.format.record import RECORD_HEAD
from rmq_spark.store.log.commit_log_writer import DirtyFiles, write_again
from rmq_spark.store.log.group_offsets import set_groups_back
from rmq_spark.store.log.key_search import last_indexed_place
from rmq_spark.store.log.log_end import LogEnd
from rmq_spark.store.log.queue_registration import (
    is_registry_ahead,
    register_after_others,
    register_again,
    register_queues,
)
from rmq_spark.store.log.queue_registry import refuse_lost_folder, registry_path
from rmq_spark.store.log.rebuild import read_rebuild, remove_rebuild, take_away, write_rebuild
from rmq_spark.store.log.record_chain import ShutdownState, StoreState, walk_whole, whole_end
from rmq_spark.store.log.redispatch import LastRecord, dispatch, is_of, last_lives, rewind_queues
from rmq_spark.store.log.store_files import StoreFiles, nothing_written
from rmq_spark.store.log.store_state import read_watermark, read_watermarks, watermark_path
from rmq_spark.store.log.topics import TopicTable
from rmq_spark.store.log.watermark_checks import (
    begins_record,
    entries_from,
    has_last_record,
    is_end,
    is_head_lost,
    is_same_boot,
    is_within_log,
    refuse_cut,
    refuse_lost_log,
)
from rmq_spark.store.model import QueueKey

_LOG = logging.getLogger("rmq_spark")


def prepare(store: StoreFiles) -> None:
    """Make the store consistent, and find the end of the log.

    Raises DamageError if the store is damaged in a way that recovery must not change.
    """
    store.refresh()
    watermark, settled = read_watermarks(store.root)
    has_abort = store.has_abort()
    ran_on = watermark is not None and is_same_boot(watermark)
    refuse_lost_log(store, watermark if ran_on else settled)
    rebuild = read_rebuild(store.root)
    if rebuild is not None:
        _finish_rebuild(store, rebuild)
        return
    method = _choose_method(store, watermark, settled, has_abort, ran_on=ran_on)
    if method in (_Method.RESCAN, _Method.ROLL_FORWARD):
        store.sound_queues.clear()
    closing = ShutdownState.CRASHED if has_abort else ShutdownState.CLOSED
    if watermark is not None and watermark.is_syncing and ran_on:
        _repeat_sync(store, watermark, settled if method is not _Method.RESCAN and has_abort else None, closing)
    elif watermark is None or method is _Method.RESCAN:
        _rescan(store, closing)
    elif method is _Method.ROLL_FORWARD:
        assert settled is not None
        if watermark.is_settled and ran_on and not store.registry.exists():
            refuse_lost_folder(store.root, store.log)
        _roll_forward(store, settled, watermark if ran_on else None)
    elif watermark.is_open:
        _finish_session(store, watermark)
    else:
        _continue(store, watermark, has_abort, is_doubtful=method is _Method.FINISH)


def begin_rebuild(store: StoreFiles, rebuild: Rebuild) -> None:
    """Make the next session rebuild files from the log. For a repair, under the store's lock.

    First, incomplete work of a dead writer is cleared. Then the rebuild file is written, durably. After that, readers
    refuse the listed queues until they are complete again.
    """
    _clear_unfinished(store)
    write_rebuild(store.disk, store.root, rebuild)
    _force_rescan(store)


def forget_note(store: StoreFiles) -> None:
    """Remove our watermark and the queue registry, for a repair. The next session creates both again."""
    _clear_unfinished(store)
    remove_note(store.disk, store.root)


def remove_note(disk: Disk, root: str) -> None:
    """Remove our watermark and the queue registry, durably.

    Call it only if nothing depends on the watermark any more.
    """
    for path in (watermark_path(root), registry_path(root)):
        if files.file_size(path) >= 0:
            disk.remove(path)
            disk.sync_folder(files.parent(path))


def _continue(store: StoreFiles, watermark: Watermark, has_abort: bool, *, is_doubtful: bool) -> None:
    """Continue from the watermark of a closed session.

    If `is_doubtful`, newer watermarks may be lost, so what they may have left after this one is cleared.
    """
    store.adopt(watermark)
    if watermark.is_settled and has_abort:
        # The writer that marked the store clean failed, or died, after it wrote the watermark. So the sync of the
        # watermark may have failed.
        write_again(store.disk, watermark_path(store.root), 0)
    if not store.registry.was_checked:  # once for each writer
        refuse_lost_folder(store.root, store.log)
        if not store.registry.exists():  # a store of an older release
            register_queues(store, watermark.end)
        store.registry.was_checked = True
    if is_doubtful:
        _finish_session(store, watermark)


def _force_rescan(store: StoreFiles) -> None:
    """Make recovery scan the whole log: empty the checkpoint, and remove our watermark.

    Otherwise recovery would start at the end that one of them contains.
    """
    store.mark_crashed()
    remove_note(store.disk, store.root)


def _clear_unfinished(store: StoreFiles) -> None:
    """Clear the bytes that recovery from our watermark would clear, and make the rest of the log durable.

    This must be done before the watermark is removed. Only the watermark shows how far a dead writer came, and which
    bytes a power cut may have torn: a record is checked by its header and the CRC of its body, so its properties may be
    missing although the check passes. No entries and no keys are made, because their files may be the damaged ones.
    """
    if read_rebuild(store.root) is not None:
        _finish_failed_sync(store)
        return  # the rest was done before the rebuild file was written
    store.refresh()
    watermark, settled = read_watermarks(store.root)
    if watermark is None:
        return
    ran_on, known = is_same_boot(watermark), None
    method = _choose_method(store, watermark, settled, store.has_abort(), ran_on=ran_on)
    if method in (_Method.CONTINUE, _Method.FINISH):
        # The writer of an open session did not record which files it wrote.
        known = replace(watermark, dirty=None) if watermark.is_open else watermark
    elif method is _Method.ROLL_FORWARD:
        assert settled is not None
        end = _roll_forward_end(store, settled, watermark if ran_on else None)
        known = replace(settled, number=watermark.number, is_open=True, logged_end=end)
    if known is not None:
        store.adopt(known)
        if method is not _Method.CONTINUE:
            store.log_writer.clear_from(max(known.end, known.logged_end))
    if watermark.is_syncing and ran_on:
        _write_again(store, known or watermark)
    elif known is not None:
        store.sync_changes()


def _finish_rebuild(store: StoreFiles, rebuild: Rebuild) -> None:
    """Rebuild the files that the rebuild file lists. The repair that wrote it is still active, or died at any point."""
    _finish_failed_sync(store)  # first, because only our watermark records the failed sync
    _force_rescan(store)
    take_away(store.disk, store.root, rebuild, store.heartbeat)
    store.refresh()
    _rescan(store, ShutdownState.CRASHED)
    remove_rebuild(store.disk, store.root)


class _Method(Enum):
    """The state that recovery starts from."""

    CONTINUE = "the watermark: no other process has written since"
    FINISH = "the watermark: what follows it is completed or cleared"
    ROLL_FORWARD = "the settled watermark: pages written since are lost"
    RESCAN = "the files alone: another process has written, or our watermark cannot be checked"


def _choose_method(
    store: StoreFiles, watermark: Watermark | None, settled: Watermark | None, has_abort: bool, *, ran_on: bool
) -> _Method:
    """Return the state that recovery must start from.

    `watermark` is the newest one, and `settled` is the newest settled one. `ran_on` means that the machine has not been
    restarted since `watermark` was written.

    Even without a restart, pages in memory may be lost, if the disk failed and the file system was unmounted and
    mounted again. Then the newest watermark on disk may be older than the entries there, or newer than the log.
    """
    if watermark is None or (not watermark.is_settled and not has_abort):
        return _Method.RESCAN  # without `abort`, a broker recovered the store and shut it down cleanly

    def roll() -> _Method:
        is_rooted = has_abort and settled is not None and is_within_log(store, settled)
        return _Method.ROLL_FORWARD if is_rooted else _Method.RESCAN

    if not ran_on:
        # After a power cut the watermark may be newer than the files. Or entries may have survived although a broker
        # truncated their records. If that broker then had nothing to dispatch, its checkpoint equals ours.
        return roll()
    if store.read_checkpoint()[1] != watermark.checkpoint_crc:
        return _Method.RESCAN  # brokers write the checkpoint whenever they run
    if not has_last_record(store, watermark):
        # Lost memory leaves zeros. Any other bytes are damage, or another process wrote them.
        return roll() if is_head_lost(store, watermark) else _Method.RESCAN
    end = max(watermark.end, watermark.logged_end)
    if watermark.is_open:
        # What follows may be a partial write of the dead writer. In that case no entry points to it.
        entries = list(entries_from(store, end))
        if entries:
            # An entry that has no record is damaged, or has survived although its record has not.
            is_others = begins_record(store, end) and any(is_of(store, *entry) for entry in entries)
            return _Method.RESCAN if is_others else roll()
        return _Method.FINISH if walk_whole(store.log, watermark.end, end, store.heartbeat)[0] == end else roll()
    if not is_end(store, end):
        return _Method.RESCAN
    # A settled watermark without `abort` is complete. With `abort`, the writer died or newer watermarks are lost.
    if not (has_abort if watermark.is_settled else store.must_check_queues(watermark)):
        return _Method.CONTINUE
    # If no entries are left either, clear what follows the watermark: remains of the log, of the index and of the
    # registry must not become valid again.
    return roll() if any(entries_from(store, end)) else _Method.FINISH


def _finish_session(store: StoreFiles, watermark: Watermark) -> None:
    """Dispatch the records that a dead writer of ours logged after the watermark, and clear a partial write.

    The watermark may be older than the files, because newer watermarks are lost. Then everything that they covered is
    lost too, except pages that the kernel wrote by itself, and files that were synced immediately.
    """
    # The writer did not record which files it wrote in its last session, so the next `settle` syncs all files.
    store.adopt(replace(watermark, dirty=None) if watermark.is_open else watermark)
    end = max(watermark.end, watermark.logged_end)
    begin = watermark.end
    if not store.index.repair(watermark.index):
        begin = min(begin, max(store.index.indexed_end(), store.log.segments.begin))
    cleared = store.log_writer.clear_from(end)
    # The writer's entries are overwritten with the same bytes, because the last one may be partly written.
    last = dispatch(store, begin, end, watermark.end, rewind=True)
    if watermark.is_open or is_registry_ahead(store, watermark.end):
        register_again(store, watermark.end)
    set_groups_back(store, end)
    _close_session(store, end, last)
    if end != watermark.end or cleared:
        _LOG.info(
            "rmq: recovered from a dead writer: dispatched [%d, %d), cleared %d bytes of a partial write",
            watermark.end,
            end,
            cleared,
        )


def _repeat_sync(store: StoreFiles, watermark: Watermark, settled: Watermark | None, closing: ShutdownState) -> None:
    """Write again and sync what a failed sync may have missed. If this raises, the mark in the watermark stays.

    `settled` is None if another process may have written since. The kernel may have dropped some of the bytes from
    memory. A record that cannot be decoded, or whose body has another CRC, is lost, and so are all records after it.
    """
    _LOG.warning(
        "rmq: %s: a sync failed, or its writer died during it: what was written since the last `settle` is written "
        "again",
        store.root,
    )
    if settled is not None and settled.settled_number == watermark.settled_number and is_within_log(store, settled):
        _roll_forward(store, settled, watermark)
        return
    _write_again(store, watermark)
    _rescan(store, closing)
    if closing is ShutdownState.CLOSED:
        store.mark_synced()


def _finish_failed_sync(store: StoreFiles) -> None:
    """Write again and sync what a failed sync may have missed.

    Call it before the watermark is removed, because the watermark has the mark of the failed sync.
    """
    store.refresh()
    watermark = read_watermark(store.root)
    # Without boot ids ("") the machine is treated as not restarted, because writing again is safe.
    if watermark is not None and watermark.is_syncing and watermark.boot == host.boot_id():
        _write_again(store, watermark)


def _write_again(store: StoreFiles, watermark: Watermark) -> None:
    begins = {
        segment.path: min(max(watermark.settled_end - segment.begin, 0), segment.size)
        for segment in store.log.segments.segments
    }
    changes = DirtyFiles(store.disk, (store.root, *store.folders), watermark.dirty, store.heartbeat)
    changes.write_again(lambda path: begins.get(path, 0))
    changes.sync()


def _rescan(store: StoreFiles, closing: ShutdownState) -> None:
    """Find the log's end as readers do, and make the other files agree with it."""
    if closing is ShutdownState.CLOSED:
        # Not after a crash: a power cut may leave the log without the folder, and then all queues are rebuilt.
        refuse_lost_folder(store.root, store.log)
    checkpoint, page_crc = store.read_checkpoint()
    table = TopicTable(store.root)
    left = StoreState(closing, 0, store.started_ms())
    log_end = LogEnd(
        store.log, lambda: left, lambda: checkpoint, table.may_exist, lambda: last_indexed_place(store.root)
    )
    log_end.refresh(table.queues, table.queues, whole=True)
    # Files are lost, or the topic was deleted and created again. Such a queue is refused only when it is written to.
    homeless = {key for key in log_end.faults if closing is ShutdownState.CLOSED and not _has_files(table, key)}
    for key, fault in log_end.faults.items():
        if key not in homeless:
            raise fault
    # Damage and a torn record are refused here, before anything is changed.
    if closing is ShutdownState.CRASHED:
        refuse_cut(store, log_end.end)
    lives = last_lives(store, log_end.first_unitless(), log_end.end) if closing is ShutdownState.CRASHED else {}
    physical_offset, header = log_end.last_record
    before = read_watermark(store.root)
    store.adopt(
        replace(
            nothing_written(),
            number=before.number if before is not None else 0,
            end=log_end.end,
            last_ms=log_end.newest_ms,
            last_place=physical_offset if header else -1,
            last_head=header,
            checkpoint_crc=page_crc,
            # After a crash the checkpoint guarantees what precedes the begin of the scan.
            settled_end=log_end.end if closing is ShutdownState.CLOSED else log_end.begin,
            dirty=() if closing is ShutdownState.CLOSED else None,
            # A clean shutdown flushed the index. Without its state a later recovery would remove its files.
            index=store.index.state() if closing is ShutdownState.CLOSED else IndexState(),
        )
    )
    for key, queue in table.queues.items():
        store.heartbeat()
        entry = log_end.ends.get(key, queue.run.begin)
        if queue.run.end > entry:
            # After a damaged entry, valid ones may follow. Those for records before the begin of the scan stay.
            settled_end = log_end.begin if closing is ShutdownState.CRASHED else 0
            store.queues.cut(key, entry, settled_end, partial(is_of, store, key))
            queue.run.refresh()
        queue.run.close()
    is_same = before is not None and has_last_record(store, before)
    register_after_others(
        store,
        table.queues.values(),
        same_until=before.end if before is not None and is_same else None,
        searched_from=log_end.end if homeless else log_end.begin,
    )
    cleared = store.log_writer.clear_from(log_end.end)
    if closing is ShutdownState.CLOSED:
        # Sync before a watermark marks the store as clean. Otherwise a power cut could restore the cleared bytes,
        # directly after the end.
        store.sync_changes()
    else:
        indexed = store.index.drop_unsafe(checkpoint.index_msg_timestamp)
        # All earlier records have entries, or belong to a deleted topic.
        unitless = log_end.first_unitless()
        begin = min(unitless, max(indexed, store.log.segments.begin))
        last = dispatch(store, begin, log_end.end, unitless, lives=lives)
        set_groups_back(store, log_end.end)
        _LOG.info("rmq: recovered %s: the log ends at %d, cleared %d bytes after it", store.root, log_end.end, cleared)
        _close_session(store, log_end.end, last)
        store.settle()


def _has_files(table: TopicTable, key: QueueKey) -> bool:
    """Say whether a queue has files. True if the kernel cannot list them."""
    queue = table.queues.get(key)
    return queue is not None and (queue.run.fault() is not None or bool(queue.run.segments))


def _roll_forward(store: StoreFiles, settled: Watermark, newest: Watermark | None = None) -> None:
    """Recover from the settled watermark.

    Later records stay up to the first incomplete one, and get new entries and keys.

    After a power cut any byte after the settled state may be lost. `newest` is the newest watermark if it was written
    after the last start of the machine, otherwise None. If it is given, the records up to its end were written. If a
    sync may have failed, everything that it may have missed is written again.
    """
    end = _roll_forward_end(store, settled, newest)
    synced = newest if newest is not None and newest.is_syncing else None
    # The writer of an open session did not record all files that it wrote.
    dirty = None if synced is None or synced.is_open else synced.dirty
    number = (read_watermark(store.root) or settled).number
    # If a watermark is written before the recovery is complete, it contains the end that was found here.
    store.adopt(
        replace(settled, dirty=dirty, number=number, is_open=True, logged_end=end, is_syncing=synced is not None)
    )
    changed, found = store.changes.folders(), TopicTable(store.root).queues
    queues = [key for key, queue in found.items() if changed is None or queue.run.folder in changed]
    rewind_queues(store, queues, settled.end)
    cleared = store.log_writer.clear_from(end)
    begin = settled.end
    if not store.index.repair(settled.index):
        begin = min(begin, max(store.index.indexed_end(), store.log.segments.begin))
    last = dispatch(store, begin, end, settled.end)
    for key in queues:
        store.queues.clear_behind(key)
    if synced is not None:
        store.log_writer.write_again_from(settled.end, end, store.heartbeat)
        for key in queues:
            store.queues.write_again_from(key, settled.end)
        if changed is None or files.join(store.root, filenames.INDEX) in changed:
            store.index.write_again(settled.index, store.heartbeat)
    register_again(store, settled.end)
    set_groups_back(store, end)
    _LOG.info("rmq: recovered %s: the log ends at %d, cleared %d bytes after it", store.root, end, cleared)
    _close_session(store, end, last)
    store.settle()


def _roll_forward_end(store: StoreFiles, settled: Watermark, newest: Watermark | None) -> int:
    """Return the physical offset where the log ends after a roll forward.

    The arguments are those of `_roll_forward`.
    """
    if newest is None:
        return whole_end(store.log, settled.end, store.heartbeat)
    return _known_end(store, settled.end, max(newest.end, newest.logged_end))


def _known_end(store: StoreFiles, begin: int, known_end: int) -> int:
    """Return the physical offset of the first lost record in [begin, known_end). Return `known_end` if none is lost.

    All of these records were written, and the machine was not restarted since. So a record with zeros is doubtful, but
    is not treated as lost.
    """
    physical_offset, doubtful = walk_whole(store.log, begin, known_end, store.heartbeat)
    if doubtful:
        _LOG.warning(
            "rmq: %s: %d messages, the first one at physical offset %d, have zeros in their topic or properties, as a "
            "failed sync leaves them. The messages are kept, because properties may contain NUL characters. If the "
            "kernel's log (dmesg) has an I/O error, check these messages",
            store.root,
            len(doubtful),
            doubtful[0],
        )
    if physical_offset < known_end:
        _LOG.error(
            "rmq: %s: lost the messages at physical offsets [%d, %d): they were written, and are no longer complete "
            "records. After a failed sync the kernel may drop bytes from memory: check the kernel's log (dmesg) for a "
            "full or failing disk",
            store.root,
            physical_offset,
            known_end,
        )
    return physical_offset


def _close_session(store: StoreFiles, end: int, last: LastRecord | None) -> None:
    """Record that all records up to `end` have entries and keys. `last` is the last dispatched record, or None."""
    watermark = store.watermark
    if last is None:
        store.close_session(end, watermark.last_ms, watermark.last_place, watermark.last_head)
    else:
        header = store.log.bytes_at(last.physical_offset, RECORD_HEAD.itemsize)
        store.close_session(end, max(last.store_time_ms, watermark.last_ms), last.physical_offset, header)
