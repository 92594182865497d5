"""The contract between the Spark side and a place that has RocketMQ's queues: a store directory, or a cluster.

A `Location` says where the place is. It is small and picklable, and travels in every partition and task.
`Location.open` gives a `Backend`, which lists queues, answers for their bounds and reads them. `Location.sink` gives a
`BatchSink`, which writes a batch of rows in tasks and commits it on the driver. `Backend.group` gives a `GroupSession`,
the membership of one query in its consumer group.

Values go in and values come out: no path, file or socket is in a signature. A call about queues takes many of them,
because one call may be a round trip to a broker. What a place cannot do is not among its `capabilities`; the options
that need it are refused in `load()`. For the same facts every backend raises the same class of error:

| fact | error |
| --- | --- |
| the place does not exist or is of an unsupported kind | StorePathError |
| a topic or queue does not exist | NotFoundError |
| a range that the queue does not have, or not any more | OffsetRangeError, with the bounds |
| the place changed during the call; a repeated call may succeed | StoreChangedError |
| what is stored is damaged | DamageError |
| another member owns the queue | GroupConflictError |
| the group, the topic or the account does not allow reading | NoPermissionError |
| no broker or name server answers; the call may be repeated later | BackendUnavailableError |

A queue whose broker is away is not an error for `bounds`: the answer says so (`Away`). A task waits for it in `read`.

Objects are for one thread at a time. `rmq_spark.store.testing.backend_suite` is this contract as tests.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple, Protocol

import pyarrow as pa

from rmq_spark.store.batch_sink import (
    BatchSink,
    CommitTerms,
    CommitTotals,
    Guarantee,
    Receipt,
    RepeatedBatch,
    SendBackSink,
    SendBackTerms,
    SinkTerms,
    TaskWriter,
)
from rmq_spark.store.errors import RmqError
from rmq_spark.store.filter.row_filter import KeyLookup, RowFilter
from rmq_spark.store.format.columns import COLUMNS as RECORD_COLUMNS
from rmq_spark.store.format.failed_columns import COPY_TIMES, failed_column_type, refuse_missing_places
from rmq_spark.store.format.rows import DecodeLimits
from rmq_spark.store.group_contract import (
    FinalCommit,
    GroupAssignment,
    GroupSession,
    GroupTerms,
    OffsetHistory,
    Sharing,
)
from rmq_spark.store.model import (
    Away,
    Forbidden,
    Gone,
    QueueAnswer,
    QueueBounds,
    QueueKey,
    QueueRange,
    RecordProof,
)
from rmq_spark.store.rebalance.allocation import find_strategy

# Names of other modules that belong to the contract, or that the Spark side needs.
__all__ = [
    "COPY_TIMES",
    "Away",
    "BatchSink",
    "CommitTerms",
    "CommitTotals",
    "DecodeLimits",
    "FinalCommit",
    "Forbidden",
    "Gone",
    "GroupAssignment",
    "GroupSession",
    "GroupTerms",
    "Guarantee",
    "OffsetHistory",
    "QueueAnswer",
    "Receipt",
    "RepeatedBatch",
    "SendBackSink",
    "SendBackTerms",
    "Sharing",
    "SinkTerms",
    "TaskWriter",
    "failed_column_type",
    "find_strategy",
    "refuse_missing_places",
]

BROKER_NAME = "brokerName"
# The columns that every place reads, with their types: those of a record, and the name of the queue's broker.
COLUMNS: dict[str, pa.DataType] = {**RECORD_COLUMNS, BROKER_NAME: pa.string()}


class Capability(StrEnum):
    """What a place can do. The value completes the sentence "this place cannot …"."""

    SIZES = "tell the size of messages before it reads them"
    SIZE_ESTIMATES = "estimate the size of messages before it reads them"
    KEY_SEARCH = "look messages up by key or id"
    GROUP_OFFSETS = "tell the committed offsets of consumer groups"
    GROUPS = "act as a consumer group"
    FENCES = "fence tasks whose queue another member has taken"
    LEASES = "lease the queues of a group to its members"
    FILES = "be read or written as files of this machine"
    WRITES = "be written"
    SEND_BACK = "take messages back that a group failed to consume"
    SUSPENSIONS = "suspend queues for an orderly listener"
    EXACTLY_ONCE = "recognise a batch that it stored before"
    AT_LEAST_ONCE = "store the rows of a task before the commit"
    BROKERS = "tell queues apart by the names of brokers"
    NAME_SERVERS = "be reached through a name server"


class Location(Protocol):
    """Where a place is. Small, picklable and hashable."""

    @property
    def capabilities(self) -> frozenset[Capability]:
        """What the place can do."""

    def describe(self) -> str:
        """Return the name of the place for errors and logs, without secrets."""

    def sharing_advice(self) -> str:
        """Return what to do if the driver and the executors do not see the same place, as a sentence for errors."""

    def mark(self) -> dict[str, str]:
        """Return the place as JSON for a query's progress, without secrets. `places.from_mark` reads it."""

    def without_secrets(self) -> "Location":
        """Return the location as partitions carry it: without passwords and keys. An equal one if it has none."""

    def with_secrets_of(self, source: Any) -> "Location":
        """Return the location with the secrets of `source`, the location from which `without_secrets` made it."""

    def open(self) -> "Backend":
        """Return a backend for reading. It may connect or open files only at its first call."""

    def sink(self, terms: SinkTerms, commit: CommitTerms) -> BatchSink:
        """Return a sink for new messages. Requires the capability WRITES."""

    def send_back_sink(self, terms: SendBackTerms, commit: CommitTerms) -> SendBackSink:
        """Return a sink for messages that a group failed to consume. Requires the capability SEND_BACK."""


