"""Reading of planned ranges from brokers: sends the pulls of a `PullPipeline`, waits, and decodes what they gave.

A broker that is away is waited for, because Spark would only plan the same range again: it may come back, or the route
may name another address. A queue that ends below the planned end is waited for, too. An acting master may only be
behind. Any other broker has lost messages if its queue is still too short after some time.

Source: DefaultMQPullConsumerImpl#pullSyncImpl, PullAPIWrapper (4.9, 5.3).
"""

import logging
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from rmq_spark.store.backend import ReadBatch
from rmq_spark.store.cluster.client import ClusterClient, Ticket
from rmq_spark.store.cluster.group_requests import CommitOffsetRequest
from rmq_spark.store.cluster.namespace import wrap_name
from rmq_spark.store.cluster.pull_pace import PullPace
from rmq_spark.store.cluster.pull_pipeline import (
    JOINED_BYTES,
    Pull,
    Pulled,
    PullPipeline,
    Purpose,
    ShortQueue,
    Verdict,
)
from rmq_spark.store.cluster.pulled_records import PulledQueue, decode_pulled
from rmq_spark.store.cluster.requests import PullRequest
from rmq_spark.store.cluster.responses import PullResponse
from rmq_spark.store.errors import BackendUnavailableError
from rmq_spark.store.filter.row_filter import ALL, TAG, Expression, RowFilter, compile_filter
from rmq_spark.store.format.rows import DecodeLimits
from rmq_spark.store.model import QueueKey, QueueRange

_LOG = logging.getLogger("rmq_spark")
_ANSWER_MS = 60_000  # the client ends each pull before
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.25, 5.0  # between two attempts at a broker that is away
_LOOK_AGAIN_S = 1.0  # between two looks at a queue that is too short
_ENOUGH_IN_FLIGHT = 0.75  # of the pace's depth: above it, pulls that are due wait for more of them
LOSS_AFTER_S = 10.0  # a queue that is too short for so long has lost messages, unless an acting master has it
_EVERYTHING = Expression(TAG, ALL)


@dataclass(frozen=True, slots=True)
class PullTerms:
    """How a reader pulls.

    `group` is the name that the pulls have, without the `namespace`. `max_pulls` is how many are in flight, or None if
    the broker's answers decide. A broker may be away for `broker_down_timeout_ms`; 0 means for ever.
    """

    group: str
    namespace: str = ""
    max_pulls: int | None = None
    broker_down_timeout_ms: int = 0

    @property
    def stored_group(self) -> str:
        """The cluster's name of the group."""
        return wrap_name(self.namespace, self.group)

    def stored_queue(self, queue: QueueKey) -> QueueKey:
        """Return the queue with the cluster's name of its topic."""
        return QueueKey(wrap_name(self.namespace, queue.topic), queue.queue_id, queue.broker)


def is_acting_nowhere(broker: str) -> bool:
    """Say that a broker's master is not an acting one."""
    return False


class Puller:
    """Reads ranges of queues over one client.

    `broker_address` returns the address to pull from for a broker name, by routes that it renews as needed; it raises
    BackendUnavailableError if there is none. `is_acting_master` says whether that is a slave that acts as the master
    (5.x). `monotonic_s` and `sleep` are in seconds. `paces` are those of earlier pullers, by broker.
    """

    def __init__(
        self,
        client: ClusterClient,
        broker_address: Callable[[str], str],
        terms: PullTerms,
        *,
        is_acting_master: Callable[[str], bool] = is_acting_nowhere,
        monotonic_s: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        paces: dict[str, PullPace] | None = None,
    ) -> None:
        self.client, self.broker_address, self.terms = client, broker_address, terms
        self.is_acting_master, self.monotonic_s, self.sleep = is_acting_master, monotonic_s, sleep
        self._paces = {} if paces is None else paces

    def read(
        self,
        part: QueueRange,
        columns: Sequence[str],
        limits: DecodeLimits,
        wanted: RowFilter | None = None,
        expression: Expression | None = None,
    ) -> Iterator[ReadBatch]:
        """Yield the messages of a range in order, as `Backend.read` does.

        The broker filters by `expression`, and all that comes is tested with `wanted`. The expression must not rule out
        a message that `wanted` matches.

        Raises OffsetRangeError if the queue does not have the whole range, DamageError if records are damaged,
        StoreChangedError if messages are missing between others, and BackendUnavailableError if the broker was away for
        too long. All rows that were yielded before are correct.
        """
        for _, batch in self.read_all([part], columns, limits, wanted, expression):
            yield batch

    def read_all(
        self,
        parts: Iterable[QueueRange],
        columns: Sequence[str],
        limits: DecodeLimits,
        wanted: RowFilter | None = None,
        expression: Expression | None = None,
    ) -> Iterator[tuple[QueueRange, ReadBatch]]:
        """Yield the messages of ranges, one range after another, each batch with its range.

        Adjacent ranges of one broker share the pulls in flight: while the last pulls of a range are in flight, the next
        range begins. All ranges have the same filter. Otherwise like `read`.
        """
        expression = expression or _EVERYTHING
        assert wanted is not None or compile_filter(expression) is None, "what a broker filters is tested again"
        # Allocating and freeing one large block makes the allocator keep freed memory for the next batches.
        np.empty(2 * JOINED_BYTES, np.uint8)
        for broker, adjacent in groupby(parts, lambda part: part.queue.broker):
            reading = _Reading(self, broker, list(adjacent), expression)
            yield from reading.batches(columns, limits, wanted)

    def pull_all(
        self, parts: Sequence[QueueRange], expression: Expression | None = None
    ) -> Generator[tuple[int, list[Pulled]], None, None]:
        """Yield what the broker answers for ranges, one range after another, each with the index of its range.

        All ranges are of one broker. Raises the errors of `read`, except those of decoding.
        """
        return _Reading(self, parts[0].queue.broker, list(parts), expression or _EVERYTHING).pulled()

    def source_of(self, queue: QueueKey) -> PulledQueue:
        """Return how records of a queue name it."""
        return PulledQueue(queue, self.terms.stored_queue(queue).topic, self.terms.namespace)

    def pace_of(self, broker: str, *, is_filtered: bool) -> PullPace:
        """Return the pace of pulls from a broker. Without a filter all readings share what they learn."""
        if is_filtered:
            return PullPace(is_filtered=True, max_pulls=self.terms.max_pulls)
        if broker not in self._paces:
            self._paces[broker] = PullPace(max_pulls=self.terms.max_pulls)
        return self._paces[broker]


