"""Offsets that a group was told to go to: `rmq/groups/<group>/resets.json`.

A reset has a number, which counts up and is no less than the time (ms since the epoch): so numbers do not run back if
the file is lost, and queries that applied one do not overlook the next. The file holds for each queue the last offset
it was told to go to and the number of that reset. So a query that has applied all up to some number finds what is left,
however many came meanwhile; one that was stopped for a year too.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rmq_spark.store.commit.side_file import encode_side_file, number_of, read_side_file, text_of
from rmq_spark.store.disk.changing import Disk
from rmq_spark.store.group.group_paths import GroupPaths, GroupTurn
from rmq_spark.store.units import QueueKey

_WHAT = (
    "the resets of a consumer group; without the file queries that have not yet gone to the offsets that they were "
    "told to do not go there. The next reset counts for all: remove the file, and reset the group again"
)
_NEXT_STEP = (
    "Restore the file from a copy. Or stop the group's queries, remove the file and start them with new checkpoints."
)


@dataclass(frozen=True, slots=True)
class Target:
    """Where a queue was told to go, a queue offset, and by which reset."""

    offset: int
    number: int


@dataclass(frozen=True, slots=True)
class Resets:
    """All resets of a group so far: number and time (ms since the epoch) of the last one, the target of each queue."""

    number: int = 0
    time_ms: int = 0
    targets: Mapping[QueueKey, Target] = field(default_factory=dict)

    def since(self, number: int) -> dict[QueueKey, int]:
        """Return the offsets that a query goes to which has applied all resets up to `number`."""
        return {queue: target.offset for queue, target in self.targets.items() if target.number > number}

    def numbers(self) -> dict[QueueKey, int]:
        """Return for each queue the number of the last reset that named it."""
        return {queue: target.number for queue, target in self.targets.items()}

    def followed_by(self, targets: Mapping[QueueKey, int], time_ms: int) -> "Resets":
        """Return the resets with one more."""
        number = max(self.number + 1, time_ms)
        added = {queue: Target(offset, number) for queue, offset in targets.items()}
        return Resets(number, time_ms, {**self.targets, **added})


NO_RESETS = Resets()


def read_resets(path: str) -> Resets:
    """Return what the file (`GroupPaths.resets`) holds, NO_RESETS without one. Takes no lock: it is replaced whole.

    Raises DamageError, or StoreError for a file of a newer version.
    """
    return read_side_file(path, _WHAT, _NEXT_STEP, _build) or NO_RESETS


def add_reset(paths: GroupPaths, disk: Disk, turn: GroupTurn, targets: Mapping[QueueKey, int], time_ms: int) -> Resets:
    """Add a reset of the queues in `targets`; return all there are then. It is on disk for good.

    For who has the group's turn. A crash leaves the resets before, or these. Raises what `read_resets` raises.
    """
    assert turn.is_held, f"the turn of {paths.group} is not held"
    assert targets, "a reset names a queue"
    assert all(offset >= 0 for offset in targets.values()), targets
    resets = read_resets(paths.resets).followed_by(targets, time_ms)
    disk.replace(paths.resets, encode_resets(paths.group, resets))
    return resets


def encode_resets(group: str, resets: Resets) -> bytes:
    """Write resets as JSON: `[offset, number]` by topic and queue id."""
    topics: dict[str, dict[str, list[int]]] = {}
    for queue, target in sorted(resets.targets.items()):
        topics.setdefault(queue.topic, {})[str(queue.queue_id)] = [target.offset, target.number]
    fields = {"group": group, "number": resets.number, "timeMs": resets.time_ms, "targets": topics}
    return encode_side_file(fields)


def _build(fields: dict[str, Any]) -> Resets:
    text_of(fields, "group")
    number = number_of(fields, "number", least=1)
    targets = {}
    for topic, queues in fields["targets"].items():
        for queue_id, (offset, reset) in queues.items():
            target = {"offset": offset, "number": reset}
            key = QueueKey(topic, int(queue_id))
            targets[key] = Target(number_of(target, "offset"), number_of(target, "number", least=1))
            if key.queue_id < 0 or reset > number:
                raise ValueError(f"queue {key} with the number {reset}, of {number} resets")
    return Resets(number, number_of(fields, "timeMs"), targets)
