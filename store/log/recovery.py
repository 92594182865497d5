"""What a writer finds when it takes the lock, and how it makes the store whole again before it appends.

Nine cases, told apart by `abort`, by our watermark and by what stands where it points:

| case | sign | what is done |
| --- | --- | --- |
| as we left it | the watermark agrees with the disk | nothing |
| one of ours died | and a section is open, and the machine ran on | what it logged is dispatched, half a record goes |
| notes may be lost | and others wrote it, see `StoreFiles.is_to_be_asked` | what stands behind it goes |
| a repair began | the note of a rebuild exists | what it names is removed, then all is looked at as after a crash |
| a sync failed | the watermark says that one began | what it may not have written is written again, and synced |
| the power went | `abort`, and what we settled last | whole records behind that are dispatched, the rest goes |
| memory was lost | the same, and files that say other than the watermark | the same |
| crashed | `abort` is there | readers' end of the log holds: what is behind goes, missing units are made |
| a broker's, or new | no `abort` | readers' end of the log holds; stale bytes behind it are made zero |

Only this module takes bytes back. What it takes back was never acknowledged, or its body is torn.
Source: CommitLog#recoverNormally, #recoverAbnormally, ConsumeQueueStore#recover, DefaultMessageStore#doReput (5.3).
"""

import logging
from dataclasses import replace
from enum import Enum
from functools import partial

from rmq_spark.store.disk import files, host
from rmq_spark.store.disk.changing import Disk
from rmq_spark.store.format import filenames
from rmq_spark.store.format.index_state import IndexState
from rmq_spark.store.format.rebuild_note import Rebuild
from rmq_spark.store.format.record import RECORD_HEAD
from rmq_spark.store.format.watermark import Watermark
from rmq_spark.store.log.chain import Closing, Left
from rmq_spark.store.log.changes import Changes, write_again
from rmq_spark.store.log.dispatching import LastRecord, dispatch, last_lives
from rmq_spark.store.log.group_offsets import set_groups_back
from rmq_spark.store.log.index_reach import last_indexed_place
from rmq_spark.store.log.lost_queues import refuse_lost_folder
from rmq_spark.store.log.note_checks import (
    begins_record,
    has_last_record,
    is_end,
    is_head_lost,
    is_same_boot,
    is_within_log,
    refuse_cut,
    refuse_lost_log,
    units_from,
)
from rmq_spark.store.log.queue_registration import (
    is_registry_ahead,
    register_after_others,
    register_again,
    register_queues,
)
from rmq_spark.store.log.queue_registry import registry_path
from rmq_spark.store.log.rebuilding import read_rebuild, remove_rebuild, take_away, write_rebuild
from rmq_spark.store.log.settled_units import is_of, rewind_queues
from rmq_spark.store.log.store_files import StoreFiles, nothing_written
from rmq_spark.store.log.tail import LogTail
from rmq_spark.store.log.topics import TopicTable
from rmq_spark.store.log.torn_tail import walk_whole, whole_end
from rmq_spark.store.log.watermark_file import read_watermark, read_watermarks, watermark_path
from rmq_spark.store.units import QueueKey

_LOG = logging.getLogger("rmq_spark")
_BATCH_RECORDS = 10_000  # dispatched together: bounds memory


def prepare(store: StoreFiles) -> None:
    """Make the store whole and know where it ends. Raises DamageError for what no recovery may pass over."""
    store.look()
    note, settled = read_watermarks(store.root)
    has_abort = store.has_abort()
    ran_on = note is not None and is_same_boot(note)
    refuse_lost_log(store, note if ran_on else settled)
    rebuild = read_rebuild(store.root)
    if rebuild is not None:
        _finish_rebuild(store, rebuild)
        return
    course = _course(store, note, settled, has_abort, ran_on=ran_on)
    if course in (_Course.LOOK, _Course.ROLL):
        store.sound_queues.clear()
    closing = Closing.CRASHED if has_abort else Closing.CLOSED
    if note is not None and note.is_syncing and ran_on:
        _repeat_sync(store, note, settled if course is not _Course.LOOK and has_abort else None, closing)
    elif note is None or course is _Course.LOOK:
        _take_over(store, closing)
    elif course is _Course.ROLL:
        assert settled is not None
        if note.is_settled and ran_on and not store.registry.exists():
            refuse_lost_folder(store.root, store.log)
        _roll_forward(store, settled, note if ran_on else None)
    elif note.is_open:
        _finish_section(store, note)
    else:
        _go_on(store, note, has_abort, is_doubtful=course is _Course.FINISH)


