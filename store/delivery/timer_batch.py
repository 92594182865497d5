"""Units that are due -> records to be appended: delivered to their queues, or put back into the timer's.

What cannot be delivered is passed over and told in the log: it stays in the queue that it waited in, and nothing waits
behind it. Source: TimerMessageStore#dequeue, TimerDequeueGetMessageService, #doPut (5.3); RocketMQ tries what has no
REAL_TOPIC again for ever.
"""

import logging

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from rmq_spark.store.delivery.originals import read_originals
from rmq_spark.store.delivery.timer_chains import ChainedUnits
from rmq_spark.store.delivery.timer_doubt import are_delivered
from rmq_spark.store.delivery.timer_mark import Doubt
from rmq_spark.store.errors import OptionError
from rmq_spark.store.format.encoding import EncodedRecords
from rmq_spark.store.format.filenames import TIMER_TOPIC, WAITING_TOPICS, check_topic_name
from rmq_spark.store.format.message_columns import Texts, Topics
from rmq_spark.store.format.rebuilt_records import rebuild_records
from rmq_spark.store.format.record import BLANK_BYTES
from rmq_spark.store.format.timer_log import DELETE, ROLL
from rmq_spark.store.format.timer_properties import TimerRequests
from rmq_spark.store.format.timer_wheel import SECOND_MS
from rmq_spark.store.format.whole_records import WholeRecords
from rmq_spark.store.log.commit_log import CommitLog
from rmq_spark.store.units import QueueKey

_LOG = logging.getLogger("rmq_spark")
_MAX_QUEUE_ID = 2**31 - 1
_WIDER_BYTES = 1  # that the length of a long topic takes more


def make_batch(
    root: str,
    log: CommitLog,
    deletions: ChainedUnits,
    units: ChainedUnits,
    doubt: Doubt,
    now_ms: int,
    *,
    puts_back: bool = False,
) -> EncodedRecords | None:
    """Return the records of `units`, in their order; None where none is left.

    Without those that `deletions` take back, that were delivered before, or that go nowhere. With `puts_back` the
    others go into the timer's queue again, whether they are due or not.
    """
    magics = units.units["magic"]
    units = units.chosen(((magics & DELETE) == 0) | ((magics & ROLL) != 0))
    if not len(units):
        return None
    due = _Due.read(log, units)
    due.drop(due.are_of_others, "wait elsewhere, or for a later second than their units: those of the units are lost")
    due.drop(due.queue_ids < 0, "have no REAL_TOPIC and REAL_QID that a message could go to")
    due.drop_deleted(_deleted_keys(log, deletions))
    if len(due) and doubt.covers(int(due.units.times.min())):
        first_ms = np.minimum(due.requests.out_ms, due.units.times)
        due.drop(are_delivered(root, log, doubt, due.records, due.places, due.targets(), first_ms))
    if not len(due):
        return None
    if puts_back:
        due.put_back()
    texts = due.requests.delivered_texts(due.units.units["write_time"].astype(np.int64), due.rolling, now_ms)
    texts, fits = due.fitting(texts, log.segments.size - BLANK_BYTES)
    due.drop(~fits, "are too large for a segment in the queue that they are for")
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


def as_rolling_deletions(units: ChainedUnits) -> tuple[ChainedUnits, ChainedUnits]:
    """Return no unit, and those of some that take others back in their second, as units to be put into the queue."""
    magics = units.units["magic"]
    chosen = units.chosen(((magics & DELETE) != 0) & ((magics & ROLL) == 0))
    rolling = chosen.units.copy()
    rolling["magic"] |= ROLL
    return chosen.chosen(slice(0, 0)), ChainedUnits(chosen.times, chosen.positions, rolling)


