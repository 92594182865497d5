"""The offsets that consumer groups have committed at one broker, and resets by administrators.

Source: ConsumerOffsetManager (4.9, 5.3).
"""

from dataclasses import dataclass, field

from rmq_spark.store.model import QueueKey


@dataclass(slots=True)
class GroupOffsets:
    """Committed offsets and resets. `committed` and `resets` map (group, queue) to a queue offset.

    A broker that ends forgets which resets wait. The offsets stay.
    """

    committed: dict[tuple[str, QueueKey], int] = field(default_factory=dict)
    resets: dict[tuple[str, QueueKey], int] = field(default_factory=dict)

    def commit(self, group: str, queue: QueueKey, offset: int) -> None:
        """Store an offset, whatever it is."""
        self.committed[group, queue] = offset

    def reset(self, group: str, queue: QueueKey, offset: int) -> None:
        """Let an administrator reset an offset (5.3, useServerSideResetOffset). The group's next pull takes it."""
        self.resets[group, queue] = self.committed[group, queue] = offset

    def has_reset(self, group: str, queue: QueueKey) -> bool:
        """Return whether a reset waits for a pull of the group."""
        return (group, queue) in self.resets

    def take_reset(self, group: str, queue: QueueKey) -> int | None:
        """Return the offset of a reset that waits, and forget the reset. None if there is none."""
        return self.resets.pop((group, queue), None)

    def find(self, group: str, queue: QueueKey) -> int | None:
        """Return the group's offset, or None if it has never committed one."""
        return self.committed.get((group, queue))

    def topics_of(self, group: str) -> list[str]:
        """Return the topics in which the group has an offset."""
        return sorted({queue.topic for one, queue in self.committed if one == group})

    def table(self) -> dict[str, dict[int, int]]:
        """Return all offsets by `topic@group` and queue id, as in the body of GET_ALL_CONSUMER_OFFSET."""
        found: dict[str, dict[int, int]] = {}
        for (group, queue), offset in self.committed.items():
            found.setdefault(f"{queue.topic}@{group}", {})[queue.queue_id] = offset
        return found

    def delete_topic(self, topic: str) -> None:
        """Forget all offsets in a topic."""
        for known in (self.committed, self.resets):
            for key in [key for key in known if key[1].topic == topic]:
                del known[key]