def begin_rebuild(store: StoreFiles, rebuild: Rebuild) -> None:
    """Have the next section make files anew from the log. For a repair, under the store's lock.

    First what a dead writer wrote in part is taken back. Then the note of the rebuild is written, durably: from here
    readers refuse these queues until they are complete again.
    """
    _take_back(store)
    write_rebuild(store.disk, store.root, rebuild)
    _vouch_for_nothing(store)


def forget_note(store: StoreFiles) -> None:
    """Remove our note and the registry of queues, for a repair: the next section makes both again."""
    _take_back(store)
    remove_note(store.disk, store.root)


def remove_note(disk: Disk, root: str) -> None:
    """Remove our note and the registry of queues, durably. Nothing must hang on what the note says."""
    for path in (watermark_path(root), registry_path(root)):
        if files.file_size(path) >= 0:
            disk.remove(path)
            disk.sync_folder(files.parent(path))


def _go_on(store: StoreFiles, note: Watermark, has_abort: bool, *, is_doubtful: bool) -> None:
    """Go on from the note of a closed section; if that is doubtful, take back what newer ones may have left."""
    store.believe(note)
    if note.is_settled and has_abort:
        # Who settled the store failed, or died, after the note was written: a sync of the note may have failed.
        write_again(store.disk, watermark_path(store.root), 0)
    if not store.registry.was_sought:  # once by each writer
        refuse_lost_folder(store.root, store.log)
        if not store.registry.exists():  # an older release left the store
            register_queues(store, note.end)
        store.registry.was_sought = True
    if is_doubtful:
        _finish_section(store, note)


def _vouch_for_nothing(store: StoreFiles) -> None:
    """Have recovery look at all of the log: it goes by the checkpoint and by our note."""
    store.vouch_for_nothing()
    remove_note(store.disk, store.root)


def _take_back(store: StoreFiles) -> None:
    """Take back what recovery by our note would take back, and have the rest of the log on disk for good.

    Only the note tells how far a dead writer came, and what a power cut may have torn: a record is whole by its head
    and the CRC of its body, and may lack its properties all the same. So this comes before the note goes. No units and
    no keys are made: the files for them may be those that are damaged.
    """
    if read_rebuild(store.root) is not None:
        _finish_failed_sync(store)
        return  # what the note said was done before the rebuild was noted
    store.look()
    note, settled = read_watermarks(store.root)
    if note is None:
        return
    ran_on, known = is_same_boot(note), None
    course = _course(store, note, settled, store.has_abort(), ran_on=ran_on)
    if course in (_Course.GO_ON, _Course.FINISH):
        # Which files an open section wrote its writer told nobody.
        known = replace(note, dirty=None) if note.is_open else note
    elif course is _Course.ROLL:
        assert settled is not None
        end = _rolled_end(store, settled, note if ran_on else None)
        known = replace(settled, number=note.number, is_open=True, logged_end=end)
    if known is not None:
        store.believe(known)
        if course is not _Course.GO_ON:
            store.log_writer.clear_from(max(known.end, known.logged_end))
    if note.is_syncing and ran_on:
        _write_again(store, known or note)
    elif known is not None:
        store.sync_changes()


