"""Where the messages of queues are, asked of brokers: bounds, offsets of times, and records.

`BoundsRequests` asks for the bounds of all queues of a topic by one request to each broker (GET_TOPIC_STATS_INFO), to
all brokers at once. Where the account lacks the right, or a proxy does not know the request, pulls of one message give
the bounds of one queue each. A broker that did not reply before is asked again, but nobody waits for it.

`RecordLooks` pulls single messages: their physical offsets and store times. It never pulls at or above the end of a
queue, because a broker of 4.9 stores a message for each such pull. It does not believe a record that is not of the
queue, which 4.9 may return after expiry.

Source: AdminBrokerProcessor#getTopicStatsInfo, PullMessageProcessor (4.9, 5.3).
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from rmq_spark.store.cluster.client import ClusterClient, Ticket
from rmq_spark.store.cluster.codes import GetMessageStatus, PullStatus, ResponseCode
from rmq_spark.store.cluster.queue_answers import Denied, Found, NoTopic, QueueStats, Reply, Silent
from rmq_spark.store.cluster.requests import OffsetAtRequest, PullRequest, TopicStatsRequest
from rmq_spark.store.cluster.responses import PullResponse, TopicStatsResponse
from rmq_spark.store.cluster.routes import Listing
from rmq_spark.store.cluster.time_search import TimeSearch
from rmq_spark.store.errors import (
    BackendUnavailableError,
    BrokerError,
    NoPermissionError,
    NotFoundError,
    RmqError,
)
from rmq_spark.store.format.record import Record, decode_record
from rmq_spark.store.model import QueueBounds, QueueKey, RecordProof

# How long the reply of a broker is awaited that did not reply to the request before.
_GRACE_MS = 20
_WAIT_MS = 1000  # the client ends each request at its deadline, so this only bounds one wait
_LOOKS_MAX = 256  # pulls of one message at once: each may bring a body of 4 MiB
# After this time a broker that refused GET_TOPIC_STATS_INFO is asked again, because rights may have been granted.
_PULLS_MS = 60_000
_READ_RIGHT = "SUB of the topic and the group (4.9), or Sub of both (5.3)"


@dataclass(frozen=True, slots=True)
class BoundsQuestion:
    """A topic on a broker, whose bounds are wanted. `topic` is the cluster's name of the topic.

    `queue_ids` are the queues to ask for where they must be asked one by one. A broker `is_suspect` if it did not reply
    before: nobody waits long for it.
    """

    topic: str
    listing: Listing
    queue_ids: Sequence[int]
    is_suspect: bool = False

    @property
    def key(self) -> tuple[str, str]:
        """Topic and broker."""
        return self.topic, self.listing.broker


@dataclass(slots=True)
class _Open:
    """A request that has no outcome yet."""

    question: BoundsQuestion
    ticket: Ticket[TopicStatsResponse]


@dataclass(slots=True)
class _ByPulls:
    """A topic on a broker that must be asked by pulls: until when, and the queues' ends as far as they are known."""

    until_ms: int
    ends: dict[int, int] = field(default_factory=dict)