class ReadBatch(NamedTuple):
    """A batch of matching messages, which may be empty, and the progress of the read.

    Every matching message with a queue offset below `next_offset` is in this batch or an earlier one.
    """

    batch: pa.RecordBatch
    next_offset: int


@dataclass(frozen=True, slots=True)
class Barrier:
    """Why consumer groups must not read a queue.

    `reason` is a text for logs. `error` is for a query that names the queue in `assign`; None if the query has no
    group. If `is_topic`, the whole topic is closed, and a query that names the topic gets the error too.
    """

    reason: str
    error: RmqError | None
    is_topic: bool


class Fence(NamedTuple):
    """The member of a group that owns a queue, and the epoch (number) of its claim to the queue.

    A task with a fence fails if the queue has another owner or epoch when the task begins or ends a range.
    """

    group: str
    member_id: str
    epoch: int


class Backend(Protocol):
    """An open place. The answers of `topics`, `queues` and `bounds` are those of the last `refresh`."""

    @property
    def location(self) -> Location:
        """Where the place is."""

    @property
    def sizes(self) -> "SizeReader | None":
        """The sizes of messages, or None without the capability SIZES."""

    @property
    def size_estimates(self) -> "SizeEstimates | None":
        """The sizes of messages, which may be estimates, or None without the capability SIZE_ESTIMATES."""

    @property
    def keys(self) -> "KeySearch | None":
        """The search by key and id, or None without the capability KEY_SEARCH."""

    def identity(self) -> str | None:
        """Return the id by which tasks detect that they read another place. None if the place has none."""

    def refresh(self) -> bool:
        """Look at the place again. Return whether topics, queues or bounds may have changed. Cheap if they have not."""

    def topics(self) -> list[str]:
        """Return the sorted names of all topics."""

    def queues(self, topics: Collection[str], *, missing_ok: Collection[str] = ()) -> dict[str, list[QueueKey]]:
        """Return the sorted queues of each topic, empty queues included.

        A topic in `missing_ok` is left out if it does not exist. For another one, NotFoundError is raised.
        """

    def wait_for_messages(self, after: Mapping[QueueKey, int], timeout_ms: float) -> bool:
        """Wait for new messages, then look at the place again. Return what `refresh` would return.

        `after` has the queues that the caller reads, each with its max offset as of the last `refresh`. The caller does
        not change the mapping later; the same one again is cheap, whatever the number of queues. Returns after
        `timeout_ms` at the latest. May return False earlier, so the caller calls it again. Requests to brokers may stay
        open between two calls. Other changes than new messages need not end the wait.
        """

    def bounds(self, queues: Collection[QueueKey]) -> Mapping[QueueKey, QueueAnswer]:
        """Return the queue offsets that can be read in each queue, or why they are not known.

        Raises NotFoundError for an unknown queue. A place with the capability BROKERS does not raise it, and answers
        Away or Gone. A place without this capability answers only QueueBounds.
        """

    def offsets_at(self, times_ms: Mapping[QueueKey, int]) -> dict[QueueKey, int]:
        """Return for each queue the offset of the first message stored at or after its time (ms since the epoch).

        If there is none, this is the queue's max offset.
        """

    def positions(self, at: Collection[tuple[QueueKey, int]]) -> dict[tuple[QueueKey, int], RecordProof]:
        """Return physical offset and store time of messages.

        One that has expired, does not exist, or whose broker is away is left out.
        """

    def note_read(self, records: Mapping[tuple[QueueKey, int], RecordProof]) -> None:
        """Note messages that an earlier run, or the driver for a task, has seen, as `positions` returned them.

        They are compared when their brokers answer next, and at the end of a `read` of their queues at the latest. If
        one differs, the broker has another store: `bounds` answers Gone for the queues of its topic on this broker,
        except those whose own message is the same, and `read` raises NotFoundError. An expired message is not compared.
        Requires BROKERS.
        """

    def read(
        self, part: QueueRange, columns: Sequence[str], limits: DecodeLimits, wanted: RowFilter | None
    ) -> Iterator[ReadBatch]:
        """Yield the messages of a range in order, as batches of the `columns` (names in COLUMNS).

        If `wanted` is given, only messages that match it. Batches without rows report progress. All rows that were
        yielded before an error are correct. Raises OffsetRangeError if the queue does not have the whole range.
        """

    def read_together(
        self, parts: Sequence[QueueRange], columns: Sequence[str], limits: DecodeLimits, wanted: RowFilter | None
    ) -> pa.RecordBatch | None:
        """Return the messages of small ranges of one topic in order, or None if `read` must read them one by one."""

    def barriers(
        self, queues: Collection[QueueKey], group: str | None, *, is_broadcasting: bool
    ) -> Mapping[QueueKey, Barrier]:
        """Return those of `queues` that consumer groups must not read.

        If nothing has changed, the same object is returned. Raises NoPermissionError if `group` must not consume.
        """

    def deliver_due(self, now_ms: int) -> int | None:
        """Deliver the delayed messages that are due at `now_ms`, if that is the reader's task in this place.

        Return the time (ms since the epoch) at which the next one is due, or None if nobody has to call again.
        """

    def group(self, terms: "GroupTerms") -> "GroupSession":
        """Return the membership of a query, which begins with `GroupSession.join`. Requires GROUPS."""

    def committed_offsets(self, group: str, queues: Collection[QueueKey]) -> dict[QueueKey, int]:
        """Return the committed offsets of a group in `queues`. May contain more queues. Requires GROUP_OFFSETS."""

    def start_offsets(
        self,
        group: str,
        bounds: Mapping[QueueKey, QueueBounds],
        committed: Mapping[QueueKey, int],
        fallback: str,
        times_ms: Mapping[QueueKey, int],
    ) -> dict[QueueKey, int]:
        """Return where a group starts in each queue: at its committed offset, else where RocketMQ would start.

        `committed` are the committed offsets of the group in all queues of these topics. `fallback` is latest, earliest
        or timestamp; with timestamp `times_ms` has the time of each queue (ms since the epoch), and a queue without one
        starts at its end. Requires GROUP_OFFSETS.
        """

    def check_fence(self, fence: Fence, queue: QueueKey) -> None:
        """Raise GroupConflictError unless the fence's member owns the queue at its epoch. Requires FENCES."""

    def commit_final(self, final: "FinalCommit") -> bool:
        """Commit the offsets of a member whose batch has ended. Return whether they are. Requires GROUPS."""

    def reopen(self) -> None:
        """Forget what is known, after an error. The next call looks at the whole place again."""

    def close(self) -> None:
        """Release everything. A second call does nothing."""