@dataclass(slots=True)
class _Absence:
    """A broker that does not answer, since a time by the monotonic clock."""

    since_s: float
    error: BackendUnavailableError
    attempts: int = 0


class _Reading:
    """The reading of some ranges of one broker."""

    def __init__(self, puller: Puller, broker: str, parts: list[QueueRange], expression: Expression) -> None:
        self._puller, self._client, self._terms = puller, puller.client, puller.terms
        self._broker, self._parts, self._expression = broker, parts, expression
        self._is_filtered = compile_filter(expression) is not None
        self._pace = puller.pace_of(broker, is_filtered=self._is_filtered)
        self._pipeline = PullPipeline(parts, self._pace, is_filtered=self._is_filtered)
        self._queues = [self._terms.stored_queue(part.queue) for part in parts]
        self._group = self._terms.stored_group
        self._tickets: dict[Ticket[PullResponse], Pull] = {}
        self._done: list[Ticket[PullResponse]] = []
        self._address: str | None = None
        self._absence: _Absence | None = None
        self._resets: list[CommitOffsetRequest] = []
        self._short_since_s: float | None = None  # when the wait for a short queue began
        self._lost_since_s: float | None = None  # since then no acting master has had it
        self._is_waiting = False  # whether the log says that the reader waits

    def batches(
        self, columns: Sequence[str], limits: DecodeLimits, wanted: RowFilter | None
    ) -> Iterator[tuple[QueueRange, ReadBatch]]:
        """Yield the messages of the ranges, each batch with its range."""
        with closing(self.pulled()) as taken:
            for number, pulled in taken:
                part = self._parts[number]
                source = self._puller.source_of(part.queue)
                for batch in decode_pulled(source, pulled, columns, limits, wanted, is_filtered=self._is_filtered):
                    yield part, batch
                    self._pump(0)

    def pulled(self) -> Generator[tuple[int, list[Pulled]], None, None]:
        """Yield the results of the pulls, each time adjacent ones of one range, with the number of the range."""
        try:
            while not self._pipeline.is_done:
                taken = self._pipeline.take()
                if taken is None:
                    self._advance()
                    continue
                self._pump(0)
                yield taken.part, taken.pulled
        finally:
            self._client.forget([ticket for ticket in self._tickets if not ticket.is_done])

    def _advance(self) -> None:
        """Wait for the next answer, or for a broker or a queue."""
        if not self._tickets:
            if self._address is None or self._absence is not None:
                self._find_address()
            short = self._pipeline.short_queue
            if short is not None:
                self._wait_for_queue(short)
        self._pump(_ANSWER_MS)

    def _pump(self, timeout_ms: int) -> None:
        """Send the pulls that are due, and accept the answers that come within `timeout_ms`."""
        self._send()
        assert timeout_ms == 0 or self._tickets or self._absence is not None, "nothing to wait for"
        if self._tickets:
            for ticket in self._client.take_done(self._done, timeout_ms):
                self._settle(ticket)
            if timeout_ms == 0:
                self._send()

    def _send(self) -> None:
        """Send the pulls that are due. As long as the broker is away, only one is in flight.

        Sending costs more than a pull, so while many are in flight, several are sent together.
        """
        if self._pipeline.in_flight > self._pace.depth * _ENOUGH_IN_FLIGHT:
            return
        if self._address is None or (self._absence is not None and (self._tickets or not self._absence.attempts)):
            return
        if self._resets and not self._store_resets():
            return
        pulls = []
        while (pull := self._pipeline.next_pull()) is not None:
            pulls.append(pull)
            if self._absence is not None:
                break
        if pulls:
            requests = [self._request(pull) for pull in pulls]
            tickets = self._client.submit_all(self._address, requests, done=self._done)
            self._tickets.update(zip(tickets, pulls, strict=True))

    def _request(self, pull: Pull) -> PullRequest:
        expression = self._expression if pull.purpose is Purpose.MESSAGES else _EVERYTHING
        return PullRequest(
            self._queues[pull.part],
            pull.offset,
            pull.max_messages,
            self._group,
            expression.text,
            expression.kind,
        )

    def _settle(self, ticket: Ticket[PullResponse]) -> None:
        """Accept the outcome of a pull. Raises its error, unless the broker is away."""
        pull = self._tickets.pop(ticket)
        try:
            answer = ticket.result()
        except BackendUnavailableError as error:
            self._pipeline.unanswered(pull)
            self._note_absence(error)
            return
        verdict = self._pipeline.answered(pull, answer)
        if verdict is Verdict.REDIRECTED:
            what = f"{answer.status.name} {answer.reason}".strip()
            self._note_absence(
                BackendUnavailableError(
                    f"broker {self._broker} at {ticket.to} answered {what} for offset {pull.offset} of queue "
                    f"{pull.queue}, which it should have; expected messages. It may not be the master."
                )
            )
            return
        if verdict is Verdict.RESET:
            request = CommitOffsetRequest(self._group, self._queues[pull.part], answer.next_offset)
            self._resets.append(request)
        self._absence = None
        if verdict is Verdict.GO_ON and pull.purpose is Purpose.MESSAGES:
            self._note_progress()

    def _note_progress(self) -> None:
        self._short_since_s = self._lost_since_s = None
        if self._is_waiting:
            self._is_waiting = False
            _LOG.warning("rmq: broker %s answers again; its queues are read on", self._broker)

    def _note_absence(self, error: BackendUnavailableError) -> None:
        if self._absence is None:
            self._absence = _Absence(self._puller.monotonic_s(), error)
        self._absence.error = error

    def _log_waiting(self, why: object) -> None:
        """Log once that the reader waits."""
        if not self._is_waiting:
            self._is_waiting = True
            _LOG.warning("rmq: reading from broker %s waits: %s", self._broker, why)

    def _find_address(self) -> None:
        """Look up the broker's address, and wait while there is none. A lost connection is tried again at once."""
        while True:
            absence = self._absence
            if absence is not None:
                if absence.attempts:
                    self._pause(absence)
                absence.attempts += 1
            try:
                self._address = self._puller.broker_address(self._broker)
            except BackendUnavailableError as error:
                self._note_absence(error)
            else:
                return

    def _pause(self, absence: _Absence) -> None:
        """Sleep before the next attempt. Raises BackendUnavailableError if the broker was away for too long."""
        left_s = self._left_s(absence.since_s)
        if left_s <= 0:
            raise self._timeout(f"did not answer: {absence.error}") from absence.error
        self._log_waiting(absence.error)
        self._puller.sleep(min(_FIRST_PAUSE_S * 2 ** min(absence.attempts - 1, 10), _LAST_PAUSE_S, left_s))

    def _left_s(self, since_s: float) -> float:
        """Return how long (s) to wait at most for something that began at `since_s`."""
        timeout_ms = self._terms.broker_down_timeout_ms
        return since_s + timeout_ms / 1000 - self._puller.monotonic_s() if timeout_ms else float("inf")

    def _timeout(self, found: str) -> BackendUnavailableError:
        return BackendUnavailableError(
            f"cannot read from broker {self._broker}: for {self._terms.broker_down_timeout_ms / 1000:g} s it {found} "
            "Start the broker, or set brokerDownTimeout to a longer time."
        )

    def _wait_for_queue(self, short: ShortQueue) -> None:
        """Wait before the next look at a queue that is too short. Raises OffsetRangeError if messages are lost."""
        now_s = self._puller.monotonic_s()
        if self._short_since_s is None:
            self._short_since_s = now_s
        if self._puller.is_acting_master(self._broker):
            self._lost_since_s = None
        elif self._lost_since_s is None:
            self._lost_since_s = now_s
        elif now_s - self._lost_since_s >= LOSS_AFTER_S:
            raise short.error()
        found = f"queue {short.part.queue} ends at {short.max_offset}, and the planned range at {short.part.end}"
        if self._left_s(self._short_since_s) <= 0:
            raise self._timeout(f"did not catch up: {found}.")
        self._log_waiting(f"{found}; expected a queue with the whole range")
        self._puller.sleep(_LOOK_AGAIN_S)
        self._pipeline.look_again()

    def _store_resets(self) -> bool:
        """Store the resets that pulls have taken, for the driver. Return False if the broker is away."""
        assert self._address is not None
        while self._resets:
            try:
                self._client.call(self._address, self._resets[0])
            except BackendUnavailableError as error:
                self._note_absence(error)
                return False
            del self._resets[0]
        return True
