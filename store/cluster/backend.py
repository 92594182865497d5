"""Reading a live cluster through the contract of `store.backend`.

The backend connects at its first call, and asks name servers and brokers as `catalog` describes. It has no identity: a
cluster's name is often the default one, and its brokers come and go. Tasks recognise the place by the records that the
driver planned with (`positions`), whose physical offsets and store times another cluster does not share.
"""

import time
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace

import pyarrow as pa

from rmq_spark.store.backend import (
    Barrier,
    Fence,
    FinalCommit,
    GroupSession,
    GroupTerms,
    ReadBatch,
)
from rmq_spark.store.cluster.address import DEFAULT_PULL_GROUP, ClusterAddress
from rmq_spark.store.cluster.catalog import ClusterCatalog
from rmq_spark.store.cluster.client import ClusterClient, borrowed_client, monotonic_ms, now_ms
from rmq_spark.store.cluster.final_commit import commit_final_offsets
from rmq_spark.store.cluster.group_session import ClusterGroupSession
from rmq_spark.store.cluster.group_starts import TIMESTAMP, place_new_group
from rmq_spark.store.cluster.long_poll import HeldPulls
from rmq_spark.store.cluster.member_locks import renew_lock
from rmq_spark.store.cluster.message_lookup import MessageLookup
from rmq_spark.store.cluster.puller import PullTerms
from rmq_spark.store.cluster.range_reader import RangeReader
from rmq_spark.store.cluster.record_sizes import RecordSizes
from rmq_spark.store.errors import (
    BackendUnavailableError,
    GroupConflictError,
    NoPermissionError,
    NotFoundError,
)
from rmq_spark.store.filter.row_filter import Expression, RowFilter
from rmq_spark.store.format.rows import DecodeLimits
from rmq_spark.store.model import (
    Away,
    Forbidden,
    Gone,
    QueueAnswer,
    QueueBounds,
    QueueKey,
    QueueRange,
    RecordProof,
)

_LOOK_MS = 5000  # the longest time between two looks at the cluster while the driver waits for messages
_NO_NEWS_MS = 200.0  # pause after news that change nothing
_NO_BARRIERS: Mapping[QueueKey, Barrier] = {}