class SizeEstimates(Protocol):
    """The sizes of stored records in bytes, exact or estimated."""

    def measure(self, parts: Collection[QueueRange]) -> dict[QueueRange, int]:
        """Return the size of the records of each range."""

    def fit(self, max_bytes: Mapping[QueueRange, int]) -> dict[QueueRange, int]:
        """Return the end (a queue offset) of the longest prefix of each range whose records have at most that size."""


class SizeReader(SizeEstimates, Protocol):
    """The exact sizes of stored records in bytes, known without reading them."""

    def share_wanted(self, part: QueueRange, wanted: RowFilter, samples: int) -> float:
        """Estimate from samples which share (0 to 1) of the messages of a range passes a filter."""


@dataclass(frozen=True, slots=True)
class SearchAnswer:
    """The result of a search by key or id.

    `found` are the matching messages. These ranges may overlap. A range of several offsets is an inner batch. `unknown`
    are the messages that the caller must read and compare, because the index does not cover them, and `why` has the
    reasons for logs.
    """

    found: list[QueueRange]
    unknown: list[QueueRange]
    why: tuple[str, ...] = ()


class KeySearch(Protocol):
    """A search by key and id."""

    def search(self, parts: Sequence[QueueRange], lookup: KeyLookup) -> SearchAnswer:
        """Return the messages in the ranges, none of which is empty, that have one of the keys or ids."""