def _finish_rebuild(store: StoreFiles, rebuild: Rebuild) -> None:
    """Make anew what the note of a rebuild names. Its repair is at work, or died at any point."""
    _finish_failed_sync(store)  # it is recorded in our note, and nowhere else
    _vouch_for_nothing(store)
    take_away(store.disk, store.root, rebuild, store.note_progress)
    store.look()
    _take_over(store, Closing.CRASHED)
    remove_rebuild(store.disk, store.root)


class _Course(Enum):
    """What recovery begins with."""

    GO_ON = "the note: nobody else has written since"
    FINISH = "the note: the rest of what is behind it is finished, or taken back"
    ROLL = "what was settled: pages of memory are lost that were written since"
    LOOK = "the files alone: somebody else has written, or nothing of ours can be checked"


def _course(
    store: StoreFiles, note: Watermark | None, settled: Watermark | None, has_abort: bool, *, ran_on: bool
) -> _Course:
    """Decide how far our notes tell the truth. `ran_on`: the machine did since the newest one.

    It may have run on, and pages of memory be lost all the same: the disk failed, and the file system was unmounted and
    mounted again. Then the newest note on disk may be older than the units there, or newer than the log.
    """
    if note is None or (not note.is_settled and not has_abort):
        return _Course.LOOK  # without `abort`: a broker recovered the store and left it in order

    def roll() -> _Course:
        is_rooted = has_abort and settled is not None and is_within_log(store, settled)
        return _Course.ROLL if is_rooted else _Course.LOOK

    if not ran_on:
        # After a power cut the note may be ahead of what it speaks of. Or units may have outlived records that a broker
        # has taken back since: with nothing left to dispatch it leaves a checkpoint that is equal to ours.
        return roll()
    if store.read_checkpoint()[1] != note.checkpoint_crc:
        return _Course.LOOK  # a broker writes it whenever it runs
    if not has_last_record(store, note):
        # Zeros are what lost memory leaves. Other bytes are damage, or somebody else's.
        return roll() if is_head_lost(store, note) else _Course.LOOK
    end = max(note.end, note.logged_end)
    if note.is_open:
        # What follows may be what the dead writer wrote in part: then no unit speaks of it.
        units = list(units_from(store, end))
        if units:
            # One that is no record's is damaged, or outlived its record.
            is_others = begins_record(store, end) and any(is_of(store, *unit) for unit in units)
            return _Course.LOOK if is_others else roll()
        return _Course.FINISH if walk_whole(store.log, note.end, end, store.note_progress)[0] == end else roll()
    if not is_end(store, end):
        return _Course.LOOK
    # A settled note without `abort` is the whole truth. With it the writer died, or newer notes are lost.
    if not (has_abort if note.is_settled else store.is_to_be_asked(note)):
        return _Course.GO_ON
    # If all units are lost, too, what is left of the log, of the index and of the registry must not come to life again.
    return roll() if any(units_from(store, end)) else _Course.FINISH


def _finish_section(store: StoreFiles, note: Watermark) -> None:
    """Finish what a dead writer of ours logged as a whole behind the watermark; take back what it wrote in part.

    The note may be older than what it speaks of: newer ones are lost, and with them all that they told of but pages
    that came to the disk by themselves, and what was synced at once.
    """
    # Which files it wrote in its last section it told nobody: the next settling syncs all there are.
    store.believe(replace(note, dirty=None) if note.is_open else note)
    end = max(note.end, note.logged_end)
    begin = note.end
    if not store.index.repair(note.index):
        begin = min(begin, max(store.index.indexed_end(), store.log.segments.begin))
    cleared = store.log_writer.clear_from(end)
    # Its units are written over with the same bytes: of the last one it may have written a part.
    last = dispatch(store, begin, end, note.end, rewind=True)
    if note.is_open or is_registry_ahead(store, note.end):
        register_again(store, note.end)
    set_groups_back(store, end)
    _close(store, end, last)
    if end != note.end or cleared:
        _LOG.info("rmq: a writer died: [%d, %d) dispatched, %d bytes of a part taken back", note.end, end, cleared)


