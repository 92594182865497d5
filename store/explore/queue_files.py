"""The files of queues as such: those that cannot be read, those of another length than all others have, and those that
nothing can be made of again.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace

from rmq_spark.store.disk.kernel_errors import is_unreadable
from rmq_spark.store.errors import DamageError, StoreError
from rmq_spark.store.explore.finding import DAMAGE, NOTE, REPAIRABLE, Finding
from rmq_spark.store.explore.seen_log import REBUILD_STEP, area_of
from rmq_spark.store.log.queues import ConsumeQueue
from rmq_spark.store.units import QueueKey

_NO_BROKER = "No broker starts on it."
_RESTORE_STEP = (
    "All its messages have expired, so only its files say which queue offset comes next, and made anew it would begin "
    "at 0, behind which groups already are. Restore them from a copy; if nobody reads the queue, remove its folder."
)


def of_unread(queue: ConsumeQueue, fault: StoreError) -> Finding:
    """Return the finding of a queue whose files cannot be read as such."""
    if is_unreadable(fault):
        what = f"nobody knows what the files of queue {queue.key} hold: {fault}"
        key = queue.key
        return Finding(DAMAGE, area_of(queue), what, queue.run.folder, 0, "", "", key.topic, key.queue_id)
    is_cut = isinstance(fault, DamageError)
    step = REBUILD_STEP if is_cut else "Move what does not belong there away."
    return Finding(
        REPAIRABLE,
        area_of(queue),
        f"the files of queue {queue.key} cannot be read as such: {fault}",
        getattr(fault, "path", queue.run.folder),
        0,
        str(getattr(fault, "expected", "")),
        str(getattr(fault, "found", "")),
        queue.key.topic,
        queue.key.queue_id,
        next_step=f"{_NO_BROKER} {step}",
        action="rebuild" if is_cut else "leave",
    )


def odd_lengths(queues: Mapping[QueueKey, ConsumeQueue], unread: Iterable[QueueKey]) -> Iterator[Finding]:
    """Yield queues whose files have another length than most queues of their kind: brokers have one for all."""
    left_out = set(unread)
    sizes = {
        key: queue.run.segments[0].size for key, queue in queues.items() if key not in left_out and queue.run.segments
    }
    for kind in {type(queues[key]) for key in sizes}:
        alike = [key for key in sizes if type(queues[key]) is kind]
        counts = Counter(sizes[key] for key in alike)
        usual = max(counts, key=lambda size: (counts[size], size))
        for key in alike:
            if sizes[key] != usual:
                yield Finding(
                    REPAIRABLE,
                    area_of(queues[key]),
                    f"the length of the files of queue {key}",
                    queues[key].run.segments[0].path,
                    0,
                    f"{usual} bytes, as those of other queues have",
                    str(sizes[key]),
                    key.topic,
                    key.queue_id,
                    next_step=f"{_NO_BROKER} {REBUILD_STEP}",
                    action="rebuild",
                )


def keep_numbers(findings: Iterable[Finding], has_records: Callable[[QueueKey], bool]) -> Iterator[Finding]:
    """Yield findings, with no queue to be made anew of which the log has no record: it would begin at 0 again."""
    for one in findings:
        is_queue = one.action == "rebuild" and one.topic is not None and one.queue_id is not None
        if is_queue and one.severity != NOTE and not has_records(QueueKey(one.topic or "", one.queue_id or 0)):
            yield replace(one, severity=DAMAGE, next_step=_RESTORE_STEP, action="leave")
        else:
            yield one
