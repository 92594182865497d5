"""The batch that Spark repeats after a restart, in an orderly query whose queues other members may have locked since.

Spark repeats a batch that was planned and is not in the log of commits. The query then needs the locks of all its
queues, those that belong to other members by now included. A lock of the query's own earlier run expires after 60 s.
But a live member renews its lock for ever. So that the query can start, it leaves out the messages of such a queue, if
the group's offset shows that nothing is lost by that:

- After the begin of the batch, and not one that this query has published: another member has read the messages before
  it. Every next owner begins there, this query included. So the messages are left out.
- Any other, or none: nothing shows that anybody else reads the messages. A query that starts again with this offset
  takes it for its own, and continues at the end of the batch. So nothing is left out, and the query does not start.

The offset is compared with those in the checkpoint (`own_offsets`), because the checkpoint cannot record what was left
out: Spark stored the offset of the batch when the batch was planned.
"""

import logging
from collections.abc import Collection, Mapping, Sequence

from rmq_spark.datasource.plan.offsets import StreamOffset
from rmq_spark.datasource.spark.call_counts import count_text
from rmq_spark.datasource.spark.source_view import SourceView
from rmq_spark.store.backend import Fence
from rmq_spark.store.errors import BackendUnavailableError, GroupConflictError
from rmq_spark.store.model import QueueKey, QueueRange

_LOG = logging.getLogger("rmq_spark")

_SHOWN_QUEUES = 8  # in the warning


class BatchLocks:
    """The locks of a repeated batch of an orderly query in a cluster. For one thread at a time.

    `group` and `member_id` are those of the query. `ranges` is what the batch reads, one range for each queue, and
    `after` its end.
    """

    def __init__(
        self, view: SourceView, group: str, member_id: str, ranges: Sequence[QueueRange], after: StreamOffset
    ) -> None:
        self._view, self._group, self._member_id = view, group, member_id
        self._parts = {part.queue: part for part in ranges}
        self._after = after
        self._locked: list[QueueKey] = []
        self._committed: Mapping[QueueKey, int] = {}
        self._silent: set[str] = set()  # brokers that do not answer

    def look(self, owned: Collection[QueueKey], expected: Collection[QueueKey]) -> list[QueueKey]:
        """Lock those queues that the member does not own. Return those for whose locks it is worth to wait.

        `owned` are the locked queues of its share. `expected` is the rest of its share: another member gives up these
        queues, or its locks expire. A queue of another share is waited for until the group's offset shows that its
        owner reads it. A task that reads a queue of a broker that is away waits for the broker.
        """
        rest = [queue for queue in self._parts if queue not in owned and queue not in self._view.away]
        self._silent.clear()
        self._locked = [queue for queue in rest if self._is_locked(queue)]
        self._committed = self._view.backend.committed_offsets(self._group, self._locked) if self._locked else {}
        return [queue for queue in self._locked if queue in expected or not self._is_taken(queue)]

    def leave_out(self) -> frozenset[QueueKey]:
        """Return the queues whose messages the batch leaves out, and log them, as of the last `look`.

        Raises GroupConflictError if nothing shows that the owner of a locked queue reads its messages.
        """
        for queue in self._locked:
            if not self._is_taken(queue):
                raise GroupConflictError(self._describe_stuck(queue))
        if self._locked:
            _LOG.warning("rmq: %s", self._describe_left_out())
        return frozenset(self._locked)

    def _is_locked(self, queue: QueueKey) -> bool:
        """Try to lock a queue, and return whether another member has the lock. The tasks of the batch renew it."""
        if queue.broker in self._silent:
            return False
        try:
            self._view.backend.check_fence(Fence(self._group, self._member_id, 0), queue)
        except GroupConflictError:
            return True
        except BackendUnavailableError:
            self._silent.add(queue.broker)
        return False

    def _is_taken(self, queue: QueueKey) -> bool:
        """Return whether another member has read messages of the batch in this queue."""
        committed = self._committed.get(queue)
        return (
            committed is not None
            and committed > self._parts[queue].begin
            and self._after.group == self._group
            and committed not in self._after.published.get(queue, ())
        )

    def _describe_stuck(self, queue: QueueKey) -> str:
        begin, committed = self._parts[queue].begin, self._committed.get(queue)
        at = "has no offset there" if committed is None else f"is at {committed} there"
        return (
            f"the batch that Spark repeats begins in queue {queue} at {begin}, and another member of consumer group "
            f"{self._group} has the lock of the queue. The group {at}; expected an offset after {begin} that this "
            "query has not published, which shows that the other member reads the messages. Nothing is lost. Start the "
            "query again when that member has gone on, or stop it: its lock ends 60 s later."
        )

    def _describe_left_out(self) -> str:
        shown = ", ".join(
            f"{queue} [{self._parts[queue].begin}, {self._parts[queue].end}) where the group is at "
            f"{self._committed[queue]}"
            for queue in sorted(self._locked)[:_SHOWN_QUEUES]
        )
        others = len(self._locked) - _SHOWN_QUEUES
        return (
            f"the repeated batch leaves out {sum(self._parts[queue].count for queue in self._locked)} messages of "
            f"{count_text(len(self._locked), 'queue')} that other members of consumer group "
            f"{self._group} have locked: {shown}{f' and {others} more' if others > 0 else ''}. Nothing is lost: these "
            "members have read on from the begin of the batch, as the group's offset shows, and read the rest"
        )
