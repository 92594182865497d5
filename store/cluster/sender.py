"""Sends the messages of a spool: many queues in parallel, and one request in flight for each queue.

A broker may store requests for one queue that are in flight together in any order. So the next request for a queue is
sent when the one before it has its outcome, and the messages of a queue stay in order:

| outcome of a request | the sender |
| --- | --- |
| stored | continues with the queue |
| nothing was stored, and the broker is away or busy | repeats the request after growing pauses, by new routes |
| the same for a while, and any queue will do for the messages | moves them to a queue of another broker |
| not known, if `repeats_unknown` | the same: messages that are sent again have the same ids |
| not known, else | ends with UnknownOutcomeError, which has the ids |
| a batch was refused for its size or content | sends it in halves, down to the message that is refused |
| refused | ends with the broker's error |

Before `send` raises an error, it waits for the requests in flight, so that their outcomes are known. `wait_ms` bounds
how long a broker may store nothing.

Source: DefaultMQProducerImpl#sendDefaultImpl (4.9, 5.3), which does not keep the order of a queue.
"""

import heapq
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

import numpy as np
from numpy.typing import NDArray

from rmq_spark.store.cluster.client import ClusterClient
from rmq_spark.store.cluster.message_spool import ItemRun, MessageSpool
from rmq_spark.store.cluster.send_requests import SendBatchRequest, SendRequest, SendResponse
from rmq_spark.store.cluster.ticket import Ticket
from rmq_spark.store.cluster.write_routes import WriteRoutes
from rmq_spark.store.errors import BackendUnavailableError, BrokerError, RmqError, UnknownOutcomeError
from rmq_spark.store.format.batch_items import NOT_SOLO, split_item
from rmq_spark.store.model import QueueKey

_LOG = logging.getLogger("rmq_spark")

# A request of a broker takes about the time of 500 messages whatever its size, and with 4 in flight flow control
# (waitTimeMillsInSendQueue) was never met.
BATCH_BYTES, BATCH_MESSAGES = 128 << 10, 1024
MAX_IN_FLIGHT = 4  # at each broker
_FIRST_PAUSE_MS, _LAST_PAUSE_MS = 50.0, 2000.0
_LONGEST_TIMEOUT_MS = 30_000  # of a request whose outcome was not known several times
_PATIENCE_MS = 200.0  # the longest time between two looks at what is paused


@dataclass(frozen=True, slots=True)
class SendTerms:
    """How a sender deals with brokers that are away, and with outcomes that are not known.

    A broker may store nothing for `wait_ms`. Messages that any queue may take are moved when a broker has stored
    nothing for `moved_after_ms`, or when the name servers do not list it any more.
    """

    wait_ms: float
    repeats_unknown: bool = False
    moved_after_ms: float = 0
    batch_bytes: int = BATCH_BYTES
    batch_messages: int = BATCH_MESSAGES


@dataclass(slots=True)
class Outgoing:
    """A request for a queue, and the items in it."""

    queue: QueueKey
    runs: list[ItemRun]
    request: SendRequest | SendBatchRequest

    @property
    def rows(self) -> NDArray[np.int64]:
        """The numbers of the messages in the spool."""
        return self.runs[0].rows if len(self.runs) == 1 else np.concatenate([run.rows for run in self.runs])

    @property
    def count(self) -> int:
        """The number of messages."""
        return sum(len(run.rows) for run in self.runs)

    @property
    def bytes(self) -> int:
        """The size of the items."""
        return sum(int(run.sizes.sum()) for run in self.runs)


OnStored = Callable[[Outgoing, SendResponse], None]


@dataclass(slots=True)
class _Lane:
    """The messages for one queue that were not stored yet."""

    queue: QueueKey
    runs: deque[ItemRun]
    head: Outgoing | None = None  # the request that was sent, or must be sent next
    failures: int = 0  # in a row
    unknowns: int = 0  # how many of the attempts at the head had an outcome that is not known
    batch_bytes: int = 0
    batch_messages: int = 0


@dataclass(slots=True)
class _Broker:
    """The lanes of one broker that can send, and how many requests are in flight.

    While the broker fails, one request at a time finds out whether it stores messages again.
    """

    ready: deque[_Lane] = field(default_factory=deque)
    in_flight: int = 0
    failing_since_ms: float | None = None


