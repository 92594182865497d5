"""Held pulls on the driver: brokers say when messages arrive, so that the driver need not ask again and again.

A pull at the end of a queue is held by the broker until a message arrives in the queue, or the time is over. There is
at most one for each queue. A held pull dies with its connection, and is then sent again. Nothing of an answer is read
but what it says about the queue: the driver plans with bounds, and tasks read the messages.

Source: PullRequestHoldService, DefaultMQPushConsumerImpl#pullMessage (4.9, 5.3).
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from rmq_spark.store.cluster.client import ClusterClient, Ticket
from rmq_spark.store.cluster.codes import GetMessageStatus, PullStatus
from rmq_spark.store.cluster.group_requests import CommitOffsetRequest
from rmq_spark.store.cluster.puller import PullTerms
from rmq_spark.store.cluster.requests import PullRequest
from rmq_spark.store.cluster.responses import PullResponse
from rmq_spark.store.errors import BackendUnavailableError, RmqError
from rmq_spark.store.filter.row_filter import ALL, TAG, Expression
from rmq_spark.store.model import QueueKey

HOLD_MS = 15_000  # BROKER_SUSPEND_MAX_TIME_MILLIS
_PAUSE_S = 1.0  # before a pull that failed is sent again
_LEAST_HOLD_S = 0.5  # a broker that answers sooner without news does not hold pulls
_EVERYTHING = Expression(TAG, ALL)


@dataclass(slots=True)
class _Watched:
    """A queue that is watched from a queue offset on."""

    end: int  # the queue's end that the driver knows
    offset: int  # of the next pull: the end, or a later offset up to which no message matches
    expression: Expression
    ticket: Ticket[PullResponse] | None = None
    sent_s: float = 0.0
    not_before_s: float = 0.0


class HeldPulls:
    """The pulls that brokers hold for one driver. `watch` the ends of queues, then `wait` for messages.

    The arguments are those of `Puller`. Errors of brokers are news too: the driver meets them when it looks.
    """

    def __init__(
        self,
        client: ClusterClient,
        broker_address: Callable[[str], str],
        terms: PullTerms,
        *,
        hold_ms: int = HOLD_MS,
        monotonic_s: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._client, self._broker_address, self._terms, self._hold_ms = client, broker_address, terms, hold_ms
        self._monotonic_s, self._sleep = monotonic_s, sleep
        self._queues: dict[QueueKey, _Watched] = {}
        self._asked: tuple[Mapping[QueueKey, int] | None, Mapping[str, Expression] | None] = None, None
        self._news: dict[QueueKey, None] = {}
        self._idle: dict[QueueKey, None] = {}  # queues without news and without a pull
        self._tickets: dict[Ticket[PullResponse], QueueKey] = {}
        self._done: list[Ticket[PullResponse]] = []
        self._resets: list[tuple[QueueKey, CommitOffsetRequest]] = []
        self._away_until_s: dict[str, float] = {}  # brokers that are not asked before a time

    def watch(self, ends: Mapping[QueueKey, int], expressions: Mapping[str, Expression] | None = None) -> None:
        """Watch these queues, and no others, for messages at and above their ends.

        Only messages count that match the expression of their topic in `expressions`, if it has one; others are not
        noticed before the next message that matches. The same two objects as before, unchanged, cost no look at all
        queues.
        """
        if ends is self._asked[0] and expressions is self._asked[1] and not self._news:
            return
        self._asked = ends, expressions
        gone = [queue for queue in self._queues if queue not in ends]
        tickets = [ticket for queue in gone if (ticket := self._queues.pop(queue).ticket) is not None]
        for queue in gone:
            self._news.pop(queue, None)
            self._idle.pop(queue, None)
        for queue, end in ends.items():
            expression = (expressions or {}).get(queue.topic, _EVERYTHING)
            watched = self._queues.get(queue)
            if watched is not None and watched.expression == expression:
                if watched.end != end:
                    watched.end = watched.offset = end
                continue
            if watched is not None and watched.ticket is not None:
                tickets.append(watched.ticket)
            self._queues[queue] = _Watched(end, end, expression)
            self._idle[queue] = None
        self._idle.update(self._news)  # the next pulls find out whether they are still news
        self._news.clear()
        for ticket in tickets:
            self._tickets.pop(ticket, None)
        self._client.forget([ticket for ticket in tickets if not ticket.is_done])

    def wait(self, timeout_ms: float) -> list[QueueKey]:
        """Return the queues that have news, as soon as one has. Return [] if none has after `timeout_ms`.

        A queue has news if a message has arrived that the filter may match, if its end or begin is not what was
        expected, or if its broker answers with an error.
        """
        until_s = self._monotonic_s() + timeout_ms / 1000
        while True:
            self._send()
            left_s = 0.0 if self._news else until_s - self._monotonic_s()
            pause_s = min(left_s, self._next_s() - self._monotonic_s())
            if self._tickets:
                for ticket in self._client.take_done(self._done, max(pause_s, 0.0) * 1000):
                    if ticket in self._tickets:  # else nobody waits for it any more
                        self._settle(ticket)
            elif pause_s > 0:
                self._sleep(pause_s)
            if self._news or left_s <= 0:
                return list(self._news)

    def close(self) -> None:
        """Forget all pulls. Brokers answer them nevertheless, later."""
        self.watch({})

    def _next_s(self) -> float:
        """Return when the next pull can be sent that waits for its time."""
        waiting = (self._not_before_s(queue) for queue in self._idle)
        return min(waiting, default=float("inf"))

    def _not_before_s(self, queue: QueueKey) -> float:
        return max(self._queues[queue].not_before_s, self._away_until_s.get(queue.broker, 0.0))

    def _send(self) -> None:
        """Send a pull for each idle queue, unless it must wait."""
        now_s = self._monotonic_s()
        self._store_resets()
        ready: dict[str, list[QueueKey]] = {}
        for queue in self._idle:
            if self._not_before_s(queue) <= now_s:
                ready.setdefault(queue.broker, []).append(queue)
        for broker, queues in ready.items():
            try:
                address = self._broker_address(broker)
            except BackendUnavailableError:
                self._away_until_s[broker] = now_s + _PAUSE_S
                continue
            requests = [self._request(queue, self._queues[queue]) for queue in queues]
            tickets = self._client.submit_all(address, requests, done=self._done)
            for queue, ticket in zip(queues, tickets, strict=True):
                del self._idle[queue]
                self._queues[queue].sent_s, self._queues[queue].ticket = now_s, ticket
                self._tickets[ticket] = queue

    def _request(self, queue: QueueKey, watched: _Watched) -> PullRequest:
        return PullRequest(
            self._terms.stored_queue(queue),
            watched.offset,
            1,
            self._terms.stored_group,
            watched.expression.text,
            watched.expression.kind,
            self._hold_ms,
        )

    def _settle(self, ticket: Ticket[PullResponse]) -> None:
        """Accept the outcome of a held pull."""
        queue = self._tickets.pop(ticket)
        watched = self._queues[queue]
        watched.ticket = None
        if self._has_news(ticket, queue, watched):
            self._news[queue] = None
        else:
            self._idle[queue] = None

    def _has_news(self, ticket: Ticket[PullResponse], queue: QueueKey, watched: _Watched) -> bool:
        """Say whether the outcome of a pull is news, and set when and where the next pull begins."""
        later_s = self._monotonic_s() + _PAUSE_S
        try:
            answer = ticket.result()
        except BackendUnavailableError:
            self._away_until_s[queue.broker] = later_s
            return False
        except RmqError:
            watched.not_before_s = later_s
            return True
        if answer.reason == GetMessageStatus.OFFSET_RESET:
            stored = self._terms.stored_queue(queue)
            self._resets.append((queue, CommitOffsetRequest(self._terms.stored_group, stored, answer.next_offset)))
            self._store_resets()
            return True
        if answer.status is PullStatus.FOUND:
            return answer.next_offset > watched.end
        if answer.status is PullStatus.NO_NEW_MSG:
            if self._monotonic_s() - watched.sent_s < min(_LEAST_HOLD_S, self._hold_ms / 2000):
                watched.not_before_s = later_s
            return answer.max_offset != watched.end and watched.expression == _EVERYTHING
        if answer.status is PullStatus.OFFSET_ILLEGAL:
            watched.not_before_s = later_s
            return True
        if answer.reason == GetMessageStatus.NO_MATCHED_MESSAGE and answer.next_offset > watched.offset:
            watched.offset = answer.next_offset  # nothing matched
        else:
            watched.not_before_s = later_s  # a slave; the route will name the master
        return False

    def _store_resets(self) -> None:
        """Store the resets that pulls have taken, so that the driver finds them at the group's offsets."""
        resets, self._resets = self._resets, []
        for queue, request in resets:
            try:
                self._client.call(self._broker_address(queue.broker), request)
            except BackendUnavailableError:
                self._resets.append((queue, request))
