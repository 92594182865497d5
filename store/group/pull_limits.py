"""How much one pull takes: when the batch is full, and after how many units it stops looking for wanted messages.

Pure, over whole columns of units, but for the machine's memory, which a broker asks for. Source:
DefaultMessageStore#getMessage, #isTheBatchFull, #checkInDiskByCommitOffset (4.9.8), and for units that hold several
messages the same of 5.3.
"""

from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from rmq_spark.store.disk.host import memory_bytes
from rmq_spark.store.errors import OptionError
from rmq_spark.store.group.whole_number import check_whole

UNKNOWN_MEMORY_BYTES = 24 << 30  # what a broker takes for the machine's memory where nobody tells it
MIN_MESSAGE_BYTES = 100  # a request for less gets as much


@dataclass(frozen=True, slots=True)
class PullLimits:
    """The limits of one pull, by default those of a broker. The first wanted message is taken whatever its size.

    Raises OptionError for a limit that is not above 0.
    """

    max_bytes_in_memory: int = 262_144  # maxTransferBytesOnMessageInMemory
    max_count_in_memory: int = 32  # maxTransferCountOnMessageInMemory
    max_bytes_on_disk: int = 65_536  # maxTransferBytesOnMessageInDisk
    max_count_on_disk: int = 8  # maxTransferCountOnMessageInDisk
    memory_ratio_percent: int = 40  # accessMessageInMemoryMaxRatio: what lies further behind is "on disk"
    memory_bytes: int = UNKNOWN_MEMORY_BYTES
    max_scanned_bytes: int = 16_000  # maxFilterMessageCount, which counts bytes of units: 800 of them
    max_message_bytes: int | None = None  # maxMsgBytes of a 5.x request; None: no such limit

    def __post_init__(self) -> None:
        for one in fields(self):
            value = getattr(self, one.name)
            if value is not None and value <= 0:
                raise OptionError(f"{one.name}={value} is not above 0.")

    def max_scanned_messages(self, max_messages: int, unit_bytes: int, *, are_batches: bool) -> int:
        """Return how many messages from the first on are looked at; of units with several, where the last begins.

        4.9 ends before the byte at the limit, 5.3, which alone has batches, behind it.
        """
        limit_bytes = max(self.max_scanned_bytes, max_messages * unit_bytes)
        return limit_bytes // unit_bytes + 1 if are_batches else -(-limit_bytes // unit_bytes)

    def is_on_disk(self, physical_offsets: NDArray[np.int64], log_end: int) -> NDArray[np.bool_]:
        """Say of each record whether it lies so far behind the log's end that it is hardly in memory."""
        behind: NDArray[np.bool_] = log_end - physical_offsets > int(
            self.memory_bytes * (self.memory_ratio_percent / 100.0)
        )
        return behind


# A broker's setting (MessageStoreConfig), in snake case -> our name for it.
_SETTINGS = {
    "max_transfer_bytes_on_message_in_memory": "max_bytes_in_memory",
    "max_transfer_count_on_message_in_memory": "max_count_in_memory",
    "max_transfer_bytes_on_message_in_disk": "max_bytes_on_disk",
    "max_transfer_count_on_message_in_disk": "max_count_on_disk",
    "access_message_in_memory_max_ratio": "memory_ratio_percent",
    "max_filter_message_count": "max_scanned_bytes",
}


def limits_of_broker(**settings: int) -> PullLimits:
    """Return the limits of a broker on this machine with these settings, whose names are RocketMQ's in snake case.

    Raises OptionError, by those names, for what is no whole number above 0.
    """
    found = {_SETTINGS[name]: check_whole(name, value, 1) for name, value in settings.items()}
    return PullLimits(memory_bytes=memory_bytes() or UNKNOWN_MEMORY_BYTES, **found)


@dataclass(frozen=True, slots=True)
class Candidates:
    """Units of a queue in order, as arrays of one length, and what is known of each."""

    physical_offsets: NDArray[np.int64]
    sizes: NDArray[np.int64]  # of the records, bytes
    are_wanted: NDArray[np.bool_]  # by the filter
    are_gone: NDArray[np.bool_]  # their segment is not there
    message_counts: NDArray[np.int64] | None = None  # None: one message a record

    def __len__(self) -> int:
        return len(self.sizes)


@dataclass(frozen=True, slots=True)
class Scan:
    """What a pull took: units [0, scanned) were looked at, `found` are the numbers of those whose message it gets.

    `was_removed` says that the last of them, had nothing been found, was wanted and its message gone.
    """

    scanned: int
    found: NDArray[np.intp]
    was_removed: bool


def scan(
    candidates: Candidates,
    max_messages: int,
    limits: PullLimits,
    *,
    log_end: int,
    segment_bytes: int,
) -> Scan:
    """Go over the units up to where the batch is full, in one pass over the columns.

    A unit whose message is wanted and gone ends the search in its segment: those after it in there are counted and
    not looked at. The test for a full batch comes before the filter, with the size of a unit that may not be wanted.
    """
    places, sizes, counts = candidates.physical_offsets, candidates.sizes, candidates.message_counts
    counts = np.ones(len(sizes), np.int64) if counts is None else counts
    missed = np.flatnonzero(candidates.are_wanted & candidates.are_gone)
    is_passed = np.zeros(len(sizes), np.bool_)
    if len(missed):
        segments = places // segment_bytes
        lost, firsts = np.unique(segments[missed], return_index=True)
        at = np.minimum(np.searchsorted(lost, segments), len(lost) - 1)
        is_passed = (lost[at] == segments) & (np.arange(len(sizes)) > missed[firsts][at])
    is_taken = candidates.are_wanted & ~candidates.are_gone
    bytes_before, count_before = _sum_before(sizes, is_taken), _sum_before(counts, is_taken)
    is_full = _is_full(bytes_before, count_before, sizes, counts, max_messages, limits, places, log_end)
    full = np.flatnonzero(is_full & ~is_passed)
    scanned = int(full[0]) if len(full) else len(sizes)
    looked_at = np.flatnonzero(~is_passed[:scanned])
    was_removed = bool(len(looked_at)) and bool((candidates.are_wanted & candidates.are_gone)[looked_at[-1]])
    return Scan(scanned, np.flatnonzero(is_taken[:scanned]), was_removed)


def _sum_before(values: NDArray[np.int64], is_counted: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Return for each element the sum of the counted ones before it."""
    counted = np.where(is_counted, values, 0)
    total: NDArray[np.int64] = np.cumsum(counted) - counted
    return total


def _is_full(
    bytes_before: NDArray[np.int64],
    count_before: NDArray[np.int64],
    sizes: NDArray[np.int64],
    counts: NDArray[np.int64],
    max_messages: int,
    limits: PullLimits,
    places: NDArray[np.int64],
    log_end: int,
) -> NDArray[np.bool_]:
    on_disk = limits.is_on_disk(places, log_end)
    max_bytes = np.where(on_disk, limits.max_bytes_on_disk, limits.max_bytes_in_memory)
    if limits.max_message_bytes is not None:
        max_bytes = np.minimum(max_bytes, max(limits.max_message_bytes, MIN_MESSAGE_BYTES))
    max_count = np.where(on_disk, limits.max_count_on_disk, limits.max_count_in_memory)
    full: NDArray[np.bool_] = (count_before > 0) & (
        (count_before + counts > max_messages) | (bytes_before + sizes > max_bytes) | (count_before >= max_count)
    )
    return full
