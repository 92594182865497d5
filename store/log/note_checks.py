"""What can be checked of our notes: whether the log and the queues on disk are those of which they speak."""

from rmq_spark.store.disk.kernel_errors import is_unreadable
from rmq_spark.store.errors import DamageError, StoreError, StorePathError
from rmq_spark.store.format.record import MAGIC_BLANK, MAGIC_V1, MAGIC_V2, RECORD_HEAD
from rmq_spark.store.format.watermark import Watermark
from rmq_spark.store.log.queues import ConsumeQueue
from rmq_spark.store.log.store_files import StoreFiles
from rmq_spark.store.log.topics import TopicTable
from rmq_spark.store.log.watermark_file import read_watermarks, watermark_path


def refuse_lost_log(store: StoreFiles, note: Watermark | None) -> None:
    """Raise StorePathError if the end of a log that the note vouches for has no file: that is no crash.

    Recovery would take what is missing for torn, and with it the units of messages that were acknowledged.
    """
    end = store.log.segments.end
    if note is None or note.last_place < end or store.read_checkpoint()[1] != note.checkpoint_crc:
        return
    raise StorePathError(
        f"{', '.join(store.folders)}: the segment with the last message is missing. It lies at physical offset "
        f"{note.last_place}, and the segments that are there end at {end}. Nothing was changed. If the commit log lies "
        "elsewhere, or in several folders, name all of them (commitLogPath) and see that they are mounted; if segments "
        f"were lost, restore them from a copy, or remove {watermark_path(store.root)} to go on with what is left."
    )


def begins_record(store: StoreFiles, place: int) -> bool:
    """Say whether a record, or a filler, begins at a physical offset, be it torn."""
    return int.from_bytes(store.log.bytes_at(place, 8)[4:], "big") in (MAGIC_V1, MAGIC_V2, MAGIC_BLANK)


def is_dispatched_from(store: StoreFiles, physical_offset: int) -> bool:
    """Say whether some queue has a unit for a record from a physical offset on.

    Behind what a writer of ours noted there is none, unless a broker recovered the store, went on from there and died
    before it wrote a checkpoint, or newer notes are lost. No queue that cannot be read keeps writers from the others.
    """
    for queue in TopicTable(store.root).queues.values():
        try:
            if not queue.run.is_damaged() and _has_unit_from(store, queue, physical_offset):
                return True
        except StoreError as error:
            if not is_unreadable(error):
                raise
    return False


def _has_unit_from(store: StoreFiles, queue: ConsumeQueue, physical_offset: int) -> bool:
    """Say the same of one queue.

    Where segments are lost with their records, units name places beyond the log's files; but not the first of them,
    at the latest for a record where a segment would begin. Where no unit names a place nearer, one beyond is damage.
    """
    place = queue.last_place()
    if place > store.log.segments.end:
        end = queue.search_written_end()
        first = queue.first_from(physical_offset, end)
        place = int(queue.read(first, first + 1).physical_offsets[0])
        queue.run.close()
    return physical_offset <= place <= store.log.segments.end


def is_within_log(store: StoreFiles, settled: Watermark) -> bool:
    """Say whether what was settled is there, and recovery can begin where it ended: retention may have passed it."""
    if store.read_checkpoint()[1] != settled.checkpoint_crc:
        return False  # a broker writes it whenever it runs
    return has_last_record(store, settled) and settled.end >= store.log.segments.begin


def has_last_record(store: StoreFiles, note: Watermark) -> bool:
    """Say whether the last record that the note names is still where it was."""
    return note.last_place < 0 or store.log.bytes_at(note.last_place, RECORD_HEAD.itemsize) == note.last_head


def refuse_settled_cut(store: StoreFiles, end: int) -> None:
    """Raise DamageError if the log is found to end, at physical offset `end`, before a record that was settled.

    No crash takes what was synced: some record before that one is damaged.
    """
    settled = read_watermarks(store.root)[1]
    if settled is None or end > settled.last_place or store.read_checkpoint()[1] != settled.checkpoint_crc:
        return
    segment = store.log.segments.holding(end)
    raise DamageError(
        f"a record of the settled part of the log, which ends at physical offset {settled.end}",
        segment.path if segment is not None else store.folders[0],
        end - segment.begin if segment is not None else end,
        "a whole record",
        "none",
        "`rmq check` says how many messages lie behind it. Restore the file from a copy; or, to go on without them, "
        f"remove {watermark_path(store.root)}.",
    )
