"""What a ticker asks of those who know which messages are due: the queues of delay levels, the timer.

    look: no lock, changes nothing   ->  prepare: the store's lock   ->  take: no lock   ->  commit   ->  prepare …

What was delivered up to where is in the ledger's note of QUERY_ID, which comes there with the messages. A broker's own
files say the same to a broker: a source writes them in `prepare`, after the commit, so that they are never ahead. Where
they are behind, because a process died between the two, the note counts, and the next `prepare` writes them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from rmq_spark.store.format.encoding import EncodedRecords
from rmq_spark.store.log.section import Section

QUERY_ID = "rmq:delivery"  # of all commits of ticks; their batches count up by one

Note = Mapping[str, int]  # each source has keys of its own in it


@dataclass(frozen=True, slots=True)
class Outlook:
    """Whether there is anything to do, and when the first message is due that is not due yet (ms since the epoch).

    `has_work`: a message is due, or a source's own files are not what they should be. `next_due_ms` None: none waits.
    """

    has_work: bool = False
    next_due_ms: int | None = None

    def joined(self, other: "Outlook") -> "Outlook":
        """Return the outlook on both."""
        times = [one for one in (self.next_due_ms, other.next_due_ms) if one is not None]
        return Outlook(self.has_work or other.has_work, min(times, default=None))


@dataclass(frozen=True, slots=True)
class Due:
    """Messages for one commit, in the order in which they are delivered, and what the note says with them.

    `note` has the keys that change. Without records it may have some all the same: what cannot be delivered is passed.
    """

    records: tuple[EncodedRecords, ...] = ()
    note: Note = field(default_factory=dict)


class DueSource(Protocol):
    """One kind of messages that wait. One thread at a time; all but `look` by whoever has the ticker's turn."""

    def look(self, now_ms: int, note: Note) -> Outlook:
        """Say what there is to do. Takes no lock, changes nothing, and costs as much for one as for all that wait.

        May say that there is work where there is none: `prepare` and `take` find out. Others may be writing.
        """

    def prepare(self, section: Section, now_ms: int, note: Note) -> None:
        """Learn what waits, and write what a broker reads so that it agrees with the note.

        Under the store's lock: it is whole, what dead processes began is finished, and the note is the last one.
        """

    def take(self, now_ms: int, room_bytes: int, room_count: int) -> Due:
        """Return what is due, the first of it, from where the note of the last `prepare` ends; without any lock.

        At most `room_count` messages, and `room_bytes` of log but for a first one that is longer.
        """

    def close(self) -> None:
        """Let go of files; what is used again is opened again."""
