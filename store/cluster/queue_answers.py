"""What is known about the queues of a topic on one broker: the rules for brokers that go away and come back.

A request can fail in ways in which a file cannot, and an answer can be older than the one before it. `TopicOnBroker`
turns what the name servers list and what the broker replied into one answer for each queue:

| seen | answer |
| --- | --- |
| the broker does not reply, or has no master | Away |
| it replies with bounds | QueueBounds |
| a lower max offset from a master | Away; QueueBounds with the lower one if it is seen again at least 10 s later |
| a lower max offset from an acting master, which lags | QueueBounds with the old max offset |
| another record than was read, after an absence, on another connection, or by an earlier run | Gone: replaced |
| the same in another queue, and no record of this one is remembered | Gone: replaced |
| the topic does not exist, says a broker that a name server lists | Away; Gone if it says so again at least 3 s later |
| the topic does not exist, says another broker, or an acting master | Away |
| the queue is not among the readable ones any more | QueueBounds without messages, at its end |
| no right to ask or to read | Forbidden |

Pure: times are arguments. Source: PullMessageProcessor, AdminBrokerProcessor#getTopicStatsInfo (4.9, 5.3).
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from rmq_spark.store.cluster.routes import Listing
from rmq_spark.store.model import Away, Forbidden, Gone, QueueAnswer, QueueBounds, RecordProof

# A lower max offset is believed if it is seen again after this time: a master that starts may not have recovered.
LOWER_END_MS = 10_000
# A topic is deleted if the broker says so again after this time.
DELETION_MS = 3_000
# How long a queue that was replaced stays Gone, so that every plan sees it. Then it is a new queue.
REPLACED_MS = 10_000


class QueueStats(NamedTuple):
    """The bounds of a queue in a broker's reply.

    `is_expired` says that the broker has no time for the last message. Then no message is left, but a broker of version
    4.9 keeps replying with the old min offset until it restarts.
    """

    min_offset: int
    max_offset: int
    is_expired: bool = False


@dataclass(frozen=True, slots=True)
class Found:
    """The broker replied with the bounds of the topic's queues, by queue id."""

    stats: Mapping[int, QueueStats]


@dataclass(frozen=True, slots=True)
class NoTopic:
    """The broker replied that the topic does not exist (TOPIC_NOT_EXIST)."""


@dataclass(frozen=True, slots=True)
class Silent:
    """No reply: refused, timed out, or there was nobody to ask. `reason` is a text for logs."""

    reason: str


@dataclass(frozen=True, slots=True)
class Denied:
    """The broker refused to reply, because the account lacks the `right`."""

    right: str
    reason: str


Reply: TypeAlias = Found | NoTopic | Silent | Denied


@dataclass(slots=True)
class _Queue:
    """What is remembered of a queue. `end` is the highest offset that it had."""

    end: int = 0
    is_known: bool = False  # whether a broker ever replied with its bounds, or the caller has read it
    lower_since_ms: int | None = None  # since when a master replies with a lower end
    read: tuple[int, RecordProof] | None = None  # the last record that was read
    must_compare: bool = False
    replaced: tuple[int, str] | None = None  # when, and how that was seen
    first: int = 0  # records below this queue offset are known to have expired
    checked: tuple[int, bool] | None = None  # the stats for which the first record was looked for last

    def replace(self, now_ms: int, why: str) -> None:
        """Note that another store has replaced the queue, whose bounds are new."""
        self.replaced = now_ms, why
        self.read, self.end, self.first, self.lower_since_ms = None, 0, 0, None


