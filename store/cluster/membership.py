"""A member of a consumer group towards the brokers: a thread that sends heartbeats and answers what brokers ask.

A broker knows a member by the connection on which its heartbeats come. So the thread has a client of its own, whose
connections carry only heartbeats, locks, offsets that an administrator has set, and the answers to brokers. The
thread lives as long as the process, whatever Spark does with the query meanwhile; when it ends, the connections close,
and the brokers tell the other members at once. A forked child has no membership.

The thread only notes what happens (`MemberNews`). The query reads the notes between its batches, and moves queues then.

| event | the thread |
| --- | --- |
| 30 s since the last heartbeat, a new broker, other topics | sends heartbeats |
| a connection is lost, or a broker acknowledges nothing for 100 s | notes it, and sends a heartbeat |
| 40: members have joined or left | notes it |
| 220: an administrator has reset offsets (4.9) | notes those of its queues, and commits them at once |
| 221, 307: what does the member do | answers |
| 20 s since the locks of its queues were renewed | renews them, and notes those that are lost |

An error that the thread cannot handle ends it. The query gets it at its next call, as StoreError.

Source: MQClientInstance, ClientRemotingProcessor (4.9, 5.3).
"""

import contextlib
import logging
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from rmq_spark.store.cluster.address import ClusterAddress
from rmq_spark.store.cluster.answer_fields import AnswerError
from rmq_spark.store.cluster.broker_requests import (
    MembersChanged,
    MemberStatus,
    OffsetsReset,
    QueueStatus,
    StatusQuestion,
    UnsupportedDemand,
    answer_running_info,
    answer_status,
    read_broker_request,
    refuse_demand,
)
from rmq_spark.store.cluster.client import ClusterClient
from rmq_spark.store.cluster.codes import ResponseCode
from rmq_spark.store.cluster.frame import Command
from rmq_spark.store.cluster.group_requests import CommitOffsetRequest
from rmq_spark.store.cluster.heartbeats import HeartbeatSchedule
from rmq_spark.store.cluster.member_requests import HeartbeatRequest, LockRequest, LockResponse, UnregisterRequest
from rmq_spark.store.cluster.queue_locks import QueueLocks
from rmq_spark.store.cluster.responses import Subscription
from rmq_spark.store.cluster.routes import RouteBook
from rmq_spark.store.cluster.waker import Waker
from rmq_spark.store.cluster.write_routes import NewTopics, WriteRoutes
from rmq_spark.store.errors import BackendUnavailableError, RmqError, StoreError
from rmq_spark.store.model import QueueKey
from rmq_spark.store.synchronized import Synchronized

_LOG = logging.getLogger("rmq_spark")

_RETRY_S = 1.0  # between two attempts to commit an offset that an administrator has set
_LONGEST_WAIT_S = 60.0
_LEAVE_S = 10.0  # how long to wait for the end of the thread


@dataclass(frozen=True, slots=True)
class MemberNews:
    """The events of a membership since its query asked last.

    `has_notice`: members have joined or left. `lost_brokers`: those that may have forgotten the member, because the
    connection was lost or they have acknowledged no heartbeat for 100 s, and those that know the member again after
    that; between these two moments others do not see the member there. `resets`: offsets that an administrator has set
    (4.9). `lost_locks`: queues.
    """

    has_notice: bool = False
    lost_brokers: frozenset[str] = frozenset()
    resets: Mapping[QueueKey, int] = field(default_factory=dict)
    lost_locks: frozenset[QueueKey] = frozenset()


@dataclass(frozen=True, slots=True)
class BrokerOfGroup:
    """A broker at which a member registers.

    The routes of `topic`, without its namespace, have the broker's address. `address` is the last one that is known, or
    "".
    """

    topic: str
    address: str


