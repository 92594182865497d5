"""Publishing: the runs of a batch are pulled from the stage topic and sent to their target queues.

Each queue gets its runs in the order of the intent, with one request in flight. Queues proceed in parallel. A blob is
pulled once for all its runs that are due at about the same time, and the blobs in memory are bounded.

An answer to a send has these meanings:

| answer | then |
| --- | --- |
| 0, 10, 11, 12 | the rows are stored: the next run |
| 2 | nothing is stored: the same request again, after a pause |
| 13, 16, 17, 29; 1 about queue id, size or account | nothing is stored, and the queue cannot be finished |
| 14 and others that may change | the outcome is unknown: the session is over |
| another answer | the outcome is unknown: the session is over when the other queues are done |
| none before the deadline, a lost connection | the outcome is unknown: the session is over |

A queue that cannot be finished does not stop the others. After SessionOverError, and after any other error, requests
may still be in flight: the caller closes all connections of the session, and another session looks for the rows.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from rmq_spark.store.cluster.answer_rule import AnswerRule
from rmq_spark.store.cluster.codes import ResponseCode
from rmq_spark.store.cluster.exactly_once.blobs import (
    Blob,
    BlobKey,
    NoBlob,
    blob_request,
    read_blob,
    read_run,
    rest_of,
)
from rmq_spark.store.cluster.exactly_once.staged_batch import StagedRun
from rmq_spark.store.cluster.exactly_once.target_calls import MAX_WAIT_MS, SessionOverError, TargetCalls, take_outcomes
from rmq_spark.store.cluster.exactly_once.written_rows import WrittenRows
from rmq_spark.store.cluster.puller import PullTerms
from rmq_spark.store.cluster.send_requests import SendBatchRequest, SendResponse
from rmq_spark.store.cluster.ticket import Ticket
from rmq_spark.store.errors import (
    BackendUnavailableError,
    BrokerError,
    NoPermissionError,
    NotFoundError,
    OptionError,
    RmqError,
)
from rmq_spark.store.model import QueueKey

_LOG = logging.getLogger("rmq_spark")
MAX_BLOB_BYTES = 32 << 20  # of blobs in memory and in flight, unless a single blob is larger
MAX_SENT_BYTES = 4 << 20  # in flight to one broker, unless a single request is larger: more meets flow control
DEADLINES = 5  # request timeouts, the deadline of a send: to wait costs less than a take-over
_FIRST_PAUSE_MS, _LAST_PAUSE_MS = 20.0, 1000.0
_BUSY_LOG_MS = 5000.0
_OUTCOME_UNKNOWN = "the session ends, because rows may be stored or not"
_REFUSALS = (ResponseCode.MESSAGE_ILLEGAL, ResponseCode.SYSTEM_ERROR)  # that have a rule as BrokerError


@dataclass(frozen=True, slots=True)
class PublishRequest(SendBatchRequest):
    """A run, or the end of one. The client does not repeat it: `SendResponse.status` may be SYSTEM_BUSY."""

    rules: ClassVar[tuple[AnswerRule, ...]] = (
        AnswerRule(ResponseCode.SYSTEM_BUSY, "the broker is busy and stored nothing"),
        # A broker with DLedger may have written the messages to its log nevertheless.
        AnswerRule(
            ResponseCode.SYSTEM_ERROR,
            "the page cache of the broker is busy, or its replicas are late",
            BackendUnavailableError,
            expected="a success",
            next_step="The rows are looked for before they are sent again.",
            remark=r"^\[PC_SYNCHRONIZED\]",
        ),
    )


@dataclass(slots=True)
class _Lane:
    """The runs for one target queue that are not stored yet. The first one lacks its first `skipped` rows, if any.

    A lane waits for the blob of its first run, is ready, has a request in flight, and may back off from a busy broker
    before it is ready again. With its last run it is finished. It ends early if its queue is stuck, or after an
    unexpected answer.
    """

    queue: QueueKey
    runs: deque[StagedRun]
    stored: int  # rows of the batch in the queue
    skipped: int = 0
    request: PublishRequest | None = None
    busy_since_ms: float | None = None
    pauses: int = 0

    @property
    def key(self) -> BlobKey:
        return BlobKey.of(self.runs[0])


@dataclass(slots=True)
class _CachedBlob:
    """A blob in memory. `pins` are the lanes whose next run is in it."""

    blob: Blob
    pins: int = 0

    @property
    def size(self) -> int:
        return 0 if isinstance(self.blob, NoBlob) else len(self.blob)


@dataclass(slots=True)
class _Broker:
    """The lanes of one target broker that can send, and what is in flight to it."""

    ready: deque[_Lane] = field(default_factory=deque)
    in_flight_bytes: int = 0


class Publishing:
    """Publishes the runs of one batch. For one thread, and for one call of `run`.

    `terms` are those of the pulls of blobs. `request_timeout_ms` is the option. A target broker that answers busy for
    `busy_timeout_ms` is given up. `now_ms` returns ms since the epoch, `monotonic_ms` a time that never runs back.
    """

    def __init__(
        self,
        calls: TargetCalls,
        terms: PullTerms,
        *,
        request_timeout_ms: int,
        busy_timeout_ms: float,
        monotonic_ms: Callable[[], float],
        now_ms: Callable[[], int],
        max_blob_bytes: int = MAX_BLOB_BYTES,
    ) -> None:
        self._calls, self._terms = calls, terms
        self._timeout_ms, self._busy_timeout_ms = DEADLINES * request_timeout_ms, busy_timeout_ms
        self._monotonic_ms, self._now_ms, self._max_blob_bytes = monotonic_ms, now_ms, max_blob_bytes
        self._lanes: dict[QueueKey, _Lane] = {}
        self._brokers: dict[str, _Broker] = {}
        self._without_blob: deque[_Lane] = deque()  # their next blobs must be pulled
        self._backing_off: list[tuple[float, _Lane]] = []
        self._sizes: dict[BlobKey, int] = {}  # of blobs as far as the runs tell
        self._left: dict[BlobKey, int] = {}  # how many runs of a blob are not stored
        self._cached: dict[BlobKey, _CachedBlob] = {}
        self._blob_bytes = 0  # of blobs in memory, and as far as the runs tell of those in flight
        self._pulled: dict[BlobKey, list[_Lane]] = {}  # blobs that are in flight, and the lanes that wait for them
        self._tickets: dict[Ticket[Any], BlobKey | _Lane] = {}
        self._rows: dict[QueueKey, int] = {}
        self._stuck: dict[QueueKey, str] = {}
        self._unknown: dict[QueueKey, str] = {}  # unexpected answers, after which rows may be stored or not
        self._logged: set[str] = set()  # brokers of which a line in the log says that they are busy

    @property
    def stored_rows(self) -> int:
        """How many rows of the batch are known to be stored, also after an error of `run`."""
        return sum(self._rows.values())

    def run(self, runs: Sequence[StagedRun], stored: Mapping[QueueKey, int] | None = None) -> WrittenRows:
        """Publish runs, all of one batch in the order of its intent, and return which rows are stored then.

        `stored` has how many rows of the batch a queue has already.

        Raises SessionOverError if the outcome of a send is unknown or a registered connection was lost, and
        BackendUnavailableError if a target broker is busy for too long or the broker of a blob does not answer.
        """
        self._open_lanes(runs, stored or {})
        try:
            self._run_lanes()
        except SessionOverError as error:
            error.answers |= self._unknown
            raise
        if self._unknown:
            more = f" So it is for {len(self._unknown) - 1} more queues." if len(self._unknown) > 1 else ""
            raise SessionOverError(f"{_OUTCOME_UNKNOWN}: {next(iter(self._unknown.values()))}{more}", self._unknown)
        return WrittenRows(self._rows, self._stuck)

    def _run_lanes(self) -> None:
        """Send the runs of all lanes, until each lane is finished or can be continued by nobody in this session."""
        done: list[Ticket[Any]] = []
        while self._lanes:
            self._resume_due()
            self._send(done)
            self._pull(done)
            if not self._lanes:
                break
            for ticket in take_outcomes(self._calls, done, self._poll_timeout_ms()):
                self._take(ticket, self._tickets.pop(ticket))
            self._calls.check()

    def _open_lanes(self, runs: Iterable[StagedRun], stored: Mapping[QueueKey, int]) -> None:
        for run in runs:
            lane = self._lanes.setdefault(run.queue, _Lane(run.queue, deque(), stored.get(run.queue, 0)))
            lane.runs.append(run)
        for lane in list(self._lanes.values()):
            self._rows[lane.queue] = lane.skipped = lane.stored
            while lane.runs and lane.runs[0].rows <= lane.skipped:
                lane.skipped -= lane.runs.popleft().rows
            for one in lane.runs:
                key = BlobKey.of(one)
                self._sizes[key] = max(self._sizes.get(key, 0), one.begin + one.size)
                self._left[key] = self._left.get(key, 0) + 1
            self._brokers.setdefault(lane.queue.broker, _Broker())
        for lane in list(self._lanes.values()):
            self._continue(lane)

    # Lanes.

    def _continue(self, lane: _Lane) -> None:
        """Let a lane send its next run, or wait for the blob of it, or end."""
        if not lane.runs:
            assert not lane.skipped, (lane.queue, lane.skipped)
            del self._lanes[lane.queue]
        elif lane.key in self._cached:
            self._cached[lane.key].pins += 1
            self._brokers[lane.queue.broker].ready.append(lane)
        elif lane.key in self._pulled:
            self._pulled[lane.key].append(lane)
        else:
            self._without_blob.append(lane)

    def _end(self, lane: _Lane) -> None:
        """End a lane to which nothing more is sent. Its next blob is in use."""
        self._cached[lane.key].pins -= 1
        while lane.runs:
            self._finish_run(lane)
        del self._lanes[lane.queue]

    def _finish_run(self, lane: _Lane) -> None:
        """Remove the first run of a lane. A blob without other runs is forgotten."""
        key = BlobKey.of(lane.runs.popleft())
        self._left[key] -= 1
        if not self._left[key] and key in self._cached:
            self._drop(key)

    # Blobs.

    def _drop(self, key: BlobKey) -> None:
        self._blob_bytes -= self._cached.pop(key).size

    def _pull(self, done: list[Ticket[Any]]) -> None:
        """Pull the blobs that lanes wait for, as far as memory allows. Idle blobs make room for them."""
        while self._without_blob:
            lane = self._without_blob[0]
            if lane.key not in self._cached and lane.key not in self._pulled:
                self._make_room(self._sizes[lane.key])
                if not self._has_room(lane.key):
                    return
                self._request(lane.key, done)
            self._continue(self._without_blob.popleft())

    def _has_room(self, key: BlobKey) -> bool:
        return not self._blob_bytes or self._blob_bytes + self._sizes[key] <= self._max_blob_bytes

    def _make_room(self, size: int) -> None:
        if self._blob_bytes + size <= self._max_blob_bytes:
            return
        for key in [key for key, cached in self._cached.items() if not cached.pins]:
            self._drop(key)
            if self._blob_bytes + size <= self._max_blob_bytes:
                return

    def _prefetch(self, lane: _Lane, done: list[Ticket[Any]]) -> None:
        """Pull the blob of the run after the next one, if memory is free."""
        if len(lane.runs) > 1 and not self._without_blob:
            key = BlobKey.of(lane.runs[1])
            if key not in self._cached and key not in self._pulled and self._has_room(key):
                self._request(key, done)

    def _request(self, key: BlobKey, done: list[Ticket[Any]]) -> None:
        self._pulled[key] = []
        self._blob_bytes += self._sizes[key]
        self._ask_again(key, done)

    def _ask_again(self, key: BlobKey, done: list[Ticket[Any]]) -> None:
        (ticket,) = self._calls.submit_all(key.stage.broker, [blob_request(key, self._terms)], done=done)
        self._tickets[ticket] = key

    def _take_blob(self, key: BlobKey, ticket: Ticket[Any]) -> None:
        blob = read_blob(key, self._terms, ticket.result() if ticket.error is None else ticket.error)
        if blob is None:
            assert ticket.done is not None
            self._ask_again(key, ticket.done)
            return
        lanes = self._pulled.pop(key)
        self._blob_bytes -= self._sizes[key]
        if self._left[key]:
            self._cached[key] = _CachedBlob(blob)
            self._blob_bytes += self._cached[key].size
        for lane in lanes:
            self._continue(lane)

    # Sends.

    def _resume_due(self) -> None:
        now_ms = self._monotonic_ms()
        for until_ms, lane in self._backing_off:
            if until_ms <= now_ms:
                self._brokers[lane.queue.broker].ready.append(lane)
        self._backing_off = [one for one in self._backing_off if one[0] > now_ms]

    def _poll_timeout_ms(self) -> float:
        """Return how long to wait for an outcome."""
        first_ms = min((until_ms for until_ms, _ in self._backing_off), default=None)
        return MAX_WAIT_MS if first_ms is None else first_ms - self._monotonic_ms()

    def _send(self, done: list[Ticket[Any]]) -> None:
        for name, broker in self._brokers.items():
            while broker.ready:
                lane = broker.ready[0]
                request = lane.request or self._make_request(lane)
                if isinstance(request, NoBlob):
                    broker.ready.popleft()
                    self._stuck[lane.queue] = request.reason
                    self._end(lane)
                    continue
                lane.request = request
                size = len(request.content)
                if broker.in_flight_bytes and broker.in_flight_bytes + size > MAX_SENT_BYTES:
                    break
                broker.ready.popleft()
                (ticket,) = self._calls.submit_all(name, [request], self._timeout_ms, done)
                self._tickets[ticket] = lane
                broker.in_flight_bytes += size
                self._prefetch(lane, done)

    def _make_request(self, lane: _Lane) -> PublishRequest | NoBlob:
        run = lane.runs[0]
        data = read_run(run, self._cached[lane.key].blob)
        if isinstance(data, NoBlob):
            return data
        content = rest_of(run, data, lane.skipped)
        return PublishRequest(self._terms.stored_queue(lane.queue), content, run.rows - lane.skipped, self._now_ms())

    def _take(self, ticket: Ticket[Any], of: BlobKey | _Lane) -> None:
        if isinstance(of, BlobKey):
            self._take_blob(of, ticket)
            return
        assert of.request is not None, of.queue
        self._brokers[of.queue.broker].in_flight_bytes -= len(of.request.content)
        if ticket.error is not None:
            self._take_error(of, ticket, ticket.error)
            return
        response: SendResponse = ticket.result()
        if response.status is ResponseCode.SYSTEM_BUSY:
            self._repeat(of)
        else:
            self._note_stored(of, of.request)

    def _take_error(self, lane: _Lane, ticket: Ticket[Any], error: RmqError) -> None:
        """Note why a lane ends, and end it. Raises SessionOverError if no answer came, or one that may change."""
        if not ticket.is_answered or isinstance(error, BackendUnavailableError):  # the latter for a full disk
            raise SessionOverError(f"{_OUTCOME_UNKNOWN}: {error}") from error
        is_refused = isinstance(error, NotFoundError | NoPermissionError | OptionError) or (
            isinstance(error, BrokerError) and error.code in _REFUSALS
        )
        if is_refused:
            self._stuck[lane.queue] = str(error)
        else:
            self._unknown[lane.queue] = str(error)
        self._end(lane)

    def _note_stored(self, lane: _Lane, request: PublishRequest) -> None:
        lane.stored += request.count
        self._rows[lane.queue] = lane.stored
        lane.request, lane.skipped, lane.busy_since_ms, lane.pauses = None, 0, None, 0
        self._cached[lane.key].pins -= 1
        self._finish_run(lane)
        self._continue(lane)

    def _repeat(self, lane: _Lane) -> None:
        """Send the same request again later. Raises BackendUnavailableError if the broker was busy for too long."""
        now_ms = self._monotonic_ms()
        if lane.busy_since_ms is None:
            lane.busy_since_ms = now_ms
        busy_ms = now_ms - lane.busy_since_ms
        if busy_ms >= self._busy_timeout_ms:
            raise BackendUnavailableError(
                f"cannot send to queue {lane.queue}: broker {lane.queue.broker} answers that it is busy, for "
                f"{busy_ms / 1000:.1f} s (brokerDownTimeout); expected a broker with capacity. Check the load of its "
                "disk, and whether it is still the master."
            )
        if busy_ms >= _BUSY_LOG_MS and lane.queue.broker not in self._logged:
            self._logged.add(lane.queue.broker)
            _LOG.warning("rmq: publishing waits: broker %s answers that it is busy", lane.queue.broker)
        self._backing_off.append((now_ms + min(_FIRST_PAUSE_MS * 2**lane.pauses, _LAST_PAUSE_MS), lane))
        lane.pauses = min(lane.pauses + 1, 10)