class _Due:
    """Messages that are due, of which fewer and fewer are left."""

    def __init__(
        self,
        units: ChainedUnits,
        records: WholeRecords,
        requests: TimerRequests,
        names: tuple[str, ...],
        topic_numbers: NDArray[np.int64],
        queue_ids: NDArray[np.int64],
    ) -> None:
        self.units, self.records, self.requests = units, records, requests
        self.names, self.topic_numbers, self.queue_ids = names, topic_numbers, queue_ids

    @classmethod
    def read(cls, log: CommitLog, units: ChainedUnits) -> "_Due":
        """Read the messages of the units. Those without a queue to go to have queue id -1."""
        places = units.units["physical_offset"].astype(np.int64)
        found = read_originals(log, places, units.units["record_size"].astype(np.int64))
        whole = found.is_whole
        _tell(places[~whole], "have expired, or cannot be read")
        units = units.chosen(whole)
        records = WholeRecords.of(found.data, found.positions[whole], found.ends[whole])
        requests = TimerRequests.of(records)
        names, numbers, are_topics = _topics(requests.topics)
        rolling = (units.units["magic"] & ROLL) != 0
        numbers[rolling] = len(names) - 1
        queue_ids = np.where(are_topics[numbers] & (requests.queue_ids <= _MAX_QUEUE_ID), requests.queue_ids, -1)
        queue_ids[rolling] = 0
        queue_ids[requests.are_deletions & ~rolling] = -1  # delivered to nobody
        return cls(units, records, requests, names, numbers, queue_ids)

    def __len__(self) -> int:
        return len(self.units)

    @property
    def places(self) -> NDArray[np.int64]:
        """Where the messages lie."""
        return self.units.units["physical_offset"].astype(np.int64)

    @property
    def rolling(self) -> NDArray[np.bool_]:
        """Which of them are put back."""
        rolling: NDArray[np.bool_] = (self.units.units["magic"] & ROLL) != 0
        return rolling

    def put_back(self) -> None:
        """Have all of them go into the timer's queue again."""
        units = self.units.units.copy()
        units["magic"] |= ROLL
        self.units = ChainedUnits(self.units.times, self.units.positions, units)
        self.topic_numbers = np.full(len(self), len(self.names) - 1)
        self.queue_ids = np.zeros(len(self), np.int64)

    @property
    def are_of_others(self) -> NDArray[np.bool_]:
        """Say of each whether its unit was made of another message, which lay at the same place and was lost."""
        second_ms = self.requests.out_ms // SECOND_MS * SECOND_MS
        is_later = ~self.rolling & (second_ms > self.units.times)
        return is_later | ~self.records.are_of(TIMER_TOPIC, 0)

    def targets(self) -> list[QueueKey | None]:
        """Return the queue that each goes to."""
        made: dict[tuple[int, int], QueueKey] = {}
        for code in set(zip(self.topic_numbers.tolist(), self.queue_ids.tolist(), strict=True)):
            made[code] = QueueKey(self.names[code[0]], code[1])
        codes = zip(self.topic_numbers.tolist(), self.queue_ids.tolist(), strict=True)
        return [made[code] for code in codes]

    def drop(self, gone: NDArray[np.bool_], why: str | None = None) -> None:
        """Leave those out; `why` is told."""
        if not gone.any():
            return
        if why is not None:
            _tell(self.places[gone], why)
        kept, mask = ~gone, pa.array(~gone)
        records, requests = self.records, self.requests
        self.units = self.units.chosen(kept)
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
        """Leave out what was taken back, by `second+topic+UNIQ_KEY` (5.3.2 and later) or `second+UNIQ_KEY` (before)."""
        if not len(keys) or not len(self):
            return
        seconds = _seconds(self.requests.out_ms)
        plus, unique = pa.scalar("+"), self.requests.unique_keys
        bare = pc.binary_join_element_wise(seconds, unique, plus)
        whole = pc.binary_join_element_wise(seconds, self.requests.topics, unique, plus)
        gone = pc.or_(pc.is_in(bare, keys), pc.is_in(whole, keys)).to_numpy(zero_copy_only=False)
        self.drop(gone & ~self.rolling)

    def fitting(self, texts: pa.BinaryArray, max_bytes: int) -> tuple[pa.BinaryArray, NDArray[np.bool_]]:
        """Return texts with which the records fit into a segment, the old ones where need be; and which then do."""
        topic_bytes = np.array([len(name.encode()) + _WIDER_BYTES for name in self.names])[self.topic_numbers]
        rest = self.records.body_ends - self.records.positions + topic_bytes + 4
        fits = rest + Texts.of(texts).sizes <= max_bytes
        if fits.all():
            return texts, fits
        texts = pc.if_else(pa.array(fits), texts, self.requests.texts)
        return texts, rest + Texts.of(texts).sizes <= max_bytes


def _topics(column: pa.StringArray) -> tuple[tuple[str, ...], NDArray[np.int64], NDArray[np.bool_]]:
    """Return distinct topics, the timer's last, the number of each row's; and which of them messages may go to."""
    encoded = column.dictionary_encode()
    names = (*encoded.dictionary.to_pylist(), TIMER_TOPIC)
    numbers = pc.fill_null(encoded.indices, len(names) - 1).to_numpy(zero_copy_only=False).astype(np.int64)
    return names, numbers, np.array([_is_target(name) for name in names])


def _is_target(name: str) -> bool:
    try:
        return check_topic_name(name) not in WAITING_TOPICS
    except OptionError:
        return False


def _deleted_keys(log: CommitLog, deletions: ChainedUnits) -> pa.StringArray:
    """Return what is taken back: `second+` and the value of TIMER_DEL_UNIQKEY."""
    if not len(deletions):
        return pa.array([], pa.string())
    places, sizes = deletions.units["physical_offset"], deletions.units["record_size"]
    found = read_originals(log, places.astype(np.int64), sizes.astype(np.int64))
    whole = found.is_whole
    requests = TimerRequests.of(WholeRecords.of(found.data, found.positions[whole], found.ends[whole]))
    return pc.binary_join_element_wise(_seconds(requests.out_ms), requests.deleted_keys, pa.scalar("+")).drop_null()


def _seconds(out_ms: NDArray[np.int64]) -> pa.StringArray:
    return pa.array(out_ms // SECOND_MS).cast(pa.string())


def _tell(places: NDArray[np.int64], what: str) -> None:
    if len(places):
        _LOG.warning(
            "rmq: %d messages of %s that are due %s, the first of them at physical offset %d",
            len(places),
            TIMER_TOPIC,
            what,
            places[0],
        )
