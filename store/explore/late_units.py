"""Second looks at units: those of a live writer that were about to come, and due times that are by no level's delay."""

from collections.abc import Callable, Iterator, Mapping

from rmq_spark.store.errors import StoreError
from rmq_spark.store.explore.finding import NOTE, REPAIRABLE, Finding
from rmq_spark.store.explore.unmet import Joined, Unmet
from rmq_spark.store.format.batch_unit import BATCH_UNIT
from rmq_spark.store.format.delay_levels import DelayLevels
from rmq_spark.store.format.filenames import CONSUME_QUEUE, SCHEDULE_TOPIC
from rmq_spark.store.format.record import Record
from rmq_spark.store.format.tags_code import tags_code_of
from rmq_spark.store.log.commit_log import CommitLog
from rmq_spark.store.log.queues import ConsumeQueue
from rmq_spark.store.units import QueueKey

_LOOKS, _LOOK_S, _LOOKED_AGAIN = 4, 0.05, 10_000


def look_again(
    joined: Joined,
    find_queue: Callable[[QueueKey], ConsumeQueue | None],
    log: CommitLog,
    levels: DelayLevels,
    sleep: Callable[[float], None],
) -> None:
    """Leave out of what does not agree what does by now: units of a live writer that were about to come."""
    for attempt in range(_LOOKS):
        if not joined.unmet:
            return
        sleep(_LOOK_S * 2**attempt)
        joined.unmet = [run for run in joined.unmet if not _agrees_now(joined, find_queue(run.key), run, log, levels)]


def _agrees_now(joined: Joined, queue: ConsumeQueue | None, unmet: Unmet, log: CommitLog, levels: DelayLevels) -> bool:
    if queue is None or queue.layout is BATCH_UNIT or unmet.count > _LOOKED_AGAIN:
        return False
    queue.run.look()
    try:
        units = queue.read(unmet.begin, unmet.end)
    except StoreError:
        return unmet.last < log.segments.begin
    finally:
        queue.run.close()
    if len(units) < unmet.end - unmet.begin:
        return False
    for at in range(len(units)):
        record = log.record_at(int(units.physical_offsets[at]))
        told = (int(units.sizes[at]), int(units.queue_offsets[at]), unmet.key.topic, unmet.key.queue_id)
        if not isinstance(record, Record) or told != (
            record.total_size,
            record.queue_offset,
            record.topic.decode("utf-8", "replace"),
            record.queue_id,
        ):
            return False
        if unmet.key.topic != SCHEDULE_TOPIC and int(units.tags_codes[at]) != tags_code_of(record, levels):
            return False
    joined.ranges.add(unmet.key, units.queue_offsets)
    return True


def odd_times(
    odd_delays: Mapping[QueueKey, Mapping[int, tuple[int, int]]],
    joined: Joined,
    queues: Mapping[QueueKey, ConsumeQueue],
) -> Iterator[Finding]:
    """Yield units of SCHEDULE_TOPIC_XXXX that are due at a time by no delay that their level has otherwise."""
    for key, delays in odd_delays.items():
        queue = queues[key]
        for delay_ms, (count, number) in delays.items():
            path, position = queue.run.path_of(number)
            is_single = count == 1 and joined.ranges.end(key) - (joined.ranges.begin(key) or 0) > 1
            yield Finding(
                REPAIRABLE if is_single else NOTE,
                CONSUME_QUEUE,
                f"{count} messages of delay level {key.queue_id + 1} are due after {delay_ms} ms, which is not "
                "the level's delay: another table of levels, or a damaged unit",
                path,
                position,
                topic=key.topic,
                queue_id=key.queue_id,
                messages=count,
                next_step="rmq_spark.repair makes the queue anew from the log." if is_single else "",
                action="rebuild" if is_single else "leave",
            )
