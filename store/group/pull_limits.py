"""The limits of one pull, and how a pull that found no message waits for one.

- `scan` finds out which messages a pull takes, when its batch is full, and how many entries it examines. It works on
  whole columns of consume-queue entries. Source: DefaultMessageStore#getMessage, #isTheBatchFull,
  #checkInDiskByCommitOffset (4.9.8; for entries with several messages 5.3).
- `LongPoll` finds out when a pull that waits must be repeated. Source: PullMessageProcessor#processRequest,
  PullRequestHoldService (4.9.8). A broker checks all waiting pulls together every 5 s. Here each pull has its own
  interval of 5 s, and its wait ends exactly at its timeout.

These functions are pure, except that `limits_of_broker` reads the size of the machine's memory. They get the clock
as an argument.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from rmq_spark.store.argument_checks import check_integer
from rmq_spark.store.disk.host import memory_bytes
from rmq_spark.store.errors import OptionError

CHECK_MS = 5_000  # PullRequestHoldService: the interval of its checks
SHORT_POLLING_MS = 1_000  # shortPollingTimeMills: how long a pull waits, and its check interval, without long polling


def hold_ms(
    timeout_ms: int,
    *,
    is_not_found: bool,
    may_suspend: bool = True,
    asks_to_suspend: bool = True,
    long_polling: bool = True,
) -> int | None:
    """Return for how many ms a pull waits for messages, or None if it does not wait.

    A pull waits only if all three of these arguments are True. `is_not_found` says whether the answer to the pull is
    PULL_NOT_FOUND. `may_suspend` is False if the pull has already waited. `asks_to_suspend` is False if the client does
    not want to wait.
    """
    if not (is_not_found and may_suspend and asks_to_suspend):
        return None
    return timeout_ms if long_polling else SHORT_POLLING_MS


class LongPoll:
    """A pull that waits for messages from the queue offset `offset`.

    It waits from the time `now_ms` for `held_ms`. `max_offset` is the queue's end at the time `now_ms`.
    """

    def __init__(
        self, offset: int, max_offset: int, now_ms: float, held_ms: float, *, long_polling: bool = True
    ) -> None:
        self._offset, self._checked_end, self._long_polling = offset, max_offset, long_polling
        self._check_every_ms = CHECK_MS if long_polling else SHORT_POLLING_MS
        self._next_check_ms = now_ms + self._check_every_ms
        self.until_ms = now_ms + held_ms

    def is_woken(self, max_offset: int, now_ms: float, has_wanted: Callable[[int, int], bool]) -> bool:
        """Say whether the pull must be repeated now.

        `max_offset` is the queue's end at the time `now_ms`. `has_wanted(begin, end)` must return whether the filter
        accepts one of the new messages, which have the queue offsets [begin, end). If it does, the pull is repeated
        at once. If the filter rejects all new messages, the pull is repeated at the next check, so that the client
        continues after these messages.
        """
        if now_ms >= self.until_ms:
            return True
        begin, self._checked_end = max(self._checked_end, self._offset), max(self._checked_end, max_offset)
        if self._long_polling and begin < max_offset and has_wanted(begin, max_offset):
            return True
        if now_ms < self._next_check_ms:
            return False
        while self._next_check_ms <= now_ms:
            self._next_check_ms += self._check_every_ms
        return max_offset > self._offset


UNKNOWN_MEMORY_BYTES = 24 << 30  # the memory that a broker assumes if it cannot read the machine's memory size
MIN_MESSAGE_BYTES = 100  # if a request has a smaller limit, this one is used


@dataclass(frozen=True, slots=True)
class PullLimits:
    """The limits of one pull. The default values are those of a broker.

    The first wanted message is always taken, however large it is. Raises OptionError if a limit is below 1.
    """

    max_bytes_in_memory: int = 262_144  # maxTransferBytesOnMessageInMemory
    max_count_in_memory: int = 32  # maxTransferCountOnMessageInMemory
    max_bytes_on_disk: int = 65_536  # maxTransferBytesOnMessageInDisk
    max_count_on_disk: int = 8  # maxTransferCountOnMessageInDisk
    # accessMessageInMemoryMaxRatio: the newest records, up to this share of `memory_bytes`, are treated as in memory,
    # and older ones as on disk.
    memory_ratio_percent: int = 40
    memory_bytes: int = UNKNOWN_MEMORY_BYTES
    max_scanned_bytes: int = 16_000  # maxFilterMessageCount: the size of the entries examined; 16,000 are 800 entries
    max_message_bytes: int | None = None  # maxMsgBytes of a request of 5.x, or None if there is no such limit

    def __post_init__(self) -> None:
        for one in fields(self):
            value = getattr(self, one.name)
            if value is not None and value <= 0:
                raise OptionError(f"{one.name}: found {value}; expected at least 1.")

    def max_scanned_messages(self, max_messages: int, entry_bytes: int, *, are_batches: bool) -> int:
        """Return how many messages a pull may examine. The last entry that it examines begins within this number.

        `entry_bytes` is the size of an entry. `are_batches` says whether an entry may have several messages, which only
        5.3 has. The release 4.9 stops before the entry that begins at the limit, and 5.3 stops after it.
        """
        limit_bytes = max(self.max_scanned_bytes, max_messages * entry_bytes)
        return limit_bytes // entry_bytes + 1 if are_batches else -(-limit_bytes // entry_bytes)

    def is_on_disk(self, physical_offsets: NDArray[np.int64], log_end: int) -> NDArray[np.bool_]:
        """Say for each record whether it is treated as on disk, because it is too far from the end of the log.

        `physical_offsets` and `log_end` are positions in the log in bytes.
        """
        is_far: NDArray[np.bool_] = log_end - physical_offsets > int(
            self.memory_bytes * (self.memory_ratio_percent / 100.0)
        )
        return is_far


# The name of a setting of MessageStoreConfig in snake case -> the name of the field of PullLimits.
LIMIT_SETTINGS = {
    "max_transfer_bytes_on_message_in_memory": "max_bytes_in_memory",
    "max_transfer_count_on_message_in_memory": "max_count_in_memory",
    "max_transfer_bytes_on_message_in_disk": "max_bytes_on_disk",
    "max_transfer_count_on_message_in_disk": "max_count_on_disk",
    "access_message_in_memory_max_ratio": "memory_ratio_percent",
    "max_filter_message_count": "max_scanned_bytes",
}


def limits_of_broker(**settings: int) -> PullLimits:
    """Return the limits that a broker on this machine would have.

    `settings` change some of them. Their names are those of RocketMQ's settings, in snake case. Raises OptionError if a
    value is not an integer of at least 1.
    """
    found = {LIMIT_SETTINGS[name]: check_integer(name, value, 1) for name, value in settings.items()}
    return PullLimits(memory_bytes=memory_bytes() or UNKNOWN_MEMORY_BYTES, **found)


@dataclass(frozen=True, slots=True)
class Candidates:
    """The entries of a queue that a scan examines, as columns: arrays of the same length, in the order of the queue."""

    physical_offsets: NDArray[np.int64]
    sizes: NDArray[np.int64]  # the sizes of the records in bytes
    are_wanted: NDArray[np.bool_]  # whether the filter accepts the message
    are_gone: NDArray[np.bool_]  # whether the segment with the record does not exist any more
    message_counts: NDArray[np.int64] | None = None  # messages in each record; None means one in each

    def __len__(self) -> int:
        return len(self.sizes)


@dataclass(frozen=True, slots=True)
class Scan:
    """The result of a scan.

    The scan went through the first `scanned` entries. `found` are the indexes of the entries that the pull takes.
    `was_removed` says whether the message of the last examined entry was wanted but is gone. It matters only if nothing
    was found.
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
    """Return which entries a pull takes until its batch is full.

    If the message of a wanted entry is gone, the scan skips the later entries of the same segment. They are counted in
    `Scan.scanned`, but not examined. As in a broker, each entry is first tested for whether it would overfill the
    batch, and only then filtered. So an entry that is not wanted can end the scan by its size.
    """
    physical_offsets, sizes, counts = candidates.physical_offsets, candidates.sizes, candidates.message_counts
    counts = np.ones(len(sizes), np.int64) if counts is None else counts
    missed = np.flatnonzero(candidates.are_wanted & candidates.are_gone)
    is_skipped = np.zeros(len(sizes), np.bool_)
    if len(missed):
        segments = physical_offsets // segment_bytes
        lost, firsts = np.unique(segments[missed], return_index=True)
        at = np.minimum(np.searchsorted(lost, segments), len(lost) - 1)
        is_skipped = (lost[at] == segments) & (np.arange(len(sizes)) > missed[firsts][at])
    is_taken = candidates.are_wanted & ~candidates.are_gone
    bytes_before, count_before = _sum_before(sizes, is_taken), _sum_before(counts, is_taken)
    is_full = _is_full(bytes_before, count_before, sizes, counts, max_messages, limits, physical_offsets, log_end)
    full = np.flatnonzero(is_full & ~is_skipped)
    scanned = int(full[0]) if len(full) else len(sizes)
    examined = np.flatnonzero(~is_skipped[:scanned])
    was_removed = bool(len(examined)) and bool((candidates.are_wanted & candidates.are_gone)[examined[-1]])
    return Scan(scanned, np.flatnonzero(is_taken[:scanned]), was_removed)


def _sum_before(values: NDArray[np.int64], is_counted: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Return for each element the sum of those earlier elements for which `is_counted` is True."""
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
    physical_offsets: NDArray[np.int64],
    log_end: int,
) -> NDArray[np.bool_]:
    on_disk = limits.is_on_disk(physical_offsets, log_end)
    max_bytes = np.where(on_disk, limits.max_bytes_on_disk, limits.max_bytes_in_memory)
    if limits.max_message_bytes is not None:
        max_bytes = np.minimum(max_bytes, max(limits.max_message_bytes, MIN_MESSAGE_BYTES))
    max_count = np.where(on_disk, limits.max_count_on_disk, limits.max_count_in_memory)
    full: NDArray[np.bool_] = (count_before > 0) & (
        (count_before + counts > max_messages) | (bytes_before + sizes > max_bytes) | (count_before >= max_count)
    )
    return full