class Membership(Synchronized):
    """The thread of a member, which starts with the object. Topics, groups and queues have the cluster's names.

    `status` is what the member tells brokers of itself, without its queues. `monotonic_s` is a clock in s. Methods may
    be called from one thread, that of the query. After `close` or `leave` the object cannot be used any more.
    """

    def __init__(self, address: ClusterAddress, status: MemberStatus, monotonic_s: Callable[[], float]) -> None:
        super().__init__()  # for `_after_fork`
        self._address, self._monotonic_s = address, monotonic_s
        self._waker = Waker()
        self._client = ClusterClient(address, monotonic_s, self._answer, self._waker.wait)
        # What both threads use, under the condition. It is notified after heartbeats and at the end of the thread.
        self._changed = threading.Condition()
        self._status = status
        self._schedule = HeartbeatSchedule()
        self._brokers: dict[str, BrokerOfGroup] = {}
        self._news = MemberNews()
        self._asked = 0  # how many times the query has asked for heartbeats
        self._outcomes: dict[str, tuple[int, RmqError | None]] = {}  # by broker: as of which time, and the error
        self._versions: dict[str, int] = {}
        self._locks = QueueLocks()
        self._uncommitted: dict[QueueKey, int] = {}  # offsets that an administrator has set
        self._retry_s = 0.0
        self._error: BaseException | None = None
        self._is_ending = self._is_leaving = self._is_child = False
        # Held during requests that must not overlap with others for the same queue: commits, locks, unlocks.
        self._exclusive = threading.Lock()
        # Of the thread alone.
        self._routes: WriteRoutes | None = None
        self._routed: dict[str, BrokerOfGroup] = {}
        self._lines: dict[str, tuple[str, int]] = {}  # by broker: address and connection of the last heartbeat
        self._away: set[str] = set()  # brokers of whose absence the user knows
        self._has_logged = False  # that a commit has failed
        self._thread = threading.Thread(target=self._run, name="rmq-spark membership", daemon=True)
        self._thread.start()

    # For the thread of the query.

    @property
    def client_id(self) -> str:
        """The id of the member."""
        return self._status.client_id

    def check(self) -> None:
        """Raise StoreError if the thread has ended by an error, or lives in the parent of this process only."""
        if self._is_child:
            raise StoreError(
                f"{self.client_id} is a member of its group in the parent of this process only; expected a call there. "
                "Open the cluster again in this process."
            )
        if self._error is not None:
            raise StoreError(
                f"the membership of {self.client_id} in group {self._status.group} has ended by an error of the "
                f"engine ({type(self._error).__name__}: {self._error}); expected none. Report it and restart the query."
            ) from self._error

    def register(self, brokers: Mapping[str, BrokerOfGroup], subscriptions: tuple[Subscription, ...]) -> None:
        """Set the brokers and the subscriptions. Heartbeats that this needs are sent at once; it does not wait."""
        with self._changed:
            now_s = self._monotonic_s()
            is_new = subscriptions != self._status.subscriptions
            if not is_new and brokers.keys() == self._schedule.brokers and brokers == self._brokers:
                return
            self._status = replace(self._status, subscriptions=subscriptions)
            self._schedule.change_brokers(brokers, now_s)
            self._brokers = dict(brokers)
            if is_new:
                self._schedule.hasten(brokers, now_s)
        self._waker.wake()

    def beat(self, brokers: Collection[str]) -> dict[str, RmqError | None]:
        """Send heartbeats to brokers now, and wait for the answers. Return for each the error, None for success."""
        with self._changed:
            self._asked += 1
            asked = self._asked
            known = [broker for broker in brokers if broker in self._schedule.brokers]
            self._schedule.hasten(known, self._monotonic_s())
            self._waker.wake()
            while self._error is None and any(self._outcomes.get(one, (0, None))[0] < asked for one in known):
                self._changed.wait(_LONGEST_WAIT_S)
            self.check()
            return {broker: self._outcomes[broker][1] for broker in known}

    def registered(self, brokers: Collection[str]) -> list[str]:
        """Return those of `brokers` at which the member is registered, as far as is known."""
        with self._changed:
            return [broker for broker in brokers if self._schedule.is_registered(broker)]

    def lapsed(self, brokers: Collection[str]) -> list[str]:
        """Return those of `brokers` that do not have the member registered, and probably answer a heartbeat at once.

        A broker that has not acknowledged the last one is left out. The thread keeps trying there.
        """
        with self._changed:
            return [broker for broker in brokers if self._schedule.has_lapsed(broker)]

    def version_of(self, broker: str) -> int:
        """Return the number of a broker's version (MQVersion), 0 if it has not answered yet."""
        with self._changed:
            return self._versions.get(broker, 0)

    def news(self) -> MemberNews:
        """Return what has happened since `take_news`."""
        with self._changed:
            self._note_time()
            return self._news

    def take_news(self) -> MemberNews:
        """Return what has happened since the last call."""
        with self._changed:
            self._note_time()
            news, self._news = self._news, MemberNews()
            return news

    def tell(self, queues: Mapping[QueueKey, QueueStatus]) -> None:
        """Set the queues that the member owns. Resets and questions of brokers count for these."""
        with self._changed:
            self._status = replace(self._status, queues=queues)
            self._uncommitted = {queue: one for queue, one in self._uncommitted.items() if queue in queues}

    def drop_resets(self, queues: Collection[QueueKey]) -> None:
        """Do not commit the offsets that an administrator has set in these queues: the query is past them."""
        with self._changed:
            for queue in queues:
                self._uncommitted.pop(queue, None)

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[None]:
        """Return a context in which the thread makes no commit and no lock. For such requests of the query."""
        with self._exclusive:
            yield

    def add_locks(self, queues: Collection[QueueKey], sent_s: float) -> None:
        """Renew the locks of these queues from now on. A request that was sent at `sent_s` has locked them."""
        with self._changed:
            self._locks.add(queues, sent_s)
        self._waker.wake()

    def remove_locks(self, queues: Collection[QueueKey]) -> None:
        """Do not renew the locks of these queues any more. Call it in `exclusive`, before they are unlocked."""
        with self._changed:
            self._locks.drop(queues)

    def lock_age_s(self, queue: QueueKey) -> float | None:
        """Return how long ago the lock of a queue was renewed, None if the member does not hold it."""
        with self._changed:
            return self._locks.renewed_ago_s(queue, self._monotonic_s())

    def leave(self) -> None:
        """End the membership at all brokers that answer, and the thread."""
        with self._changed:
            self._is_leaving = True
        self.close()

    def close(self) -> None:
        """End the thread, and close its connections, so that the brokers forget the member."""
        with self._changed:
            self._is_ending = True
        self._waker.wake()
        if not self._is_child and threading.current_thread() is not self._thread:
            self._thread.join(_LEAVE_S)

    def _after_fork(self) -> None:
        """In a forked child: the thread exists in the parent only, and so does the membership."""
        self._is_child = True
        self._changed, self._exclusive = threading.Condition(), threading.Lock()
        self._waker.close()

    def _note_time(self) -> None:
        """Note the locks that have expired, and the brokers that have acknowledged nothing for too long."""
        now_s = self._monotonic_s()
        expired = self._locks.expired(now_s)
        if expired:
            self._locks.drop(expired)
            self._news = replace(self._news, lost_locks=self._news.lost_locks | expired)
        for broker in self._schedule.forgetful(now_s):
            self._note_loss(broker)

    # The thread.

    def _run(self) -> None:
        try:
            while not self._is_ending:
                self._step()
            if self._is_leaving:
                self._unregister()
        except BaseException as error:
            _LOG.exception("rmq: the membership in consumer group %s has ended by an error", self._status.group)
            with self._changed:
                self._error = error
        finally:
            self._client.close()
            self._waker.close()
            with self._changed:
                if self._error is None:
                    self._error = StoreError("the member has left its group")
                self._changed.notify_all()

    def _step(self) -> None:
        """Do what is due, then wait for what comes next."""
        now_s = self._monotonic_s()
        with self._changed:
            self._note_time()
            due = self._schedule.take_due(now_s)
            locks = sorted(self._locks.queues) if self._locks.next_s() <= now_s else []
            resets = dict(self._uncommitted) if self._retry_s <= now_s else {}
        if due:
            self._beat(due)
        if locks:
            self._renew(locks)
        if resets:
            self._commit(resets)
        with self._changed:
            times_s = [self._schedule.next_s(), self._locks.next_s()]
            if self._uncommitted:
                times_s.append(self._retry_s)
            wait_s = 0.0 if self._is_ending else min(*times_s, now_s + _LONGEST_WAIT_S) - self._monotonic_s()
        if wait_s > 0:
            self._client.work(wait_s * 1000)
        self._note_losses()

    def _beat(self, brokers: Sequence[str]) -> None:
        """Send heartbeats to brokers, and note the answers."""
        with self._changed:
            asked, status, of_group = self._asked, self._status, dict(self._brokers)
        brokers = [broker for broker in brokers if broker in of_group]
        request = HeartbeatRequest(
            status.client_id, status.group, status.subscriptions, status.joined_ms, status.fallback
        )
        addresses = self._find_addresses(brokers, of_group)
        sent_s = self._monotonic_s()
        answers = self._client.call_all([(addresses[broker], request) for broker in brokers if broker in addresses])
        outcomes = dict(zip((broker for broker in brokers if broker in addresses), answers, strict=True))
        with self._changed:
            for broker in brokers:
                outcome = outcomes.get(broker) or BackendUnavailableError(
                    f"no name server lists a master of broker {broker}; expected its address. Check whether the master "
                    "runs."
                )
                if isinstance(outcome, RmqError):
                    self._schedule.note_failure(broker, self._monotonic_s())
                    self._outcomes[broker] = asked, outcome
                    self._log_absence(broker, outcome)
                    continue
                self._note_line(broker, addresses[broker])
                if self._schedule.note_answer(broker, sent_s):
                    self._news = replace(self._news, lost_brokers=self._news.lost_brokers | {broker})
                self._outcomes[broker] = asked, None
                self._versions[broker] = outcome.server_version
                self._away.discard(broker)
            self._changed.notify_all()
        for topic in {of_group[one].topic for one in brokers if isinstance(outcomes.get(one), BackendUnavailableError)}:
            self._renew_routes(topic)

    def _find_addresses(self, brokers: Sequence[str], of_group: Mapping[str, BrokerOfGroup]) -> dict[str, str]:
        """Return the addresses of brokers. One that is not known is left out."""
        if self._routes is None or of_group != self._routed:
            self._routed = dict(of_group)
            masters = {name: one.address for name, one in of_group.items() if one.address}
            self._routes = WriteRoutes(self._client, self._monotonic_ms, NewTopics(is_allowed=False), masters=masters)
            self._client.name_brokers(self._routes.book.names())
        book: RouteBook = self._routes.book
        for topic in {of_group[broker].topic for broker in brokers if book.address(broker) is None}:
            self._renew_routes(topic)
        return {broker: at for broker in brokers if (at := book.address(broker)) is not None}

    def _renew_routes(self, topic: str) -> None:
        if self._routes is not None:
            self._routes.renew(topic)

    def _monotonic_ms(self) -> float:
        return self._monotonic_s() * 1000

    def _log_absence(self, broker: str, error: RmqError) -> None:
        """Log once that a broker does not know the member."""
        if broker in self._away:
            return
        self._away.add(broker)
        if broker in self._lines:  # the first heartbeat is the query's affair
            _LOG.warning(
                "rmq: the consumer group %s: broker %s does not know this member until it answers again: %s",
                *(self._status.group, broker, error),
            )

    def _note_line(self, broker: str, address: str) -> None:
        """Note on which connection a broker has registered the member: on another one, it had forgotten the member."""
        line = address, self._client.connection_number(address)
        before = self._lines.get(broker)
        self._lines[broker] = line
        if before not in (None, line):
            self._news = replace(self._news, lost_brokers=self._news.lost_brokers | {broker})

    def _note_losses(self) -> None:
        """Note the brokers to which a connection was lost."""
        for broker, (address, number) in self._lines.items():
            if self._client.connection_number(address) != number or not self._client.is_connected(address):
                with self._changed:
                    self._note_loss(broker)

    def _note_loss(self, broker: str) -> None:
        if self._schedule.note_loss(broker, self._monotonic_s()):
            self._news = replace(self._news, lost_brokers=self._news.lost_brokers | {broker})

    def _is_away(self, broker: str) -> bool:
        """Return whether only heartbeats go to a broker, so that `exclusive` does not wait for it again and again."""
        return self._schedule.has_failed(broker)

    def _renew(self, queues: Sequence[QueueKey]) -> None:
        """Renew locks, and note those that are lost."""
        with self._exclusive:
            with self._changed:
                queues = [queue for queue in queues if queue in self._locks.queues]
                status = self._status
                of_broker: dict[str, list[QueueKey]] = {}
                for queue in queues:
                    of_broker.setdefault(queue.broker, []).append(queue)
                asked = [broker for broker in of_broker if broker in self._lines and not self._is_away(broker)]
            sent_s = self._monotonic_s()
            answers = self._client.call_all(
                [
                    (self._lines[broker][0], LockRequest(status.client_id, status.group, tuple(of_broker[broker])))
                    for broker in asked
                ]
            )
            granted: set[QueueKey] = set()
            refused: set[QueueKey] = set()
            silent: set[str] = set()
            for broker, answer in zip(asked, answers, strict=True):
                if isinstance(answer, LockResponse):
                    granted |= answer.locked
                    refused |= set(of_broker[broker]) - answer.locked
                elif isinstance(answer, BackendUnavailableError):
                    silent.add(broker)
            with self._changed:
                self._schedule.hasten(silent.intersection(self._schedule.brokers), self._monotonic_s())
                lost = self._locks.note_renewal(granted, refused, sent_s, self._monotonic_s())
                self._news = replace(self._news, lost_locks=self._news.lost_locks | lost)

    def _commit(self, resets: Mapping[QueueKey, int]) -> None:
        """Commit offsets that an administrator has set, so that they outlive this process."""
        with self._exclusive:
            with self._changed:
                self._retry_s = self._monotonic_s() + _RETRY_S  # unless others arrive meanwhile
                resets = {queue: one for queue, one in resets.items() if self._uncommitted.get(queue) == one}
                group = self._status.group
                calls = [
                    (self._lines[queue.broker][0], CommitOffsetRequest(group, queue, offset))
                    for queue, offset in resets.items()
                    if queue.broker in self._lines and not self._is_away(queue.broker)
                ]
            answers = self._client.call_all(calls)
            with self._changed:
                for (_, request), answer in zip(calls, answers, strict=True):
                    if not isinstance(answer, RmqError) and self._uncommitted.get(request.queue) == request.offset:
                        del self._uncommitted[request.queue]
            errors = [one for one in answers if isinstance(one, RmqError)]
            if errors and not self._has_logged:
                _LOG.warning(
                    "rmq: the consumer group %s: an offset that an administrator has set is not committed yet: %s",
                    *(group, errors[0]),
                )
            self._has_logged = bool(errors)

    def _unregister(self) -> None:
        """Tell the brokers that the member leaves."""
        with self._changed:
            status = self._status
            known = [broker for broker in self._lines if self._schedule.is_registered(broker)]
        request = UnregisterRequest(status.client_id, status.group)
        self._client.call_all([(self._lines[broker][0], request) for broker in known])

    # Requests of brokers.

    def _answer(self, address: str, command: Command) -> Command | None:
        """Answer a request of the broker at `address`, or note it. None: it is not supported."""
        try:
            request = read_broker_request(command)
        except AnswerError as error:
            _LOG.warning("rmq: the broker at %s has sent a request that cannot be read: %s", address, error)
            return Command(ResponseCode.SYSTEM_ERROR, 0, remark=str(error))
        if request is None:
            return None
        with self._changed:
            status = self._status
            if isinstance(request, UnsupportedDemand):
                return refuse_demand(request, status.group)
            if request.group != status.group:
                remark = f"group {request.group} is not that of this member, {status.group}"
                return Command(ResponseCode.SYSTEM_ERROR, 0, remark=remark)
            if isinstance(request, MembersChanged):
                self._news = replace(self._news, has_notice=True)
                return None
            if isinstance(request, OffsetsReset):
                self._note_resets(request)
                return None
        return (
            answer_status(status, request.topic) if isinstance(request, StatusQuestion) else answer_running_info(status)
        )

    def _note_resets(self, request: OffsetsReset) -> None:
        ours = {queue: offset for queue, offset in request.offsets.items() if queue in self._status.queues}
        self._news = replace(self._news, resets={**self._news.resets, **ours})
        self._uncommitted |= ours
        self._retry_s = 0.0