class BoundsRequests:
    """The requests for bounds of one reader, and those of them that have no outcome yet. For one thread.

    `group` is the cluster's name of the group in whose name messages are pulled.
    """

    def __init__(self, client: ClusterClient, group: str) -> None:
        self._client, self._group = client, group
        self._open: dict[tuple[str, str], _Open] = {}
        self._by_pulls: dict[tuple[str, str], _ByPulls] = {}

    def ask(self, questions: Iterable[BoundsQuestion], now_ms: int) -> dict[tuple[str, str], Reply]:
        """Return the reply of each broker for each topic, as far as one came. Missing are suspects only.

        Raises the RmqError of a broker that refuses the account, or of a request that is wrong.
        """
        replies: dict[tuple[str, str], Reply] = {}
        by_pulls: list[BoundsQuestion] = []
        urgent: dict[tuple[str, str], _Open] = {}
        for question in questions:
            address = question.listing.address
            if address is None or not question.listing.has_master:
                replies[question.key] = Silent(describe_missing(question.listing))
                continue
            known = self._by_pulls.get(question.key)
            if known is not None and now_ms < known.until_ms and not question.is_suspect:
                by_pulls.append(question)
                continue
            asked = self._submit(question, address)
            if not question.is_suspect:
                urgent[question.key] = asked
        self._wait(urgent)
        for key, one in list(self._open.items()):
            if one.ticket.is_done:
                del self._open[key]
                reply = _read_stats(one)
                if reply is None:
                    known = self._by_pulls.setdefault(key, _ByPulls(0))
                    known.until_ms = now_ms + _PULLS_MS
                    by_pulls.append(one.question)
                else:
                    replies[key] = reply
        replies.update(self._pull_bounds(by_pulls))
        return replies

    def forget(self) -> None:
        """Ignore the outcomes of all requests, and what is known about rights."""
        self._client.forget([one.ticket for one in self._open.values()])
        self._open.clear()
        self._by_pulls.clear()

    def _submit(self, question: BoundsQuestion, address: str) -> _Open:
        """Return the request for the question: for a suspect the one that is open at the same address, or a new one."""
        before = self._open.get(question.key)
        if before is not None and question.is_suspect and (before.ticket.to == address or before.ticket.is_done):
            return before
        if before is not None:
            self._client.forget([before.ticket])
        request = TopicStatsRequest(question.topic, question.listing.broker)
        self._open[question.key] = asked = _Open(question, self._client.submit(address, request))
        return asked

    def _wait(self, urgent: Mapping[tuple[str, str], _Open]) -> None:
        """Wait until all urgent requests have an outcome, and a short time for the others."""
        pending = [one.ticket for one in urgent.values() if not one.ticket.is_done]
        while pending:
            self._client.wait(pending, _WAIT_MS)
            pending = [ticket for ticket in pending if not ticket.is_done]
        pending = [one.ticket for one in self._open.values() if not one.ticket.is_done]
        if pending:
            self._client.wait(pending, _GRACE_MS)

    def _pull_bounds(self, questions: Sequence[BoundsQuestion]) -> dict[tuple[str, str], Reply]:
        """Return the bounds by one pull for each queue, at its end as it was known last."""
        calls, places = [], []
        for question in questions:
            ends = self._by_pulls[question.key].ends
            for queue_id in question.queue_ids:
                queue = QueueKey(question.topic, queue_id, question.listing.broker)
                request = PullRequest(queue, ends.get(queue_id, 0), 1, self._group)
                calls.append((question.listing.address or "", request))
                places.append((question.key, queue_id))
        outcomes: dict[tuple[str, str], dict[int, Any]] = {question.key: {} for question in questions}
        for (key, queue_id), outcome in zip(places, self._client.call_all(calls), strict=True):
            outcomes[key][queue_id] = outcome
        replies = {key: _read_pulls(found) for key, found in outcomes.items()}
        for key, reply in replies.items():
            if isinstance(reply, Found):
                self._by_pulls[key].ends.update({queue_id: one.max_offset for queue_id, one in reply.stats.items()})
        return replies


def describe_missing(listing: Listing) -> str:
    """Return why a broker cannot be asked, for errors and logs."""
    if not listing.has_master:
        return f"the broker {listing.broker} has no master at present, only slaves"
    return f"no name server lists the broker {listing.broker}, so its address is unknown"


def _read_stats(asked: _Open) -> Reply | None:
    """Return what the outcome of GET_TOPIC_STATS_INFO says. None: the broker does not answer it to this account."""
    broker = asked.question.listing.broker
    try:
        found = asked.ticket.result()
    except NotFoundError:
        return NoTopic()
    except NoPermissionError:
        return None
    except BrokerError as error:
        return None if error.code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED else Silent(str(error))
    except BackendUnavailableError as error:
        return Silent(str(error))
    others = {queue.broker for queue in found.queues} - {broker}
    if others:
        where = asked.question.listing.address
        return Silent(
            f"at {where}, the address of the broker {broker}, answers the broker {', '.join(sorted(others))}; correct "
            f"the option brokerAddresses={broker}=host:port, or brokerIP1 of the broker"
        )
    return Found(
        {
            queue.queue_id: QueueStats(one.min_offset, one.max_offset, one.last_update_ms < 0 < one.max_offset)
            for queue, one in found.queues.items()
        }
    )