class Sender:
    """Sends spools over one client. For one thread.

    `on_stored` is called for each request that was stored, with its answer. `now_ms` returns ms since the epoch.
    Errors number the messages of a spool from `first_row` on.
    """

    def __init__(
        self,
        client: ClusterClient,
        routes: WriteRoutes,
        terms: SendTerms,
        monotonic_ms: Callable[[], float],
        now_ms: Callable[[], int],
        on_stored: OnStored,
        first_row: int = 0,
    ) -> None:
        self._client, self._routes, self._terms = client, routes, terms
        self._monotonic_ms, self._now_ms, self._on_stored = monotonic_ms, now_ms, on_stored
        self._first_row = first_row
        self._spool = MessageSpool()
        self._brokers: dict[str, _Broker] = {}
        self._lanes: dict[QueueKey, _Lane] = {}
        self._active: dict[Ticket[SendResponse], _Lane] = {}
        self._paused: list[tuple[float, int, _Lane]] = []  # a heap by time
        self._order = count()
        self._error: RmqError | None = None
        self._unknown: list[tuple[UnknownOutcomeError, NDArray[np.int64]]] = []  # with the rows of the request
        self._moves = 0

    def send(self, spool: MessageSpool) -> None:
        """Send all messages of a spool. Raises the first error, after the requests in flight have their outcomes.

        If any outcome is not known then, it raises UnknownOutcomeError instead, with the ids of all messages that may
        have been stored, if the spool kept ids.
        """
        self._spool = spool
        for queue, runs in spool.runs.items():
            self._open_lane(queue, deque(runs))
        done: list[Ticket[SendResponse]] = []
        while self._lanes and not (self._error is not None and not self._active):
            if self._error is None:
                self._wake()
                self._submit(done)
            for ticket in self._client.take_done(done, self._patience_ms()):
                self._take(ticket)
        if self._error is not None:
            raise self._final_error(self._error)

    def _final_error(self, first: RmqError) -> RmqError:
        """Return the error of the call: the first one, but unknown outcomes come before it, with all of their ids."""
        if not self._unknown:
            return first
        error, others = self._unknown[0][0], len(self._unknown) - 1
        ids = self._spool.ids(np.concatenate([rows for _, rows in self._unknown]))
        more = f" So is that of {others} other request{'s' * (others > 1)}." if others else ""
        found = UnknownOutcomeError(f"{error}{more}{_ids_text(ids)}", ids)
        if first is not error:
            found.add_note(f"rmq: another request failed before: {first}")
        return found

    def _open_lane(self, queue: QueueKey, runs: deque[ItemRun]) -> None:
        lane = _Lane(queue, runs, batch_bytes=self._terms.batch_bytes, batch_messages=self._terms.batch_messages)
        self._lanes[queue] = lane
        self._broker(queue).ready.append(lane)

    def _broker(self, queue: QueueKey) -> _Broker:
        return self._brokers.setdefault(queue.broker, _Broker())

    # Sending.

    def _patience_ms(self) -> float:
        if self._error is not None or not self._paused:
            return _PATIENCE_MS
        return min(max(self._paused[0][0] - self._monotonic_ms(), 0.0), _PATIENCE_MS)

    def _wake(self) -> None:
        now_ms = self._monotonic_ms()
        while self._paused and self._paused[0][0] <= now_ms:
            lane = heapq.heappop(self._paused)[2]
            self._broker(lane.queue).ready.append(lane)

    def _submit(self, done: list[Ticket[SendResponse]]) -> None:
        for name, broker in list(self._brokers.items()):
            most = MAX_IN_FLIGHT if broker.failing_since_ms is None else 1
            while broker.ready and broker.in_flight < most and self._error is None:
                lane = broker.ready.popleft()
                try:
                    lane.head = lane.head or self._build(lane)
                except RmqError as error:  # of the temporary file
                    self._fail(error)
                    return
                try:
                    to = self._routes.address(name)
                except BackendUnavailableError as error:
                    self._repeat(lane, error)
                    continue
                # A broker that is slow would get a copy for each time-out.
                timeout_ms = self._client.address.request_timeout_ms << lane.unknowns
                timeout_ms = min(timeout_ms, max(_LONGEST_TIMEOUT_MS, self._client.address.request_timeout_ms))
                (ticket,) = self._client.submit_all(to, [lane.head.request], timeout_ms, done)
                self._active[ticket] = lane
                broker.in_flight += 1

    def _build(self, lane: _Lane) -> Outgoing:
        """Return the next request of a lane: one message, or a batch."""
        taken: list[ItemRun] = []
        size = number = 0
        while lane.runs and number < lane.batch_messages:
            run = lane.runs[0]
            fits = _count_fitting(run, lane.batch_bytes - size, lane.batch_messages - number, is_first=not taken)
            if not fits:
                break
            part, rest = run.cut(fits)
            taken.append(part)
            size, number = size + int(part.sizes.sum()), number + fits
            if rest is None:
                lane.runs.popleft()
            else:
                lane.runs[0] = rest
            if part.solo is not None and part.solo[0] != NOT_SOLO:
                break
        return Outgoing(lane.queue, taken, self._make_request(lane.queue, taken, number))

    def _make_request(self, queue: QueueKey, runs: list[ItemRun], number: int) -> SendRequest | SendBatchRequest:
        stored = QueueKey(self._routes.topic_of(queue.topic), queue.queue_id, queue.broker)
        parts = [self._spool.read(run) for run in runs]
        data = parts[0] if len(parts) == 1 else b"".join(parts)
        if number == 1:
            sys_flag = NOT_SOLO if runs[0].solo is None else int(runs[0].solo[0])
            flag, body, properties = split_item(data)
            if body or sys_flag != NOT_SOLO:  # a broker of 5.x takes an empty body in a batch only
                return SendRequest(stored, body, properties, self._now_ms(), flag, max(sys_flag, 0))
        return SendBatchRequest(stored, data, number, self._now_ms())

    # Outcomes.

    def _take(self, ticket: Ticket[SendResponse]) -> None:
        lane = self._active.pop(ticket)
        broker, head = self._broker(lane.queue), lane.head
        broker.in_flight -= 1
        assert head is not None, lane.queue
        error = ticket.error
        if error is None:
            self._stored(lane, head, ticket.result())
        elif isinstance(error, UnknownOutcomeError):
            if self._terms.repeats_unknown and not ticket.is_answered:
                lane.unknowns += 1
                self._repeat(lane, error)
            else:
                self._unknown.append((error, head.rows))
                self._fail(error)
        elif isinstance(error, BackendUnavailableError):
            self._repeat(lane, error)
        elif isinstance(error, BrokerError) and head.count > 1:
            lane.runs.extendleft(reversed(head.runs))
            lane.batch_messages = max(head.count // 2, 1)
            lane.head = None
            broker.ready.append(lane)
        else:
            if isinstance(error, BrokerError):
                self._name_refused(error, head)
            self._fail(error)

    def _name_refused(self, error: BrokerError, head: Outgoing) -> None:
        """Add a note to the error of a request with one message that says which one was refused."""
        ids = self._spool.ids(head.rows)
        names = [] if self._spool.count == 1 and ids else [f"row {self._first_row + int(head.rows[0])}"]
        note_refused(error, ", ".join([*names, *(f"message {one}" for one in ids)]))

    def _stored(self, lane: _Lane, head: Outgoing, response: SendResponse) -> None:
        broker = self._broker(lane.queue)
        broker.failing_since_ms = None
        lane.failures, lane.unknowns, lane.head = 0, 0, None
        lane.batch_messages = min(2 * lane.batch_messages, self._terms.batch_messages)
        self._on_stored(head, response)
        if lane.runs:
            broker.ready.append(lane)
        else:
            del self._lanes[lane.queue]

    def _fail(self, error: RmqError) -> None:
        if self._error is None:
            self._error = error

    def _repeat(self, lane: _Lane, error: RmqError) -> None:
        """Send the head of a lane again later, or elsewhere, or end if it has waited long enough."""
        now_ms, queue, broker = self._monotonic_ms(), lane.queue, self._broker(lane.queue)
        lane.failures += 1
        if broker.failing_since_ms is None:
            broker.failing_since_ms = now_ms
            _LOG.warning("rmq: sending to broker %s waits: %s", queue.broker, _cause(error))
        self._routes.renew(queue.topic)
        is_gone = not self._routes.is_listed(queue.topic, queue.broker)
        is_late = now_ms - broker.failing_since_ms >= self._terms.moved_after_ms
        if (is_late or is_gone) and self._move(lane):
            return
        if now_ms - broker.failing_since_ms >= self._terms.wait_ms:
            self._fail(_overdue(lane, now_ms - broker.failing_since_ms, error))
        pause_ms = min(_FIRST_PAUSE_MS * 2 ** (lane.failures - 1), _LAST_PAUSE_MS)
        heapq.heappush(self._paused, (now_ms + pause_ms, next(self._order), lane))

    def _move(self, lane: _Lane) -> bool:
        """Move the messages of a lane to a queue of another broker, and return True.

        Return False if there is none, or if the queue of a message was chosen by a queue id or a key.
        """
        runs = [*(lane.head.runs if lane.head is not None else ()), *lane.runs]
        target = self._find_target(lane.queue)
        if target is None or not all(run.is_free for run in runs):
            return False
        moved = sum(len(run.rows) for run in runs)
        del self._lanes[lane.queue]
        if target in self._lanes:
            self._lanes[target].runs.extend(runs)
        else:
            self._open_lane(target, deque(runs))
        _LOG.warning(
            "rmq: %s for queue %s go%s to queue %s, because broker %s stores nothing now",
            *(_messages(moved), lane.queue, "es" * (moved == 1), target, lane.queue.broker),
        )
        return True

    def _find_target(self, queue: QueueKey) -> QueueKey | None:
        """Return a queue of the same topic on a broker that works, each time another one. None if there is none."""
        others = [
            one
            for one in self._routes.queues(queue.topic)
            if one.broker != queue.broker
            and self._broker(one).failing_since_ms is None
            and self._routes.is_listed(queue.topic, one.broker)
        ]
        self._moves += 1
        return others[self._moves % len(others)] if others else None


def _overdue(lane: _Lane, waited_ms: float, error: RmqError) -> BackendUnavailableError:
    """Return the error for a queue that has waited too long for its broker."""
    left = sum(len(run.rows) for run in (*(lane.head.runs if lane.head else ()), *lane.runs))
    what = "stored none"
    if lane.unknowns:
        what = "confirmed none (some may be stored, also several times, with the same ids)"
    return BackendUnavailableError(
        f"cannot send {_messages(left)} to queue {lane.queue}: broker {lane.queue.broker} has {what} for "
        f"{waited_ms / 1000:.1f} s (brokerDownTimeout); expected a broker that stores them. Last: {error}"
    )


def _messages(count: int) -> str:
    return f"{count} message{'s' * (count != 1)}"


def _cause(error: RmqError) -> str:
    """Return why a request is sent again, for the log. An unknown outcome asks the caller to find out; it must not."""
    if isinstance(error, UnknownOutcomeError):
        return f"{str(error).partition('; expected')[0]}; it is sent again"
    return str(error)


def _count_fitting(run: ItemRun, room_bytes: int, room_count: int, *, is_first: bool) -> int:
    """Return how many items of a run are added to a request with this much room. The first one is always added."""
    if run.solo is not None:
        if run.solo[0] != NOT_SOLO:
            return int(is_first)
        solos = np.flatnonzero(run.solo != NOT_SOLO)
        room_count = min(room_count, int(solos[0]) if len(solos) else room_count)
    sizes = run.sizes[:room_count]
    fits = int(np.searchsorted(np.cumsum(sizes), room_bytes, "right"))
    return max(fits, int(is_first))


def note_refused(error: BrokerError, what: str) -> None:
    """Add a note to an error that says what the broker refused."""
    error.add_note(f"rmq: the broker refused {what}.")


def report_unknown(error: UnknownOutcomeError, ids: tuple[str, ...]) -> UnknownOutcomeError:
    """Return the error of a request with the ids of its messages."""
    return UnknownOutcomeError(f"{error}{_ids_text(ids)}", ids)


def _ids_text(ids: tuple[str, ...]) -> str:
    if not ids:
        return ""
    shown = ", ".join(ids[:3])
    more = f" and {len(ids) - 3} more (UnknownOutcomeError.message_ids)" if len(ids) > 3 else ""
    return f" Look for the ids {shown}{more}."
