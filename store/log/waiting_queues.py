"""Queues of messages that wait, lost: retention asks for them before it deletes what their messages lie in."""

from rmq_spark.store.disk import files
from rmq_spark.store.errors import DamageError
from rmq_spark.store.format import filenames
from rmq_spark.store.format.filenames import SCHEDULE_TOPIC, TIMER_TOPIC, WAITING_TOPICS
from rmq_spark.store.format.record import Record
from rmq_spark.store.log.lost_queues import has_files
from rmq_spark.store.log.queue_registration import refuse_lost_queue
from rmq_spark.store.log.queue_registry import lost_queue
from rmq_spark.store.log.queues import ConsumeQueue
from rmq_spark.store.log.store_files import StoreFiles
from rmq_spark.store.log.waiting_messages import KEEPS, MEND_QUEUE
from rmq_spark.store.units import QueueKey


def refuse_lost_waiting_queues(store: StoreFiles) -> None:
    """Raise DamageError if messages were stored to wait in a queue that has no files, or files without units.

    Nobody deletes the topics of such queues, so what the registry names counts whatever topics.json says. The part of
    the log that a broker wrote is searched once for queues that the registry does not name.
    """
    held, end = store.registry.read(), store.note.end
    places = {key: place for key, place in held.queues.items() if key.topic in WAITING_TOPICS} if held else {}
    for key, place in places.items():
        queue = _queue(store, key)
        if place < end and not has_files(queue):
            raise _held(lost_queue(store.root, key, place, store.log.segments.begin))
        if 0 <= place < end and _is_blank(queue) and _is_of(store, key, place):
            what = f"queue {key} has had messages, and its files have no units"
            raise DamageError(what, queue.run.folder, 0, "units", "none", MEND_QUEUE)
    known = {QueueKey(SCHEDULE_TOPIC, number) for number in range(len(store.levels))} | {QueueKey(TIMER_TOPIC, 0)}
    for key in sorted(known - places.keys()):
        if not has_files(_queue(store, key)):
            try:
                refuse_lost_queue(store, key, end)
            except DamageError as error:
                raise _held(error) from error


def _queue(store: StoreFiles, key: QueueKey) -> ConsumeQueue:
    return ConsumeQueue(key, files.join(store.root, filenames.queue_folder(key.topic, key.queue_id)))


def _is_blank(queue: ConsumeQueue) -> bool:
    """Say whether no byte of a queue's files was written."""
    return not queue.run.is_damaged() and not any(
        True for segment in queue.run.segments for _ in files.data_extents(segment.path, 0, segment.size)
    )


def _is_of(store: StoreFiles, key: QueueKey, place: int) -> bool:
    """Say whether the record at a physical offset is of a queue."""
    record = store.log.record_at(place)
    return isinstance(record, Record) and (record.topic.decode("utf-8", "replace"), record.queue_id) == (
        key.topic,
        key.queue_id,
    )


def _held(error: DamageError) -> DamageError:
    """Return the error of a lost queue, as one that keeps retention from its work."""
    step = error.next_step.replace("rmq_spark.repair", "`rmq repair`")
    return DamageError(error.what, error.path, error.position, error.expected, error.found, f"{KEEPS} {step}")