def _read_pulls(outcomes: Mapping[int, Any]) -> Reply:
    """Return what pulls of one message say about the queues of a topic on one broker."""
    stats = {}
    missing = 0
    for queue_id, outcome in outcomes.items():
        if isinstance(outcome, PullResponse):
            stats[queue_id] = QueueStats(outcome.min_offset, outcome.max_offset)
        elif isinstance(outcome, NoPermissionError):
            return Denied(_READ_RIGHT, str(outcome))
        elif isinstance(outcome, NotFoundError):
            missing += 1  # the topic, or only this queue
        elif isinstance(outcome, BackendUnavailableError | BrokerError):
            return Silent(str(outcome))
        else:
            raise outcome
    return NoTopic() if missing and not stats else Found(stats)


class Look(NamedTuple):
    """The result of a look at a queue offset.

    `first` is the offset of the first message there or later, as far as it is known. `proof` is the record of this
    message, or None if it was not seen.
    """

    first: int
    proof: RecordProof | None


class RecordLooks:
    """Single messages of queues, by pulls of one message each. For one thread.

    `address_of` returns the address of a broker, None if it is unknown. `topic_of` returns the cluster's name of a
    topic, and `group` is the cluster's name of the group that pulls. `note_records` gets the topic and the records of
    each answer.
    """

    def __init__(
        self,
        client: ClusterClient,
        group: str,
        address_of: Callable[[str], str | None],
        topic_of: Callable[[str], str],
        note_records: Callable[[str, bytes | memoryview], None] = lambda _topic, _records: None,
    ) -> None:
        self._client, self._group = client, group
        self._address_of, self._topic_of = address_of, topic_of
        self._note_records = note_records

    def look(self, at: Collection[tuple[QueueKey, int]]) -> dict[tuple[QueueKey, int], Look]:
        """Return what is at queue offsets, all of them below the ends of their queues.

        A queue that does not answer is left out. Raises NoPermissionError where pulls are refused.
        """
        found: dict[tuple[QueueKey, int], Look] = {}
        places = list(dict.fromkeys(at))
        for begin in range(0, len(places), _LOOKS_MAX):
            part = places[begin : begin + _LOOKS_MAX]
            repeated = []
            for (queue, offset), outcome in zip(part, self._pull(part), strict=True):
                if _is_reset(outcome):
                    repeated.append((queue, offset))
                else:
                    _add(found, queue, offset, self._read(queue, offset, outcome))
            # A reset of the group's offset is reported once, instead of the answer.
            for (queue, offset), outcome in zip(repeated, self._pull(repeated), strict=True):
                _add(found, queue, offset, self._read(queue, offset, outcome))
        return found

    def offsets_at(
        self, times_ms: Mapping[QueueKey, int], bounds: Mapping[QueueKey, QueueBounds]
    ) -> tuple[dict[QueueKey, int], dict[QueueKey, int]]:
        """Return the offset of the first message stored at or after the time of each queue, or its max offset.

        The second result has the offset of the first message of queues whose min offset names expired ones. Raises
        BackendUnavailableError if a broker does not answer.
        """
        filled = {queue: time for queue, time in times_ms.items() if _count(bounds[queue])}
        hints = self._hints(filled)
        searches = {queue: TimeSearch(bounds[queue], time, hints.get(queue)) for queue, time in filled.items()}
        firsts: dict[QueueKey, int] = {}
        open_ones = searches
        while open_ones:
            at = {queue: offset for queue, one in open_ones.items() if (offset := one.next_look()) is not None}
            looks = self.look(at.items())
            for queue, offset in at.items():
                if (queue, offset) not in looks:
                    raise BackendUnavailableError(
                        f"cannot find the time {times_ms[queue]} in queue {queue}: the broker {queue.broker} does not "
                        "answer. Repeat the read when it is back."
                    )
                look = looks[queue, offset]
                if look.first > offset:
                    firsts[queue] = max(firsts.get(queue, 0), look.first)
                    searches[queue].note_expired(look.first)
                if look.proof is not None:
                    searches[queue].note(look.first, look.proof.store_time_ms)
                elif look.first <= offset:
                    searches[queue].note_expired(offset + 1)  # damage, which the read of the range will describe
            open_ones = {queue: searches[queue] for queue in at if searches[queue].next_look() is not None}
        found = {queue: searches[queue].found if queue in searches else bounds[queue].max_offset for queue in times_ms}
        return found, firsts

    def _hints(self, times_ms: Mapping[QueueKey, int]) -> dict[QueueKey, int]:
        """Return the answers of the brokers themselves. A queue for which the account lacks the right is left out."""
        calls = [
            (self._address_of(queue.broker) or "", OffsetAtRequest(self._on_wire(queue), time))
            for queue, time in times_ms.items()
        ]
        hints = {}
        for queue, outcome in zip(times_ms, self._client.call_all(calls), strict=True):
            if isinstance(outcome, NoPermissionError | BrokerError):
                continue
            if isinstance(outcome, RmqError):
                raise outcome
            hints[queue] = outcome.offset
        return hints

    def _pull(self, at: Sequence[tuple[QueueKey, int]]) -> list[Any]:
        """Pull one message at each place. Return the outcomes."""
        return self._client.call_all(
            [
                (self._address_of(queue.broker) or "", PullRequest(self._on_wire(queue), offset, 1, self._group))
                for queue, offset in at
            ]
        )

    def _read(self, queue: QueueKey, offset: int, outcome: Any) -> Look | None:
        """Return what the outcome of a pull says, or None if the queue did not answer."""
        if isinstance(outcome, PullResponse):
            if outcome.status is PullStatus.FOUND:
                self._note_records(queue.topic, outcome.records)
            return read_look(self._on_wire(queue), offset, outcome)
        if isinstance(outcome, BackendUnavailableError | NotFoundError | BrokerError):
            return None
        raise outcome

    def _on_wire(self, queue: QueueKey) -> QueueKey:
        return QueueKey(self._topic_of(queue.topic), queue.queue_id, queue.broker)


