"""The interface between the scheduler and a source of delayed messages. The sources are delay levels and the timer.

    refresh: no lock, changes nothing  ->  prepare: the store's lock  ->  take: no lock  ->  commit  ->  prepare …

The ledger row of QUERY_ID has metadata that records how far messages were delivered. The metadata is committed together
with the messages. The files that a broker reads record the same progress for a broker. A source writes these files in
`prepare`, after the commit, so they are never ahead of the metadata. If a process dies between the commit and
`prepare`, the files lag behind. Then the metadata is right, and the next `prepare` updates the files.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from rmq_spark.store.format.message_encoder import EncodedRecords
from rmq_spark.store.log.write_session import WriteSession

QUERY_ID = "rmq:delivery"  # the query id of all commits of delivery rounds; each has the next batch id

Metadata = Mapping[str, int]  # the metadata of the last commit; each source has its own keys


@dataclass(frozen=True, slots=True)
class Outlook:
    """What a source has to do now, and when it will have something to do.

    `has_work` means that a message is due or that a source must update its files. Otherwise `next_due_ms` is when the
    first waiting message is due, in ms since the epoch; None if no message waits.
    """

    has_work: bool = False
    next_due_ms: int | None = None

    def joined(self, other: "Outlook") -> "Outlook":
        """Combine two sources: there is work if either has work, and the next time is the earlier of the two."""
        times = [one for one in (self.next_due_ms, other.next_due_ms) if one is not None]
        return Outlook(self.has_work or other.has_work, min(times, default=None))


@dataclass(frozen=True, slots=True)
class Due:
    """The messages for one commit, in the order of delivery, and the new values of the metadata keys that change.

    `metadata` may have keys although there are no records, because a source also skips messages that cannot be
    delivered.
    """

    records: tuple[EncodedRecords, ...] = ()
    metadata: Metadata = field(default_factory=dict)


class DelaySource(Protocol):
    """A source of delayed messages. For one thread at a time.

    The caller must hold the delivery lock for `prepare` and `take`.
    """

    def refresh(self, now_ms: int, metadata: Metadata) -> Outlook:
        """Return whether there is work now, and when the next message is due. Takes no lock and changes nothing.

        The cost does not depend on how many messages wait. `has_work` may be True although there is no work, because
        other processes may be writing. `prepare` and `take` notice that.
        """

    def prepare(self, section: WriteSession, now_ms: int, metadata: Metadata) -> None:
        """Read which messages wait, and make the files that a broker reads agree with the metadata.

        `metadata` is that of the last commit. The caller must hold the store's lock, with the store recovered and the
        commits of dead processes rolled forward.
        """

    def take(self, now_ms: int, room_bytes: int, room_count: int) -> Due:
        """Return the next messages that are due at `now_ms`, after those that the last `prepare`'s metadata covers.

        Returns at most `room_count` messages and `room_bytes` bytes of log, but the first message may be longer than
        that. Takes no lock.
        """

    def close(self) -> None:
        """Close the files. Later calls open them again."""
