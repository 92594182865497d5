"""The locks of one member: it locks queues before it reads them, and unlocks all that it does not own.

The thread of the membership renews the locks. So requests here exclude it: a renewal that a broker executes after an
unlock would lock the queue again for 60 s.
"""

from collections.abc import Callable, Collection, Iterator, Set

from rmq_spark.store.cluster.member_requests import LockRequest, LockResponse, UnlockRequest
from rmq_spark.store.cluster.membership import Membership
from rmq_spark.store.cluster.offset_commits import Brokers
from rmq_spark.store.cluster.puller import PullTerms
from rmq_spark.store.cluster.queue_locks import LIFE_S
from rmq_spark.store.errors import BackendUnavailableError, RmqError
from rmq_spark.store.model import QueueKey

_PAUSE_S = 1.0  # between two questions to a broker that does not answer


class MemberLocks:
    """The locks of the member `client_id` of the group in `terms`. For one thread.

    All locks that the member renews are made and released here, so that none is renewed for a queue that nobody reads.
    Those that a repeated batch or a task takes for other queues (`renew_lock`) expire after 60 s.
    """

    def __init__(self, brokers: Brokers, terms: PullTerms, client_id: str, monotonic_s: Callable[[], float]) -> None:
        self._brokers, self._terms, self._client_id, self._monotonic_s = brokers, terms, client_id, monotonic_s
        self._held: set[QueueKey] = set()

    @property
    def held(self) -> Set[QueueKey]:
        """The queues that are locked, as far as is known."""
        return self._held

    def note_lost(self, queues: Collection[QueueKey]) -> None:
        """Note that the locks of queues have expired, or that brokers have refused to renew them."""
        self._held.difference_update(queues)

    def lock(self, member: Membership, queues: Collection[QueueKey]) -> set[QueueKey]:
        """Lock queues. Return those that are locked now. Others have an owner, or a broker that is away.

        Raises the error of a broker that refuses the request. What was locked nevertheless is in `held`.
        """
        locked: set[QueueKey] = set()
        with member.exclusive():
            parts = list(self._by_broker(queues))
            sent_s = self._monotonic_s()
            group = self._terms.stored_group
            answers = self._brokers.client.call_all(
                [(to, LockRequest(self._client_id, group, tuple(of_broker))) for to, of_broker in parts]
            )
            for (_, of_broker), answer in zip(parts, answers, strict=True):
                if isinstance(answer, LockResponse):
                    locked |= {queue for stored, queue in of_broker.items() if stored in answer.locked}
            self._held |= locked
            member.add_locks([self._terms.stored_queue(queue) for queue in locked], sent_s)
        for answer in answers:
            if isinstance(answer, RmqError) and not isinstance(answer, BackendUnavailableError):
                raise answer
        return locked

    def keep(self, member: Membership, owned: Collection[QueueKey], answering: Collection[str]) -> None:
        """Unlock all queues but those that the member owns.

        Only the `answering` brokers are asked. Locks at others are not renewed, and end within 60 s.
        """
        spare = self._held.difference(owned)
        if not spare:
            return
        self._held -= spare
        with member.exclusive():
            member.remove_locks([self._terms.stored_queue(queue) for queue in spare])
            group = self._terms.stored_group
            self._brokers.client.call_all(
                [
                    (to, UnlockRequest(self._client_id, group, tuple(of_broker)))
                    for to, of_broker in self._by_broker({queue for queue in spare if queue.broker in answering})
                ]
            )

    def _by_broker(self, queues: Collection[QueueKey]) -> Iterator[tuple[str, dict[QueueKey, QueueKey]]]:
        """Yield the address of each broker, and its queues by the cluster's names. One that is away is left out."""
        of_broker: dict[str, dict[QueueKey, QueueKey]] = {}
        for queue in sorted(queues):
            of_broker.setdefault(queue.broker, {})[self._terms.stored_queue(queue)] = queue
        for of_one in of_broker.values():
            try:
                yield self._brokers.find_address(next(iter(of_one.values()))), of_one
            except BackendUnavailableError:
                continue


def renew_lock(
    brokers: Brokers,
    terms: PullTerms,
    client_id: str,
    queue: QueueKey,
    monotonic_ms: Callable[[], float],
    sleep: Callable[[float], None],
) -> bool:
    """Renew the lock of a member on a queue, for one of its tasks. Return whether the member has the lock now.

    A broker cannot be asked who has a lock. So a lock that nobody has is the member's afterwards, for 60 s, even if the
    member has left the group meanwhile.

    A broker that does not answer is asked again as long as a lock lives, 60 s. Raises BackendUnavailableError then, and
    the error of a broker that refuses. `monotonic_ms` is a clock in ms, and `sleep` sleeps for seconds.
    """
    stored = terms.stored_queue(queue)
    request = LockRequest(client_id, terms.stored_group, (stored,))
    since_ms, renews = monotonic_ms(), False
    while True:
        try:
            return stored in brokers.client.call(brokers.find_address(queue, renews=renews), request).locked
        except BackendUnavailableError:
            if monotonic_ms() - since_ms >= LIFE_S * 1000:
                raise
        sleep(_PAUSE_S)
        renews = True