def read_look(queue: QueueKey, offset: int, response: PullResponse) -> Look:
    """Return what a pull of one message of `queue`, with the cluster's name of its topic, says about `offset`."""
    if response.status is not PullStatus.FOUND:
        if response.status is PullStatus.OFFSET_ILLEGAL and response.reason == GetMessageStatus.OFFSET_TOO_SMALL:
            return Look(max(response.min_offset, offset), None)
        return Look(min(max(response.next_offset, offset), max(response.max_offset, offset)), None)
    record = decode_record(response.records)
    if not isinstance(record, Record):
        return Look(offset, None)  # damage, which the read of the range will describe
    is_of_queue = record.topic == queue.topic.encode() and record.queue_id == queue.queue_id
    if not is_of_queue or record.queue_offset < offset:
        return Look(max(response.next_offset, offset + 1), None)  # the entry of an expired message
    return Look(record.queue_offset, RecordProof(record.physical_offset, record.store_timestamp))


def _is_reset(outcome: Any) -> bool:
    return isinstance(outcome, PullResponse) and outcome.reason == GetMessageStatus.OFFSET_RESET


def _add(found: dict[tuple[QueueKey, int], Look], queue: QueueKey, offset: int, look: Look | None) -> None:
    if look is not None:
        found[queue, offset] = look


def _count(bounds: QueueBounds) -> int:
    return bounds.max_offset - bounds.min_offset