class ClusterBackend:
    """A cluster that is open for reading. It implements `Backend`. For one thread.

    `now_ms` returns ms since the epoch, and `monotonic_ms` a time that never runs back.
    """

    def __init__(
        self,
        location: ClusterAddress,
        now_ms: Callable[[], int] = now_ms,
        monotonic_ms: Callable[[], float] = monotonic_ms,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._location = location
        self._terms = PullTerms(
            location.pull_group or DEFAULT_PULL_GROUP,
            location.namespace,
            location.pulls_in_flight,
            location.broker_down_timeout_ms or 0,
        )
        self._now_ms, self._monotonic_ms = now_ms, monotonic_ms
        self._held = ExitStack()
        self._opened: tuple[ClusterClient, ClusterCatalog] | None = None
        self._is_new = True  # whether nothing was asked since the place was opened or reopened
        self._sleep = sleep
        self._refreshed_ms = 0.0
        self._range_reader: RangeReader | None = None
        self._held_pulls: HeldPulls | None = None
        self._watched: Mapping[QueueKey, int] = {}
        self._sessions: weakref.WeakSet[ClusterGroupSession] = weakref.WeakSet()
        self._watched_topics: dict[str, str] = {}  # one topic of each broker whose queues are waited for

    @property
    def location(self) -> ClusterAddress:
        """Where the cluster is. Tasks learn from it where the brokers are, as far as this backend knows."""
        if self._opened is None:
            return self._location
        return replace(self._location, known_addresses=tuple(sorted(self.catalog.book.masters().items())))

    @property
    def sizes(self) -> None:
        """None: a broker tells no sizes of messages."""
        return

    @property
    def size_estimates(self) -> RecordSizes:
        """Estimates of the sizes of messages, from the average of the topic's last records."""
        return self.catalog.sizes

    @property
    def keys(self) -> None:
        """None: an answer of a broker does not show what its index lacks. See `message_lookup` for programs."""
        return

    @property
    def catalog(self) -> ClusterCatalog:
        """The topics and brokers that this backend knows."""
        return self._connected()[1]

    def _connected(self) -> tuple[ClusterClient, ClusterCatalog]:
        """Return client and catalogue, which are made at the first call."""
        if self._opened is None:
            client = self._held.enter_context(borrowed_client(self._location))
            group = self._terms.stored_group
            catalog = ClusterCatalog(client, self._location, group, self._now_ms, self._monotonic_ms)
            self._range_reader = RangeReader(
                client, catalog, self._terms, self._require, self._monotonic_ms, self._sleep
            )
            self._opened = client, catalog
        return self._opened

    @property
    def _ranges(self) -> RangeReader:
        self._connected()
        assert self._range_reader is not None
        return self._range_reader

    def _watched_address(self, broker: str) -> str:
        return self.catalog.find_address(self._watched_topics[broker], broker, renews=False)

    def identity(self) -> None:
        """Return None: a cluster has no id. The positions of records identify it."""

    def refresh(self) -> bool:
        """Ask all brokers of the topics that were used for their bounds. One request for each broker and topic."""
        is_new, self._is_new = self._is_new, False
        self._refreshed_ms = self._monotonic_ms()
        return self.catalog.refresh() or is_new

    def wait_for_messages(self, after: Mapping[QueueKey, int], timeout_ms: float) -> bool:
        """Wait for a message in one of the queues, by pulls that the brokers hold, then look at the cluster again.

        Without news the cluster is only looked at every 5 s, so that new queues and brokers are found.
        """
        client, _ = self._connected()
        if after is not self._watched:
            self._watched = after
            self._watched_topics.update({queue.broker: queue.topic for queue in after})
        if self._held_pulls is None:
            self._held_pulls = HeldPulls(client, self._watched_address, self._terms, sleep=self._sleep)
        self._held_pulls.watch(after)
        news = self._held_pulls.wait(timeout_ms)
        if not news and self._monotonic_ms() - self._refreshed_ms < _LOOK_MS:
            return False
        changed = self.refresh()
        if news and not changed:
            self._sleep(min(timeout_ms, _NO_NEWS_MS) / 1000)  # such as a queue that cannot be read any more
        return changed

    def topics(self) -> list[str]:
        """Return the sorted names of all topics of the namespace."""
        return self.catalog.topics()

    def queues(self, topics: Collection[str], *, missing_ok: Collection[str] = ()) -> dict[str, list[QueueKey]]:
        """Return the sorted queues of each topic, also those whose broker is away. Retired brokers are left out."""
        found = self.catalog.queues(topics)
        self.catalog.warn_of_unlisted_brokers()
        for topic, queues in found.items():
            if not queues and topic not in missing_ok and not self.catalog.book.has_route(topic):
                raise self._unknown_topic(topic)
        return {topic: queues for topic, queues in found.items() if queues or topic not in missing_ok}

    def bounds(self, queues: Collection[QueueKey]) -> dict[QueueKey, QueueAnswer]:
        """Return the answer about the bounds of each queue, as of the last look."""
        return self.catalog.answers(queues)

    def require_bounds(self, queues: Collection[QueueKey]) -> dict[QueueKey, QueueBounds]:
        """Return the bounds of queues.

        Raises NotFoundError, NoPermissionError or BackendUnavailableError for a queue without bounds.
        """
        return {queue: self._require(queue, answer) for queue, answer in self.bounds(queues).items()}

    def offsets_at(self, times_ms: Mapping[QueueKey, int]) -> dict[QueueKey, int]:
        """Return the offset of the first message stored at or after the time of each queue.

        The same on brokers of all versions. Raises BackendUnavailableError if a broker is away.
        """
        bounds = self.require_bounds(times_ms.keys())
        found, firsts = self.catalog.looks.offsets_at(times_ms, bounds)
        for queue, first in firsts.items():
            self.catalog.note_expired(queue, first)
        return found

    def positions(self, at: Collection[tuple[QueueKey, int]]) -> dict[tuple[QueueKey, int], RecordProof]:
        """Return physical offset and store time of messages, by pulls of one message each.

        The last record of each queue is remembered, to recognise the queue by it when its broker comes back.
        """
        answers = self.bounds({queue: None for queue, _ in at})
        for queue, answer in answers.items():
            if not isinstance(answer, Away):
                self._require(queue, answer)
            elif self.catalog.is_missing(queue):
                raise self._unknown_queue(queue, answer.reason)
        stored = [place for place in at if _holds(answers[place[0]], place[1])]
        found = {}
        for place, look in self.catalog.looks.look(stored).items():
            queue, offset = place
            if look.first > offset:
                self.catalog.note_expired(queue, look.first)
            elif look.proof is not None:
                found[place] = look.proof
                self.catalog.note_read(queue, offset, look.proof)
        return found

    def note_read(self, records: Mapping[tuple[QueueKey, int], RecordProof]) -> None:
        """Note messages that an earlier run, or the driver, has seen. The next look at the cluster compares them."""
        for (queue, offset), proof in records.items():
            self.catalog.note_earlier_read(queue, offset, proof)

    def read(
        self, part: QueueRange, columns: Sequence[str], limits: DecodeLimits, wanted: RowFilter | None
    ) -> Iterator[ReadBatch]:
        """Yield the messages of a range in order. A broker that is away is waited for. See `Puller.read`.

        At the end raises NotFoundError if another store has taken the broker's place, as far as a record of the queue
        is known from `positions` or `note_read`.
        """
        if not part.queue.broker:
            raise self._unknown_queue(part.queue, "the name of its broker is missing")
        return self._ranges.read(part, columns, limits, wanted)

    def read_together(
        self, parts: Sequence[QueueRange], columns: Sequence[str], limits: DecodeLimits, wanted: RowFilter | None
    ) -> pa.RecordBatch | None:
        """Return the messages of ranges in order. See `RangeReader.read_together`."""
        return self._ranges.read_together(parts, columns, limits, wanted)

    def barriers(
        self, queues: Collection[QueueKey], group: str | None, *, is_broadcasting: bool
    ) -> Mapping[QueueKey, Barrier]:
        """Return no barrier: what a broker forbids, it refuses itself (`Forbidden`)."""
        return _NO_BARRIERS

    def deliver_due(self, now_ms: int) -> None:
        """Do nothing, because brokers deliver delayed messages themselves."""

    def group(self, terms: GroupTerms) -> GroupSession:
        """Return the membership of a query, which shares the queues with all members (`group_session`)."""
        session = ClusterGroupSession(self, terms, self._now_ms, self._monotonic_ms)
        self._sessions.add(session)
        return session

    def committed_offsets(self, group: str, queues: Collection[QueueKey]) -> dict[QueueKey, int]:
        """Return the committed offsets of a group, by one request for each queue, which changes nothing at the broker.

        A broker of 4.9 may answer 0 for a group without an offset (`group_starts`). Raises BackendUnavailableError if a
        broker is away, because an offset that is not known must not be taken for none.
        """
        self.require_bounds(queues)
        return self.catalog.groups.committed(group, queues)

    def start_offsets(
        self,
        group: str,
        bounds: Mapping[QueueKey, QueueBounds],
        committed: Mapping[QueueKey, int],
        fallback: str,
        times_ms: Mapping[QueueKey, int],
    ) -> dict[QueueKey, int]:
        """Return where a group starts in each queue: at its committed offset, else as a new Java consumer would.

        Each queue is treated by itself (`group_starts`). A committed offset may be outside of the bounds if the queue
        itself does not have it any more, or not yet.
        """
        starts = {queue: committed[queue] for queue in bounds if queue in committed}
        ahead = {queue for queue, offset in starts.items() if offset > bounds[queue].max_offset}
        for queue, answer in self._look_again(ahead).items():
            if isinstance(answer, QueueBounds) and starts[queue] <= answer.max_offset:
                starts[queue] = bounds[queue].max_offset  # consumed by members of the group since the last look
        rest = {queue: one for queue, one in bounds.items() if queue not in starts}
        starts |= self.catalog.groups.beginnings(group, rest) if rest else {}
        rest = {queue: one for queue, one in rest.items() if queue not in starts}
        times = {queue: time for queue, time in times_ms.items() if queue in rest} if fallback == TIMESTAMP else {}
        return starts | place_new_group(rest, fallback, self.offsets_at(times) if times else {})

    def _look_again(self, queues: Collection[QueueKey]) -> dict[QueueKey, QueueAnswer]:
        """Return the answers about queues as of this moment. The next `refresh` reports them as news."""
        if not queues:
            return {}
        self._is_new = True
        for queue in {(queue.topic, queue.broker): queue for queue in queues}.values():
            self.catalog.look_again(queue)
        return self.catalog.answers(queues)

    def message_lookup(self) -> MessageLookup:
        """Return the search by key and id at the brokers, for programs."""
        client, catalog = self._connected()
        return MessageLookup(client, catalog.book.address, catalog.topic_of)

    def check_fence(self, fence: Fence, queue: QueueKey) -> None:
        """Renew the lock of an orderly query on a queue. Raise GroupConflictError if another member has it.

        If nobody has it, the query gets it. Locks are not numbered, so the epoch of the fence is not compared. A broker
        that does not answer is waited for, at most 60 s.
        """
        terms = PullTerms(fence.group, self._location.namespace)
        if not renew_lock(self, terms, fence.member_id, queue, self._monotonic_ms, self._sleep):
            raise GroupConflictError(
                f"the broker does not give the lock of queue {queue} to {fence.member_id} of consumer group "
                f"{fence.group}: another member has it; expected the lock of the query that reads the queue. Nothing "
                "of the task is lost: the owner of the queue reads its messages from the group's offset."
            )

    def commit_final(self, final: FinalCommit) -> bool:
        """Commit the offsets of a member whose batch has ended, where nobody else has set the group's offset."""
        return commit_final_offsets(self, self._location.namespace, final)

    def reopen(self) -> None:
        """Look at everything again at the next call. What is remembered about queues stays."""
        self._is_new = True
        if self._opened is not None:
            self._opened[1].forget()

    def close(self) -> None:
        """Give the connections back to this process. Memberships that were not left end without a commit."""
        for session in list(self._sessions):
            session.close()
        self.reopen()
        if self._held_pulls is not None:
            self._held_pulls.close()
        self._opened = self._range_reader = self._held_pulls = None
        self._held.close()

    # What programs ask besides: a consumer (`consumer`), and the administration of groups (`group_progress`).

    @property
    def client(self) -> ClusterClient:
        """The client with which this backend asks."""
        return self._connected()[0]

    def find_address(self, queue: QueueKey, *, renews: bool = False) -> str:
        """Return where to ask the broker of a queue. If it `renews`, ask for routes again, at most once a second.

        Raises BackendUnavailableError if the broker has no master, as far as is known.
        """
        return self.catalog.find_address(queue.topic, queue.broker, renews=renews)

    def look(self, queue: QueueKey) -> QueueAnswer:
        """Ask the broker of a queue for its bounds, and return the answer. Raises NotFoundError for a missing queue."""
        if not queue.broker:
            raise self._unknown_queue(queue, "the name of its broker is missing")
        if queue not in self.queues([queue.topic], missing_ok=[queue.topic]).get(queue.topic, []):
            self.reopen()  # it may be new
            self.queues([queue.topic])
        answer = self.catalog.look_again(queue, is_urgent=True)
        if isinstance(answer, Away) and self._has_moved(queue):
            answer = self.catalog.look_again(queue, is_urgent=True)
        if isinstance(answer, Gone) or self.catalog.is_missing(queue):
            self._require(queue, answer)
        return answer

    def _has_moved(self, queue: QueueKey) -> bool:
        """Return whether the broker of a queue is at another address, as new routes say."""
        before = self.catalog.book.address(queue.broker)
        try:
            return self.find_address(queue, renews=True) != before
        except BackendUnavailableError:
            return False

    def look_at_bounds(self, queue: QueueKey) -> QueueBounds:
        """Ask the broker of a queue for its bounds, and return them. Raises the errors of `require_bounds`."""
        return self._require(queue, self.look(queue))

    def broker_filter(self, queue: QueueKey, wanted: RowFilter | None) -> Expression | None:
        """Return an expression that the broker of a queue tests, or None. See `RangeReader.broker_filter`."""
        return self._ranges.broker_filter(queue, wanted)

    def abandon(self, error: BaseException) -> None:
        """Close the connections, which may be in any state after `error` has interrupted a call."""
        self._opened = self._range_reader = self._held_pulls = None
        self._held.__exit__(type(error), error, error.__traceback__)

    def _require(self, queue: QueueKey, answer: QueueAnswer) -> QueueBounds:
        """Return the bounds of a queue. Raise the error for any other answer."""
        if isinstance(answer, QueueBounds):
            return answer
        if isinstance(answer, Gone) or self.catalog.is_missing(queue):
            raise self._unknown_queue(queue, answer.reason)
        if isinstance(answer, Forbidden):
            raise NoPermissionError(
                f"cannot read queue {queue}: {answer.reason}. Ask an administrator for the right: {answer.right}."
            )
        reason = answer.reason.rstrip(".")
        raise BackendUnavailableError(
            f"cannot read queue {queue}: {reason}. Repeat the read when the broker {queue.broker} is back."
        )

    def _unknown_queue(self, queue: QueueKey, reason: str) -> NotFoundError:
        return NotFoundError(f"no queue {queue} in {self._location.describe()}: {reason}.")

    def _unknown_topic(self, topic: str) -> NotFoundError:
        space = f" and the namespace (option namespace={self._location.namespace})" if self._location.namespace else ""
        return NotFoundError(
            f'no name server has a route of topic "{topic}", in {self._location.describe()}; expected a topic of this '
            f"cluster. Check the name (option subscribe){space}; after a restart of a name server or a broker wait 30 "
            "s."
        )


def _holds(answer: QueueAnswer, offset: int) -> bool:
    return isinstance(answer, QueueBounds) and answer.min_offset <= offset < answer.max_offset
