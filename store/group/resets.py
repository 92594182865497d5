"""Resets and suspended queues of a group: the files `resets.json` and `suspended.json` in `rmq/groups/<group>/`.

A reset makes the queries of a group seek to given offsets. Each reset has a number, which is larger than the number
before and not smaller than the reset's time (ms since the epoch). So numbers do not decrease even if the file is lost,
and queries do not miss the next reset. For each queue, `resets.json` contains the offset and the number of the last
reset of that queue. So a query that has applied all resets up to some number finds all later ones there, even after a
year.

A suspended queue is a queue in which an orderly listener failed. `suspended.json` contains the offset where the queue
resumes. The outcome of a batch in a queue is either such a suspension, or that the queue resumes normally. The commit
of a batch writes the outcomes under the store's lock, before its intent and its row in the ledger. After a crash the
batch is repeated:

| time of the crash | state on disk | outcome of the repeated batch |
| --- | --- | --- |
| before the write | the old file | is written |
| between the write and the intent | the new outcome, but no dead letters | replaces the new outcome |
| after the intent | the new outcome, and its dead letters will follow | replaces it if the dead letters differ |

So an outcome may only move a queue back, because messages before `resume` may need another attempt. If an attempt has
decided that a row becomes a dead letter, every further attempt produces the same dead letter until it is in the store
(`store/delivery/send_back_ledger.py`). Otherwise a queue could continue after a row about which a later attempt decided
differently.

A batch that was fenced may be committed after another query has suspended one of its queues. Then the suspension by the
other query stays (`SuspendedQueues.replaceable`), because that query has not given its listener any later row.

Each change of `suspended.json` has a number, which counts up. The offset of a query contains the number of the last
change that the query knows, so that the query returns to a suspended row only once. Readers need no lock, because both
files are replaced atomically.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from rmq_spark.store.disk.write import Disk
from rmq_spark.store.format.side_file import encode_side_file, number_of, text_of
from rmq_spark.store.group.group_files import GroupLock, GroupPaths, make_group_folder
from rmq_spark.store.log.store_state import read_side_file
from rmq_spark.store.model import CommitKey, QueueKey, SuspendedQueues, Suspension

_WHAT = (
    "the resets of a consumer group; without the file, queries that have not applied a reset yet never apply it. A new "
    "reset of all queues replaces the lost ones: remove the file, and reset the group again"
)
_NEXT_STEP = (
    "Restore the file from a copy. Or stop the group's queries, remove the file and start them with new checkpoints."
)


@dataclass(frozen=True, slots=True)
class Target:
    """The last reset of one queue: the queue offset to which the queue was reset, and the number of that reset."""

    offset: int
    number: int


@dataclass(frozen=True, slots=True)
class Resets:
    """All resets of a group.

    `number` and `time_ms` (ms since the epoch) are those of the last reset. `targets` contains the last reset of each
    queue.
    """

    number: int = 0
    time_ms: int = 0
    targets: Mapping[QueueKey, Target] = field(default_factory=dict)

    def since(self, number: int) -> dict[QueueKey, int]:
        """Return the reset offset of each queue that was reset after the reset with the number `number`."""
        return {queue: target.offset for queue, target in self.targets.items() if target.number > number}

    def numbers(self) -> dict[QueueKey, int]:
        """Return the number of the last reset of each queue."""
        return {queue: target.number for queue, target in self.targets.items()}

    def followed_by(self, targets: Mapping[QueueKey, int], time_ms: int) -> "Resets":
        """Return these resets and one more, which was made at `time_ms` and resets the queues in `targets`."""
        number = max(self.number + 1, time_ms)
        added = {queue: Target(offset, number) for queue, offset in targets.items()}
        return Resets(number, time_ms, {**self.targets, **added})


NO_RESETS = Resets()


def read_resets(path: str) -> Resets:
    """Return the content of the file at `path` (`GroupPaths.resets`), or NO_RESETS if the file does not exist.

    Takes no lock. Raises DamageError if the file is damaged, and StoreError if a newer version of rmq-spark wrote it.
    """
    return read_side_file(path, _WHAT, _NEXT_STEP, _build_resets) or NO_RESETS


def add_reset(paths: GroupPaths, disk: Disk, lock: GroupLock, targets: Mapping[QueueKey, int], time_ms: int) -> Resets:
    """Record a reset of the queues in `targets` durably, and return all resets.

    The caller must hold the group's `lock`. `time_ms` is the time of the reset in ms since the epoch. After a crash,
    the file contains either the old resets or the new ones. Raises the errors of `read_resets` and of `Disk`.
    """
    assert lock.is_held, f"the lock of {paths.group} is not held"
    assert targets, "a reset needs a queue"
    assert all(offset >= 0 for offset in targets.values()), targets
    resets = read_resets(paths.resets).followed_by(targets, time_ms)
    disk.replace(paths.resets, encode_resets(paths.group, resets))
    return resets


def encode_resets(group: str, resets: Resets) -> bytes:
    """Encode resets as JSON, with a list `[offset, number]` for each topic and queue id."""
    topics: dict[str, dict[str, list[int]]] = {}
    for queue, target in sorted(resets.targets.items()):
        topics.setdefault(queue.topic, {})[str(queue.queue_id)] = [target.offset, target.number]
    fields = {"group": group, "number": resets.number, "timeMs": resets.time_ms, "targets": topics}
    return encode_side_file(fields)


def _build_resets(fields: dict[str, Any]) -> Resets:
    text_of(fields, "group")
    number = number_of(fields, "number", least=1)
    targets = {}
    for topic, queues in fields["targets"].items():
        for queue_id, (offset, reset) in queues.items():
            target = {"offset": offset, "number": reset}
            key = QueueKey(topic, int(queue_id))
            targets[key] = Target(number_of(target, "offset"), number_of(target, "number", least=1))
            if key.queue_id < 0 or reset > number:
                raise ValueError(f"queue {key}: expected the number of a reset up to {number}, found {reset}")
    return Resets(number, number_of(fields, "timeMs"), targets)


_SUSPENDED_WHAT = (
    "the queues of a consumer group that an orderly listener suspended; without the file they resume after rows that "
    "the listener was not given"
)
_SUSPENDED_NEXT_STEP = (
    "Restore the file from a copy. Or stop the group's queries, remove the file, and reset the group to its offsets in "
    "config/consumerOffset.json: then its listener gets all those rows, some of them again."
)


NOTHING_SUSPENDED = SuspendedQueues()


def read_suspended(root: str, group: str) -> SuspendedQueues:
    """Return the suspended queues of a group. Takes no lock.

    Raises DamageError if the file is damaged, and StoreError if a newer version of rmq-spark wrote it.
    """
    return (
        read_side_file(GroupPaths(root, group).suspended, _SUSPENDED_WHAT, _SUSPENDED_NEXT_STEP, _build_suspended)
        or NOTHING_SUSPENDED
    )


def write_outcomes(
    root: str,
    group: str,
    key: CommitKey,
    outcomes: Mapping[QueueKey, Suspension | None],
    known: Mapping[QueueKey, int] | None = None,
) -> None:
    """Record the outcomes of the batch `key` durably. Call this before the batch's intent is written.

    The caller must hold the store's lock. `outcomes` contains the new suspension of each queue, or None if the queue
    resumes. `known` contains for each queue the number of the last change that the task of the batch knew. If another
    query has suspended a queue after that change, its suspension stays. Raises the errors of `read_suspended` and of
    `Disk`; after an error the file is unchanged.
    """
    paths, disk = GroupPaths(root, group), Disk()
    before = read_suspended(root, group)
    outcomes = before.replaceable(outcomes, key, known or {})
    if not before.is_changed_by(outcomes, key):
        return
    make_group_folder(paths, disk)  # the folder does not exist yet if the query could not join the group
    disk.replace(paths.suspended, encode_suspended(group, before.followed_by(outcomes, key)))


def forget_suspended(root: str, group: str, queues: Collection[QueueKey]) -> None:
    """Remove `queues`, which were reset, from the suspended queues durably. The caller must hold the store's lock.

    The listener then gets rows again that became dead letters, and their failures are counted from 0 again. Call this
    only when the reset is durable. If a crash lost the reset but not this removal, a query that must return to a
    suspended row would not do so. Raises the errors of `write_outcomes`.
    """
    before = read_suspended(root, group)
    after = before.without(queues)
    if after is not before:
        Disk().replace(GroupPaths(root, group).suspended, encode_suspended(group, after))


def encode_suspended(group: str, suspended: SuspendedQueues) -> bytes:
    """Encode suspended queues as JSON, with one object for each topic and queue id."""
    topics: dict[str, dict[str, Any]] = {}
    for queue, one in sorted(suspended.queues.items()):
        topics.setdefault(queue.topic, {})[str(queue.queue_id)] = {
            "resume": one.resume,
            "untilMs": one.until_ms,
            "attempts": {str(offset): count for offset, count in sorted(one.attempts.items())},
            "sent": sorted(one.sent),
            "dead": sorted(one.dead),
            "number": one.number,
            "queryId": one.query_id,
            "batchId": one.batch_id,
        }
    return encode_side_file({"group": group, "number": suspended.number, "queues": topics})


def _build_suspended(fields: dict[str, Any]) -> SuspendedQueues:
    text_of(fields, "group")
    number = number_of(fields, "number", least=1)
    queues = {
        QueueKey(topic, int(queue_id)): _build_one(one, number)
        for topic, found in fields["queues"].items()
        for queue_id, one in found.items()
    }
    if any(queue.queue_id < 0 for queue in queues):
        raise ValueError("expected queue ids of at least 0, found a negative one")
    return SuspendedQueues(number, queues)


def _build_one(fields: dict[str, Any], last: int) -> Suspension:
    number = number_of(fields, "number", least=1)
    if number > last:
        raise ValueError(f"expected a change up to {last}, found {number}")
    return Suspension(
        number_of(fields, "resume"),
        number_of(fields, "untilMs"),
        {_whole(offset): number_of(fields["attempts"], offset, least=1) for offset in fields["attempts"]},
        frozenset(map(_whole, fields["sent"])),
        frozenset(map(_whole, fields["dead"])),
        number,
        text_of(fields, "queryId"),
        number_of(fields, "batchId"),
    )


def _whole(value: Any) -> int:
    number = int(value)
    if number < 0:
        raise ValueError(f"expected a queue offset of at least 0, found {value!r}")
    return number