def _repeat_sync(store: StoreFiles, note: Watermark, settled: Watermark | None, closing: Closing) -> None:
    """Write again and sync what a failed sync may have left off the disk, or raise: then the note of it stays.

    `settled` is given if nobody else wrote since. The kernel may have dropped some of the bytes from memory: a record
    that does not parse, or whose body has another CRC, is lost with what follows it.
    """
    _LOG.warning(
        "rmq: %s: a sync failed, or its writer died in it: what was written since the last settling is written again",
        store.root,
    )
    if settled is not None and settled.settled_number == note.settled_number and is_within_log(store, settled):
        _roll_forward(store, settled, note)
        return
    _write_again(store, note)
    _take_over(store, closing)
    if closing is Closing.CLOSED:
        store.forget_sync()


def _finish_failed_sync(store: StoreFiles) -> None:
    """Write again and sync what a failed sync may have left off the disk, before our note of it is removed."""
    store.look()
    note = read_watermark(store.root)
    if note is not None and note.is_syncing and note.boot == host.boot_id():
        _write_again(store, note)


def _write_again(store: StoreFiles, note: Watermark) -> None:
    begins = {
        segment.path: min(max(note.settled_end - segment.begin, 0), segment.size)
        for segment in store.log.segments.segments
    }
    changes = Changes(store.disk, (store.root, *store.folders), note.dirty, store.note_progress)
    changes.write_again(lambda path: begins.get(path, 0))
    changes.sync()


def _take_over(store: StoreFiles, closing: Closing) -> None:
    """Find the end as a reader does, and make the files agree with it."""
    if closing is Closing.CLOSED:  # a power cut may leave the log without the folder, and all queues are made anew
        refuse_lost_folder(store.root, store.log)
    checkpoint, page_crc = store.read_checkpoint()
    table = TopicTable(store.root)
    left = Left(closing, 0, store.started_ms())
    tail = LogTail(store.log, lambda: left, lambda: checkpoint, table.may_exist, lambda: last_indexed_place(store.root))
    tail.look(table.queues, table.queues, whole=True)
    # Of a topic that a broker made again, or lost: only that queue is refused, when it is written to.
    homeless = {key for key in tail.faults if closing is Closing.CLOSED and not _has_files(table, key)}
    for key, fault in tail.faults.items():
        if key not in homeless:
            raise fault
    # Damage, and a torn record, are refused here, before anything is changed.
    if closing is Closing.CRASHED:
        refuse_cut(store, tail.end)
    lives = last_lives(store, tail.first_unitless(), tail.end) if closing is Closing.CRASHED else {}
    place, head = tail.last_record
    before = read_watermark(store.root)
    store.believe(
        replace(
            nothing_written(),
            number=before.number if before is not None else 0,
            end=tail.end,
            last_ms=tail.newest_ms,
            last_place=place if head else -1,
            last_head=head,
            checkpoint_crc=page_crc,
            # After a crash the checkpoint vouches for what comes before the begin of the look.
            settled_end=tail.end if closing is Closing.CLOSED else tail.begin,
            dirty=() if closing is Closing.CLOSED else None,
            # A clean shutdown flushed the index. Without its state a later recovery would remove its files.
            index=store.index.state() if closing is Closing.CLOSED else IndexState(),
        )
    )
    for key, queue in table.queues.items():
        store.note_progress()
        unit = tail.ends.get(key, queue.run.begin)
        if queue.run.end > unit:
            # Behind a unit that is damaged, settled ones may follow: those before the begin of the look stay.
            settled_end = tail.begin if closing is Closing.CRASHED else 0
            store.queues.cut(key, unit, settled_end, partial(is_of, store, key))
            queue.run.look()
        queue.run.close()
    is_same = before is not None and has_last_record(store, before)
    register_after_others(
        store,
        table.queues.values(),
        same_until=before.end if before is not None and is_same else None,
        searched_from=tail.end if homeless else tail.begin,
    )
    cleared = store.log_writer.clear_from(tail.end)
    if closing is Closing.CLOSED:
        # Before a note says that all is settled: a power cut could bring back what was cleared, right behind the end.
        store.sync_changes()
    else:
        indexed = store.index.drop_unsafe(checkpoint.index_msg_timestamp)
        # Records before the first one without a unit have theirs, or belong to a topic that was deleted.
        unitless = tail.first_unitless()
        begin = min(unitless, max(indexed, store.log.segments.begin))
        last = dispatch(store, begin, tail.end, unitless, lives=lives)
        set_groups_back(store, tail.end)
        _LOG.info("rmq: recovered %s: the log ends at %d, %d bytes behind it taken back", store.root, tail.end, cleared)
        _close(store, tail.end, last)
        store.settle()


