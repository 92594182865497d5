"""Queues that an orderly listener stopped, and where they go on: `rmq/groups/<group>/suspended.json`.

The commit of a batch in which a listener failed writes the file under the store's lock, before the intent and the
ledger's row of that batch:

| a crash | leaves | then the batch is repeated, and |
| --- | --- | --- |
| before it | the file as it was | has an outcome |
| between it and the intent | the new outcome, and no dead letter yet | has an outcome that replaces this one |
| behind the intent | the new outcome; its dead letters come | replaces this one if it has other dead letters |

So an outcome never sends a queue forward, only back: what lies before `resume` may still have to be repeated. And a
dead letter, once decided, is made by every further try until it is in the store
(`store/delivery/stopped_queues.py`); else a queue could go on behind a row that a later try decided otherwise about.

A batch that was fenced may be committed when another query has stopped one of its queues already. That stop stays
(`Suspended.replaceable`): the other query has given its listener no row behind it.

Every change has a number, which counts up for ever. A query's offset names the last one that it knows, so that a
stopped queue is sent back once. Readers need no lock: the file is replaced as a whole.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from rmq_spark.store.commit.keys import CommitKey
from rmq_spark.store.commit.side_file import encode_side_file, number_of, read_side_file, text_of
from rmq_spark.store.disk.changing import Disk
from rmq_spark.store.group.group_paths import GroupPaths, make_group_folder
from rmq_spark.store.units import QueueKey

_WHAT = (
    "the queues that an orderly listener of a consumer group stopped; without it they go on behind the rows that were "
    "not given to the listener"
)
_NEXT_STEP = (
    "Restore the file from a copy. Or stop the group's queries, remove the file, and reset the group to where it "
    "stands in config/consumerOffset.json: then its listener gets all those rows, some for another time."
)


@dataclass(frozen=True, slots=True)
class Suspension:
    """Where a stopped queue goes on (`resume`, a queue offset) and not before `until_ms` (0: at once).

    `attempts` has the failures of the rows that are to come again, by queue offset; `sent` the rows behind the batch's
    begin that earlier ones made dead letters, `dead` those that this one did. `number` counts the changes of the file;
    query and batch say whose outcome it is.
    """

    resume: int
    until_ms: int = 0
    attempts: Mapping[int, int] = field(default_factory=dict)
    sent: frozenset[int] = frozenset()
    dead: frozenset[int] = frozenset()
    number: int = 0
    query_id: str = ""
    batch_id: int = 0

    def is_of(self, key: CommitKey | None) -> bool:
        """Say whether the batch `key`, or one before it of its query, stopped the queue."""
        return (
            key is not None
            and key.batch_id is not None
            and (self.query_id == key.query_id and self.batch_id <= key.batch_id)
        )


@dataclass(frozen=True, slots=True)
class Suspended:
    """All stopped queues of a group, and the number of the last change."""

    number: int = 0
    queues: Mapping[QueueKey, Suspension] = field(default_factory=dict)

    def followed_by(self, outcomes: Mapping[QueueKey, Suspension | None], key: CommitKey) -> "Suspended":
        """Return what is there after a batch: its outcomes replace those of their queues, and of the batch before.

        None is a queue that goes on. A queue that an earlier try of the same batch stopped, and this one did not, goes
        on too.
        """
        number = self.number + 1
        assert key.batch_id is not None, key
        kept = {
            queue: one
            for queue, one in self.queues.items()
            if queue not in outcomes and (one.query_id, one.batch_id) != (key.query_id, key.batch_id)
        }
        stopped = {
            queue: replace(one, number=number, query_id=key.query_id, batch_id=key.batch_id)
            for queue, one in outcomes.items()
            if one is not None
        }
        return Suspended(number, {**kept, **stopped})

    def replaceable(
        self, outcomes: Mapping[QueueKey, Suspension | None], key: CommitKey, known: Mapping[QueueKey, int]
    ) -> dict[QueueKey, Suspension | None]:
        """Return the outcomes of a batch without those of queues that another query has stopped meanwhile.

        `known` has, by queue, the number of the change that the batch's task knew, 0 or nothing for none.
        """
        return {
            queue: outcome
            for queue, outcome in outcomes.items()
            if (one := self.queues.get(queue)) is None
            or one.query_id == key.query_id
            or one.number <= known.get(queue, 0)
        }

    def without(self, queues: Collection[QueueKey]) -> "Suspended":
        """Return what is there once some queues were sent elsewhere: of these nothing is known any more."""
        kept = {queue: one for queue, one in self.queues.items() if queue not in queues}
        return self if len(kept) == len(self.queues) else Suspended(self.number + 1, kept)

    def is_changed_by(self, outcomes: Mapping[QueueKey, Suspension | None], key: CommitKey) -> bool:
        """Say whether a batch changes anything: most have no outcome."""
        if any(one is not None or queue in self.queues for queue, one in outcomes.items()):
            return True
        return any((one.query_id, one.batch_id) == (key.query_id, key.batch_id) for one in self.queues.values())

    def behind(self, positions: Mapping[QueueKey, int], number: int) -> dict[QueueKey, int]:
        """Return where queues go back to that were stopped after the change `number`, and stand behind that place."""
        return {
            queue: one.resume
            for queue, one in self.queues.items()
            if one.number > number and one.resume < positions.get(queue, 0)
        }


NOTHING_SUSPENDED = Suspended()


def read_suspended(root: str, group: str) -> Suspended:
    """Return the stopped queues of a group. Takes no lock. Raises DamageError, StoreError for a newer version."""
    return read_side_file(GroupPaths(root, group).suspended, _WHAT, _NEXT_STEP, _build) or NOTHING_SUSPENDED


def write_outcomes(
    root: str,
    group: str,
    key: CommitKey,
    outcomes: Mapping[QueueKey, Suspension | None],
    known: Mapping[QueueKey, int] | None = None,
) -> None:
    """Make what became of a batch's queues durable. For who holds the store's lock, before the batch's intent.

    `known` has, by queue, the number of the change that the batch's task knew. A newer stop of another query stays.
    Raises what `read_suspended` and the disk raise; then the file is as it was.
    """
    paths, disk = GroupPaths(root, group), Disk()
    before = read_suspended(root, group)
    outcomes = before.replaceable(outcomes, key, known or {})
    if not before.is_changed_by(outcomes, key):
        return
    make_group_folder(paths, disk)  # a query that cannot be a member has none yet
    disk.replace(paths.suspended, encode_suspended(group, before.followed_by(outcomes, key)))


def forget_stopped(root: str, group: str, queues: Collection[QueueKey]) -> None:
    """Make it durable that nothing is known of some queues, which a reset sent elsewhere. For who has the store's lock.

    Rows that were dead letters are then given to the listener again, and their failures count from 0. To be called when
    the reset is on disk: else a query that has to go back to a stopped row would not. Raises what `write_outcomes`
    raises.
    """
    before = read_suspended(root, group)
    after = before.without(queues)
    if after is not before:
        Disk().replace(GroupPaths(root, group).suspended, encode_suspended(group, after))


def encode_suspended(group: str, suspended: Suspended) -> bytes:
    """Write stopped queues as JSON, by topic and queue id."""
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


def _build(fields: dict[str, Any]) -> Suspended:
    text_of(fields, "group")
    number = number_of(fields, "number", least=1)
    queues = {
        QueueKey(topic, int(queue_id)): _build_one(one, number)
        for topic, found in fields["queues"].items()
        for queue_id, one in found.items()
    }
    if any(queue.queue_id < 0 for queue in queues):
        raise ValueError("a queue id below 0")
    return Suspended(number, queues)


def _build_one(fields: dict[str, Any], last: int) -> Suspension:
    number = number_of(fields, "number", least=1)
    if number > last:
        raise ValueError(f"change {number} of {last}")
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
        raise ValueError(f"the queue offset {value!r}")
    return number
