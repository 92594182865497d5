"""The queues of a member that others may have taken and given back without its knowledge. Pure.

A member owns a queue as long as all members allocate it to this one. Between two looks at the members this may have
been otherwise, for two reasons:

- Members have joined or left. One of them may have had the queue for a while.
- A broker did not know the member: the connection was lost, or the process could not send heartbeats. The others then
  share its queues. Meanwhile the member also gets no messages of brokers, such as resets of 4.9.

So the group's offset in such a queue must be read before the query continues there.

Source: RebalanceImpl#rebalanceByTopic, ConsumerManager#doChannelCloseEvent (4.9, 5.3).
"""

from collections.abc import Callable, Collection, Set

from rmq_spark.store.model import QueueKey


class QueueDoubts:
    """The doubtful queues of a member. For one thread at a time."""

    def __init__(self) -> None:
        self._queues: set[QueueKey] = set()
        self._cut_off: set[QueueKey] = set()

    @property
    def queues(self) -> Set[QueueKey]:
        """The doubtful queues."""
        return self._queues

    def note_members(self, owned: Collection[QueueKey]) -> None:
        """Note that members which share these queues have joined or left."""
        self._queues.update(owned)

    def note_losses(
        self, owned: Collection[QueueKey], brokers_of: Callable[[str], Collection[str]], forgetful: Collection[str]
    ) -> None:
        """Note that the `forgetful` brokers did not know the member for a while.

        The doubtful queues are all those of their topics, whatever the broker of the queue, because a Java member asks
        one broker of a topic for the members. `brokers_of` returns the brokers of a topic.
        """
        topics = {topic for topic in {one.topic for one in owned} if not set(forgetful).isdisjoint(brokers_of(topic))}
        lost = {queue for queue in owned if queue.topic in topics}
        self._queues |= lost
        self._cut_off |= lost

    def was_cut_off(self, queue: QueueKey) -> bool:
        """Return whether a broker did not know the member, so that it may have missed a reset of the queue."""
        return queue in self._cut_off

    def settle(self, queues: Collection[QueueKey]) -> None:
        """Note that queues are not doubtful any more, or not owned."""
        self._queues.difference_update(queues)
        self._cut_off.difference_update(queues)