def _has_files(table: TopicTable, key: QueueKey) -> bool:
    """Say whether a queue has files, also where the kernel does not let them be listed."""
    queue = table.queues.get(key)
    return queue is not None and (queue.run.fault() is not None or bool(queue.run.segments))


def _roll_forward(store: StoreFiles, settled: Watermark, noted: Watermark | None = None) -> None:
    """What was settled is there; what came later counts as far as it was written whole, and gets new units and keys.

    After a power cut any of them may be lost. `noted` is the newest note, where it is of this boot: the records that it
    names are known. If a sync may have failed, everything that it may not have written is written again.
    """
    end = _rolled_end(store, settled, noted)
    synced = noted if noted is not None and noted.is_syncing else None
    # The writer of an open section did not tell all files that it wrote.
    dirty = None if synced is None or synced.is_open else synced.dirty
    number = (read_watermark(store.root) or settled).number
    # A note that is written before the end says how far the log was found to go.
    store.believe(
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
        store.log_writer.write_again_from(settled.end, end, store.note_progress)
        for key in queues:
            store.queues.write_again_from(key, settled.end)
        if changed is None or files.join(store.root, filenames.INDEX) in changed:
            store.index.write_again(settled.index, store.note_progress)
    register_again(store, settled.end)
    set_groups_back(store, end)
    _LOG.info("rmq: recovered %s: the log ends at %d, %d bytes behind it taken back", store.root, end, cleared)
    _close(store, end, last)
    store.settle()


def _rolled_end(store: StoreFiles, settled: Watermark, noted: Watermark | None) -> int:
    """Return where the log ends that is rolled forward from what was settled; `noted` as for `_roll_forward`."""
    if noted is None:
        return whole_end(store.log, settled.end, store.note_progress)
    return _known_end(store, settled.end, max(noted.end, noted.logged_end))


def _known_end(store: StoreFiles, begin: int, known_end: int) -> int:
    """Return where the first record of [begin, known_end) begins that is lost, `known_end` if none is.

    The writer had written all of them, and the machine ran on: zeros are a reason to doubt a record, not to lose it.
    """
    place, doubtful = walk_whole(store.log, begin, known_end, store.note_progress)
    if doubtful:
        _LOG.warning(
            "rmq: %s: the topic or properties of %d messages, the first one at physical offset %d, have zeros where a "
            "failed sync would leave them. The messages are kept: properties may have NUL characters. If the kernel's "
            "log (dmesg) has an I/O error, look at them",
            store.root,
            len(doubtful),
            doubtful[0],
        )
    if place < known_end:
        _LOG.error(
            "rmq: %s: messages at physical offsets [%d, %d) are lost: they were written, and are no whole records any "
            "more. After a failed sync the kernel may drop bytes from memory: see the kernel's log (dmesg) for a disk "
            "that is full or fails",
            store.root,
            place,
            known_end,
        )
    return place


def _close(store: StoreFiles, end: int, last: LastRecord | None) -> None:
    """Say that all records up to `end`, of which `last` is the last if any were met, have their units and keys."""
    note = store.note
    if last is None:
        store.close_section(end, note.last_ms, note.last_place, note.last_head)
    else:
        head = store.log.bytes_at(last.physical_offset, RECORD_HEAD.itemsize)
        store.close_section(end, max(last.store_time_ms, note.last_ms), last.physical_offset, head)