class TopicOnBroker:
    """The answers about the queues of a topic on one broker, and what they follow from. For one thread."""

    def __init__(self, topic: str, broker: str) -> None:
        self.topic, self.broker = topic, broker
        self.answers: dict[int, QueueAnswer] = {}  # by queue id, as of the last look
        self._queues: dict[int, _Queue] = {}
        self._last: tuple[Listing, Reply] | None = None
        self._is_settled = False  # whether an equal look gives equal answers, whatever the time
        self._away_since_ms: int | None = None
        self._missing_since_ms: int | None = None
        self._was_absent = False
        self._address: str | None = None  # where the broker replied last

    @property
    def is_away(self) -> bool:
        """Whether the broker did not reply to the last look."""
        return self._away_since_ms is not None

    @property
    def queue_ids(self) -> Collection[int]:
        """All queues that are answered for, or were."""
        return self._queues.keys()

    def is_missing(self, queue_id: int) -> bool:
        """Return whether the broker replied that the topic, or this queue, does not exist."""
        if self._last is None:
            return False
        reply = self._last[1]
        return isinstance(reply, NoTopic) or (isinstance(reply, Found) and queue_id not in reply.stats)

    def expect(self, queue_id: int) -> None:
        """Remember a queue for which the caller wants answers. It may not exist."""
        if queue_id not in self._queues:
            self._queues[queue_id] = _Queue()
            self._last = None

    def note_read(self, queue_id: int, offset: int, proof: RecordProof) -> None:
        """Remember the record that was read, or will be, at a queue offset. Earlier ones than the known are ignored."""
        queue = self._queues.setdefault(queue_id, _Queue())
        if queue.replaced is None and (queue.read is None or queue.read[0] <= offset):
            queue.read = offset, proof
            queue.end, queue.is_known = max(queue.end, offset + 1), True
            queue.must_compare = queue.must_compare or self._address is None
            self._is_settled = False

    def note_earlier_read(self, queue_id: int, offset: int, proof: RecordProof) -> None:
        """Remember the record that an earlier run has read at a queue offset. The next look compares it.

        The record does not show where the queue ends: if the broker does not have the queue any more, it is Gone.
        """
        queue = self._queues.setdefault(queue_id, _Queue())
        queue.replaced = None  # the comparison says it again
        is_known = queue.is_known
        self.note_read(queue_id, offset, proof)
        queue.is_known = is_known
        self.doubt(queue_id)

    def note_new_connection(self) -> None:
        """Note that the broker may have been away between two looks. One record is compared for all queues."""
        queues = [(queue.read[1].store_time_ms, queue) for queue in self._queues.values() if queue.read is not None]
        if queues:
            _, queue = max(queues, key=lambda one: one[0])  # the record that expires last
            queue.must_compare, self._is_settled = True, False

    def note_expired(self, queue_id: int, first: int, now_ms: int) -> None:
        """Remember that all records of a queue below the queue offset `first` have expired."""
        queue = self._queues.setdefault(queue_id, _Queue())
        if first > queue.first:
            queue.first = first
            self._answer_again([queue_id], now_ms)

    def look(self, listing: Listing, reply: Reply, now_ms: int) -> bool:
        """Update the answers. Return whether one has changed."""
        if self._is_settled and self._last == (listing, reply):
            return False
        before = self.answers
        self._last = listing, reply
        self.answers = self._answer_all(listing, reply, now_ms)
        return self.answers != before

    @property
    def has_read(self) -> bool:
        """Whether a record of any queue is remembered."""
        return any(queue.read is not None for queue in self._queues.values())

    def must_compare(self, queue_id: int) -> bool:
        """Return whether the record of the queue was not compared yet, or of any queue if it has none."""
        if self._has_record(queue_id):
            return self._queues[queue_id].must_compare
        return any(queue.must_compare for queue in self._queues.values())

    def doubt(self, queue_id: int) -> None:
        """Compare the record of the queue after the next look, or one of another queue if it has none."""
        if not self._has_record(queue_id):
            self.note_new_connection()
            return
        self._queues[queue_id].must_compare, self._is_settled = True, False

    def _has_record(self, queue_id: int) -> bool:
        return queue_id in self._queues and self._queues[queue_id].read is not None

    def to_compare(self) -> dict[int, tuple[int, RecordProof]]:
        """Return the queues whose record must be compared before they are read: queue offset and expected record."""
        stats = self._stats()
        return {
            queue_id: queue.read
            for queue_id, queue in self._queues.items()
            if queue.must_compare
            and queue.read is not None
            and queue_id in stats
            and stats[queue_id].min_offset <= queue.read[0] < stats[queue_id].max_offset
        }

    def compared(self, queue_id: int, found: RecordProof | None, now_ms: int) -> None:
        """Note the record that the broker has at the queue offset of `to_compare`. None: it has expired.

        If it is another record, the broker has another store. Then the other queues are compared too, or are replaced
        if no record of them is remembered.
        """
        queue = self._queues[queue_id]
        queue.must_compare = False
        replaced = [queue_id]
        if queue.read is not None and found is not None and found != queue.read[1]:
            offset, expected = queue.read
            why = (
                f"at queue offset {offset} was at physical offset {expected.physical_offset}, stored at "
                f"{expected.store_time_ms} ms, and is at {found.physical_offset} now, stored at {found.store_time_ms} "
                f"ms. The broker {self.broker} was restored from a copy, or another one took its name"
            )
            queue.replace(now_ms, f"it was replaced: its message {why}")
            for other_id, other in self._queues.items():
                other.must_compare = other.read is not None
                if other.read is None and other.replaced is None:
                    other.replace(now_ms, f"it was replaced: the message of queue {queue_id} {why}")
                    replaced.append(other_id)
        self._answer_again(replaced, now_ms)

    def to_check(self) -> dict[int, int]:
        """Return the queues whose min offset may name an expired record: the queue offset to look at."""
        found = {}
        for queue_id, stats in self._stats().items():
            queue, answer = self._queues.get(queue_id), self.answers.get(queue_id)
            if queue is None or not isinstance(answer, QueueBounds) or answer.min_offset >= stats.max_offset:
                continue
            is_new = queue.checked != (stats.min_offset, stats.is_expired)
            if is_new and answer.min_offset == stats.min_offset and (stats.is_expired or stats.min_offset > 0):
                found[queue_id] = stats.min_offset
        return found

    def checked(self, queue_id: int, first: int, now_ms: int, *, is_seen: bool = True) -> None:
        """Note that `first` is the queue offset of the first record that exists at or after that of `to_check`.

        If it was not seen and the broker has no time for the last message, no record exists: a broker of 4.9 may answer
        any bytes for an expired one.
        """
        stats = self._stats()[queue_id]
        if stats.is_expired and not is_seen:
            first = stats.max_offset
        self._queues[queue_id].checked = stats.min_offset, stats.is_expired
        self.note_expired(queue_id, first, now_ms)

    def _stats(self) -> Mapping[int, QueueStats]:
        """Return the bounds in the last reply, {} if it had none."""
        return self._last[1].stats if self._last is not None and isinstance(self._last[1], Found) else {}

    def _answer_all(self, listing: Listing, reply: Reply, now_ms: int) -> dict[int, QueueAnswer]:
        """Return the answer for each queue, and remember what later looks need."""
        self._is_settled = True
        ids = sorted({*self._queues, *range(listing.read_count)})
        for queue_id in ids:
            self._queues.setdefault(queue_id, _Queue())
        if isinstance(reply, Silent):
            return self._dismiss(ids, now_ms, reply.reason)
        if isinstance(reply, NoTopic):
            return self._answer_missing(ids, listing, now_ms)
        self._away_since_ms = self._missing_since_ms = None
        if isinstance(reply, Denied):
            return dict.fromkeys(ids, Forbidden(reply.right, reply.reason))
        if not listing.is_readable:
            what = f"the topic {self.topic} on the broker {self.broker} has no read permission (perm without 4)"
            return dict.fromkeys(ids, Forbidden("read", what))
        has_returned = self._was_absent or self._address not in (None, listing.address)
        self._was_absent, self._address = False, listing.address
        if has_returned:
            for queue in self._queues.values():
                queue.must_compare = queue.read is not None
        return {
            queue_id: self._answer(queue_id, self._queues[queue_id], reply.stats.get(queue_id), listing, now_ms)
            for queue_id in ids
        }

    def _dismiss(self, ids: list[int], now_ms: int, reason: str) -> dict[int, QueueAnswer]:
        """Answer that all queues are away."""
        if self._away_since_ms is None:
            self._away_since_ms = now_ms
        self._was_absent = True
        return dict.fromkeys(ids, Away(self.broker, self._away_since_ms, reason))

    def _answer_missing(self, ids: list[int], listing: Listing, now_ms: int) -> dict[int, QueueAnswer]:
        """Answer after the broker said that the topic does not exist."""
        if listing.is_acting:
            reason = f"an acting master of {self.broker} does not know the topic {self.topic} yet"
            return self._dismiss(ids, now_ms, reason)
        if not listing.has_broker:
            reason = f"no name server lists the broker {self.broker}, and it does not know the topic {self.topic}"
            return self._dismiss(ids, now_ms, reason)
        if self._missing_since_ms is None:
            self._missing_since_ms = now_ms
        if now_ms - self._missing_since_ms < DELETION_MS:
            self._is_settled = False
            reason = f"the broker {self.broker} does not know the topic {self.topic}; it is asked once more"
            return self._dismiss(ids, now_ms, reason)
        self._away_since_ms, self._was_absent = None, True
        gone = Gone(f"the topic {self.topic} was deleted on the broker {self.broker}, as the broker said twice")
        return dict.fromkeys(ids, gone)

    def _answer(
        self, queue_id: int, queue: _Queue, stats: QueueStats | None, listing: Listing, now_ms: int
    ) -> QueueAnswer:
        """Return the answer for one queue of a broker that replied."""
        if queue.replaced is not None:
            since_ms, reason = queue.replaced
            if now_ms - since_ms < REPLACED_MS:
                self._is_settled = False
                return Gone(reason)
            queue.replaced = None
        if stats is None and not queue.is_known:
            return Gone(f"the broker {self.broker} has no queue {queue_id} of the topic {self.topic}")
        was_listed = listing.has_topic or listing.read_count > 0
        if stats is None or (was_listed and queue_id >= listing.read_count):
            # It cannot be read any more: frozen at its end. Messages that were not read yet are below its min offset.
            queue.end = max(queue.end, 0 if stats is None else stats.max_offset)
            queue.is_known, queue.must_compare = True, False
            return QueueBounds(queue.end, queue.end)
        queue.is_known = True
        if stats.max_offset < queue.end:
            if listing.is_acting:
                return QueueBounds(min(max(stats.min_offset, queue.first), queue.end), queue.end)
            since_ms = queue.lower_since_ms = now_ms if queue.lower_since_ms is None else queue.lower_since_ms
            if now_ms - since_ms < LOWER_END_MS:
                self._is_settled = False
                reason = (
                    f"the end of queue {queue_id} went back from {queue.end} to {stats.max_offset}; the broker "
                    f"{self.broker} is asked again in {LOWER_END_MS // 1000} s"
                )
                return Away(self.broker, since_ms, reason)
            queue.first, queue.end = 0, stats.max_offset
            if queue.read is not None:
                queue.must_compare = queue.read[0] < stats.max_offset
                queue.read = queue.read if queue.must_compare else None
        queue.lower_since_ms = None
        if queue.must_compare and queue.read is not None and queue.read[0] >= stats.min_offset:
            self._is_settled = False
            reason = f"the broker {self.broker} was away; its record at queue offset {queue.read[0]} is compared"
            return Away(self.broker, now_ms, reason)
        queue.must_compare = False
        queue.end = stats.max_offset
        return QueueBounds(min(max(stats.min_offset, queue.first), stats.max_offset), stats.max_offset)

    def _answer_again(self, queue_ids: Collection[int], now_ms: int) -> None:
        """Update the answers for queues of a broker that replied to the last look."""
        if self._last is not None and isinstance(self._last[1], Found) and self._last[0].is_readable:
            listing, stats = self._last[0], self._last[1].stats
            again = {
                queue_id: self._answer(queue_id, self._queues[queue_id], stats.get(queue_id), listing, now_ms)
                for queue_id in queue_ids
            }
            self.answers = {**self.answers, **again}
