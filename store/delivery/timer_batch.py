"""Records for timer messages that are due: they go to the messages' own queues, or back into the timer's queue.

A message that cannot be delivered is skipped and logged. It stays in the timer's queue, and no other message is delayed
by it. (RocketMQ tries to deliver a message without REAL_TOPIC again for ever.) Source: TimerMessageStore#dequeue,
TimerDequeueGetMessageService, #doPut (5.3).

If a broker has used the store, it may have delivered some messages that seem due, without recording that. So this
module looks for their copies in the queues to which they go. A copy has the UNIQ_KEY, the born time, the CRC and the
due time of its original, and a higher physical offset. A copy is stored at least a second after its message was due, so
only the end of the queue has to be searched.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from rmq_spark.store.delivery.record_lookup import read_originals
from rmq_spark.store.delivery.timer_state import ChainedEntries, UncertainWindow
from rmq_spark.store.disk import files
from rmq_spark.store.disk.kernel_errors import is_unreadable
from rmq_spark.store.errors import DamageError, OptionError, StorePathError
from rmq_spark.store.format import file_names as filenames
from rmq_spark.store.format.message_columns import Texts, Topics
from rmq_spark.store.format.message_encoder import EncodedRecords
from rmq_spark.store.format.properties import UNIQ_KEY
from rmq_spark.store.format.record import BLANK_BYTES
from rmq_spark.store.format.record_batch import WholeRecords
from rmq_spark.store.format.record_rewrite import rebuild_records
from rmq_spark.store.format.timer import DELETE, ROLL, SECOND_MS, TIMER_OUT_MS, TimerRequests
from rmq_spark.store.log.commit_log import CommitLog
from rmq_spark.store.log.consume_queue import ConsumeQueue
from rmq_spark.store.log.queue_reader import LOWER, TimeSearch
from rmq_spark.store.model import QueueKey
from rmq_spark.store.names import TIMER_TOPIC, WAITING_TOPICS, check_topic_name

_LOG = logging.getLogger("rmq_spark")
_BATCH_ENTRIES = 32_768
_MAX_QUEUE_ID = 2**31 - 1
_WIDER_BYTES = 1  # the length field of a long topic takes this many more bytes
_Identity = tuple[object, ...]


def make_batch(
    root: str,
    log: CommitLog,
    deletions: ChainedEntries,
    chained: ChainedEntries,
    doubt: UncertainWindow,
    now_ms: int,
    *,
    puts_back: bool = False,
) -> EncodedRecords | None:
    """Return the records that deliver the messages of the entries `chained`, in their order, or None if none is left.

    Leaves out messages that the entries `deletions` delete, messages that a broker delivered before (within `doubt`),
    and messages that cannot be delivered. The rest is delivered if it is due at `now_ms`, and else goes back into the
    timer's queue. With `puts_back` all of the rest goes back into that queue, even what is due.
    """
    magics = chained.entries["magic"]
    chained = chained.chosen(((magics & DELETE) == 0) | ((magics & ROLL) != 0))
    if not len(chained):
        return None
    due = _Due.read(log, chained)
    due.drop(due.are_of_others, "wait elsewhere, or for a later second than the entries, whose messages are lost")
    due.drop(due.queue_ids < 0, "have no valid REAL_TOPIC and REAL_QID")
    due.drop_deleted(_deleted_keys(log, deletions))
    if len(due) and doubt.covers(int(due.chained.times.min())):
        first_ms = np.minimum(due.requests.out_ms, due.chained.times)
        due.drop(_are_delivered(root, log, doubt, due.records, due.physical_offsets, due.targets(), first_ms))
    if not len(due):
        return None
    if puts_back:
        due.put_back()
    texts = due.requests.delivered_texts(due.chained.entries["write_time"].astype(np.int64), due.rolling, now_ms)
    texts, fits = due.fitting(texts, log.segments.size - BLANK_BYTES)
    due.drop(~fits, "are longer than a segment in the queue to which they go")
    if not len(due):
        return None
    return rebuild_records(
        due.records.data,
        due.records.positions,
        due.records.ends,
        topics=Topics(due.names, due.topic_numbers),
        queue_ids=due.queue_ids,
        properties=texts.filter(pa.array(fits)),
    )


def as_rolling_deletions(chained: ChainedEntries) -> tuple[ChainedEntries, ChainedEntries]:
    """Return (no entries, the entries of `chained` that delete others, marked to be put back into the timer's queue).

    These are the arguments `deletions` and `chained` of `make_batch`.
    """
    magics = chained.entries["magic"]
    chosen = chained.chosen(((magics & DELETE) != 0) & ((magics & ROLL) == 0))
    rolling = chosen.entries.copy()
    rolling["magic"] |= ROLL
    return chosen.chosen(slice(0, 0)), ChainedEntries(chosen.times, chosen.positions, rolling)


@dataclass(slots=True)
class _Due:
    """The messages of one batch, as arrays of equal length. `drop` removes some messages from all arrays."""

    chained: ChainedEntries
    records: WholeRecords
    requests: TimerRequests
    names: tuple[str, ...]  # names of topics; the last one is the timer's topic
    topic_numbers: NDArray[np.int64]  # for each message, the index of its target topic in `names`
    queue_ids: NDArray[np.int64]  # of the target queues; -1 if the message cannot be delivered

    @classmethod
    def read(cls, log: CommitLog, chained: ChainedEntries) -> "_Due":
        """Read the messages of the entries from the log, and find the queues to which they go.

        Entries whose records have expired or cannot be read are left out and logged.
        """
        physical_offsets = chained.entries["physical_offset"].astype(np.int64)
        found = read_originals(log, physical_offsets, chained.entries["record_size"].astype(np.int64))
        whole = found.is_whole
        _log_dropped(physical_offsets[~whole], "have expired or cannot be read")
        chained = chained.chosen(whole)
        records = WholeRecords.of(found.data, found.positions[whole], found.ends[whole])
        requests = TimerRequests.of(records)
        encoded = requests.topics.dictionary_encode()
        names = (*encoded.dictionary.to_pylist(), TIMER_TOPIC)
        numbers = pc.fill_null(encoded.indices, len(names) - 1).to_numpy(zero_copy_only=False).astype(np.int64)
        are_targets = np.array([_is_target(name) for name in names])
        rolling = (chained.entries["magic"] & ROLL) != 0
        numbers[rolling] = len(names) - 1
        queue_ids = np.where(are_targets[numbers] & (requests.queue_ids <= _MAX_QUEUE_ID), requests.queue_ids, -1)
        queue_ids[rolling] = 0
        queue_ids[requests.are_deletions & ~rolling] = -1  # a message that only deletes another goes to no consumer
        return cls(chained, records, requests, names, numbers, queue_ids)

    def __len__(self) -> int:
        return len(self.chained)

    @property
    def physical_offsets(self) -> NDArray[np.int64]:
        """The physical offsets of the messages in the commit log."""
        return self.chained.entries["physical_offset"].astype(np.int64)

    @property
    def rolling(self) -> NDArray[np.bool_]:
        """For each message: whether it is put back into the timer's queue."""
        rolling: NDArray[np.bool_] = (self.chained.entries["magic"] & ROLL) != 0
        return rolling

    def put_back(self) -> None:
        """Make all messages go back into the timer's queue."""
        entries = self.chained.entries.copy()
        entries["magic"] |= ROLL
        self.chained = ChainedEntries(self.chained.times, self.chained.positions, entries)
        self.topic_numbers = np.full(len(self), len(self.names) - 1)
        self.queue_ids = np.zeros(len(self), np.int64)

    @property
    def are_of_others(self) -> NDArray[np.bool_]:
        """For each entry: whether it was made for another message, which had the same physical offset and was lost."""
        second_ms = self.requests.out_ms // SECOND_MS * SECOND_MS
        is_later = ~self.rolling & (second_ms > self.chained.times)
        return is_later | ~self.records.are_of(TIMER_TOPIC, 0)

    def targets(self) -> list[QueueKey | None]:
        """Return the queue to which each message goes."""
        codes = list(zip(self.topic_numbers.tolist(), self.queue_ids.tolist(), strict=True))
        keys = {code: QueueKey(self.names[code[0]], code[1]) for code in set(codes)}
        return [keys[code] for code in codes]

    def drop(self, dropped: NDArray[np.bool_], reason: str | None = None) -> None:
        """Leave out the messages for which `dropped` is True, and log the `reason` if there is one."""
        if not dropped.any():
            return
        if reason is not None:
            _log_dropped(self.physical_offsets[dropped], reason)
        kept, mask = ~dropped, pa.array(~dropped)
        records, requests = self.records, self.requests
        self.chained = self.chained.chosen(kept)
        self.records = WholeRecords.of(records.data, records.positions[kept], records.ends[kept])
        self.requests = TimerRequests(
            requests.texts.filter(mask),
            requests.out_ms[kept],
            requests.topics.filter(mask),
            requests.queue_ids[kept],
            requests.unique_keys.filter(mask),
            requests.deleted_keys.filter(mask),
            requests.rolls[kept],
        )
        self.topic_numbers, self.queue_ids = self.topic_numbers[kept], self.queue_ids[kept]

    def drop_deleted(self, keys: pa.StringArray) -> None:
        """Leave out messages that were deleted.

        `keys` identify deleted messages, as `second+topic+UNIQ_KEY` (5.3.2 and later) or `second+UNIQ_KEY` (earlier).
        """
        if not len(keys) or not len(self):
            return
        seconds = _seconds(self.requests.out_ms)
        plus, unique = pa.scalar("+"), self.requests.unique_keys
        short = pc.binary_join_element_wise(seconds, unique, plus)
        full = pc.binary_join_element_wise(seconds, self.requests.topics, unique, plus)
        deleted = pc.or_(pc.is_in(short, keys), pc.is_in(full, keys)).to_numpy(zero_copy_only=False)
        self.drop(deleted & ~self.rolling)

    def fitting(self, texts: pa.BinaryArray, max_bytes: int) -> tuple[pa.BinaryArray, NDArray[np.bool_]]:
        """Return (properties, whether each record fits into `max_bytes`).

        If a record would be too long with the new properties `texts`, it keeps its old ones.
        """
        topic_bytes = np.array([len(name.encode()) + _WIDER_BYTES for name in self.names])[self.topic_numbers]
        rest = self.records.body_ends - self.records.positions + topic_bytes + 4
        fits = rest + Texts.of(texts).sizes <= max_bytes
        if fits.all():
            return texts, fits
        texts = pc.if_else(pa.array(fits), texts, self.requests.texts)
        return texts, rest + Texts.of(texts).sizes <= max_bytes


def _is_target(name: str) -> bool:
    """Return whether messages can be delivered to a topic."""
    try:
        return check_topic_name(name) not in WAITING_TOPICS
    except OptionError:
        return False


def _deleted_keys(log: CommitLog, deletions: ChainedEntries) -> pa.StringArray:
    """Return the keys of the messages that `deletions` delete: the second, "+" and the value of TIMER_DEL_UNIQKEY."""
    if not len(deletions):
        return pa.array([], pa.string())
    physical_offsets, sizes = deletions.entries["physical_offset"], deletions.entries["record_size"]
    found = read_originals(log, physical_offsets.astype(np.int64), sizes.astype(np.int64))
    whole = found.is_whole
    requests = TimerRequests.of(WholeRecords.of(found.data, found.positions[whole], found.ends[whole]))
    return pc.binary_join_element_wise(_seconds(requests.out_ms), requests.deleted_keys, pa.scalar("+")).drop_null()


def _seconds(out_ms: NDArray[np.int64]) -> pa.StringArray:
    return pa.array(out_ms // SECOND_MS).cast(pa.string())


def _log_dropped(physical_offsets: NDArray[np.int64], reason: str) -> None:
    if len(physical_offsets):
        _LOG.warning(
            "rmq: %d due messages of %s are not delivered: they %s; the first one is at physical offset %d",
            len(physical_offsets),
            TIMER_TOPIC,
            reason,
            physical_offsets[0],
        )


def _are_delivered(
    root: str,
    log: CommitLog,
    doubt: UncertainWindow,
    records: WholeRecords,
    physical_offsets: NDArray[np.int64],
    targets: Sequence[QueueKey | None],
    due_ms: NDArray[np.int64],
) -> NDArray[np.bool_]:
    """Return, for each record, whether a copy of it is in the queue to which it goes, within the window `doubt`.

    `targets` are these queues; None means that a record goes to no queue. `due_ms` is the earliest time at which each
    record may have been due.
    """
    found = np.zeros(len(records), np.bool_)
    rows_of: dict[QueueKey, list[int]] = {}
    for row, key in enumerate(targets):
        if key is not None and doubt.covers(int(due_ms[row])):
            rows_of.setdefault(key, []).append(row)
    if not rows_of:
        return found
    identities = _identities(records)
    for key, rows in rows_of.items():
        copies = _copies(root, log, key, int(due_ms[rows].min()) + SECOND_MS, doubt.end)
        for row in rows:
            found[row] = any(copy > physical_offsets[row] for copy in copies.get(identities[row], ()))
    return found


def _copies(root: str, log: CommitLog, key: QueueKey, from_ms: int, end: int) -> dict[_Identity, list[int]]:
    """Return, by identity, the physical offsets of messages that were stored in the queue at `from_ms` or later.

    Only messages below the physical offset `end` are read.
    """
    found: dict[_Identity, list[int]] = {}
    queue = ConsumeQueue(key, files.join(root, filenames.queue_folder(key.topic, key.queue_id)))
    try:
        if not queue.run.segments:
            return found
        last = queue.first_from(end, queue.search_written_end())
        first = TimeSearch(log, queue, queue.first_from(log.segments.begin, last), last).unit_at(from_ms, LOWER)
        while first < last:
            entries = queue.read(first, min(first + _BATCH_ENTRIES, last))
            if not len(entries):
                break
            originals = read_originals(log, entries.physical_offsets, entries.sizes)
            whole = originals.is_whole
            records = WholeRecords.of(originals.data, originals.positions[whole], originals.ends[whole])
            if len(records):
                offsets = entries.physical_offsets[whole].tolist()
                for identity, physical_offset in zip(_identities(records), offsets, strict=True):
                    found.setdefault(identity, []).append(physical_offset)
            first += len(entries)
    except (DamageError, StorePathError) as error:
        if is_unreadable(error):
            raise  # a later round may be able to read the queue, and the messages wait until then
        # A damaged queue does not prove that messages were delivered. Deliver them, maybe a second time.
        return found
    finally:
        queue.run.close()
    return found


def _identities(records: WholeRecords) -> list[_Identity]:
    pairs = records.pairs()
    columns: list[list[object]] = [
        pairs.column(UNIQ_KEY).to_pylist(),
        pairs.column(TIMER_OUT_MS).to_pylist(),
        records.field("born_timestamp").tolist(),
        records.field("body_crc").tolist(),
    ]
    return list(zip(*columns, strict=True))
